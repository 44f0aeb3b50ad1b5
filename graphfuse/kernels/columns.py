"""What all rows of a matrix share: a bias added to each, and the sum of them all, which is its gradient.

PyTorch sums the columns of a tall matrix at a fraction of the memory's speed, and adds a row to a matrix of
half precision at half of it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous

MAX_BLOCK = 1024  # columns of a program
AT_ONCE = 8192  # rows up to which one program sums up all of a few columns
MERGE_BLOCK, MERGE_SLICES = 8, 512  # columns of a program of the merge, and most slices it adds at a time


#   grid      (cdiv(num_rows, ROWS) * blocks,): one program = ROWS rows x BLOCK_DIM columns
#   reads     x [num_rows, DIM], contiguous features, strided rows; bias [DIM]
#   writes    y [num_rows, DIM]: x + bias
@triton.jit(do_not_specialize=["num_rows"])
def _bias_kernel(
    y_ptr, x_ptr, bias_ptr, num_rows, x_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    blocks = tl.cdiv(DIM, BLOCK_DIM)
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    offs_dim = (tl.program_id(0) % blocks) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask, offs_row = (rows < num_rows)[:, None] & (offs_dim < DIM)[None, :], rows.to(tl.int64)[:, None]
    bias = tl.load(bias_ptr + offs_dim, mask=offs_dim < DIM, other=0.0).to(ACC)
    x = tl.load(x_ptr + offs_row * x_stride + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
    y = (x + bias[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_row * DIM + offs_dim[None, :], y, mask=mask)


#   grid      (num_slices * blocks,): one program = one slice of `length` rows, ROWS at a time, x BLOCK_DIM
#             columns
#   reads     x [num_rows, DIM], contiguous features, strided rows
#   writes    partial ACC [num_slices, DIM]; of a single slice the result, in its dtype
#   order     rows top to bottom, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows", "length"])
def _column_sum_kernel(
    partial_ptr, x_ptr, num_rows, length, x_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    blocks = tl.cdiv(DIM, BLOCK_DIM)
    pid = tl.program_id(0) // blocks
    offs_dim = (tl.program_id(0) % blocks) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    acc = tl.zeros((ROWS, BLOCK_DIM), dtype=ACC)
    end = tl.minimum(pid * length + length, num_rows)
    for start in tl.range(pid * length, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        offs = rows.to(tl.int64)[:, None] * x_stride + offs_dim[None, :]
        mask = (rows < end)[:, None] & (offs_dim < DIM)[None, :]
        acc += tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
    total = tl.sum(acc, 0).to(partial_ptr.dtype.element_ty)
    tl.store(partial_ptr + pid.to(tl.int64) * DIM + offs_dim, total, mask=offs_dim < DIM)


# Adds the slices: partial [num_slices, WIDTH] to out [WIDTH].
#   grid      (cdiv(WIDTH, BLOCK),)
#   order     of slices, SLICES at a time
@triton.jit(do_not_specialize=["num_slices"])
def slices_merge_kernel(
    out_ptr, partial_ptr, num_slices,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((SLICES, BLOCK), dtype=ACC)
    for first in tl.range(0, num_slices, SLICES):
        slices = first + tl.arange(0, SLICES)
        mask = (slices < num_slices)[:, None] & (offs < WIDTH)[None, :]
        offs_partial = slices.to(tl.int64)[:, None] * WIDTH + offs[None, :]
        acc += tl.load(partial_ptr + offs_partial, mask=mask, other=0.0)
    tl.store(out_ptr + offs, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=offs < WIDTH)


def slices_merge(num_slices: int, width: int, acc: tl.dtype) -> Launch:
    """Prepares adding up ``partial`` ``[num_slices, width]``: outputs ``(out,)``, operands ``(partial,)``."""
    slices = min(launch.power_of_two(num_slices, 32), MERGE_SLICES)
    warps = max(1, slices * MERGE_BLOCK // 512)
    rest = (num_slices, width, MERGE_BLOCK, slices, acc)
    return Launch(slices_merge_kernel, -(-width // MERGE_BLOCK), warps, (), rest)


# Prepared launches, by whatever the kernels are compiled for. Batches of a loader have ever new numbers of
# rows: the latest stay.
@functools.lru_cache(maxsize=256)
def _bias_plan(index: int, dtypes: tuple[torch.dtype, ...], num_rows: int, dim: int, stride: int) -> Launch:
    config = launch.rows_at_once(min(dim, MAX_BLOCK), num_rows)
    programs = -(-num_rows // config.rows) * -(-dim // config.block_dim)
    rest = (num_rows, stride, dim, config.block_dim, config.rows, accumulator(dtypes[0]))
    return Launch(_bias_kernel, programs, config.warps, (), rest)


class _SumPlan(NamedTuple):
    num_slices: int
    main: Launch
    merge: Launch | None  # None: one program sums up all rows


@functools.lru_cache(maxsize=256)
def _sum_plan(index: int, dtypes: tuple[torch.dtype, ...], num_rows: int, dim: int, stride: int) -> _SumPlan:
    acc = accumulator(dtypes[0])
    if num_rows <= AT_ONCE:
        block = min(launch.power_of_two(dim), 4)  # few columns make many programs, none of them long
        rest = (num_rows, num_rows, stride, dim, block, 16384 // block, acc)
        return _SumPlan(1, Launch(_column_sum_kernel, -(-dim // block), 16, (), rest), None)
    config = launch.whole_rows(min(dim, MAX_BLOCK))
    length, num_slices = launch.row_slices(num_rows, config.rows)
    rest = (num_rows, length, stride, dim, config.block_dim, config.rows, acc)
    main = Launch(_column_sum_kernel, num_slices * -(-dim // config.block_dim), config.warps, (), rest)
    return _SumPlan(num_slices, main, slices_merge(num_slices, dim, acc))


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Launches the kernel.

    Args:
        x: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        bias: ``[dim]``, contiguous.

    Returns:
        ``x + bias`` in the dtype of ``x``.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return add_bias(x, bias)
    num_rows, dim = x.shape
    y = x.new_empty(num_rows, dim)
    plan = _bias_plan(index, (x.dtype, bias.dtype), num_rows, dim, x.stride(0))
    plan((y,), (x, bias), aligned(x, bias), index)
    return y


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Launches the kernel, or of many rows the two.

    Args:
        x: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        dtype: Of the result.

    Returns:
        The sum of the rows, ``[dim]``, kept in float32 (float64 for float64).
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return column_sums(x, dtype)
    num_rows, dim = x.shape
    plan = _sum_plan(index, (x.dtype, dtype), num_rows, dim, x.stride(0))
    out = partial = x.new_empty(dim, dtype=dtype)
    if plan.merge is not None:
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = x.new_empty(plan.num_slices, dim, dtype=acc)
    plan.main((partial,), (x,), aligned(x), index)
    if plan.merge is not None:
        plan.merge((out,), (partial,), True, index)
    return out
