"""Aggregation over a graph, alone or followed by a dense layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.walk import Walks, to_edge_index
from graphfuse.kernels import launch
from graphfuse.ops import _check
from graphfuse.ops._library import Graph, Packed, below_autograd, direct_apply, graph_of, register
from graphfuse.ops.sddmm import Sddmm, contiguous_rows


def spmm(
    windows: RowWindows,
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Sums the features of each node's in-neighbours.

    .. math::
        y_i = \sigma\Big(r_i \sum_{e = (j \to i)} w_e c_j x_j + b\Big)

    Repeated edges count each; a node without in-neighbours gets :math:`\sigma(b)`. Deterministic: sums run
    in a fixed order and are kept in float32.

    Args:
        windows: The graph, ``windows.shape == (num_dst, num_src)``.
        x: ``float16 | bfloat16 | float32[num_src, dim]`` (float64 on a CPU); rows may be strided.
        edge_weight: :math:`w`, any float dtype, ``[num_edges]`` in the order of the edge list that the
            windows were built from. ``None`` means 1.
        loop_weight: ``float32[num_dst]`` (or dtype of ``x``). If given it replaces the diagonal: edges with
            source == receiver are left out, and receiver i gets ``loop_weight[i]`` times its own row.
        row_scale: :math:`r`, like ``loop_weight``; not differentiable. ``None`` means 1.
        col_scale: :math:`c`, ``[num_src]``, likewise.
        bias: :math:`b`, ``[dim]``.
        activation: :math:`\sigma`, ``"relu"`` or ``None`` for the identity.
        out_dtype: Dtype of the result; ``None`` means that of ``x``.

    Returns:
        ``[num_dst, dim]``.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.

    Note:
        On a CPU this runs :func:`graphfuse.reference.spmm`, unless ``TRITON_INTERPRET=1``. Differentiable in
        ``x``, ``edge_weight``, ``loop_weight`` and ``bias``, any number of times.
    """
    relu = _check.activation(activation)
    _check.windows(windows)
    _check.matrix("x", x, windows.shape[1], windows.device)
    _check_operands(windows, x, edge_weight, loop_weight, row_scale, col_scale)
    if bias is not None:
        _check.vector("bias", bias, x.size(1), x.device)
    operands = Operands(x, edge_weight, loop_weight, None, bias)
    return aggregate(windows, operands, row_scale, col_scale, relu, out_dtype)


