r"""Kernel of GAT's attention over the edges of windows, forward: a weight for each edge and head.

:mod:`graphfuse.kernels.gat_windows` makes 16 weights of each column entry and head, one for each row of its
window, of which all but the few that are edges are masked. Here an edge has one, :math:`w_e`, and what
tensor cores sum is :math:`w_e x_j`, by a tile of ones that tells the row of each edge. A column that several
rows of a window share is gathered for each of them. For the tilt see
:mod:`graphfuse.kernels.gat_windows`.

Products :math:`w_e x_j` are rounded, which where a row has but one edge would be all of its error: its weight
is 1, and its result :math:`x_j` to the bit, as the definition's is. Backward, where differences of such
results are summed, has nothing then that does not cancel.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, shares
from graphfuse.kernels.attention_tiles import LOG2_E, agreed, either, store_softmax
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.edge_tiles import (
    as_many_columns,
    edges_of_step,
    eight_columns,
    of_heads,
    ones_of_rows,
    spread,
    weighted,
)
from graphfuse.kernels.gat_results import store_sums
from graphfuse.kernels.gat_windows import walk_again
from graphfuse.kernels.tiles import after_previous, dot, finite, load_task, rows_at


@triton.jit
def _of_loops(
    guess, own, a_src_ptr, x_ptr, seed_ptr, rows, with_loop, heads, offs_dim, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Where the sums of 16 rows begin: at their loops, of those that have one here.
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    mask = with_loop[:, None]
    offs_row = rows.to(tl.int64)[:, None]
    u = own + tl.load(a_src_ptr + offs_row * HEADS + heads[None, :], mask=mask, other=0.0).to(ACC)
    total = tl.where(mask, tl.exp2(exponent(u, SLOPE) - guess), 0.0).to(HALF).to(ACC)
    high = tl.where(u > 0, total, 0.0)
    weight, bent = total, high
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows[:, None], heads[None, :], False)
        factor = kept(own_key, key_of(seed_ptr, rows[:, None], 0, True), DROPOUT, 1.0)
        weight, bent = weight * factor, bent * factor
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
    return total, high, spread(weight, DIM) * x, spread(bent, DIM) * x


@triton.jit
def _of_only_edges(
    guess, own, only_ptr, a_src_ptr, rows, num_rows, heads, HEADS: tl.constexpr, SLOPE: tl.constexpr
):  # fmt: skip
    # Maxima of 16 rows, of which that of a row of one edge is its score, and 0; NaN if that is no number.
    column = tl.load(only_ptr + rows, mask=rows < num_rows, other=-1)[:, None]
    mask = column >= 0
    at = a_src_ptr + column.to(tl.int64) * HEADS + heads[None, :]
    u = own + tl.load(at, mask=mask, other=0.0).to(own.dtype)
    return tl.where(mask, exponent(u, SLOPE), guess), tl.where(mask, u * 0, 0.0)


# GROUP heads of 16 rows, tensor cores, over the edges of a window.
#   grid      (num_tasks, groups): one program = one task (a window or a slice of one) and one group
#   reads     a_src [num_cols, HEADS], a_dst [num_rows, HEADS], x [num_cols, HEADS, DIM]; edge_tasks, packed,
#             edge_row, row_index; edge_ptr with LOOPS, and without what is the only column of a row;
#             edge_copy and seed with DROPOUT. The structure of the entries, from ptr to copy, is read where
#             the guess was not good enough
#   writes    as `gat_window_kernel`
#   on chip   total and high ACC [16, GROUP], sums of all weights and of those of u > 0; acc and tilt ACC
#             [16, GROUP * DIM]. The score that the mean of the first sources would make serves as the
#             maximum; weights, and their products with x, are rounded to the dtype of x
#   order     edges left to right within a task, no atomics: bitwise reproducible
#   requires  a power of two as GROUP, of which HEADS is a multiple, and as DIM; a slope in [0, 1]
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_edge_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, edge_ptr, edge_tasks_ptr, packed_ptr,
    edge_row_ptr, edge_copy_ptr, only_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
    copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows, num_loops, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    TILTED: tl.constexpr = tilt_ptr is not None
    window, begin, end, slot = load_task(edge_tasks_ptr, tl.program_id(0))
    head = tl.program_id(1) * GROUP
    heads, offs_dim = head + tl.arange(0, GROUP), head * DIM + tl.arange(0, GROUP * DIM)
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    mask_row = (rows < num_rows)[:, None]
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin, end, EDGES)
    other, own = of_heads(a_src_ptr, column, heads, HEADS), of_heads(a_dst_ptr, row, heads, HEADS)
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin + EDGES, end, EDGES)
    at_rows = rows.to(tl.int64)[:, None] * HEADS + heads[None, :]
    own_of_rows = tl.load(a_dst_ptr + at_rows, mask=mask_row, other=0.0).to(ACC)
    mean = tl.sum(other.to(ACC), 0)[None, :] / EDGES
    guess = exponent(own_of_rows + mean, SLOPE)
    if LOOPS:
        first = begin == tl.load(edge_ptr + window)
        total, high, acc, tilt = _of_loops(
            guess, own_of_rows, a_src_ptr, x_ptr, seed_ptr, rows, first & (rows < num_loops), heads, offs_dim,
            X_STRIDE, HEADS, DIM, SLOPE, DROPOUT, ACC,
        )  # fmt: skip
    else:
        guess, total = _of_only_edges(
            guess, own_of_rows, only_ptr, a_src_ptr, rows, num_rows, heads, HEADS, SLOPE
        )
        high = tl.zeros((16, GROUP), dtype=ACC)
        acc, tilt = tl.zeros((16, GROUP * DIM), dtype=ACC), tl.zeros((16, GROUP * DIM), dtype=ACC)
    total, high = eight_columns(total), eight_columns(high)
    seen = tl.zeros((EDGES,), dtype=tl.int32)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        its_column = packed >> 5
        x = tl.load(x_ptr + its_column.to(tl.int64)[:, None] * X_STRIDE + offs_dim[None, :])
        # a step ahead, in registers: Triton would pipeline them through shared memory, and make each weight
        # in all the threads that read it
        next_other = of_heads(a_src_ptr, column, heads, HEADS)
        next_own = of_heads(a_dst_ptr, row, heads, HEADS)
        column, row = edges_of_step(packed_ptr, edge_row_ptr, start + 2 * EDGES, end, EDGES)
        live = offs < end
        if LOOPS or DROPOUT > 0:
            its_row = tl.load(edge_row_ptr + at)
        if LOOPS:  # each node brings one of its own
            live = live & (its_column != its_row)
        place = tl.where(live, packed & 15, 16)
        seen |= tl.where(live, 1 << place, 0)
        d = own.to(ACC)
        u = d + other.to(ACC)
        p = tl.exp2(exponent(u, SLOPE) - exponent(d + mean, SLOPE)).to(HALF)
        if not LOOPS:  # with a loop of its own a row has more than one
            p = tl.where((packed & 16 != 0)[:, None], tl.full((1, 1), 1.0, ACC).to(HALF), p)
        ones = ones_of_rows(place, HALF)
        total = dot(ones, eight_columns(p), total, ACC)  # of what rows are multiplied with: it adds up to 1
        weight = p
        if TILTED:
            bent = tl.where(u > 0, p, 0.0)
            high = dot(ones, eight_columns(bent), high, ACC)
        if DROPOUT > 0:
            other_key = key_of(seed_ptr, its_column[:, None], 0, True)
            if edge_copy_ptr is not None:
                other_key = of_copy(other_key, tl.load(edge_copy_ptr + at)[:, None])
            own_key = key_of(seed_ptr, its_row[:, None], heads[None, :], False)
            factor = kept(own_key, other_key, DROPOUT, 1.0).to(HALF)
            weight *= factor
            if TILTED:
                bent *= factor
        acc = dot(ones, weighted(x, weight, DIM), acc, ACC)
        if TILTED:
            tilt = dot(ones, weighted(x, bent, DIM), tilt, ACC)
        other, own = next_other, next_own
    total, high = as_many_columns(total, GROUP), as_many_columns(high, GROUP)
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows of its window
    some = (tl.reduce(seen, 0, either) >> tl.arange(0, 16)) & 1
    good = ((total >= 2.0**-8) & (total <= 2.0**30)) | ((total == 0) & (some == 0)[:, None])
    if agreed(finite(acc) & (tl.min(good.to(tl.int32)) > 0)):
        top = tl.where(total == 0, float("-inf"), guess) / LOG2_E
        whole = True
        if slots_ptr is not None:
            whole = slot < 0
            if slot >= 0:
                at_slot = slot.to(tl.int64) * 16 + tl.arange(0, 16)[:, None]
                at_slot = slots_ptr + (at_slot * HEADS + heads[None, :]) * 3
                tl.store(at_slot, top)
                tl.store(at_slot + 1, total)
                if TILTED:
                    tl.store(at_slot + 2, high)
        if whole:
            store_softmax(softmax_ptr, at_rows, mask_row, top, total)
        norm, bend, straight = shares(total, high)
        store_sums(
            out_ptr, tilt_ptr, sum_ptr, partial_ptr, bias_ptr, slot, num_rows, rows, offs_dim,
            offs_dim < HEADS * DIM, spread(norm, DIM), spread(bend, DIM), spread(straight, DIM), acc, tilt,
            HEADS, DIM, DROPOUT,
        )  # fmt: skip
    else:
        for g in tl.static_range(GROUP):
            walk_again(
                out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr,
                row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr,
                bias_ptr, num_rows, num_loops, head + g, X_STRIDE, HEADS, DIM, DIM, SLOPE, DROPOUT, LOOPS,
                ACC,
            )  # fmt: skip
