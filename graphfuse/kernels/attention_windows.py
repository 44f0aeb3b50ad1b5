"""Window kernel of sparse attention, forward: 16 rows at a time, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    columns_last,
    flat,
    gather,
    group_tile,
    held,
    in_place,
    inverse,
    load_columns,
    load_numbers,
    load_own,
    numbers_of_group,
    of_columns,
    own_of_flat,
    rate_of,
    resident,
    rows_of_scores,
    shift_of,
    side_by_side,
    signed,
    small_scores,
    store_softmax,
    summable,
    window_step,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.norm_tiles import after_residual, store_sum
from graphfuse.kernels.tiles import (
    ONCE,
    after_previous,
    as_scores,
    dot,
    finite,
    load_bits,
    load_task,
    rows_at,
)

# The maximum of no scores. It is finite, so that exp2(-inf - LEAST) is 0 and exp2(LEAST - LEAST) 1.
LEAST = tl.constexpr(-3e38)


@triton.jit
def none_at_all(top):
    # maxima as all others know them: -inf where there was no score
    return tl.where(top == LEAST, float("-inf"), top)


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
def no_edges(GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, ACC: tl.constexpr):
    # Softmax and sums of heads that have seen none: maxima [16], of several heads [GROUP, 16], as exponents
    # of 2, and flat sums.
    HEADS: tl.constexpr = (GROUP, 16) if GROUP > 1 else (16,)
    top = tl.full(HEADS, LEAST, dtype=ACC)
    total = tl.zeros((GROUP * 16,), dtype=ACC)
    return top, total, tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)


@triton.jit
def of_loops(
    k_ptr, v_ptr, key_scale_ptr, row_index_ptr, seed_ptr, window, head, q, num_rows, with_loop,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Where softmax and sums begin: at the loops of the rows, in the first slice.
    top, total, acc = no_edges(GROUP, BLOCK_DIM, ACC)
    if LOOPS:
        rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
        mask = with_loop & (rows < num_rows) & (heads < HEADS)
        at = k_ptr + rows.to(tl.int64) * K_STRIDE + (heads * DIM + dim)
        k = tl.load(at, mask=mask & (dim < DIM), other=0.0)
        score = tl.sum(q.to(ACC) * k.to(ACC), len(k.shape) - 1, keep_dims=True)
        if key_scale_ptr is not None:
            score *= load_numbers(key_scale_ptr, rows, heads, mask, HEADS)
        top = tl.where(with_loop, score.reshape(top.shape) * rate_of(SCALE), top)
        total = tl.where(with_loop, 1.0 + flat(top, GROUP) * 0, total)  # NaN if the score is no number
        acc = load_own(
            v_ptr, row_index_ptr, window, head, num_rows, with_loop, V_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM
        ).to(ACC)
        if DROPOUT > 0:
            own_key = key_of(seed_ptr, rows, heads, False)
            keeps = kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0)
            acc *= flat(keeps.reshape(top.shape), GROUP)[:, None]
    return top, total, acc


@triton.jit
def attend(
    row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr, window, begin,
    end, head, q, own_key, state, FIXED: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Goes on with softmax and sums, (top, total, acc), over the entries [begin, end) of a window. FIXED:
    # `top`, or 0 where there is none yet, stays what is subtracted from scores. Whether that was good enough
    # is for `held` to say, from `total` and from `seen`, the rows of all entries.
    RATE: tl.constexpr = rate_of(SCALE)
    WHOLE: tl.constexpr = HEADS % GROUP == 0
    seen = tl.zeros((COLUMNS,), dtype=tl.int32)
    ones = tl.full((COLUMNS, 8), 1.0, dtype=tl.float32).to(v_ptr.dtype.element_ty)
    top, total, acc = state
    total = tl.broadcast_to(total[:, None], (GROUP * 16, 8))  # a product with ones adds to it
    AXIS: tl.constexpr = len(top.shape)
    shift = shift_of(none_at_all(top))
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    if key_scale_ptr is not None:  # loaded a step ahead, for columns that were loaded two steps ahead
        first_columns = load_columns(column_ptr, begin, end, COLUMNS)
        scale = numbers_of_group(key_scale_ptr, first_columns, head, HEADS, GROUP)
        ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        if FIXED:
            seen |= bits.to(tl.int32)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        bits = next_bits
        k = gather(k_ptr, column, head, K_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, WHOLE)
        v = k
        if key_scale_ptr is None:
            v = gather(v_ptr, column, head, V_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, WHOLE)
        s = dot(q, columns_last(k, GROUP), outside, ACC)
        rate = RATE
        if key_scale_ptr is not None:
            # A maximum over columns wants the factor where scores stand; else Triton brings it there.
            if FIXED:
                rate *= scale
            else:
                s *= as_scores(scale, GROUP, ACC)
        if not FIXED:
            shift = tl.maximum(top, tl.max(s, AXIS) * RATE)
            rescale = flat(tl.exp2(top - shift), GROUP)[:, None]
            top, total, acc = shift, total * rescale, acc * rescale
        p = tl.exp2(s * rate - tl.expand_dims(shift, AXIS))
        weight = flat(p.to(v.dtype), GROUP)  # what is summed is what values are multiplied with
        total = dot(weight, ones, total, ACC)
        if DROPOUT > 0:
            other_key = of_copy(key_of(seed_ptr, of_columns(column, GROUP), 0, True), of_columns(copy, GROUP))
            p *= kept(own_key, in_place(other_key), DROPOUT, 1.0)
            weight = flat(p.to(v.dtype), GROUP)
        acc = dot(weight, v, acc, ACC)
        if key_scale_ptr is not None:
            scale = numbers_of_group(key_scale_ptr, ahead, head, HEADS, GROUP)
            ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
    total = tl.max(total, 1)
    if FIXED:
        top = tl.where(total.reshape(top.shape) == 0, LEAST, shift)  # NaN is not 0
    return (top, total, acc), seen


@triton.jit
def store_row(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, residual, row, inner, slot, num_rows, head, offs_dim, own,
    top, total, acc, R_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What `store_group` does, for one row [1] and head.
    top *= 1 / LOG2_E
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS
            tl.store(slots_ptr + (offs_slot + head) * 2, top, mask=head < HEADS)
            tl.store(slots_ptr + (offs_slot + head) * 2 + 1, total, mask=head < HEADS)
            tl.store(partial_ptr + offs_slot * DIM + offs_dim, acc, mask=own)
    if whole:
        out, offs = acc * (inverse(total) / (1.0 - DROPOUT)), row.to(tl.int64) * HEADS
        store_softmax(softmax_ptr, offs + head, (row < num_rows) & (head < HEADS), top, total)
        mask = (own & (row < num_rows))[None, :]
        out = after_residual(out[None, :], row, offs_dim, mask, residual, R_STRIDE, DIM, EPS, ACC)
        place = offs_dim[None, :]
        offs_row, sum_ptr = row.to(tl.int64)[:, None], residual[6]
        store_sum(sum_ptr, residual[0], out, offs_row, place, mask, R_STRIDE, HEADS * DIM)
        tl.store(
            out_ptr + offs * DIM + place, out.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE
        )


@triton.jit
def store_group(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, residual, row_index_ptr, window, slot, num_rows, head, top,
    total, acc, R_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EPS: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Rows of a group of heads, or of a slice their places in its slot. acc is [16, GROUP * BLOCK_DIM].
    rows, offs_dim, mask_dim = side_by_side(row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    place = tl.arange(0, GROUP * 16)
    heads, its_row = head + place // 16, rows_at(row_index_ptr, window * 16 + place % 16)
    top *= 1 / LOG2_E
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            at = slots_ptr + ((slot.to(tl.int64) * 16 + place % 16) * HEADS + heads) * 2
            tl.store(at, top, mask=heads < HEADS)
            tl.store(at + 1, total, mask=heads < HEADS)
            at_sum = partial_ptr + ((slot.to(tl.int64) * 16 + tl.arange(0, 16)) * (HEADS * DIM))[:, None]
            tl.store(at_sum + offs_dim[None, :], acc, mask=mask_dim[None, :])
    if whole:
        mask = (its_row < num_rows) & (heads < HEADS)
        store_softmax(softmax_ptr, its_row.to(tl.int64) * HEADS + heads, mask, top, total)
        norm = (inverse(total) / (1.0 - DROPOUT))[:, None]
        out = acc * own_of_flat(tl.broadcast_to(norm, (GROUP * 16, GROUP * BLOCK_DIM)), GROUP)
        at_out = out_ptr + (rows.to(tl.int64) * (HEADS * DIM))[:, None] + offs_dim[None, :]
        mask_out = (rows < num_rows)[:, None] & mask_dim[None, :]
        out = after_residual(out, rows, offs_dim, mask_out, residual, R_STRIDE, DIM, EPS, ACC)
        store_sum(
            residual[6], residual[0], out, rows.to(tl.int64)[:, None], offs_dim[None, :], mask_out, R_STRIDE,
            HEADS * DIM,
        )  # fmt: skip
        tl.store(at_out, out.to(out_ptr.dtype.element_ty), mask=mask_out, eviction_policy=ONCE)


# GROUP heads of 16 rows, tensor cores; what a step has to know of the graph serves them all.
#   grid      (num_tasks, groups): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of k and v stay in L2
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM], of whose rows a group is one piece;
#             tasks, row_index, column, row_mask; ptr with LOOPS, copies and seed with DROPOUT. With key_scale
#             ACC [num_cols, HEADS] the rows of k are the values and, multiplied with it, the keys: one row is
#             gathered, not two. With a norm the norm of x [num_rows, DIM] and the result, of one head, takes
#             the place of that: offset, weight, bias, mean and var, see `after_residual`
#   writes    out [num_rows, HEADS, DIM]; sum, likewise, if it is there: out + x [num_rows, HEADS, DIM]; for
#             backward softmax ACC [num_rows, HEADS, 2]: maximum and sum,
#             (0, 0) where no edge; slices of a cut window write both and acc to their slot
#   on chip   top, total ACC [GROUP * 16]: running maximum (an exponent of 2) and sum; q [GROUP, 16,
#             BLOCK_DIM]; acc ACC, flat: [GROUP * 16, GROUP * BLOCK_DIM], of which a head's own features are
#             all that is computed
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows"])
def attention_window_kernel(
    out_ptr, sum_ptr, softmax_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr,
    row_mask_ptr, copy_ptr, q_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr, x_ptr, offset_ptr, weight_ptr,
    bias_ptr, mean_ptr, var_ptr, num_rows, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, EPS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, GUESS: tl.constexpr,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(1) * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    with_loop = False
    if LOOPS:  # the loop is the first edge of the first slice
        with_loop = begin == tl.load(ptr_ptr + window)
    rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    mask = (rows < num_rows) & (heads < HEADS) & (dim < DIM)
    at = q_ptr + rows.to(tl.int64) * Q_STRIDE + (heads * DIM + dim)
    q = resident(signed(tl.load(at, mask=mask, other=0.0, eviction_policy=ONCE), SCALE), GROUP, WARPS, ACC)
    own_key = None
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows_of_scores(row_index_ptr, window, GROUP, ACC), heads, False)
    state = no_edges(GROUP, BLOCK_DIM, ACC)  # what a loop leaves behind has to exist before it, for Triton
    # Where scores look small no maximum is subtracted. Should that turn out to have been wrong, all is done
    # once more, with a running maximum: that is for the entries up to `middle`, all or none. (Of two walks
    # one after the other, or told apart by a flag, the compiler crowds the first for the second's sake.)
    middle = end
    if GUESS:
        middle = tl.where(small_scores(q, SCALE, DIM), begin, end)
    todo = 1
    while todo > 0:
        todo = 0
        state = of_loops(
            k_ptr, v_ptr, key_scale_ptr, row_index_ptr, seed_ptr, window, head, q, num_rows, with_loop,
            K_STRIDE, V_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, SCALE, DROPOUT, LOOPS, ACC,
        )  # fmt: skip
        if not GUESS or middle > begin:
            state, _ = attend(
                row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr,
                window, begin, middle, head, q, own_key, state, False, K_STRIDE, V_STRIDE, HEADS, DIM, GROUP,
                BLOCK_DIM, COLUMNS, STAGES, SCALE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
        if GUESS:
            if middle < end:
                state, seen = attend(
                    row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, k_ptr, v_ptr, key_scale_ptr, seed_ptr,
                    window, begin, end, head, q, own_key, state, True, K_STRIDE, V_STRIDE, HEADS, DIM, GROUP,
                    BLOCK_DIM, COLUMNS, STAGES, SCALE, DROPOUT, LOOPS, ACC,
                )  # fmt: skip
                todo = tl.where(held(summable(state[1], seen)), 0, 1)
                middle = end
    top, total, acc = state
    top = flat(none_at_all(top), GROUP)
    acc = own_of_flat(acc, GROUP)
    # -inf + NaN and 0 * NaN are NaN: a NaN or Inf in one node would reach all 16 rows of its window
    residual = (x_ptr, offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, sum_ptr)
    if finite(acc):
        store_group(
            out_ptr, softmax_ptr, partial_ptr, slots_ptr, residual, row_index_ptr, window, slot, num_rows,
            head, top, total, acc, R_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, EPS, DROPOUT, ACC,
        )  # fmt: skip
    else:
        for place in tl.range(0, GROUP * 16):
            its_head, its_place = head + place // 16, tl.zeros((1,), dtype=tl.int32) + place % 16
            its_row = rows_at(row_index_ptr, window * 16 + place % 16)
            offs_dim, own = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_DIM) < DIM
            offs_dim, own = its_head * DIM + offs_dim, own & (its_head < HEADS)
            its_top, its_total, its_acc = one_row(
                q_ptr, k_ptr, v_ptr, key_scale_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end,
                num_rows, its_row, place % 16, its_head, with_loop, offs_dim, own, Q_STRIDE, K_STRIDE,
                V_STRIDE, HEADS, 512 // BLOCK_DIM, RATE, SCALE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
            store_row(
                out_ptr, softmax_ptr, partial_ptr, slots_ptr, residual, tl.zeros_like(its_place) + its_row,
                its_place, slot, num_rows, its_head, offs_dim, own, its_top * RATE, its_total, its_acc,
                R_STRIDE, HEADS, DIM, EPS, DROPOUT, ACC,
            )  # fmt: skip
