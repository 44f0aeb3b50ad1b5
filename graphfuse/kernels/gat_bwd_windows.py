"""Window kernel of GAT's attention, backward: 16 sources at a time, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, exponent_rate, leaky_slope, load_stats
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    columns_last,
    either,
    flat,
    gather,
    group_tile,
    load_numbers,
    load_own,
    of_columns,
    own_of_flat,
    resident,
    rows_of_scores,
    side_by_side,
    slope,
    window_step,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_bwd_split import split_walk
from graphfuse.kernels.gat_records import load_known
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.tiles import (
    ONCE,
    after_previous,
    as_scores,
    dot,
    load_bits,
    load_task,
    quads_apart,
    rows_at,
)


@triton.jit
def loop_slopes(
    x, own, grad_at, stats_ptr, seed_ptr, rows, heads, mask, mask_head, HEADS: tl.constexpr,
    RECORDS: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, NUMBER: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    # Of the loops of a window, [16, 1] or [GROUP, 16, 1]: the derivatives in u, and their weights.
    grad = tl.load(grad_at, mask=mask, other=0.0).to(ACC)
    place = rows.to(tl.int64) * HEADS + heads
    if RECORDS > 0:
        lse, delta, a_dst = load_known(stats_ptr, place, mask_head, HEADS, RECORDS, x.dtype, NUMBER, ACC)
    else:
        lse, _, delta, a_dst = load_stats(stats_ptr, place, mask_head)
    u = own + a_dst
    p = tl.where(mask_head, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
    dp, dropped = tl.sum(x.to(ACC) * grad, -1, keep_dims=True), p
    if DROPOUT > 0:
        own_key, other_key = key_of(seed_ptr, rows, heads, True), key_of(seed_ptr, rows, heads, False)
        factor = kept(own_key, other_key, DROPOUT, 1.0 / (1.0 - DROPOUT))
        dp, dropped = dp * factor, p * factor
    return slope(p, dp, delta, False) * leaky_slope(u, SLOPE), dropped


@triton.jit
def own_of_scores(own, GROUP: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr, ACC: tl.constexpr):
    # A number of each row, [.., 1], where tensor cores leave scores, so that weights are made there.
    WIDTH: tl.constexpr = 16 if WARPS == 1 else COLUMNS
    SHAPE: tl.constexpr = (GROUP, 16, WIDTH) if GROUP > 1 else (16, WIDTH)
    own = as_scores(tl.broadcast_to(own, SHAPE), GROUP, ACC)
    if WARPS == 1:  # else a maximum would be one over warps
        own = tl.max(own, len(SHAPE) - 1, keep_dims=True)
    return own


@triton.jit
def stats_of_columns(stats_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # What receivers in `column` are known by, of GROUP heads from `head` on: four tiles [.., 1, COLUMNS]. Of
    # each and head it is one piece of 16 bytes, the least that goes past L1 into shared memory. Heads
    # lie apart there: banks would conflict if a thread's columns were 32 bytes from each other.
    heads, mask = head + tl.arange(0, GROUP)[:, None, None], None
    if HEADS % GROUP != 0:
        mask = heads < HEADS
    place = column.to(tl.int64)[None, :, None] * HEADS + heads
    quads = tl.load(stats_ptr + place * 4 + tl.arange(0, 4), mask=mask)
    if GROUP > 1:
        quads = quads[:, None, :, :]
    return quads_apart(quads)


@triton.jit
def sums_in_place(x, APART: tl.constexpr):
    # Of scores the sums over every APART-th column, which are one thread's, [.., APART].
    if len(x.shape) == 3:
        x = tl.sum(x.reshape(x.shape[0], 16, x.shape[2] // APART, APART), 2)
    else:
        x = tl.sum(x.reshape(16, x.shape[1] // APART, APART), 1)
    return x


@triton.jit
def score_walk(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, RECORDS: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What `gat_bwd_window_kernel` does, of the heads from `head` on, score by score. RECORDS: of so
    # many heads of a receiver there is a record, those that `split_walk` reads; or 0.
    NUMBER: tl.constexpr = a_src_ptr.dtype.element_ty
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    mask_head = heads < HEADS
    mask = (rows < num_rows) & (dim < DIM) & mask_head
    offs_row, offs_dim = rows.to(tl.int64), heads * DIM + dim
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim, mask=mask, other=0.0, eviction_policy=ONCE)
    own = load_numbers(a_src_ptr, rows, heads, (rows < num_rows) & mask_head, HEADS).to(ACC)
    APART: tl.constexpr = 8 * WARPS
    ROWS: tl.constexpr = (GROUP, 16, APART) if GROUP > 1 else (16, APART)
    d_own = tl.zeros(ROWS, dtype=ACC)
    dx = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    if DROPOUT > 0:
        key_rows = rows if WARPS > 1 else rows_of_scores(row_index_ptr, window, GROUP, ACC)
        own_key = key_of(seed_ptr, key_rows, heads, True)
    if LOOPS:
        first = begin == tl.load(ptr_ptr + window)
        with_loop = first & (rows < num_loops)
        loop_du, loop_p = loop_slopes(
            x, own, grad_ptr + offs_row * GRAD_STRIDE + offs_dim, stats_ptr, seed_ptr, rows, heads,
            mask & with_loop, mask_head & with_loop, HEADS, RECORDS, SLOPE, DROPOUT, NUMBER, ACC,
        )  # fmt: skip
        d_own += loop_du * (LOG2_E / APART)
        own_grad = load_own(
            grad_ptr, row_index_ptr, window, head, num_loops, first, GRAD_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM
        )
        dx = flat(loop_p, GROUP) * own_grad.to(ACC)
    x, own = resident(x, GROUP, WARPS, ACC), own_of_scores(own, GROUP, COLUMNS, WARPS, ACC)
    bits, seen = load_bits(row_mask_ptr, begin, end, COLUMNS), tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        seen |= bits.to(tl.int32)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        bits = next_bits
        grad = gather(grad_ptr, column, head, GRAD_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, HEADS % GROUP == 0)
        if RECORDS > 0:
            place = (column.to(tl.int64) * HEADS + head)[None, :]
            lse, delta, a_dst = load_known(
                stats_ptr, place, place >= 0, HEADS, RECORDS, grad.dtype, NUMBER, ACC
            )
            if DROPOUT > 0:
                other_key = key_of(seed_ptr, column[None, :], head, False)
        else:
            lse, key, delta, a_dst = stats_of_columns(stats_ptr, column, head, HEADS, GROUP)
            other_key = key.to(tl.uint32, bitcast=True)
        u = own + a_dst
        rate = exponent_rate(u, SLOPE)
        p = tl.exp2(u * rate + (outside - lse * LOG2_E))
        dropped = p
        if DROPOUT == 0:
            # of a row with one edge this is 0 but for the rounding of sums, which half precision will not see
            ds = p * dot(x, columns_last(grad, GROUP), tl.broadcast_to(-delta, outside.shape), ACC)
        else:
            dp = dot(x, columns_last(grad, GROUP), tl.zeros_like(outside), ACC)
            if copy_ptr is not None:
                other_key = of_copy(other_key, of_columns(copy, GROUP))
            factor = kept(own_key, other_key, DROPOUT, 1.0 / (1.0 - DROPOUT))
            dp, dropped = dp * factor, p * factor
            ds = slope(p, dp, delta, False)
        d_own += sums_in_place(ds * rate, APART)
        dx = dot(flat(dropped.to(grad.dtype), GROUP), grad, dx, ACC)
    d_own, dx = flat(tl.sum(d_own, -1) * (1 / LOG2_E), GROUP), own_of_flat(dx, GROUP)
    out_rows, offs_out, mask_out = side_by_side(row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    place = tl.arange(0, GROUP * 16)
    its_head, its_row = head + place // 16, rows_at(row_index_ptr, window * 16 + place % 16)
    # an Inf in the x of a source without edges, times a weight of 0, would be no number
    some = ((tl.reduce(seen, 0, either) >> (place % 16)) & 1) != 0
    if LOOPS:
        some = some | (first & (its_row < num_loops))
    d_own = tl.where(some, d_own, 0.0)
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            WIDTH: tl.constexpr = slice_width(HEADS * DIM, HEADS)
            at = partial_ptr + ((slot.to(tl.int64) * 16 + tl.arange(0, 16)) * WIDTH)[:, None]
            tl.store(at + offs_out[None, :], dx, mask=mask_out[None, :])
            at_own = partial_ptr + (slot.to(tl.int64) * 16 + place % 16) * WIDTH + (HEADS * DIM + its_head)
            tl.store(at_own, d_own, mask=its_head < HEADS)
    if whole:
        at = dx_ptr + (out_rows.to(tl.int64) * (HEADS * DIM))[:, None] + offs_out[None, :]
        mask_rows = (out_rows < num_rows)[:, None] & mask_out[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask_rows, eviction_policy=ONCE)
        at_own = d_a_src_ptr + its_row.to(tl.int64) * HEADS + its_head
        mask_own = (its_row < num_rows) & (its_head < HEADS)
        tl.store(at_own, d_own.to(d_a_src_ptr.dtype.element_ty), mask=mask_own)


@triton.jit(noinline=True)
def walk_scores(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head, X_STRIDE: tl.constexpr,
    GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    RECORDS: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # One head, for windows that `split_walk` leaves: a narrow function of its own, as forward has one.
    WIDTH: tl.constexpr = 16 if BLOCK_DIM < 16 else BLOCK_DIM  # of products over features
    score_walk(
        dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
        copy_ptr, a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head, X_STRIDE,
        GRAD_STRIDE, HEADS, DIM, 1, WIDTH, 16, 1, 1, RECORDS, SLOPE, DROPOUT, LOOPS, ACC,
    )  # fmt: skip


# GROUP heads of 16 rows, which are sources; the columns are receivers, of which one row of grad is gathered.
#   grid      (num_tasks, groups), as the forward kernel
#   reads     a_src [num_rows, HEADS], x [num_rows, HEADS, DIM], grad [num_cols, HEADS, DIM]; stats ACC
#             [num_cols, HEADS, 4], of which SPLIT makes records; the graph as forward
#   writes    dx [num_rows, HEADS, DIM], d_a_src [num_rows, HEADS]; slices to their slot
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_bwd_window_kernel(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    head = tl.program_id(1) * GROUP
    if SPLIT:
        done = split_walk(
            dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
            copy_ptr, a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head, X_STRIDE,
            GRAD_STRIDE, HEADS, DIM, GROUP, PAIR, BLOCK_DIM, COLUMNS, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
        )  # fmt: skip
        if not done:
            for g in tl.static_range(GROUP):  # which divides HEADS, where there are records
                walk_scores(
                    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr,
                    row_mask_ptr, copy_ptr, a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows,
                    num_loops, head + g, X_STRIDE, GRAD_STRIDE, HEADS, DIM, BLOCK_DIM, GROUP, SLOPE, DROPOUT,
                    LOOPS, ACC,
                )  # fmt: skip
    else:
        score_walk(
            dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
            copy_ptr, a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head, X_STRIDE,
            GRAD_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, COLUMNS, STAGES, WARPS, 0, SLOPE, DROPOUT, LOOPS,
            ACC,
        )  # fmt: skip
