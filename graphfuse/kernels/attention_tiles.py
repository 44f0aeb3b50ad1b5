"""Pieces of the attention kernels: the graph's part of a step, the online softmax."""

import triton
import triton.language as tl

from graphfuse.kernels.tiles import as_scores, nothing, rows_at, rows_of_product, without_loop

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def rate_of(scale):
    # what an unscaled score, its sign apart, is multiplied with to be an exponent of 2
    return (abs(scale) if scale != 0 else 1.0) * 1.4426950408889634


# Scores have the axes [16 rows, entries] and, where a program takes more than one head, a first one of heads.
# Sums over neighbours stand flat, [GROUP * 16 rows, GROUP * BLOCK_DIM]: each row of each head against the
# features of all heads of the group, of which it keeps its own. So a gathered row is one piece of memory, and
# needs no cutting up. Nor does it cost: products of which `own_of_flat` keeps nothing are not computed.
@triton.jit
def group_tile(row_index_ptr, window, head, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr):
    # Rows, heads and features of a tile, to be broadcast against each other.
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)[:, None])
    heads, dim = head, tl.arange(0, BLOCK_DIM)[None, :]
    if GROUP > 1:
        rows, heads, dim = rows[None, :, :], head + tl.arange(0, GROUP)[:, None, None], dim[None, :, :]
    return rows, heads, dim


