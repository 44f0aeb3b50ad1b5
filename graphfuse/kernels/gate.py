"""The gated skip connection, y = b s + (1 - b) o with a gate b per row, and its gradients."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.columns import slices_merge
from graphfuse.kernels.run import Launch, accumulator, current_device
from graphfuse.kernels.tiles import after_previous


@triton.jit
def _load_rows(ptr, stride, offs_row, live, offs_dim, mask_dim, ACC: tl.constexpr):
    offs = offs_row[:, None] * stride + offs_dim[None, :]
    return tl.load(ptr + offs, mask=live[:, None] & mask_dim[None, :], other=0.0).to(ACC)


@triton.jit
def _load_weight(weight_ptr, offs_dim, mask_dim, DIM: tl.constexpr, ACC: tl.constexpr):
    w1 = tl.load(weight_ptr + offs_dim, mask=mask_dim, other=0.0).to(ACC)
    w2 = tl.load(weight_ptr + DIM + offs_dim, mask=mask_dim, other=0.0).to(ACC)
    w3 = tl.load(weight_ptr + 2 * DIM + offs_dim, mask=mask_dim, other=0.0).to(ACC)
    return w1[None, :], w2[None, :], w3[None, :]


# y = b s + (1 - b) o, b = sigmoid(w1 . o + w2 . s + w3 . (o - s)).
#   grid      (cdiv(num_rows, ROWS),): one program = ROWS rows
#   reads     out, skip [num_rows, DIM], contiguous features, strided rows; weight [3 * DIM]: w1, w2, w3
#   writes    y [num_rows, DIM]
#   on chip   the rows, BLOCK_DIM = next power of two >= DIM: they are read once
@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    y_ptr, out_ptr, skip_ptr, weight_ptr, num_rows, out_stride, skip_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    rows, offs_dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    live, mask_dim, offs_row = rows < num_rows, offs_dim < DIM, rows.to(tl.int64)
    o = _load_rows(out_ptr, out_stride, offs_row, live, offs_dim, mask_dim, ACC)
    s = _load_rows(skip_ptr, skip_stride, offs_row, live, offs_dim, mask_dim, ACC)
    w1, w2, w3 = _load_weight(weight_ptr, offs_dim, mask_dim, DIM, ACC)
    b = tl.sigmoid(tl.sum(w1 * o + w2 * s + w3 * (o - s), 1))[:, None]
    offs_y = offs_row[:, None] * DIM + offs_dim[None, :]
    y = (b * s + (1 - b) * o).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_y, y, mask=live[:, None] & mask_dim[None, :])


# Gradients, the gate computed anew: dz = b (1 - b) g . (s - o), do = (1 - b) g + dz (w1 + w3),
# ds = b g + dz (w2 - w3), and of one slice of the rows the sums of dz o, dz s and dz (o - s).
#   grid      (num_slices,): one program = one slice of `length` rows, ROWS at a time
#   reads     grad, out, skip [num_rows, DIM], contiguous features, strided rows; weight [3 * DIM]
#   writes    do, ds [num_rows, DIM]; partial ACC [num_slices, 3 * DIM]
#   order     rows top to bottom, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_rows", "length"])
def _gate_bwd_kernel(
    do_ptr, ds_ptr, partial_ptr, grad_ptr, out_ptr, skip_ptr, weight_ptr, num_rows, length,
    grad_stride, out_stride, skip_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    pid, offs_dim = tl.program_id(0), tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    w1, w2, w3 = _load_weight(weight_ptr, offs_dim, mask_dim, DIM, ACC)
    dw1 = tl.zeros((ROWS, BLOCK_DIM), dtype=ACC)
    dw2 = tl.zeros((ROWS, BLOCK_DIM), dtype=ACC)
    dw3 = tl.zeros((ROWS, BLOCK_DIM), dtype=ACC)
    end = tl.minimum(pid * length + length, num_rows)
    for start in tl.range(pid * length, end, ROWS, num_stages=1):
        rows = start + tl.arange(0, ROWS)
        live, offs_row = rows < end, rows.to(tl.int64)
        g = _load_rows(grad_ptr, grad_stride, offs_row, live, offs_dim, mask_dim, ACC)
        o = _load_rows(out_ptr, out_stride, offs_row, live, offs_dim, mask_dim, ACC)
        s = _load_rows(skip_ptr, skip_stride, offs_row, live, offs_dim, mask_dim, ACC)
        b = tl.sigmoid(tl.sum(w1 * o + w2 * s + w3 * (o - s), 1))
        dz = (tl.sum(g * (s - o), 1) * b * (1 - b))[:, None]
        b = b[:, None]
        offs, mask = offs_row[:, None] * DIM + offs_dim[None, :], live[:, None] & mask_dim[None, :]
        do = (1 - b) * g + dz * (w1 + w3)
        ds = b * g + dz * (w2 - w3)
        tl.store(do_ptr + offs, do.to(do_ptr.dtype.element_ty), mask=mask)
        tl.store(ds_ptr + offs, ds.to(ds_ptr.dtype.element_ty), mask=mask)
        dw1 += dz * o
        dw2 += dz * s
        dw3 += dz * (o - s)  # not dw1 - dw2, of which little is left where o and s are close
    partial_ptr += pid.to(tl.int64) * (3 * DIM) + offs_dim
    tl.store(partial_ptr, tl.sum(dw1, 0), mask=mask_dim)
    tl.store(partial_ptr + DIM, tl.sum(dw2, 0), mask=mask_dim)
    tl.store(partial_ptr + 2 * DIM, tl.sum(dw3, 0), mask=mask_dim)


# Prepared launches, by whatever the kernels are compiled for, the pointers' alignment included. Batches of
# a loader have ever new numbers of rows: the latest stay.
@functools.lru_cache(maxsize=256)
def _plan(
    index: int,
    dtype: torch.dtype,
    num_rows: int,
    dim: int,
    strides: tuple[int, int],
    aligned: tuple[bool, ...],
) -> Launch:
    config = launch.whole_rows(dim)
    rest = (num_rows, *strides, dim, config.block_dim, config.rows, accumulator(dtype))
    return Launch(_gate_kernel, -(-num_rows // config.rows), config.warps, (), rest)


class _BackwardPlan(NamedTuple):
    num_slices: int
    main: Launch
    merge: Launch


@functools.lru_cache(maxsize=256)
def _backward_plan(
    index: int,
    dtype: torch.dtype,
    num_rows: int,
    dim: int,
    strides: tuple[int, int, int],
    aligned: tuple[bool, ...],
) -> _BackwardPlan:
    config, acc = launch.whole_rows(dim), accumulator(dtype)
    length, num_slices = launch.row_slices(num_rows, config.rows)
    rest = (num_rows, length, *strides, dim, config.block_dim, config.rows, acc)
    main = Launch(_gate_bwd_kernel, num_slices, config.warps, (), rest)
    return _BackwardPlan(num_slices, main, slices_merge(num_slices, 3 * dim, acc))


def _aligned(*tensors: Tensor) -> tuple[bool, ...]:
    return tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors])


def gated_skip(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    """Launches the kernel.

    Args:
        out: ``[num_rows, dim]``, contiguous features; both sizes are at least 1.
        skip: ``[num_rows, dim]``, dtype of ``out``, contiguous features.
        weight: ``[1, 3 * dim]``, dtype of ``out``, contiguous.

    Returns:
        ``[num_rows, dim]``, contiguous.
    """
    index = out.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return gated_skip(out, skip, weight)
    num_rows, dim = out.shape
    strides = (out.stride(0), skip.stride(0))
    plan = _plan(index, out.dtype, num_rows, dim, strides, _aligned(out, skip, weight))
    y = out.new_empty(num_rows, dim)
    plan((y,), (out, skip, weight), True, index)
    return y


def gated_skip_bwd(grad: Tensor, out: Tensor, skip: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the two kernels of the gradients of ``out``, ``skip`` and ``weight``.

    Args:
        grad: ``[num_rows, dim]``, dtype of ``out``, contiguous features.
        out: As in :func:`gated_skip`.
        skip: As in :func:`gated_skip`.
        weight: As in :func:`gated_skip`.
    """
    index = out.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return gated_skip_bwd(grad, out, skip, weight)
    num_rows, dim = out.shape
    strides = (grad.stride(0), out.stride(0), skip.stride(0))
    aligned = _aligned(grad, out, skip, weight)
    plan = _backward_plan(index, out.dtype, num_rows, dim, strides, aligned)
    do, ds = out.new_empty(num_rows, dim), out.new_empty(num_rows, dim)
    acc = torch.float64 if out.dtype == torch.float64 else torch.float32
    partial = out.new_empty(plan.num_slices, 3 * dim, dtype=acc)
    dw = out.new_empty(1, 3 * dim)
    plan.main((do, ds, partial), (grad, out, skip, weight), True, index)
    plan.merge((dw,), (partial,), True, index)
    return do, ds, dw
