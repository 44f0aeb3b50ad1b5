"""Pieces of the attention kernels: the graph's part of a step, the online softmax, dropout."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def rate_of(scale):
    # what an unscaled score, its sign apart, is multiplied with to be an exponent of 2
    return (abs(scale) if scale != 0 else 1.0) * 1.4426950408889634


@triton.jit
def group_tile(
    window, head, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    # The GROUP * 16 rows of a tile, below each other for each head from `head` on: node, place in the window
    # and head of each; which columns of the group's rows exist, and which of them are a tile row's own.
    place, offs_dim = tl.arange(0, GROUP * 16), tl.arange(0, BLOCK_DIM)
    inner = place % 16
    mask_dim = offs_dim < GROUP * DIM
    if HEADS % GROUP != 0:
        mask_dim = mask_dim & (offs_dim < (HEADS - head) * DIM)
    own = ((offs_dim // DIM)[None, :] == (place // 16)[:, None]) & mask_dim[None, :]
    return window * 16 + inner, inner, head + place // 16, mask_dim, own


@triton.jit
def signed(x, SCALE: tl.constexpr):
    # x times the sign of SCALE, so that a maximum can be taken before scores are scaled
    if SCALE < 0:
        x = -x
    if SCALE == 0:
        x = tl.zeros_like(x)
    return x


@triton.jit
def load_bits(row_mask_ptr, start, end, COLUMNS: tl.constexpr):
    # The row masks of one step, 0 beyond the end; loaded a step ahead, as Triton pipelines no such load.
    offs = start + tl.arange(0, COLUMNS)
    return tl.load(row_mask_ptr + offs, mask=offs < end, other=0)


@triton.jit
def window_step(column_ptr, copy_ptr, start, end, bits, inner, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    # One step over the entries of a window, whose rows have the places `inner` in it: columns, copies, and
    # outside[rows, COLUMNS], 0 for an edge and -inf for none, to start a sum of scores from. Beyond the end
    # the last column is read again, and no row uses it.
    offs = tl.minimum(start + tl.arange(0, COLUMNS), end - 1)
    column = tl.load(column_ptr + offs)
    valid = ((bits.to(tl.int32)[None, :] >> inner[:, None]) & 1) != 0
    copy = tl.zeros_like(column)
    if copy_ptr is not None:
        copy = tl.load(copy_ptr + offs)
    return column, copy, tl.where(valid, 0.0, float("-inf")).to(ACC)


@triton.jit
def of_receivers(pair_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    # The pairs (LSE, delta) of the receivers in `column`, for each row of a tile that `group_tile` describes;
    # a pair is one load of 8 bytes.
    group = tl.arange(0, GROUP)[:, None]
    pairs = pair_ptr.to(tl.pointer_type(tl.int64)) + column[None, :].to(tl.int64) * HEADS + head + group
    mask = None if HEADS % GROUP == 0 else head + group < HEADS
    pair = tl.load(pairs, mask=mask)
    lse = pair.to(tl.int32).to(tl.float32, bitcast=True)
    delta = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return per_row(lse, GROUP, COLUMNS), per_row(delta, GROUP, COLUMNS)


@triton.jit
def per_row(x, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    # x[GROUP, COLUMNS] as [rows, COLUMNS], the 16 rows of a head alike
    if GROUP > 1:
        x = tl.broadcast_to(x[:, None, :], (GROUP, 16, COLUMNS)).reshape(GROUP * 16, COLUMNS)
    return x


@triton.constexpr_function
def threshold(dropout):
    # draws of 16 bits below this are dropped
    return round(dropout * 65536)


@triton.jit
def kept(seed_ptr, dst, src, copy, head, DROPOUT: tl.constexpr):
    # Whether dropout keeps the weight of each edge and head: a hash that both directions compute alike. One
    # Philox of 7 rounds draws 16 bits for each of 4 receivers and 2 sources.
    dst, src = tl.broadcast(dst, src)
    copy, head = tl.broadcast_to(copy, dst.shape), tl.zeros_like(dst) + head
    a, b, c, d = tl.philox(tl.load(seed_ptr), dst >> 2, src >> 1, copy, head, 7)
    word = _one_of(dst & 3, a, b, c, d)
    return ((word >> ((src & 1) * 16).to(word.dtype)) & 0xFFFF).to(tl.int32) >= threshold(DROPOUT)


@triton.jit
def _one_of(which, a, b, c, d):
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def kept_tile(
    seed_ptr, window, column, copy, head, TRANSPOSED: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    # `kept` for a tile that `group_tile` describes, with one Philox for the neighbours among its rows, which
    # are receivers or, TRANSPOSED, sources.
    NEIGHBOURS: tl.constexpr = 2 if TRANSPOSED else 4
    HEIGHT: tl.constexpr = 16 // NEIGHBOURS
    place = tl.arange(0, GROUP * HEIGHT)
    rows = tl.broadcast_to((window * HEIGHT + place % HEIGHT)[:, None], (GROUP * HEIGHT, COLUMNS))
    heads = tl.broadcast_to((head + place // HEIGHT)[:, None], rows.shape)
    copy = tl.broadcast_to(copy[None, :], rows.shape)
    column = tl.broadcast_to(column[None, :], rows.shape)
    seed = tl.load(seed_ptr)
    if TRANSPOSED:
        a, b, c, d = tl.philox(seed, column >> 2, rows, copy, heads, 7)
        word = _one_of(column & 3, a, b, c, d)
        drawn = tl.join((word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32) & 0xFFFF)
        drawn = tl.permute(drawn, (0, 2, 1))
    else:
        a, b, c, d = tl.philox(seed, rows, column >> 1, copy, heads, 7)
        shift = ((column & 1) * 16).to(a.dtype)
        drawn = tl.join(tl.join(a >> shift, c >> shift), tl.join(b >> shift, d >> shift))
        drawn = tl.permute(drawn.to(tl.int32) & 0xFFFF, (0, 2, 3, 1))
    return (drawn >= threshold(DROPOUT)).reshape(GROUP * 16, COLUMNS)


@triton.jit
def shift_of(top):
    # a row with no edge yet has top = -inf; shift by 0 there, so that exp(-inf) is 0 and not NaN
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def exp(x, PRECISE: tl.constexpr):
    # The GPU has exp2 alone, and rounding x * log2(e) would cost float32 as many bits as x is large: PRECISE
    # puts back what the product lost. Half precision would not see it.
    if x.dtype == tl.float64:
        return tl.exp(x)
    t = x * LOG2_E
    y = tl.exp2(t)
    if PRECISE:
        lost = tl.fma(x, LOG2_E, -t) + x * 1.925963033500149e-08  # log2(e) - float32(log2(e))
        y = tl.where(y == 0, 0.0, y + y * (lost * 0.6931471805599453))  # a NaN stays
    return y


@triton.jit
def store_softmax(softmax_ptr, offs, mask, top, total):
    # the running maximum and sum of a row and head: what weights are made of, in backward too
    tl.store(softmax_ptr + offs * 2, shift_of(top), mask=mask)
    tl.store(softmax_ptr + offs * 2 + 1, total, mask=mask)


@triton.jit
def inverse(total):
    # 1 / total, and 0 where there was no edge
    return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))


@triton.jit
def slope(p, dp, delta, PRECISE: tl.constexpr):
    # Derivative of the loss in a score. Where one weight is all of a row there is none: p * (dp - delta) is
    # then the rounding error of delta, which a hub would add up.
    return tl.where(p >= (1 - 2.0**-22 if PRECISE else 1 - 2.0**-16), 0.0, p * (dp - delta))  # a NaN stays
