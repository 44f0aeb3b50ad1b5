"""A residual and the norm after it, of inference: one pass over the rows."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.norm_tiles import after_residual
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous


# z = x + y + offset, out = weight (z - mean) / sqrt(var + EPS) + bias.
#   grid      (cdiv(num_rows, ROWS),): one program = ROWS rows
#   reads     x, y [num_rows, DIM], contiguous features, strided rows; weight, bias [DIM]; mean and var [DIM]
#             of batch norm; without them they are those of each row of z, layer norm; offset [DIM], if any
#   writes    out [num_rows, DIM]
@triton.jit(do_not_specialize=["num_rows"])
def _residual_norm_kernel(
    out_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, offset_ptr, num_rows, x_stride, y_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    rows, offs_dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & (offs_dim < DIM)[None, :]
    offs_row, offs = rows.to(tl.int64)[:, None], offs_dim[None, :]
    y = tl.load(y_ptr + offs_row * y_stride + offs, mask=mask, other=0.0).to(ACC)
    residual = (x_ptr, offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, None)
    out = after_residual(y, rows, offs_dim, mask, residual, x_stride, DIM, EPS, ACC)
    tl.store(out_ptr + offs_row * DIM + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


# Prepared launches, by whatever the kernel is compiled for. Batches of a loader have ever new numbers of
# rows: the latest stay.
@functools.lru_cache(maxsize=256)
def _plan(
    index: int,
    dtypes: tuple[torch.dtype | None, ...],
    num_rows: int,
    dim: int,
    strides: tuple[int, int],
    eps: float,
) -> Launch:
    config = launch.whole_rows(dim)
    rest = (num_rows, *strides, dim, config.block_dim, config.rows, eps, accumulator(torch.float32))
    return Launch(_residual_norm_kernel, -(-num_rows // config.rows), config.warps, (), rest)


def residual_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
    offset: Tensor | None = None,
) -> Tensor:
    """Launches the kernel.

    Args:
        x: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        y: Likewise, dtype of ``x``.
        weight: ``[dim]``, contiguous, as are the following.
        bias: ``[dim]``.
        mean: Batch norm's, ``[dim]``, or None for layer norm.
        var: Likewise.
        eps: Added to variances.
        offset: Added to each row, ``[dim]``, or None.

    Returns:
        ``[num_rows, dim]`` in the dtype of ``x``.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return residual_norm(x, y, weight, bias, mean, var, eps, offset)
    num_rows, dim = x.shape
    operands = (x, y, weight, bias, mean, var, offset)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in operands])
    out = x.new_empty(num_rows, dim)
    plan = _plan(index, dtypes, num_rows, dim, (x.stride(0), y.stride(0)), eps)
    plan((out,), operands, aligned(*operands), index)
    return out
