"""The terms of nodes in GAT's scores: each head's row times one vector or two, and the gradient of that."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.columns import slices_merge
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous, sum_of_products

# The widest row, heads and their features each rounded up to a power of two, that one program holds.
MAX_WIDTH = 4096


@triton.jit
def _features(HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    # Places in [HEADS, DIM], and which exist.
    heads, dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    return heads[:, None] * DIM + dim[None, :], (heads < HEADS)[:, None] & (dim < DIM)[None, :]


@triton.jit
def _rows(
    first, last, mask_feature, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    # The rows [first, last), at most ROWS, and which features exist; places in [rows, HEADS], likewise.
    rows, heads = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_HEADS)
    live = rows < last
    mask = live[:, None, None] & mask_feature[None, :, :]
    rows = rows.to(tl.int64)
    return rows, mask, rows[:, None] * HEADS + heads[None, :], live[:, None] & (heads < HEADS)[None, :]


#   grid      (num_rows / ROWS,)
#   reads     x [num_rows, HEADS, DIM]; left and, if wanted, right [HEADS, DIM]
#   writes    of_left and of_right [num_rows, HEADS]: x left, x right, summed over features
@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    of_left_ptr, of_right_ptr, x_ptr, left_ptr, right_ptr, num_rows, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    offs_att, mask_att = _features(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    offs_row, mask, offs_head, mask_head = _rows(
        tl.program_id(0) * ROWS, num_rows, mask_att, HEADS, BLOCK_HEADS, ROWS
    )
    at = x_ptr + offs_row[:, None, None] * X_STRIDE + offs_att[None, :, :]
    x = tl.load(at, mask=mask, other=0.0).to(ACC)
    left = tl.load(left_ptr + offs_att, mask=mask_att, other=0.0).to(ACC)
    of_left = sum_of_products(x, left[None, :, :], mask, 2, DIM)
    tl.store(of_left_ptr + offs_head, of_left.to(of_left_ptr.dtype.element_ty), mask=mask_head)
    if right_ptr is not None:
        right = tl.load(right_ptr + offs_att, mask=mask_att, other=0.0).to(ACC)
        of_right = sum_of_products(x, right[None, :, :], mask, 2, DIM)
        tl.store(of_right_ptr + offs_head, of_right.to(of_right_ptr.dtype.element_ty), mask=mask_head)


#   grid      (num_slices,), slices of `length` rows
#   reads     x, left and right as forward; d_left and d_right [num_rows, HEADS], gradients of its results;
#             more [num_rows, HEADS, DIM], if there is any, what else x gets
#   writes    dx [num_rows, HEADS, DIM]; partial ACC [num_slices, 1 or 2, HEADS, DIM]: the gradients of left
#             and right, once summed over slices
@triton.jit(do_not_specialize=["num_rows", "length"])
def _logits_bwd_kernel(
    dx_ptr, partial_ptr, x_ptr, left_ptr, right_ptr, d_left_ptr, d_right_ptr, more_ptr, num_rows, length,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    begin = tl.program_id(0) * length
    last = tl.minimum(begin + length, num_rows)
    offs_att, mask_att = _features(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    left = tl.load(left_ptr + offs_att, mask=mask_att, other=0.0).to(ACC)
    of_left = tl.zeros((ROWS, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    of_right = tl.zeros((ROWS, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    if right_ptr is not None:
        right = tl.load(right_ptr + offs_att, mask=mask_att, other=0.0).to(ACC)
    for first in tl.range(begin, last, ROWS):
        offs_row, mask, offs_head, mask_head = _rows(first, last, mask_att, HEADS, BLOCK_HEADS, ROWS)
        at = x_ptr + offs_row[:, None, None] * X_STRIDE + offs_att[None, :, :]
        x = tl.load(at, mask=mask, other=0.0).to(ACC)
        d_left = tl.load(d_left_ptr + offs_head, mask=mask_head, other=0.0).to(ACC)[:, :, None]
        of_left += d_left * x
        dx = d_left * left[None, :, :]
        if right_ptr is not None:
            d_right = tl.load(d_right_ptr + offs_head, mask=mask_head, other=0.0).to(ACC)[:, :, None]
            of_right += d_right * x
            dx += d_right * right[None, :, :]
        offs = offs_row[:, None, None] * (HEADS * DIM) + offs_att[None, :, :]
        if more_ptr is not None:
            dx += tl.load(more_ptr + offs, mask=mask, other=0.0).to(ACC)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    PARTS: tl.constexpr = 1 if right_ptr is None else 2
    partial_ptr += tl.program_id(0).to(tl.int64) * PARTS * HEADS * DIM
    tl.store(partial_ptr + offs_att, tl.sum(of_left, 0), mask=mask_att)
    if right_ptr is not None:
        tl.store(partial_ptr + HEADS * DIM + offs_att, tl.sum(of_right, 0), mask=mask_att)


@functools.lru_cache(maxsize=256)
def _plan(
    backward: bool,
    index: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, int, int],
    stride: int,
    both: bool,
    added: bool,
) -> tuple[Launch, int, Launch | None]:
    # the launch, its programs, and, backward, what adds up their parts of the vectors' gradients; `added`
    # says whether x gets more than theirs
    num_rows, heads, dim = shape
    block_heads, block_dim = launch.power_of_two(heads), launch.power_of_two(dim)
    width, acc = block_heads * block_dim, accumulator(dtypes[0])
    config = launch.whole_rows(width) if backward else launch.rows_at_once(width, num_rows)
    rest = (stride, heads, dim, block_heads, block_dim, config.rows, acc)
    if not backward:
        programs = -(-num_rows // config.rows)
        return Launch(_logits_kernel, programs, config.warps, (), (num_rows, *rest)), programs, None
    length, programs = launch.row_slices(num_rows, config.rows, 2)  # whose rows are written, too
    main = Launch(_logits_bwd_kernel, programs, config.warps, (), (num_rows, length, *rest))
    return main, programs, slices_merge(programs, (1 + both) * heads * dim, acc)


def logits(x: Tensor, left: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Launches the kernel.

    Args:
        x: ``[num_rows, heads, dim]``, heads of a row contiguous, or these side by side; no size is 0.
        left: ``[..., heads, dim]``, contiguous, dtype of ``x``, or float32 where that is half precision.
        right: Likewise.

    Returns:
        The sums of ``x * left`` and, if there is one, ``x * right`` over features, ``[num_rows, heads]``,
        in the dtype of ``left``.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return logits(x, left, right)
    dtypes, shape = (x.dtype, left.dtype), (x.size(0), left.size(-2), left.size(-1))
    of_left = left.new_empty(*shape[:2])
    of_right = None if right is None else left.new_empty(*shape[:2])
    plan, *_ = _plan(False, index, dtypes, shape, x.stride(0), right is not None, False)
    plan((of_left, of_right), (x, left, right), aligned(x, left, right), index)
    return of_left, of_right


def logits_bwd(
    x: Tensor,
    left: Tensor,
    right: Tensor | None,
    d_left: Tensor,
    d_right: Tensor | None,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels of the gradients: that of ``x``, and those of ``left`` and ``right`` side by side.

    Args:
        x: As in :func:`logits`.
        left: As in :func:`logits`.
        right: As in :func:`logits`.
        d_left: Gradient of the first result, contiguous.
        d_right: Of the second, if there is one, likewise.
        more: What to add to the gradient of ``x``, contiguous: it becomes that gradient.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return logits_bwd(x, left, right, d_left, d_right, more)
    dtypes, shape = (x.dtype, left.dtype), (x.size(0), left.size(-2), left.size(-1))
    given = (right is not None, more is not None)
    plan, programs, merge = _plan(True, index, dtypes, shape, x.stride(0), *given)
    assert merge is not None
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    dx = x.new_empty(*x.shape) if more is None else more
    vectors = left.new_empty(1 if right is None else 2, *left.shape)
    partial = x.new_empty(programs, *vectors.shape, dtype=acc)
    operands = (x, left, right, d_left, d_right, more)
    plan((dx, partial), operands, aligned(*operands), index)
    merge((vectors,), (partial,), True, index)
    return dx, vectors
