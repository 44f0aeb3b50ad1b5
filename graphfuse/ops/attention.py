"""Public sparse attention: softmax of sampled scores, times values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import EdgeOrder, Walk, Walks, copies, to_edge_index
from graphfuse.kernels import launch
from graphfuse.ops import _check
from graphfuse.ops._check_attention import check_edges, check_key_scale
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
from graphfuse.ops.sddmm import contiguous_rows

MAX_HEAD_DIM = 256  # what a window kernel holds on chip


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: RowWindows,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    self_loops: bool = False,
    key_scale: Tensor | None = None,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: RowWindows,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    edge_query: Tensor,
    edge_attr: Tensor,
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: RowWindows,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    edge_query: Tensor | None = None,
    edge_attr: Tensor | None = None,
    self_loops: bool = False,
    key_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention in which node :math:`i` sees only its in-neighbours :math:`N(i)`.

    .. math::
        s_{ij} = \lambda\, q_i^\top k_j, \qquad
        o_i = \sum_{j \in N(i)} \frac{e^{s_{ij}}}{\sum_{l \in N(i)} e^{s_{il}}}\, v_j

    Scores, softmax and sum run in one kernel for each head; no score reaches memory, forward or backward. A
    node without in-neighbours gets 0 and gives finite gradients.

    Edges may carry numbers :math:`a_{ij}`. With the receiver's query for them, :math:`u_i`, the score is
    :math:`\lambda (q_i^\top k_j + u_i^\top a_{ij})`, and the sum of :math:`a_{ij}` under the same weights is
    returned too. A linear map :math:`W` of edge features that is added to keys and values folds into this:
    :math:`u_i = W^\top q_i`, and :math:`W \sum_j p_{ij} a_{ij}` is added to :math:`o_i`.

    Args:
        q: Queries, ``float16 | bfloat16 | float32[num_dst, heads, head_dim]`` (float64 on a CPU), heads of a
            row contiguous, rows may be strided; ``head_dim`` at most 256.
        k: Keys, dtype of ``q``, ``[num_src, heads, head_dim]``.
        v: Values, dtype of ``q``, ``[num_src, heads, head_dim]``.
        windows: The graph, ``windows.shape == (num_dst, num_src)``; a repeated edge counts as often.
        scale: The factor :math:`\lambda`, without unit; ``None`` means ``head_dim ** -0.5``.
        dropout: Probability that a weight is dropped after the softmax; the others grow by 1 / (1 - dropout).
        seed: ``int64[1]`` on the device of ``q``; which weights are dropped is a function of it and of
            (receiver, source, copy of the edge, head). ``None`` draws one with ``torch.randint``.
        edge_query: Dtype of ``q``, ``[num_dst, heads, edge_dim]``; given with ``edge_attr``.
        edge_attr: Dtype of ``q``, ``[num_edges, edge_dim]``, in the order of the edge list that the windows
            were built from; rows may be strided. ``heads * max(head_dim, edge_dim)``, each rounded up to a
            power of two, is at most 4096.
        self_loops: Whether every node attends to itself, once: edges with source == receiver are left out,
            and each node gets one. Only if ``num_dst == num_src``, and without ``edge_attr``.
        key_scale: ``float32[num_src, heads]`` (float64 if ``q`` is): a promise that ``k`` is
            ``key_scale[:, :, None] * v``. Then the kernels read one row, of ``v``, for each neighbour, not
            two; ``k`` itself is not read, and gets the gradient of the keys. ``key_scale`` gets none, and
            must not require one. Without ``edge_attr``.

    Returns:
        ``[num_dst, heads, head_dim]`` in the dtype of ``q``; sums are kept in float32. With ``edge_attr``
        also its weighted sums, ``[num_dst, heads, edge_dim]``.

    Raises:
        ValueError: a shape, dtype, device or rate differs from the above; the message names the argument.

    Note:
        Saved for backward: the operands, the results, and maximum and sum of each softmax (``float32[num_dst,
        heads, 2]``). Bitwise reproducible, forward and backward. Not differentiable twice. Reference:
        :func:`graphfuse.reference.sparse_attention`. Source: Li & Chandramowlishwaran, Fused3S, ICS 2025
        (arXiv:2505.08098).
    """
    _check.windows(windows)
    (num_dst, num_src), device = windows.shape, windows.device
    _check.heads("q", q, num_dst, device)
    _check.heads("k", k, num_src, device, q)
    _check.heads("v", v, num_src, device, q)
    head_dim = q.size(2)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"`q` must have a head_dim of at most {MAX_HEAD_DIM} (got {head_dim})")
    seed = _check.dropout_seed(dropout, seed, device)
    check_edges(q, windows.num_edges, edge_query, edge_attr)
    if key_scale is not None:
        check_key_scale(key_scale, k, edge_attr)
    if self_loops and (num_dst != num_src or edge_attr is not None):
        got = f"{num_dst} receivers and {num_src} sources" if num_dst != num_src else "`edge_attr`"
        raise ValueError(
            f"`self_loops` wants one set of nodes, and edges without numbers (got {got}); add the loops to "
            "the edges instead"
        )
    if not torch.compiler.is_compiling():
        _check.runs_kernel(q, "q")
        pin_if_capturing(windows)
    how = How(head_dim**-0.5 if scale is None else float(scale), dropout, self_loops)
    given = Operands(q, k, v, seed, edge_query, edge_attr, key_scale)
    graph = graph_of(windows, choose, *how, *given)
    if not isinstance(graph, Walks):
        out, _, edge_sum = torch.ops.graphfuse.attention(*graph, *how, *given)
    elif records(*given):
        out, _, edge_sum = _apply(graph, how, *given)
    else:
        out, _, edge_sum = run_forward(graph, how, given, keep_softmax=False)
    return out if edge_attr is None else (out, edge_sum)


