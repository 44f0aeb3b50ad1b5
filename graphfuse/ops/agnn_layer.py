"""AGNN's layer as one autograd Function: queries and keys, and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.ops import attention, unit_rows
from graphfuse.ops._attended import attention_backward, attention_forward
from graphfuse.ops._library import direct_apply, once_differentiable
from graphfuse.ops._whole import runs_whole
from graphfuse.ops.sddmm import contiguous_rows


def agnn_layer(x: Tensor, beta: Tensor, windows: RowWindows, self_loops: bool) -> Tensor | None:
    """:func:`sparse_attention` with the rows of ``x`` as values and, divided by their lengths, as keys.

    Args:
        x: ``[num_nodes, dim]``.
        beta: ``[1]``, what the cosines are multiplied with.
        windows: The graph.
        self_loops: As of :func:`sparse_attention`.

    Returns:
        A tensor like ``x``, or None where the layer has to be composed of its parts.
    """
    # of any size: the kernels are those of its parts, and one less
    if not runs_whole(x, min(x.numel(), 1), beta) or x.device != windows.device:
        return None
    out: Tensor = _apply(windows, attention.How(1.0, 0.0, self_loops), x, beta)
    return out


class AgnnLayer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    @advises
    def forward(ctx: Any, windows: RowWindows, how: attention.How, x: Tensor, beta: Tensor) -> Tensor:
        """See :func:`agnn_layer`."""
        x = contiguous_rows(x)
        query, inverse = unit_rows.scaled(x, beta, unit_rows.least_length(x.dtype))
        # the rows of x serve as keys and as values, and are read once
        given = attention.Operands(query, x, x, None, None, None, inverse.unsqueeze(1))
        # twice: backward needs the result, which whoever gets it may change in place
        ctx.ready, results, out = attention_forward(windows, how, (1, x.size(1)), given, twice=True)
        ctx.save_for_backward(beta, query, x, given.key_scale, *results)
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and ``beta``."""
        beta, query, x, inverse, *results = ctx.saved_tensors
        saved = (query, x, x, None, None, None, inverse, *results)
        d_query, d_key, d_value, *_ = attention_backward(ctx.ready, grad, saved)
        least, learned = unit_rows.least_length(x.dtype), ctx.needs_input_grad[3]
        dx, d_beta = unit_rows.gradients(x, beta, d_query, d_key, least, learned, d_value)
        return None, None, dx, d_beta


_apply = direct_apply(AgnnLayer)
