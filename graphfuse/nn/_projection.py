"""The linear maps of a layer: read where they are plain, called where more may happen in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from graphfuse.nn._dispatch import is_plain_tensor
from graphfuse.nn._sparse_features import affine_of_sparse
from graphfuse.ops._library import runs_directly
from graphfuse.ops.columns import sums_quickly, with_bias_gradient

# Nodes, in features of each, from which on two products of all nodes are taken to be longer than two of
# weights, which are a launch of some microseconds. Not swept: no graph that was measured has fewer than 77.
_PAYS = 32


def is_plain(lin: Any) -> bool:
    """Whether ``lin`` is nothing but its weight and bias: not replaced, hooked, parametrised or lazy."""
    if type(lin) is not Linear or "forward" in lin.__dict__:
        return False
    if lin._forward_hooks or lin._forward_pre_hooks or lin._backward_hooks or lin._backward_pre_hooks:
        return False
    parameters = lin._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias", ...)  # no parameter is not None
    if type(weight) is Parameter and (bias is None or type(bias) is Parameter):
        return True  # as nearly always
    return is_plain_tensor(weight) and (bias is None or is_plain_tensor(bias))


def may_read(*layers: Any) -> bool:
    """Whether nobody notices that weights are read and ``layers`` not called: no hook, not of all modules."""
    return not _has_any_global_hook() and all(map(is_plain, layers))


def folded_reasons() -> list[str]:
    """Why the map of edge features is not folded into the kernel, which calls no module; empty if it is."""
    if not _has_any_global_hook():
        return []
    return ["a hook of all modules is registered, and lin_edge is not called"]


def mapped(x: Tensor, lin: Any) -> Tensor:
    """``lin(x)``, without the host time of a module's call where nothing else happens in it."""
    if not may_read(lin):
        found: Tensor = lin(x)
        return found
    parameters = lin._parameters
    return affine(x, parameters["weight"], parameters["bias"])


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` of dense or sparse rows."""
    if x.layout is not torch.strided:
        return affine_of_sparse(x, weight, bias)
    if bias is None or not sums_quickly(x, weight.size(0), bias):
        return F.linear(x, weight, bias)
    return with_bias_gradient(F.linear(x, weight, bias.detach()), bias)


def stacked(x: Tensor, layers: list[Any], head_dim: int) -> Sequence[Tensor]:
    """Plain projections of ``x`` in one product, ``[num_nodes, heads, head_dim]`` each."""
    weights = [lin._parameters["weight"] for lin in layers]
    biases = [lin._parameters["bias"] for lin in layers]
    # under autocast x is converted once, not for each
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = weights[0].dtype if autocast else x.dtype
    # autocast joins no other dtypes
    fits = not autocast or dtype in (torch.float32, torch.get_autocast_dtype(device))
    fits = fits and all(weight.dtype is dtype and weight.size(1) == x.size(1) for weight in weights)
    heads = [weight.size(0) // head_dim for weight in weights]
    if len(layers) == 1 or not fits or len({bias is None for bias in biases}) == 2:
        # what does not fit is for the module to refuse
        return [lin(x).view(-1, num_heads, head_dim) for lin, num_heads in zip(layers, heads, strict=True)]
    bias = None if biases[0] is None else torch.cat(biases)
    # split, not slices: its backward is one concatenation
    rows = affine(x, torch.cat(weights), bias).view(-1, sum(heads), head_dim)
    return rows.split_with_sizes(heads, 1)


def one_head(x: Tensor, query: Any, key: Any, value: Any, out: Any) -> tuple[Tensor, Tensor] | None:
    r"""Queries and values, ``[num_nodes, 1, dim]``, for which keys are ``x``, and sums need no ``out``.

    Of one head as wide as ``x``, scores are :math:`x_i^\top (Q^\top K)\, x_j`, and what :math:`O` makes of a
    sum of values is the sum of :math:`O V x_j`: two products of weights for two of all nodes. The bias of
    ``out`` is left for the caller to add. In inference alone: a gradient would have to pass those products.

    Returns:
        None if a module does more than its product, is of another dtype, or nodes are too few to pay.
    """
    if torch.is_grad_enabled() or x.size(0) < _PAYS * x.size(1) or not may_read(query, key, value, out):
        return None
    weights: list[Any] = [lin._parameters["weight"] for lin in (query, key, value, out)]
    plain = all(weight.dtype is x.dtype and weight.device == x.device for weight in weights)
    if not plain or torch.is_autocast_enabled(x.device.type) or not runs_directly(x, *weights):
        return None
    of_query, of_key, of_value, of_out = weights
    # two products of the nodes: of stacked weights one takes as long
    return F.linear(x, of_key.t() @ of_query)[:, None], F.linear(x, of_out @ of_value)[:, None]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, without a call of PyTorch where it has it."""
    return x if x.dtype is dtype else x.to(dtype)
