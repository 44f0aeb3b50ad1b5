"""Window kernel of sparse attention, forward: 16 rows at a time, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    as_scores,
    columns_last,
    first_part,
    flat,
    flat_tile,
    gather,
    group_tile,
    held,
    in_place,
    inverse,
    kept,
    key_of,
    load_bits,
    load_columns,
    load_numbers,
    load_own,
    of_columns,
    of_copy,
    of_nodes,
    rate_of,
    resident,
    shift_of,
    signed,
    store_softmax,
    tame,
    window_step,
)
from graphfuse.kernels.tiles import dot, finite, load_task, rows_at


@triton.jit
def one_row(
    q_ptr, k_ptr, v_ptr, key_scale_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, num_rows,
    row, bit, head, with_loop, offs_dim, mask_dim, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, RATE: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the window kernel does, slowly, for one row and head, which sees nothing of other rows' neighbours.
    at = q_ptr + tl.cast(row, tl.int64) * Q_STRIDE + offs_dim
    q = signed(tl.load(at, mask=mask_dim & (row < num_rows), other=0.0), SCALE).to(ACC)
    top = tl.full((1,), float("-inf"), dtype=ACC)
    total = tl.zeros((1,), dtype=ACC)
    acc = tl.zeros(offs_dim.shape, dtype=ACC)
    if LOOPS:
        mask_loop = mask_dim & with_loop & (row < num_rows)
        own_k = tl.load(k_ptr + tl.cast(row, tl.int64) * K_STRIDE + offs_dim, mask=mask_loop, other=0.0)
        acc = tl.load(v_ptr + tl.cast(row, tl.int64) * V_STRIDE + offs_dim, mask=mask_loop, other=0.0).to(ACC)
        own_score = tl.sum(q * own_k.to(ACC), 0)
        if key_scale_ptr is not None:
            own_scale = key_scale_ptr + tl.cast(row, tl.int64) * HEADS + head
            own_score *= tl.load(own_scale, mask=(row < num_rows) & (head < HEADS), other=0.0)
        top = tl.where(with_loop, own_score, top)
        total = tl.where(with_loop, 1.0 + top * 0, total)  # NaN if the score is no number
        if DROPOUT > 0:
            node = tl.zeros((1,), dtype=tl.int32) + row
            own_key = key_of(seed_ptr, node, head, False)
            acc *= kept(own_key, key_of(seed_ptr, node, 0, True), DROPOUT, 1.0)
    for start in tl.range(begin, end, STEP):
        offs = start + tl.arange(0, STEP)
        bits = tl.load(row_mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
        live = ((bits >> bit) & 1) != 0
        column = tl.load(column_ptr + offs, mask=live, other=0)
        if LOOPS:
            live = live & (column != row)
        mask = live[:, None] & mask_dim[None, :]
        offs_row = column[:, None].to(tl.int64)
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        s = tl.sum(q[None, :] * k, 1)
        if key_scale_ptr is not None:
            offs_scale = column.to(tl.int64) * HEADS + head
            s *= tl.load(key_scale_ptr + offs_scale, mask=live & (head < HEADS), other=0.0)
        s = tl.where(live, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shift = shift_of(higher) * RATE
        p = tl.exp2(s * RATE - shift)
        rescale = tl.exp2(top * RATE - shift)
        total = total * rescale + tl.sum(p, 0)
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live, other=0)
            own = key_of(seed_ptr, tl.zeros_like(column) + row, head, False)
            p *= kept(own, of_copy(key_of(seed_ptr, column, 0, True), copy), DROPOUT, 1.0)
        acc = acc * rescale + tl.sum(p[:, None] * v, 0)
        top = higher
    return top, total, acc


@triton.jit
def attend(
    row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr, window, begin,
    end, head, heads, q, own_key, top, total, acc, FIXED: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Goes on with the softmax (top, total) and the sums acc over the entries [begin, end) of a window. FIXED:
    # `top`, or 0 where there is none yet, stays what is subtracted from scores. Whether that was good enough
    # is for `held` to say, from `total` and from `seen`, the rows of all entries.
    RATE: tl.constexpr = rate_of(SCALE)
    shift = shift_of(top) * RATE
    seen = tl.zeros((COLUMNS,), dtype=tl.int32)
    if FIXED:
        sums = tl.zeros((GROUP * 16, 16), dtype=ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    if key_scale_ptr is not None:  # loaded a step ahead, for columns that were loaded two steps ahead
        scale = of_nodes(key_scale_ptr, load_columns(column_ptr, begin, end, COLUMNS), heads, HEADS, GROUP)
        ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        if FIXED:
            seen |= bits.to(tl.int32)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        bits = next_bits
        k = gather(k_ptr, column, head, K_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM)
        if key_scale_ptr is not None:
            v = k
        else:
            v = gather(v_ptr, column, head, V_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM)
        s = dot(q, columns_last(k, GROUP), outside, ACC)
        if key_scale_ptr is not None:
            s *= as_scores(scale, GROUP, ACC)
            scale = of_nodes(key_scale_ptr, ahead, heads, HEADS, GROUP)
            ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
        if FIXED:
            # what is summed is what values are multiplied with, rounded: the weights of a row add up to 1
            p = tl.exp2(s * RATE - tl.expand_dims(shift, -1)).to(v.dtype)
            ones = tl.full((COLUMNS, 16), 1.0, dtype=tl.float32).to(v.dtype)
            sums = dot(flat(p, GROUP), ones, sums, ACC)
        else:
            higher = tl.maximum(top, tl.max(s, -1))
            shift = shift_of(higher) * RATE
            p = tl.exp2(s * RATE - tl.expand_dims(shift, -1))
            rescale = tl.exp2(top * RATE - shift)
            total = total * rescale + tl.sum(p, -1)
        if DROPOUT > 0:
            node = of_columns(column, GROUP)
            other_key = of_copy(key_of(seed_ptr, node, 0, True), of_columns(copy, GROUP))
            p *= kept(own_key, in_place(other_key), DROPOUT, 1.0)
        if FIXED:
            acc = dot(flat(p.to(v.dtype), GROUP), v, acc, ACC)
        else:
            acc = dot(flat(p.to(v.dtype), GROUP), v, acc * flat(rescale, GROUP)[:, None], ACC)
            top = higher
    if FIXED:
        total += tl.max(sums, 1).reshape(total.shape)  # 16 times the same number
        top = tl.where(total == 0, float("-inf"), shift_of(top))  # NaN is not 0
    return top, total, acc, seen


# GROUP heads of 16 rows, tensor cores: a gathered row of k or v is read for all heads of the group at once,
# and scores are a product batched over heads.
#   grid      (num_tasks * groups,): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of k and v stay in L2
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM]; tasks, row_index, column, row_mask; ptr
#             with LOOPS, copies and seed with DROPOUT. With key_scale ACC [num_cols, HEADS] the rows of k are
#             the values and, multiplied with it, the keys: one row is gathered, not two
#   writes    out [num_rows, HEADS, DIM]; softmax ACC [num_rows, HEADS, 2]: maximum and sum, (0, 0) where no
#             edge; slices of a cut window write both and acc to their slot
#   on chip   top, total ACC [GROUP, 16]: running maximum (of q k, before scale) and sum; acc ACC, flat
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows"])
def attention_window_kernel(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
    copy_ptr, q_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr, num_tasks, num_rows,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, PROBE: tl.constexpr,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    offs_dim, mask_dim, live = heads * DIM + dim, (dim < DIM) & (heads < HEADS), rows < num_rows
    q = tl.load(q_ptr + rows.to(tl.int64) * Q_STRIDE + offs_dim, mask=live & mask_dim, other=0.0)
    q = resident(signed(q, SCALE), GROUP, WARPS, ACC)
    ROWS: tl.constexpr = (GROUP, 16) if GROUP > 1 else (16,)
    top = tl.full(ROWS, float("-inf"), dtype=ACC)
    total = tl.zeros(ROWS, dtype=ACC)
    acc = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    own_key = None
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows, heads, False)
    with_loop = False
    if LOOPS:  # the loop is the first edge of the first slice
        with_loop = begin == tl.load(ptr_ptr + window)
    # The maximum of the first entries serves the others, if they are tame. Should it turn out to have been
    # too small or too large, all is done once more, with a running maximum to the end. (What a loop leaves
    # behind has to exist before it, for Triton.)
    middle = first_part(begin, end, PROBE)
    todo = 1
    while todo > 0:
        todo = 0
        top = tl.full(ROWS, float("-inf"), dtype=ACC)
        total = tl.zeros(ROWS, dtype=ACC)
        acc = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
        if LOOPS:
            at = k_ptr + rows.to(tl.int64) * K_STRIDE + offs_dim
            own_k = tl.load(at, mask=live & mask_dim & with_loop, other=0.0)
            own_score = tl.sum(q.to(ACC) * own_k.to(ACC), -1, keep_dims=True)
            if key_scale_ptr is not None:
                own_score *= load_numbers(key_scale_ptr, rows, heads, live & (heads < HEADS), HEADS)
            top = tl.where(with_loop, own_score.reshape(ROWS), top)
            total = tl.where(with_loop, 1.0 + top * 0, total)  # NaN if the score is no number
            own_v = load_own(
                v_ptr, row_index_ptr, window, head, num_rows, with_loop, V_STRIDE, HEADS, DIM, GROUP,
                BLOCK_DIM,
            )  # fmt: skip
            acc = own_v.to(ACC)
            if DROPOUT > 0:
                acc *= flat(kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0), GROUP)
        top, total, acc, _ = attend(
            row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr, window,
            begin, middle, head, heads, q, own_key, top, total, acc, False, K_STRIDE, V_STRIDE, HEADS, DIM,
            GROUP, BLOCK_DIM, COLUMNS, STAGES, SCALE, DROPOUT, LOOPS, ACC,
        )  # fmt: skip
        if PROBE > 0:
            if middle < end:
                done = tame(top, RATE)
                if done > 0:
                    top, total, acc, seen = attend(
                        row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr,
                        seed_ptr, window, middle, end, head, heads, q, own_key, top, total, acc, True,
                        K_STRIDE, V_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, COLUMNS, STAGES, SCALE, DROPOUT,
                        LOOPS, ACC,
                    )  # fmt: skip
                    done = held(total, seen, GROUP)
                todo = 1 - done
                middle = end
    top, total = flat(top, GROUP), flat(total, GROUP)
    rows, inner, heads, offs_dim, own = flat_tile(row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    # -inf + NaN and 0 * NaN are NaN: a NaN or Inf in one node would reach all 16 rows of its window
    if not finite(acc):
        for place in tl.range(0, GROUP * 16):
            here = (heads - head) * 16 + inner == place
            features = tl.arange(0, GROUP * BLOCK_DIM)
            mask_one = (features // BLOCK_DIM == place // 16) & (features % BLOCK_DIM < DIM)
            if HEADS % GROUP != 0:
                mask_one = mask_one & (head + place // 16 < HEADS)
            top_one, total_one, acc_one = one_row(
                q_ptr, k_ptr, v_ptr, key_scale_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end,
                num_rows, rows_at(row_index_ptr, window * 16 + place % 16), place % 16, head + place // 16,
                with_loop, offs_dim, mask_one, Q_STRIDE, K_STRIDE, V_STRIDE, HEADS,
                512 // (GROUP * BLOCK_DIM), RATE, SCALE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
            top, total = tl.where(here, top_one, top), tl.where(here, total_one, total)
            acc = tl.where(here[:, None], acc_one[None, :], acc)
    top *= RATE / LOG2_E
    if partial_ptr is not None:
        if slot >= 0:
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS
            tl.store(slots_ptr + (offs_slot + heads) * 2, top, mask=heads < HEADS)
            tl.store(slots_ptr + (offs_slot + heads) * 2 + 1, total, mask=heads < HEADS)
            tl.store(partial_ptr + (offs_slot * DIM)[:, None] + offs_dim[None, :], acc, mask=own)
            return
    out = acc * (inverse(total) / (1.0 - DROPOUT))[:, None]
    offs = rows.to(tl.int64) * HEADS
    store_softmax(softmax_ptr, offs + heads, (rows < num_rows) & (heads < HEADS), top, total)
    at = out_ptr + (offs * DIM)[:, None] + offs_dim[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=own & (rows < num_rows)[:, None])
