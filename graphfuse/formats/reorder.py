r"""Which rows share a window: an order of the rows that leaves few column entries.

A window of 16 rows reads each column that any of its rows uses once, so the entries of a graph are
:math:`\sum_c \lambda(c)`, with :math:`\lambda(c)` the windows that column c reaches: the fan-out of a
hypergraph whose nodes are rows and whose edges are columns, cut into parts of 16. Recursive bisection with
parallel exchanges lowers it (Kabiljo et al., Social Hash Partitioner, VLDB 2017; Dhulipala et al., KDD 2016).

All of it is integer arithmetic on whole tensors: sums do not depend on their order, nothing is drawn at
random and nothing is timed, so CPU, CUDA and any two processes find the same order.
"""

from __future__ import annotations

from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import build
from graphfuse.formats.build import WINDOW

METHODS = ("auto", "natural", "degree", "polish", "bisection")

_WORTH = 50  # the given order stays unless another one saves a 50th, 2 %, of its entries
_SMALLEST = 1 << 18  # edges: with fewer a launch takes longer than what an order saves
_ROUNDS = 12  # of exchanges in a level
_POLISHED = 2  # levels of the polish; the higher ones would undo an order that is good already
_UNIT = 1 << 28  # fixed point of a window's cost; a sum over 2^31 edges stays below 2^63
_COUNTS = 4096  # rows of one column in one half that are told apart


