"""Definitions of the aggregation ops, one message per edge, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def spmm(
    edge_index: Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    num_dst: int | None = None,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    r"""Definition of :func:`graphfuse.ops.spmm`, in any float dtype, differentiable, on ``edge_index``.

    .. math::
        y_i = r_i \sum_{e = (j \to i)} w_e c_j x_j

    Args:
        edge_index: ``int[2, num_edges]``, sources over receivers, repeated edges counted each.
        x: ``[num_src, dim]``.
        edge_weight: :math:`w`, ``[num_edges]``, of any float dtype; ``None`` means 1.
        num_dst: Receivers; ``None`` means as many as sources.
        loop_weight: ``[num_dst]``; replaces the diagonal: edges with source == receiver are left out and
            receiver i gets ``loop_weight[i]`` times its own row instead (only rows that x has).
        row_scale: :math:`r`, ``[num_dst]``; ``None`` means 1.
        col_scale: :math:`c`, ``[num_src]``; ``None`` means 1.
        bias: ``[dim]``, added at the end.
        activation: ``"relu"`` or ``None``, applied after the bias.
    """
    num_dst = x.size(0) if num_dst is None else num_dst
    scaled = x if col_scale is None else x * col_scale[:, None].to(x.dtype)
    src, dst = edge_index[0].long(), edge_index[1].long()
    if loop_weight is not None:
        kept = src != dst
        src, dst = src[kept], dst[kept]
        edge_weight = None if edge_weight is None else edge_weight[kept]
    message = scaled.index_select(0, src)
    if edge_weight is not None:
        message = message * edge_weight[:, None]
    out = message.new_zeros(num_dst, x.size(1)).index_add(0, dst, message).to(x.dtype)
    if loop_weight is not None:
        n = min(num_dst, x.size(0))
        loops = scaled[:n] * loop_weight[:n, None].to(x.dtype)
        out = torch.cat([out[:n] + loops, out[n:]])
    if row_scale is not None:
        out = out * row_scale[:, None].to(x.dtype)
    return _finish(out, bias, activation)


def spmm_gemm(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    edge_weight: Tensor | None = None,
    num_dst: int | None = None,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    r"""Definition of :func:`graphfuse.ops.spmm_gemm`, :math:`\sigma(A X W^\top + b)`; see there."""
    y = spmm(
        edge_index,
        x,
        edge_weight,
        num_dst=num_dst,
        loop_weight=loop_weight,
        row_scale=row_scale,
        col_scale=col_scale,
    )
    return _finish(y @ weight.t(), bias, activation)


def sddmm(edge_index: Tensor, a: Tensor, b: Tensor, *, without_loops: bool = False) -> Tensor:
    r"""Definition of :func:`graphfuse.ops.sddmm`, :math:`s_e = \langle a_i, b_j \rangle` per edge j -> i.

    Args:
        edge_index: ``int[2, num_edges]``, sources over receivers.
        a: ``[num_dst, dim]``.
        b: ``[num_src, dim]``.
        without_loops: Whether edges with source == receiver get 0.

    Returns:
        ``[num_edges]``, in the order of ``edge_index``.
    """
    src, dst = edge_index[0].long(), edge_index[1].long()
    product = (a.index_select(0, dst) * b.index_select(0, src)).sum(-1)
    return torch.where(src == dst, 0, product) if without_loops else product


def _finish(out: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    out = out if bias is None else out + bias
    return out.relu() if activation == "relu" else out
