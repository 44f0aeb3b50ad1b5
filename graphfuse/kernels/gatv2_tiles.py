r"""GATv2's sums over the edges of a row on tensor cores, in half precision.

The score of an edge, :math:`a^\top \ell(u)` with :math:`u = x_j + y_i`, is no product of two nodes' rows. But
:math:`\ell(u) = \lambda u + (1 - \lambda) \max(u, 0)`, with the LeakyReLU's slope :math:`\lambda`: over the
edges of one row scores are products of two tiles [edges, features], :math:`x` and :math:`\max(u, 0)`, with
matrices that have :math:`a` of each head in a column of its own and 0 elsewhere; what :math:`y` adds is a
number for each head. The sum and the maximum alone are left to plain arithmetic, two features an instruction.

Other heads' zeros turn a NaN or Inf into NaN, which would reach heads that it must not reach. So each of
these functions also says whether all its sums are finite; if not, the row is summed edge by edge instead.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import load_copies, load_stats, slopes
from graphfuse.kernels.attention_tiles import exp, kept, key_of, of_copy, shift_of
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.tiles import dot, finite

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.constexpr_function
def columns_of(block_heads):
    # heads, and columns of zeros up to what a tensor core takes
    return max(8, block_heads)


@triton.jit
def features_of(
    first, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    # Of BLOCK_HEADS heads from `first` on, side by side: where each feature stands in a row of all heads,
    # whether it exists, and in which column its head is.
    place = tl.arange(0, BLOCK_HEADS * BLOCK_DIM)
    head, dim = first + place // BLOCK_DIM, place % BLOCK_DIM
    mine = (place // BLOCK_DIM)[:, None] == tl.arange(0, columns_of(BLOCK_HEADS))[None, :]
    return head * DIM + dim, (head < HEADS) & (dim < DIM), mine


@triton.jit
def by_head(x, mine):
    # x[features] with each head in its column
    return tl.where(mine, x[:, None], 0.0).to(x.dtype)


@triton.jit
def gathered(x, mine, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    # what `by_head` made wide, and products left so, as [BLOCK_HEADS, BLOCK_DIM]
    return tl.sum(tl.where(mine, x, 0.0), 1).reshape(BLOCK_HEADS, BLOCK_DIM)


@triton.jit
def of_heads(x, BLOCK_HEADS: tl.constexpr):
    # x[columns] without those of no head
    columns = tl.arange(0, columns_of(BLOCK_HEADS))
    same = tl.arange(0, BLOCK_HEADS)[:, None] == columns[None, :]
    return tl.sum(tl.where(same, x[None, :], 0.0), 1)


@triton.jit
def widened(x):
    # the interpreter would compute with the bits of a bfloat16
    if _INTERPRETING and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def above_zero(x, own):
    # u = x + own and max(u, 0); a NaN of u is one of x, or of own, which scores see too
    u = widened((widened(x) + widened(own)).to(x.dtype))
    return u, tl.where(u > 0, u, 0.0).to(x.dtype)


@triton.jit
def score_operands(att, own, mine, SLOPE: tl.constexpr, ACC: tl.constexpr):
    # What x and max(u, 0) are multiplied with, and what own adds to the score of each head.
    wide = by_head(att, mine).to(ACC)
    constant = tl.sum(wide * own.to(ACC)[:, None], 0) * SLOPE
    return (wide * SLOPE).to(att.dtype), (wide * (1.0 - SLOPE)).to(att.dtype), constant


@triton.jit
def softmax_sums(
    column_ptr, copy_ptr, own_ptr, att_ptr, x_ptr, seed_ptr, row, begin, end, first, X_STRIDE: tl.constexpr,
    OWN_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Maximum and sum of the softmax [BLOCK_HEADS], sums of x [BLOCK_HEADS, BLOCK_DIM], and if all is finite.
    COLUMNS: tl.constexpr = columns_of(BLOCK_HEADS)
    offs, mask, mine = features_of(first, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    heads = first + tl.arange(0, COLUMNS)[None, :]
    own = tl.load(own_ptr + tl.cast(row, tl.int64) * OWN_STRIDE + offs, mask=mask, other=0.0)
    att = tl.load(att_ptr + offs, mask=mask, other=0.0)
    flat, steep, constant = score_operands(att, own, mine, SLOPE, ACC)
    top = tl.full((COLUMNS,), float("-inf"), dtype=ACC)
    total = tl.zeros((COLUMNS,), dtype=ACC)
    acc = tl.zeros((BLOCK_HEADS * BLOCK_DIM, COLUMNS), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads) + row, heads, False)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        place = start + tl.arange(0, EDGES)
        live = place < end
        place = tl.minimum(place, end - 1)  # no other row's NaN enters
        column = tl.load(column_ptr + place)
        if LOOPS:
            live = live & (column != row)
        offs_x = column[:, None].to(tl.int64) * X_STRIDE + offs[None, :]
        x = tl.load(x_ptr + offs_x, mask=mask[None, :], other=0.0)
        _, above = above_zero(x, own[None, :])
        s = tl.where(live[:, None], constant[None, :], float("-inf"))
        s = dot(above, steep, dot(x, flat, s, ACC), ACC)
        higher = tl.maximum(top, tl.max(s, 0))
        shift = shift_of(higher)
        p = exp(s - shift[None, :], False)
        rescale = exp(top - shift, False)
        total = total * rescale + tl.sum(p, 0)
        if DROPOUT > 0:
            copy = load_copies(copy_ptr, place, live)
            other_key = of_copy(key_of(seed_ptr, column[:, None], 0, True), copy[:, None])
            p *= kept(own_key, other_key, DROPOUT, 1.0)
        acc = dot(tl.trans(x), p.to(x.dtype), acc * rescale[None, :], ACC)
        top = higher
    fine = finite(acc)
    acc = gathered(acc, mine, BLOCK_HEADS, BLOCK_DIM)
    return of_heads(top, BLOCK_HEADS), of_heads(total, BLOCK_HEADS), acc, fine


@triton.jit
def gradient_sums(
    column_ptr, copy_ptr, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, stats_ptr, seed_ptr, row, begin, end,
    first, SRC_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # `scored` and, TRANSPOSED, `summed` of the kernel's loop, [BLOCK_HEADS, BLOCK_DIM], and if all is finite.
    COLUMNS: tl.constexpr = columns_of(BLOCK_HEADS)
    WIDTH: tl.constexpr = BLOCK_HEADS * BLOCK_DIM
    offs, mask, mine = features_of(first, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    heads = first + tl.arange(0, COLUMNS)[None, :]
    offs_row = tl.cast(row, tl.int64)
    if TRANSPOSED:
        own = tl.load(x_src_ptr + offs_row * SRC_STRIDE + offs, mask=mask, other=0.0)
        right = by_head(own, mine)
    else:
        own = tl.load(x_dst_ptr + offs_row * DST_STRIDE + offs, mask=mask, other=0.0)
        right = by_head(tl.load(grad_ptr + offs_row * GRAD_STRIDE + offs, mask=mask, other=0.0), mine)
        shift, norm, delta, _ = load_stats(stats_ptr, offs_row * HEADS + heads, heads < HEADS)
    att = tl.load(att_ptr + offs, mask=mask, other=0.0)
    flat, steep, constant = score_operands(att, own, mine, SLOPE, ACC)
    unbent = tl.zeros((WIDTH, COLUMNS), dtype=ACC)  # sums of ds where u > 0
    summed = tl.zeros((WIDTH, COLUMNS), dtype=ACC)
    total = tl.zeros((COLUMNS,), dtype=ACC)  # of all ds
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads) + row, heads, TRANSPOSED)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        place = start + tl.arange(0, EDGES)
        live = place < end
        place = tl.minimum(place, end - 1)
        column = tl.load(column_ptr + place)
        if LOOPS:
            live = live & (column != row)
        offs_other = column[:, None].to(tl.int64)
        mask_edge = live[:, None] & (heads < HEADS)
        if TRANSPOSED:
            at = x_dst_ptr + offs_other * DST_STRIDE + offs[None, :]
            other = tl.load(at, mask=mask[None, :], other=0.0)
            at = grad_ptr + offs_other * GRAD_STRIDE + offs[None, :]
            left = tl.load(at, mask=mask[None, :], other=0.0)
            shift, norm, delta, _ = load_stats(stats_ptr, offs_other * HEADS + heads, mask_edge)
        else:
            at = x_src_ptr + offs_other * SRC_STRIDE + offs[None, :]
            other = tl.load(at, mask=mask[None, :], other=0.0)
            left = other
        u, above = above_zero(other, own[None, :])
        s = tl.broadcast_to(constant[None, :], (EDGES, COLUMNS))
        s = dot(above, steep, dot(other, flat, s, ACC), ACC)
        dp = dot(left, right, tl.zeros((EDGES, COLUMNS), dtype=ACC), ACC)
        factor = tl.full((EDGES, COLUMNS), 1.0, dtype=ACC)
        if DROPOUT > 0:
            copy = load_copies(copy_ptr, place, live)
            other_key = key_of(seed_ptr, column[:, None], heads, not TRANSPOSED)
            factor = kept(own_key, of_copy(other_key, copy[:, None]), DROPOUT, 1.0 / (1.0 - DROPOUT))
        ds, dropped = slopes(s, mask_edge, dp * factor, shift, norm, delta, factor, False)
        ds = ds.to(other.dtype)
        total += tl.sum(ds.to(ACC), 0)
        unbent = dot(tl.trans(tl.where(u > 0, 1.0, 0.0).to(other.dtype)), ds, unbent, ACC)
        if TRANSPOSED:
            summed = dot(tl.trans(left), dropped.to(other.dtype), summed, ACC)
    scored = SLOPE * total[None, :] + (1.0 - SLOPE) * unbent
    fine = finite(scored) & finite(summed)
    scored = gathered(scored, mine, BLOCK_HEADS, BLOCK_DIM)
    return scored, gathered(summed, mine, BLOCK_HEADS, BLOCK_DIM), fine
