"""One plain-PyTorch definition per op: what tests, benchmarks and documentation compare with."""

from graphfuse.reference.attention import sparse_attention as sparse_attention
from graphfuse.reference.spmm import sddmm as sddmm
from graphfuse.reference.spmm import spmm as spmm
from graphfuse.reference.spmm import spmm_gemm as spmm_gemm
