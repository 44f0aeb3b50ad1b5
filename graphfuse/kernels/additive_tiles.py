"""Pieces of the kernels of additive attention: the LeakyReLU, what receivers are known by, the results."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import LOG2_E, exp, inverse, slope, store_softmax


@triton.jit
def leaky(u, SLOPE: tl.constexpr):
    # a maximum is one instruction where a choice is two; of a slope of 0 it would make a number of -inf * 0
    return tl.maximum(u, u * SLOPE) if SLOPE > 0 and SLOPE <= 1 else tl.where(u > 0, u, u * SLOPE)


@triton.jit
def leaky_slope(u, SLOPE: tl.constexpr):
    return tl.where(u > 0, 1.0, SLOPE)


@triton.jit
def exponent_rate(u, SLOPE: tl.constexpr):
    # the slope of the exponent, times log2(e)
    return tl.where(u > 0, LOG2_E, LOG2_E * SLOPE)


@triton.jit
def exponent(u, SLOPE: tl.constexpr):
    # the LeakyReLU of u, as an exponent of 2
    return u * exponent_rate(u, SLOPE)


@triton.jit
def load_copies(copy_ptr, offs, live):
    copy = tl.zeros_like(offs)
    if copy_ptr is not None:
        copy = tl.load(copy_ptr + offs, mask=live, other=0)
    return copy


@triton.jit
def shares(total, high):
    # 1 / total, high / total, and whether the LeakyReLU bends no score of a row, or all (high is total):
    # there is no tilt then, and the difference would be but rounding.
    norm = inverse(total)
    return norm, high * norm, high == total


@triton.jit
def store_features(
    out_ptr, tilt_ptr, sum_ptr, bias_ptr, at, mask, at_bias, norm, bent, straight, acc, tilt,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    # Stores out = acc * norm and, if wanted, out + bias and tilt * norm - bent * out; `shares` made norm,
    # bent and straight, which are broadcast to the sums.
    norm /= 1.0 - DROPOUT
    out = acc * norm
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
    if sum_ptr is not None:
        at_bias = tl.broadcast_to(at_bias, out.shape)
        its_sum = out + tl.load(bias_ptr + at_bias, mask=mask, other=0.0).to(out.dtype)
        tl.store(sum_ptr + at, its_sum.to(sum_ptr.dtype.element_ty), mask=mask)
    if tilt_ptr is not None:
        tilt = tl.where(straight, 0.0, tilt * norm - bent * out)
        tl.store(tilt_ptr + at, tilt.to(tilt_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, bias_ptr, place, mask, at, mask_own, at_bias, top, total, high,
    acc, tilt, DROPOUT: tl.constexpr,
):  # fmt: skip
    # Stores the softmax and the features of rows and heads.
    norm, bent, straight = shares(total, high)
    store_softmax(softmax_ptr, place, mask, top, total)
    store_features(
        out_ptr, tilt_ptr, sum_ptr, bias_ptr, at, mask_own, at_bias, norm[:, None], bent[:, None],
        straight[:, None], acc, tilt, DROPOUT,
    )  # fmt: skip


@triton.jit
def load_stats(stats_ptr, place, mask):
    # (shift, norm, delta, a_dst) of receivers, as the delta kernel stored them
    at = stats_ptr + place * 4
    shift = tl.load(at, mask=mask, other=0.0)
    norm = tl.load(at + 1, mask=mask, other=0.0)
    delta = tl.load(at + 2, mask=mask, other=0.0)
    return shift, norm, delta, tl.load(at + 3, mask=mask, other=0.0)


@triton.jit
def slopes(s, live, dp, shift, norm, delta, factor, PRECISE: tl.constexpr):
    # The derivative in the score s, and the weight as dropout left it; dp has been multiplied with `factor`.
    # Where the softmax sums to 1 an edge is all of its row: it must weigh 1 even if its score was added up in
    # another order than the maximum was.
    p = exp(tl.where(live, s, float("-inf")) - shift, PRECISE)
    p = tl.where((norm == 1) & (p > 0.5), 1.0, p * norm) if PRECISE else p
    return tl.where(live, slope(p, dp, delta, PRECISE), 0.0), p * factor
