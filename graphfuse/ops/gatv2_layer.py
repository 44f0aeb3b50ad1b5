"""GATv2's layer as one autograd Function: projections, attention and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.ops import _check, additive
from graphfuse.ops._attended import additive_backward, additive_forward
from graphfuse.ops._library import direct_apply, once_differentiable
from graphfuse.ops._whole import Features, Maps, map_gradients, projected, runs_whole
from graphfuse.ops.columns import bias_gradient


def gatv2_layer(
    features: Features,
    maps: Maps,
    att: Tensor,
    bias: Tensor,
    windows: RowWindows,
    negative_slope: float,
    dropout: float,
    self_loops: bool,
) -> Tensor | None:
    """:func:`gatv2_attention` of projected features, its heads joined, plus a bias.

    Args:
        features: ``[num_nodes, in_dim]``, of sources and receivers.
        maps: That of sources and that of receivers, or one of both, to ``heads * head_dim`` columns.
        att: ``[1, heads, head_dim]``.
        bias: ``[heads * head_dim]``.
        windows: The graph.
        negative_slope: As of :func:`gatv2_attention`.
        dropout: Likewise.
        self_loops: Likewise.

    Returns:
        ``[num_nodes, heads * head_dim]``, or None where the layer has to be composed of its parts.
    """
    parameters = (*maps.weights, *maps.biases)
    (x, entries), numel = features, windows.shape[0] * len(maps.weights) * bias.size(0)
    if not runs_whole(x, numel, att, bias, *parameters) or x.device != windows.device:
        return None
    seed = _check.dropout_seed(dropout, None, x.device)
    how = additive.How(float(negative_slope), float(dropout), self_loops, True, False)
    out: Tensor = _apply(windows, how, len(maps.weights), seed, entries, x, att, bias, *parameters)
    return out


class Gatv2Layer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    @advises
    def forward(
        ctx: Any,
        windows: RowWindows,
        how: additive.How,
        count: int,
        seed: Tensor | None,
        entries: RowWindows | None,
        x: Tensor,
        att: Tensor,
        bias: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """See :func:`gatv2_layer`; ``parameters`` are those of ``count`` maps."""
        _, heads, dim = att.shape
        rows, weight = projected(windows, Features(x, entries), Maps.of(parameters, count))
        x_src, *x_dst = rows.chunk(count, 1)
        given = additive.Operands(
            x_dst[0] if x_dst else x_src, att.squeeze(0).contiguous(), x_src, None, None, seed
        )
        attended = additive_forward(windows, how, (heads, dim), given, bias.contiguous())
        ctx.ready, results, with_bias = attended
        ctx.count, ctx.biased = count, len(parameters) > count
        ctx.windows, ctx.entries = windows, entries
        _, _, _, _, _, needs_x, _, _, *needs = ctx.needs_input_grad
        kept = (x if any(needs[:count]) else None, weight if needs_x else None)
        ctx.save_for_backward(*kept, *given, *results)
        return with_bias

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and the parameters."""
        x, weight, *saved = ctx.saved_tensors
        d_dst, d_att, d_src, *_ = additive_backward(ctx.ready, grad, saved)
        d_rows = d_src.add_(d_dst) if ctx.count == 1 else torch.cat((d_src, d_dst), 1)
        widths = [grad.size(1)] * ctx.count
        features = None if x is None else Features(x, ctx.entries)
        dx, d_maps = map_gradients(ctx.windows, d_rows, features, weight, widths, ctx.biased)
        d_bias = bias_gradient(grad) if ctx.needs_input_grad[7] else None
        return None, None, None, None, None, dx, d_att.unsqueeze(0), d_bias, *d_maps


_apply = direct_apply(Gatv2Layer)
