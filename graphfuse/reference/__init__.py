"""One plain-PyTorch definition per op: what tests, benchmarks and documentation compare with."""

from graphfuse.reference.additive import gat_attention as gat_attention
from graphfuse.reference.additive import gat_attention_weights as gat_attention_weights
from graphfuse.reference.additive import gatv2_attention as gatv2_attention
from graphfuse.reference.additive import gatv2_attention_weights as gatv2_attention_weights
from graphfuse.reference.attention import attention_weights as attention_weights
from graphfuse.reference.attention import sparse_attention as sparse_attention
from graphfuse.reference.gate import gated_skip as gated_skip
from graphfuse.reference.graph_transformer import GraphTransformerLayer as GraphTransformerLayer
from graphfuse.reference.spmm import sddmm as sddmm
from graphfuse.reference.spmm import spmm as spmm
from graphfuse.reference.spmm import spmm_gemm as spmm_gemm
