"""Public sparse attention: softmax of sampled scores, times values."""

from __future__ import annotations

import functools
from typing import Any, overload

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.walk import Walks, copies, to_edge_index
from graphfuse.kernels import launch
from graphfuse.ops import _check
from graphfuse.ops._library import Graph, Packed, below_autograd, for_gradient, graph_of, register
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
        dropout: Probability that a weight is dropped after the softmax, rounded to a multiple of 2^-16; the
            others grow by 1 / (1 - dropout).
        seed: ``int64[1]`` on the device of ``q``; which weights are dropped is a function of it and of
            (receiver, source, copy of the edge, head). ``None`` draws one with ``torch.randint``.
        edge_query: Dtype of ``q``, ``[num_dst, heads, edge_dim]``; given with ``edge_attr``.
        edge_attr: Dtype of ``q``, ``[num_edges, edge_dim]``, in the order of the edge list that the windows
            were built from; rows may be strided. ``heads * max(head_dim, edge_dim)``, each rounded up to a
            power of two, is at most 4096.

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
    num_dst, num_src = windows.shape
    _check.heads("q", q, num_dst, windows.device)
    _check.heads("k", k, num_src, q.device, q)
    _check.heads("v", v, num_src, q.device, q)
    if q.size(2) > MAX_HEAD_DIM:
        raise ValueError(f"`q` must have a head_dim of at most {MAX_HEAD_DIM} (got {q.size(2)})")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"`dropout` must be in [0, 1) (got {dropout})")
    dropout = min(round(dropout * 2**16), 2**16 - 1) / 2**16
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(1 << 62, (1,), device=q.device)
    elif seed.shape != (1,) or seed.dtype != torch.int64 or seed.device != q.device:
        got = f"{seed.dtype}{list(seed.shape)} on {seed.device}"
        raise ValueError(f"`seed` must be int64[1] on {q.device} (got {got})")
    _check_edges(q, windows.num_edges, edge_query, edge_attr)
    if not torch.compiler.is_compiling():
        _check.runs_kernel(q, "q")
        pin_if_capturing(windows)
    with_edges = edge_attr is not None
    rows = with_edges or launch.attention_prefers_rows(*windows.sizes, q.size(1), q.size(2), q.dtype)
    graph = graph_of(windows, rows, with_edges, q, k, v, edge_query, edge_attr)
    scale = q.size(2) ** -0.5 if scale is None else float(scale)
    arguments = (scale, dropout, q, k, v, seed, edge_query, edge_attr)
    if isinstance(graph, Walks):
        out, _, edge_sum = Attention.apply(graph, *arguments)
    else:
        out, _, edge_sum = torch.ops.graphfuse.attention(*graph, *arguments)
    return (out, edge_sum) if with_edges else out


def _check_edges(q: Tensor, num_edges: int, edge_query: Tensor | None, edge_attr: Tensor | None) -> None:
    if edge_query is None and edge_attr is None:
        return
    if edge_query is None or edge_attr is None:
        missing, given = ("edge_query", "edge_attr") if edge_query is None else ("edge_attr", "edge_query")
        raise ValueError(f"`{missing}` must be given with `{given}` (got None)")
    _check.matrix("edge_attr", edge_attr, num_edges, q.device)
    _check.same_dtype("edge_attr", edge_attr, "q", q.dtype)
    _check.strided("edge_query", edge_query, q.device)
    _check.same_dtype("edge_query", edge_query, "q", q.dtype)
    wanted = [*q.shape[:2], edge_attr.size(1)]
    if list(edge_query.shape) != wanted:
        raise ValueError(f"`edge_query` must have shape {wanted} (got {list(edge_query.shape)})")
    if edge_attr.size(1) == 0 or not launch.attention_takes_edges(q.size(1), q.size(2), edge_attr.size(1)):
        raise ValueError(
            "`edge_attr` must have columns, and heads * max(head_dim, edge_dim), each rounded up to a power "
            f"of two, be at most 4096 (got {edge_attr.size(1)} columns and {q.size(1)} heads of {q.size(2)})"
        )


@functools.cache
def _launchers() -> Any:
    from graphfuse.kernels import attention, attention_bwd  # imports triton

    return attention, attention_bwd


def _structures(w: Walks, dropout: float) -> tuple[Any, Any]:
    kernels, _ = _launchers()
    forward, backward = (
        kernels.Structure(walk, copies(walk) if dropout > 0 else None, None if order is None else order.perm)
        for walk, order in ((w.forward, w.edges), (w.backward, w.backward_edges))
    )
    return forward, backward


def _shape(scale: float, dropout: float, q: Tensor, edge_attr: Tensor | None) -> Any:
    edge_dim = 0 if edge_attr is None else edge_attr.size(1)
    return _launchers()[0].Shape(q.size(1), q.size(2), scale, dropout, q.dtype, edge_dim)


def _edges(edge_query: Tensor | None, edge_attr: Tensor | None) -> Any:
    if edge_query is None or edge_attr is None:
        return None
    return _launchers()[0].Edges(edge_query.contiguous(), contiguous_rows(edge_attr))


