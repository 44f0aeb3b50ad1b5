"""The loop of GAT's window kernel, forward: the entries of a window, a step at a time."""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import leaky
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    eight_times,
    gather,
    in_place,
    load_columns,
    numbers_of_columns,
    shift_of,
    window_step,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_tiles import (
    at_most,
    greater_of_products,
    half_factors,
    one_of_eight,
    ones_where_greater,
    split_factors,
)
from graphfuse.kernels.tiles import as_scores, dot, load_bits, nothing


@triton.jit
def attend(
    column_ptr, row_mask_ptr, copy_ptr, row_index_ptr, a_src_ptr, x_ptr, seed_ptr, window, begin, end, head,
    own, own_key, means, states, FIXED: tl.constexpr, TILTED: tl.constexpr,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Goes on with the softmax and the sums of each head, (top, total, high, acc, tilt), over the entries
    # [begin, end) of a window. FIXED: `top`, the score that a source with the number in `means` would make,
    # stays what is subtracted from scores. Whether that was good enough is for `held` to say, from `total`
    # and from `seen`, the rows of all entries. FIXED and TILTED: sums are of sources' factors alone, those of
    # u > 0 (high, tilt) and others (total, acc) apart, as `from_guess` began them; a receiver's factors scale
    # them in the end.
    SPLIT: tl.constexpr = FIXED and TILTED
    seen = tl.zeros((COLUMNS,), dtype=tl.int32)
    WHOLE: tl.constexpr = HEADS % GROUP == 0
    GROWS: tl.constexpr = SLOPE >= 0 and SLOPE <= 1
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    # A program waits for rows where it asks for them: after the weights, if registers will hold both
    # (results: waits.md).
    LAST: tl.constexpr = not TILTED and DROPOUT == 0 and PAIR <= 2 and PAIR * BLOCK_DIM <= 64
    BATCH: tl.constexpr = PAIR if LAST else 1
    ones = tl.full((COLUMNS, 8), 1.0, dtype=tl.float32).to(HALF)
    running, own_factors = nothing(), nothing()
    for g in tl.static_range(GROUP):
        its_total, its_high = eight_times(states[g][1]), eight_times(states[g][2])
        running += ((states[g][0], its_total, its_high, states[g][3], states[g][4]),)
        if FIXED:
            # a and d count from the mean of the first sources, scores from what that makes of d: one factor
            # of a receiver is 1, the other smaller; a weight is rounded once, or by the other three times
            its_own = own[g] + means[g]
            if not SPLIT:
                own_factors += (half_factors(its_own, tl.expand_dims(states[g][0], 1), SLOPE, HALF),)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    first_columns = load_columns(column_ptr, begin, end, COLUMNS)
    other = numbers_of_columns(a_src_ptr, first_columns, head, HEADS, GROUP)
    ahead = load_columns(column_ptr, begin + COLUMNS, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        if FIXED:
            seen |= bits.to(tl.int32)
        next_other = numbers_of_columns(a_src_ptr, ahead, head, HEADS, GROUP)
        ahead = load_columns(column_ptr, start + 2 * COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(
            column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS, 1, COLUMNS, ACC
        )
        other_key = None
        if DROPOUT > 0:
            other_key = of_copy(key_of(seed_ptr, column[None, :], 0, True), copy[None, :])
        tiles = nothing()
        for pair in tl.static_range(0 if LAST else GROUP // PAIR):
            first = head + pair * PAIR
            tiles += (gather(x_ptr, column, first, X_STRIDE, HEADS, DIM, PAIR, BLOCK_DIM, WHOLE),)
        # what scores, or weights, are at most
        most = tl.where(outside == 0, float("inf"), 0.0 if FIXED else float("-inf")).to(
            HALF if FIXED else ACC
        )
        edges = tl.where(outside == 0, -1, 0).to(tl.int16)
        new_states = nothing()
        if SPLIT:
            for g in tl.static_range(GROUP):
                top, total, high, acc, tilt = running[g]
                factors = half_factors(other[g].to(ACC) - means[g], 0.0, SLOPE, HALF)
                bent, rest = split_factors(other[g], (-own[g]).to(other[g].dtype), factors, edges)
                total, high = dot(rest, ones, total, ACC), dot(bent, ones, high, ACC)
                x = tiles[g // PAIR]
                if DROPOUT > 0:
                    drawn = kept(own_key[g], in_place(other_key), DROPOUT, 1.0).to(HALF)
                    rest, bent = rest * drawn, bent * drawn
                new_states += ((top, total, high, dot(rest, x, acc, ACC), dot(bent, x, tilt, ACC)),)
        for nth in tl.static_range(0, 0 if SPLIT else GROUP, BATCH):
            weights, scaled = nothing(), nothing()
            for g in tl.static_range(nth, nth + BATCH):
                top, total, high, acc, tilt = running[g]
                if FIXED:
                    other_factors = half_factors(other[g].to(ACC) - means[g], 0.0, SLOPE, HALF)
                    p = at_most(greater_of_products(own_factors[g], other_factors), most)
                else:
                    u = own[g] * LOG2_E + as_scores(other[g].to(ACC) * LOG2_E, 1, ACC)
                    u = tl.maximum(u, u * SLOPE) if GROWS else leaky(u, SLOPE)
                    s = at_most(u, most)
                    higher = tl.maximum(top, tl.max(s, 1))
                    shift = shift_of(higher)
                    p = tl.exp2(s - shift[:, None])
                    rescale = tl.exp2(top - shift)[:, None]
                    top, total, high = higher, total * rescale, high * rescale
                    acc, tilt = acc * rescale, tilt * rescale
                weights += (p.to(HALF),)  # what is summed is what rows are multiplied with: it adds up to 1
                scaled += ((top, total, high, acc, tilt),)
            if LAST:
                tiles += (gather(x_ptr, column, head + nth, X_STRIDE, HEADS, DIM, PAIR, BLOCK_DIM, WHOLE),)
            for g in tl.static_range(nth, nth + BATCH):
                x, weight = tiles[g // PAIR], weights[g - nth]
                top, total, high, acc, tilt = scaled[g - nth]
                total = dot(weight, ones, total, ACC)
                if TILTED:
                    bends = ones_where_greater(other[g], (-own[g]).to(other[g].dtype), weight)
                    high = dot(weight * bends, ones, high, ACC)
                if DROPOUT > 0:
                    weight *= kept(own_key[g], in_place(other_key), DROPOUT, 1.0).to(x.dtype)
                acc = dot(weight, x, acc, ACC)
                if TILTED:
                    tilt = dot(weight * bends, x, tilt, ACC)
                new_states += ((top, total, high, acc, tilt),)
        bits, other, running = next_bits, next_other, new_states
    new_states = nothing()
    for g in tl.static_range(GROUP):
        top, total, high, acc, tilt = running[g]
        total, high = one_of_eight(total), one_of_eight(high)
        if SPLIT:
            its_own, shift = (own[g] + means[g]).reshape(16), shift_of(top)
            none = (total == 0) & (high == 0)  # nor do the factors of a row without edges matter
            first = tl.where(none, 0.0, tl.exp2(its_own * LOG2_E - shift))
            second = tl.where(none, 0.0, tl.exp2(its_own * (LOG2_E * SLOPE) - shift))
            high, tilt = high * first, tilt * first[:, None]
            total, acc = high + total * second, tilt + acc * second[:, None]
        if FIXED:
            top = tl.where(total == 0, float("-inf"), shift_of(top))  # NaN is not 0
        new_states += ((top, total, high, acc, tilt),)
    return new_states, seen
