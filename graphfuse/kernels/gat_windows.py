r"""Window kernel of GAT's attention, forward: 16 rows at a time, on tensor cores.

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

from graphfuse.kernels.additive_tiles import exponent, shares
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    head_of_tile,
    held,
    load_columns,
    load_numbers,
    numbers_of_columns,
    shift_of,
    side_by_side,
    summable,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_results import each_its_own, store_softmaxes, store_sums
from graphfuse.kernels.gat_steps import attend
from graphfuse.kernels.tiles import (
    after_previous,
    as_scores,
    finite,
    load_task,
    nothing,
    rows_at,
    rows_of_product,
)


@triton.jit
def no_edges(WIDTH: tl.constexpr, ACC: tl.constexpr):
    # softmax and sums of a head that has seen none
    top, number = tl.full((16,), float("-inf"), dtype=ACC), tl.zeros((16,), dtype=ACC)
    row = tl.zeros((16, WIDTH), dtype=ACC)
    return top, number, number, row, row


@triton.jit
def of_loop(
    a_src_ptr, x_ptr, row_index_ptr, seed_ptr, window, head, place, own, num_loops, first,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    # Of one head, where the softmax and its sums begin: at the loops of the rows, in the first slice.
    top, total, high, acc, tilt = no_edges(PAIR * BLOCK_DIM, ACC)
    if LOOPS:
        rows, offs_dim, mask = head_of_tile(row_index_ptr, window, head, place, HEADS, DIM, PAIR, BLOCK_DIM)
        with_loop = first & (rows < num_loops)
        mask_number = with_loop & (head + place < HEADS)
        u = own.reshape(16) + load_numbers(a_src_ptr, rows, head + place, mask_number, HEADS).to(ACC)
        top = tl.where(with_loop, exponent(u, SLOPE), float("-inf"))
        total = tl.where(with_loop, 1.0 + u * 0, 0.0)  # NaN if the score is no number
        high = tl.where(with_loop & (u > 0), 1.0, 0.0)
        at = x_ptr + rows.to(tl.int64)[:, None] * X_STRIDE + offs_dim[None, :]
        acc = tl.load(at, mask=with_loop[:, None] & mask[None, :], other=0.0).to(ACC)
        if DROPOUT > 0:
            own_key = key_of(seed_ptr, rows, head + place, False)
            acc *= kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0)[:, None]
        tilt = tl.where(high[:, None] > 0, acc, 0.0)
    return top, total, high, acc, tilt


@triton.jit
def sums_of_entries(
    a_src_ptr, x_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, window,
    num_loops, first, head, place, own, top, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # acc and tilt of one head, entry by entry, so that each row sees its own neighbours alone. own and top
    # [16] are the receivers' numbers and the maxima, which are known by now.
    rows, offs_dim, mask = head_of_tile(row_index_ptr, window, head, place, HEADS, DIM, PAIR, BLOCK_DIM)
    inner, mask_head = tl.arange(0, 16), head + place < HEADS
    acc = tl.zeros((16, PAIR * BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((16, PAIR * BLOCK_DIM), dtype=ACC)
    own_key = None
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows, head + place, False)
    if LOOPS:
        with_loop = first & (rows < num_loops)
        u = own + load_numbers(a_src_ptr, rows, head + place, with_loop & mask_head, HEADS).to(ACC)
        p = tl.where(with_loop, tl.exp2(exponent(u, SLOPE) - shift_of(top)), 0.0)
        if DROPOUT > 0:
            p *= kept(own_key, key_of(seed_ptr, rows, 0, True), DROPOUT, 1.0)
        at = x_ptr + rows.to(tl.int64)[:, None] * X_STRIDE + offs_dim[None, :]
        acc = p[:, None] * tl.load(at, mask=with_loop[:, None] & mask[None, :], other=0.0).to(ACC)
        tilt = tl.where((u > 0)[:, None], acc, 0.0)
    for entry in tl.range(begin, end):
        column = tl.load(column_ptr + entry)
        bits = tl.load(row_mask_ptr + entry).to(tl.int32)
        live = ((bits >> inner) & 1) != 0
        if LOOPS:
            live = live & (column != rows)
        u = own + load_numbers(a_src_ptr, column, head + place, mask_head, HEADS).to(ACC)
        p = tl.exp2(exponent(u, SLOPE) - shift_of(top))
        if DROPOUT > 0:
            copy = tl.zeros_like(rows)
            if copy_ptr is not None:
                copy += tl.load(copy_ptr + entry)
            other_key = key_of(seed_ptr, column + tl.zeros_like(rows), 0, True)
            p *= kept(own_key, of_copy(other_key, copy), DROPOUT, 1.0)
        x = tl.load(x_ptr + column.to(tl.int64) * X_STRIDE + offs_dim, mask=mask, other=0.0).to(ACC)
        term = p[:, None] * x[None, :]
        acc += tl.where(live[:, None] & mask[None, :], term, 0.0)
        tilt += tl.where((live & (u > 0))[:, None] & mask[None, :], term, 0.0)
    return acc, tilt


@triton.jit
def from_guess(state, guess, own, SLOPE: tl.constexpr, SPLIT: tl.constexpr):
    # The state of a softmax, which may hold a loop, as if it had begun with `guess` as the maximum; SPLIT as
    # `attend` has it, over the factors of receivers with the numbers `own`.
    top, total, high, acc, tilt = state
    if SPLIT:
        total, acc = total - high, acc - tilt
        factor = tl.exp2(top - tl.where(high > 0, own * LOG2_E, own * (LOG2_E * SLOPE)))
    else:
        factor = tl.exp2(top - guess)  # 0 without a loop
    return guess, total * factor, high * factor, acc * factor[:, None], tilt * factor[:, None]


@triton.jit
def walk(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr,
    column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows, num_loops,
    head, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    GUESS: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What `gat_window_kernel` does, of the heads from `head` on. With GUESS it returns whether the guess was
    # good enough and all sums are numbers; if not, nothing is stored.
    TILTED: tl.constexpr = tilt_ptr is not None
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)[:, None])
    first = False
    if LOOPS:  # the loop is the first edge of the first slice
        first = begin == tl.load(ptr_ptr + window)
    own, own_key, states = nothing(), nothing(), nothing()
    for g in tl.static_range(GROUP):
        mask = (rows < num_rows) & (head + g < HEADS)
        its_own = load_numbers(a_dst_ptr, rows, head + g, mask, HEADS).to(ACC)
        # 16 times the same number: so it stands where tensor cores leave rows, and weights are made there
        its_own = tl.max(as_scores(tl.broadcast_to(its_own, (16, 16)), 1, ACC), 1)
        own += (its_own[:, None],)
        if DROPOUT > 0:
            places = rows_at(row_index_ptr, window * 16 + rows_of_product(ACC)[:, None])
            own_key += (key_of(seed_ptr, places, head + g, False),)
        states += (
            of_loop(
                a_src_ptr, x_ptr, row_index_ptr, seed_ptr, window, head, g, own[g], num_loops, first,
                X_STRIDE, HEADS, DIM, PAIR, BLOCK_DIM, SLOPE, DROPOUT, LOOPS, ACC,
            ),
        )  # fmt: skip
    means = nothing()
    if GUESS:
        first_columns = load_columns(column_ptr, begin, end, COLUMNS)
        others = numbers_of_columns(a_src_ptr, first_columns, head, HEADS, GROUP)
        guessed = nothing()
        for g in tl.static_range(GROUP):
            means += (tl.sum(others[g].to(ACC)) / COLUMNS,)
            its_own = own[g].reshape(16) + means[g]
            guess = exponent(its_own, SLOPE)
            guessed += (from_guess(states[g], guess, its_own, SLOPE, TILTED),)
        states = guessed
    states, seen = attend(
        column_ptr, row_mask_ptr, copy_ptr, row_index_ptr, a_src_ptr, x_ptr, seed_ptr, window, begin, end,
        head, own, own_key, means, states, GUESS, TILTED, X_STRIDE, HEADS, DIM, GROUP, PAIR, BLOCK_DIM,
        COLUMNS, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
    )  # fmt: skip
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows of its window
    accs, tilts, norms, bents, straights = nothing(), nothing(), nothing(), nothing(), nothing()
    for g in tl.static_range(GROUP):
        norm, bent, straight = shares(states[g][1], states[g][2])
        accs += (states[g][3],)
        tilts += (states[g][4],)
        norms += (norm,)
        bents += (bent,)
        straights += (straight,)
    WIDTH: tl.constexpr = PAIR * BLOCK_DIM
    numbers = each_its_own(accs, 0, PAIR, WIDTH)
    for pair in tl.static_range(1, GROUP // PAIR):
        numbers += each_its_own(accs, pair * PAIR, PAIR, WIDTH) * 0
    whole = finite(numbers)
    if GUESS:
        good = summable(states[0][1], seen)
        for g in tl.static_range(1, GROUP):
            good &= summable(states[g][1], seen)
        whole = whole & held(good)
    if not GUESS or whole:
        store_softmaxes(
            softmax_ptr, slots_ptr, row_index_ptr, window, slot, num_rows, head, states, HEADS, GROUP, TILTED
        )
    if whole:
        for first_head in tl.static_range(0, GROUP, PAIR):
            out_rows, offs_out, mask_out = side_by_side(
                row_index_ptr, window, head + first_head, HEADS, DIM, PAIR, BLOCK_DIM
            )
            store_sums(
                out_ptr, tilt_ptr, sum_ptr, partial_ptr, bias_ptr, slot, num_rows, out_rows, offs_out,
                mask_out, each_its_own(norms, first_head, PAIR, WIDTH),
                each_its_own(bents, first_head, PAIR, WIDTH),
                each_its_own(straights, first_head, PAIR, WIDTH),
                each_its_own(accs, first_head, PAIR, WIDTH), each_its_own(tilts, first_head, PAIR, WIDTH),
                HEADS, DIM, DROPOUT,
            )  # fmt: skip
    elif not GUESS:
        for place in tl.range(0, GROUP):
            its_own = own[0].reshape(16)
            its_top, its_total, its_high, _, _ = states[0]
            for g in tl.static_range(1, GROUP):
                its_own = tl.where(place == g, own[g].reshape(16), its_own)
                its_top = tl.where(place == g, states[g][0], its_top)
                its_total = tl.where(place == g, states[g][1], its_total)
                its_high = tl.where(place == g, states[g][2], its_high)
            norm, bent, straight = shares(its_total, its_high)
            acc, tilt = sums_of_entries(
                a_src_ptr, x_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end,
                window, num_loops, first, head, place, its_own, its_top, X_STRIDE, HEADS, DIM, PAIR,
                BLOCK_DIM, SLOPE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
            out_rows, offs_out, mask_out = head_of_tile(
                row_index_ptr, window, head, place, HEADS, DIM, PAIR, BLOCK_DIM
            )
            store_sums(
                out_ptr, tilt_ptr, sum_ptr, partial_ptr, bias_ptr, slot, num_rows, out_rows, offs_out,
                mask_out, norm[:, None], bent[:, None], straight[:, None], acc, tilt, HEADS, DIM, DROPOUT,
            )  # fmt: skip
    return whole


@triton.jit(noinline=True)
def walk_again(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr,
    column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows, num_loops,
    head, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # One head, as `walk` without a guess. A function of its own, or the compiler would crowd the registers of
    # each walk with a guess for the sake of one that hardly ever follows; and a narrow one, as a kernel has
    # the registers that the most demanding of its functions has, called or not. It is called with scalars
    # alone, so it begins from the task.
    walk(
        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr,
        column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows,
        num_loops, head, X_STRIDE, HEADS, DIM, 1, 1, BLOCK_DIM, 16, 1, False, SLOPE, DROPOUT, LOOPS, ACC,
    )  # fmt: skip


# GROUP heads of 16 rows, tensor cores; what a step has to know of the graph serves them all.
#   grid      (num_tasks, groups): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of x stay in L2
#   reads     a_src [num_cols, HEADS], a_dst [num_rows, HEADS], x [num_cols, HEADS, DIM], whose rows are
#             gathered for PAIR heads at a time; tasks, row_index, column, row_mask; ptr with LOOPS, copies
#             and seed with DROPOUT
#   writes    out and, if wanted, tilt and sum, out + bias [HEADS, DIM], [num_rows, HEADS, DIM]; for
#             backward softmax ACC [num_rows, HEADS, 2]: maximum and sum, (0, 0) where no edge; slices of a
#             cut window write theirs to their slot
#   on chip   of each head top, total, high ACC [16]: maximum and sums of all weights and of those of u > 0;
#             acc and tilt ACC [16, PAIR * BLOCK_DIM]: the weighted sums of x likewise, of which a head keeps
#             its own features. With GUESS the score that the mean of the first sources would make serves as
#             the maximum
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_window_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr,
    column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows, num_loops,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, GUESS: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    head = tl.program_id(1) * GROUP
    done = walk(
        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, row_index_ptr,
        column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows,
        num_loops, head, X_STRIDE, HEADS, DIM, GROUP, PAIR, BLOCK_DIM, COLUMNS, STAGES, GUESS, SLOPE, DROPOUT,
        LOOPS, ACC,
    )  # fmt: skip
    if GUESS:
        if not done:
            for g in tl.static_range(GROUP):
                if HEADS % GROUP == 0 or head + g < HEADS:
                    walk_again(
                        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr,
                        row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr,
                        seed_ptr, bias_ptr, num_rows, num_loops, head + g, X_STRIDE, HEADS, DIM, BLOCK_DIM,
                        SLOPE, DROPOUT, LOOPS, ACC,
                    )  # fmt: skip
