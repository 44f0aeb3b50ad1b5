"""TransformerConv's layer as one autograd Function: projections, attention and skip connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.ops import _check, attention
from graphfuse.ops._attended import attention_backward, attention_forward
from graphfuse.ops._library import direct_apply, is_batched, once_differentiable
from graphfuse.ops._whole import Features, Maps, map_gradients, projected, runs_whole

_PARTS = 4  # queries, keys, values and what is added to the result


def transformer_layer(
    features: Features, maps: Maps, heads: int, windows: RowWindows, dropout: float
) -> Tensor | None:
    """:func:`sparse_attention` of projected features, its heads joined, plus another projection.

    Args:
        features: ``[num_nodes, in_dim]``, of sources and receivers.
        maps: Those of queries, keys and values, and of what is added, each to ``heads * head_dim`` columns.
        heads: Number of heads.
        windows: The graph.
        dropout: As of :func:`sparse_attention`.

    Returns:
        ``[num_nodes, heads * head_dim]``, or None where the layer has to be composed of its parts.
    """
    (x, entries), parameters = features, (*maps.weights, *maps.biases)
    numel = windows.shape[0] * maps.weights[0].size(0)
    if not runs_whole(x, numel, *parameters) or x.device != windows.device:
        return None
    seed = _check.dropout_seed(dropout, None, x.device)
    out: Tensor = _apply(windows, dropout, heads, seed, entries, x, *parameters)
    return out


class TransformerLayer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    @advises
    def forward(
        ctx: Any,
        windows: RowWindows,
        dropout: float,
        heads: int,
        seed: Tensor | None,
        entries: RowWindows | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """See :func:`transformer_layer`."""
        rows, weight = projected(windows, Features(x, entries), Maps.of(parameters, _PARTS))
        width = rows.size(1) // _PARTS
        query, key, value, skip = rows.split_with_sizes([width] * _PARTS, 1)
        given = attention.Operands(query, key, value, seed, None, None, None)
        dim = width // heads
        how = attention.How(dim**-0.5, dropout, False)
        ctx.ready, results, out = attention_forward(windows, how, (heads, dim), given, skip)
        assert out is not None
        ctx.windows, ctx.entries, ctx.biased = windows, entries, len(parameters) > _PARTS
        _, _, _, _, _, needs_x, *needs = ctx.needs_input_grad
        kept = (x if any(needs[:_PARTS]) else None, weight if needs_x else None)
        ctx.save_for_backward(*kept, *given, *results)
        return out

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and the parameters."""
        x, weight, *saved = ctx.saved_tensors
        widths = [grad.size(1)] * _PARTS
        if is_batched(grad):
            d_rows = torch.cat([*attention_backward(ctx.ready, grad, saved)[:3], grad], 1)
        else:  # side by side from the start
            d_rows = grad.new_empty(grad.size(0), sum(widths))
            attention_backward(ctx.ready, grad, saved, d_rows.split_with_sizes(widths, 1))
        features = None if x is None else Features(x, ctx.entries)
        dx, d_maps = map_gradients(ctx.windows, d_rows, features, weight, widths, ctx.biased)
        return None, None, None, None, None, dx, *d_maps


_apply = direct_apply(TransformerLayer)
