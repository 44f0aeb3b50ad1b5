"""The weights of attention, one number per edge and head, for explainers and users who ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.late import LateWindows
from graphfuse.formats.walk import to_edge_index
from graphfuse.ops import _check
from graphfuse.ops.sddmm import sddmm
from graphfuse.ops.spmm import spmm


def attention_weights(q: Tensor, k: Tensor, windows: RowWindows, scale: float | None = None) -> Tensor:
    r"""What :func:`graphfuse.ops.sparse_attention` weighs each edge with, before dropout.

    .. math::
        \alpha_e = \frac{\exp(\lambda q_i^\top k_j)}{\sum_{e' = (l \to i)} \exp(\lambda q_i^\top k_l)},
        \qquad e = (j \to i)

    Args:
        q: Queries, ``float16 | bfloat16 | float32[num_dst, heads, head_dim]`` (float64 on a CPU).
        k: Keys, dtype of ``q``, ``[num_src, heads, head_dim]``.
        windows: The graph, ``windows.shape == (num_dst, num_src)``; a repeated edge has a weight of its own.
        scale: The factor :math:`\lambda`; ``None`` means ``head_dim ** -0.5``.

    Returns:
        ``[num_edges, heads]`` in the dtype of ``q``, in the order of the edge list that the windows were
        built from.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.

    Note:
        A few kernels for each head and some tensors of the size of the result: attention itself needs
        neither. Deterministic, and differentiable any number of times. Reference:
        :func:`graphfuse.reference.attention_weights`.
    """
    _check.windows(windows)
    num_dst, num_src = windows.shape
    _check.heads("q", q, num_dst, windows.device)
    _check.heads("k", k, num_src, q.device, q)
    if not torch.compiler.is_compiling():
        _check.runs_kernel(q, "q")
        pin_if_capturing(windows)
    scale = q.size(2) ** -0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    receiver = windows.memo("receivers", lambda: _receivers(windows))
    one = q.new_ones(num_src, 1, dtype=dtype)
    columns = []
    for head in range(q.size(1)):
        score = sddmm(windows, q[:, head].to(dtype), k[:, head].to(dtype)) * scale
        top = score.new_full((num_dst,), float("-inf"))
        top.scatter_reduce_(0, receiver, score.detach(), "amax")
        weight = (score - top.index_select(0, receiver)).exp()
        # Sums over rows and their way back to the edges as products, which add in a fixed order, forward and
        # backward; a scatter would not.
        total = spmm(windows, one, weight)
        columns.append(weight * sddmm(windows, 1 / (total + (total == 0)), one))
    return torch.stack(columns, 1).to(q.dtype)


def _receivers(windows: RowWindows) -> Tensor:
    """Row of each edge, in the order of the caller's edge list; no synchronisation."""
    if isinstance(windows, LateWindows):
        return windows.edge_index()[1].long()
    perm = windows.row_edges().perm.long()
    return torch.empty_like(perm).scatter_(0, perm, to_edge_index(windows.row_walk())[1])
