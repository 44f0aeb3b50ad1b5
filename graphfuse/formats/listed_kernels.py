"""The kernels of :mod:`.listed`. Imports triton, so nothing imports this before one is launched.

Integers only; the atomics are sums of integers, whose order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.formats.build import WINDOW

BLOCK = 1024  # entries, or edges, of a program where they are one by one
COLUMNS = 64  # entries of a step where they are taken apart
_HEIGHT = tl.constexpr(WINDOW)


@triton.jit
def _ones(bits):
    # how many of 16 bits are set
    bits -= (bits >> 1) & 0x5555
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 31


# How many edges each entry has.
@triton.jit(do_not_specialize=["num_entries"])
def count_kernel(counts_ptr, mask_ptr, num_entries, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = offs < num_entries
    mask = tl.load(mask_ptr + offs, mask=live, other=0).to(tl.int32) & 0xFFFF
    tl.store(counts_ptr + offs, _ones(mask), mask=live)


# The edges of the entries of a task, a window or a slice of one; and how many each row has, in `degree`, all
# 0 before. Beside the column of an edge stands which row of its window it is of.
#   grid      (num_tasks,)
@triton.jit(do_not_specialize=["num_rows"])
def apart_kernel(
    packed_ptr, row_ptr, degree_ptr, before_ptr, tasks_ptr, row_index_ptr, column_ptr, mask_ptr, num_rows,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    task = tasks_ptr + tl.program_id(0) * 4
    window, begin, end = tl.load(task), tl.load(task + 1), tl.load(task + 2)
    inner = tl.arange(0, _HEIGHT)
    row = window * _HEIGHT + inner
    if row_index_ptr is not None:
        row = tl.load(row_index_ptr + row)
    degree = tl.zeros((_HEIGHT,), dtype=tl.int32)
    start = begin
    while start < end:
        offs = start + tl.arange(0, COLUMNS)
        live = offs < end
        column = tl.load(column_ptr + offs, mask=live, other=0)
        mask = tl.load(mask_ptr + offs, mask=live, other=0).to(tl.int32) & 0xFFFF
        before = tl.load(before_ptr + offs, mask=live, other=0)
        there = ((mask[:, None] >> inner[None, :]) & 1) != 0
        at = before[:, None] + _ones(mask[:, None] & ((1 << inner) - 1)[None, :])
        tl.store(packed_ptr + at, column[:, None] * (2 * _HEIGHT) + inner[None, :], mask=there)
        tl.store(row_ptr + at, tl.broadcast_to(row[None, :], there.shape), mask=there)
        degree += tl.sum(there.to(tl.int32), 0)
        start += COLUMNS
    tl.atomic_add(degree_ptr + row, degree, mask=(row < num_rows) & (degree > 0))


# Marks the edges whose row has no other, and puts their columns in `only`.
@triton.jit(do_not_specialize=["num_edges"])
def only_kernel(packed_ptr, only_ptr, row_ptr, degree_ptr, num_edges, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = offs < num_edges
    row = tl.load(row_ptr + offs, mask=live, other=0)
    alone = live & (tl.load(degree_ptr + row, mask=live, other=0) == 1)
    packed = tl.load(packed_ptr + offs, mask=alone, other=0)
    tl.store(packed_ptr + offs, packed + _HEIGHT, mask=alone)
    tl.store(only_ptr + row, packed // (2 * _HEIGHT), mask=alone)
