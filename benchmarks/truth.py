"""What an op should give: float64, on all rows of a small graph and on a sample of a large one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphfuse.reference.attention import kept

_RANDOM, _LONGEST = 4096, 16
_SOURCES = 16  # whose gradients are checked, which takes all edges of all their receivers
_PIECE = 2**24  # elements that one step of a float64 sum holds


class Error(NamedTuple):
    """The worst deviation that was found, and what it may be."""

    value: float
    limit: float

    @property
    def wrong(self) -> bool:
        """Whether it is too large; NaN is."""
        return not self.value <= self.limit


class Rows(NamedTuple):
    """The edges of some rows of the matrix."""

    rows: Tensor  # int64[num_rows], which rows
    place: Tensor  # int64[num_edges]: position in `rows` of each edge's receiver
    column: Tensor  # int64[num_edges]
    edge: Tensor  # int64[num_edges]: position in the caller's edge list


def sample(row: Tensor, column: Tensor, num_rows: int) -> Rows:
    """4,096 random rows and the 16 longest, or all of few; edge e joins ``row[e]`` and ``column[e]``."""
    device = row.device
    rows = torch.arange(num_rows, device=device)
    if num_rows > _RANDOM + _LONGEST:
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(num_rows, (_RANDOM,), generator=generator).to(device)
        longest = torch.bincount(row, minlength=num_rows).topk(_LONGEST).indices
        rows = torch.unique(torch.cat([random, longest]))
    return edges_of(rows, row, column, num_rows)


def edges_of(rows: Tensor, row: Tensor, column: Tensor, num_rows: int) -> Rows:
    """The edges of ``rows``, which are distinct."""
    place = _places(rows, num_rows)
    edge = (place[row] >= 0).nonzero().view(-1)
    return Rows(rows, place[row[edge]], column[edge], edge)


def sample_sources(source: Tensor, target: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """16 random nodes of a graph, or fewer, and all that their edges reach."""
    generator = torch.Generator().manual_seed(1)
    nodes = torch.unique(torch.randint(num_nodes, (_SOURCES,), generator=generator)).to(source.device)
    return nodes, torch.unique(edges_of(nodes, source, target, num_nodes).column)


def _places(rows: Tensor, num_rows: int) -> Tensor:
    # position in `rows` of each of num_rows rows, -1 where it is none of them
    place = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(rows.numel(), device=rows.device)
    return place


def row_sum(at: Rows, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The aggregation's rows, products and sums in ``dtype``."""
    out = torch.zeros(at.rows.numel(), x.size(1), dtype=dtype, device=x.device)
    step = max(1, _PIECE // x.size(1))
    for begin in range(0, at.column.numel(), step):
        piece = slice(begin, begin + step)
        message = x[at.column[piece]].to(dtype)
        if weight is not None:
            message *= weight[at.edge[piece], None].to(dtype)
        out.index_add_(0, at.place[piece], message)
    return out


class Operands(NamedTuple):
    """What attention is computed from."""

    q: Tensor  # [num_dst, heads, head_dim]
    k: Tensor  # [num_src, heads, head_dim]
    v: Tensor  # [num_src, heads, head_dim]
    grad: Tensor | None = None  # of the output; None: forward only
    dropout: float = 0.0  # of graphs without repeated edges
    seed: Tensor | None = None


class Softmax(NamedTuple):
    """Maximum and sum of each row's softmax, and the sum of weight times derivative: all [rows, heads]."""

    top: Tensor
    total: Tensor
    delta: Tensor


def attention(at: Rows, x: Operands, dtype: torch.dtype) -> list[Tensor]:
    """Rows of attention's output, and of dq if there is a gradient; products and sums in ``dtype``."""
    found = _softmax(at, x, dtype)
    results = [_zeros(at, x.v, dtype) for _ in range(1 if x.grad is None else 2)]
    for piece in _pieces(at, x):
        place, i, j = at.place[piece], at.rows[at.place[piece]], at.column[piece]
        p, slope = _weights(x, i, j, place, found, dtype)
        results[0].index_add_(0, place, p[:, :, None] * x.v[j].to(dtype))
        if slope is not None:
            results[1].index_add_(0, place, slope[:, :, None] * x.k[j].to(dtype))
    return results


def attention_transposed(
    at: Rows, row: Tensor, column: Tensor, x: Operands, dtype: torch.dtype
) -> list[Tensor]:
    """Rows of dk and dv, ``at`` those of the transpose; products and sums in ``dtype``.

    Takes the softmax of every receiver that the rows reach, which is a pass over those receivers' edges:
    ``row`` and ``column`` are all edges.
    """
    assert x.grad is not None
    num_dst = x.q.size(0)
    receivers = torch.unique(at.column)
    found = _softmax(edges_of(receivers, row, column, num_dst), x, dtype)
    place_of = _places(receivers, num_dst)
    dk, dv = (_zeros(at, x.v, dtype) for _ in range(2))
    for piece in _pieces(at, x):
        place, i, j = at.place[piece], at.column[piece], at.rows[at.place[piece]]
        p, slope = _weights(x, i, j, place_of[i], found, dtype)
        assert slope is not None
        dk.index_add_(0, place, slope[:, :, None] * x.q[i].to(dtype))
        dv.index_add_(0, place, p[:, :, None] * x.grad[i].to(dtype))
    return [dk, dv]


def weighted(at: Rows, score: Callable[[Tensor, Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an attention's output, ``[rows, heads, head_dim]``; products and sums in ``dtype``.

    Args:
        at: The rows and their edges.
        score: Of edges from nodes ``j`` to nodes ``i``, called with ``(i, j)``: ``[edges, heads]``.
        x: Values, ``[num_src, heads, head_dim]``.
        dtype: That of the result.
    """
    size = (at.rows.numel(), x.size(1))
    step = max(1, _PIECE // x[0].numel())
    pieces = [slice(begin, begin + step) for begin in range(0, at.column.numel(), step)]
    found = torch.empty(at.column.numel(), size[1], dtype=dtype, device=x.device)
    top = torch.full(size, float("-inf"), dtype=dtype, device=x.device)
    for piece in pieces:
        place = at.place[piece]
        found[piece] = score(at.rows[place], at.column[piece])
        top.scatter_reduce_(0, place[:, None].expand(-1, size[1]), found[piece], "amax")
    total, out = torch.zeros_like(top), _zeros(at, x, dtype)
    for piece in pieces:
        place = at.place[piece]
        weight = (found[piece] - top[place]).exp()
        total.index_add_(0, place, weight)
        out.index_add_(0, place, weight[:, :, None] * x[at.column[piece]].to(dtype))
    return out / torch.where(total == 0, 1, total)[:, :, None]


def _softmax(at: Rows, x: Operands, dtype: torch.dtype) -> Softmax:
    # pieces of edges, so that nothing of the size edges x width is ever made
    size = (at.rows.numel(), x.q.size(1))
    score = torch.empty(at.column.numel(), size[1], dtype=dtype, device=x.q.device)
    top = torch.full(size, float("-inf"), dtype=dtype, device=x.q.device)
    total, delta = torch.zeros_like(top), torch.zeros_like(top)
    for piece in _pieces(at, x):
        place = at.place[piece]
        score[piece] = _dot(x.q, x.k, at.rows[place], at.column[piece], dtype) * x.q.size(2) ** -0.5
        top.scatter_reduce_(0, place[:, None].expand(-1, size[1]), score[piece], "amax")
    for piece in _pieces(at, x):
        place = at.place[piece]
        total.index_add_(0, place, (score[piece] - top[place]).exp())
    if x.grad is not None:
        for piece in _pieces(at, x):
            place = at.place[piece]
            p = (score[piece] - top[place]).exp() / total[place]
            i, j = at.rows[place], at.column[piece]
            delta.index_add_(0, place, p * _factor(x, i, j, p) * _dot(x.grad, x.v, i, j, dtype))
    return Softmax(top, total, delta)


def _weights(
    x: Operands, i: Tensor, j: Tensor, place: Tensor, found: Softmax, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What each edge (j to i) and head weighs after dropout, and the loss's derivative in q_i . k_j."""
    scale = x.q.size(2) ** -0.5
    p = (_dot(x.q, x.k, i, j, dtype) * scale - found.top[place]).exp() / found.total[place]
    factor = _factor(x, i, j, p)
    if x.grad is None:
        return p * factor, None
    return p * factor, p * (factor * _dot(x.grad, x.v, i, j, dtype) - found.delta[place]) * scale


def _factor(x: Operands, i: Tensor, j: Tensor, p: Tensor) -> Tensor:
    # what dropout multiplies the weights of edges (j to i) with
    if x.seed is None:
        return p.new_ones(())
    return kept(torch.stack([j, i]), p.size(1), x.dropout, x.seed).to(p.dtype) / (1 - x.dropout)


def _dot(a: Tensor, b: Tensor, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor:
    return (a[i].to(dtype) * b[j].to(dtype)).sum(2)


def _zeros(at: Rows, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(at.rows.numel(), *x.shape[1:], dtype=dtype, device=x.device)


def _pieces(at: Rows, x: Operands) -> list[slice]:
    step = max(1, _PIECE // x.q[0].numel())
    return [slice(begin, begin + step) for begin in range(0, at.column.numel(), step)]


class Expected(NamedTuple):
    """One result: exact, and rounded as plain PyTorch rounds it in the dtype that is benchmarked."""

    exact: Tensor
    rounded: Tensor
    rows: Tensor | None  # which rows of the result these are; None: all
    factor: float  # 2 for outputs, 3 for gradients, as in graphfuse.testing

    def error(self, actual: Tensor) -> Error:
        """Compares by the rule of :func:`graphfuse.testing.assert_close`."""
        found = actual if self.rows is None else actual[self.rows]
        if found.shape != self.exact.shape:
            raise ValueError(f"the result has shape {list(found.shape)}, wanted {list(self.exact.shape)}")
        floor = torch.finfo(actual.dtype).eps * max(1.0, self.exact.abs().max().item())
        rounding = (self.rounded.double() - self.exact).abs().max().item()
        return Error((found.double() - self.exact).abs().max().item(), self.factor * rounding + floor)


def worst(expected: Sequence[Expected], actual: Sequence[Tensor]) -> Error:
    """The error that is largest in units of its limit; a NaN is larger than all."""
    errors = [one.error(result) for one, result in zip(expected, actual, strict=True)]
    return next((e for e in errors if e.wrong), max(errors, key=lambda e: e.value / e.limit))
