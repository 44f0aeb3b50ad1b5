"""Differentiable graph operations on :class:`graphfuse.RowWindows`."""

from graphfuse.ops import _flops as _flops
from graphfuse.ops.additive import gat_attention as gat_attention
from graphfuse.ops.additive import gatv2_attention as gatv2_attention
from graphfuse.ops.additive_weights import gat_attention_weights as gat_attention_weights
from graphfuse.ops.additive_weights import gatv2_attention_weights as gatv2_attention_weights
from graphfuse.ops.attention import sparse_attention as sparse_attention
from graphfuse.ops.attention_weights import attention_weights as attention_weights
from graphfuse.ops.gate import gated_skip as gated_skip
from graphfuse.ops.sddmm import sddmm as sddmm
from graphfuse.ops.spmm import spmm as spmm
from graphfuse.ops.spmm import spmm_gemm as spmm_gemm
