"""``graphfuse::spmm``, the op behind :func:`graphfuse.ops.spmm` and :func:`graphfuse.ops.spmm_gemm`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.lasting import savable
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import Walks, to_edge_index
from graphfuse.kernels import launch, orders
from graphfuse.ops import _check
from graphfuse.ops._library import (
    Graph,
    Packed,
    Sizes,
    below_autograd,
    direct_apply,
    for_gradient,
    graph_of,
    packed_of,
    register,
)
from graphfuse.ops.columns import column_sums
from graphfuse.ops.sddmm import Sddmm, contiguous_rows


class Operands(NamedTuple):
    """What the op differentiates in, or the gradients."""

    x: Any = None
    edge_weight: Any = None
    loop_weight: Any = None
    weight: Any = None
    bias: Any = None


class Aggregation(NamedTuple):
    """What the op is linear in but does not differentiate, and how it ends."""

    graph: Graph
    row_scale: Tensor | None
    col_scale: Tensor | None
    relu: bool
    keep_aggregate: bool  # also return A x, before the weight
    out_dtype: torch.dtype


def aggregate(
    windows: RowWindows,
    operands: Operands,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """:func:`spmm` or, with a weight, :func:`spmm_gemm`, on checked operands."""
    x, _, _, weight, _ = operands
    if not torch.compiler.is_compiling():  # the op itself checks and pins when it runs
        _check.runs_kernel(x)
        pin_if_capturing(windows)
    # W's gradient is g^T (A x) if the input is the narrow side, so A x is kept for it
    keep = weight is not None and weight.size(0) > weight.size(1)
    keep = keep and weight.requires_grad and torch.is_grad_enabled()
    how = (row_scale, col_scale, relu, keep, out_dtype or x.dtype)
    graph = graph_of(windows, choose, *how, *operands)
    return differentiable(Aggregation(graph, *how), *operands)[0]


def choose(sizes: Sizes, *arguments: Any) -> tuple[bool, bool]:
    """Whether rows are walked, and whether the order of the edges is needed; the operands come last."""
    x, edge_weight, _, weight, _ = arguments[-5:]
    if edge_weight is not None:
        return True, True
    # forward or backward, the narrow side is gathered
    gathered, fused = x.size(1), False
    if weight is not None:
        out_dim, dim = weight.shape
        gathered = min(dim, out_dim)
        # what that saves is passing the wide side through memory; else a product costs no more beside rows
        fused = dim < out_dim and orders.can_fuse(dim, out_dim, x.element_size())
    return launch.prefers_rows(*sizes, gathered, x.dtype, fused), False


def differentiable(how: Aggregation, *operands: Any) -> tuple[Tensor, Tensor | None]:
    """:func:`run`, recorded by autograd where that is on."""
    output: tuple[Tensor, Tensor | None]
    if not isinstance(how.graph, Walks):
        output = torch.ops.graphfuse.spmm(*how.graph, *how[1:], *operands)
    elif torch.is_grad_enabled():
        output = _apply(how, *operands)
    else:
        output = run(how, *operands)
    return output


@advises
def run(
    how: Aggregation,
    x: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    w, row_scale, col_scale, relu, keep, out_dtype = how
    assert isinstance(w, Walks)
    if not _check.runs_kernel(x):
        return _definition(how, x, edge_weight, loop_weight, weight, bias)
    launch_spmm = kernels().spmm
    graph, scales = (w.forward, w.edges), (edge_weight, loop_weight, row_scale, col_scale)
    if weight is not None:
        order = order_of(how, x.size(1), weight.size(0), x.dtype, bias is not None)
        if order is orders.GemmOrder.PROJECT:
            x, weight = linear(w.forward.plans, x, weight), None
        elif order is orders.GemmOrder.AGGREGATE:
            y, _ = launch_spmm(*graph, contiguous_rows(x), *scales, None, None, False, False, x.dtype)
            return _finish(_product(y, weight.t()), bias, relu, out_dtype), y if keep else None
    output: tuple[Tensor, Tensor | None]
    output = launch_spmm(*graph, contiguous_rows(x), *scales, weight, bias, relu, keep, out_dtype)
    return output


def order_of(how: Aggregation, dim: int, out_dim: int, dtype: torch.dtype, biased: bool) -> orders.GemmOrder:
    """How :func:`run` makes ``out_dim`` columns of ``dim`` features."""
    assert isinstance(how.graph, Walks)
    w = how.graph.forward
    sizes = (w.num_entries, w.num_cols, dim, out_dim, dtype.itemsize)
    return orders.gemm_order(*sizes, biased + how.relu, w.row_mask is None, how.keep_aggregate)


@functools.cache
def kernels() -> Any:
    """The launchers of the kernels."""
    from graphfuse.kernels import spmm  # imports triton

    return spmm


@functools.cache
def _linear_launchers() -> tuple[Any, Any]:
    from graphfuse.kernels.linear import linear, linear_grad  # imports triton

    return linear, linear_grad


def _product(a: Tensor, b: Tensor) -> Tensor:
    # in the dtype of the operands, which the op promises: autocast would round them first
    device = a.device.type
    if not torch.is_autocast_enabled(device):
        return torch.mm(a, b)
    with torch.autocast(device, enabled=False):
        return torch.mm(a, b)


def linear(plans: dict[Any, Any] | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``, by a kernel with its ``plans`` or, without, by PyTorch's; ``bias`` is contiguous."""
    if plans is None or not orders.is_narrow(x.size(0), x.size(1), weight.size(0)):
        # autocast is on for no layer that has a bias here
        return _product(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    y: Tensor = _linear_launchers()[0](plans, contiguous_rows(x), weight, bias)
    return y


def _definition(
    how: Aggregation,
    x: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    w, row_scale, col_scale, relu, keep, out_dtype = how
    assert isinstance(w, Walks)
    if edge_weight is not None:
        assert w.edges is not None
        edge_weight = edge_weight[w.edges.perm.long()]
    y = reference.spmm(
        to_edge_index(w.forward),
        x,
        edge_weight,
        num_dst=w.forward.num_rows,
        loop_weight=loop_weight,
        row_scale=row_scale,
        col_scale=col_scale,
    )
    out = y if weight is None else _product(y, weight.t())
    return _finish(out, bias, relu, out_dtype), y.clone() if keep else None


def _finish(y: Tensor, bias: Tensor | None, relu: bool, dtype: torch.dtype) -> Tensor:
    y = y.to(dtype) if bias is None else y.to(dtype) + bias.to(dtype)
    return y.relu() if relu else y


def _fake(how: Aggregation, *operands: Any) -> tuple[Tensor, Tensor]:
    x, _, _, weight, _ = operands
    assert isinstance(how.graph, Packed)
    num_rows = how.graph.num_rows
    y = x.new_empty(num_rows, x.size(1)) if how.keep_aggregate else x.new_empty(0)
    return x.new_empty(num_rows, x.size(1) if weight is None else weight.size(0), dtype=how.out_dtype), y


class Spmm(torch.autograd.Function):
    """The aggregation and its derivative: ``(out, A x)``, the second None or empty unless it is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        how: Aggregation,
        x: Tensor,
        edge_weight: Tensor | None,
        loop_weight: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Over the forward direction of ``how.graph``."""
        operands = (x, edge_weight, loop_weight, weight, bias)
        if isinstance(how.graph, Walks):
            out, y = run(how, *operands)
        else:
            out, y = below_autograd(torch.ops.graphfuse.spmm, *how.graph, *how[1:], *operands)
        # Gradients of what x is multiplied with take x, that of W takes A x instead if it is kept. Where none
        # is wanted x is not kept alive, and may be written to.
        _, _, of_edges, of_loops, of_weight, _ = ctx.needs_input_grad
        needs_x = of_edges or of_loops or (of_weight and not how.keep_aggregate)
        ctx.save_for_backward(
            x if needs_x else None,
            edge_weight,
            loop_weight,
            weight,
            out if how.relu else None,
            y if how.keep_aggregate else None,
            savable(how.row_scale),
            savable(how.col_scale),
            packed_of(how.graph),
        )
        ctx.graph, ctx.x_dtype = how.graph, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the operands."""
        dtype, graph = ctx.x_dtype, for_gradient(ctx.graph, grad, grad_y)
        x, edge_weight, loop_weight, weight, out, y, row_scale, col_scale, _ = ctx.saved_tensors
        _, needs_x, needs_edge_weight, needs_loop_weight, needs_weight, needs_bias = ctx.needs_input_grad
        needs_y = needs_edge_weight or needs_loop_weight
        if grad is None:
            if grad_y is None:
                return (None,) * 6
            # only A x was used, as a second derivative may
            grad = y.new_zeros(y.size(0), weight.size(0))
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x = grad_weight = grad_edge_weight = grad_loop_weight = grad_bias = None
        out_grad = grad if needs_bias else None
        plans = graph.forward.plans if isinstance(graph, Walks) else None
        if weight is not None and y is None and (needs_weight or weight.size(0) <= weight.size(1)):
            # the output is the narrow side: W's gradient is (A^T g)^T x, and x's is (A^T g) W
            grad = grad if grad.dtype is dtype else grad.to(dtype)
            keep = needs_x and needs_weight
            back = Aggregation(graph.transpose(), col_scale, row_scale, False, keep, dtype)
            if needs_x:
                grad_x, moved = differentiable(back, grad, edge_weight, loop_weight, weight.t(), None)
            elif needs_weight:
                moved, _ = differentiable(back, grad, edge_weight, loop_weight, None, None)
            if needs_weight:
                assert moved is not None  # one of the two calls made it
                grad_weight, grad_bias = linear_grad(plans, moved, x, out_grad, ctx.bias_dtype)
            grad_y = _product(grad, weight) if needs_y else grad
        else:
            if weight is None:
                grad_y = grad
            else:
                # the input is the narrow side: W's gradient is g^T (A x), and x's is A^T (g W)
                grad = grad if grad.dtype is dtype else grad.to(dtype)
                through = _product(grad, weight)
                grad_y = through if grad_y is None else through + grad_y
                if needs_weight:
                    grad_weight, grad_bias = linear_grad(plans, grad, y, out_grad, ctx.bias_dtype)
            if needs_x:
                # neighbours read its rows: where the result is float32 and x is not, in the dtype of x
                grad_y = grad_y if grad_y.dtype is dtype else grad_y.to(dtype)
                back = Aggregation(graph.transpose(), col_scale, row_scale, False, False, dtype)
                grad_x, _ = differentiable(back, grad_y, edge_weight, loop_weight, None, None)
        if out_grad is not None and grad_bias is None:
            grad_bias = column_sums(out_grad, ctx.bias_dtype)
        if needs_y:
            a, b = _scaled(grad_y.to(dtype), row_scale), _scaled(x, col_scale)
            if needs_edge_weight:
                product = Sddmm.apply(graph, edge_weight.numel(), a, b, loop_weight is not None)
                grad_edge_weight = product.to(edge_weight.dtype)
            if needs_loop_weight:
                n = min(a.size(0), b.size(0))
                own = (a[:n] * b[:n]).sum(1).to(loop_weight.dtype)
                grad_loop_weight = torch.nn.functional.pad(own, (0, loop_weight.numel() - n))
        return None, grad_x, grad_edge_weight, grad_loop_weight, grad_weight, grad_bias


_apply = direct_apply(Spmm)


def linear_grad(
    plans: dict[Any, Any] | None,
    left: Tensor,
    right: Tensor,
    grad: Tensor | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """``left^T right`` and, with ``grad``, the sum of its rows; as :func:`linear`."""
    if (
        plans is not None
        and not torch.is_grad_enabled()  # else a second derivative is wanted
        and orders.launch_bound(left.size(0), left.size(1), right.size(1))
        and _check.runs_kernel(left)
    ):
        rows = None if grad is None else contiguous_rows(grad)
        found: tuple[Tensor, Tensor | None] = _linear_launchers()[1](
            plans, contiguous_rows(left), contiguous_rows(right), rows, bias_dtype
        )
        return found
    return _product(left.t(), right), None if grad is None else column_sums(grad, bias_dtype or grad.dtype)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale[:, None].to(x.dtype)


def _registered(graph: Graph, *arguments: Any) -> tuple[Aggregation, tuple[Any, ...]]:
    # arguments of graphfuse::spmm after the graph
    return Aggregation(graph, *arguments[:5]), arguments[5:]


def _run_registered(graph: Walks, *arguments: Any) -> tuple[Tensor, Tensor]:
    how, operands = _registered(graph, *arguments)
    out, y = run(how, *operands)
    return out, out.new_empty(0) if y is None else y


def _fake_registered(graph: Packed, *arguments: Any) -> tuple[Tensor, Tensor]:
    how, operands = _registered(graph, *arguments)
    return _fake(how, *operands)


def _apply_registered(graph: Packed, *arguments: Any) -> Any:
    how, operands = _registered(graph, *arguments)
    return Spmm.apply(how, *operands)


register(
    "spmm",
    "Tensor? row_scale, Tensor? col_scale, bool relu, bool keep_aggregate, ScalarType out_dtype, "
    "Tensor x, Tensor? edge_weight, Tensor? loop_weight, Tensor? weight, Tensor? bias) -> (Tensor, Tensor)",
    _run_registered,
    _fake_registered,
    _apply_registered,
    choose,
)
