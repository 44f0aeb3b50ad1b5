"""What inference runs in one launch after attention: a residual and its norm, a product and its ReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from graphfuse.formats import RowWindows
from graphfuse.nn._dispatch import is_plain_tensor
from graphfuse.nn._projection import mapped, may_read
from graphfuse.ops._library import runs_directly
from graphfuse.ops.attention import sparse_attention
from graphfuse.ops.normed_attention import fits as attention_fits
from graphfuse.ops.normed_attention import normed_attention
from graphfuse.ops.residual_norm import Norm, fits
from graphfuse.ops.residual_norm import residual_norm as fused


def residual_norm(x: Tensor, y: Tensor, norm: Any, bias: Tensor | None = None) -> Tensor:
    """``norm(x + y + bias)``.

    Args:
        x: ``[num_rows, dim]``.
        y: ``[num_rows, dim]``.
        norm: :class:`torch.nn.BatchNorm1d` or :class:`torch.nn.LayerNorm`, or what has taken its place.
        bias: ``[dim]``, or None.
    """
    numbers = None if torch.is_grad_enabled() else _numbers(norm)
    if numbers is None or not fits(x, y, numbers, bias):
        found: Tensor = norm(x + y if bias is None else x + (y + bias))
        return found
    return fused(x, y, numbers, bias)


def attended_norm(
    x: Tensor, query: Tensor, value: Tensor, windows: RowWindows, norm: Any, bias: Tensor | None
) -> Tensor:
    """``norm(x + y + bias)``, where ``y`` is attention of one head with keys ``x``.

    Args:
        x: ``[num_nodes, dim]``.
        query: ``[num_nodes, 1, dim]``.
        value: ``[num_nodes, 1, dim]``.
        windows: The graph.
        norm: As for :func:`residual_norm`.
        bias: ``[dim]``, or None.
    """
    key, numbers = x[:, None], _numbers(norm)
    if numbers is not None and attention_fits(windows, query, x, numbers, bias):
        return normed_attention(windows, query, key, value, x, numbers, bias)
    return residual_norm(x, sparse_attention(query, key, value, windows)[:, 0], norm, bias)


def mapped_relu(x: Tensor, lin: Any) -> Tensor:
    """``lin(x).relu()``; in inference on a GPU the product's own kernel does both."""
    plain = not torch.is_grad_enabled() and may_read(lin)
    if plain and x.is_cuda and not torch.is_autocast_enabled("cuda"):
        weight, bias = lin._parameters["weight"], lin._parameters["bias"]
        fits = bias is not None and x.dtype is weight.dtype and runs_directly(x, weight, bias)
        if fits and x.numel() > 0:
            # what PyTorch's own TransformerEncoderLayer runs in inference
            return torch._addmm_activation(bias, x, weight.t())
    return mapped(x, lin).relu()


def _numbers(norm: Any) -> Norm | None:
    # None if more may happen in the module than what they say
    of_rows = type(norm) is torch.nn.LayerNorm and len(norm.normalized_shape) == 1
    of_columns = type(norm) is torch.nn.BatchNorm1d and not norm.training and norm.running_mean is not None
    if (not of_rows and not of_columns) or _has_any_global_hook() or "forward" in norm.__dict__:
        return None
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    plain = is_plain_tensor(weight) and is_plain_tensor(bias)
    if not plain or norm._forward_hooks or norm._forward_pre_hooks:
        return None
    if of_rows:
        return Norm(weight, bias, None, None, norm.eps)
    return Norm(weight, bias, norm._buffers["running_mean"], norm._buffers["running_var"], norm.eps)
