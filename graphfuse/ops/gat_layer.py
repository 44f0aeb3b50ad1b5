"""GAT's layer as one autograd Function: projection, terms of scores, attention and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.ops import _check, additive, logits
from graphfuse.ops._attended import additive_backward, additive_forward
from graphfuse.ops._library import direct_apply, once_differentiable
from graphfuse.ops._whole import Features, Maps, projected, row_gradients, runs_whole


def gat_layer(
    features: Features,
    weight: Tensor,
    att_src: Tensor,
    att_dst: Tensor,
    bias: Tensor,
    windows: RowWindows,
    negative_slope: float,
    dropout: float,
    self_loops: bool,
) -> Tensor | None:
    """:func:`gat_attention` of projected features, its heads joined, plus a bias.

    Args:
        features: ``[num_nodes, in_dim]``, of sources and receivers.
        weight: ``[heads * head_dim, in_dim]``.
        att_src: ``[1, heads, head_dim]``, whose product with a projected row is the term of a source.
        att_dst: Likewise of a receiver.
        bias: ``[heads * head_dim]``.
        windows: The graph.
        negative_slope: As of :func:`gat_attention`.
        dropout: Likewise.
        self_loops: Likewise.

    Returns:
        ``[num_nodes, heads * head_dim]``, or None where the layer has to be composed of its parts.
    """
    (x, entries), (_, heads, dim) = features, att_src.shape
    parameters = (weight, att_src, att_dst, bias)
    tilted = any([one.requires_grad for one in (x, *parameters)])
    fits = runs_whole(x, windows.shape[0] * weight.size(0), *parameters) and x.device == windows.device
    if not fits or not logits.fits(heads, dim):
        return None
    seed = _check.dropout_seed(dropout, None, x.device)
    how = additive.How(float(negative_slope), float(dropout), self_loops, False, tilted)
    out: Tensor = _apply(windows, how, entries, x, *parameters, seed)
    return out


class GatLayer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    @advises
    def forward(
        ctx: Any,
        windows: RowWindows,
        how: additive.How,
        entries: RowWindows | None,
        x: Tensor,
        weight: Tensor,
        att_src: Tensor,
        att_dst: Tensor,
        bias: Tensor,
        seed: Tensor | None,
    ) -> Tensor:
        """See :func:`gat_layer`."""
        _, heads, dim = att_src.shape
        rows, weights = projected(windows, Features(x, entries), Maps((weight,), ()))
        vectors = att_src.contiguous(), att_dst.contiguous()
        a_src, a_dst = logits.terms(rows, *vectors)
        given = additive.Operands(a_dst, a_src, rows, None, None, seed)
        attended = additive_forward(windows, how, (heads, dim), given, bias.contiguous())
        ctx.ready, results, with_bias = attended
        ctx.windows, ctx.entries = windows, entries
        _, _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad
        kept = (x if needs_weight else None, weights if needs_x else None)
        ctx.save_for_backward(*kept, *vectors, *given, *results)
        return with_bias

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and the parameters."""
        x, weight, left, right, *saved = ctx.saved_tensors
        rows = saved[2]
        d_dst, d_src, dx, *_ = additive_backward(ctx.ready, grad, saved)
        d_rows, d_vectors = logits.gradients(rows, (left, right), (d_src, d_dst), dx)
        _, _, _, needs_x, needs_weight, _, _, needs_bias, _ = ctx.needs_input_grad
        features = Features(x, ctx.entries) if needs_weight else None
        d_x, d_weight, d_bias = row_gradients(
            ctx.windows, d_rows, features, weight if needs_x else None, grad if needs_bias else None
        )
        return None, None, None, d_x, d_weight, *d_vectors.unbind(), d_bias, None


_apply = direct_apply(GatLayer)
