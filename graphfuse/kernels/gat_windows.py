r"""Window kernels of GAT's attention, forward and backward: 16 rows at a time, on tensor cores.

A score is a number of the source plus one of the receiver, :math:`s_{ij} = \ell(u_{ij})`,
:math:`u_{ij} = a_j + d_i` with the LeakyReLU :math:`\ell` of slope :math:`\sigma`, so forward gathers one row
of x per column, and so does backward, which walks the transpose alone. The gradient of :math:`d` needs no
gather: with the weights :math:`p`, the factor :math:`m` of dropout and the gradient :math:`g` of the output,

.. math::
    dd_i = \sum_j p_{ij} (m_{ij} g_i^\top x_j - g_i^\top o_i)\, \ell'(u_{ij}) = (1 - \sigma)\, g_i^\top t_i,
    \qquad t_i = \sum_{j: u_{ij} > 0} p_{ij} (m_{ij} x_j - o_i),

as the sum with a constant in place of :math:`\ell'` is 0. Forward sums the tilt :math:`t` beside the output.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import finish, leaky_slope, load_stats
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
    kept,
    key_of,
    load_bits,
    load_columns,
    load_numbers,
    load_own,
    of_columns,
    of_copy,
    of_nodes,
    resident,
    shift_of,
    slope,
    tame,
    window_step,
)
from graphfuse.kernels.tiles import dot, finite, load_task


@triton.jit
def exponent(u, SLOPE: tl.constexpr):
    # the LeakyReLU of u, as an exponent of 2
    return u * tl.where(u > 0, LOG2_E, LOG2_E * SLOPE)


@triton.jit
def sums_of_entries(
    a_src_ptr, x_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, window,
    num_loops, first, head, own, top, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # acc and tilt of the window kernel, entry by entry, so that each row sees its own neighbours alone. own
    # and top [GROUP * 16] are the receivers' numbers and the maxima, which are known by now.
    rows, inner, heads, offs_dim, mask = flat_tile(row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    acc = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    if LOOPS:
        own_x = load_own(
            x_ptr, row_index_ptr, window, head, num_loops, first, X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM
        )
        u = own + load_numbers(a_src_ptr, rows, heads, (rows < num_loops) & (heads < HEADS), HEADS).to(ACC)
        p = tl.where(first & (rows < num_loops), tl.exp2(exponent(u, SLOPE) - shift_of(top)), 0.0)
        if DROPOUT > 0:
            own_key = key_of(seed_ptr, rows, heads, False)
            p *= kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0)
        acc = p[:, None] * own_x.to(ACC)
        tilt = tl.where((u > 0)[:, None], acc, 0.0)
    for entry in tl.range(begin, end):
        column = tl.load(column_ptr + entry)
        bits = tl.load(row_mask_ptr + entry).to(tl.int32)
        live = ((bits >> inner) & 1) != 0
        if LOOPS:
            live = live & (column != rows)
        u = own + load_numbers(a_src_ptr, column, heads, heads < HEADS, HEADS).to(ACC)
        p = tl.exp2(exponent(u, SLOPE) - shift_of(top))
        if DROPOUT > 0:
            copy = tl.zeros_like(rows)
            if copy_ptr is not None:
                copy += tl.load(copy_ptr + entry)
            own_key = key_of(seed_ptr, rows, heads, False)
            other_key = key_of(seed_ptr, column + tl.zeros_like(rows), 0, True)
            p *= kept(own_key, of_copy(other_key, copy), DROPOUT, 1.0)
        at = x_ptr + column.to(tl.int64) * X_STRIDE + offs_dim[None, :]
        term = p[:, None] * tl.load(at, mask=mask, other=0.0).to(ACC)
        acc += tl.where(live[:, None] & mask, term, 0.0)
        tilt += tl.where((live & (u > 0))[:, None] & mask, term, 0.0)
    return acc, tilt


@triton.jit
def factors(u, shift, SLOPE: tl.constexpr):
    # As exp(leaky(a + d)) = max(exp(a) exp(d), exp(slope a) exp(slope d)) for a slope in [0, 1], these two
    # numbers of each node make its weights: no score needs an exponential of its own.
    return tl.exp2(u * LOG2_E - shift), tl.exp2(u * (LOG2_E * SLOPE) - shift)


@triton.jit
def attend(
    column_ptr, row_mask_ptr, copy_ptr, row_index_ptr, a_src_ptr, x_ptr, seed_ptr, window, begin, end, head,
    heads, own, own_key, top, total, high, acc, tilt, FIXED: tl.constexpr, TILTED: tl.constexpr,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Goes on with the softmax (top, total, high) and the sums acc and tilt over the entries [begin, end) of a
    # window. FIXED: `top`, or 0 where there is none yet, stays what is subtracted from scores. Whether that
    # was good enough is for `held` to say, from `total` and from `seen`, the rows of all entries.
    tl.static_assert(not FIXED or DROPOUT == 0, "weights are dropped from running sums alone")
    seen = tl.zeros((COLUMNS,), dtype=tl.int32)
    if FIXED:
        up, down = factors(own, tl.expand_dims(shift_of(top), -1), SLOPE)
        sums = tl.zeros((GROUP * 16, 16), dtype=ACC)
        high_sums = tl.zeros((GROUP * 16, 16), dtype=ACC)
        ones = tl.full((COLUMNS, 16), 1.0, dtype=tl.float32).to(x_ptr.dtype.element_ty)
        # 0, which the compiler must not know: it would choose between pairs of halves, by taking them apart
        zero = tl.where(begin < 0, 1.0, 0.0).to(ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    other = of_nodes(a_src_ptr, load_columns(column_ptr, begin, end, COLUMNS), heads, HEADS, GROUP)
    ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        if FIXED:
            seen |= bits.to(tl.int32)
        next_other = of_nodes(a_src_ptr, ahead, heads, HEADS, GROUP)
        ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        x = gather(x_ptr, column, head, X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM)
        if FIXED:
            other_u = other.to(ACC)
            other_up, other_down = factors(other_u, 0.0, SLOPE)
            if GROUP > 1:  # for Triton to keep the mask where scores are
                other_up = as_scores(other_up, GROUP, ACC)
                if TILTED:
                    other_u = as_scores(other_u, GROUP, ACC)
            larger = tl.maximum(up * other_up, down * other_down, propagate_nan=tl.PropagateNan.ALL)
            p = tl.where(outside == 0, larger, zero)
            if TILTED:
                bent = tl.where(other_u > -own, p, zero).to(x.dtype)
                high_sums = dot(flat(bent, GROUP), ones, high_sums, ACC)
            # what is summed is what rows are multiplied with, rounded: the weights of a row add up to 1
            p = p.to(x.dtype)
            sums = dot(flat(p, GROUP), ones, sums, ACC)
        else:
            u = own + as_scores(other, GROUP, ACC)
            s = tl.where(outside == 0, exponent(u, SLOPE), outside)
            higher = tl.maximum(top, tl.max(s, -1))
            shift = shift_of(higher)
            p = tl.exp2(s - tl.expand_dims(shift, -1))
            rescale = tl.exp2(top - shift)
            total = total * rescale + tl.sum(p, -1)
            if TILTED:
                high = high * rescale + tl.sum(tl.where(u > 0, p, 0.0), -1)
            if DROPOUT > 0:
                other_key = key_of(seed_ptr, of_columns(column, GROUP), 0, True)
                other_key = of_copy(other_key, of_columns(copy, GROUP))
                p *= kept(own_key, in_place(other_key), DROPOUT, 1.0)
            if TILTED:
                bent = tl.where(u > 0, p, 0.0).to(x.dtype)
            top, factor = higher, flat(rescale, GROUP)[:, None]
            acc, tilt = acc * factor, tilt * factor
        bits, other = next_bits, next_other
        acc = dot(flat(p.to(x.dtype), GROUP), x, acc, ACC)
        if TILTED:
            tilt = dot(flat(bent, GROUP), x, tilt, ACC)
    if FIXED:
        total += tl.max(sums, 1).reshape(total.shape)  # 16 times the same number
        high += tl.max(high_sums, 1).reshape(total.shape)
        top = tl.where(total == 0, float("-inf"), shift_of(top))  # NaN is not 0
    return top, total, high, acc, tilt, seen


@triton.jit
def in_range(own, top):
    # Whether the factors of receivers, of which the first is larger where it matters, are small enough that a
    # source's, where that is 0 for being too small for float32, would have made a weight that is nothing.
    return tl.min(tl.where(own * LOG2_E - shift_of(top) <= 60.0, 1, 0))  # NaN is not


# GROUP heads of 16 rows, tensor cores: a gathered row of x is read for all heads of the group at once.
#   grid      (num_tasks * groups,): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of x stay in L2
#   reads     a_src [num_cols, HEADS], a_dst [num_rows, HEADS], x [num_cols, HEADS, DIM]; tasks, row_index,
#             column, row_mask; ptr with LOOPS, copies and seed with DROPOUT
#   writes    out and tilt, if wanted, [num_rows, HEADS, DIM]; softmax ACC [num_rows, HEADS, 2]: maximum and
#             sum, (0, 0) where no edge; slices of a cut window write theirs to their slot
#   on chip   top, total, high ACC [GROUP, 16]: maximum and sums of all weights and of those of u > 0; acc and
#             tilt ACC, flat: the weighted sums of x likewise. With PROBE the maximum of so many entries
#             serves the others too, as in attention
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops"])
def gat_window_kernel(
    out_ptr, softmax_ptr, tilt_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr,
    row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, num_tasks, num_rows, num_loops,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PROBE: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, heads, _ = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    mask_head = heads < HEADS
    own = load_numbers(a_dst_ptr, rows, heads, (rows < num_rows) & mask_head, HEADS).to(ACC)
    ROWS: tl.constexpr = (GROUP, 16) if GROUP > 1 else (16,)
    top = tl.full(ROWS, float("-inf"), dtype=ACC)
    total = tl.zeros(ROWS, dtype=ACC)
    high = tl.zeros(ROWS, dtype=ACC)
    acc = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    own_key = None
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows, heads, False)
    first = False
    if LOOPS:  # the loop is the first edge of the first slice
        first = begin == tl.load(ptr_ptr + window)
    # Maximum, check and second attempt are those of `attention_window_kernel`.
    middle = first_part(begin, end, PROBE)
    todo = 1
    while todo > 0:
        todo = 0
        top = tl.full(ROWS, float("-inf"), dtype=ACC)
        total = tl.zeros(ROWS, dtype=ACC)
        high = tl.zeros(ROWS, dtype=ACC)
        acc = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
        tilt = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
        if LOOPS:
            with_loop = first & (rows < num_loops)
            loop_u = own + load_numbers(a_src_ptr, rows, heads, with_loop & mask_head, HEADS).to(ACC)
            top = tl.where(with_loop, exponent(loop_u, SLOPE), float("-inf")).reshape(ROWS)
            total = tl.where(with_loop, 1.0 + loop_u * 0, 0.0).reshape(ROWS)  # NaN if the score is no number
            high = tl.where(with_loop & (loop_u > 0), 1.0, 0.0).reshape(ROWS)
            own_x = load_own(
                x_ptr, row_index_ptr, window, head, num_loops, first, X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM
            )
            acc = own_x.to(ACC)
            if DROPOUT > 0:
                acc *= flat(kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0), GROUP)
            tilt = tl.where(flat(high, GROUP)[:, None] > 0, acc, 0.0)
        top, total, high, acc, tilt, seen = attend(
            column_ptr, row_mask_ptr, copy_ptr, row_index_ptr, a_src_ptr, x_ptr, seed_ptr, window, begin,
            middle, head, heads, own, own_key, top, total, high, acc, tilt, False, tilt_ptr is not None,
            X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, COLUMNS, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
        )  # fmt: skip
        if PROBE > 0:
            if middle < end:
                done = tame(top, 1.0) * in_range(own, tl.expand_dims(top, -1))
                if done > 0:
                    top, total, high, acc, tilt, seen = attend(
                        column_ptr, row_mask_ptr, copy_ptr, row_index_ptr, a_src_ptr, x_ptr, seed_ptr, window,
                        middle, end, head, heads, own, own_key, top, total, high, acc, tilt, True,
                        tilt_ptr is not None, X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, COLUMNS, STAGES, SLOPE,
                        DROPOUT, LOOPS, ACC,
                    )  # fmt: skip
                    done = held(total, seen, GROUP)
                todo = 1 - done
                middle = end
    top, total, high = flat(top, GROUP), flat(total, GROUP), flat(high, GROUP)
    own = own.reshape(GROUP * 16)
    rows, inner, heads, offs_dim, mask_own = flat_tile(
        row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM
    )
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows of its window
    if not finite(acc):
        acc, tilt = sums_of_entries(
            a_src_ptr, x_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, window,
            num_loops, first, head, own, top, X_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM, SLOPE, DROPOUT, LOOPS,
            ACC,
        )  # fmt: skip
    top /= LOG2_E
    if partial_ptr is not None:
        if slot >= 0:
            PARTS: tl.constexpr = 1 if tilt_ptr is None else 2
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS
            tl.store(slots_ptr + (offs_slot + heads) * 3, top, mask=heads < HEADS)
            tl.store(slots_ptr + (offs_slot + heads) * 3 + 1, total, mask=heads < HEADS)
            at = partial_ptr + (offs_slot * PARTS * DIM)[:, None] + offs_dim[None, :]
            tl.store(at, acc, mask=mask_own)
            if tilt_ptr is not None:
                tl.store(slots_ptr + (offs_slot + heads) * 3 + 2, high, mask=heads < HEADS)
                tl.store(at + HEADS * DIM, tilt, mask=mask_own)
            return
    mask_own = mask_own & (rows < num_rows)[:, None]
    offs = rows.to(tl.int64) * HEADS
    finish(
        out_ptr, softmax_ptr, tilt_ptr, offs + heads, (rows < num_rows) & (heads < HEADS),
        (offs * DIM)[:, None] + offs_dim[None, :], mask_own, top, total, high, acc, tilt, DROPOUT,
    )  # fmt: skip


@triton.jit
def loop_slopes(
    x, own, grad_at, stats_ptr, seed_ptr, rows, heads, mask, mask_head, HEADS: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Of the loops of a window, [16, 1] or [GROUP, 16, 1]: the derivatives in u, and their weights.
    grad = tl.load(grad_at, mask=mask, other=0.0).to(ACC)
    lse, _, delta, a_dst = load_stats(stats_ptr, rows.to(tl.int64) * HEADS + heads, mask_head)
    u = own + a_dst
    p = tl.where(mask_head, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
    dp, dropped = tl.sum(x.to(ACC) * grad, -1, keep_dims=True), p
    if DROPOUT > 0:
        own_key, other_key = key_of(seed_ptr, rows, heads, True), key_of(seed_ptr, rows, heads, False)
        factor = kept(own_key, other_key, DROPOUT, 1.0 / (1.0 - DROPOUT))
        dp, dropped = dp * factor, p * factor
    return slope(p, dp, delta, False) * leaky_slope(u, SLOPE), dropped


# GROUP heads of 16 rows, which are sources; the columns are receivers, of which one row of grad is gathered.
#   grid      (num_tasks * groups,), as the forward kernel
#   reads     a_src [num_rows, HEADS], x [num_rows, HEADS, DIM], grad [num_cols, HEADS, DIM]; stats ACC
#             [num_cols, HEADS, 4]; the graph as forward
#   writes    dx [num_rows, HEADS, DIM], d_a_src [num_rows, HEADS]; slices to their slot
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops"])
def gat_bwd_window_kernel(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_tasks, num_rows, num_loops,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, heads, dim = group_tile(row_index_ptr, window, head, GROUP, BLOCK_DIM)
    mask_head = heads < HEADS
    mask = (rows < num_rows) & (dim < DIM) & mask_head
    offs_row, offs_dim = rows.to(tl.int64), heads * DIM + dim
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim, mask=mask, other=0.0)
    own = load_numbers(a_src_ptr, rows, heads, (rows < num_rows) & mask_head, HEADS).to(ACC)
    ROWS: tl.constexpr = (GROUP, 16) if GROUP > 1 else (16,)
    d_own = tl.zeros(ROWS, dtype=ACC)
    dx = tl.zeros((GROUP * 16, GROUP * BLOCK_DIM), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows, heads, True)
    if LOOPS:
        first = begin == tl.load(ptr_ptr + window)
        with_loop = first & (rows < num_loops)
        loop_du, loop_p = loop_slopes(
            x, own, grad_ptr + offs_row * GRAD_STRIDE + offs_dim, stats_ptr, seed_ptr, rows, heads,
            mask & with_loop, mask_head & with_loop, HEADS, SLOPE, DROPOUT, ACC,
        )  # fmt: skip
        d_own = loop_du.reshape(ROWS)
        own_grad = load_own(
            grad_ptr, row_index_ptr, window, head, num_loops, first, GRAD_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM
        )
        dx = flat(loop_p, GROUP) * own_grad.to(ACC)
    x = resident(x, GROUP, WARPS, ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, GROUP, COLUMNS, ACC
        )
        bits = next_bits
        grad = gather(grad_ptr, column, head, GRAD_STRIDE, HEADS, DIM, GROUP, BLOCK_DIM)
        receiver = of_columns(column, GROUP).to(tl.int64) * HEADS + heads
        lse, _, delta, a_dst = load_stats(stats_ptr, receiver, mask_head)
        lse, delta = as_scores(lse, GROUP, ACC), as_scores(delta, GROUP, ACC)
        u = own + as_scores(a_dst, GROUP, ACC)
        p = tl.where(outside == 0, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
        dp = dot(x, columns_last(grad, GROUP), tl.zeros_like(outside), ACC)
        dropped = p
        if DROPOUT > 0:
            other_key = key_of(seed_ptr, of_columns(column, GROUP), heads, False)
            other_key = of_copy(other_key, of_columns(copy, GROUP))
            factor = kept(own_key, in_place(other_key), DROPOUT, 1.0 / (1.0 - DROPOUT))
            dp, dropped = dp * factor, p * factor
        du = slope(p, dp, delta, False) * leaky_slope(u, SLOPE)
        d_own += tl.sum(du, -1)
        dx = dot(flat(dropped.to(grad.dtype), GROUP), grad, dx, ACC)
    d_own = flat(d_own, GROUP)
    rows, inner, heads, offs_dim, mask_own = flat_tile(
        row_index_ptr, window, head, HEADS, DIM, GROUP, BLOCK_DIM
    )
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS * (DIM + 1)
            tl.store(partial_ptr + offs_slot[:, None] + offs_dim[None, :], dx, mask=mask_own)
            tl.store(partial_ptr + offs_slot + HEADS * DIM + heads, d_own, mask=heads < HEADS)
    if whole:
        mask_row = rows < num_rows
        at = dx_ptr + (rows.to(tl.int64) * HEADS * DIM)[:, None] + offs_dim[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask_own & mask_row[:, None])
        at = d_a_src_ptr + rows.to(tl.int64) * HEADS + heads
        tl.store(at, d_own.to(d_a_src_ptr.dtype.element_ty), mask=mask_row & (heads < HEADS))
