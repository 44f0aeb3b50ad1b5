"""The fused attention that TransformerConv and the Graph Transformer block share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear

from graphfuse import ops
from graphfuse.formats import RowWindows


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

    Args:
        query: ``[num_dst, heads, head_dim]``.
        key: ``[num_src, heads, head_dim]``.
        value: ``[num_src, heads, head_dim]``.
        windows: The graph.
        dropout: Rate of dropout of the weights; 0 outside training.
        edge_attr: ``[num_edges, edge_dim]``, in the order of the caller's edge list.
        edge_weight: The weight of the linear map of :math:`e_{ij}`, ``[heads * head_dim, edge_dim]``.

    Returns:
        ``[num_dst, heads, head_dim]``.
    """
    if edge_attr is not None:
        raise NotImplementedError
    return ops.sparse_attention(query, key, value, windows, dropout=dropout)


def is_plain(lin: Any) -> bool:
    """Whether ``lin`` is nothing but its weight and bias: not replaced, hooked, parametrised or lazy."""
    if type(lin) is not Linear or "forward" in lin.__dict__:
        return False
    if lin._forward_hooks or lin._forward_pre_hooks or lin._backward_hooks or lin._backward_pre_hooks:
        return False
    weight, bias = lin._parameters.get("weight"), lin._parameters.get("bias")
    # plain tensors: those of torch.func.functional_call
    return type(weight) in (Parameter, Tensor) and (bias is None or type(bias) in (Parameter, Tensor))


def stacked(x: Tensor, layers: list[Any]) -> Sequence[Tensor]:
    """Plain projections of ``x`` in one product; the results are column slices of it."""
    weights = [lin._parameters["weight"] for lin in layers]
    biases = [lin._parameters["bias"] for lin in layers]
    fits = all(weight.dtype is x.dtype and weight.size(1) == x.size(1) for weight in weights)
    if len(layers) == 1 or not fits or len({bias is None for bias in biases}) == 2:
        return [lin(x) for lin in layers]  # what does not fit is for the module to refuse
    bias = None if biases[0] is None else torch.cat(biases)
    # split, not slices: its backward is one concatenation
    return F.linear(x, torch.cat(weights), bias).split([weight.size(0) for weight in weights], 1)
