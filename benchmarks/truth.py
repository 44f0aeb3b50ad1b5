"""What an aggregation should give: float64, on all rows of a small graph and on a sample of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_RANDOM, _LONGEST = 4096, 16
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
    place = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    place[rows] = torch.arange(rows.numel(), device=device)
    edge = (place[row] >= 0).nonzero().view(-1)
    return Rows(rows, place[row[edge]], column[edge], edge)


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
