"""The kernels of :mod:`.quick` that sort. Imports triton, so nothing imports this before one is launched.

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
KEYS = 32  # keys that a program compares with others
SPAN = 8  # windows that a program compares with others ...
RUN = 256  # ... or only sums up
FACTS = 16  # numbers at the start of the table
CROWD = 1 << 14  # edges of a window, at most: to sort them takes their square
_NEAR = tl.constexpr(32)  # keys that they are compared with at a time
_OTHERS = tl.constexpr(512)  # windows, likewise
_WIDE = tl.constexpr(1024)  # numbers that are summed at a time
HEIGHT = tl.constexpr(WINDOW)
_PLACE_BITS = tl.constexpr(32)  # of a key below the window: 28 of the column, 4 of the row
_WITHOUT_COLUMN = tl.constexpr(~(((1 << 28) - 1) << 4))
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
_FINGERPRINT, _ODD, _LOPSIDED, _LONGEST_WINDOW, MIDDLE, _TOTAL = (tl.constexpr(field) for field in range(6))
_CROWDED, _LONG, _BACK_LONG = (tl.constexpr(field) for field in range(6, 9))
# the numbers of a window
COUNT, BEGIN, PTR, PLACE = (tl.constexpr(part) for part in range(4))

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_COMPILED: dict[Any, tuple[Any, ...]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4) -> None:
    """Launches ``kernel`` on the current stream of the current GPU.

    What Triton compiled is called directly from the second time on: to bind and to specialise the arguments
    anew takes it more host time than the GPU needs for a mini-batch, and numbers are not specialised here.

    Args:
        kernel: One of this module.
        grid: Its programs.
        arguments: Tensors, of which some may be ``None``, tuples of numbers, numbers and, last, the
            ``constexpr`` ones, of which integers are the same in all launches that differ in nothing else.
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


@triton.jit
def of_windows(table_ptr, part, all_windows):
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
        windows = (num_dst + HEIGHT - 1) // HEIGHT
        count_ptr = of_windows(table_ptr, COUNT, windows + (num_src + HEIGHT - 1) // HEIGHT)
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
    windows = (num_dst + HEIGHT - 1) // HEIGHT
    all_windows = windows + (num_src + HEIGHT - 1) // HEIGHT
    forward, backward = (src << 4) | (dst & 15), (dst << 4) | (src & 15)
    _deal(key_ptr, order_ptr, table_ptr, all_windows, dst >> 4, forward, offs, inside)
    _deal(key_ptr, order_ptr, table_ptr, all_windows, windows + (src >> 4), backward, offs, inside)


@triton.jit
def _deal(key_ptr, order_ptr, table_ptr, all_windows, window, place, edge, inside):
    count_ptr = of_windows(table_ptr, COUNT, all_windows)
    left = tl.atomic_add(count_ptr + window, tl.full(window.shape, -1, tl.int64), mask=inside, sem="relaxed")
    begin = tl.load(of_windows(table_ptr, BEGIN, all_windows) + window, mask=inside, other=0)
    at = begin + left - 1
    tl.store(key_ptr + at, (window << _PLACE_BITS) | place, mask=inside)
    if order_ptr is not None:
        tl.store(order_ptr + at, edge.to(tl.int32), mask=inside)


# Sorts the keys within their windows, and counts the entries of each, COUNT, and long rows.
#   grid      (cdiv(num_keys, KEYS),)
#   reads     mixed int64 [num_keys], those of a window together, unsorted; mixed_order, likewise; BEGIN
#   writes    key int64 [num_keys]: each behind as many of its window as are less; order; odd (an edge is
#             repeated); long (rows of more than `split` edges) and, of the transpose, back_long. Nothing
#             where a window has more than CROWD edges
@triton.jit(do_not_specialize=["num_windows", "all_windows", "split", "back_split"])
def sort_kernel(
    key_ptr, order_ptr, mixed_ptr, mixed_order_ptr, table_ptr, num_windows, all_windows, split, back_split,
    KEYS: tl.constexpr,
):  # fmt: skip
    begin_ptr = of_windows(table_ptr, BEGIN, all_windows)
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
    before, equal, of_row, earlier = rank, rank, rank, rank
    while at < end:
        others = at + tl.arange(0, _NEAR)
        other = tl.load(mixed_ptr + others, mask=others < end, other=_MOST)[None, :]
        less = other < key[:, None]
        rank += tl.sum(less.to(tl.int32), 1)
        before += tl.sum((less & (other >> 4 == (key >> 4)[:, None])).to(tl.int32), 1)
        equal += tl.sum((other == key[:, None]).to(tl.int32), 1)
        same_row = ((other ^ key[:, None]) & _WITHOUT_COLUMN) == 0
        of_row += tl.sum(same_row.to(tl.int32), 1)
        earlier += tl.sum((same_row & less).to(tl.int32), 1)
        at += _NEAR
    tl.store(key_ptr + first + rank, key, mask=inside)
    if order_ptr is not None:
        tl.store(order_ptr + first + rank, tl.load(mixed_order_ptr + offs, mask=inside, other=0), mask=inside)
    repeated = inside & (equal > 1)
    odd = tl.max(repeated.to(tl.int64), 0)
    tl.atomic_max(table_ptr + _ODD, odd, mask=odd > 0, sem="relaxed")
    count_ptr = of_windows(table_ptr, COUNT, all_windows)
    one = tl.full((KEYS,), 1, tl.int64)
    tl.atomic_add(count_ptr + window, one, mask=inside & (before == 0), sem="relaxed")
    back = window >= num_windows
    long = inside & (earlier == 0) & (of_row > tl.where(back, back_split, split))
    tl.atomic_add(table_ptr + tl.where(back, _BACK_LONG, _LONG), one, mask=long, sem="relaxed")


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
        count_ptr = of_windows(table_ptr, COUNT, all_windows)
        window = (start + tl.arange(0, SPAN)).to(tl.int64)
        inside = window < all_windows
        count = tl.load(count_ptr + window, mask=inside, other=0)
        total, at = tl.zeros((1,), tl.int64), 0
        while at < start:
            others = at + tl.arange(0, _WIDE)
            total += tl.sum(tl.load(count_ptr + others, mask=others < start, other=0), 0)
            at += _WIDE
        end = total + tl.cumsum(count, 0)
        sum_ptr = of_windows(table_ptr, BEGIN if key_ptr is None else PTR, all_windows)
        tl.store(sum_ptr + window, end - count, mask=inside)
        tl.store(sum_ptr + window + 1, end, mask=window == all_windows - 1)
        most_ptr = table_ptr + (_CROWDED if key_ptr is None else _LONGEST_WINDOW)
        tl.atomic_max(most_ptr, tl.max(count, 0), sem="relaxed")
        if key_ptr is not None:
            fact_ptr = table_ptr + tl.zeros_like(window)
            tl.store(fact_ptr + MIDDLE, end, mask=window == num_windows - 1)
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
            tl.store(of_windows(table_ptr, PLACE, all_windows) + window, place, mask=inside)
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
