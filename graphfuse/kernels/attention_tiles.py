"""Pieces of the attention kernels: the graph's part of a step, the online softmax, dropout."""

import triton
import triton.language as tl


@triton.jit
def window_step(column_ptr, row_mask_ptr, copy_ptr, start, end, COLUMNS: tl.constexpr):
    # Columns, copies and valid[16, COLUMNS] of one step over the entries of a window. Beyond the end the last
    # entry is read again, so that no load needs a mask.
    offs = start + tl.arange(0, COLUMNS)
    live = offs < end
    offs = tl.minimum(offs, end - 1)
    column = tl.load(column_ptr + offs)
    bits = tl.load(row_mask_ptr + offs).to(tl.int32)
    valid = (((bits[None, :] >> tl.arange(0, 16)[:, None]) & 1) != 0) & live[None, :]
    copy = tl.zeros_like(column)
    if copy_ptr is not None:
        copy = tl.load(copy_ptr + offs)
    return column, copy, valid


@triton.jit
def kept(seed_ptr, dst, src, copy, head, DROPOUT: tl.constexpr):
    # Whether dropout keeps the weight of each edge and head: a hash that both directions compute alike.
    dst, src = tl.broadcast(dst, src)
    copy, head = tl.broadcast_to(copy, dst.shape), tl.zeros_like(dst) + head
    drawn, _, _, _ = tl.philox(tl.load(seed_ptr), dst, src, copy, head)
    return (drawn >> 8).to(tl.int32) >= int(DROPOUT * 16777216)


@triton.jit
def shift_of(top):
    # a row with no edge yet has top = -inf; shift by 0 there, so that exp(-inf) is 0 and not NaN
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def exp(x):
    # The GPU has exp2 alone, and rounding x * log2(e) would cost float32 as many bits as x is large: what the
    # product lost is put back. (Half precision would not see it.)
    if x.dtype == tl.float64:
        return tl.exp(x)
    t = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -t) + x * 1.925963033500149e-08  # log2(e) - float32(log2(e))
    y = tl.exp2(t)
    return tl.where(y > 0, y + y * (lost * 0.6931471805599453), 0.0)


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
    return tl.where(p < (1 - 2.0**-22 if PRECISE else 1 - 2.0**-16), p * (dp - delta), 0.0)
