"""The gather floor: the least time in which the rows that an aggregation needs can be read.

A graph kernel's arithmetic is nothing; its time is reading one row of x per column entry. The kernel here
reads exactly those rows and does nothing else but one integer addition, which keeps the loads alive. Of a few
launch configurations the fastest counts. The matrices that must be streamed are added at copy bandwidth.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.timing import time_call
from graphfuse import RowWindows
from graphfuse.formats.walk import Walk
from graphfuse.kernels.barriers import of_one_warp
from graphfuse.kernels.tiles import load_task

_COPIED_BYTES = 2**30
_SWEEP_SECONDS, _SECONDS = 0.004, 0.05
_measured = contextvars.ContextVar("_measured", default=True)


class Config(NamedTuple):
    """How the gather is launched."""

    by_task: bool  # a program walks a task, longest first; else a piece of the column list, all equally long
    block: int  # words of a row that a program reads
    step: int  # rows per step of its loop
    warps: int
    stages: int


@triton.jit
def sum_of_words(
    x_ptr, y_ptr, beside_ptr, column_ptr, begin, end, block, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    # The sum of the rows that the entries [begin, end) name, of one block of their words: int32[BLOCK]; and
    # of BESIDE numbers that are gathered with a row, of which a block has a share, or one with other blocks.
    SHARE: tl.constexpr = max(1, BESIDE * BLOCK // WORDS)
    offs_word = block * BLOCK + tl.arange(0, BLOCK)
    offs_beside = block * BLOCK * BESIDE // WORDS + tl.arange(0, SHARE)
    acc = tl.zeros((STEP, BLOCK), dtype=tl.int32)
    numbers = tl.zeros((STEP, SHARE), dtype=tl.int32)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        offs = start + tl.arange(0, STEP)
        live = offs < end
        column = tl.load(column_ptr + offs, mask=live, other=0)
        offs_x = column[:, None].to(tl.int64) * WORDS + offs_word[None, :]
        acc += tl.load(x_ptr + offs_x, mask=live[:, None], other=0)
        if y_ptr is not None:
            acc += tl.load(y_ptr + offs_x, mask=live[:, None], other=0)
        if beside_ptr is not None:
            at = beside_ptr + column[:, None].to(tl.int64) * BESIDE + offs_beside[None, :]
            numbers += tl.load(at, mask=live[:, None], other=0).to(tl.int32)
    total = tl.sum(acc, 0)
    if beside_ptr is not None:
        total += tl.sum(tl.sum(numbers, 0), 0)
    return total


# Sum of gathered rows, as int32 words: half-precision elements come two in a word.
#   grid      (num_programs, WORDS / BLOCK): all programs of one block of words run before the next, so that a
#             narrower x stays in L2
#   reads     column; x [num_cols, WORDS] once per column entry, and y, likewise, unless None; tasks, unless
#             None: then pieces of PIECE
#   writes    out [num_programs, WORDS]
@triton.jit(do_not_specialize=["num_entries", "piece"])
def _gather_kernel(
    x_ptr, y_ptr, out_ptr, tasks_ptr, column_ptr, num_entries, piece,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offs_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tasks_ptr is not None:
        _, begin, end, _ = load_task(tasks_ptr, program)
    else:
        begin = program * piece
        end = tl.minimum(begin + piece, num_entries)
    total = sum_of_words(
        x_ptr, y_ptr, None, column_ptr, begin, end, tl.program_id(1), WORDS, BLOCK, STEP, STAGES, 0
    )  # fmt: skip
    tl.store(out_ptr + program.to(tl.int64) * WORDS + offs_word, total)


def gather(w: Walk, x: Tensor, config: Config, y: Tensor | None = None) -> Tensor:
    """Sums of the rows of ``x`` (``int32[num_cols, words]``), and of ``y``, that each program reads."""
    words = x.size(1)
    # pieces for some four times as many programs as the GPU holds, in whole steps
    piece = max(1, min(1024, w.num_entries // 16896) // config.step) * config.step
    num_programs = w.tasks.size(0) if config.by_task else -(-w.num_entries // piece)
    out = x.new_empty(num_programs, words)
    grid = (num_programs, words // config.block)
    with of_one_warp():  # as the kernels beside it
        _gather_kernel[grid](
            x, y, out, w.tasks if config.by_task else None, w.column, w.num_entries, piece,
            words, config.block, config.step, config.stages, num_warps=config.warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def configs(w: Walk, words: int) -> list[Config]:
    """What :func:`gather_ms` tries: few, as each is compiled."""
    by_task = (True, False) if w.row_mask is not None else (False,)  # of rows, only long ones are tasks
    tiles = [(512, 1, 4), (1024, 1, 3), (2048, 2, 3), (2048, 1, 2)]  # words in a step, warps, stages
    if words < 32:  # rows of a sector or two: a step of as many rows would be wider than most tasks
        tiles = [(32 * words, 1, 4), (128 * words, 1, 3), (512 * words, 4, 2)]
    blocks = sorted({min(32, words), words})
    return [
        Config(by, block, tile // block, warps, stages)
        for by, block, (tile, warps, stages) in itertools.product(by_task, blocks, tiles)
    ]


def gather_ms(windows: RowWindows, rows: bool, row_bytes: int) -> float | None:
    """Fastest gather of rows of ``row_bytes`` over the rows or the windows, kept with ``windows``.

    ``None`` where the kernel does not fit: rows are no power of two of at least 4 bytes.
    """
    found = _gathers(windows, rows, row_bytes)
    return None if found is None else found[0]


def gather_kv_ms(windows: RowWindows, rows: bool, row_bytes: int) -> float | None:
    """As :func:`gather_ms`, of two matrices in one walk: what is left of two gathers where latency rules."""
    found = _gathers(windows, rows, row_bytes)
    if found is None:
        return None
    _, ordered = found

    def measure() -> float:
        w = _walked(windows, rows)
        x, y = (_matrix(w, row_bytes) for _ in range(2))
        return min(_time(w, x, config, _SECONDS, y) for config in ordered[:4])

    time_ms: float = windows.memo(("gather_kv_ms", rows, row_bytes), measure)
    return time_ms


def gather_by_task_ms(windows: RowWindows, row_bytes: int) -> float | None:
    """As :func:`gather_ms` over windows, by programs that walk a task each, as kernels that sum rows have to.

    The pieces of the column list that :func:`gather_ms` may read instead end anywhere, and ask for no task.
    """
    ordered = by_task(windows, row_bytes)
    if ordered is None:
        return None

    def measure() -> float:
        w = _walked(windows, False)
        x = _matrix(w, row_bytes)
        return min(_time(w, x, config, _SECONDS) for config in ordered[:2])

    time_ms: float = windows.memo(("gather_by_task_ms", row_bytes), measure)
    return time_ms


def by_task(windows: RowWindows, row_bytes: int) -> list[Config] | None:
    """Of the gathers that :func:`gather_by_task_ms` may use, the fastest first."""
    found = _gathers(windows, False, row_bytes)
    return None if found is None else [config for config in found[1] if config.by_task]


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Within, no gather is timed, and no floor known: a sweep compares configurations with one another."""
    token = _measured.set(False)
    try:
        yield
    finally:
        _measured.reset(token)


