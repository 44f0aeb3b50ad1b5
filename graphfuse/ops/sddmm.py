"""Sampled dense-dense product: one number per edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import Walks, to_edge_index
from graphfuse.ops import _check
from graphfuse.ops._library import (
    Graph,
    Packed,
    Sizes,
    below_autograd,
    direct_apply,
    for_gradient,
    graph_of,
    register,
)


def sddmm(windows: RowWindows, a: Tensor, b: Tensor, *, without_loops: bool = False) -> Tensor:
    r"""One dot product per edge.

    .. math::
        s_e = \langle a_i, b_j \rangle, \qquad e = (j \to i)

    Args:
        windows: The graph, ``windows.shape == (num_dst, num_src)``.
        a: ``float16 | bfloat16 | float32[num_dst, dim]`` (float64 on a CPU); rows may be strided.
        b: Dtype of ``a``, ``[num_src, dim]``.
        without_loops: Whether edges with source == receiver get 0.

    Returns:
        ``[num_edges]``, dtype of ``a``, in the order of the edge list that the windows were built from;
        products are summed in float32.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.

    Note:
        On a CPU this runs :func:`graphfuse.reference.sddmm`, unless ``TRITON_INTERPRET=1``. Differentiable in
        ``a`` and ``b``, any number of times.
    """
    _check.windows(windows)
    num_dst, num_src = windows.shape
    _check.matrix("a", a, num_dst, windows.device)
    _check.matrix("b", b, num_src, a.device, a.size(1))
    _check.same_dtype("b", b, "a", a.dtype)
    if not torch.compiler.is_compiling():
        _check.runs_kernel(a, "a")
        pin_if_capturing(windows)
    arguments = (windows.num_edges, a, b, without_loops)
    graph = graph_of(windows, _choose, *arguments)
    product: Tensor
    if isinstance(graph, Walks):
        product = _apply(graph, *arguments)
    else:
        product = torch.ops.graphfuse.sddmm(*graph, *arguments)
    return product


def _choose(sizes: Sizes, *arguments: Any) -> tuple[bool, bool]:
    return True, True


@advises
def _run(w: Walks, num_edges: int, a: Tensor, b: Tensor, without_loops: bool) -> Tensor:
    assert w.edges is not None
    if _check.runs_kernel(a):
        from graphfuse.kernels.sddmm import sddmm as launch_sddmm

        return launch_sddmm(w.forward, w.edges, contiguous_rows(a), contiguous_rows(b), without_loops)
    out = a.new_empty(num_edges)
    product = reference.sddmm(to_edge_index(w.forward), a, b, without_loops=without_loops)
    out[w.edges.perm.long()] = product
    return out


def contiguous_rows(x: Tensor) -> Tensor:
    """``x`` with contiguous features; its rows may stay strided."""
    return x if x.stride(1) == 1 or x.size(1) == 1 else x.contiguous()


def _fake(graph: Packed, num_edges: int, a: Tensor, b: Tensor, without_loops: bool) -> Tensor:
    return a.new_empty(num_edges)


class Sddmm(torch.autograd.Function):
    """The sampled product and its derivative, two aggregations with the edges' gradients as weights."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, num_edges: int, a: Tensor, b: Tensor, without_loops: bool) -> Tensor:
        """Over the forward direction of ``graph``."""
        ctx.graph, ctx.without_loops = graph, without_loops
        ctx.save_for_backward(a, b)
        given = (num_edges, a, b, without_loops)
        product: Tensor
        if isinstance(graph, Walks):
            product = _run(graph, *given)
        else:
            product = below_autograd(torch.ops.graphfuse.sddmm, *graph, *given)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``a`` and ``b``."""
        from graphfuse.ops._aggregate import Aggregation, Spmm  # each is the other's derivative

        a, b = ctx.saved_tensors
        whole = for_gradient(ctx.graph, grad)

        def aggregate(graph: Graph, x: Tensor, num_rows: int) -> Tensor:
            # edges that got 0 as loops pass no gradient: a diagonal of zeros replaces them
            loops = grad.new_zeros(num_rows) if ctx.without_loops else None
            how = Aggregation(graph, None, None, False, False, x.dtype)
            out: Tensor = Spmm.apply(how, x, grad, loops, None, None)[0]
            return out

        grad_a = aggregate(whole, b, a.size(0)) if ctx.needs_input_grad[2] else None
        grad_b = aggregate(whole.transpose(), a, b.size(0)) if ctx.needs_input_grad[3] else None
        return None, None, grad_a, grad_b, None


_apply = direct_apply(Sddmm)


register(
    "sddmm",
    "SymInt num_edges, Tensor a, Tensor b, bool without_loops) -> Tensor",
    _run,
    _fake,
    Sddmm.apply,
    _choose,
)
