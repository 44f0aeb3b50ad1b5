"""A linear map over the rows of a small graph, y = x W^T + b, and its gradients, dW = left^T right and db.

A training step on a few thousand nodes is bound by the host time of its launches, and a matrix product takes
the libraries longer to launch than one of these kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import linear_shapes
from graphfuse.kernels.launch import Config
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous, dot


# y = x W^T + b.
#   grid      (cdiv(num_rows, ROWS) * blocks,): one program = ROWS rows x BLOCK_OUT columns of y
#   reads     x [num_rows, DIM], weight [OUT_DIM, DIM], any strides of weight; bias [OUT_DIM]
#   writes    y [num_rows, OUT_DIM]
#   on chip   acc ACC [PARTS, ROWS, BLOCK_OUT]: each warp sums every PARTS-th block of features, since the
#             chain of dependent products, not memory, is what a few rows wait for
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, num_rows, x_stride, weight_stride_out, weight_stride_in,
    DIM: tl.constexpr, OUT_DIM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_OUT: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    blocks = tl.cdiv(OUT_DIM, BLOCK_OUT)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    offs_out = (tl.program_id(0) % blocks) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    live, offs_row, mask_out = rows < num_rows, rows.to(tl.int64), offs_out < OUT_DIM
    part = tl.arange(0, PARTS)[:, None] * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    acc = tl.zeros((PARTS, ROWS, BLOCK_OUT), dtype=ACC)
    for first in tl.range(0, DIM, PARTS * BLOCK_DIM, num_stages=STAGES):
        offs_dim = first + part
        mask_dim = offs_dim < DIM
        x = tl.load(
            x_ptr + offs_row[None, :, None] * x_stride + offs_dim[:, None, :],
            mask=live[None, :, None] & mask_dim[:, None, :], other=0.0,
        )  # fmt: skip
        offs_weight = offs_out[None, None, :] * weight_stride_out + offs_dim[:, :, None] * weight_stride_in
        mask_weight = mask_dim[:, :, None] & mask_out[None, None, :]
        weight = tl.load(weight_ptr + offs_weight, mask=mask_weight, other=0.0)
        acc = dot(x, weight, acc, ACC)
    offs_y = offs_row[:, None] * OUT_DIM + offs_out[None, :]
    y = tl.sum(acc, 0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_out, mask=mask_out, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & mask_out[None, :])


# One slice of the rows: partial sums of left^T right, and of grad.
#   grid      (num_splits, blocks): one program = one slice x one tile [BLOCK_LEFT, BLOCK_RIGHT] of dW
#   reads     left [num_rows, LEFT], right [num_rows, RIGHT], grad [num_grads, LEFT]; SUMMED: grad is left
#   writes    partial ACC [num_splits, LEFT * RIGHT + LEFT]
#   order     rows top to bottom, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows", "num_grads", "num_splits"])
def _linear_grad_kernel(
    partial_ptr, left_ptr, right_ptr, grad_ptr, num_rows, num_grads, num_splits,
    left_stride, right_stride, grad_stride,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_LEFT: tl.constexpr, BLOCK_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, SUMMED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    split, tile = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(RIGHT, BLOCK_RIGHT)
    offs_left = (tile // blocks) * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
    offs_right = (tile % blocks) * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
    mask_left, mask_right = offs_left < LEFT, offs_right < RIGHT
    partial_ptr += split.to(tl.int64) * (LEFT * RIGHT + LEFT)
    acc = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), dtype=ACC)
    total = tl.zeros((BLOCK_LEFT,), dtype=ACC)
    length = tl.cdiv(num_rows, num_splits)
    end = tl.minimum(split * length + length, num_rows)
    for start in tl.range(split * length, end, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        live, offs_row = rows < end, rows.to(tl.int64)
        left = tl.load(  # as its transpose
            left_ptr + offs_row[None, :] * left_stride + offs_left[:, None],
            mask=live[None, :] & mask_left[:, None], other=0.0,
        )  # fmt: skip
        right = tl.load(
            right_ptr + offs_row[:, None] * right_stride + offs_right[None, :],
            mask=live[:, None] & mask_right[None, :], other=0.0,
        )  # fmt: skip
        acc = dot(left, right, acc, ACC)
        if SUMMED:
            total += tl.sum(left.to(ACC), 1)
    offs_weight = offs_left[:, None] * RIGHT + offs_right[None, :]
    tl.store(partial_ptr + offs_weight, acc, mask=mask_left[:, None] & mask_right[None, :])
    if SUMMED:
        if tile % blocks == 0:
            tl.store(partial_ptr + LEFT * RIGHT + offs_left, total, mask=mask_left)
    elif grad_ptr is not None:
        if tile % blocks == 0:
            grads = tl.cdiv(num_grads, num_splits)
            last = tl.minimum(split * grads + grads, num_grads)
            for first in tl.range(split * grads, last, ROWS):
                offs_grad = first + tl.arange(0, ROWS)
                offs = offs_grad.to(tl.int64)[:, None] * grad_stride + offs_left[None, :]
                mask = (offs_grad < last)[:, None] & mask_left[None, :]
                total += tl.sum(tl.load(grad_ptr + offs, mask=mask, other=0.0).to(ACC), 0)
            tl.store(partial_ptr + LEFT * RIGHT + offs_left, total, mask=mask_left)


# Adds the slices: partial [num_splits, LEFT * RIGHT + LEFT] to weight [LEFT, RIGHT] and bias [LEFT].
#   grid      (cdiv(LEFT * RIGHT + LEFT, BLOCK),)
@triton.jit(do_not_specialize=["num_splits"])
def _linear_grad_merge_kernel(
    weight_ptr, bias_ptr, partial_ptr, num_splits,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    # without a bias the last LEFT numbers of a slice were not written
    SIZE: tl.constexpr = LEFT * RIGHT if bias_ptr is None else LEFT * RIGHT + LEFT
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=ACC)
    for first in tl.range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        mask = (splits < num_splits)[:, None] & (offs < SIZE)[None, :]
        offs_partial = splits.to(tl.int64)[:, None] * (LEFT * RIGHT + LEFT) + offs[None, :]
        acc += tl.sum(tl.load(partial_ptr + offs_partial, mask=mask, other=0.0), 0)
    tl.store(weight_ptr + offs, acc.to(weight_ptr.dtype.element_ty), mask=offs < LEFT * RIGHT)
    if bias_ptr is not None:
        mask = (offs >= LEFT * RIGHT) & (offs < LEFT * RIGHT + LEFT)
        tl.store(bias_ptr + offs - LEFT * RIGHT, acc.to(bias_ptr.dtype.element_ty), mask=mask)


# Of launches all but the number of rows, in which the batches of a loader differ. Launch wants another for
# each kind of operands, so it matters here which there are.
@functools.lru_cache(maxsize=256)
def _launch(
    index: int,
    dtype: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, ...],
    biased: bool,
    config: Config,
) -> Launch:
    rest = (1, *strides, *shape, config.rows, config.step, config.block_dim, config.block_out)
    rest += (config.stages, accumulator(dtype))
    return Launch(_linear_kernel, 1, config.warps, (), rest)


def linear(plans: dict[Any, Any], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launches the kernel.

    Args:
        plans: Where prepared launches are kept.
        x: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        weight: ``[out_dim, dim]``, dtype of ``x``, ``out_dim`` at least 1.
        bias: ``[out_dim]``, dtype of ``x``, contiguous.

    Returns:
        ``x @ weight.T + bias``.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return linear(plans, x, weight, bias)
    out_dim, dim = weight.shape
    num_rows, strides = x.size(0), (x.stride(0), *weight.stride())
    key = ("linear", x.dtype, num_rows, dim, out_dim, strides, bias is None)
    plan = plans.get(key)
    if plan is None:
        config = linear_shapes.linear(num_rows, dim, out_dim, strides[0] * x.element_size() % 4 != 0)
        blocks = -(-num_rows // config.rows) * -(-out_dim // config.block_out)
        plan = _launch(index, x.dtype, (dim, out_dim), strides, bias is not None, config)
        plan = plans[key] = plan.resized(blocks, num_rows)
    y = x.new_empty(num_rows, out_dim)
    plan((y,), (x, weight, bias), aligned(x, weight, bias), index)
    return y


class _Plan(NamedTuple):
    num_splits: int
    main: Launch
    merge: Launch


@functools.lru_cache(maxsize=256)
def _grad_launches(
    index: int,
    dtypes: tuple[torch.dtype | None, ...],
    shape: tuple[int, int],
    strides: tuple[int, ...],
    config: Config,
    summed: bool,
) -> tuple[Launch, Launch]:
    left, right = shape
    assert dtypes[0] is not None
    acc, size = accumulator(dtypes[0]), left * (right + 1)
    blocks = -(-left // config.block_dim) * -(-right // config.block_out)
    tile = (config.block_dim, config.block_out, config.step, config.stages)
    rest = (1, 1, 1, *strides, *shape, *tile, summed, acc)
    main = Launch(_linear_grad_kernel, 1, config.warps, (), rest, groups=blocks)
    adds = linear_shapes.linear_grad_merge(size)
    return main, Launch(_linear_grad_merge_kernel, -(-size // adds[0]), 4, (), (1, *shape, *adds, acc))


def _plan(
    index: int,
    left: Tensor,
    right: Tensor,
    grad: Tensor | None,
    bias_dtype: torch.dtype | None,
) -> _Plan:
    num_rows, shape = left.size(0), (left.size(1), right.size(1))
    config = linear_shapes.linear_grad(num_rows, *shape)
    num_splits = -(-num_rows // config.rows)
    num_grads, grad_stride, grad_dtype = 0, 0, None
    if grad is not None and grad is not left:
        num_grads, grad_stride, grad_dtype = grad.size(0), grad.stride(0), grad.dtype
    strides = (left.stride(0), right.stride(0), grad_stride)
    dtypes = (left.dtype, grad_dtype, bias_dtype)
    main, merge = _grad_launches(index, dtypes, shape, strides, config, grad is left)
    main = main.resized(num_splits, num_rows, num_grads, num_splits)
    return _Plan(num_splits, main, merge.resized(None, num_splits))


def linear_grad(
    plans: dict[Any, Any],
    left: Tensor,
    right: Tensor,
    grad: Tensor | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Launches the two kernels of the gradients.

    Args:
        plans: Where prepared launches are kept.
        left: ``[num_rows, out_dim]``, contiguous features; ``num_rows`` and all widths are at least 1.
        right: ``[num_rows, dim]``, dtype of ``left``, contiguous features.
        grad: ``[num_grads, out_dim]`` with contiguous features, or None; it may be ``left``.
        bias_dtype: Dtype of the sum of ``grad``.

    Returns:
        ``left.T @ right`` and, with ``grad``, its sum over rows.
    """
    index = left.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return linear_grad(plans, left, right, grad, bias_dtype)
    addresses = left.data_ptr() | right.data_ptr()
    key: tuple[Any, ...] = (
        "linear_grad",
        left.dtype,
        left.shape,
        right.shape,
        left.stride(0),
        right.stride(0),
    )
    if grad is left:
        key += (bias_dtype,)
    elif grad is not None:
        addresses |= grad.data_ptr()
        key += (bias_dtype, grad.dtype, grad.size(0), grad.stride(0))
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(index, left, right, grad, bias_dtype if grad is not None else None)
    out_dim, dim = left.size(1), right.size(1)
    acc = torch.float64 if left.dtype == torch.float64 else torch.float32
    partial = left.new_empty(plan.num_splits, out_dim * (dim + 1), dtype=acc)
    weight = left.new_empty(out_dim, dim)
    bias = None if grad is None else left.new_empty(out_dim, dtype=bias_dtype)
    plan.main((partial,), (left, right, None if grad is left else grad), addresses & 15 == 0, index)
    plan.merge((weight, bias), (partial,), True, index)
    return weight, bias
