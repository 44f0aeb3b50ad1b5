"""What an aggregation over windows has to move, and nothing else: a floor of kernels that walk tasks.

The gather floor reads the column list in one launch of equal pieces. A kernel that sums rows walks tasks and
writes 16 rows for each window; where a window is cut it writes those of each slice, in float32, which a
second launch reads and adds. The two kernels here read and write that, but for the row masks, over the tasks
of ``spmm``, and do nothing but add integers. What ``spmm`` takes beyond them is what its masks and products
cost; what they take beyond the floor is what tasks and slices do. :mod:`benchmarks.gat_moves` has GAT's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import floors
from benchmarks.timing import time_call
from graphfuse import RowWindows
from graphfuse.formats.walk import Walk
from graphfuse.kernels.merge_tiles import merge_task
from graphfuse.kernels.run import Launch, aligned
from graphfuse.kernels.spmm import over_windows
from graphfuse.kernels.tiles import after_previous, load_task, rows_at

_SECONDS = 0.05
_TRIED = 3  # gathers, of those that may be


# Sum of gathered rows, as int32 words, written to all rows of a window, or of a slice.
#   grid      (num_tasks, WORDS / BLOCK)
#   reads     x [num_cols, WORDS] once per column entry and, if they are there, the numbers beside it,
#             [num_cols, BESIDE]; own [num_rows, WORDS] of the rows of each task's window, if it is there, of
#             which the greatest are added; tasks, row_index, column
#   writes    out [COPIES, num_rows, WORDS], also [num_rows, ALSO] if it is there; slices, if there are any,
#             partial [num_slots, COPIES, 16 * WIDE, WORDS]
@triton.jit(do_not_specialize=["num_rows"])
def _walk_kernel(
    x_ptr, beside_ptr, own_ptr, out_ptr, also_ptr, partial_ptr, tasks_ptr, row_index_ptr, column_ptr,
    num_rows, WORDS: tl.constexpr, BLOCK: tl.constexpr, BESIDE: tl.constexpr, ALSO: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    block = tl.program_id(1)
    offs_word = block * BLOCK + tl.arange(0, BLOCK)
    total = floors.sum_of_words(
        x_ptr, None, beside_ptr, column_ptr, begin, end, block, WORDS, BLOCK, STEP, STAGES, BESIDE
    )[None, :]  # fmt: skip
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
    mask, at_rows = rows < num_rows, rows * WORDS + offs_word[None, :]
    if own_ptr is not None:
        total += tl.max(tl.load(own_ptr + at_rows, mask=mask, other=0), 0)[None, :]
    if partial_ptr is not None:  # noqa: SIM102  constants stay outside values
        if slot >= 0:
            place = tl.arange(0, 16 * WIDE)[:, None] * WORDS + offs_word[None, :]
            at_slot = partial_ptr + slot.to(tl.int64) * (COPIES * 16 * WIDE * WORDS) + place
            for copy in tl.static_range(COPIES):
                tl.store(at_slot + copy * 16 * WIDE * WORDS, tl.broadcast_to(total, (16 * WIDE, BLOCK)))
            return
    total = tl.broadcast_to(total, (16, BLOCK))
    for copy in tl.static_range(COPIES):
        tl.store(out_ptr + at_rows + copy * num_rows.to(tl.int64) * WORDS, total, mask=mask)
    if also_ptr is not None:
        SHARE: tl.constexpr = max(1, ALSO * BLOCK // WORDS)
        offs_also = block * BLOCK * ALSO // WORDS + tl.arange(0, SHARE)
        number = tl.broadcast_to(tl.max(total, 1)[:, None], (16, SHARE))
        at_also = also_ptr + rows * ALSO + offs_also[None, :]
        tl.store(at_also, number.to(also_ptr.dtype.element_ty), mask=mask)


# Adds the slices of a cut window.
#   grid      (num_merges * 2, COPIES * WORDS / BLOCK): one program = 8 rows
#   reads     partial [num_slots, COPIES, 16 * WIDE, WORDS]; merges, row_index
#   writes    out [COPIES, num_rows, WORDS]
@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    out_ptr, partial_ptr, merges_ptr, row_index_ptr, num_rows, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, first = merge_task(merges_ptr, 16, 8)
    copy, block = tl.program_id(1) // (WORDS // BLOCK), tl.program_id(1) % (WORDS // BLOCK)
    offs_word = block * BLOCK + tl.arange(0, BLOCK)
    place = (copy * 16 * WIDE + first * WIDE + tl.arange(0, 8 * WIDE))[:, None] * WORDS + offs_word[None, :]
    acc = tl.zeros((8 * WIDE, BLOCK), dtype=tl.int32)
    for slot in tl.range(begin, end, num_stages=STAGES):
        acc += tl.load(partial_ptr + tl.cast(slot, tl.int64) * (COPIES * 16 * WIDE * WORDS) + place)
    rows = rows_at(row_index_ptr, window * 16 + first + tl.arange(0, 8)).to(tl.int64)[:, None]
    at = out_ptr + (rows + copy * num_rows.to(tl.int64)) * WORDS + offs_word[None, :]
    # a row's sums are WIDE times as wide as it is: they are all the same
    tl.store(at, tl.max(acc.reshape(8, WIDE, BLOCK), 1), mask=rows < num_rows)


class Numbers(NamedTuple):
    """Numbers of nodes that are moved beside their rows."""

    each: int  # of a node
    dtype: torch.dtype = torch.int32

    def of(self, num_nodes: int, like: Tensor) -> Tensor | None:
        """Room for those of all nodes, or None if there are none."""
        return like.new_empty(num_nodes, self.each, dtype=self.dtype) if self.each else None


NONE = Numbers(0)


class Moves:
    """Launches of a walk over windows, and of what adds its slices.

    Args:
        w: The walk.
        words: Of 4 bytes, in a row of x.
        wide: Words of a partial sum for each: 2 in half precision, 1 in float32.
        config: How rows are gathered.
        beside: Numbers that are gathered with each row.
        also: Numbers that are written with each row.
        copies: Rows that are written for each.
        own: Whether a task reads the rows of its window, too.

    Attributes:
        beside: Numbers of each column, 1, or None.
        own: Rows of the windows, 0, or None.
    """

    def __init__(
        self,
        w: Walk,
        words: int,
        wide: int,
        config: floors.Config,
        beside: Numbers = NONE,
        also: Numbers = NONE,
        copies: int = 1,
        own: bool = False,
    ) -> None:
        _, block, step, warps, stages = config
        self._w, self._words, self._wide, self._copies = w, words, wide, copies
        self._also, groups = also, words // block
        walked, like = (w.tasks, w.row_index, w.column), w.column
        rest = (w.num_rows, words, block, beside.each, also.each, step, stages, wide, copies)
        self._walk = Launch(_walk_kernel, w.tasks.size(0), warps, walked, rest, groups=groups)
        self.beside = beside.of(w.num_cols, like)
        if self.beside is not None:
            self.beside.fill_(1)
        self.own = like.new_zeros(w.num_rows, words) if own else None
        self._join = None
        if w.num_slots > 0:
            cut, added = (w.merges, w.row_index), (w.num_rows, words, block, 4, wide, copies)
            self._join = Launch(_join_kernel, 2 * w.merges.size(0), 4, cut, added, groups=copies * groups)

    def __call__(self, x: Tensor) -> Tensor:
        """Of each row what its window reads of ``x`` (``int32[num_cols, words]``), added up, in each copy."""
        rows, partial = self._w.num_rows, None
        out, also = x.new_empty(self._copies, rows, self._words), self._also.of(rows, x)
        if self._join is not None:
            partial = x.new_empty(self._w.num_slots * self._copies * 16 * self._wide, self._words)
        given = (x, self.beside, self.own, out, also, partial)
        self._walk(given, (), aligned(*given), x.get_device())
        if self._join is not None:
            self._join((out, partial), (), aligned(out), x.get_device())
        return out


def moves_ms(windows: RowWindows, dim: int, dtype: torch.dtype, backward: bool = False) -> float | None:
    """The time of the fastest of some gathers with what an aggregation of ``dim`` features writes besides.

    With ``backward`` of two, one after the other, the second over the transpose. ``None`` where rows cannot
    be gathered as words, see :func:`floors.gather_ms`.
    """
    size = dtype.itemsize
    words = dim * size // 4

    def calls(config: floors.Config) -> list[Callable[[], object]]:
        passes: list[Callable[[], object]] = []
        for direction in (windows, windows.transpose())[: 1 + backward]:
            _, w = over_windows(direction.walk(), dim, dim, size)
            gather = Moves(w, words, 4 // size, config)
            passes.append(functools.partial(gather, matrix(w, w.num_cols, words)))
        return passes

    return fastest(windows, ("moves_ms", dim, size, backward), dim * size, calls)


def matrix(w: Walk, num_rows: int, words: int) -> Tensor:
    """Rows to gather."""
    return torch.randint(1 << 20, (num_rows, words), dtype=torch.int32, device=w.column.device)


def fastest(
    windows: RowWindows,
    key: tuple[object, ...],
    row_bytes: int,
    calls: Callable[[floors.Config], Sequence[Callable[[], object]]],
) -> float | None:
    """The time of what ``calls`` makes of a gather, of the fastest; kept with ``windows``."""
    ordered = floors.by_task(windows, row_bytes)
    if ordered is None:
        return None

    def measure() -> float:
        tried = [functools.partial(_all, calls(config)) for config in ordered[:_TRIED]]
        for one in tried:
            one()  # compiles it
        # twice, in turns: what graphs with hubs take differs by more from one moment to the next
        return min(time_call(call, windows.device, _SECONDS).p50_ms for call in tried * 2)

    time_ms: float = windows.memo(key, measure)
    return time_ms


def _all(passes: Sequence[Callable[[], object]]) -> None:
    for one in passes:
        one()
