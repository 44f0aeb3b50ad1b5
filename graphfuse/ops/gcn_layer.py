"""GCN's layer without weights of edges as one autograd Function, looked up once for a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import Walks
from graphfuse.kernels import copies
from graphfuse.kernels.orders import GemmOrder
from graphfuse.ops import _aggregate
from graphfuse.ops._aggregate import Aggregation
from graphfuse.ops._library import direct_apply, for_gradient, is_batched
from graphfuse.ops._whole import runs_whole
from graphfuse.ops.columns import bias_gradient


class Sums:
    """:func:`._aggregate.run` without edges' weights and ReLU, whose launch is found once.

    Args:
        how: What is computed, from and to one dtype.
        loop_weight: Of the self-loops.
        dim: Features of a row.
        out_dim: Columns of the product with a weight; ``None`` without one.
    """

    __slots__ = ("direct", "how", "loop_weight", "order", "plan", "scales", "walk")

    def __init__(self, how: Aggregation, loop_weight: Tensor | None, dim: int, out_dim: int | None) -> None:
        assert isinstance(how.graph, Walks)
        self.how, self.loop_weight, self.walk = how, loop_weight, how.graph.forward
        # a bias counts where a product follows the kernels, and that of a layer precedes them
        self.order = None if out_dim is None else _aggregate.order_of(how, dim, out_dim, how.out_dtype, False)
        self.plan: Any = None  # found when it is first asked for
        w, kernels = self.walk, _aggregate.kernels()
        self.scales = kernels.Scales(None, loop_weight, how.row_scale, how.col_scale)
        # else rows are copied first, or a product follows the kernels
        sizes, size = (w.num_entries, w.num_rows, w.num_cols), how.out_dtype.itemsize
        scaled = how.col_scale is not None and w.row_mask is not None
        copied = any(copies.gathers_copies(*sizes, one, size, scaled) for one in {dim, out_dim or dim})
        self.direct = not copied and self.order is not GemmOrder.AGGREGATE and kernels.aligned(*self.scales)

    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`._aggregate.run`; strides and presence of operands never change."""
        how, kernels = self.how, _aggregate.kernels()
        if not (self.direct and x.is_contiguous()):
            return _aggregate.run(how, x, None, self.loop_weight, weight, bias)
        if weight is not None and self.order is GemmOrder.PROJECT:
            x, weight = _aggregate.linear(self.walk.plans, x, weight), None
        bias = None if bias is None else bias.contiguous()
        if self.plan is None:
            given = (x, x.size(1), self.scales, weight, bias, False, how.keep_aggregate, how.out_dtype)
            self.plan = kernels.plan_of(self.walk, None, *given)
        found: tuple[Tensor, Tensor | None] = kernels.launch_plan(
            self.plan, x, self.scales, weight, bias, kernels.aligned(x, weight, bias)
        )
        return found


class Ready(NamedTuple):
    """A graph and its scales, for layers of one width and dtype."""

    graph: Walks
    backward: Aggregation
    out: Sums
    moved: Sums  # of the gradient, without a product
    dx: Sums  # with one
    both: Sums  # with one, and what it is a product of


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
        out = Sums(back._replace(graph=graph), loop_weight, in_dim, out_dim)
        both = back._replace(keep_aggregate=True)
        moved, *dx = [
            Sums(how, loop_weight, out_dim, wide)
            for how, wide in ((back, None), (back, in_dim), (both, in_dim))
        ]
        return Ready(graph, back, out, moved, *dx)

    key = ("gcn_layer", scale is None, loop_weight is None, x.dtype, in_dim, weight.stride(), out_dim)
    out: Tensor = _apply(windows.memo((*key, bias is None), prepare), x, weight, bias)
    return out


class GcnLayer(torch.autograd.Function):
    """The layer, and its derivative."""

    @staticmethod
    @advises
    def forward(ctx: Any, ready: Ready, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :func:`gcn_layer`."""
        ctx.ready = ready
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        return ready.out(x, weight, bias)[0]

    @staticmethod
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and the parameters: with the sum of ``grad`` over edges, its products."""
        ready, (x, weight) = ctx.ready, ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        graph = for_gradient(ready.graph, grad)
        dx = moved = d_weight = d_bias = None
        if torch.is_grad_enabled() or is_batched(grad):
            how, loops = ready.backward._replace(graph=graph.transpose()), ready.out.loop_weight
            moved, _ = _aggregate.differentiable(how, grad, None, loops, None, None)
            dx = torch.mm(moved, weight) if needs_x else None
            d_weight = torch.mm(moved.t(), x) if needs_weight else None
            return None, dx, d_weight, grad.sum(0) if needs_bias else None
        if needs_x:
            dx, moved = (ready.both if needs_weight else ready.dx)(grad, weight.t())
        elif needs_weight:
            moved, _ = ready.moved(grad)
        if needs_weight:
            assert moved is not None  # one of the two calls made it
            of_bias = grad if needs_bias else None
            plans = ready.graph.forward.plans
            d_weight, d_bias = _aggregate.linear_grad(plans, moved, x, of_bias, grad.dtype)
        elif needs_bias:
            d_bias = bias_gradient(grad)
        return None, dx, d_weight, d_bias


_apply = direct_apply(GcnLayer)
