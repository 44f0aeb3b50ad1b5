"""The kernels of :mod:`.quick`. Imports triton, so nothing imports this before a kernel is launched.

An edge is one int64 key: its window (those of the transpose after all others), column and row within the
window, so that keys sort into the order of the format.

Integers only, and the atomics are sums and maxima of integers, whose order does not matter: every launch
gives the same bits. No number of a launch is specialised, as every mini-batch brings others.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from graphfuse.formats.build import WINDOW
from graphfuse.formats.fingerprint import MIX_1, MIX_2, POSITION, SOURCE

BLOCK = 512  # keys, edges or windows of a program, where they are one by one
COLUMNS = 32  # entries of a window that are looked at together
KEYS = 32  # that a program ranks
_OTHERS = tl.constexpr(128)  # keys that are compared with them at a time
_STEPS = tl.constexpr(22)  # of a search in 2 * MOST_EDGES keys
_WINDOW = tl.constexpr(WINDOW)
_PLACE_BITS = tl.constexpr(32)  # of a key below the window: 28 of the column, 4 of the row
_COLUMN_MASK = tl.constexpr((1 << 28) - 1)
_BACKWARD = tl.constexpr(1 << 60)  # in the order of tasks: those of the transpose come last
_LONGEST = tl.constexpr(1 << 24)  # no window has as many entries
_SOURCE = tl.constexpr(SOURCE)
_POSITION = tl.constexpr(POSITION)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
# the fields of quick.Facts
_FINGERPRINT, _ODD, _LOPSIDED, _LONG, _MIDDLE, _TOTAL = (tl.constexpr(field) for field in range(6))

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_COMPILED: dict[Any, tuple[Any, ...]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4) -> None:
    """Launches ``kernel`` on the current stream of the current GPU.

    What Triton compiled is called directly from the second time on: to bind and to specialise the arguments
    anew takes it more host time than the GPU needs for a mini-batch, and numbers are not specialised here.

    Args:
        kernel: One of this module.
        grid: Its programs.
        arguments: Tensors, of which some may be ``None``, numbers and, last, the ``constexpr`` ones.
        warps: Warps of a program.
    """
    index = None if _INTERPRETING else torch.cuda.current_device()
    key = (kernel.fn, index, *[  # what Triton tells apart, where numbers are not specialised
        None if one is None
        else -(2**31) <= one < 2**31 if type(one) is int
        else (one.dtype, one.data_ptr() & 15 == 0)
        for one in arguments
    ])  # fmt: skip
    if key in _COMPILED:
        run, function, metadata, _ = _COMPILED[key]
        stream = triton.runtime.driver.active.get_current_stream(index)
        # no launch hooks
        run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            1,
            stream,
            function,
            metadata,
            None,
            None,
            None,
            *arguments,
        )
        return
    compiled = kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=True)  # 3.9 warns if it is not told
    if not _INTERPRETING:
        # the last is there to stay alive: with it Triton 3.8 unloads its function
        _COMPILED[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)


# Keys of the edges, in both directions, and their fingerprint.
#   grid      (cdiv(num_edges, BLOCK),)
#   reads     edge [2, num_edges], any integer dtype and strides
#   writes    key int64 [2 * num_edges], unless None; facts: fingerprint, odd (an index is out of range)
@triton.jit(
    do_not_specialize=["num_edges", "num_src", "num_dst", "end_stride", "edge_stride"],
    do_not_specialize_on_alignment=["edge_ptr"],
)
def keys_kernel(
    key_ptr, facts_ptr, edge_ptr, num_edges, num_src, num_dst, end_stride, edge_stride, BLOCK: tl.constexpr
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < num_edges
    at = edge_ptr + offs * edge_stride
    src = tl.load(at, mask=inside, other=0).to(tl.int64)
    dst = tl.load(at + end_stride, mask=inside, other=0).to(tl.int64)
    h = ((offs + 1) * _POSITION + src * _SOURCE + dst) * _MIX_1
    h = (h ^ (h >> 29)) * _MIX_2
    h = h ^ (h >> 32)
    tl.atomic_add(facts_ptr + _FINGERPRINT, tl.sum(tl.where(inside, h, 0), 0), sem="relaxed")
    if key_ptr is not None:
        wrong = inside & ((src < 0) | (src >= num_src) | (dst < 0) | (dst >= num_dst))
        tl.atomic_max(facts_ptr + _ODD, tl.max(wrong.to(tl.int64), 0), sem="relaxed")
        windows = (num_dst + _WINDOW - 1) // _WINDOW
        forward = ((dst >> 4) << _PLACE_BITS) | (src << 4) | (dst & 15)
        backward = ((windows + (src >> 4)) << _PLACE_BITS) | (dst << 4) | (src & 15)
        tl.store(key_ptr + offs, forward, mask=inside)
        tl.store(key_ptr + num_edges + offs, backward, mask=inside)


# Which keys begin an entry.
#   grid      (cdiv(2 * num_edges, BLOCK),)
#   reads     key int64 [2 * num_edges], sorted
#   writes    new int32 [2 * num_edges]; facts: odd (an edge is repeated), lopsided (the directions differ)
@triton.jit(do_not_specialize=["num_edges", "num_windows"])
def flags_kernel(new_ptr, facts_ptr, key_ptr, num_edges, num_windows, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < 2 * num_edges
    key = tl.load(key_ptr + offs, mask=inside, other=0)
    before = tl.load(key_ptr + offs - 1, mask=inside & (offs > 0), other=0)
    tl.store(new_ptr + offs, ((offs == 0) | (key >> 4 != before >> 4)).to(tl.int32), mask=inside)
    repeated = inside & (offs > 0) & (key == before)
    tl.atomic_max(facts_ptr + _ODD, tl.max(repeated.to(tl.int64), 0), sem="relaxed")
    forward = offs < num_edges
    mirrored = tl.load(key_ptr + num_edges + offs, mask=forward, other=0)
    shift = num_windows.to(tl.int64) << _PLACE_BITS
    lopsided = forward & (key + shift != mirrored)
    tl.atomic_max(facts_ptr + _LOPSIDED, tl.max(lopsided.to(tl.int64), 0), sem="relaxed")


# Where the windows begin, and a number for each that sorts tasks: by direction, longest first, by window.
#   grid      (cdiv(all_windows, BLOCK),)
#   reads     key int64 [num_keys], sorted; number int32 [num_keys]: entries up to each key, its own included
#   writes    ptr int32 [all_windows + 1], task int64 [all_windows]; facts: long (entries of the longest
#             window), middle and total (entries of the forward direction, and of both)
@triton.jit(do_not_specialize=["num_keys", "num_windows", "all_windows"])
def bounds_kernel(
    ptr_ptr, task_ptr, facts_ptr, key_ptr, number_ptr, num_keys, num_windows, all_windows, BLOCK: tl.constexpr
):  # fmt: skip
    window = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = window < all_windows
    begin = _entries_before(window << _PLACE_BITS, key_ptr, number_ptr, num_keys, inside)
    end = _entries_before((window + 1) << _PLACE_BITS, key_ptr, number_ptr, num_keys, inside)
    length = (end - begin).to(tl.int64)
    tl.store(ptr_ptr + window, begin, mask=inside)
    tl.store(ptr_ptr + window + 1, end, mask=window == all_windows - 1)
    backward = tl.where(window >= num_windows, _BACKWARD, 0)
    tl.store(task_ptr + window, backward | ((_LONGEST - length) << 32) | window, mask=inside)
    longest = tl.max(tl.where(inside, length, 0), 0)
    tl.atomic_max(facts_ptr + _LONG, longest, sem="relaxed")
    fact_ptr, entries = facts_ptr + tl.zeros_like(window), end.to(tl.int64)
    tl.store(fact_ptr + _MIDDLE, entries, mask=window == num_windows - 1)
    tl.store(fact_ptr + _TOTAL, entries, mask=window == all_windows - 1)


# Sorts few numbers, no two of which are equal, in one launch; a sort by digits takes ten.
#   grid      (cdiv(count, KEYS),)
#   reads     key int64 [count]
#   writes    order int64 [count]: each key behind as many as are less
@triton.jit(do_not_specialize=["count"])
def rank_kernel(order_ptr, key_ptr, count, KEYS: tl.constexpr):
    offs = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    key = tl.load(key_ptr + offs, mask=offs < count, other=0)
    rank = tl.zeros((KEYS,), dtype=tl.int32)
    for first in tl.range(0, count, _OTHERS):
        others = first + tl.arange(0, _OTHERS)
        other = tl.load(key_ptr + others, mask=others < count, other=0)
        rank += tl.sum(((other[None, :] < key[:, None]) & (others < count)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + rank, key, mask=offs < count)


@triton.jit
def _entries_before(bound, key_ptr, number_ptr, num_keys, live):
    # entries of the keys below each bound
    low = tl.zeros_like(bound).to(tl.int32)
    high = low + num_keys
    for _ in tl.range(0, _STEPS):
        open = live & (low < high)
        middle = (low + high) >> 1
        below = tl.load(key_ptr + middle, mask=open, other=0) < bound
        low = tl.where(open & below, middle + 1, low)
        high = tl.where(open & ~below, middle, high)
    return tl.load(number_ptr + low - 1, mask=live & (low > 0), other=0)


# Columns and masks of the entries.
#   grid      (cdiv(num_keys, BLOCK),): keys of both directions, or of the first if the second is the same
#   reads     key, number as above; middle: entries of the forward direction
#   writes    column int32, mask int16 of each direction
@triton.jit(do_not_specialize=["num_keys", "num_windows", "middle"])
def entries_kernel(
    column_ptr, mask_ptr, back_column_ptr, back_mask_ptr, key_ptr, number_ptr, num_keys, num_windows, middle,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < num_keys
    key = tl.load(key_ptr + offs, mask=inside, other=0)
    entry, new = _entry(number_ptr, offs, inside)
    mask = tl.full((BLOCK,), 1, tl.int32) << (key & 15).to(tl.int32)
    for further in tl.range(1, _WINDOW):  # an entry has at most an edge of each row
        after = offs + further
        other = tl.load(key_ptr + after, mask=after < num_keys, other=-1)
        mask |= tl.where(other >> 4 == key >> 4, 1 << (other & 15).to(tl.int32), 0)
    column = ((key >> 4) & _COLUMN_MASK).to(tl.int32)
    backward = key >> _PLACE_BITS >= num_windows
    tl.store(column_ptr + entry, column, mask=new & ~backward)
    tl.store(mask_ptr + entry, mask.to(tl.int16), mask=new & ~backward)
    tl.store(back_column_ptr + entry - middle, column, mask=new & backward)
    tl.store(back_mask_ptr + entry - middle, mask.to(tl.int16), mask=new & backward)


@triton.jit
def _entry(number_ptr, offs, inside):
    # the entry of each key, and whether the key is its first
    number = tl.load(number_ptr + offs, mask=inside, other=0)
    before = tl.load(number_ptr + offs - 1, mask=inside & (offs > 0), other=0)
    return number - 1, inside & (number != before)


# Bounds and tasks of the windows.
#   grid      (cdiv(count, BLOCK),): windows of both directions, or of the first if the second is the same
#   reads     task int64 [count], sorted; ptr int32 [count + 1]
#   writes    ptr int32 [windows + 1], tasks int32 [windows, 4] of each direction
@triton.jit(do_not_specialize=["count", "num_windows", "middle"])
def tasks_kernel(
    out_ptr, out_tasks_ptr, back_ptr, back_tasks_ptr, task_ptr, ptr_ptr, count, num_windows, middle,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    forward, backward = inside & (offs < num_windows), inside & (offs >= num_windows)
    end = tl.load(ptr_ptr + offs + 1, mask=inside, other=0)
    tl.store(out_ptr + offs + 1, end, mask=forward)
    tl.store(back_ptr + offs - num_windows + 1, end - middle, mask=backward)
    tl.store(out_ptr + offs, tl.zeros_like(offs), mask=forward & (offs == 0))
    tl.store(back_ptr + offs - num_windows, tl.zeros_like(offs), mask=backward & (offs == num_windows))
    window = tl.load(task_ptr + offs, mask=inside, other=0).to(tl.int32)  # its lower half
    begin = tl.load(ptr_ptr + window, mask=inside, other=0)
    end = tl.load(ptr_ptr + window + 1, mask=inside, other=0)
    _store_task(out_tasks_ptr, offs, window, begin, end, forward)
    own = offs - num_windows
    _store_task(back_tasks_ptr, own, window - num_windows, begin - middle, end - middle, backward)


@triton.jit
def _store_task(tasks_ptr, task, window, begin, end, mask):
    at = tasks_ptr + task.to(tl.int64) * 4
    tl.store(at, window, mask=mask)
    tl.store(at + 1, begin, mask=mask)
    tl.store(at + 2, end, mask=mask)
    tl.store(at + 3, tl.full(task.shape, -1, tl.int32), mask=mask)


# Edges and self-loops of every row.
#   grid      (windows of the longer direction, directions): one program = one window
#   reads     ptr, column, mask of the windows of each direction
#   writes    count, loops int64 [num_rows + back_rows], rows of the transpose last
@triton.jit(do_not_specialize=["num_rows", "back_rows"])
def count_kernel(
    count_ptr, loops_ptr, ptr_ptr, column_ptr, mask_ptr, back_ptr, back_column_ptr, back_mask_ptr,
    num_rows, back_rows, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) > 0:
        count_ptr += num_rows
        loops_ptr += num_rows
        ptr_ptr, column_ptr, mask_ptr, num_rows = back_ptr, back_column_ptr, back_mask_ptr, back_rows
    offset = tl.arange(0, _WINDOW)
    row = tl.program_id(0) * _WINDOW + offset
    inside = row < num_rows
    count, loops = tl.zeros_like(row), tl.zeros_like(row)
    at, end = _window(ptr_ptr, tl.program_id(0), num_rows)
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        column = tl.load(column_ptr + offs, mask=offs < end, other=0)
        bit = _bits(mask_ptr, offs, offset, end)
        count += tl.sum(bit, 1)
        loops += tl.sum(tl.where(column[None, :] == row[:, None], bit, 0), 1)
        at += COLUMNS
    tl.store(count_ptr + row, count.to(tl.int64), mask=inside)
    tl.store(loops_ptr + row, loops.to(tl.int64), mask=inside)


# Entries -> rows, one by one: the columns of each row, or the numbers of its edges.
#   grid      (windows of the longer direction, directions): one program = one window
#   reads     ptr, column, mask of the windows of each direction; count int64, and end, its running sum, in
#             which the transpose has its rows from back_row on and `skipped` edges before them;
#             first int32 [num_entries + 1] and perm int32 [num_edges], the edges of the entries, or None
#   writes    out int32 [num_edges]: of each edge, row by row, the column or, with perm, the number;
#             out_ptr int32 [num_rows + 1], where each row begins, unless None
@triton.jit(do_not_specialize=["num_rows", "back_rows", "back_row", "skipped"])
def rows_kernel(
    out_ptr, back_out_ptr, out_ptr_ptr, back_out_ptr_ptr, ptr_ptr, column_ptr, mask_ptr,
    back_ptr, back_column_ptr, back_mask_ptr, first_ptr, perm_ptr, back_first_ptr, back_perm_ptr,
    count_ptr, end_ptr, num_rows, back_rows, back_row, skipped, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) > 0:
        count_ptr += back_row
        end_ptr += back_row
        ptr_ptr, column_ptr, mask_ptr, num_rows = back_ptr, back_column_ptr, back_mask_ptr, back_rows
        out_ptr = back_out_ptr
        if out_ptr_ptr is not None:
            out_ptr_ptr = back_out_ptr_ptr
        if perm_ptr is not None:
            first_ptr, perm_ptr = back_first_ptr, back_perm_ptr
    else:
        skipped = 0
    offset = tl.arange(0, _WINDOW)
    row = tl.program_id(0) * _WINDOW + offset
    inside = row < num_rows
    last = tl.load(end_ptr + row, mask=inside, other=0).to(tl.int32) - skipped
    place = last - tl.load(count_ptr + row, mask=inside, other=0).to(tl.int32)
    if out_ptr_ptr is not None:
        tl.store(out_ptr_ptr + row, place, mask=inside)
        tl.store(out_ptr_ptr + row + 1, last, mask=row == num_rows - 1)
    at, end = _window(ptr_ptr, tl.program_id(0), num_rows)
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        bit = _bits(mask_ptr, offs, offset, end)
        live = bit != 0
        if perm_ptr is not None:  # edges of an entry are in the order of their rows
            first = tl.load(first_ptr + offs, mask=offs < end, other=0)
            edge = first[None, :] + tl.cumsum(bit, 0) - bit
            value = tl.load(perm_ptr + edge, mask=live, other=0)
        else:
            column = tl.load(column_ptr + offs, mask=offs < end, other=0)
            value = tl.broadcast_to(column[None, :], bit.shape)
        tl.store(out_ptr + place[:, None] + tl.cumsum(bit, 1) - bit, value, mask=live)
        place += tl.sum(bit, 1)
        at += COLUMNS


@triton.jit
def _window(ptr_ptr, window, num_rows):
    # first entry and end of a window; none of one that this direction does not have
    inside = window * _WINDOW < num_rows
    return tl.load(ptr_ptr + window, mask=inside, other=0), tl.load(
        ptr_ptr + window + 1, mask=inside, other=0
    )


@triton.jit
def _bits(mask_ptr, offs, offset, end):
    # [WINDOW, COLUMNS] of 0 and 1: which rows use which entries
    mask = tl.load(mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
    return (mask[None, :] >> offset[:, None]) & 1


# The caller's edges in the order of the entries.
#   grid      (cdiv(2 * num_edges, BLOCK),)
#   reads     order int64 [2 * num_edges], which edge each sorted key was; number as above
#   writes    first int32 [entries + 1], perm int32 [num_edges] of each direction
@triton.jit(do_not_specialize=["num_edges", "middle"])
def edges_kernel(
    first_ptr, perm_ptr, back_first_ptr, back_perm_ptr, order_ptr, number_ptr, num_edges, middle,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    forward, backward = offs < num_edges, (offs >= num_edges) & (offs < 2 * num_edges)
    order = tl.load(order_ptr + offs, mask=forward | backward, other=0).to(tl.int32)
    tl.store(perm_ptr + offs, order, mask=forward)
    tl.store(back_perm_ptr + offs - num_edges, order - num_edges, mask=backward)
    entry, new = _entry(number_ptr, offs, forward | backward)
    tl.store(first_ptr + entry, offs, mask=new & forward)
    tl.store(first_ptr + entry + 1, offs + 1, mask=offs == num_edges - 1)
    tl.store(back_first_ptr + entry - middle, offs - num_edges, mask=new & backward)
    last = offs == 2 * num_edges - 1
    tl.store(back_first_ptr + entry - middle + 1, offs + 1 - num_edges, mask=last)
