"""GCN's layer without weights of edges as one autograd Function, looked up once for a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.walk import Walks
from graphfuse.ops import _aggregate
from graphfuse.ops._aggregate import Aggregation
from graphfuse.ops._library import direct_apply, for_gradient, is_batched
from graphfuse.ops._whole import bias_gradient, runs_whole


class Ready(NamedTuple):
    """A graph and its scales, for features of one dtype."""

    forward: Aggregation
    backward: Aggregation
    kept: Aggregation  # backward, that returns the sum before its product too
    loop_weight: Tensor | None


def gcn_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: RowWindows,
    scale: Tensor | None,
    loop_weight: Tensor | None,
) -> Tensor | None:
    """:func:`spmm_gemm` of the record's own scales, with the derivative of a narrow output.

    Args:
        x: ``[num_nodes, in_dim]``.
        weight: ``[out_dim, in_dim]``.
        bias: ``[out_dim]``.
        windows: The graph.
        scale: Of rows and columns, always the same for a record and the same kind of ``loop_weight``.
        loop_weight: Likewise.

    Returns:
        ``[num_nodes, out_dim]``, or None where the op has to be called.
    """
    out_dim, in_dim = weight.shape
    parameters = (weight,) if bias is None else (weight, bias)
    fits = runs_whole(x, x.size(0) * out_dim, *parameters) and out_dim <= in_dim == x.size(1)
    if not fits or x.device != windows.device:
        return None
    pin_if_capturing(windows)

    def prepare() -> Ready:
        graph = windows.walks(*_aggregate.choose(windows.sizes, x, None, None, weight, None))
        back = Aggregation(graph.transpose(), scale, scale, False, False, x.dtype)
        return Ready(back._replace(graph=graph), back, back._replace(keep_aggregate=True), loop_weight)

    key = ("gcn_layer", scale is None, loop_weight is None, x.dtype, in_dim, out_dim)
    out: Tensor = _apply(windows.memo(key, prepare), x, weight, bias)
    return out


class GcnLayer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    def forward(ctx: Any, ready: Ready, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :func:`gcn_layer`."""
        ctx.ready = ready
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        return _aggregate.run(ready.forward, x, None, ready.loop_weight, weight, bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and the parameters: with the sum of ``grad`` over edges, its products."""
        (forward, backward, kept, loops), (x, weight) = ctx.ready, ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        graph = for_gradient(forward.graph, grad)
        dx = moved = d_weight = d_bias = None
        if torch.is_grad_enabled() or is_batched(grad):
            how = backward._replace(graph=graph.transpose())
            moved, _ = _aggregate.differentiable(how, grad, None, loops, None, None)
            dx = torch.mm(moved, weight) if needs_x else None
            d_weight = torch.mm(moved.t(), x) if needs_weight else None
            return None, dx, d_weight, grad.sum(0) if needs_bias else None
        if needs_x:
            how = kept if needs_weight else backward
            dx, moved = _aggregate.run(how, grad, None, loops, weight.t(), None)
        elif needs_weight:
            moved, _ = _aggregate.run(backward, grad, None, loops, None, None)
        if needs_weight:
            assert moved is not None  # one of the two calls made it
            assert isinstance(graph, Walks)
            of_bias = grad if needs_bias else None
            d_weight, d_bias = _aggregate.linear_grad(graph.forward.plans, moved, x, of_bias, grad.dtype)
        elif needs_bias:
            d_bias = bias_gradient(grad)
        return None, dx, d_weight, d_bias


_apply = direct_apply(GcnLayer)
