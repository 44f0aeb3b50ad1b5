"""Argument checks of attention beyond those that ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.ops import _check


def check_edges(q: Tensor, num_edges: int, edge_query: Tensor | None, edge_attr: Tensor | None) -> None:
    """Raises unless both numbers of the edges fit ``q``, or neither is given."""
    if edge_query is None and edge_attr is None:
        return
    if edge_query is None or edge_attr is None:
        missing, given = ("edge_query", "edge_attr") if edge_query is None else ("edge_attr", "edge_query")
        raise ValueError(f"`{missing}` must be given with `{given}` (got None)")
    _check.matrix("edge_attr", edge_attr, num_edges, q.device)
    _check.same_dtype("edge_attr", edge_attr, "q", q.dtype)
    _check.strided("edge_query", edge_query, q.device)
    _check.same_dtype("edge_query", edge_query, "q", q.dtype)
    wanted = [*q.shape[:2], edge_attr.size(1)]
    if list(edge_query.shape) != wanted:
        raise ValueError(f"`edge_query` must have shape {wanted} (got {list(edge_query.shape)})")
    if edge_attr.size(1) == 0 or not launch.attention_takes_edges(q.size(1), q.size(2), edge_attr.size(1)):
        raise ValueError(
            "`edge_attr` must have columns, and heads * max(head_dim, edge_dim), each rounded up to a power "
            f"of two, be at most 4096 (got {edge_attr.size(1)} columns and {q.size(1)} heads of {q.size(2)})"
        )


def check_key_scale(key_scale: Tensor, k: Tensor, edge_attr: Tensor | None) -> None:
    """Raises unless ``key_scale`` fits the keys, is a constant, and edges bring no numbers."""
    _check.matrix("key_scale", key_scale, k.size(0), k.device, k.size(1))
    wanted = torch.float64 if k.dtype == torch.float64 else torch.float32
    if key_scale.dtype != wanted:
        raise ValueError(
            f"`key_scale` must be {wanted} (got {key_scale.dtype}); convert it with .to({wanted})"
        )
    if key_scale.requires_grad:
        raise ValueError(
            "`key_scale` must not require a gradient, which goes to `k` (got one that does); pass "
            "key_scale.detach()"
        )
    if edge_attr is not None:
        raise ValueError("`key_scale` wants edges without numbers (got `edge_attr`); pass `k` alone")