def _split(arguments: tuple[Any, ...]) -> tuple[How, tuple[Any, ...]]:
    """The first arguments of a registered op after the graph, and the others."""
    fields = len(How._fields)
    return How(*arguments[:fields]), arguments[fields:]


def choose(sizes: Sizes, *arguments: Any) -> tuple[bool, bool]:
    """Whether rows are walked, and whether the order of the edges is needed."""
    # scale, dropout, self_loops; q, k, v, seed, edge_query, edge_attr
    _, dropout, _, q, _, _, _, _, edge_attr, *_ = arguments
    with_edges, (_, heads, dim) = edge_attr is not None, q.shape
    # the window kernel reads numbers of the first source, so there has to be one
    rows = with_edges or sizes[1] == 0
    return rows or launch.attention_prefers_rows(*sizes, heads, dim, dropout > 0, q.dtype), with_edges


class How(NamedTuple):
    """Which attention, in the order of the registered ops."""

    scale: float
    dropout: float
    self_loops: bool


class Operands(NamedTuple):
    """Tensors that forward takes, in the order of the registered ops."""

    q: Tensor
    k: Tensor
    v: Tensor
    seed: Tensor | None
    edge_query: Tensor | None
    edge_attr: Tensor | None
    key_scale: Tensor | None


Results = tuple[Tensor, Tensor, Tensor]  # the output, the softmax, the weighted sums of edge_attr
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@functools.cache
def launchers() -> Any:
    """The modules that launch forward and backward."""
    from graphfuse.kernels import attention, attention_bwd  # imports triton

    return attention, attention_bwd


def structure_of(walk: Walk, order: EdgeOrder | None, dropout: float) -> Any:
    """The graph as the launchers take it."""
    edge_perm = None if order is None else order.perm
    return launchers()[0].Structure(walk, copies(walk) if dropout > 0 else None, edge_perm)


