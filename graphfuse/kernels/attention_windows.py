"""Window kernels of sparse attention, forward and backward: 16 rows at a time, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    group_tile,
    inverse,
    kept,
    kept_tile,
    load_bits,
    of_receivers,
    rate_of,
    shift_of,
    signed,
    slope,
    store_softmax,
    window_step,
)
from graphfuse.kernels.tiles import dot, load_task


@triton.jit
def one_row(
    q_ptr, k_ptr, v_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, num_rows, row, bit, head,
    offs_dim, mask_dim, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    STEP: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the window kernel does, slowly, for one row and head, which sees nothing of other rows' neighbours.
    mask_row = mask_dim & (row < num_rows)
    q = tl.load(q_ptr + tl.cast(row, tl.int64) * Q_STRIDE + offs_dim, mask=mask_row, other=0.0)
    q = signed(q, SCALE).to(ACC)
    top = tl.full((1,), float("-inf"), dtype=ACC)
    total = tl.zeros((1,), dtype=ACC)
    acc = tl.zeros(offs_dim.shape, dtype=ACC)
    for start in tl.range(begin, end, STEP):
        offs = start + tl.arange(0, STEP)
        bits = tl.load(row_mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
        live = ((bits >> bit) & 1) != 0
        column = tl.load(column_ptr + offs, mask=live, other=0)
        mask = live[:, None] & mask_dim[None, :]
        offs_row = column[:, None].to(tl.int64)
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        s = tl.where(live, tl.sum(q[None, :] * k, 1), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shift = shift_of(higher) * RATE
        p = tl.exp2(s * RATE - shift)
        rescale = tl.exp2(top * RATE - shift)
        total = total * rescale + tl.sum(p, 0)
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live, other=0)
            p = tl.where(kept(seed_ptr, tl.zeros_like(column) + row, column, copy, head, DROPOUT), p, 0.0)
        acc = acc * rescale + tl.sum(p[:, None] * v, 0)
        top = higher
    return top, total, acc


# GROUP heads of 16 rows, tensor cores. The heads of a group stand below each other in one tile, q padded with
# zeros to the width of the group, so that a gathered row of k or v is read whole however narrow its heads
# are; of the tile's sums each head takes its own columns.
#   grid      (num_tasks * groups,): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of k and v stay in L2
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM]; tasks, column, row_mask
#   writes    out [num_rows, HEADS, DIM]; softmax ACC [num_rows, HEADS, 2]: maximum and sum, (0, 0) where no
#             edge; slices of a cut window write both and acc to their slot
#   on chip   top, total ACC [GROUP * 16]: running maximum (of q k, before scale) and sum; acc ACC
#             [GROUP * 16, BLOCK_DIM]
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows"])
def attention_window_kernel(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, tasks_ptr, column_ptr, row_mask_ptr, copy_ptr,
    q_ptr, k_ptr, v_ptr, seed_ptr, num_tasks, num_rows,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, inner, heads, mask_dim, own = group_tile(window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    offs_dim = head * DIM + tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & own
    q = tl.load(q_ptr + rows[:, None].to(tl.int64) * Q_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    q = signed(q, SCALE)
    top = tl.full((GROUP * 16,), float("-inf"), dtype=ACC)
    total = tl.zeros((GROUP * 16,), dtype=ACC)
    acc = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(column_ptr, copy_ptr, start, end, bits, inner, COLUMNS, ACC)
        bits = next_bits
        offs_row = column[:, None].to(tl.int64)
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_dim[None, :], mask=mask_dim[None, :], other=0.0)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_dim[None, :], mask=mask_dim[None, :], other=0.0)
        s = dot(q, tl.trans(k), outside, ACC)
        higher = tl.maximum(top, tl.max(s, 1))
        shift = shift_of(higher) * RATE
        p = tl.exp2(s * RATE - shift[:, None])
        rescale = tl.exp2(top * RATE - shift)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT > 0:
            keep = kept_tile(seed_ptr, window, column, copy, head, False, GROUP, COLUMNS, DROPOUT)
            p = tl.where(keep, p, 0.0)
        acc = dot(p.to(v.dtype), v, acc * rescale[:, None], ACC)
        top = higher
    # -inf + NaN and 0 * NaN are NaN: a NaN or Inf in one node would reach all 16 rows of its window
    if tl.max(((acc * 0) != 0).to(tl.int32)) > 0:
        for place in tl.range(0, GROUP * 16):
            top_one, total_one, acc_one = one_row(
                q_ptr, k_ptr, v_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, num_rows,
                window * 16 + place % 16, place % 16, head + place // 16, offs_dim,
                mask_dim & (tl.arange(0, BLOCK_DIM) // DIM == place // 16), Q_STRIDE, K_STRIDE, V_STRIDE,
                512 // BLOCK_DIM, RATE, SCALE, DROPOUT, ACC,
            )  # fmt: skip
            here = tl.arange(0, GROUP * 16) == place
            top, total = tl.where(here, top_one, top), tl.where(here, total_one, total)
            acc = tl.where(here[:, None], acc_one[None, :], acc)
    top *= RATE / LOG2_E
    if partial_ptr is not None:
        if slot >= 0:
            offs = (slot.to(tl.int64) * 16 + inner) * HEADS + heads
            tl.store(slots_ptr + offs * 2, top, mask=heads < HEADS)
            tl.store(slots_ptr + offs * 2 + 1, total, mask=heads < HEADS)
            offs_row = (slot.to(tl.int64) * 16 + inner) * HEADS * DIM
            tl.store(partial_ptr + offs_row[:, None] + offs_dim[None, :], acc, mask=own)
            return
    out = acc * (inverse(total) / (1.0 - DROPOUT))[:, None]
    offs = rows.to(tl.int64) * HEADS
    store_softmax(softmax_ptr, offs + heads, (rows < num_rows) & (heads < HEADS), top, total)
    offs_out = (offs * DIM)[:, None] + offs_dim[None, :]
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask)


# GROUP heads of 16 rows, tensor cores, below each other in one tile as in the forward kernel. The rows are
# receivers: (own, own_value) is (q, grad), and (other, other_value) is (k, v); dq comes out. TRANSPOSED: they
# are sources, the pairs are swapped, and dk and dv come out.
#   grid      (num_tasks * groups,), as the forward kernel
#   reads     own and other [.., HEADS, DIM]; stats ACC [num_receivers, HEADS, 2]
#   writes    first (dq or dk) and, if TRANSPOSED, second (dv) [num_rows, HEADS, DIM]; slices to their slot
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows"])
def attention_bwd_window_kernel(
    first_ptr, second_ptr, partial_ptr, tasks_ptr, column_ptr, row_mask_ptr, copy_ptr,
    own_ptr, own_value_ptr, other_ptr, other_value_ptr, stats_ptr, seed_ptr, num_tasks, num_rows,
    OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr,
    OTHER_VALUE_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, inner, heads, mask_dim, mask_own = group_tile(window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    offs_dim = head * DIM + tl.arange(0, BLOCK_DIM)
    live_row = (rows < num_rows) & (heads < HEADS)
    mask = (rows < num_rows)[:, None] & mask_own
    offs_row = rows[:, None].to(tl.int64)
    own = tl.load(own_ptr + offs_row * OWN_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    own = signed(own, SCALE)
    own_value = tl.load(own_value_ptr + offs_row * OWN_VALUE_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    if not TRANSPOSED:
        stats = stats_ptr + (rows.to(tl.int64) * HEADS + heads)[:, None] * 2
        lse = tl.load(stats, mask=live_row[:, None], other=0.0)
        delta = tl.load(stats + 1, mask=live_row[:, None], other=0.0)
    first = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    second = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(column_ptr, copy_ptr, start, end, bits, inner, COLUMNS, ACC)
        bits = next_bits
        offs_other = column[:, None].to(tl.int64)
        offs = offs_other * OTHER_STRIDE + offs_dim[None, :]
        other = tl.load(other_ptr + offs, mask=mask_dim[None, :], other=0.0)
        offs = offs_other * OTHER_VALUE_STRIDE + offs_dim[None, :]
        other_value = tl.load(other_value_ptr + offs, mask=mask_dim[None, :], other=0.0)
        if TRANSPOSED:
            lse, delta = of_receivers(stats_ptr, column, head, HEADS, GROUP, COLUMNS)
        s = dot(own, tl.trans(other), outside, ACC)
        p = tl.exp2(s * RATE - lse)
        dropped = p
        if DROPOUT == 0:
            # of a row with one edge this is 0 but for the rounding of sums, which half precision will not see
            dp = dot(own_value, tl.trans(other_value), tl.broadcast_to(-delta, outside.shape), ACC)
            ds = p * dp
        else:
            dp = dot(own_value, tl.trans(other_value), tl.zeros_like(outside), ACC)
            keep = kept_tile(seed_ptr, window, column, copy, head, TRANSPOSED, GROUP, COLUMNS, DROPOUT)
            dp = tl.where(keep, dp / (1.0 - DROPOUT), 0.0)
            dropped = tl.where(keep, p / (1.0 - DROPOUT), 0.0)
            ds = slope(p, dp, delta, False)
        first = dot(ds.to(other.dtype), other, first, ACC)
        if TRANSPOSED:
            second = dot(dropped.to(other_value.dtype), other_value, second, ACC)
    first *= SCALE
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            PARTS: tl.constexpr = 2 if TRANSPOSED else 1
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS * PARTS * DIM
            offs_slot = offs_slot[:, None] + offs_dim[None, :]
            tl.store(partial_ptr + offs_slot, first, mask=mask_own)
            if TRANSPOSED:
                tl.store(partial_ptr + offs_slot + HEADS * DIM, second, mask=mask_own)
    if whole:
        offs_out = offs_row * HEADS * DIM + offs_dim[None, :]
        tl.store(first_ptr + offs_out, first.to(first_ptr.dtype.element_ty), mask=mask)
        if TRANSPOSED:
            tl.store(second_ptr + offs_out, second.to(second_ptr.dtype.element_ty), mask=mask)
