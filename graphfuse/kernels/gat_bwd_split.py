r"""GAT's backward by windows without dropout, weights by factors.

Rows are sources, columns receivers. With :math:`u_{ij} = a_j + d_i` and a LeakyReLU of slope :math:`\sigma`
in [0, 1] a weight is a product of what each end brings, :math:`p_{ij} = A_j D_i` where :math:`u > 0` and
:math:`A'_j D'_i` elsewhere,

.. math::
    A_j = e^{a_j - c}, \quad D_i = e^{d_i + c - L_i}, \qquad
    A'_j = e^{\sigma (a_j - c)}, \quad D'_i = e^{\sigma (d_i + c) - L_i},

with the logarithm :math:`L` of the receiver's sum and any number :math:`c`. So with sums over receivers with
:math:`u > 0` and over the others, of the gradient's rows :math:`g` and of :math:`\delta_i = g_i^\top o_i`,

.. math::
    G_j = \sum D_i g_i, \quad E_j = \sum D_i \delta_i, \quad
    G'_j = \sum D'_i g_i, \quad E'_j = \sum D'_i \delta_i,

the gradients are

.. math::
    dx_j = A_j G_j + A'_j G'_j, \qquad
    da_j = A_j (x_j^\top G_j - E_j) + \sigma A'_j (x_j^\top G'_j - E'_j).

No weight needs an exponential or a product, and no product of two rows is made for an edge. A factor of a
receiver is rounded once, alike in both sums, whose difference is of the same weights therefore.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, leaky_slope
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    agreed,
    either,
    gather,
    load_columns,
    load_numbers,
    side_by_side,
    window_step,
)
from graphfuse.kernels.gat_results import each_its_own
from graphfuse.kernels.gat_tiles import split_factors
from graphfuse.kernels.tiles import as_scores, dot, load_bits, load_task, nothing, rows_at

# Sources whose numbers are farther than this from the middle of their window's have weights made one by one:
# receivers' factors are at most e to the power of it, times two to the power of the other, in half precision.
_NEAR, _GREATER = tl.constexpr(8.0), tl.constexpr(4.0)


@triton.jit
def known_of_columns(stats_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # LSE and a_dst of receivers, [1, COLUMNS] each, for each of GROUP heads
    known = nothing()
    for g in tl.static_range(GROUP):
        at = stats_ptr + (column.to(tl.int64)[None, :] * HEADS + (head + g)) * 4
        mask = None if HEADS % GROUP == 0 else head + g < HEADS
        known += ((tl.load(at, mask=mask), tl.load(at + 3, mask=mask)),)
    return known


@triton.jit
def head_of_piece(GROUP: tl.constexpr):
    # of 1, 2 or 4 heads
    return tl.arange(0, 8) // 2 % GROUP


@triton.jit
def deltas(stats_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr):
    # Those of receivers and all heads, each as two numbers of half precision that add up to it, side by side,
    # as often as makes eight columns: [COLUMNS, 8].
    heads = head + head_of_piece(GROUP)
    mask = None if HEADS % GROUP == 0 else (heads < HEADS)[None, :]
    place = (column.to(tl.int64)[:, None] * HEADS + heads[None, :]) * 8 + 2
    return tl.load(stats_ptr.to(tl.pointer_type(HALF)) + (place + tl.arange(0, 8)[None, :] % 2), mask=mask)


@triton.jit
def of_head(sums, g: tl.constexpr, GROUP: tl.constexpr):
    # what is a head's of sums of pieces; 0 elsewhere
    return tl.where((head_of_piece(GROUP) == g)[None, :], sums, 0.0)


@triton.jit
def store_gradients(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, row_index_ptr, x_ptr, grad_ptr, stats_ptr, window, begin, slot,
    num_rows, num_loops, head, own, middles, sums, seen,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the sums of a window make, with its loops; of a slice to its slot.
    WIDTH: tl.constexpr = PAIR * BLOCK_DIM
    some = ((tl.reduce(seen, 0, either) >> tl.arange(0, 16)) & 1) != 0
    for pair in tl.static_range(0, GROUP, PAIR):
        rows, offs, mask = side_by_side(row_index_ptr, window, head + pair, HEADS, DIM, PAIR, BLOCK_DIM)
        offs_row = rows.to(tl.int64)
        mask_tile = (rows < num_rows)[:, None] & mask[None, :]
        at = x_ptr + offs_row[:, None] * X_STRIDE + offs[None, :]
        x = tl.load(at, mask=mask_tile, other=0.0).to(ACC)
        with_loop = some
        if LOOPS:  # the loop is the first edge of the first slice
            with_loop = (begin == tl.load(ptr_ptr + window)) & (rows < num_loops)
            some = some | with_loop
            at = grad_ptr + offs_row[:, None] * GRAD_STRIDE + offs[None, :]
            its_grad = tl.load(at, mask=with_loop[:, None] & mask_tile, other=0.0).to(ACC)
        parts, d_owns = nothing(), nothing()
        for place in tl.static_range(PAIR):
            mine = (tl.arange(0, WIDTH) // BLOCK_DIM == place)[None, :]
            distance = own[pair + place] - middles[pair + place]
            first = tl.exp2(distance * LOG2_E - _GREATER)
            second = tl.exp2(distance * (LOG2_E * SLOPE) - _GREATER)
            straight, slow = (
                sums[pair + place][0] * first[:, None],
                sums[pair + place][1] * second[:, None],
            )
            e_first = tl.sum(of_head(sums[pair + place][2], pair + place, GROUP), 1) * first
            e_second = tl.sum(of_head(sums[pair + place][3], pair + place, GROUP), 1) * second
            product = tl.sum(tl.where(mine, x * (straight + SLOPE * slow), 0.0), 1)
            d_own = product - (e_first + SLOPE * e_second) * (GROUP / 4)
            # an Inf in the x of a source without edges, times a sum of 0, would be no number
            d_own = tl.where(some, d_own, 0.0)
            part = straight + slow
            if LOOPS:
                exists = with_loop & (head + pair + place < HEADS)
                at = stats_ptr + (offs_row * HEADS + (head + pair + place)) * 4
                lse, delta = tl.load(at, mask=exists, other=0.0), tl.load(at + 2, mask=exists, other=0.0)
                u = own[pair + place] + tl.load(at + 3, mask=exists, other=0.0)
                p = tl.where(exists, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
                dp = tl.sum(tl.where(mine, x * its_grad, 0.0), 1)
                d_own += tl.where(exists, p * (dp - delta) * leaky_slope(u, SLOPE), 0.0)
                part += p[:, None] * its_grad
            parts += (part,)
            d_owns += (d_own,)
        dx = each_its_own(parts, 0, PAIR, WIDTH)
        whole = True
        if partial_ptr is not None:
            whole = slot < 0
            if slot >= 0:
                SLOT: tl.constexpr = HEADS * (DIM + 1)
                at_slot = partial_ptr + (slot.to(tl.int64) * 16 + tl.arange(0, 16)) * SLOT
                tl.store(at_slot[:, None] + offs[None, :], dx, mask=mask[None, :])
                for place in tl.static_range(PAIR):
                    its_head = head + pair + place
                    tl.store(at_slot + (HEADS * DIM + its_head), d_owns[place], mask=its_head < HEADS)
        if whole:
            at_dx = dx_ptr + (offs_row * (HEADS * DIM))[:, None] + offs[None, :]
            tl.store(at_dx, dx.to(dx_ptr.dtype.element_ty), mask=mask_tile)
            for place in tl.static_range(PAIR):
                its_head = head + pair + place
                at_own = d_a_src_ptr + offs_row * HEADS + its_head
                exists = (rows < num_rows) & (its_head < HEADS)
                tl.store(at_own, d_owns[place].to(d_a_src_ptr.dtype.element_ty), mask=exists)


@triton.jit
def split_walk(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, a_src_ptr,
    x_ptr, grad_ptr, stats_ptr, num_rows, num_loops, head,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, SLOPE: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What `gat_bwd_window_kernel` does, of the heads from `head` on. Returns whether the numbers of sources
    # are near enough to each other; if not, nothing is stored.
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    NUMBER: tl.constexpr = a_src_ptr.dtype.element_ty
    WIDTH: tl.constexpr = PAIR * BLOCK_DIM
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    tile_rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)[:, None])
    own, middles, within = nothing(), nothing(), nothing()
    for g in tl.static_range(GROUP):
        mask = (tile_rows < num_rows) & (head + g < HEADS)
        its_own = load_numbers(a_src_ptr, tile_rows, head + g, mask, HEADS).to(ACC)
        # 16 times the same number, as in forward
        its_own = tl.max(as_scores(tl.broadcast_to(its_own, (16, 16)), 1, ACC), 1)
        middle = (tl.max(its_own, 0) + tl.min(its_own, 0)) * 0.5
        own += (its_own,)
        middles += (middle,)
        within += (tl.abs(its_own - middle) <= _NEAR,)  # no NaN is
    near = within[0]
    for g in tl.static_range(1, GROUP):
        near &= within[g]
    near = agreed(tl.min(near.to(tl.int32), 0) > 0)
    sums = nothing()
    for _g in tl.static_range(GROUP):
        number = tl.zeros((16, 8), dtype=ACC)
        sums += ((tl.zeros((16, WIDTH), dtype=ACC), tl.zeros((16, WIDTH), dtype=ACC), number, number),)
    bits, seen = load_bits(row_mask_ptr, begin, end, COLUMNS), tl.zeros((COLUMNS,), dtype=tl.int32)
    known = known_of_columns(stats_ptr, load_columns(column_ptr, begin, end, COLUMNS), head, HEADS, GROUP)
    ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, tl.where(near, end, begin), COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        seen |= bits.to(tl.int32)
        next_known = known_of_columns(stats_ptr, ahead, head, HEADS, GROUP)
        ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
        column, _copy, outside = window_step(
            column_ptr, None, row_index_ptr, window, start, end, bits, LOOPS, 1, COLUMNS, ACC
        )
        edges = tl.where(outside == 0, -1, 0).to(tl.int16)
        tiles, new_sums = nothing(), nothing()
        for pair in tl.static_range(GROUP // PAIR):
            first_head = head + pair * PAIR
            tiles += (
                gather(
                    grad_ptr, column, first_head, GRAD_STRIDE, HEADS, DIM, PAIR, BLOCK_DIM, HEADS % GROUP == 0
                ),
            )
        pieces = deltas(stats_ptr, column, head, HEADS, GROUP, HALF)
        for g in tl.static_range(GROUP):
            lse, a_dst = known[g]
            u = a_dst + middles[g]
            shift = lse * LOG2_E - _GREATER
            factors = tl.exp2(u * LOG2_E - shift).to(HALF), tl.exp2(u * (LOG2_E * SLOPE) - shift).to(HALF)
            bent, rest = split_factors(
                a_dst.to(NUMBER), (-tl.expand_dims(own[g], 1)).to(NUMBER), factors, edges
            )
            straight, slow, e_straight, e_slow = sums[g]
            grad = tiles[g // PAIR]
            e_straight, e_slow = dot(bent, pieces, e_straight, ACC), dot(rest, pieces, e_slow, ACC)
            new_sums += ((dot(bent, grad, straight, ACC), dot(rest, grad, slow, ACC), e_straight, e_slow),)
        bits, known, sums = next_bits, next_known, new_sums
    if near:
        store_gradients(
            dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, row_index_ptr, x_ptr, grad_ptr, stats_ptr, window,
            begin, slot, num_rows, num_loops, head, own, middles, sums, seen, X_STRIDE, GRAD_STRIDE,
            HEADS, DIM, GROUP, PAIR, BLOCK_DIM, SLOPE, LOOPS, ACC,
        )  # fmt: skip
    return near