@triton.jit
def gather(
    x_ptr, column, head, STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # The PAIR heads from `head` on, which exist if WHOLE, of the rows `column` of x, [COLUMNS, PAIR *
    # BLOCK_DIM]: side by side, so that a row is read in large pieces.
    offs = tl.arange(0, PAIR * BLOCK_DIM)
    mask = offs % BLOCK_DIM < DIM
    if not WHOLE:
        mask = mask & (head + offs // BLOCK_DIM < HEADS)
    if DIM != BLOCK_DIM:
        offs = offs // BLOCK_DIM * DIM + offs % BLOCK_DIM
    at = x_ptr + column.to(tl.int64)[:, None] * STRIDE + (head * DIM + offs)[None, :]
    return tl.load(at, mask=mask[None, :], other=0.0)


@triton.jit
def columns_last(x, GROUP: tl.constexpr):
    # what `gather` returns as the right operand of scores
    x = tl.trans(x)
    if GROUP > 1:
        x = x.reshape(GROUP, x.shape[0] // GROUP, x.shape[1])
    return x


@triton.jit
def flat(x, GROUP: tl.constexpr):
    # scores as the left operand of sums, or a number of each row as their factor
    if GROUP > 1:
        x = x.reshape(GROUP * 16, x.shape[2]) if len(x.shape) == 3 else x.reshape(GROUP * 16)
    return x


@triton.jit
def own_of_flat(x, GROUP: tl.constexpr):
    # Of flat sums [GROUP * 16, GROUP * features] what is a row's own, side by side: [16, GROUP * features].
    # The compiler knows which register holds what: what nobody reads then is not even computed.
    if GROUP > 1:
        height: tl.constexpr = x.shape[0] // GROUP
        width: tl.constexpr = x.shape[1]
        bits = x.to(tl.int32, bitcast=True) if x.dtype == tl.float32 else x.to(tl.int64, bitcast=True)
        bits = bits.reshape(GROUP, height, width)
        mine = tl.arange(0, GROUP)[:, None, None] == (tl.arange(0, width) // (width // GROUP))[None, None, :]
        x = tl.reduce(tl.where(mine, bits, 0), 0, either).to(x.dtype, bitcast=True)
    return x


@triton.jit
def side_by_side(
    row_index_ptr, window, head, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    # Of a tile [16, GROUP * BLOCK_DIM]: the rows of a window, where the features stand in a row of all heads,
    # and which of them exist.
    rows, offs = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)), tl.arange(0, GROUP * BLOCK_DIM)
    heads, dim = head + offs // BLOCK_DIM, offs % BLOCK_DIM
    return rows, heads * DIM + dim, (heads < HEADS) & (dim < DIM)


@triton.jit
def head_of_tile(
    row_index_ptr, window, head, place, HEADS: tl.constexpr, DIM: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    # Of head `head + place`, which is gathered with PAIR - 1 others: the rows of a window, where the features
    # of a gathered tile stand in a row of all heads, and which of a tile of sums are of a row and this head.
    rows, offs = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16)), tl.arange(0, PAIR * BLOCK_DIM)
    offs_dim = (head + place // PAIR * PAIR + offs // BLOCK_DIM) * DIM + offs % BLOCK_DIM
    own = (offs // BLOCK_DIM == place % PAIR) & (offs % BLOCK_DIM < DIM) & (head + place < HEADS)
    return rows, offs_dim, own


@triton.jit
def load_own(
    x_ptr, row_index_ptr, window, head, num_rows, with_loop, STRIDE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    # The rows of a window of x as flat sums have them, 0 without a loop.
    place, offs = tl.arange(0, GROUP * 16), tl.arange(0, GROUP * BLOCK_DIM)
    heads, dim = head + offs // BLOCK_DIM, offs % BLOCK_DIM
    rows = rows_at(row_index_ptr, window * 16 + place % 16)
    own = (offs // BLOCK_DIM)[None, :] == (place // 16)[:, None]
    own = own & ((heads < HEADS) & (dim < DIM))[None, :] & (rows < num_rows)[:, None]
    at = x_ptr + rows.to(tl.int64)[:, None] * STRIDE + (heads * DIM + dim)[None, :]
    return tl.load(at, mask=own & with_loop, other=0.0)


@triton.jit
def of_columns(x, GROUP: tl.constexpr):
    # x[COLUMNS] as a tile
    return x[None, None, :] if GROUP > 1 else x[None, :]


@triton.jit
def resident(x, GROUP: tl.constexpr, WARPS: tl.constexpr, ACC: tl.constexpr):
    # x, rows of a window, as a left operand of products that stays in registers. As it was loaded Triton
    # would keep it in shared memory and read it again in each step, where reading shared memory is what a
    # step takes longest for; more warps than one would have to exchange it in each step.
    if WARPS > 1:
        return x
    return as_scores(x, GROUP, ACC).to(x.dtype)


@triton.jit
def signed(x, SCALE: tl.constexpr):
    # x times the sign of SCALE, so that a maximum can be taken before scores are scaled
    if SCALE < 0:
        x = -x
    if SCALE == 0:
        x = tl.zeros_like(x)
    return x


@triton.jit
def window_step(
    column_ptr, copy_ptr, row_index_ptr, window, start, end, bits, LOOPS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # One step over the entries of a window: columns, copies, and `outside`, 0 for an edge and -inf for none,
    # to start a sum of scores from. Beyond the end the last column is read again, and no row uses it. With
    # LOOPS each node has one loop, which is no entry; those that are entries count as none (1), or the masks
    # came without them (2).
    offs = tl.minimum(start + tl.arange(0, COLUMNS), end - 1)
    column = tl.load(column_ptr + offs)
    bits = bits.to(tl.int32)
    if LOOPS == 1:
        bits = without_loop(bits, column, window)
    valid = ((bits[None, :] >> tl.arange(0, 16)[:, None]) & 1) != 0
    copy = tl.zeros_like(column)
    if copy_ptr is not None:
        copy = tl.load(copy_ptr + offs)
    outside = tl.where(valid, 0.0, float("-inf")).to(ACC)
    if GROUP > 1:
        outside = tl.broadcast_to(outside[None, :, :], (GROUP, 16, COLUMNS))
    return column, copy, outside


@triton.jit
def load_columns(column_ptr, start, end, COLUMNS: tl.constexpr):
    # The columns of a step, some columns beyond the end; for what is loaded ahead of its step.
    offs = tl.minimum(start + tl.arange(0, COLUMNS), end - 1)
    return tl.load(column_ptr + offs, mask=offs >= 0, other=0)


@triton.jit
def load_numbers(x_ptr, node, heads, mask, HEADS: tl.constexpr):
    # x[node, heads], 0 where masked out
    return tl.load(x_ptr + node.to(tl.int64) * HEADS + heads, mask=mask, other=0.0)


@triton.jit
def of_nodes(x_ptr, column, heads, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # numbers of the nodes `column` and of heads, as a tile
    return load_numbers(x_ptr, of_columns(column, GROUP), heads, heads < HEADS, HEADS)


@triton.jit
def numbers_of_columns(x_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # x[column, head + g], [1, COLUMNS], for each of GROUP heads
    numbers = nothing()
    for g in tl.static_range(GROUP):
        mask = None if HEADS % GROUP == 0 else head + g < HEADS
        at = x_ptr + column.to(tl.int64)[None, :] * HEADS + (head + g)
        numbers += (tl.load(at, mask=mask),)
    return numbers


@triton.jit
def numbers_of_group(x_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # x[column, head + ..] of GROUP heads, as a tile
    heads = head
    if GROUP > 1:
        heads = head + tl.arange(0, GROUP)[:, None, None]
    mask = None if HEADS % GROUP == 0 else heads < HEADS
    return tl.load(x_ptr + of_columns(column, GROUP).to(tl.int64) * HEADS + heads, mask=mask)


@triton.jit
def rows_of_scores(row_index_ptr, window, GROUP: tl.constexpr, ACC: tl.constexpr):
    # The rows of a window where tensor cores leave scores of them.
    row = rows_at(row_index_ptr, window * 16 + rows_of_product(ACC)[:, None])
    if GROUP > 1:
        row = row[None, :, :]
    return row


@triton.jit
def of_receivers(pair_ptr, column, heads, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # The pairs (LSE, -delta) of the receivers in `column`; a pair is one load of 8 bytes.
    pairs = pair_ptr.to(tl.pointer_type(tl.int64)) + of_columns(column, GROUP).to(tl.int64) * HEADS
    mask = None if HEADS % GROUP == 0 else heads < HEADS
    pair = tl.load(pairs + heads, mask=mask)
    lse = pair.to(tl.int32).to(tl.float32, bitcast=True)
    minus_delta = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return lse, minus_delta


@triton.jit
def in_place(key):
    # Numbers of columns as they are. The gather keeps Triton from computing each anew in all the threads of a
    # tensor-core tile that hold its column, and from moving the tile to where the numbers are.
    AXIS: tl.constexpr = len(key.shape) - 1
    index = tl.arange(0, key.shape[AXIS])[None, :]
    if AXIS == 2:
        index = index[None, :, :]
    return tl.gather(key, tl.broadcast_to(index, key.shape), AXIS)


@triton.jit
def shift_of(top):
    # a row with no edge yet has top = -inf; shift by 0 there, so that exp(-inf) is 0 and not NaN
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def agreed(found):
    # What all threads have found alike, as a vote, of which the compiler knows that. Where threads of a warp
    # might go different ways it has them wait for one another at each shuffle, with twice as much code.
    if tl.target_info.cuda_capability_geq(8, 0):
        votes = tl.inline_asm_elementwise(
            """{
            .reg .pred yes;
            setp.ne.b32 yes, $1, 0;
            vote.sync.any.pred yes, yes, 0xffffffff;
            selp.b32 $0, 1, 0, yes;
            }""",
            "=r,r", [found.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        found = votes != 0
    return found


@triton.constexpr_function
def deviation(scale, dim, rows):
    # what makes of the sum of squares of `rows` vectors of `dim` numbers the deviation of their products
    return abs(scale) / (rows * dim**0.5)


@triton.jit
def small_scores(q, SCALE: tl.constexpr, DIM: tl.constexpr):
    # Whether scores of these rows of q, [.., 16, DIM], can be expected to be so small that softmax needs no
    # maximum: keys as long as the queries are, in directions of their own, would make scores that deviate
    # from 0 by 2 or less. Where keys are longer `held` will say so.
    squares = q.to(tl.float32) * q.to(tl.float32)
    return agreed(
        tl.sum(squares) * deviation(SCALE, DIM, q.numel // q.shape[len(q.shape) - 1]) <= 2.0
    )  # NaN is not


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def eight_times(total):
    # Sums of weights as they are kept while entries are walked: a product with ones adds to them.
    return tl.broadcast_to(total[:, None], (16, 8))


@triton.jit
def summable(total, seen):
    # Which rows of each head, one after the other, a guess was good enough for: no weight overflowed, and
    # those of a row with edges are not all tiny.
    some = (tl.reduce(seen, 0, either) >> (tl.arange(0, total.shape[0]) % 16)) & 1
    return ((total >= 2.0**-8) & (total <= 2.0**30)) | ((total == 0) & (some == 0))  # NaN is none of these


@triton.jit
def held(summable):
    # whether it was for all rows
    return agreed(tl.min(summable.to(tl.int32)) > 0)


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    # The GPU has exp2 alone, and rounding x * log2(e) would cost float32 as many bits as x is large: PRECISE
    # puts back what the product lost. Half precision would not see it.
    if x.dtype == tl.float64:
        return tl.exp(x)
    if PRECISE:  # e to the power of -200 is 0, and that of -inf would be a NaN
        x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * LOG2_E
    y = tl.exp2(t)
    if PRECISE:
        lost = tl.fma(t, 1.904654323148236e-09, tl.fma(t, -0.6931471805599453, x))  # log(2) in two pieces
        y = tl.fma(y, lost, y)
    return y


@triton.jit
def to_be_repeated(top, exact):
    # Whether a row is to be added up once more, by its maxima `top`, as 0 or 1: weights that are e to the
    # power of their scores might overflow, or those that matter be tiny, or an edge that is alone not weigh
    # 1, unless they are `exact`.
    return agreed((tl.max(tl.abs(shift_of(top))) >= 30) | (exact == 0))  # NaN is not


@triton.jit
def store_softmax(softmax_ptr, offs, mask, top, total):
    # the running maximum and sum of a row and head, what backward makes weights of, if there is one
    if softmax_ptr is not None:
        tl.store(softmax_ptr + offs * 2, shift_of(top), mask=mask)
        tl.store(softmax_ptr + offs * 2 + 1, total, mask=mask)


@triton.jit
def reciprocal(x):
    # within a unit in the last place; infinite where x is denormal
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def inverse(total):
    # 1 / total, and 0 where there was no edge. Sums of weights are not so small that a reciprocal by itself,
    # one instruction where a division is ten, would take them for 0.
    if total.dtype == tl.float32 and tl.target_info.cuda_capability_geq(8, 0):
        return tl.where(total == 0, 0.0, reciprocal(total))
    return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))


@triton.jit
def load_softmax(softmax_ptr, place, mask):
    # the maximum of what `store_softmax` stored, and 1 / sum
    top = tl.load(softmax_ptr + place * 2, mask=mask, other=0.0)
    return top, inverse(tl.load(softmax_ptr + place * 2 + 1, mask=mask, other=0.0))


@triton.jit
def slope(p, dp, delta, PRECISE: tl.constexpr):
    # Derivative of the loss in a score. Where one weight is all of a row there is none: p * (dp - delta) is
    # then the rounding error of delta, which a hub would add up.
    return tl.where(p >= (1 - 2.0**-22 if PRECISE else 1 - 2.0**-16), 0.0, p * (dp - delta))  # a NaN stays
