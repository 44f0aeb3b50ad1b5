"""The kernels of :mod:`.quick`. Imports triton, so nothing imports this before a kernel is launched.

An edge is one int64 key: its window (those of the transpose after all others), column and row within the
window, so that keys sort into the order of the format.

What is known of the graph is one table of int64: first the fields of ``quick.Facts``, then four numbers of
each window: COUNT, edges that it has not been dealt, and then its entries; BEGIN, edges of all windows before
it; PTR, their entries; PLACE, that of its task.

Integers only. Atomics are sums and maxima of integers, whose order does not matter, and the places that keys
are dealt before they are sorted, which does not matter either: every build gives the same bits. No number of
a launch is specialised, as every mini-batch brings others.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from graphfuse.formats.build import WINDOW
from graphfuse.formats.fingerprint import MIX_1, MIX_2, POSITION, SOURCE

BLOCK = 512  # edges of a program, where they are one by one
COLUMNS = 32  # edges or entries of a window that are looked at together
KEYS = 32  # keys that a program compares with others
SPAN = 8  # windows that a program compares with others
FACTS = 8  # numbers at the start of the table
CROWD = 1 << 14  # edges of a window, at most: to sort them takes their square
_NEAR = tl.constexpr(32)  # keys that they are compared with at a time
_OTHERS = tl.constexpr(512)  # windows, likewise
_WIDE = tl.constexpr(1024)  # numbers that are summed at a time
_WINDOW = tl.constexpr(WINDOW)
_PLACE_BITS = tl.constexpr(32)  # of a key below the window: 28 of the column, 4 of the row
_COLUMN_MASK = tl.constexpr((1 << 28) - 1)
_BACKWARD = tl.constexpr(1 << 60)  # in the order of tasks: those of the transpose come last
_LONGEST = tl.constexpr(1 << 24)  # no window has as many entries
_MOST = tl.constexpr(1 << 62)  # no key is as large
_SOURCE = tl.constexpr(SOURCE)
_POSITION = tl.constexpr(POSITION)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_FACTS = tl.constexpr(FACTS)
_CROWD = tl.constexpr(CROWD)
# the fields of quick.Facts
_FINGERPRINT, _ODD, _LOPSIDED, _LONG, _MIDDLE, _TOTAL, _CROWDED = (tl.constexpr(field) for field in range(7))
# the numbers of a window
_COUNT, _BEGIN, _PTR, _PLACE = (tl.constexpr(part) for part in range(4))
# where a header tells of its sections, see packed.py
_HEADER, _SECTIONS, _ALIGN = tl.constexpr(64), tl.constexpr(12), tl.constexpr(32)

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_COMPILED: dict[Any, tuple[Any, ...]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4) -> None:
    """Launches ``kernel`` on the current stream of the current GPU.

    What Triton compiled is called directly from the second time on: to bind and to specialise the arguments
    anew takes it more host time than the GPU needs for a mini-batch, and numbers are not specialised here.

    Args:
        kernel: One of this module.
        grid: Its programs.
        arguments: Tensors, of which some may be ``None``, numbers, tuples of :func:`headed` and, last,
            the ``constexpr`` ones.
        warps: Warps of a program.
    """
    index = None if _INTERPRETING else torch.cuda.current_device()
    key, plain = [kernel.fn, index], list[Any]()
    for one in arguments:  # what Triton tells apart, where numbers are not specialised
        kind = type(one)
        if kind is int:
            key.append(-(2**31) <= one < 2**31)
        elif one is None or kind is bool:
            key.append(one)
        elif kind is tuple:
            key.append(len(one))
        else:  # of a tensor it would ask the driver where that lies
            one, dtype = one.data_ptr(), one.dtype
            key.append((dtype, one & 15 == 0))
        plain.append(one)
    found = _COMPILED.get(tuple(key))
    if found is not None:
        run, function, metadata, _ = found
        stream = triton.runtime.driver.active.get_current_stream(index)
        columns, rows = grid if len(grid) > 1 else (*grid, 1)
        run(columns, rows, 1, stream, function, metadata, None, None, None, *plain)  # no launch hooks
        return
    compiled = kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=True)  # 3.9 warns if it is not told
    if not _INTERPRETING:
        # the last is there to stay alive: with it Triton 3.8 unloads its function
        _COMPILED[tuple(key)] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)


def headed(header: tuple[int, ...]) -> tuple[int, ...]:
    """``header`` as :func:`lay_kernel` takes it: 16 n + 2 for each number.

    Triton compiles anew for a number of a tuple that is 1, or a multiple of 16, whatever it is told: none is.
    """
    return tuple([16 * number + 2 for number in header])


@triton.jit
def _of_windows(table_ptr, part, all_windows):
    return table_ptr + _FACTS + part * (all_windows.to(tl.int64) + 1)


@triton.jit
def _edge(edge_ptr, offs, inside, end_stride, edge_stride):
    at = edge_ptr + offs * edge_stride
    src = tl.load(at, mask=inside, other=0).to(tl.int64)
    return src, tl.load(at + end_stride, mask=inside, other=0).to(tl.int64)


@triton.jit
def _is_wrong(src, dst, num_src, num_dst):
    return (src < 0) | (src >= num_src) | (dst < 0) | (dst >= num_dst)


# The fingerprint of the edges, and how many each window has.
#   grid      (cdiv(num_edges, BLOCK),)
#   reads     edge [2, num_edges], any integer dtype and strides
#   writes    table: fingerprint and, with COUNTED, odd (an index is out of range) and COUNT
@triton.jit(
    do_not_specialize=["num_edges", "num_src", "num_dst", "end_stride", "edge_stride"],
    do_not_specialize_on_alignment=["edge_ptr"],
)
def edges_kernel(
    table_ptr, edge_ptr, num_edges, num_src, num_dst, end_stride, edge_stride, COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < num_edges
    src, dst = _edge(edge_ptr, offs, inside, end_stride, edge_stride)
    h = ((offs + 1) * _POSITION + src * _SOURCE + dst) * _MIX_1
    h = (h ^ (h >> 29)) * _MIX_2
    h = h ^ (h >> 32)
    tl.atomic_add(table_ptr + _FINGERPRINT, tl.sum(tl.where(inside, h, 0), 0), sem="relaxed")
    if COUNTED:
        wrong = inside & _is_wrong(src, dst, num_src, num_dst)
        tl.atomic_max(table_ptr + _ODD, tl.max(wrong.to(tl.int64), 0), sem="relaxed")
        windows = (num_dst + _WINDOW - 1) // _WINDOW
        count_ptr = _of_windows(table_ptr, _COUNT, windows + (num_src + _WINDOW - 1) // _WINDOW)
        one, counted = tl.full((BLOCK,), 1, tl.int64), inside & (wrong == 0)
        tl.atomic_add(count_ptr + (dst >> 4), one, mask=counted, sem="relaxed")
        tl.atomic_add(count_ptr + windows + (src >> 4), one, mask=counted, sem="relaxed")


# Keys of the edges, in both directions, each somewhere among those of its window.
#   grid      (cdiv(num_edges, BLOCK),)
#   reads     edge as above; BEGIN
#   writes    key int64 [2 * num_edges]; order int32 [2 * num_edges], the edge of each, unless None; COUNT,
#             which is 0 in the end. Not edges of which an index is out of range
@triton.jit(
    do_not_specialize=["num_edges", "num_src", "num_dst", "end_stride", "edge_stride"],
    do_not_specialize_on_alignment=["edge_ptr"],
)
def keys_kernel(
    key_ptr, order_ptr, table_ptr, edge_ptr, num_edges, num_src, num_dst, end_stride, edge_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < num_edges
    src, dst = _edge(edge_ptr, offs, inside, end_stride, edge_stride)
    inside = inside & (_is_wrong(src, dst, num_src, num_dst) == 0)
    windows = (num_dst + _WINDOW - 1) // _WINDOW
    all_windows = windows + (num_src + _WINDOW - 1) // _WINDOW
    forward, backward = (src << 4) | (dst & 15), (dst << 4) | (src & 15)
    _deal(key_ptr, order_ptr, table_ptr, all_windows, dst >> 4, forward, offs, inside)
    _deal(key_ptr, order_ptr, table_ptr, all_windows, windows + (src >> 4), backward, offs, inside)


@triton.jit
def _deal(key_ptr, order_ptr, table_ptr, all_windows, window, place, edge, inside):
    count_ptr = _of_windows(table_ptr, _COUNT, all_windows)
    left = tl.atomic_add(count_ptr + window, tl.full(window.shape, -1, tl.int64), mask=inside, sem="relaxed")
    begin = tl.load(_of_windows(table_ptr, _BEGIN, all_windows) + window, mask=inside, other=0)
    at = begin + left - 1
    tl.store(key_ptr + at, (window << _PLACE_BITS) | place, mask=inside)
    if order_ptr is not None:
        tl.store(order_ptr + at, edge.to(tl.int32), mask=inside)


# Sorts the keys within their windows, and counts the entries of each: COUNT.
#   grid      (cdiv(num_keys, KEYS),)
#   reads     mixed int64 [num_keys], those of a window together, unsorted; mixed_order, likewise; BEGIN
#   writes    key int64 [num_keys]: each behind as many of its window as are less; order; odd (an edge is
#             repeated). Nothing where a window has more than CROWD edges
@triton.jit(do_not_specialize=["all_windows"])
def sort_kernel(
    key_ptr, order_ptr, mixed_ptr, mixed_order_ptr, table_ptr, all_windows, KEYS: tl.constexpr
):  # fmt: skip
    begin_ptr = _of_windows(table_ptr, _BEGIN, all_windows)
    num_keys = tl.load(begin_ptr + all_windows)
    num_keys = tl.where(tl.load(table_ptr + _CROWDED) <= _CROWD, num_keys, 0)
    offs = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside = offs < num_keys
    key = tl.load(mixed_ptr + offs, mask=inside, other=0)
    window = key >> _PLACE_BITS
    # all keys of the windows that these are of: what is before the own window is less
    first = tl.min(tl.load(begin_ptr + window, mask=inside, other=_MOST), 0)
    end = tl.max(tl.load(begin_ptr + window + 1, mask=inside, other=0), 0)
    at, rank = first, tl.zeros((KEYS,), dtype=tl.int32)
    before, equal = tl.zeros_like(rank), tl.zeros_like(rank)
    while at < end:
        others = at + tl.arange(0, _NEAR)
        other = tl.load(mixed_ptr + others, mask=others < end, other=_MOST)[None, :]
        less = other < key[:, None]
        rank += tl.sum(less.to(tl.int32), 1)
        before += tl.sum((less & (other >> 4 == (key >> 4)[:, None])).to(tl.int32), 1)
        equal += tl.sum((other == key[:, None]).to(tl.int32), 1)
        at += _NEAR
    tl.store(key_ptr + first + rank, key, mask=inside)
    if order_ptr is not None:
        tl.store(order_ptr + first + rank, tl.load(mixed_order_ptr + offs, mask=inside, other=0), mask=inside)
    repeated = inside & (equal > 1)
    odd = tl.max(repeated.to(tl.int64), 0)
    tl.atomic_max(table_ptr + _ODD, odd, mask=odd > 0, sem="relaxed")
    count_ptr = _of_windows(table_ptr, _COUNT, all_windows)
    one = tl.full((KEYS,), 1, tl.int64)
    tl.atomic_add(count_ptr + window, one, mask=inside & (before == 0), sem="relaxed")


# Sums of COUNT over the windows before each; of entries also the order of the tasks.
#   grid      (cdiv(all_windows, SPAN),), and with key at least (cdiv(num_edges, BLOCK),)
#   reads     COUNT; key int64 [2 * num_edges], sorted, or None
#   writes    without key: BEGIN, crowded (the most edges of a window)
#             with key:    PTR; longest (the most entries of a window), middle and total (entries of the
#                          forward direction, and of both); PLACE, by direction, longest first, by window, if
#                          RANKED, else a number that sorts so; lopsided (the directions differ)
@triton.jit(do_not_specialize=["num_edges", "num_windows", "all_windows"])
def sums_kernel(
    table_ptr, key_ptr, num_edges, num_windows, all_windows, RANKED: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * SPAN
    if start < all_windows:
        count_ptr = _of_windows(table_ptr, _COUNT, all_windows)
        window = (start + tl.arange(0, SPAN)).to(tl.int64)
        inside = window < all_windows
        count = tl.load(count_ptr + window, mask=inside, other=0)
        total, at = tl.zeros((1,), tl.int64), 0
        while at < start:
            others = at + tl.arange(0, _WIDE)
            total += tl.sum(tl.load(count_ptr + others, mask=others < start, other=0), 0)
            at += _WIDE
        end = total + tl.cumsum(count, 0)
        sum_ptr = _of_windows(table_ptr, _BEGIN if key_ptr is None else _PTR, all_windows)
        tl.store(sum_ptr + window, end - count, mask=inside)
        tl.store(sum_ptr + window + 1, end, mask=window == all_windows - 1)
        most_ptr = table_ptr + (_CROWDED if key_ptr is None else _LONG)
        tl.atomic_max(most_ptr, tl.max(count, 0), sem="relaxed")
        if key_ptr is not None:
            fact_ptr = table_ptr + tl.zeros_like(window)
            tl.store(fact_ptr + _MIDDLE, end, mask=window == num_windows - 1)
            tl.store(fact_ptr + _TOTAL, end, mask=window == all_windows - 1)
            place = _task(count, window, num_windows)
            if RANKED:
                own, place, at = place, tl.zeros_like(place), 0
                while at < all_windows:
                    others = (at + tl.arange(0, _OTHERS)).to(tl.int64)
                    live = others < all_windows
                    other = _task(tl.load(count_ptr + others, mask=live, other=0), others, num_windows)
                    place += tl.sum(((other[None, :] < own[:, None]) & live[None, :]).to(tl.int64), 1)
                    at += _OTHERS
            tl.store(_of_windows(table_ptr, _PLACE, all_windows) + window, place, mask=inside)
    if key_ptr is not None:
        # unless there is a key at every place
        sorted = (tl.load(table_ptr + _ODD) == 0) & (tl.load(table_ptr + _CROWDED) <= _CROWD)
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        forward = offs < tl.where(sorted, num_edges, 0)
        key = tl.load(key_ptr + offs, mask=forward, other=0)
        mirrored = tl.load(key_ptr + num_edges + offs, mask=forward, other=0)
        lopsided = forward & (key + (num_windows.to(tl.int64) << _PLACE_BITS) != mirrored)
        tl.atomic_max(table_ptr + _LOPSIDED, tl.max(lopsided.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _task(count, window, num_windows):
    return tl.where(window >= num_windows, _BACKWARD, 0) | ((_LONGEST - count) << 32) | window


# Lays out packed tensors: what their headers say is to be in them.
#   grid      (windows of the longer direction, directions): one program = one window; one direction if
#             the second holds the same
#   reads     first and second: the headers, see headed(), of windows or window_edges, and of rows or
#             row_edges; key int64 [2 * num_edges], sorted; order int32, the edge of each, if there are
#             window_edges; the table
#   writes    windows int32, and masks int16, the same memory; rows; window_edges; row_edges, unless None
@triton.jit(
    do_not_specialize=["first", "second", "num_edges", "num_rows", "back_rows", "num_windows", "all_windows"]
)
def lay_kernel(
    windows_ptr, masks_ptr, rows_ptr, window_edges_ptr, row_edges_ptr, first, second, key_ptr, order_ptr,
    table_ptr, num_edges, num_rows, back_rows, num_windows, all_windows, COLUMNS: tl.constexpr,
):  # fmt: skip
    window, back = tl.program_id(0), tl.program_id(1)
    if window == 0:
        if windows_ptr is not None:
            _begin(windows_ptr, first, back)
            _begin(rows_ptr, second, back)
            entries = _length(first, back, 3)
            out_ptr = masks_ptr + 2 * _start(first, back, 4) + entries  # two masks in one int32
            tl.store(out_ptr, tl.zeros_like(entries).to(tl.int16), mask=entries % 2 > 0)
        else:
            _begin(window_edges_ptr, first, back)
            _begin(row_edges_ptr, second, back)
    listed = window + back * num_windows  # in the table
    num_rows = tl.where(back > 0, back_rows, num_rows)
    if window * _WINDOW >= num_rows:
        return
    begin_ptr = _of_windows(table_ptr, _BEGIN, all_windows) + listed
    begin, end = tl.load(begin_ptr).to(tl.int32), tl.load(begin_ptr + 1).to(tl.int32)
    ptr_ptr = _of_windows(table_ptr, _PTR, all_windows) + listed
    middle = back * tl.load(table_ptr + _MIDDLE).to(tl.int32)
    entry, last = tl.load(ptr_ptr).to(tl.int32) - middle, tl.load(ptr_ptr + 1).to(tl.int32) - middle
    skipped = back * num_edges
    offset = tl.arange(0, _WINDOW)
    row = window * _WINDOW + offset
    if windows_ptr is not None:
        out_ptr = windows_ptr + _start(first, back, 0)
        tl.store(out_ptr + window, entry)
        tl.store(out_ptr + window + 1, last, mask=window * _WINDOW + _WINDOW >= num_rows)
        task = tl.load(_of_windows(table_ptr, _PLACE, all_windows) + listed) - back * num_windows
        task_ptr = windows_ptr + _start(first, back, 1) + task * 4
        tl.store(task_ptr, window)
        tl.store(task_ptr + 1, entry)
        tl.store(task_ptr + 2, last)
        tl.store(task_ptr + 3, -1)
    # where each row begins
    count, at = tl.zeros((_WINDOW,), tl.int32), begin
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        key = tl.load(key_ptr + offs, mask=offs < end, other=0)
        count += tl.sum(_bits(key, offset, offs < end), 1)
        at += COLUMNS
    row_end = begin - skipped + tl.cumsum(count, 0)
    place = row_end - count
    if rows_ptr is not None:
        out_ptr = rows_ptr + _start(second, back, 0)
        tl.store(out_ptr + row, place, mask=row < num_rows)
        tl.store(out_ptr + row + 1, row_end, mask=row == num_rows - 1)
    at = begin
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        live = offs < end
        key = tl.load(key_ptr + offs, mask=live, other=0)
        earlier = tl.load(key_ptr + offs - 1, mask=live & (offs > begin), other=-1)
        new = live & (key >> 4 != earlier >> 4)
        number = entry + tl.cumsum(new.to(tl.int32), 0) - 1
        entry += tl.sum(new.to(tl.int32), 0)
        column = ((key >> 4) & _COLUMN_MASK).to(tl.int32)
        bit = _bits(key, offset, live)
        within = place[:, None] + tl.cumsum(bit, 1) - bit
        place += tl.sum(bit, 1)
        if windows_ptr is not None:
            mask = tl.full((COLUMNS,), 1, tl.int32) << (key & 15).to(tl.int32)
            for further in tl.range(1, _WINDOW):  # an entry has at most an edge of each row
                other = tl.load(key_ptr + offs + further, mask=offs + further < end, other=-1)
                mask |= tl.where(other >> 4 == key >> 4, 1 << (other & 15).to(tl.int32), 0)
            tl.store(windows_ptr + _start(first, back, 3) + number, column, mask=new)
            tl.store(masks_ptr + 2 * _start(first, back, 4) + number, mask.to(tl.int16), mask=new)
        if rows_ptr is not None:
            out_ptr = rows_ptr + _start(second, back, 3)
            tl.store(out_ptr + within, tl.broadcast_to(column[None, :], bit.shape), mask=bit != 0)
        if order_ptr is not None:
            edge = tl.load(order_ptr + offs, mask=live, other=0)
            out_ptr = window_edges_ptr + _start(first, back, 0)
            tl.store(out_ptr + number, offs - skipped, mask=new)
            tl.store(out_ptr + number + 1, offs + 1 - skipped, mask=live & (offs - skipped == num_edges - 1))
            tl.store(window_edges_ptr + _start(first, back, 1) + offs - skipped, edge, mask=live)
            out_ptr = row_edges_ptr + _start(second, back, 0)
            tl.store(out_ptr + within, tl.broadcast_to(edge[None, :], bit.shape), mask=bit != 0)
        at += COLUMNS


@triton.jit
def _start(header, back, SECTION: tl.constexpr):
    # of a section of a direction
    PLACE: tl.constexpr = _SECTIONS + 2 * SECTION
    HALF: tl.constexpr = (len(header) - _SECTIONS) // 2
    return (tl.where(back > 0, header[PLACE + HALF], header[PLACE]) >> 4).to(tl.int64) * _ALIGN


@triton.jit
def _length(header, back, SECTION: tl.constexpr):
    PLACE: tl.constexpr = _SECTIONS + 2 * SECTION + 1
    HALF: tl.constexpr = (len(header) - _SECTIONS) // 2
    return tl.where(back > 0, header[PLACE + HALF], header[PLACE]) >> 4


@triton.jit
def _begin(packed_ptr, header, back):
    # the header, and the end of the last line of each section of a direction, which is 0 behind its numbers
    KNOWN: tl.constexpr = len(header)
    for i in tl.static_range(KNOWN):
        tl.store(packed_ptr + i, header[i] >> 4)
    offs = tl.arange(0, _HEADER)
    tl.store(packed_ptr + offs, tl.zeros_like(offs), mask=offs >= KNOWN)
    behind = tl.arange(0, _ALIGN)
    for section in tl.static_range((KNOWN - _SECTIONS) // 4):
        length = _length(header, back, section).to(tl.int64)
        at = length // _ALIGN * _ALIGN + behind
        out_ptr = packed_ptr + _start(header, back, section)
        tl.store(out_ptr + at, tl.zeros((_ALIGN,), tl.int32), mask=(at >= length) & (length % _ALIGN > 0))


@triton.jit
def _bits(key, offset, live):
    # [WINDOW, COLUMNS] of 0 and 1: the row of each key
    return (((key & 15).to(tl.int32)[None, :] == offset[:, None]) & live[None, :]).to(tl.int32)


# Edges and self-loops of every row.
#   grid      (windows of the longer direction, directions): one program = one window
#   reads     ptr, column, mask of the windows of each direction
#   writes    count, loops int64 [num_rows + back_rows], rows of the transpose last
@triton.jit(do_not_specialize=["num_rows", "back_rows"])
def degrees_kernel(
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
        bit = _mask_bits(mask_ptr, offs, offset, end)
        count += tl.sum(bit, 1)
        loops += tl.sum(tl.where(column[None, :] == row[:, None], bit, 0), 1)
        at += COLUMNS
    tl.store(count_ptr + row, count.to(tl.int64), mask=inside)
    tl.store(loops_ptr + row, loops.to(tl.int64), mask=inside)


@triton.jit
def _window(ptr_ptr, window, num_rows):
    # first entry and end of a window; none of one that this direction does not have
    inside = window * _WINDOW < num_rows
    return tl.load(ptr_ptr + window, mask=inside, other=0), tl.load(
        ptr_ptr + window + 1, mask=inside, other=0
    )


@triton.jit
def _mask_bits(mask_ptr, offs, offset, end):
    # [WINDOW, COLUMNS] of 0 and 1: which rows use which entries
    mask = tl.load(mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
    return (mask[None, :] >> offset[:, None]) & 1
