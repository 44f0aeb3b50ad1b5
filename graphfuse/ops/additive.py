"""Public additive attention, GAT's and GATv2's: scores are sums of what source, receiver and edge bring."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import EdgeOrder, Walk, Walks, copies, to_edge_index
from graphfuse.kernels import launch, walk_rules
from graphfuse.ops import _check
from graphfuse.ops._check_additive import check_gat, check_gatv2
from graphfuse.ops._heads import narrowed, padded, width_of
from graphfuse.ops._library import (
    Graph,
    Packed,
    Sizes,
    below_autograd,
    direct_apply,
    for_gradient,
    graph_of,
    once_differentiable,
    packed_of,
    records,
    register,
)


def gat_attention(
    a_src: Tensor,
    a_dst: Tensor,
    x: Tensor,
    windows: RowWindows,
    negative_slope: float = 0.2,
    edge_score: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    self_loops: bool = False,
    loop_score: Tensor | None = None,
) -> Tensor:
    r"""GAT's attention: scores are a number of the source plus one of the receiver.

    .. math::
        s_e = \mathrm{LeakyReLU}(a^{src}_j + a^{dst}_i + b_e), \qquad
        o_i = \sum_{e = (j \to i)} \frac{e^{s_e}}{\sum_{e' = (l \to i)} e^{s_{e'}}}\, x_j

    Scores, softmax and sum run in one kernel for each head; no score reaches memory. Forward gathers one row
    of ``x`` for each neighbour, and backward one of the gradient: what ``a_dst`` gets, forward has summed up
    beside its output. A node without in-neighbours gets 0 and gives finite gradients.

    Args:
        a_src: Numbers of the sources, ``[num_src, heads]``, in the dtype of ``x``, or in float32 where that
            is half precision, as under autocast.
        a_dst: Numbers of the receivers, dtype of ``a_src``, ``[num_dst, heads]``.
        x: Values, ``float16 | bfloat16 | float32[num_src, heads, head_dim]`` (float64 on a CPU), heads of a
            row contiguous, rows may be strided; ``head_dim`` at most 256.
        windows: The graph, ``windows.shape == (num_dst, num_src)``; a repeated edge counts as often.
        negative_slope: Slope of the LeakyReLU below 0.
        edge_score: Numbers :math:`b` of the edges, dtype of ``a_src``, ``[num_edges, heads]``, in the order
            of the edge list that the windows were built from.
        dropout: Probability that a weight is dropped after the softmax; the others grow by 1 / (1 - dropout).
        seed: ``int64[1]`` on the device of ``x``; which weights are dropped is a function of it and of
            (receiver, source, copy of the edge, head). ``None`` draws one with ``torch.randint``.
        self_loops: Whether each of the first ``min(num_dst, num_src)`` nodes attends to itself, once: edges
            with source == receiver are left out, and each of those nodes gets one.
        loop_score: :math:`b` of those loops, ``[min(num_dst, num_src), heads]``; given with ``edge_score``
            and ``self_loops``.

    Returns:
        ``[num_dst, heads, head_dim]`` in the dtype of ``a_src``; sums are kept in float32.

    Raises:
        ValueError: a shape, dtype, device or rate differs from the above; the message names the argument.
        TypeError: an operand is None.

    Note:
        Saved for backward: the operands, the output, as many numbers for the gradient of ``a_dst``, and
        maximum and sum of each softmax. Bitwise reproducible, forward and backward. Not differentiable twice.
        Reference: :func:`graphfuse.reference.gat_attention`. Source: Veličković et al., Graph Attention
        Networks, ICLR 2018 (arXiv:1710.10903).
    """
    _check.present("x", x)  # the weights, which check_gat serves too, have none
    seed = check_gat(a_src, a_dst, x, windows, dropout, seed, self_loops, edge_score, loop_score)
    tilted = records(a_dst)
    how = How(float(negative_slope), float(dropout), self_loops, False, tilted)
    return _call(how, windows, a_dst, a_src, x, edge_score, loop_score, seed)


def gatv2_attention(
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    windows: RowWindows,
    negative_slope: float = 0.2,
    edge: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    self_loops: bool = False,
    loop_edge: Tensor | None = None,
) -> Tensor:
    r"""GATv2's attention: the nonlinearity stands between the sum and its product with a vector.

    .. math::
        s_e = a^\top \mathrm{LeakyReLU}(x_j + y_i + b_e), \qquad
        o_i = \sum_{e = (j \to i)} \frac{e^{s_e}}{\sum_{e' = (l \to i)} e^{s_{e'}}}\, x_j

    The row of a source is read once and serves its score and the sum; nothing of the size of the edges is
    made beside the gradient of ``edge``. A node without in-neighbours gets 0 and gives finite gradients.

    Args:
        x_src: :math:`x`, ``float16 | bfloat16 | float32[num_src, heads, head_dim]`` (float64 on a CPU), heads
            of a row contiguous, rows may be strided; ``head_dim`` at most 256.
        x_dst: :math:`y`, dtype of ``x_src``, ``[num_dst, heads, head_dim]``.
        att: :math:`a`, ``[heads, head_dim]``, in the dtype of ``x_src``, or in float32 where that is half
            precision, as under autocast.
        windows: The graph, ``windows.shape == (num_dst, num_src)``; a repeated edge counts as often.
        negative_slope: Slope of the LeakyReLU below 0.
        edge: :math:`b`, dtype of ``x_src``, ``[num_edges, heads, head_dim]``, in the order of the edge list
            that the windows were built from.
        dropout: Probability that a weight is dropped after the softmax; the others grow by 1 / (1 - dropout).
        seed: ``int64[1]``, as of :func:`gat_attention`.
        self_loops: Whether each of the first ``min(num_dst, num_src)`` nodes attends to itself, once: edges
            with source == receiver are left out, and each of those nodes gets one.
        loop_edge: :math:`b` of those loops, ``[min(num_dst, num_src), heads, head_dim]``; given with ``edge``
            and ``self_loops``.

    Returns:
        ``[num_dst, heads, head_dim]`` in the dtype of ``att``; sums are kept in float32.

    Raises:
        ValueError: a shape, dtype, device or rate differs from the above; the message names the argument.
        TypeError: an operand is None.

    Note:
        Saved for backward: the operands, the output, and maximum and sum of each softmax. Bitwise
        reproducible, forward and backward. Not differentiable twice. Reference:
        :func:`graphfuse.reference.gatv2_attention`. Source: Brody et al., How Attentive are Graph Attention
        Networks?, ICLR 2022 (arXiv:2105.14491).
    """
    seed = check_gatv2(x_src, x_dst, att, windows, dropout, seed, self_loops, edge, loop_edge)
    how = How(float(negative_slope), float(dropout), self_loops, True, False)
    return _call(how, windows, x_dst, att, x_src, edge, loop_edge, seed)


class How(NamedTuple):
    """Which attention, in the order of the registered ops."""

    slope: float
    dropout: float
    self_loops: bool
    v2: bool
    tilted: bool  # whether forward sums up GAT's tilt, of which backward makes the gradient of a_dst


class Operands(NamedTuple):
    """Tensors that forward takes, in the order of the registered ops."""

    own: Tensor  # a_dst, or GATv2's x_dst
    other: Tensor  # a_src, or GATv2's att
    x: Tensor
    edge: Tensor | None
    loop_edge: Tensor | None
    seed: Tensor | None


def _call(how: How, windows: RowWindows, *operands: Any) -> Tensor:
    graph = graph_of(windows, choose, *how, *operands)
    out: Tensor
    if not isinstance(graph, Walks):
        out = torch.ops.graphfuse.additive_attention(*graph, *how, *operands)[0]
    elif records(*operands):
        out = _apply(graph, how, *operands)[0]
    else:
        out = run_forward(graph, how, Operands(*operands), keep_softmax=False)[0]
    return out


def _split(arguments: tuple[Any, ...]) -> tuple[How, tuple[Any, ...]]:
    """The first arguments of a registered op after the graph, and the others."""
    fields = len(How._fields)
    return How(*arguments[:fields]), arguments[fields:]


def choose(sizes: Sizes, *arguments: Any) -> tuple[bool, bool]:
    """Whether rows are walked, and whether the order of the edges is needed."""
    _slope, dropout, _loops, v2, tilted, _own, other, x, edge, *_ = arguments
    with_edges, (_, heads, dim) = edge is not None, x.shape
    # the window kernel reads numbers of the first source, so there has to be one
    if v2 or with_edges or sizes[1] == 0:
        return True, with_edges
    which = (*sizes, heads, dim, tilted, dropout > 0)
    listed = walk_rules.gat_lists_edges(*which, x.dtype)
    return not listed and launch.gat_prefers_rows(*which, other.dtype, x.dtype), False


@functools.cache
def launchers() -> Any:
    """The modules that launch forward and backward."""
    from graphfuse.kernels import additive, additive_bwd  # imports triton

    return additive, additive_bwd


def structure_of(walk: Walk, order: EdgeOrder | None, how: How) -> Any:
    """The graph as the launchers take it."""
    edge_perm = None if order is None else order.perm
    return launchers()[0].Structure(walk, copies(walk) if how.dropout > 0 else None, edge_perm)


def _prepared(w: Walk, how: How, given: Operands) -> tuple[Any, Any]:
    """What the launchers take beside the graph: operands, shape.

    Features that are 0 change nothing but how fast rows are gathered, so there may be more than were given;
    not where edges have features too, which would have to be copied.
    """
    kernels, _ = launchers()
    width = given.x.size(2) if how.v2 and given.edge is not None else width_of(w, given.x)
    x, other = padded(w, given.x, width), given.other.contiguous()
    own = padded(w, given.own, width) if how.v2 else given.own.contiguous()
    if how.v2 and width != other.size(1):
        other = torch.nn.functional.pad(other, (0, width - other.size(1)))
    edge, loop_edge = given.edge, given.loop_edge
    edge = None if edge is None else edge.contiguous()
    loop_edge = None if loop_edge is None else loop_edge.contiguous()
    operands = kernels.Operands(own, other, x, edge, loop_edge, given.seed)
    return operands, kernels.Shape(*x.shape[1:], *how[:4], x.dtype)


@advises
def run_forward(w: Walks, how: How, given: Operands, keep_softmax: bool = True) -> Results:
    """Launches forward, or runs the definition; the softmax is empty if nobody differentiates."""
    if not _check.runs_kernel(given.x):
        out = _definition(w, how, given)
        return out, out.new_empty(0), out.new_empty(0)
    operands, shape = _prepared(w.forward, how, given)
    structure = structure_of(w.forward, w.edges, how)
    fwd = launchers()[0].additive_fwd
    out, softmax, tilt, _ = fwd(structure, operands, shape, how.tilted, keep_softmax=keep_softmax)
    return narrowed(out, given.x), out.new_empty(0) if softmax is None else softmax, narrowed(tilt, given.x)


def _definition(w: Walks, how: How, given: Operands) -> Tensor:
    own, other, x, edge, loop_edge, seed = given
    edge_index = to_edge_index(w.forward)
    if edge is not None:
        assert w.edges is not None
        edge = edge.index_select(0, w.edges.perm)
    rest = (how.slope, edge, how.dropout, seed, how.self_loops, loop_edge)
    if how.v2:
        return reference.gatv2_attention(edge_index, x, own, other, *rest)
    return reference.gat_attention(edge_index, other, own, x, *rest)


Results = tuple[Tensor, Tensor, Tensor]  # the output, the softmax, the tilt
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@advises
def _run_backward(w: Walks, *arguments: Any) -> Gradients:
    how, (with_edges, grad, *rest) = _split(arguments)
    given, results = Operands(*rest[:-3]), rest[-3:]
    if not _check.runs_kernel(given.x):
        return _backward_of_definition(w, how, with_edges, grad, given)
    operands, shape = _prepared(w.forward, how, given)
    structures = (structure_of(w.forward, w.edges, how), structure_of(w.backward, w.backward_edges, how))
    kernels, (out, softmax, tilt) = launchers()[1], results
    tilt = tilt if tilt.numel() == 0 else padded(w.forward, tilt, shape.dim)
    saved = kernels.Saved(padded(w.forward, out, shape.dim), softmax, tilt)
    # neighbours read its rows: where terms of scores are float32 and x is not, in the dtype of x
    grad = padded(w.forward, grad.to(given.x.dtype), shape.dim)
    d_own, d_other, dx, d_edge, d_loop_edge = kernels.additive_bwd(
        structures, grad, operands, saved, shape, with_edges
    )
    if how.v2:
        d_own, d_other = narrowed(d_own, given.own), narrowed(d_other, given.other)
    return d_own, d_other, narrowed(dx, given.x), d_edge, d_loop_edge


def gradients(graph: Graph, how: How, with_edges: bool, grad: Tensor, saved: Sequence[Any]) -> Gradients:
    """Gradients of all operands but the seed, from ``saved``: the operands and what forward returned."""
    graph, arguments = for_gradient(graph, grad), (*how, with_edges, grad, *saved)
    found: Gradients
    if isinstance(graph, Walks):
        found = _run_backward(graph, *arguments)
    else:
        found = torch.ops.graphfuse.additive_attention_backward(*graph, *arguments)
    return found


def _backward_of_definition(w: Walks, how: How, with_edges: bool, grad: Tensor, given: Operands) -> Gradients:
    # through functorch, which works below autograd too, where a registered op runs
    edges = tuple(value for value in (given.edge, given.loop_edge) if value is not None)

    def run(own: Tensor, other: Tensor, x: Tensor, *edges: Tensor) -> Tensor:
        edge, loop_edge = (*edges, None, None)[:2]
        return _definition(w, how, Operands(own, other, x, edge, loop_edge, given.seed))

    _, pull, *_ = torch.func.vjp(run, *given[:3], *edges)
    d_own, d_other, dx, *d_edges = pull(grad)
    none = grad.new_empty(0)
    d_edge, d_loop_edge = (*d_edges, none, none)[:2] if with_edges else (none, none)
    return d_own, d_other, dx, d_edge, d_loop_edge


def _fake(graph: Packed, *arguments: Any) -> Results:
    how, operands = _split(arguments)
    given = Operands(*operands)
    shape = (graph.num_rows, given.x.size(1), given.x.size(2))
    softmax = given.x.new_empty((*shape[:2], 2), dtype=torch.float32)
    return given.other.new_empty(shape), softmax, given.x.new_empty(shape if how.tilted else 0)


def _fake_backward(graph: Packed, *arguments: Any) -> Gradients:
    _, (with_edges, _, *rest) = _split(arguments)
    given = Operands(*rest[:-3])
    d_edge, d_loop_edge = (
        given.x.new_empty(0) if value is None or not with_edges else value.new_empty(value.shape)
        for value in (given.edge, given.loop_edge)
    )
    d_own, d_other, dx = (value.new_empty(value.shape) for value in given[:3])
    return d_own, d_other, dx, d_edge, d_loop_edge


class Additive(torch.autograd.Function):
    """Additive attention and its derivative: ``(out, softmax, tilt)``, the latter two without gradient."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, how: How, *operands: Any) -> Results:
        """Over the forward direction of ``graph``; ``operands`` are those of :class:`Operands`."""
        results: Results
        if isinstance(graph, Walks):
            results = run_forward(graph, how, Operands(*operands))
        else:
            results = below_autograd(torch.ops.graphfuse.additive_attention, *graph, *how, *operands)
        ctx.graph, ctx.how = graph, how
        ctx.save_for_backward(packed_of(graph), *operands, *results)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)  # or every backward would fill two gradients with zeros
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Gradients of the operands."""
        if grad is None:
            return (None,) * (2 + len(Operands._fields))
        needs = Operands(*ctx.needs_input_grad[2:])
        with_edges = bool(needs.edge or needs.loop_edge)
        _, *saved = ctx.saved_tensors
        found = gradients(ctx.graph, ctx.how, with_edges, grad, saved)
        wanted = [gradient if need else None for gradient, need in zip(found, needs[:5], strict=True)]
        return None, None, *wanted, None


_apply = direct_apply(Additive)


def _run_registered(graph: Walks, *arguments: Any) -> Results:
    how, operands = _split(arguments)
    return run_forward(graph, how, Operands(*operands))


def _apply_registered(graph: Packed, *arguments: Any) -> Any:
    how, operands = _split(arguments)
    return Additive.apply(graph, how, *operands)


def _no_derivative(graph: Packed, *arguments: Any) -> Any:
    return below_autograd(torch.ops.graphfuse.additive_attention_backward, *graph, *arguments)


_HOW = "float slope, float dropout, bool self_loops, bool v2, bool tilted"
_OPERANDS = "Tensor own, Tensor other, Tensor x, Tensor? edge, Tensor? loop_edge, Tensor? seed"
register(
    "additive_attention",
    f"{_HOW}, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _run_registered,
    _fake,
    _apply_registered,
    choose,
)
register(
    "additive_attention_backward",
    f"{_HOW}, bool with_edges, Tensor grad, {_OPERANDS}, Tensor out, Tensor softmax, Tensor tilt) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_derivative,
    lambda sizes, *arguments: choose(
        sizes, *arguments[: len(How._fields)], *arguments[len(How._fields) + 2 :]
    ),
)