def _run(
    w: Walks,
    scale: float,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    edge_query: Tensor | None,
    edge_attr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _check.runs_kernel(q):
        out, edge_sum = _definition(w, scale, dropout, q, k, v, seed, edge_query, edge_attr)
        return out, q.new_empty(0), edge_sum
    kernels, _ = _launchers()
    found: tuple[Tensor, Tensor, Tensor] = kernels.attention_fwd(
        _structures(w, dropout)[0],
        *(contiguous_heads(tensor) for tensor in (q, k, v)),
        seed,
        _edges(edge_query, edge_attr),
        _shape(scale, dropout, q, edge_attr),
    )
    return found


def _definition(
    w: Walks,
    scale: float,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    edge_query: Tensor | None,
    edge_attr: Tensor | None,
) -> tuple[Tensor, Tensor]:
    edge_index = to_edge_index(w.forward)
    if edge_attr is not None:
        assert w.edges is not None
        edge_attr = edge_attr.index_select(0, w.edges.perm)
    found = reference.sparse_attention(edge_index, q, k, v, scale, dropout, seed, edge_query, edge_attr)
    return found if isinstance(found, tuple) else (found, q.new_empty(0))


def _run_backward(
    w: Walks,
    scale: float,
    dropout: float,
    with_edge_attr: bool,
    grad: Tensor,
    edge_value: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    edge_query: Tensor | None,
    edge_attr: Tensor | None,
    out: Tensor,
    softmax: Tensor,
    edge_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not _check.runs_kernel(q):
        operands = (q, k, v, seed, edge_query, edge_attr)
        return _backward_of_definition(w, scale, dropout, grad, edge_value, operands)
    _, kernels = _launchers()
    grad, q, k, v = (contiguous_heads(tensor) for tensor in (grad, q, k, v))
    saved = kernels.Saved(q, k, v, out, softmax, edge_sum, seed, _edges(edge_query, edge_attr))
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = kernels.attention_bwd(
        _structures(w, dropout),
        grad,
        None if edge_attr is None else edge_value.contiguous(),
        saved,
        _shape(scale, dropout, q, edge_attr),
        with_edge_attr,
    )
    return found


def _backward_of_definition(
    w: Walks, scale: float, dropout: float, grad: Tensor, edge_value: Tensor, operands: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # through functorch, which works below autograd too, where a registered op runs
    q, k, v, seed, edge_query, edge_attr = operands

    def run(*given: Any) -> tuple[Tensor, ...]:
        of_edges = given[3:] or (None, None)
        found = _definition(w, scale, dropout, given[0], given[1], given[2], seed, *of_edges)
        return found if given[3:] else found[:1]

    given = (q, k, v) if edge_attr is None else (q, k, v, edge_query, edge_attr)
    _, pull, *_ = torch.func.vjp(run, *given)
    empty = grad.new_empty(0)
    found: list[Tensor] = [*pull((grad, edge_value)[: len(given) // 2]), empty, empty]
    return found[0], found[1], found[2], found[3], found[4]


def contiguous_heads(x: Tensor) -> Tensor:
    """``x`` with the heads of a row contiguous; its rows may stay strided."""
    return x if x.stride()[1:] == (x.size(2), 1) and x.stride(0) > 0 else x.contiguous()


def _fake(
    graph: Packed,
    scale: float,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    edge_query: Tensor | None,
    edge_attr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    softmax = q.new_empty((*q.shape[:2], 2), dtype=torch.float32)
    return q.new_empty(q.shape), softmax, q.new_empty(0 if edge_query is None else edge_query.shape)


def _fake_backward(
    graph: Packed,
    scale: float,
    dropout: float,
    with_edge_attr: bool,
    grad: Tensor,
    edge_value: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    edge_query: Tensor | None,
    edge_attr: Tensor | None,
    *results: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_query = q.new_empty(0 if edge_query is None else edge_query.shape)
    d_attr = q.new_empty(0 if edge_attr is None or not with_edge_attr else edge_attr.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_query, d_attr


class Attention(torch.autograd.Function):
    """Attention and its derivative: ``(out, softmax, edge_sum)``, the second without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: Graph,
        scale: float,
        dropout: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seed: Tensor | None,
        edge_query: Tensor | None,
        edge_attr: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over the forward direction of ``graph``."""
        operands = (q, k, v, seed, edge_query, edge_attr)
        results: tuple[Tensor, Tensor, Tensor]
        if isinstance(graph, Walks):
            results = _run(graph, scale, dropout, *operands)
        else:
            results = below_autograd(torch.ops.graphfuse.attention, *graph, scale, dropout, *operands)
        ctx.graph, ctx.scale, ctx.dropout = graph, scale, dropout
        ctx.save_for_backward(*operands, *results)
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, edge_value: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``q``, ``k``, ``v``, ``edge_query`` and ``edge_attr``."""
        with_edges, with_edge_attr = ctx.saved_tensors[5] is not None, bool(ctx.needs_input_grad[8])
        arguments = (ctx.scale, ctx.dropout, with_edge_attr, grad, edge_value, *ctx.saved_tensors)
        graph = for_gradient(ctx.graph, grad, edge_value)
        if isinstance(graph, Walks):
            dq, dk, dv, d_query, d_attr = _run_backward(graph, *arguments)
        else:
            dq, dk, dv, d_query, d_attr = torch.ops.graphfuse.attention_backward(*graph, *arguments)
        of_edges = (d_query if with_edges else None, d_attr if with_edge_attr else None)
        return None, None, None, dq, dk, dv, None, *of_edges


def _no_derivative(graph: Packed, *arguments: Any) -> Any:
    return below_autograd(torch.ops.graphfuse.attention_backward, *graph, *arguments)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? seed, Tensor? edge_query, Tensor? edge_attr"
register(
    "attention",
    f"float scale, float dropout, {_OPERANDS}) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    Attention.apply,
)
register(
    "attention_backward",
    "float scale, float dropout, bool with_edge_attr, Tensor grad, Tensor edge_value, "
    f"{_OPERANDS}, Tensor out, Tensor softmax, Tensor edge_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_derivative,
)