def _gathers(windows: RowWindows, rows: bool, row_bytes: int) -> tuple[float, list[Config]] | None:
    """The time of the fastest gather, and the configurations, fastest first."""
    if row_bytes < 4 or row_bytes & (row_bytes - 1) or windows.num_entries == 0 or not _measured.get():
        return None

    def measure() -> tuple[float, list[Config]]:
        w = _walked(windows, rows)
        x = _matrix(w, row_bytes)
        times = {config: _time(w, x, config, _SWEEP_SECONDS) for config in configs(w, x.size(1))}
        ordered = sorted(times, key=times.__getitem__)
        return min(_time(w, x, config, _SECONDS) for config in ordered[:2]), ordered

    found: tuple[float, list[Config]] = windows.memo(("gathers", rows, row_bytes), measure)
    return found


def _walked(windows: RowWindows, rows: bool) -> Walk:
    return windows.row_walk() if rows else windows.walk()


def _matrix(w: Walk, row_bytes: int) -> Tensor:
    return torch.randint(1 << 20, (w.num_cols, row_bytes // 4), dtype=torch.int32, device=w.column.device)


def _time(w: Walk, x: Tensor, config: Config, seconds: float, y: Tensor | None = None) -> float:
    gather(w, x, config, y)  # compiles it
    return time_call(lambda: gather(w, x, config, y), x.device, seconds).p50_ms


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


def attention_ms(
    windows: RowWindows, rows: bool, heads: int, dim: int, dtype: torch.dtype, backward: bool
) -> float | None:
    """The floor of attention: k and v read once per column entry, q in and the output out.

    With ``backward`` k and v again (for dq), then q and the output's gradient over the transpose (for dk and
    dv) with 8 bytes a head of softmax and delta, and 11 matrices streamed in all: q and out; out and its
    gradient (for delta); q, the gradient and dq; k, v, dk and dv.
    """
    row_bytes = heads * dim * dtype.itemsize
    num_dst, num_src = windows.shape
    times = [gather_ms(windows, rows, row_bytes)] * (4 if backward else 2)
    streamed = 2 * num_dst
    if backward:
        transposed = windows if windows.symmetric else windows.transpose()
        times += [gather_ms(transposed, rows, row_bytes)] * 2 + [gather_ms(transposed, rows, 8 * heads)]
        streamed = 7 * num_dst + 4 * num_src
    known = [time_ms for time_ms in times if time_ms is not None]
    if len(known) < len(times):
        return None
    return sum(known) + streamed * row_bytes / copy_bytes_per_ms(windows.device)


def additive_ms(
    windows: RowWindows,
    kind: str,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    backward: bool,
    edge_bytes: int = 0,
) -> float | None:
    """The floor of the attention of GAT, GATv2 or AGNN: one row read once per column entry, the output out.

    Of ``gat`` the numbers of their nodes go with the rows, one a head, of which scores are made. ``agnn`` has
    lengths, which a kernel could also find in the rows: they do not count. Rows and numbers may be read by
    rows or by windows, whichever is faster. Backward of ``gat`` reads the output's gradient over the
    transpose, with 16 bytes a head of what receivers are known by; the others read x again, and over the
    transpose two matrices with 16 and 8 bytes. Streamed are x in (of ``gatv2`` and ``agnn``), the output out;
    backward the output and its gradient, each pass's own rows, and the gradients. So are the ``edge_bytes``
    of each edge, in each walk and as a gradient, though the list has but one order.
    """
    row_bytes, num_dst = heads * dim * dtype.itemsize, windows.shape[0]

    def fastest(w: RowWindows, size: int) -> float | None:
        times = [gather_ms(w, rows, size) for rows in (False, True)]
        known = [time_ms for time_ms in times if time_ms is not None]
        return min(known) if known else None

    times, streamed = [fastest(windows, row_bytes)], 1 if kind == "gat" else 2
    numbers = heads * dtype.itemsize
    if kind == "gat" and numbers >= 4:  # no kernel here gathers half a word
        times.append(fastest(windows, numbers))
    if backward:
        transposed = windows if windows.symmetric else windows.transpose()
        stats = 16 if kind == "gat" or kind == "gatv2" else 8
        times += [fastest(transposed, row_bytes), fastest(transposed, stats * heads)]
        if kind != "gat":
            times += [fastest(windows, row_bytes), fastest(transposed, row_bytes)]
        streamed += {"gat": 4, "gatv2": 7, "agnn": 8}[kind]
    known = [time_ms for time_ms in times if time_ms is not None]
    if len(known) < len(times):
        return None
    walks = 1 if not backward else 3 if kind == "gat" else 4
    moved = streamed * num_dst * row_bytes + walks * windows.num_edges * edge_bytes
    return sum(known) + moved / copy_bytes_per_ms(windows.device)


@triton.jit
def _nothing_kernel():
    pass


@functools.cache
def launch_ms(launches: int, device: torch.device) -> float:
    """The time of so many kernels that do nothing, one after the other."""

    def call() -> None:
        for _ in range(launches):
            _nothing_kernel[(1,)](num_warps=1)

    call()
    return time_call(call, device, _SECONDS).p50_ms


@functools.cache
def copy_bytes_per_ms(device: torch.device) -> float:
    """Bandwidth of a large copy, read and written bytes together."""
    source = torch.zeros(_COPIED_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * _COPIED_BYTES / time_call(lambda: target.copy_(source), device, _SECONDS).p50_ms
