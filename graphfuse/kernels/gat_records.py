"""What GAT's backward by factors knows of four heads of a receiver: 64 bytes, for which L1 is asked once."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import LOG2_E
from graphfuse.kernels.tiles import quads_apart

# Of a receiver and four heads, side by side, in numbers of 32 bits or pairs of half precision:
#   0 to 3    the LSE of each
#   4 to 7    its factors, of u > 0 and of others, with each head
#   8 to 11   delta of each as two numbers that add up to it
#   12, 13    a_dst of all four, and 14, 15 the centre from which sources count
_SIZE = tl.constexpr(16)
# Sources whose numbers are farther than this from the centre have weights made one by one: receivers' factors
# are at most e to the power of it, times two to the power of the other, in half precision.
NEAR, GREATER = tl.constexpr(6.0), tl.constexpr(6.0)
_SAMPLES = tl.constexpr(8)


@triton.jit
def centre_of(a_src_ptr, head, num_cols, HEADS: tl.constexpr, ACC: tl.constexpr):
    # What numbers of sources are about, for each of `head`: the mean of a few, the same wherever it is made.
    node = tl.arange(0, _SAMPLES) * (num_cols // _SAMPLES)
    at = a_src_ptr + node.to(tl.int64)[None, :] * HEADS + head[:, None]
    number = tl.load(at, mask=(node < num_cols)[None, :], other=0.0)
    return (tl.sum(number.to(ACC), 1) * (1.0 / _SAMPLES)).to(a_src_ptr.dtype.element_ty)


@triton.jit
def _packed(low, high):
    # two numbers of half precision as one of 32 bits
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def _in_pairs(numbers, FOURS: tl.constexpr):
    # of four heads, two to a word
    first, second = tl.split(numbers.reshape(FOURS, 2, 2))
    return _packed(first, second)


@triton.jit
def store_records(ptr, place, live, lse, delta, own, centre, SLOPE: tl.constexpr):
    # Of consecutive receivers and heads, of which four are a record.
    HALF: tl.constexpr = centre.dtype
    FOURS: tl.constexpr = lse.shape[0] // 4
    u, shift = own + centre.to(own.dtype), lse * LOG2_E - GREATER
    factors = _packed(tl.exp2(u * LOG2_E - shift).to(HALF), tl.exp2(u * (LOG2_E * SLOPE) - shift).to(HALF))
    high = delta.to(HALF)
    pieces = _packed(high, (delta - high.to(delta.dtype)).to(HALF))
    rest = tl.join(_in_pairs(own.to(HALF), FOURS), _in_pairs(centre, FOURS))
    rest = tl.permute(rest, (0, 2, 1)).reshape(FOURS, 4)
    top = lse.to(tl.uint32, bitcast=True).reshape(FOURS, 4)
    quads = tl.join(
        tl.join(top, pieces.reshape(FOURS, 4)), tl.join(factors.reshape(FOURS, 4), rest)
    ).reshape(FOURS, 4, 4)
    at = ptr.to(tl.pointer_type(tl.uint32)) + tl.min(place.reshape(FOURS, 4), 1)[:, None, None] * (_SIZE // 4)
    at += tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    whole = tl.min(live.reshape(FOURS, 4).to(tl.int32), 1) > 0
    tl.store(at, tl.permute(quads, (0, 2, 1)), mask=whole[:, None, None])


@triton.jit
def load_known(stats_ptr, place, mask, HALF: tl.constexpr, ACC: tl.constexpr):
    # (LSE, delta, a_dst) of receivers and heads
    at, nth = stats_ptr + place // 4 * _SIZE, place % 4
    halves = at.to(tl.pointer_type(HALF))
    lse = tl.load(at + nth, mask=mask, other=0.0)
    high = tl.load(halves + (16 + nth * 2), mask=mask, other=0.0).to(ACC)
    delta = high + tl.load(halves + (17 + nth * 2), mask=mask, other=0.0).to(ACC)
    return lse, delta, tl.load(halves + (24 + nth), mask=mask, other=0.0).to(ACC)


@triton.jit
def load_centre(stats_ptr, head, HALF: tl.constexpr, ACC: tl.constexpr):
    # of one head, which every record has
    return tl.load((stats_ptr + head // 4 * _SIZE).to(tl.pointer_type(HALF)) + (28 + head % 4)).to(ACC)


@triton.jit
def records_of_columns(stats_ptr, column, head, HEADS: tl.constexpr, HALF: tl.constexpr):
    # Of receivers and the four heads from `head` on: the records, [COLUMNS, 32] of half precision; factors of
    # u > 0, those of others and a_dst of each head, [1, COLUMNS].
    at = stats_ptr + ((column.to(tl.int64) * HEADS + head) * (_SIZE // 4))[:, None]
    records = tl.load(at.to(tl.pointer_type(HALF)) + tl.arange(0, 2 * _SIZE)[None, :])
    COLUMNS: tl.constexpr = records.shape[0]
    _top, factors, _pieces, rest = quads_apart(tl.permute(records.reshape(COLUMNS, 4, 8), (0, 2, 1)))
    first, second = tl.split(factors.reshape(COLUMNS, 4, 2))
    numbers, _centre = tl.split(tl.permute(rest.reshape(COLUMNS, 2, 4), (0, 2, 1)))
    return records, _of_heads(first), _of_heads(second), _of_heads(numbers)


@triton.jit
def _of_heads(numbers):
    # of [COLUMNS, 4], those of each head: [1, COLUMNS]
    a, b, c, d = quads_apart(numbers)
    return a[None, :], b[None, :], c[None, :], d[None, :]


@triton.jit
def of_pieces(sums, g: tl.constexpr):
    # of sums of records, [16, 32], that of delta of a head
    return tl.sum(tl.where((tl.arange(0, 2 * _SIZE) // 2 == 8 + g)[None, :], sums, 0.0), 1)
