"""The gather floor: the least time in which the rows that an aggregation needs can be read.

A graph kernel's arithmetic is nothing; its time is reading one row of x per column entry. The kernel here
reads exactly those rows and does nothing else but one integer addition, which keeps the loads alive. Of a few
launch configurations the fastest counts. The matrix that must be written is added at copy bandwidth.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.timing import time_call
from graphfuse import RowWindows
from graphfuse.formats.walk import Walk
from graphfuse.kernels.tiles import load_task

_COPIED_BYTES = 2**30
_SWEEP_SECONDS, _SECONDS = 0.004, 0.05


class Config(NamedTuple):
    """How the gather is launched."""

    by_task: bool  # a program walks a task, longest first; else a piece of the column list, all equally long
    block: int  # words of a row that a program reads
    step: int  # rows per step of its loop
    warps: int
    stages: int


# Sum of gathered rows, as int32 words: half-precision elements come two in a word.
#   grid      (num_programs * WORDS / BLOCK,): all programs of one block of words run before the next, so that
#             a narrower x stays in L2
#   reads     column; x [num_cols, WORDS] once per column entry; tasks, unless None: then pieces of PIECE
#   writes    out [num_programs, WORDS]
@triton.jit(do_not_specialize=["num_programs", "num_entries", "piece"])
def _gather_kernel(
    x_ptr, out_ptr, tasks_ptr, column_ptr, num_programs, num_entries, piece,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    program = pid % num_programs
    offs_word = (pid // num_programs) * BLOCK + tl.arange(0, BLOCK)
    if tasks_ptr is not None:
        _, begin, end, _ = load_task(tasks_ptr, program)
    else:
        begin = program * piece
        end = tl.minimum(begin + piece, num_entries)
    acc = tl.zeros((STEP, BLOCK), dtype=tl.int32)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        offs = start + tl.arange(0, STEP)
        live = offs < end
        column = tl.load(column_ptr + offs, mask=live, other=0)
        offs_x = column[:, None].to(tl.int64) * WORDS + offs_word[None, :]
        acc += tl.load(x_ptr + offs_x, mask=live[:, None], other=0)
    tl.store(out_ptr + program.to(tl.int64) * WORDS + offs_word, tl.sum(acc, 0))


def gather(w: Walk, x: Tensor, config: Config) -> Tensor:
    """Sums of the rows of ``x`` (``int32[num_cols, words]``) that each program reads."""
    words = x.size(1)
    # pieces for some four times as many programs as the GPU holds, in whole steps
    piece = max(1, min(1024, w.num_entries // 16896) // config.step) * config.step
    num_programs = w.tasks.size(0) if config.by_task else -(-w.num_entries // piece)
    out = x.new_empty(num_programs, words)
    grid = (num_programs * (words // config.block),)
    _gather_kernel[grid](
        x, out, w.tasks if config.by_task else None, w.column, num_programs, w.num_entries, piece,
        words, config.block, config.step, config.stages, num_warps=config.warps,
    )  # fmt: skip
    return out


def configs(w: Walk, words: int) -> list[Config]:
    """What :func:`gather_ms` tries: few, as each is compiled."""
    by_task = (True, False) if w.row_mask is not None else (False,)  # of rows, only long ones are tasks
    tiles = ((512, 1, 4), (1024, 1, 3), (2048, 2, 3), (2048, 1, 2))  # words in a step, warps, stages
    return [
        Config(by, block, tile // block, warps, stages)
        for by, block, (tile, warps, stages) in itertools.product(by_task, sorted({32, words}), tiles)
    ]


def gather_ms(windows: RowWindows, rows: bool, row_bytes: int) -> float | None:
    """Fastest gather of rows of ``row_bytes`` over the rows or the windows, kept with ``windows``.

    ``None`` where the kernel does not fit: rows are no power of two of at least 128 bytes.
    """
    words = row_bytes // 4
    if row_bytes < 128 or row_bytes & (row_bytes - 1) or windows.num_entries == 0:
        return None

    def measure() -> float:
        w = windows.row_walk() if rows else windows.walk()
        x = torch.randint(1 << 20, (w.num_cols, words), dtype=torch.int32, device=windows.device)
        times = {}
        for config in configs(w, words):
            gather(w, x, config)
            times[config] = _time(w, x, config, _SWEEP_SECONDS)
        fastest = sorted(times, key=times.__getitem__)[:2]
        return min(_time(w, x, config, _SECONDS) for config in fastest)

    found: float = windows.memo(("gather_ms", rows, row_bytes), measure)
    return found


def _time(w: Walk, x: Tensor, config: Config, seconds: float) -> float:
    return time_call(lambda: gather(w, x, config), x.device, seconds).p50_ms


def spmm_ms(windows: RowWindows, rows: bool, dim: int, dtype: torch.dtype, backward: bool) -> float | None:
    """The floor of an aggregation: each row it needs read once per column entry, its result written once.

    With ``backward`` twice that, the second time over the transpose.
    """
    row_bytes = dim * dtype.itemsize
    total = 0.0
    for direction in (windows, windows.transpose())[: 1 + backward]:
        time_ms = gather_ms(windows if windows.symmetric else direction, rows, row_bytes)
        if time_ms is None:
            return None
        total += time_ms + direction.shape[0] * row_bytes / copy_bytes_per_ms(windows.device)
    return total


@functools.cache
def copy_bytes_per_ms(device: torch.device) -> float:
    """Bandwidth of a large copy, read and written bytes together."""
    source = torch.zeros(_COPIED_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * _COPIED_BYTES / time_call(lambda: target.copy_(source), device, _SECONDS).p50_ms
