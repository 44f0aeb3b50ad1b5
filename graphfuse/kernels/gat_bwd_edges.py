r"""Kernel of GAT's attention over the edges of windows, backward: a weight for each edge and head.

Rows are sources. With the weights :math:`p`, the factor :math:`m` of dropout, the gradients :math:`g` of the
receivers' outputs and :math:`\delta_i = g_i^\top o_i`,

.. math::
    dx_j = \sum_i p_{ij} m_{ij}\, g_i, \qquad
    da_j = \sum_i b_{ij} (m_{ij}\, g_i^\top x_j - \delta_i)
         = x_j^\top \sum_i b_{ij} m_{ij}\, g_i - \sum_i b_{ij} \delta_i, \qquad
    b_{ij} = p_{ij} \ell'(u_{ij}),

so that no product of two rows is made for an edge. Both sums have the weights as they were rounded, and no
product is rounded: what is left of the difference is exact where a receiver has but one edge.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, leaky_slope
from graphfuse.kernels.attention_tiles import LOG2_E
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_edges import edges_of_step, in_rows, of_eight, of_heads, rows_of_edges
from graphfuse.kernels.gat_results import each_its_own
from graphfuse.kernels.tiles import after_previous, dot, load_task, nothing, rows_at


@triton.jit
def _spread(x, DIM: tl.constexpr):
    # numbers of heads, [16, 8], as those of their features, [16, 8 * DIM]
    return tl.broadcast_to(x[:, :, None], (16, 8, DIM)).reshape(16, 8 * DIM)


@triton.jit
def _known(a_dst_ptr, stats_ptr, column, heads, HEADS: tl.constexpr):
    # a_dst, LSE and delta of receivers, [EDGES, heads] each
    at = stats_ptr + column.to(tl.int64)[:, None] * (2 * HEADS) + heads[None, :]
    return of_heads(a_dst_ptr, column, heads, HEADS), tl.load(at), tl.load(at + HEADS)


@triton.jit
def _of_loops(
    x, own, a_dst_ptr, stats_ptr, grad_ptr, seed_ptr, rows, with_loop, heads, offs_dim,
    GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the loops of 16 rows add to the gradients of a_src and x.
    mask = with_loop[:, None]
    offs_row = rows.to(tl.int64)[:, None]
    u = own + tl.load(a_dst_ptr + offs_row * HEADS + heads[None, :], mask=mask, other=0.0).to(ACC)
    at = stats_ptr + offs_row * (2 * HEADS) + heads[None, :]
    lse, delta = tl.load(at, mask=mask, other=0.0), tl.load(at + HEADS, mask=mask, other=0.0)
    weight = tl.where(mask, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
    factor = tl.zeros_like(weight) + 1.0
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows[:, None], 0, True)
        other_key = key_of(seed_ptr, rows[:, None], heads[None, :], False)
        factor = kept(own_key, other_key, DROPOUT, 1.0 / (1.0 - DROPOUT))
    at = grad_ptr + offs_row * GRAD_STRIDE + offs_dim[None, :]
    grad = tl.load(at, mask=mask, other=0.0).to(ACC)
    product = tl.sum((x.to(ACC) * grad).reshape(16, 8, DIM), 2)
    return weight * leaky_slope(u, SLOPE) * (factor * product - delta), _spread(weight * factor, DIM) * grad


# Eight heads of 16 rows, which are sources, over the edges of a window; a column is a receiver.
#   grid      (num_tasks, HEADS / 8), as the forward kernel
#   reads     a_src [num_rows, HEADS], a_dst [num_cols, HEADS], x [num_rows, HEADS, DIM], grad [num_cols,
#             HEADS, DIM]; stats ACC [num_cols, 2, HEADS], LSE and delta; the edges as forward
#   writes    dx [num_rows, HEADS, DIM], d_a_src [num_rows, HEADS]; slices to their slot, see
#             `gat_bwd_window_kernel`
#   on chip   of each head dx, bent ACC [16, 8 * DIM], of which it keeps its own features, and number ACC
#             [16, 8], of which it keeps its own column: the three sums of above
#   order     edges left to right within a task, no atomics: bitwise reproducible
#   requires  as the forward kernel
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_bwd_edge_kernel(
    dx_ptr, d_a_src_ptr, partial_ptr, edge_ptr, edge_tasks_ptr, packed_ptr, edge_row_ptr, edge_copy_ptr,
    row_index_ptr, a_src_ptr, a_dst_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = 8 * DIM
    window, begin, end, slot = load_task(edge_tasks_ptr, tl.program_id(0))
    head = tl.program_id(1) * 8
    heads, offs_dim = head + tl.arange(0, 8), head * DIM + tl.arange(0, WIDTH)
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    mask_row = (rows < num_rows)[:, None]
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin, end, EDGES)
    own = of_heads(a_src_ptr, row, heads, HEADS)
    a_dst, lse, delta = _known(a_dst_ptr, stats_ptr, column, heads, HEADS)
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin + EDGES, end, EDGES)
    offs_row = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim[None, :], mask=mask_row, other=0.0)
    sums = nothing()
    for _ in tl.static_range(8):
        nothing_yet = tl.zeros((16, WIDTH), dtype=ACC)
        sums += ((nothing_yet, nothing_yet, tl.zeros((16, 8), dtype=ACC)),)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        its_column = packed >> 4
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
        u = own.to(ACC) + a_dst.to(ACC)
        p = tl.exp2(exponent(u, SLOPE) - lse * LOG2_E)
        b, p = (p * leaky_slope(u, SLOPE)).to(HALF), p.to(HALF)
        bends = of_eight(b)
        if DROPOUT > 0:
            own_key = key_of(seed_ptr, its_row[:, None], 0, True)
            if edge_copy_ptr is not None:
                own_key = of_copy(own_key, tl.load(edge_copy_ptr + at)[:, None])
            other_key = key_of(seed_ptr, its_column[:, None], heads[None, :], False)
            factor = kept(own_key, other_key, DROPOUT, 1.0).to(HALF)
            p, bent_left = p * factor, of_eight(b * factor)
        weights = of_eight(p)
        high = delta.to(HALF)
        low = (delta - high.to(ACC)).to(HALF)
        most = rows_of_edges(tl.where(live, packed & 15, 16), HALF)
        new_sums = nothing()
        for g in tl.static_range(8):
            dx, bent, number = sums[g]
            dx = dot(in_rows(weights[g], most), grad, dx, ACC)
            weight = in_rows(bends[g], most)
            number = dot(weight, low, dot(weight, high, number, ACC), ACC)
            if DROPOUT > 0:
                weight = in_rows(bent_left[g], most)
            bent = dot(weight, grad, bent, ACC)
            new_sums += ((dx, bent, number),)
        sums = new_sums
        own, a_dst, lse, delta = next_own, next_a_dst, next_lse, next_delta
    dxs, bents, number = nothing(), nothing(), sums[0][2]
    for g in tl.static_range(8):
        dxs += (sums[g][0],)
        bents += (sums[g][1],)
        number = tl.where((tl.arange(0, 8) == g)[None, :], sums[g][2], number)
    dx = each_its_own(dxs, 0, 8, WIDTH) * (1.0 / (1.0 - DROPOUT))
    bent = each_its_own(bents, 0, 8, WIDTH) * (1.0 / (1.0 - DROPOUT))
    d_own = tl.sum((x.to(ACC) * bent).reshape(16, 8, DIM), 2) - number
    if LOOPS:
        first = begin == tl.load(edge_ptr + window)
        own_of_rows = tl.load(a_src_ptr + offs_row * HEADS + heads[None, :], mask=mask_row, other=0.0)
        loop_own, loop_x = _of_loops(
            x, own_of_rows.to(ACC), a_dst_ptr, stats_ptr, grad_ptr, seed_ptr, rows,
            first & (rows < num_loops), heads, offs_dim, GRAD_STRIDE, HEADS, DIM, SLOPE, DROPOUT, ACC,
        )  # fmt: skip
        d_own, dx = d_own + loop_own, dx + loop_x
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            OF_ROW: tl.constexpr = HEADS * (DIM + 1)
            at_slot = partial_ptr + ((slot.to(tl.int64) * 16 + tl.arange(0, 16)) * OF_ROW)[:, None]
            tl.store(at_slot + offs_dim[None, :], dx)
            tl.store(at_slot + (HEADS * DIM + heads)[None, :], d_own)
    if whole:
        at = dx_ptr + offs_row * (HEADS * DIM) + offs_dim[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask_row)
        at = d_a_src_ptr + offs_row * HEADS + heads[None, :]
        tl.store(at, d_own.to(d_a_src_ptr.dtype.element_ty), mask=mask_row)