def _prepared(w: Walk, how: How, given: Operands) -> tuple[Any, Any, Any]:
    """What the launchers take beside the graph: q, k and v; the edges' tensors; the shape.

    Features that are 0 change nothing but how fast rows are gathered, so there may be more than were given.
    """
    kernels, _ = launchers()
    edges, edge_dim = None, 0
    if given.edge_query is not None and given.edge_attr is not None:
        edges = kernels.Edges(given.edge_query.contiguous(), contiguous_rows(given.edge_attr))
        edge_dim = edges.attr.size(1)
    width = width_of(w, given.q)
    q, v = padded(w, given.q, width), padded(w, given.v, width)
    key_scale = None if given.key_scale is None else given.key_scale.contiguous()
    k = padded(w, given.k, width) if key_scale is None else v  # the kernels scale the rows that they read
    shape = kernels.Shape(*q.shape[1:], how.scale, how.dropout, q.dtype, edge_dim, how.self_loops)
    return (q, k, v, key_scale), edges, shape


@advises
def run_forward(w: Walks, how: How, given: Operands, keep_softmax: bool = True) -> Results:
    """Launches forward, or runs the definition; the softmax is empty if nobody differentiates."""
    if not _check.runs_kernel(given.q):
        out, edge_sum = _definition(w, how, given)
        return out, out.new_empty(0), edge_sum
    qkv, edges, shape = _prepared(w.forward, how, given)
    structure = structure_of(w.forward, w.edges, how.dropout)
    fwd = launchers()[0].attention_fwd
    out, softmax, edge_sum, _ = fwd(structure, *qkv, given.seed, edges, shape, keep_softmax=keep_softmax)
    return narrowed(out, given.q), out.new_empty(0) if softmax is None else softmax, edge_sum


def _definition(w: Walks, how: How, given: Operands) -> tuple[Tensor, Tensor]:
    q, k, v, seed, edge_query, edge_attr, _ = given
    edge_index = to_edge_index(w.forward)
    if edge_attr is not None:
        assert w.edges is not None
        edge_attr = edge_attr.index_select(0, w.edges.perm)
    rest = (how.scale, how.dropout, seed, edge_query, edge_attr, how.self_loops)
    found = reference.sparse_attention(edge_index, q, k, v, *rest)
    return found if isinstance(found, tuple) else (found, q.new_empty(0))


@advises
def _run_backward(w: Walks, *arguments: Any) -> Gradients:
    how, (with_edge_attr, grad, edge_value, *rest) = _split(arguments)
    given, (out, softmax, edge_sum) = Operands(*rest[:-3]), rest[-3:]
    if not _check.runs_kernel(given.q):
        return _backward_of_definition(w, how, grad, edge_value, given)
    qkv, edges, shape = _prepared(w.forward, how, given)
    _, kernels = launchers()
    forward = structure_of(w.forward, w.edges, how.dropout)
    backward = structure_of(w.backward, w.backward_edges, how.dropout)
    dq, dk, dv, *of_edges = kernels.attention_bwd(
        (forward, backward),
        padded(w.forward, grad, shape.dim),
        None if edges is None else edge_value.contiguous(),
        kernels.Saved(*qkv, padded(w.forward, out, shape.dim), softmax, edge_sum, given.seed, edges),
        shape,
        with_edge_attr,
    )
    return narrowed(dq, given.q), narrowed(dk, given.k), narrowed(dv, given.v), of_edges[0], of_edges[1]


def gradients(
    graph: Graph, how: How, with_edge_attr: bool, grad: Tensor, edge_value: Tensor, saved: Sequence[Any]
) -> Gradients:
    """Gradients of q, k, v and the edges' tensors, from ``saved``: the operands and what forward returned."""
    graph, arguments = for_gradient(graph, grad, edge_value), (with_edge_attr, grad, edge_value, *saved)
    found: Gradients
    if isinstance(graph, Walks):
        found = _run_backward(graph, *how, *arguments)
    else:
        found = torch.ops.graphfuse.attention_backward(*graph, *how, *arguments)
    return found


