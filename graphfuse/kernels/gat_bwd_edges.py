r"""Kernel of GAT's attention over the edges of windows, backward: a weight for each edge and head.

Rows are sources. With the weights :math:`p`, the factor :math:`m` of dropout, the gradients :math:`g` of the
receivers' outputs and :math:`\delta_i = g_i^\top o_i`, and the LeakyReLU of slope :math:`\sigma`,

.. math::
    dx_j = \sum_i p_{ij} m_{ij}\, g_i, \qquad
    b_j = \sum_{i: u_{ij} > 0} p_{ij} m_{ij}\, g_i, \qquad
    da_j = \sum_i p_{ij} \ell'(u_{ij}) (m_{ij}\, g_i^\top x_j - \delta_i)
         = x_j^\top (\sigma\, dx_j + (1 - \sigma)\, b_j) - \sum_i p_{ij} \ell'(u_{ij})\, \delta_i,

so that no product of two rows is made for an edge. Both sums are of the same rounded products :math:`p m g`,
with the weights that the last sum has: of a receiver of one edge, whose weight is 1, nothing is left.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, leaky_slope
from graphfuse.kernels.attention_tiles import LOG2_E, either
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
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.tiles import after_previous, dot, load_task, rows_at


@triton.jit
def _known(a_dst_ptr, stats_ptr, column, heads, HEADS: tl.constexpr):
    # a_dst, LSE and delta of receivers, [EDGES, heads] each
    at = stats_ptr + column.to(tl.int64)[:, None] * (2 * HEADS) + heads[None, :]
    return of_heads(a_dst_ptr, column, heads, HEADS), tl.load(at), tl.load(at + HEADS)


@triton.jit
def _of_loops(
    own, a_dst_ptr, stats_ptr, grad_ptr, seed_ptr, rows, with_loop, heads, offs_dim,
    GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Where the sums of 16 rows begin: at their loops, of those that have one here.
    mask = with_loop[:, None]
    offs_row = rows.to(tl.int64)[:, None]
    u = own + tl.load(a_dst_ptr + offs_row * HEADS + heads[None, :], mask=mask, other=0.0).to(ACC)
    at = stats_ptr + offs_row * (2 * HEADS) + heads[None, :]
    lse, delta = tl.load(at, mask=mask, other=0.0), tl.load(at + HEADS, mask=mask, other=0.0)
    weight = tl.where(mask, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
    number = weight * leaky_slope(u, SLOPE) * delta
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows[:, None], 0, True)
        other_key = key_of(seed_ptr, rows[:, None], heads[None, :], False)
        weight *= kept(own_key, other_key, DROPOUT, 1.0)
    at = grad_ptr + offs_row * GRAD_STRIDE + offs_dim[None, :]
    grad = tl.load(at, mask=mask, other=0.0).to(ACC)
    return number, spread(weight, DIM) * grad, spread(tl.where(u > 0, weight, 0.0), DIM) * grad


# GROUP heads of 16 rows, which are sources, over the edges of a window; a column is a receiver.
#   grid      (num_tasks, groups), as the forward kernel
#   reads     a_src [num_rows, HEADS], a_dst [num_cols, HEADS], x [num_rows, HEADS, DIM], grad [num_cols,
#             HEADS, DIM]; stats ACC [num_cols, 2, HEADS], LSE and delta; the graph as forward
#   writes    dx [num_rows, HEADS, DIM], d_a_src [num_rows, HEADS]; slices to their slot, see
#             `gat_bwd_window_kernel`
#   on chip   dx, bent ACC [16, GROUP * DIM], number ACC [16, GROUP]: the three sums of above
#   order     edges left to right within a task, no atomics: bitwise reproducible
#   requires  as the forward kernel
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_bwd_edge_kernel(
    dx_ptr, d_a_src_ptr, partial_ptr, edge_ptr, edge_tasks_ptr, packed_ptr, edge_row_ptr, edge_copy_ptr,
    row_index_ptr, a_src_ptr, a_dst_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    window, begin, end, slot = load_task(edge_tasks_ptr, tl.program_id(0))
    head = tl.program_id(1) * GROUP
    heads, offs_dim = head + tl.arange(0, GROUP), head * DIM + tl.arange(0, GROUP * DIM)
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    mask_row = (rows < num_rows)[:, None]
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin, end, EDGES)
    own = of_heads(a_src_ptr, row, heads, HEADS)
    a_dst, lse, delta = _known(a_dst_ptr, stats_ptr, column, heads, HEADS)
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin + EDGES, end, EDGES)
    offs_row = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim[None, :], mask=mask_row, other=0.0)
    if LOOPS:
        first = begin == tl.load(edge_ptr + window)
        own_of_rows = tl.load(a_src_ptr + offs_row * HEADS + heads[None, :], mask=mask_row, other=0.0)
        number, dx, bent = _of_loops(
            own_of_rows.to(ACC), a_dst_ptr, stats_ptr, grad_ptr, seed_ptr, rows, first & (rows < num_loops),
            heads, offs_dim, GRAD_STRIDE, HEADS, DIM, SLOPE, DROPOUT, ACC,
        )  # fmt: skip
    else:
        number = tl.zeros((16, GROUP), dtype=ACC)
        dx, bent = tl.zeros((16, GROUP * DIM), dtype=ACC), tl.zeros((16, GROUP * DIM), dtype=ACC)
    number, seen = eight_columns(number), tl.zeros((EDGES,), dtype=tl.int32)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        its_column = packed >> 5
        grad = tl.load(grad_ptr + its_column.to(tl.int64)[:, None] * GRAD_STRIDE + offs_dim[None, :])
        # a step ahead, in registers, as in forward
        next_own = of_heads(a_src_ptr, row, heads, HEADS)
        next_a_dst, next_lse, next_delta = _known(a_dst_ptr, stats_ptr, column, heads, HEADS)
        column, row = edges_of_step(packed_ptr, edge_row_ptr, start + 2 * EDGES, end, EDGES)
        live = offs < end
        if LOOPS or DROPOUT > 0:
            its_row = tl.load(edge_row_ptr + at)
        if LOOPS:
            live = live & (its_column != its_row)
        place = tl.where(live, packed & 15, 16)
        seen |= 1 << place
        u = own.to(ACC) + a_dst.to(ACC)
        weight = tl.exp2(exponent(u, SLOPE) - lse * LOG2_E).to(HALF)
        term = weight.to(ACC) * leaky_slope(u, SLOPE) * delta
        if DROPOUT > 0:
            own_key = key_of(seed_ptr, its_row[:, None], 0, True)
            if edge_copy_ptr is not None:
                own_key = of_copy(own_key, tl.load(edge_copy_ptr + at)[:, None])
            other_key = key_of(seed_ptr, its_column[:, None], heads[None, :], False)
            weight *= kept(own_key, other_key, DROPOUT, 1.0).to(HALF)
        ones = ones_of_rows(place, HALF)
        high = term.to(HALF)
        number = dot(ones, eight_columns(high), number, ACC)
        number = dot(ones, eight_columns((term - high.to(ACC)).to(HALF)), number, ACC)
        dx = dot(ones, weighted(grad, weight, DIM), dx, ACC)
        bent = dot(ones, weighted(grad, tl.where(u > 0, weight, 0.0), DIM), bent, ACC)
        own, a_dst, lse, delta = next_own, next_a_dst, next_lse, next_delta
    number = as_many_columns(number, GROUP)
    dx *= 1.0 / (1.0 - DROPOUT)
    total = SLOPE * dx + (1.0 - SLOPE) / (1.0 - DROPOUT) * bent
    d_own = tl.sum((x.to(ACC) * total).reshape(16, GROUP, DIM), 2) - number
    # an Inf in the x of a source without edges, times a sum of 0, would be no number
    some = ((tl.reduce(seen, 0, either) >> tl.arange(0, 16)) & 1) != 0
    if LOOPS:
        some = some | (first & (rows < num_loops))
    d_own = tl.where(some[:, None], d_own, 0.0)
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            WIDTH: tl.constexpr = slice_width(HEADS * DIM, HEADS)
            at_slot = partial_ptr + ((slot.to(tl.int64) * 16 + tl.arange(0, 16)) * WIDTH)[:, None]
            tl.store(at_slot + offs_dim[None, :], dx)
            tl.store(at_slot + (HEADS * DIM + heads)[None, :], d_own)
    if whole:
        tl.store(
            dx_ptr + offs_row * (HEADS * DIM) + offs_dim[None, :],
            dx.to(dx_ptr.dtype.element_ty),
            mask=mask_row,
        )
        at = d_a_src_ptr + offs_row * HEADS + heads[None, :]
        tl.store(at, d_own.to(d_a_src_ptr.dtype.element_ty), mask=mask_row)