def cluster(row: Tensor, col: Tensor, num_rows: int, num_cols: int, method: str = "auto") -> Tensor:
    r"""An order of the rows in which windows of 16 have few column entries.

    Args:
        row: ``int32 | int64[num_edges]``, the row of each edge: receivers for the forward direction,
            sources for the transpose.
        col: Its column, likewise.
        num_rows: Rows of the matrix.
        num_cols: Columns of the matrix.
        method: ``"natural"`` is the given order, ``"degree"`` descending by edges (ties as given),
            ``"polish"`` the given order with rows exchanged among each four windows, and ``"bisection"``
            exchanges rows between halves, quarters, ... down to windows, from the better of the first two.
            ``"auto"`` takes whichever of the last two has fewer entries if it saves 2 % of those of the given
            order, else that order, and does not try where no order could or of fewer than 262,144 edges.

    Returns:
        ``int64[num_rows]``, a permutation: the row at each position. Position p lies in window p // 16. It
        does not depend on the order, dtype or device of the edges.

    Raises:
        ValueError: there is no such method.
    """
    check_method(method, "method")
    natural = torch.arange(num_rows, device=row.device)
    if method == "natural" or (method == "auto" and row.numel() < _SMALLEST):
        return natural
    degree = _count(row, num_rows)
    by_degree = torch.sort(degree, descending=True, stable=True).indices
    if method == "degree":
        return by_degree
    given = num_entries(row, col, num_rows, num_cols)
    enough = given - -(-given // _WORTH)  # entries that are worth another order
    if method == "auto" and _fewest(degree, _count(col, num_cols)) > enough:
        return natural
    key = torch.unique(row.to(torch.int64, copy=True).mul_(num_cols).add_(col))  # a copy tells nothing new
    edges = key // max(num_cols, 1), key % max(num_cols, 1)
    found = []
    if method != "bisection":
        found.append(_bisect(*edges, natural, _POLISHED))
    if method != "polish":
        start = natural if given <= num_entries(row, col, num_rows, num_cols, by_degree) else by_degree
        found.append(_bisect(*edges, start))
    if method != "auto":
        return found[0]
    entries, best = min((num_entries(row, col, num_rows, num_cols, p), i) for i, p in enumerate(found))
    return found[best] if entries <= enough else natural


def check_method(method: str, argument: str) -> None:
    """Raises ``ValueError`` if there is no such ``method``, naming the caller's ``argument``."""
    if method not in METHODS:
        raise ValueError(f"`{argument}` must be one of {', '.join(METHODS)} (got {method!r})")


def num_entries(
    row: Tensor, col: Tensor, num_rows: int, num_cols: int, permutation: Tensor | None = None
) -> int:
    """Column entries of the windows with the rows as given, or in the order of :func:`cluster`."""
    if permutation is not None:
        row = build.inverse(permutation).index_select(0, row)  # of int32 too
    edges = build.sort_edges(row, col, num_cols, with_perm=False)
    return build.entry_starts(edges).numel() - 1


def _fewest(row_degree: Tensor, col_degree: Tensor) -> int:
    # no order has fewer entries: a column of d edges reaches d / 16 windows, and a window holds the edges of
    # its longest row
    windows = col_degree.add(WINDOW - 1).div(WINDOW, rounding_mode="floor").sum()
    longest = torch.sort(row_degree, descending=True).values[::WINDOW].sum()
    return int(torch.maximum(windows, longest))


class _Shared(NamedTuple):
    """Edges of one level whose column has another edge in the same bucket: the others decide nothing."""

    row: Tensor  # int64[num_edges]
    col: Tensor  # int64[num_edges]
    group: Tensor  # int64[num_edges], its (column, bucket)
    size: Tensor  # int64[num_groups], edges of each group
    bucket: Tensor  # int64[num_groups]


def _bisect(row: Tensor, col: Tensor, permutation: Tensor, levels: int = 32) -> Tensor:
    # the last `levels` levels of the bisection that has one window at its end
    position = build.inverse(permutation)
    num_windows = -(-permutation.numel() // WINDOW)
    depth = max(num_windows - 1, 0).bit_length()
    for level in reversed(range(min(depth, levels))):  # halves of 2^level windows
        shared = _shared(row, col, permutation, position, level)
        row, col = shared.row, shared.col  # buckets only shrink: an edge alone in one stays alone
        if row.numel() == 0:
            break
        position = _exchange(shared, position, level)
        permutation = build.inverse(position)
    return permutation


def _shared(row: Tensor, col: Tensor, permutation: Tensor, position: Tensor, level: int) -> _Shared:
    shift = (WINDOW << level).bit_length()  # a bucket: positions that agree in all bits before these
    num_rows = max(permutation.numel(), 1)
    key = torch.sort(col * num_rows + position[row]).values
    place, col = key % num_rows, key // num_rows
    bucket = place >> shift
    new = torch.ones_like(key, dtype=torch.bool)
    new[1:] = (col[1:] != col[:-1]) | (bucket[1:] != bucket[:-1])
    first = new.nonzero().view(-1)
    size = torch.diff(first, append=first.new_tensor([key.numel()]))
    several = size > 1
    keep = several[new.cumsum(0) - 1]
    size, first = size[several], first[several]
    group = torch.repeat_interleave(size)
    return _Shared(permutation[place[keep]], col[keep], group, size, bucket[first])


def _exchange(shared: _Shared, position: Tensor, level: int) -> Tensor:
    # In each bucket the rows that gain most by leaving the left half change places with those that gain most
    # by leaving the right one. Gains count each row alone, so a round may overshoot: later rounds exchange
    # fewer pairs, and every bucket ends with the best order it had.
    marginal, cost = _tables(level, position.device)
    half = (WINDOW << level).bit_length() - 1  # this bit of a position says which half
    slot = torch.arange(position.numel(), device=position.device)
    left = slot[(slot >> half) & 1 == 0]
    left = left[left + (1 << half) < slot.numel()]  # the last bucket may lack a partner
    right = left + (1 << half)
    pair_bucket, pair_rank = left >> half + 1, left & (1 << half) - 1
    num_buckets = (slot.numel() - 1 >> half + 1) + 1
    best, best_position = None, position
    for round_ in range(_ROUNDS + 1):
        on_right = (position >> half) & 1
        members = on_right[shared.row]
        in_right = torch.zeros_like(shared.size).index_add_(0, shared.group, members)
        in_left = shared.size - in_right
        # entries that the bucket may expect, see _tables
        price = cost[in_left.clamp(max=_COUNTS)] + cost[in_right.clamp(max=_COUNTS)]
        total = torch.zeros(num_buckets, dtype=torch.int64, device=slot.device)
        total.index_add_(0, shared.bucket, price)
        if best is None:
            best = total
        else:
            better = total < best
            best_position = torch.where(better[position >> half + 1], position, best_position)
            best = torch.minimum(total, best)
        if round_ == _ROUNDS:
            break
        from_left = marginal[in_left.clamp(max=_COUNTS)] - marginal[(in_right + 1).clamp(max=_COUNTS)]
        from_right = marginal[in_right.clamp(max=_COUNTS)] - marginal[(in_left + 1).clamp(max=_COUNTS)]
        gain_of = torch.stack([from_left, from_right], 1).view(-1)
        gain = torch.zeros_like(position).index_add_(0, shared.row, gain_of[shared.group * 2 + members])
        order = torch.sort(gain, descending=True, stable=True).indices
        order = order[torch.sort((position >> half)[order], stable=True).indices]
        swap = gain[order[left]] + gain[order[right]] > 0
        if 2 * round_ >= _ROUNDS:  # half of the pairs that gain, the best ones
            count = torch.zeros_like(total).index_add_(0, pair_bucket, swap.long())
            swap &= pair_rank < (count + 1 >> 1)[pair_bucket]
        position = torch.empty_like(position)
        position[order] = slot
        position[order[left[swap]]] = right[swap]
        position[order[right[swap]]] = left[swap]
    return best_position


def _tables(level: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # n rows of a column thrown into w windows reach w (1 - (1 - 1 / w)^n) of them. A half of 2^level windows
    # counts as w = 2^(3 level / 4), as later levels bring rows of a column together. In the last level a half
    # is one window, whose entry is there or not; the gain still uses w = 2, for the sake of a slope.
    w = max(2, 1 << 3 * level // 4)
    steps = accumulate(repeat(w, _COUNTS - 1), lambda left, w: left - left // w, initial=_UNIT)
    marginal = torch.tensor([0, *steps], device=device)  # int64[_COUNTS + 1]: of the n-th row
    cost = marginal.cumsum(0) if level > 0 else (torch.arange(_COUNTS + 1, device=device) > 0).long()
    return marginal, cost


def _count(index: Tensor, size: int) -> Tensor:
    # bincount, without CUDA's nondeterminism warning
    one = torch.ones((), dtype=torch.int64, device=index.device)
    return torch.zeros(size, dtype=torch.int64, device=index.device).index_add_(
        0, index, one.expand(index.shape)
    )
