"""Window kernel of sparse attention, backward: 16 rows at a time, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import (
    columns_last,
    flat,
    gather,
    group_tile,
    in_place,
    load_columns,
    load_numbers,
    load_own,
    of_columns,
    of_nodes,
    of_receivers,
    own_of_flat,
    rate_of,
    resident,
    side_by_side,
    signed,
    slope,
    window_step,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.tiles import ONCE, after_previous, beside_previous, dot, load_bits, load_task


@triton.jit
def loop_slopes(
    own, own_value, other_at, other_value_at, own_scale, mask, with_loop, stats_at, mask_stats, seed_ptr,
    rows, heads, RATE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Of the loops of a window, [16, 1] or [GROUP, 16, 1]: the derivatives in their scores, and their weights.
    other = tl.load(other_at, mask=mask, other=0.0).to(ACC)
    lse = tl.load(stats_at, mask=mask_stats, other=0.0)
    minus_delta = tl.load(stats_at + 1, mask=mask_stats, other=0.0)
    s = tl.sum(own.to(ACC) * other, -1, keep_dims=True)
    if own_scale is not None:
        s *= own_scale
    p = tl.exp2(tl.where(with_loop, s, float("-inf")) * RATE - lse)
    other_value = tl.load(other_value_at, mask=mask, other=0.0).to(ACC)
    dp, dropped = tl.sum(own_value.to(ACC) * other_value, -1, keep_dims=True), p
    if DROPOUT > 0:
        own_key, other_key = key_of(seed_ptr, rows, heads, False), key_of(seed_ptr, rows, 0, True)
        factor = kept(own_key, other_key, DROPOUT, 1.0 / (1.0 - DROPOUT))
        dp, dropped = dp * factor, p * factor
    return slope(p, dp, -minus_delta, False), dropped


# GROUP heads of 16 rows, tensor cores, as in the forward kernel. The rows are receivers: (own, own_value) is
# (q, grad), and (other, other_value) is (k, v); dq comes out. TRANSPOSED: they are sources, the pairs are
# swapped, and dk and dv come out.
#   grid      (num_tasks, groups), as the forward kernel
#   reads     own and other [.., HEADS, DIM]; stats ACC [num_receivers, HEADS, 2]; the graph as forward
#   writes    first (dq or dk, of keys as they are multiplied) and, if TRANSPOSED, second (dv) [num_rows,
#             HEADS, DIM], strided rows; slices to their slot
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows"])
def attention_bwd_window_kernel(
    first_ptr, second_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    own_ptr, own_value_ptr, other_ptr, other_value_ptr, key_scale_ptr, stats_ptr, seed_ptr, num_rows,
    OUT_STRIDE: tl.constexpr, OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, OTHER_VALUE_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    beside_previous() if TRANSPOSED else after_previous()
    RATE: tl.constexpr = rate_of(SCALE)
    WHOLE: tl.constexpr = HEADS % GROUP == 0
    head = tl.program_id(1) * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    offs_dim, mask_dim, live = heads * DIM + dim, (dim < DIM) & (heads < HEADS), rows < num_rows
    mask = live & mask_dim
    offs_row = rows.to(tl.int64)
    own = signed(
        tl.load(own_ptr + offs_row * OWN_STRIDE + offs_dim, mask=mask, other=0.0, eviction_policy=ONCE), SCALE
    )
    own_value = tl.load(
        own_value_ptr + offs_row * OWN_VALUE_STRIDE + offs_dim, mask=mask, other=0.0, eviction_policy=ONCE
    )
    stats, mask_stats = stats_ptr + (offs_row * HEADS + heads) * 2, live & (heads < HEADS)
    if not TRANSPOSED:
        lse = tl.load(stats, mask=mask_stats, other=0.0)
        minus_delta = tl.load(stats + 1, mask=mask_stats, other=0.0)
    first = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    second = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    own_scale = None
    if key_scale_ptr is not None:
        # of a source: with TRANSPOSED the row is one, else it only brings its own loop's
        own_scale = load_numbers(key_scale_ptr, rows, heads, mask_stats & (TRANSPOSED or LOOPS > 0), HEADS)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows, heads, TRANSPOSED)
    if LOOPS:
        with_loop = begin == tl.load(ptr_ptr + window)
        ds_loop, p_loop = loop_slopes(
            own, own_value, other_ptr + offs_row * OTHER_STRIDE + offs_dim,
            other_value_ptr + offs_row * OTHER_VALUE_STRIDE + offs_dim, own_scale, mask, with_loop, stats,
            mask_stats, seed_ptr, rows, heads, RATE, DROPOUT, ACC,
        )  # fmt: skip
        if key_scale_ptr is not None and not TRANSPOSED:
            ds_loop *= own_scale
        own_other = load_own(
            other_ptr, row_index_ptr, window, head, num_rows, with_loop, OTHER_STRIDE, HEADS, DIM, GROUP,
            BLOCK_DIM,
        )  # fmt: skip
        first = flat(ds_loop, GROUP) * own_other.to(ACC)
        if TRANSPOSED:
            own_other = load_own(
                other_value_ptr, row_index_ptr, window, head, num_rows, with_loop, OTHER_VALUE_STRIDE, HEADS,
                DIM, GROUP, BLOCK_DIM,
            )  # fmt: skip
            second = flat(p_loop, GROUP) * own_other.to(ACC)
    own, own_value = resident(own, GROUP, WARPS, ACC), resident(own_value, GROUP, WARPS, ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    if key_scale_ptr is not None and not TRANSPOSED:
        scale = of_nodes(key_scale_ptr, load_columns(column_ptr, begin, end, COLUMNS), heads, HEADS, GROUP)
        ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        bits = next_bits
        other = gather(other_ptr, column, head, OTHER_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, WHOLE)
        if key_scale_ptr is not None and not TRANSPOSED:
            other_value = other
        else:
            other_value = gather(
                other_value_ptr, column, head, OTHER_VALUE_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, WHOLE
            )
        if TRANSPOSED:
            lse, minus_delta = of_receivers(stats_ptr, column, heads, HEADS, GROUP)
        s = dot(own, columns_last(other, GROUP), outside, ACC)
        if key_scale_ptr is not None:
            key_scale = own_scale if TRANSPOSED else in_place(scale)
            s *= key_scale
        p = tl.exp2(s * RATE - lse)
        dropped = p
        if DROPOUT == 0:
            # of a row with one edge this is 0 but for the rounding of sums, which half precision will not see
            start_at = tl.broadcast_to(minus_delta, outside.shape)
            ds = p * dot(own_value, columns_last(other_value, GROUP), start_at, ACC)
        else:
            dp = dot(own_value, columns_last(other_value, GROUP), tl.zeros_like(outside), ACC)
            other_key = key_of(seed_ptr, of_columns(column, GROUP), heads, not TRANSPOSED)
            other_key = of_copy(other_key, of_columns(copy, GROUP))
            factor = kept(own_key, in_place(other_key), DROPOUT, 1.0 / (1.0 - DROPOUT))
            dp, dropped = dp * factor, p * factor
            ds = slope(p, dp, -minus_delta, False)
        if key_scale_ptr is not None and not TRANSPOSED:
            ds *= key_scale
            scale = of_nodes(key_scale_ptr, ahead, heads, HEADS, GROUP)
            ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
        first = dot(flat(ds.to(other.dtype), GROUP), other, first, ACC)
        if TRANSPOSED:
            second = dot(flat(dropped.to(other_value.dtype), GROUP), other_value, second, ACC)
    first = own_of_flat(first * SCALE, GROUP)
    second = own_of_flat(second, GROUP)
    out_rows, offs_out, mask_out = side_by_side(row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            PARTS: tl.constexpr = 2 if TRANSPOSED else 1
            offs_slot = (slot.to(tl.int64) * 16 + tl.arange(0, 16)) * (HEADS * PARTS * DIM)
            at = partial_ptr + offs_slot[:, None] + offs_out[None, :]
            tl.store(at, first, mask=mask_out[None, :])
            if TRANSPOSED:
                tl.store(at + HEADS * DIM, second, mask=mask_out[None, :])
    if whole:
        mask_rows = (out_rows < num_rows)[:, None] & mask_out[None, :]
        at_out = (out_rows.to(tl.int64) * OUT_STRIDE)[:, None] + offs_out[None, :]
        tl.store(
            first_ptr + at_out, first.to(first_ptr.dtype.element_ty), mask=mask_rows, eviction_policy=ONCE
        )
        if TRANSPOSED:
            tl.store(
                second_ptr + at_out,
                second.to(second_ptr.dtype.element_ty),
                mask=mask_rows,
                eviction_policy=ONCE,
            )
    if TRANSPOSED:
        after_previous()
