"""Joins the slices of cut windows and rows of additive attention."""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import finish
from graphfuse.kernels.attention_tiles import shift_of
from graphfuse.kernels.merge_tiles import highest_of_slots, merge_task, over_slots, rows_by_heads
from graphfuse.kernels.tiles import after_previous, rows_at


@triton.jit
def join_rows(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, row_index_ptr, bias_ptr, window, begin,
    end, first, group, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Joins the slots [begin, end) of a window, in order: ROWS rows from `first` on, and a group of heads.
    PARTS: tl.constexpr = 1 if tilt_ptr is None else 2
    nth, inner, head = rows_by_heads(first, group, SLOTS, ROWS, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    top = tl.full(head.shape, float("-inf"), dtype=ACC)
    total = tl.zeros(head.shape, dtype=ACC)
    high = tl.zeros(head.shape, dtype=ACC)
    acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        slot = start + nth
        live = (slot < end) & (head < HEADS)
        mask_own = live[:, None] & (offs_dim < DIM)[None, :]
        offs_slot = slot.to(tl.int64) * HEIGHT + inner
        offs = slots_ptr + (offs_slot * HEADS + head) * 3
        slice_top = tl.load(offs, mask=live, other=float("-inf"))
        higher = tl.maximum(top, slice_top)
        shift = shift_of(higher)
        rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift)
        total = total * rescale + tl.load(offs + 1, mask=live, other=0.0) * weight
        at = partial_ptr + (offs_slot * PARTS * HEADS * DIM + head * DIM)[:, None] + offs_dim[None, :]
        acc = acc * rescale[:, None] + tl.load(at, mask=mask_own, other=0.0) * weight[:, None]
        if tilt_ptr is not None:
            high = high * rescale + tl.load(offs + 2, mask=live, other=0.0) * weight
            more = tl.load(at + HEADS * DIM, mask=mask_own, other=0.0)
            tilt = tilt * rescale[:, None] + more * weight[:, None]
        top = higher
    if SLOTS > 1:
        top, factor = highest_of_slots(top, SLOTS)
        total, high = over_slots(total * factor, SLOTS), over_slots(high * factor, SLOTS)
        acc, tilt = over_slots(acc * factor[:, None], SLOTS), over_slots(tilt * factor[:, None], SLOTS)
        _, inner, head = rows_by_heads(first, group, 1, ROWS, BLOCK_HEADS)
    rows = rows_at(row_index_ptr, window * HEIGHT + inner)
    place, mask = rows.to(tl.int64) * HEADS + head, (rows < num_rows) & (head < HEADS)
    finish(
        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, bias_ptr, place, mask,
        (place * DIM)[:, None] + offs_dim[None, :], mask[:, None] & (offs_dim < DIM)[None, :],
        (head * DIM)[:, None] + offs_dim[None, :], top, total, high, acc, tilt, DROPOUT,
    )  # fmt: skip


# Joins the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEIGHT / ROWS, ceil(HEADS / BLOCK_HEADS))
#   reads     slots ACC [num_slots, HEIGHT, HEADS, 3]: maximum and sums; partial ACC [num_slots, HEIGHT, ..]:
#             HEADS * DIM sums of x, and then as many of the tilt if it is wanted; merges, and row_index of
#             windows
@triton.jit(do_not_specialize=["num_rows"])
def additive_merge_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, merges_ptr, row_index_ptr, bias_ptr,
    num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HEIGHT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, first = merge_task(merges_ptr, HEIGHT, ROWS)
    join_rows(
        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, row_index_ptr, bias_ptr, window,
        begin, end, first, tl.program_id(1), num_rows, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, HEIGHT, SLOTS,
        ROWS, STAGES, DROPOUT, ACC,
    )  # fmt: skip
