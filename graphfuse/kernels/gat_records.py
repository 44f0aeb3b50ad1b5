"""What GAT's backward by factors knows of a receiver: a record of GROUP heads, in one access or two."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import LOG2_E
from graphfuse.kernels.tiles import nothing, quads_apart

# A record, GROUP numbers of each kind after the other, of 32 bits or two of half precision:
#   LSE
#   factors of u > 0, and of others
#   delta, as two numbers that add up to it
#   a_dst, in half precision those of all heads and as much again of nothing
# Before the records of receivers stand centres, from which numbers of sources count, in the first number of
# each head.
# Sources whose numbers are farther than this from the centre have weights made one by one: receivers' factors
# are at most e to the power of it, times two to the power of the other, in half precision.
NEAR, GREATER = tl.constexpr(6.0), tl.constexpr(6.0)
_SAMPLES = tl.constexpr(8)


@triton.jit
def centre_of(a_src_ptr, head, num_cols, HEADS: tl.constexpr, ACC: tl.constexpr):
    # What numbers of sources are about, for each of `head`: the mean of a few but the least and the greatest,
    # the same wherever it is made.
    total = tl.zeros(head.shape, dtype=ACC)
    least, greatest = total + float("inf"), total - float("inf")
    for nth in tl.static_range(_SAMPLES):
        node = tl.cast(num_cols // _SAMPLES, tl.int64) * nth
        number = tl.load(a_src_ptr + node * HEADS + head, mask=head < num_cols * HEADS, other=0.0).to(ACC)
        total += number
        least, greatest = tl.minimum(least, number), tl.maximum(greatest, number)
    return (total - least - greatest) * (1.0 / (_SAMPLES - 2))


@triton.jit
def _packed(low, high):
    # two numbers of half precision as one of 32 bits
    low, high = low.to(tl.uint16, bitcast=True).to(tl.uint32), high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)


@triton.jit
def store_records(
    stats_ptr, place, live, lse, delta, own, centre, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SLOPE: tl.constexpr, HALF: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    # Of receivers and heads, of which GROUP are a record; numbers of nodes are of the type NUMBER.
    u, shift = own + centre, lse * LOG2_E - GREATER
    factors = _packed(tl.exp2(u * LOG2_E - shift).to(HALF), tl.exp2(u * (LOG2_E * SLOPE) - shift).to(HALF))
    high = delta.to(HALF)
    pieces = _packed(high, (delta - high.to(delta.dtype)).to(HALF))
    tl.store(stats_ptr + place * 4, centre, mask=live & (place < HEADS))
    at, nth = stats_ptr + (4 * HEADS + place // GROUP * (4 * GROUP)), place % GROUP
    words = at.to(tl.pointer_type(tl.uint32))
    tl.store(at + nth, lse, mask=live)
    tl.store(words + (GROUP + nth), factors, mask=live)
    tl.store(words + (2 * GROUP + nth), pieces, mask=live)
    tl.store((at + 3 * GROUP).to(tl.pointer_type(NUMBER)) + nth, own.to(NUMBER), mask=live)


@triton.jit
def load_known(
    stats_ptr, place, mask, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    NUMBER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # (LSE, delta, a_dst) of receivers and heads
    at, nth = stats_ptr + (4 * HEADS + place // GROUP * (4 * GROUP)), place % GROUP
    halves, numbers = at.to(tl.pointer_type(HALF)), (at + 3 * GROUP).to(tl.pointer_type(NUMBER))
    lse = tl.load(at + nth, mask=mask, other=0.0)
    high = tl.load(halves + (4 * GROUP + nth * 2), mask=mask, other=0.0).to(ACC)
    delta = high + tl.load(halves + (4 * GROUP + 1 + nth * 2), mask=mask, other=0.0).to(ACC)
    return lse, delta, tl.load(numbers + nth, mask=mask, other=0.0).to(ACC)


@triton.jit
def load_centre(stats_ptr, head):
    # of one head
    return tl.load(stats_ptr + head * 4)


@triton.jit
def records_of_columns(
    stats_ptr, column, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    NUMBER: tl.constexpr,
):  # fmt: skip
    # Of receivers and the GROUP heads from `head` on: (pieces, factors of u > 0, those of others, a_dst), of
    # all heads together what `of_pieces` knows, [COLUMNS, ..], and of each head the others, [1, COLUMNS].
    place = column.to(tl.int64) * HEADS + (HEADS + head)
    at = (stats_ptr + (place * 4)[:, None]).to(tl.pointer_type(HALF))
    COLUMNS: tl.constexpr = column.shape[0]
    if GROUP == 4:
        # L1 is asked twice for a record of 64 bytes, or its factors would all lie in the same few banks.
        factors = tl.load(at + (2 * GROUP + tl.arange(0, 2 * GROUP))[None, :])
        pieces = tl.load(at + (4 * GROUP + tl.arange(0, 4 * GROUP))[None, :])
        _pieces, rest = tl.split(tl.permute(pieces.reshape(COLUMNS, 2, 2 * GROUP), (0, 2, 1)))
    else:
        pieces = tl.load(at + tl.arange(0, 8 * GROUP)[None, :])
        kinds = tl.permute(pieces.reshape(COLUMNS, 4, 2 * GROUP), (0, 2, 1))
        _top, factors, _pieces, rest = quads_apart(kinds)
    first, second = tl.split(factors.reshape(COLUMNS, GROUP, 2))
    if NUMBER == HALF:
        numbers, _nothing = tl.split(tl.permute(rest.reshape(COLUMNS, 2, GROUP), (0, 2, 1)))
    else:
        low, high = tl.split(rest.reshape(COLUMNS, GROUP, 2))
        numbers = _packed(low, high).to(NUMBER, bitcast=True)
    return pieces, _of_heads(first), _of_heads(second), _of_heads(numbers)


@triton.jit
def _of_heads(numbers):
    # of [COLUMNS, GROUP], those of each head: [1, COLUMNS]
    apart = nothing()
    if numbers.shape[1] == 4:
        a, b, c, d = quads_apart(numbers)
        apart += (a[None, :], b[None, :], c[None, :], d[None, :])
    elif numbers.shape[1] == 2:
        first, second = tl.split(numbers)
        apart += (first[None, :], second[None, :])
    else:
        apart += (numbers.reshape(1, numbers.shape[0]),)
    return apart


@triton.jit
def no_pieces(GROUP: tl.constexpr, ACC: tl.constexpr):
    # where sums of `pieces` begin
    return tl.zeros((16, 4 * GROUP if GROUP == 4 else 8 * GROUP), dtype=ACC)


@triton.jit
def of_pieces(sums, g: tl.constexpr, GROUP: tl.constexpr):
    # of such sums that of delta of a head
    nth = tl.arange(0, sums.shape[1]) // 2 - (0 if GROUP == 4 else 2 * GROUP)
    return tl.sum(tl.where((nth == g)[None, :], sums, 0.0), 1)
