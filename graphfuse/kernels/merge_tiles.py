"""Pieces of the kernels that add the slices of cut windows and rows.

A program adds some rows of one window, of each some heads. It loads the slices one after the other, or
several at a time, whose sums it keeps apart until the end: a row is narrow, and a hub's slices are many.
"""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import shift_of
from graphfuse.kernels.tiles import load_task


@triton.jit
def merge_task(merges_ptr, HEIGHT: tl.constexpr, ROWS: tl.constexpr):
    # What a program of a merge does: ROWS of the HEIGHT rows of a cut window. The window, its first slot, the
    # end of its slots, and the first of the rows.
    PARTS: tl.constexpr = HEIGHT // ROWS
    window, begin, count, _ = load_task(merges_ptr, tl.program_id(0) // PARTS)
    return window, begin, begin + count, tl.program_id(0) % PARTS * ROWS


@triton.constexpr_function
def slice_width(sums, numbers):
    # Of a row of a slice that has `numbers` behind its `sums`: they are filled up, so that each row starts on
    # 16 bytes if the sums of one are as long. Else the copies of a pipeline have 4 (results: merges.md).
    return sums + (numbers + 3) // 4 * 4


@triton.jit
def store_slice(ptr, acc):
    # 16 rows of sums as tensor cores leave them, four numbers of a thread side by side: nothing moves between
    # threads, as it would have to for rows. `rows_of_slice` puts them in order.
    PAIRS: tl.constexpr = acc.shape[1] // 16
    acc = acc.reshape(2, 8, PAIRS, 2, 4, 2).permute(4, 1, 0, 2, 3, 5).reshape(4, 8, 2 * PAIRS, 4)
    thread = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 8)[None, :] * 16
    number = tl.arange(0, 2 * PAIRS)[:, None] * 128 + tl.arange(0, 4)[None, :]
    tl.store(ptr + thread[:, :, None, None] + number[None, None, :, :], acc)


@triton.jit
def rows_of_slice(x, ROWS: tl.constexpr):
    # Sums [ROWS, features], 8 or 16 rows of a slice, of what `store_slice` left in memory: [ROWS * features].
    PAIRS: tl.constexpr = x.shape[0] // (ROWS * 16)
    x = x.reshape(ROWS // 8, PAIRS, 8, 4, 2, 2).permute(0, 2, 1, 4, 3, 5)
    return x.reshape(ROWS, PAIRS * 16)


@triton.jit
def rows_by_heads(first, group, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    # SLOTS slices that are loaded at a time, ROWS rows of each from `first` on, and the heads of a group,
    # flat: all heads of a row lie side by side in memory.
    place = tl.arange(0, SLOTS * ROWS * BLOCK_HEADS)
    row = first + place // BLOCK_HEADS % ROWS
    return place // (ROWS * BLOCK_HEADS), row, group * BLOCK_HEADS + place % BLOCK_HEADS


@triton.jit
def over_slots(x, SLOTS: tl.constexpr):
    # The sum of the slices that were loaded at a time, which stand before rows and heads.
    if SLOTS > 1:
        REST: tl.constexpr = x.shape[0] // SLOTS
        if len(x.shape) == 1:
            x = tl.sum(x.reshape(SLOTS, REST), 0)
        else:
            x = tl.sum(x.reshape(SLOTS, REST, x.shape[1]), 0)
    return x


@triton.jit
def highest_of_slots(top, SLOTS: tl.constexpr):
    # The maxima of the slices that were loaded at a time, see `over_slots`, and what each one's sums have to
    # be multiplied by.
    REST: tl.constexpr = top.shape[0] // SLOTS
    tops = top.reshape(SLOTS, REST)
    highest = tl.max(tops, 0)
    return highest, tl.exp(tops - shift_of(highest)[None, :]).reshape(SLOTS * REST)