def _backward_of_definition(
    w: Walks, how: How, grad: Tensor, edge_value: Tensor, given: Operands
) -> Gradients:
    # through functorch, which works below autograd too, where a registered op runs
    q, k, v = given[:3]

    def run(q: Tensor, k: Tensor, v: Tensor, *of_edges: Tensor) -> tuple[Tensor, Tensor]:
        edge_query, edge_attr = of_edges or (None, None)
        return _definition(w, how, Operands(q, k, v, given.seed, edge_query, edge_attr, None))

    of_edges = () if given.edge_attr is None else (given.edge_query, given.edge_attr)
    _, pull, *_ = torch.func.vjp(run, q, k, v, *of_edges)
    dq, dk, dv, *of_edges = pull((grad, edge_value))
    d_query, d_attr = of_edges or (grad.new_empty(0), grad.new_empty(0))
    return dq, dk, dv, d_query, d_attr


def _fake(graph: Packed, *arguments: Any) -> Results:
    _, operands = _split(arguments)
    q, _, _, _, edge_query, _, _ = Operands(*operands)
    softmax = q.new_empty((*q.shape[:2], 2), dtype=torch.float32)
    return q.new_empty(q.shape), softmax, q.new_empty(0 if edge_query is None else edge_query.shape)


def _fake_backward(graph: Packed, *arguments: Any) -> Gradients:
    _, (with_edge_attr, _, _, *rest) = _split(arguments)
    q, k, v, _, edge_query, edge_attr, _ = Operands(*rest[:-3])
    d_query = q.new_empty(0 if edge_query is None else edge_query.shape)
    d_attr = q.new_empty(0 if edge_attr is None or not with_edge_attr else edge_attr.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_query, d_attr


class Attention(torch.autograd.Function):
    """Attention and its derivative: ``(out, softmax, edge_sum)``, the second without gradient."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, how: How, *operands: Any) -> Results:
        """Over the forward direction of ``graph``; ``operands`` are those of :class:`Operands`."""
        results: Results
        if isinstance(graph, Walks):
            results = run_forward(graph, how, Operands(*operands))
        else:
            results = below_autograd(torch.ops.graphfuse.attention, *graph, *how, *operands)
        ctx.graph, ctx.how = graph, how
        ctx.save_for_backward(packed_of(graph), *operands, *results)
        ctx.mark_non_differentiable(results[1])
        ctx.set_materialize_grads(False)  # or every backward would fill a gradient of the softmax with zeros
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, _: None, edge_value: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the operands."""
        _, *saved = ctx.saved_tensors  # once: activation checkpointing unpacks nothing a second time
        given, (out, _, edge_sum) = Operands(*saved[:-3]), saved[-3:]
        with_edge_attr = bool(ctx.needs_input_grad[2 + Operands._fields.index("edge_attr")])
        grad = torch.zeros_like(out) if grad is None else grad
        if edge_value is None:  # without edges it is of no size
            edge_value = torch.zeros_like(edge_sum) if edge_sum.numel() > 0 else edge_sum
        found = gradients(ctx.graph, ctx.how, with_edge_attr, grad, edge_value, saved)
        *of_qkv, d_query, d_attr = found
        of_edges = (None if given.edge_query is None else d_query, d_attr if with_edge_attr else None)
        return None, None, *of_qkv, None, *of_edges, None


_apply = direct_apply(Attention)


def _run_registered(graph: Walks, *arguments: Any) -> Results:
    how, operands = _split(arguments)
    return run_forward(graph, how, Operands(*operands))


def _apply_registered(graph: Packed, *arguments: Any) -> Any:
    how, operands = _split(arguments)
    return Attention.apply(graph, how, *operands)


def _no_derivative(graph: Packed, *arguments: Any) -> Any:
    return below_autograd(torch.ops.graphfuse.attention_backward, *graph, *arguments)


_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? seed, Tensor? edge_query, Tensor? edge_attr, Tensor? key_scale"
)
register(
    "attention",
    f"float scale, float dropout, bool self_loops, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _run_registered,
    _fake,
    _apply_registered,
    choose,
)
register(
    "attention_backward",
    "float scale, float dropout, bool self_loops, bool with_edge_attr, Tensor grad, Tensor edge_value, "
    f"{_OPERANDS}, Tensor out, Tensor softmax, Tensor edge_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_derivative,
    lambda sizes, *arguments: choose(sizes, *arguments[:3], *arguments[6:]),
)
