r"""GAT's backward by windows, weights by factors.

Rows are sources, columns receivers. With :math:`u_{ij} = a_j + d_i` and a LeakyReLU of slope :math:`\sigma`
in [0, 1] a weight is a product of what each end brings, :math:`p_{ij} = A_j D_i` where :math:`u > 0` and
:math:`A'_j D'_i` elsewhere,

.. math::
    A_j = e^{a_j - c}, \quad D_i = e^{d_i + c - L_i}, \qquad
    A'_j = e^{\sigma (a_j - c)}, \quad D'_i = e^{\sigma (d_i + c) - L_i},

with the logarithm :math:`L` of the receiver's sum and a centre :math:`c` of sources' numbers. So with sums
over receivers with :math:`u > 0` and over the others, of the gradient's rows :math:`g` and of
:math:`\delta_i = g_i^\top o_i`,

.. math::
    G_j = \sum D_i g_i, \quad E_j = \sum D_i \delta_i, \quad
    G'_j = \sum D'_i g_i, \quad E'_j = \sum D'_i \delta_i,

the gradients are

.. math::
    dx_j = A_j G_j + A'_j G'_j, \qquad
    da_j = A_j (x_j^\top G_j - E_j) + \sigma A'_j (x_j^\top G'_j - E'_j).

With dropout :math:`G` and :math:`G'` are of the edges that it keeps, and scaled. No weight needs an
exponential or a product, and no product of two rows is made for an edge. A factor of a
receiver is rounded once, alike in both sums, whose difference is of the same weights therefore. Factors and
delta come with the records of `gat_records.py`.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent, leaky_slope
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    agreed,
    either,
    gather,
    in_place,
    load_numbers,
    side_by_side,
    slope,
    window_step,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_records import (
    GREATER,
    NEAR,
    load_centre,
    load_known,
    no_pieces,
    of_pieces,
    records_of_columns,
)
from graphfuse.kernels.gat_results import each_its_own
from graphfuse.kernels.gat_tiles import one_of_eight, split_factors
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.tiles import (
    ONCE,
    as_scores,
    dot,
    load_bits,
    load_task,
    nothing,
    rows_at,
    rows_of_product,
)


@triton.jit
def store_gradients(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, row_index_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, window,
    begin, slot, num_rows, num_loops, head, own, centres, sums, seen,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the sums of a window make, with its loops; of a slice to its slot. All is asked for before anything
    # is stored: a load behind a store would wait for its turn.
    NUMBER: tl.constexpr = d_a_src_ptr.dtype.element_ty
    WIDTH: tl.constexpr = PAIR * BLOCK_DIM
    some = ((tl.reduce(seen, 0, either) >> tl.arange(0, 16)) & 1) != 0
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    offs_row = rows.to(tl.int64)
    with_loop = some
    if LOOPS:  # the loop is the first edge of the first slice
        with_loop = (begin == tl.load(ptr_ptr + window)) & (rows < num_loops)
        some = some | with_loop
    tiles, grads, numbers = nothing(), nothing(), nothing()
    for pair in tl.static_range(0, GROUP, PAIR):
        _rows, offs, mask = side_by_side(row_index_ptr, window, head + pair, HEADS, DIM, PAIR, BLOCK_DIM)
        mask_tile = (rows < num_rows)[:, None] & mask[None, :]
        x = tl.load(
            x_ptr + offs_row[:, None] * X_STRIDE + offs[None, :],
            mask=mask_tile,
            other=0.0,
            eviction_policy=ONCE,
        )
        tiles += (as_scores(x, 1, ACC),)
        if LOOPS:
            at = grad_ptr + offs_row[:, None] * GRAD_STRIDE + offs[None, :]
            grad = tl.load(at, mask=with_loop[:, None] & mask_tile, other=0.0)
            grads += (as_scores(grad, 1, ACC),)
    if LOOPS:
        for g in tl.static_range(GROUP):
            nth = offs_row * HEADS + (head + g)
            lse, delta, a_dst = load_known(
                stats_ptr, nth, with_loop, HEADS, GROUP, x_ptr.dtype.element_ty, NUMBER, ACC
            )
            numbers += ((lse, delta, a_dst),)
    parts, d_owns = nothing(), nothing()
    SCALE: tl.constexpr = 1.0 / (1.0 - DROPOUT)
    for g in tl.static_range(GROUP):
        x, mine = tiles[g // PAIR], (tl.arange(0, WIDTH) // BLOCK_DIM == g % PAIR)[None, :]
        distance = own[g] - centres[g]
        first = tl.exp2(distance * LOG2_E - GREATER)
        second = tl.exp2(distance * (LOG2_E * SLOPE) - GREATER)
        straight, slow = sums[g][0] * (first * SCALE)[:, None], sums[g][1] * (second * SCALE)[:, None]
        part, bent = straight + slow, straight + SLOPE * slow
        pieces = sums[g][2] * first[:, None] + sums[g][3] * (SLOPE * second)[:, None]
        of_delta = of_pieces(pieces, g, GROUP)
        if LOOPS:
            lse, delta, a_dst = numbers[g]
            u = own[g] + a_dst
            p = tl.where(with_loop, tl.exp2(exponent(u, SLOPE) - lse * LOG2_E), 0.0)
            factor = 1.0
            if DROPOUT > 0:
                own_key = key_of(seed_ptr, rows, 0, True)
                factor = kept(own_key, key_of(seed_ptr, rows, head + g, False), DROPOUT, SCALE)
            dp = tl.sum(tl.where(mine, x * grads[g // PAIR], 0.0), 1) * factor
            part += (p * factor)[:, None] * grads[g // PAIR]
            of_delta -= slope(p, dp, delta, False) * leaky_slope(u, SLOPE)
        d_own = tl.sum(tl.where(mine, x * bent, 0.0), 1) - of_delta
        parts += (part,)
        # an Inf in the x of a source without edges, times a sum of 0, would be no number
        d_owns += (tl.where(some, d_own, 0.0),)
    for pair in tl.static_range(0, GROUP, PAIR):
        _rows, offs, mask = side_by_side(row_index_ptr, window, head + pair, HEADS, DIM, PAIR, BLOCK_DIM)
        mask_tile = (rows < num_rows)[:, None] & mask[None, :]
        dx = each_its_own(parts, pair, PAIR, WIDTH)
        whole = True
        if partial_ptr is not None:
            whole = slot < 0
            if slot >= 0:
                SLOT: tl.constexpr = slice_width(HEADS * DIM, HEADS)
                at_slot = partial_ptr + (slot.to(tl.int64) * 16 + tl.arange(0, 16)) * SLOT
                tl.store(at_slot[:, None] + offs[None, :], dx, mask=mask[None, :])
                for place in tl.static_range(PAIR):
                    tl.store(at_slot + (HEADS * DIM + head + pair + place), d_owns[pair + place])
        if whole:
            at_dx = dx_ptr + (offs_row * (HEADS * DIM))[:, None] + offs[None, :]
            tl.store(at_dx, dx.to(dx_ptr.dtype.element_ty), mask=mask_tile, eviction_policy=ONCE)
            for place in tl.static_range(PAIR):
                at_own = d_a_src_ptr + offs_row * HEADS + (head + pair + place)
                result = d_owns[pair + place].to(d_a_src_ptr.dtype.element_ty)
                tl.store(at_own, result, mask=rows < num_rows)


@triton.jit
def split_walk(
    dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr, num_rows, num_loops, head,
    X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PAIR: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What `gat_bwd_window_kernel` does, of the heads from `head` on. Returns whether the numbers of
    # sources are near enough to each other; if not, nothing is stored.
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    NUMBER: tl.constexpr = a_src_ptr.dtype.element_ty
    WIDTH: tl.constexpr = PAIR * BLOCK_DIM
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    tile_rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)[:, None])
    own, centres, within = nothing(), nothing(), nothing()
    for g in tl.static_range(GROUP):
        centre = load_centre(stats_ptr, head + g)
        its_own = load_numbers(a_src_ptr, tile_rows, head + g, tile_rows < num_rows, HEADS).to(ACC)
        its_own = tl.where(tile_rows < num_rows, its_own, centre)
        # 16 times the same number, as in forward
        its_own = one_of_eight(as_scores(tl.broadcast_to(its_own, (16, 16)), 1, ACC))
        own += (its_own,)
        centres += (centre,)
        within += (tl.abs(its_own - centre) <= NEAR,)  # no NaN is
    if DROPOUT > 0:
        places = rows_at(row_index_ptr, window * 16 + rows_of_product(ACC)[:, None])
        own_key = key_of(seed_ptr, places, 0, True)
    sums = nothing()
    for _g in tl.static_range(GROUP):
        number = no_pieces(GROUP, ACC)
        sums += ((tl.zeros((16, WIDTH), dtype=ACC), tl.zeros((16, WIDTH), dtype=ACC), number, number),)
    bits, seen = load_bits(row_mask_ptr, begin, end, COLUMNS), tl.zeros((COLUMNS,), dtype=tl.int32)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        seen |= bits.to(tl.int32)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, 1, COLUMNS, ACC
        )
        edges = tl.where(outside == 0, -1, 0).to(tl.int16)
        tiles, new_sums = nothing(), nothing()
        for pair in tl.static_range(GROUP // PAIR):
            first_head = head + pair * PAIR
            tiles += (gather(grad_ptr, column, first_head, GRAD_STRIDE, HEADS, DIM, PAIR, BLOCK_DIM, True),)
        known, firsts, seconds, numbers = records_of_columns(
            stats_ptr, column, head, HEADS, GROUP, HALF, NUMBER
        )
        for g in tl.static_range(GROUP):
            against = (-tl.expand_dims(own[g], 1)).to(NUMBER)
            bent, rest = split_factors(numbers[g], against, (firsts[g], seconds[g]), edges)
            straight, slow, e_straight, e_slow = sums[g]
            grad = tiles[g // PAIR]
            e_straight, e_slow = dot(bent, known, e_straight, ACC), dot(rest, known, e_slow, ACC)
            if DROPOUT > 0:
                other_key = of_copy(key_of(seed_ptr, column[None, :], head + g, False), copy[None, :])
                drawn = kept(own_key, in_place(other_key), DROPOUT, 1.0).to(HALF)
                bent, rest = bent * drawn, rest * drawn
            new_sums += ((dot(bent, grad, straight, ACC), dot(rest, grad, slow, ACC), e_straight, e_slow),)
        bits, sums = next_bits, new_sums
    near = within[0]
    for g in tl.static_range(1, GROUP):
        near &= within[g]
    near = agreed(tl.min(near.to(tl.int32), 0) > 0)
    if near:
        store_gradients(
            dx_ptr, d_a_src_ptr, partial_ptr, ptr_ptr, row_index_ptr, x_ptr, grad_ptr, stats_ptr, seed_ptr,
            window, begin, slot, num_rows, num_loops, head, own, centres, sums, seen, X_STRIDE, GRAD_STRIDE,
            HEADS, DIM, GROUP, PAIR, BLOCK_DIM, SLOPE, DROPOUT, LOOPS, ACC,
        )  # fmt: skip
    return near
