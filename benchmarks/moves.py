"""What an aggregation over windows has to move, and nothing else: a floor of kernels that walk tasks.

The gather floor reads the column list in one launch of equal pieces. A kernel that sums rows walks tasks and
writes 16 rows for each window; where a window is cut it writes those of each slice, in float32, which a
second launch reads and adds. The two kernels here read and write that, but for the row masks, over the tasks
of ``spmm``, and do nothing but add integers. What ``spmm`` takes beyond them is what its masks and products
cost; what they take beyond the floor is what tasks and slices do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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
#   reads     x [num_cols, WORDS] once per column entry; tasks, row_index, column
#   writes    out [num_rows, WORDS]; slices, if there are any, partial [num_slots, 16 * WIDE, WORDS]
@triton.jit(do_not_specialize=["num_rows"])
def _walk_kernel(
    x_ptr, out_ptr, partial_ptr, tasks_ptr, row_index_ptr, column_ptr, num_rows, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    offs_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = floors.sum_of_words(
        x_ptr, None, column_ptr, begin, end, offs_word, WORDS, BLOCK, STEP, STAGES
    )[None, :]  # fmt: skip
    if partial_ptr is not None:  # noqa: SIM102  constants stay outside values
        if slot >= 0:
            place = tl.arange(0, 16 * WIDE)[:, None] * WORDS + offs_word[None, :]
            at_slot = partial_ptr + slot.to(tl.int64) * (16 * WIDE * WORDS) + place
            tl.store(at_slot, tl.broadcast_to(total, (16 * WIDE, BLOCK)))
            return
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    at_rows = out_ptr + rows.to(tl.int64)[:, None] * WORDS + offs_word[None, :]
    tl.store(at_rows, tl.broadcast_to(total, (16, BLOCK)), mask=(rows < num_rows)[:, None])


# Adds the slices of a cut window.
#   grid      (num_merges * 2, WORDS / BLOCK): one program = 8 rows
#   reads     partial [num_slots, 16 * WIDE, WORDS]; merges, row_index
#   writes    out [num_rows, WORDS]
@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    out_ptr, partial_ptr, merges_ptr, row_index_ptr, num_rows, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, first = merge_task(merges_ptr, 16, 8)
    offs_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = (first * WIDE + tl.arange(0, 8 * WIDE))[:, None] * WORDS + offs_word[None, :]
    acc = tl.zeros((8 * WIDE, BLOCK), dtype=tl.int32)
    for slot in tl.range(begin, end, num_stages=STAGES):
        acc += tl.load(partial_ptr + tl.cast(slot, tl.int64) * (16 * WIDE * WORDS) + place)
    rows = rows_at(row_index_ptr, window * 16 + first + tl.arange(0, 8))
    at = out_ptr + rows.to(tl.int64)[:, None] * WORDS + offs_word[None, :]
    # a row's sums are WIDE times as wide as it is: they are all the same
    tl.store(at, tl.max(acc.reshape(8, WIDE, BLOCK), 1), mask=(rows < num_rows)[:, None])


class Moves:
    """Launches of both kernels for a walk over windows.

    Args:
        w: The walk.
        words: Of 4 bytes, in a row of x.
        wide: Words of a partial sum for each: 2 in half precision, 1 in float32.
        config: How rows are gathered.
    """

    def __init__(self, w: Walk, words: int, wide: int, config: floors.Config) -> None:
        _, block, step, warps, stages = config
        self._w, self._words, self._wide, groups = w, words, wide, words // block
        walked, rest = (w.tasks, w.row_index, w.column), (w.num_rows, words, block, step, stages, wide)
        self._walk = Launch(_walk_kernel, w.tasks.size(0), warps, walked, rest, groups=groups)
        self._join = None
        if w.num_slots > 0:
            cut, added = (w.merges, w.row_index), (w.num_rows, words, block, 4, wide)
            self._join = Launch(_join_kernel, 2 * w.merges.size(0), 4, cut, added, groups=groups)

    def __call__(self, x: Tensor) -> Tensor:
        """Of each row what its window reads of ``x`` (``int32[num_cols, words]``), added up."""
        out, partial = x.new_empty(self._w.num_rows, self._words), None
        if self._join is not None:
            partial = x.new_empty(self._w.num_slots * 16 * self._wide, self._words)
        self._walk((x, out, partial), (), aligned(x, out), x.get_device())
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
    ordered = floors.by_task(windows, dim * size)
    if ordered is None:
        return None

    def measure() -> float:
        calls = []
        for config in ordered[:_TRIED]:
            passes = []
            for direction in (windows, windows.transpose())[: 1 + backward]:
                _, w = over_windows(direction.walk(), dim, dim, size)
                x = torch.randint(1 << 20, (w.num_cols, words), dtype=torch.int32, device=w.column.device)
                passes.append(functools.partial(Moves(w, words, 4 // size, config), x))
            calls.append(functools.partial(_all, passes))
            calls[-1]()  # compiles them
        # twice, in turns: what graphs with hubs take differs by more from one moment to the next
        return min(time_call(call, windows.device, _SECONDS).p50_ms for call in calls * 2)

    time_ms: float = windows.memo(("moves_ms", dim, size, backward), measure)
    return time_ms


def _all(passes: Sequence[Callable[[], Tensor]]) -> None:
    for one in passes:
        one()