def spmm_gemm(
    windows: RowWindows,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    edge_weight: Tensor | None = None,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""A graph convolution: aggregation and dense layer in one.

    .. math::
        Y = \sigma\big(R A C X W^\top + b\big)

    Either :math:`(AX)W^\top` in one kernel, which keeps the 16 aggregated rows of a window on chip and
    multiplies them there, or :math:`A(XW^\top)`, a dense product and :func:`spmm`: whichever is estimated to
    move fewer bytes for these widths and this graph.

    Args:
        windows: The graph, ``windows.shape == (num_dst, num_src)``.
        x: ``float16 | bfloat16 | float32[num_src, dim]`` (float64 on a CPU).
        weight: :math:`W`, dtype of ``x``, ``[out_dim, dim]`` as in ``torch.nn.functional.linear``.
        bias: :math:`b`, ``[out_dim]``.
        activation: :math:`\sigma`, ``"relu"`` or ``None`` for the identity.
        edge_weight: As in :func:`spmm`.
        loop_weight: As in :func:`spmm`.
        row_scale: As in :func:`spmm`, the diagonal of :math:`R`.
        col_scale: As in :func:`spmm`, the diagonal of :math:`C`.
        out_dtype: Dtype of the result; ``None`` means that of ``x``.

    Returns:
        ``[num_dst, out_dim]``.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.

    Note:
        Differentiable in ``x``, ``weight``, ``bias``, ``edge_weight`` and ``loop_weight``, any number of
        times. Source: Kipf & Welling, ICLR 2017 (arXiv:1609.02907).
    """
    relu = _check.activation(activation)
    _check.windows(windows)
    num_src = windows.shape[1]
    _check.matrix("x", x, num_src, windows.device)
    _check.matrix("weight", weight, weight.size(0), x.device, x.size(1))
    _check.same_dtype("weight", weight, "x", x.dtype)
    _check_operands(windows, x, edge_weight, loop_weight, row_scale, col_scale)
    if bias is not None:
        _check.vector("bias", bias, weight.size(0), x.device)
    operands = Operands(x, edge_weight, loop_weight, weight, bias)
    return aggregate(windows, operands, row_scale, col_scale, relu, out_dtype)


def _check_operands(
    windows: RowWindows,
    x: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    num_dst, num_src = windows.shape
    if edge_weight is not None:
        _check.vector("edge_weight", edge_weight, windows.num_edges, x.device)
    if loop_weight is not None:
        _check.vector("loop_weight", loop_weight, num_dst, x.device)
    for name, scale, length in (("row_scale", row_scale, num_dst), ("col_scale", col_scale, num_src)):
        if scale is not None:
            _check.vector(name, scale, length, x.device)
            if scale.requires_grad:
                raise ValueError(
                    f"`{name}` must not require a gradient; multiply `x` or the result by it instead"
                )


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

    def transpose(self, keep_aggregate: bool, out_dtype: torch.dtype) -> Aggregation:
        """Over the transpose, the scales swapped, without activation."""
        swapped = (self.graph.transpose(), self.col_scale, self.row_scale)
        return Aggregation(*swapped, False, keep_aggregate, out_dtype)


def aggregate(
    windows: RowWindows,
    operands: Operands,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """:func:`spmm` or, with a weight, :func:`spmm_gemm`, on checked operands."""
    x, edge_weight, _, weight, _ = operands
    if not torch.compiler.is_compiling():  # the op itself checks and pins when it runs
        _check.runs_kernel(x)
        pin_if_capturing(windows)
    weighted = edge_weight is not None
    gathered = x.size(1) if weight is None else min(weight.shape)  # forward or backward, the narrow side is
    rows = launch.prefers_rows(*windows.sizes, gathered, x.dtype, weighted)
    rows = rows or (weighted and edge_weight.dtype != x.dtype)
    # W's gradient is g^T (A x) if the input is the narrow side, so A x is kept for it
    keep = weight is not None and weight.size(0) > weight.size(1)
    keep = keep and weight.requires_grad and torch.is_grad_enabled()
    graph = graph_of(windows, rows, weighted, *operands)
    how = Aggregation(graph, row_scale, col_scale, relu, keep, out_dtype or x.dtype)
    return _call(how, *operands)[0]


def _call(how: Aggregation, *operands: Any) -> tuple[Tensor, Tensor | None]:
    output: tuple[Tensor, Tensor | None]
    if not isinstance(how.graph, Walks):
        output = torch.ops.graphfuse.spmm(*how.graph, *how[1:], *operands)
    elif torch.is_grad_enabled():
        output = _apply(how, *operands)
    else:
        output = _run(how, *operands)
    return output


def _run(
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
    launch_spmm = _launcher()
    graph, scales = (w.forward, w.edges), (edge_weight, loop_weight, row_scale, col_scale)
    if weight is not None:
        forward = w.forward
        sizes = (forward.num_entries, forward.num_cols, x.size(1), weight.size(0), x.element_size())
        order = launch.gemm_order(*sizes, keep)
        if order is launch.GemmOrder.PROJECT:
            x, weight = torch.nn.functional.linear(x, weight), None
        elif order is launch.GemmOrder.AGGREGATE:
            y, _ = launch_spmm(*graph, contiguous_rows(x), *scales, None, None, False, False, x.dtype)
            return _finish(torch.mm(y, weight.t()), bias, relu, out_dtype), y if keep else None
    output: tuple[Tensor, Tensor | None]
    output = launch_spmm(*graph, contiguous_rows(x), *scales, weight, bias, relu, keep, out_dtype)
    return output


@functools.cache
def _launcher() -> Any:
    from graphfuse.kernels.spmm import spmm as launcher  # imports triton

    return launcher


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
    out = y if weight is None else torch.mm(y, weight.t())
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
            out, y = _run(how, *operands)
        else:
            out, y = below_autograd(torch.ops.graphfuse.spmm, *how.graph, *how[1:], *operands)
        linear_in_x = weight is None and edge_weight is None and loop_weight is None
        ctx.save_for_backward(
            None if linear_in_x else x,
            edge_weight,
            loop_weight,
            weight,
            out if how.relu else None,
            y if how.keep_aggregate else None,
        )
        ctx.how, ctx.x_dtype = how, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return out, y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the operands."""
        x, edge_weight, loop_weight, weight, out, y = ctx.saved_tensors
        _, needs_x, needs_edge_weight, needs_loop_weight, needs_weight, needs_bias = ctx.needs_input_grad
        dtype, how = ctx.x_dtype, ctx.how
        needs_y = needs_edge_weight or needs_loop_weight
        if grad is None:
            if grad_y is None:
                return (None,) * 6
            # only A x was used, as a second derivative may
            grad = y.new_zeros(y.size(0), weight.size(0))
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x = grad_weight = grad_edge_weight = grad_loop_weight = grad_bias = None
        if needs_bias:
            grad_bias = grad.sum(0)
            if grad_bias.dtype != ctx.bias_dtype:
                grad_bias = grad_bias.to(ctx.bias_dtype)
        if weight is not None and y is None and (needs_weight or weight.size(0) <= weight.size(1)):
            # the output is the narrow side: W's gradient is (A^T g)^T x, and x's is (A^T g) W
            grad = grad.to(dtype)
            if needs_x:
                back = how.transpose(keep_aggregate=True, out_dtype=dtype)
                grad_x, moved = _call(back, grad, edge_weight, loop_weight, weight.t(), None)
            else:
                back = how.transpose(keep_aggregate=False, out_dtype=dtype)
                moved, _ = _call(back, grad, edge_weight, loop_weight, None, None)
            if needs_weight:
                assert moved is not None
                grad_weight = torch.mm(moved.t(), x)
            grad_y = torch.mm(grad, weight) if needs_y else grad
        else:
            if weight is None:
                grad_y = grad
            else:
                # the input is the narrow side: W's gradient is g^T (A x), and x's is A^T (g W)
                grad = grad.to(dtype)
                through = torch.mm(grad, weight)
                grad_y = through if grad_y is None else through + grad_y
                if needs_weight:
                    grad_weight = torch.mm(grad.t(), y)
            if needs_x:
                back = how.transpose(keep_aggregate=False, out_dtype=dtype)
                grad_x, _ = _call(back, grad_y, edge_weight, loop_weight, None, None)
        if needs_y:
            a, b = _scaled(grad_y.to(dtype), how.row_scale), _scaled(x, how.col_scale)
            if needs_edge_weight:
                product = Sddmm.apply(how.graph, edge_weight.numel(), a, b, loop_weight is not None)
                grad_edge_weight = product.to(edge_weight.dtype)
            if needs_loop_weight:
                n = min(a.size(0), b.size(0))
                own = (a[:n] * b[:n]).sum(1).to(loop_weight.dtype)
                grad_loop_weight = torch.nn.functional.pad(own, (0, loop_weight.numel() - n))
        return None, grad_x, grad_edge_weight, grad_loop_weight, grad_weight, grad_bias


_apply = direct_apply(Spmm)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale[:, None].to(x.dtype)


def _registered(graph: Graph, *arguments: Any) -> tuple[Aggregation, tuple[Any, ...]]:
    # arguments of graphfuse::spmm after the graph
    return Aggregation(graph, *arguments[:5]), arguments[5:]


def _run_registered(graph: Walks, *arguments: Any) -> tuple[Tensor, Tensor]:
    how, operands = _registered(graph, *arguments)
    out, y = _run(how, *operands)
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
)
