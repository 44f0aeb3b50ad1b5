"""Pieces of the kernels that add the slices of cut windows and rows.

A program adds some rows of one window, of each some heads. It loads the slices one after the other, or
several at a time, whose sums it keeps apart until the end: a row is narrow, and a hub's slices are many.
"""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import shift_of
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.tiles import load_task, rows_at

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.jit
def merge_task(merges_ptr, HEIGHT: tl.constexpr, ROWS: tl.constexpr):
    # What a program of a merge does: ROWS of the HEIGHT rows of a cut window. The window, its first slot, the
    # end of its slots, and the first of the rows.
    PARTS: tl.constexpr = HEIGHT // ROWS
    window, begin, count, _ = load_task(merges_ptr, tl.program_id(0) // PARTS)
    return window, begin, begin + count, tl.program_id(0) % PARTS * ROWS


@triton.jit
def shares_of_join(slot, count, SHARES: tl.constexpr):
    # Where programs of a block join `count` slices of a window: the first of them, and which shares of it the
    # program has that made the one at `slot`, from which on and in which steps. The interpreter runs programs
    # one after the other: there the last has all.
    nth = slot & (count - 1)
    begin, step = nth, count
    if _INTERPRETING:
        begin, step = tl.where(nth == count - 1, 0, SHARES), 1
    return slot - nth, begin, step


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


@triton.jit
def add_slices(
    out_ptr, partial_ptr, row_index_ptr, window, begin, end, first, group, num_rows,
    OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Adds the slots [begin, end) of a window, in order: ROWS rows from `first` on, and a group of heads.
    nth, inner, head = rows_by_heads(first, group, SLOTS, ROWS, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask_dim = (offs_dim < DIM)[None, :]
    acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        slot = start + nth
        live = (slot < end) & (head < HEADS)
        offs = (slot.to(tl.int64) * HEIGHT + inner) * WIDTH + head * DIM
        at = partial_ptr + offs[:, None] + offs_dim[None, :]
        acc += tl.load(at, mask=live[:, None] & mask_dim, other=0.0)
    acc = over_slots(acc, SLOTS)
    _, inner, head = rows_by_heads(first, group, 1, ROWS, BLOCK_HEADS)
    rows = rows_at(row_index_ptr, window * HEIGHT + inner)
    at = out_ptr + (rows.to(tl.int64) * OUT_STRIDE + head * DIM)[:, None] + offs_dim[None, :]
    live = (rows < num_rows) & (head < HEADS)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & mask_dim)
