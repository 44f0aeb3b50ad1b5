"""The fused attention of TransformerConv and the Graph Transformer block, and checks of every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse import ops
from graphfuse.formats import RowWindows
from graphfuse.kernels import launch
from graphfuse.nn._dispatch import is_plain_tensor
from graphfuse.nn._projection import folded_reasons, is_plain
from graphfuse.ops.attention import MAX_HEAD_DIM


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    windows: RowWindows,
    dropout: float,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    r"""Attention :math:`\sum_j \alpha_{ij} (v_j + e_{ij})`, scores :math:`q_i^\top (k_j + e_{ij})/\sqrt{d}`.

    The map :math:`e_{ij} = W a_{ij}` is folded: :math:`q_i^\top W a_{ij} = (W^\top q_i)^\top a_{ij}` and
    :math:`\sum_j \alpha_{ij} W a_{ij} = W \sum_j \alpha_{ij} a_{ij}`, so no row of ``heads * head_dim``
    numbers is made for an edge.

    Args:
        query: ``[num_dst, heads, head_dim]``.
        key: ``[num_src, heads, head_dim]``.
        value: ``[num_src, heads, head_dim]``.
        windows: The graph.
        dropout: Rate of dropout of the weights; 0 outside training.
        edge_attr: :math:`a`, ``[num_edges, edge_dim]``, in the order of the caller's edge list.
        edge_weight: :math:`W`, ``[heads * head_dim, edge_dim]``.

    Returns:
        ``[num_dst, heads, head_dim]``.
    """
    if edge_attr is None or edge_weight is None:
        return ops.sparse_attention(query, key, value, windows, dropout=dropout)
    heads, head_dim = query.shape[1:]
    weight, edge_attr = edge_weight.view(heads, head_dim, -1), edge_attr.to(query.dtype)  # under autocast
    edge_query = torch.einsum("nhc,hce->nhe", query, weight.to(query.dtype))
    out, edge_sum = ops.sparse_attention(
        query, key, value, windows, dropout=dropout, edge_query=edge_query, edge_attr=edge_attr
    )
    return out + torch.einsum("nhe,hce->nhc", edge_sum, weight.to(query.dtype))


def edge_reasons(lin: Any, edge_attr: Any, x: Any, edge_index: Any, heads: int, head_dim: int) -> list[str]:
    """Why edge features do not fold into the attention of ``x``, a sentence each; empty if they do.

    Args:
        lin: The linear map of the features, or None.
        edge_attr: The features, or None.
        x: Features of the nodes, or a pair.
        edge_index: The graph.
        heads: Heads of the layer.
        head_dim: Width of a head.
    """
    if lin is None and edge_attr is None:
        return []
    like = x if isinstance(x, Tensor) else x[0]
    if lin is None:
        return ["edge_attr is given to a layer without edge_dim, which adds it to the values as it is"]
    autocast = torch.is_autocast_enabled(like.device.type)
    hooked = folded_reasons()
    if hooked:
        return hooked
    if not is_plain(lin) or lin.bias is not None or not (autocast or lin.weight.dtype is like.dtype):
        return ["lin_edge is not a plain linear map in the dtype of x"]
    fits = is_of_edges(edge_attr, edge_index, like) and edge_attr.dim() == 2
    fits = fits and (edge_attr.dtype is like.dtype or (autocast and edge_attr.is_floating_point()))
    if not fits or lin.weight.size(1) != edge_attr.size(1):
        return ["edge_attr is not a matrix of edge_dim columns, a row for each edge, in the dtype of x"]
    if not launch.attention_takes_edges(heads, head_dim, edge_attr.size(1)):
        return [
            f"heads * max(out_channels, edge_dim) is over 4096 in powers of two (got {heads} heads of "
            f"{head_dim}, edge_dim {edge_attr.size(1)})"
        ]
    return []


def is_of_edges(edge_attr: Any, edge_index: Any, like: Tensor) -> bool:
    """Whether ``edge_attr`` is a strided tensor, a row for each edge, where ``like`` is."""
    num_edges = edge_index.num_edges if isinstance(edge_index, RowWindows) else edge_index.size(1)
    return (
        is_plain_tensor(edge_attr)
        and edge_attr.layout is torch.strided
        and edge_attr.dim() > 0
        and edge_attr.size(0) == num_edges
        and edge_attr.device == like.device
    )


def head_reasons(layer: Any) -> list[str]:
    """Why the heads or the dropout of ``layer`` do not fuse, a sentence each; empty if they do."""
    reasons = []
    if layer.out_channels > MAX_HEAD_DIM:
        reasons.append(
            f"out_channels is {layer.out_channels}; the kernels take heads of at most {MAX_HEAD_DIM}"
        )
    if not 0 <= layer.dropout < 1:
        reasons.append(f"dropout is {layer.dropout}; the kernels take rates from 0 to below 1")
    return reasons
