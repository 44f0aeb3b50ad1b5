"""Rows divided by their lengths, times a number, and the gradient of that."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous


@triton.jit
def _length(x, LEAST: tl.constexpr, ACC: tl.constexpr):
    # correctly rounded, as |x| / |x| is 1 then: where rows are one number wide gradients cancel exactly
    square = tl.sum(x * x, 1)
    length = tl.sqrt(square) if x.dtype == tl.float64 else tl.sqrt_rn(square)
    return tl.where(length < LEAST, LEAST, length)  # a NaN stays


@triton.jit
def _over(x, length, ACC: tl.constexpr):
    length = tl.broadcast_to(length[:, None], x.shape)
    return x / length if x.dtype == tl.float64 else tl.div_rn(x, length)


@triton.jit
def _tile(num_rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr):
    rows, offs_dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & (offs_dim < DIM)[None, :]
    return rows, rows.to(tl.int64)[:, None], offs_dim[None, :], mask


#   grid      (num_rows / ROWS,)
#   reads     x [num_rows, DIM], factor [1]
#   writes    scaled [num_rows, DIM]: factor x / |x|; inverse ACC [num_rows]: 1 / |x|
@triton.jit(do_not_specialize=["num_rows"])
def _unit_rows_kernel(
    scaled_ptr, inverse_ptr, x_ptr, factor_ptr, num_rows, X_STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    rows, offs_row, offs_dim, mask = _tile(num_rows, DIM, BLOCK_DIM, ROWS)
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim, mask=mask, other=0.0).to(ACC)
    length = _length(x, LEAST, ACC)
    scaled = _over(x, length, ACC) * tl.load(factor_ptr).to(ACC)
    tl.store(scaled_ptr + offs_row * DIM + offs_dim, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)
    tl.store(inverse_ptr + rows, 1.0 / length, mask=rows < num_rows)


#   grid      as forward
#   reads     x, factor; d_scaled and d_unit [num_rows, DIM], gradients of factor x / |x| and x / |x|; more
#             [num_rows, DIM], if there is any, what else x gets
#   writes    dx [num_rows, DIM]; partial ACC [programs]: what the rows add to the gradient of factor
@triton.jit(do_not_specialize=["num_rows"])
def _unit_rows_bwd_kernel(
    dx_ptr, partial_ptr, x_ptr, factor_ptr, d_scaled_ptr, d_unit_ptr, more_ptr, num_rows,
    X_STRIDE: tl.constexpr, SCALED_STRIDE: tl.constexpr, UNIT_STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    _, offs_row, offs_dim, mask = _tile(num_rows, DIM, BLOCK_DIM, ROWS)
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim, mask=mask, other=0.0).to(ACC)
    d_scaled = tl.load(d_scaled_ptr + offs_row * SCALED_STRIDE + offs_dim, mask=mask, other=0.0).to(ACC)
    d_unit = tl.load(d_unit_ptr + offs_row * UNIT_STRIDE + offs_dim, mask=mask, other=0.0).to(ACC)
    length = _length(x, LEAST, ACC)
    unit = _over(x, length, ACC)
    grad = d_unit + tl.load(factor_ptr).to(ACC) * d_scaled
    # a length that is held at LEAST does not depend on x
    along = tl.where(length > LEAST, tl.sum(unit * grad, 1), 0.0)
    dx = _over(grad - unit * along[:, None], length, ACC)
    offs = offs_row * DIM + offs_dim
    if more_ptr is not None:
        dx += tl.load(more_ptr + offs, mask=mask, other=0.0).to(ACC)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.sum(unit * d_scaled, 1), 0))


@functools.lru_cache(maxsize=256)
def _plan(
    backward: bool,
    index: int,
    dtype: torch.dtype,
    num_rows: int,
    dim: int,
    strides: tuple[int, ...],
    least: float,
    added: bool = False,
) -> Launch:
    # `added`: whether x gets a gradient from elsewhere too
    config = launch.whole_rows(dim) if backward else launch.rows_at_once(dim, num_rows)
    rest = (num_rows, *strides, dim, config.block_dim, config.rows, least, accumulator(dtype))
    kernel = _unit_rows_bwd_kernel if backward else _unit_rows_kernel
    return Launch(kernel, -(-num_rows // config.rows), config.warps, (), rest)


def unit_rows(x: Tensor, factor: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Launches the kernel.

    Args:
        x: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        factor: ``[1]``.
        least: No length is less.

    Returns:
        ``factor * x / |x|``, contiguous in the dtype of ``x``; ``1 / |x|``, ``[num_rows]`` in float32
        (float64 if ``x`` is).
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return unit_rows(x, factor, least)
    num_rows, dim = x.shape
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    scaled, inverse = x.new_empty(num_rows, dim), x.new_empty(num_rows, dtype=acc)
    plan = _plan(False, index, x.dtype, num_rows, dim, (x.stride(0),), least)
    plan((scaled, inverse), (x, factor), aligned(x, factor), index)
    return scaled, inverse


def unit_rows_bwd(
    x: Tensor, factor: Tensor, d_scaled: Tensor, d_unit: Tensor, least: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launches the kernel of the gradients of ``x`` and, as a sum of a row for each program, ``factor``.

    Args:
        x: As in :func:`unit_rows`.
        factor: As in :func:`unit_rows`.
        d_scaled: Gradient of ``factor * x / |x|``, ``[num_rows, dim]``, contiguous features.
        d_unit: Gradient of ``x / |x|``, likewise.
        least: As in :func:`unit_rows`.
        more: What to add to the gradient of ``x``, contiguous: it becomes that gradient.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return unit_rows_bwd(x, factor, d_scaled, d_unit, least, more)
    num_rows, dim = x.shape
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    strides = (x.stride(0), d_scaled.stride(0), d_unit.stride(0))
    plan = _plan(True, index, x.dtype, num_rows, dim, strides, least, more is not None)
    programs = -(-num_rows // launch.whole_rows(dim).rows)
    dx = x.new_empty(num_rows, dim) if more is None else more
    partial = x.new_empty(programs, dtype=acc)
    operands = (x, factor, d_scaled, d_unit, more)
    plan((dx, partial), operands, aligned(*operands), index)
    return dx, partial
