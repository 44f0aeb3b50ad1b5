"""Aggregation: y = relu(r * (A (c * x)) W^T + b), over row windows or over rows, with or without W."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import EdgeOrder, Walk
from graphfuse.kernels import launch
from graphfuse.kernels.run import accumulator, run
from graphfuse.kernels.tiles import finish_tile, load_task, row_sum, window_sum


# Sum over the neighbours of 16 rows at a time, tensor cores.
#   grid      (num_tasks * blocks,): one program = one task (a window or a slice of one) x BLOCK_DIM features;
#             all tasks of one feature block run before the next, so that a narrower x stays in L2
#   reads     x [num_cols, DIM], rows x_stride apart; tasks, column, row_mask; the optional operands
#   writes    out [num_rows, OUT_DIM]; slices of a cut window write partial ACC [16, DIM] to their slot
#   on chip   acc ACC [16, BLOCK_DIM]; with `weight` BLOCK_DIM >= DIM and the tile is multiplied by it there
#   order     entries left to right within a task, no atomics: bitwise reproducible
#   requires  contiguous features; offsets of x and out are int64
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops"])
def _spmm_window_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, tasks_ptr, column_ptr, row_mask_ptr, edge_ptr, edge_perm_ptr,
    edge_weight_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, bias_ptr,
    num_tasks, num_rows, num_loops, x_stride, weight_stride_out, weight_stride_in,
    DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_OUT: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    window, begin, end, slot = load_task(tasks_ptr, pid % num_tasks)
    offs_dim = (pid // num_tasks) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    rows = window * 16 + tl.arange(0, 16)
    acc = window_sum(
        x_ptr, x_stride, column_ptr, row_mask_ptr, edge_ptr, edge_perm_ptr, edge_weight_ptr, col_scale_ptr,
        window * 16, begin, end, offs_dim, mask_dim,
        BLOCK_DIM, COLUMNS, STAGES, loop_weight_ptr is not None, ACC,
    )  # fmt: skip
    if partial_ptr is not None:
        if slot >= 0:
            offs = (slot.to(tl.int64) * 16 + tl.arange(0, 16))[:, None] * DIM + offs_dim[None, :]
            tl.store(partial_ptr + offs, acc, mask=mask_dim[None, :])
            return
    finish_tile(
        acc, x_ptr, x_stride, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, weight_stride_out,
        weight_stride_in, bias_ptr, aggregate_ptr, out_ptr, rows, num_rows, num_loops,
        offs_dim, mask_dim, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, 16, RELU, ACC,
    )  # fmt: skip


# Sum over the neighbours of one row, plain adds: no masked work where windows share few columns, and the only
# way to sum float32 with float32 weights.
#   grid      ((num_tasks + ceil(num_rows / ROWS)) * blocks,): first the slices of long rows, then ROWS rows a
#             program (the GPU starts 1.6 programs a nanosecond, which short rows outrun)
#   reads     x [num_cols, DIM]; ptr, tasks, column; the optional operands
#   writes    out [num_rows, OUT_DIM]; slices write partial ACC [1, DIM] to their slot
#   on chip   acc ACC [EDGES, BLOCK_DIM]
#   order     edges left to right within a row or slice, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops", "split"])
def _spmm_row_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, ptr_ptr, tasks_ptr, column_ptr, edge_perm_ptr,
    edge_weight_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, bias_ptr,
    num_tasks, num_rows, num_loops, split, x_stride, weight_stride_out, weight_stride_in,
    DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_OUT: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    programs = num_tasks + tl.cdiv(num_rows, ROWS)
    pid = tl.program_id(0) % programs
    offs_dim = (tl.program_id(0) // programs) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    if pid < num_tasks:
        first, begin, end, slot = load_task(tasks_ptr, pid)
        last = first + 1
    else:
        first = (pid - num_tasks) * ROWS
        last = tl.minimum(first + ROWS, num_rows)
        begin, end, slot = 0, 0, -1
    for row in tl.range(first, last):
        if slot < 0:
            begin = tl.load(ptr_ptr + row)
            end = tl.load(ptr_ptr + row + 1)
        if (slot >= 0) | (end - begin <= split):  # else its slices were listed as tasks
            acc = row_sum(
                x_ptr, x_stride, column_ptr, edge_perm_ptr, edge_weight_ptr, col_scale_ptr,
                row, begin, end, offs_dim, mask_dim,
                BLOCK_DIM, EDGES, STAGES, loop_weight_ptr is not None, ACC,
            )  # fmt: skip
            whole = True
            if partial_ptr is not None:
                whole = slot < 0
                if slot >= 0:
                    offs = tl.cast(slot, tl.int64) * DIM + offs_dim[None, :]
                    tl.store(partial_ptr + offs, acc, mask=mask_dim[None, :])
            if whole:
                finish_tile(
                    acc, x_ptr, x_stride, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr,
                    weight_stride_out, weight_stride_in, bias_ptr, aggregate_ptr, out_ptr,
                    row + tl.arange(0, 1), num_rows, num_loops,
                    offs_dim, mask_dim, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, 1, RELU, ACC,
                )  # fmt: skip


# Adds the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order, and finishes it.
#   grid      (num_merges * blocks,)
#   reads     partial ACC [num_slots, HEIGHT, DIM]
@triton.jit(do_not_specialize=["num_merges", "num_rows", "num_loops"])
def _spmm_merge_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, merges_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr,
    weight_ptr, bias_ptr, num_merges, num_rows, num_loops, x_stride, weight_stride_out, weight_stride_in,
    DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_OUT: tl.constexpr,
    HEIGHT: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    window, first, count, _ = load_task(merges_ptr, pid % num_merges)
    offs_dim = (pid // num_merges) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    inner = tl.arange(0, HEIGHT)
    acc = tl.zeros((HEIGHT, BLOCK_DIM), dtype=ACC)
    for slot in tl.range(first, first + count):
        offs = (slot.to(tl.int64) * HEIGHT + inner)[:, None] * DIM + offs_dim[None, :]
        acc += tl.load(partial_ptr + offs, mask=mask_dim[None, :], other=0.0)
    finish_tile(
        acc, x_ptr, x_stride, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, weight_stride_out,
        weight_stride_in, bias_ptr, aggregate_ptr, out_ptr, window * HEIGHT + inner, num_rows, num_loops,
        offs_dim, mask_dim, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, HEIGHT, RELU, ACC,
    )  # fmt: skip


class _Plan(NamedTuple):
    """Launch constants of one width, dtype and epilogue."""

    config: launch.Config
    blocks: int  # of features
    constants: tuple[Any, ...]  # of the window or row kernel
    merge_constants: tuple[Any, ...]


@functools.cache
def _plan(windows: bool, dim: int, dtype: torch.dtype, out_dim: int | None, relu: bool) -> _Plan:
    config = (launch.spmm_window if windows else launch.spmm_row)(dim, dtype.itemsize, out_dim)
    shape = (dim, out_dim or dim, config.block_dim, config.block_out)
    loop = (config.step,) if windows else (config.rows, config.step)
    epilogue = (relu, accumulator(dtype))
    return _Plan(
        config,
        -(-dim // config.block_dim),
        (*shape, *loop, config.stages, *epilogue),
        (*shape, 16 if windows else 1, *epilogue),
    )


def spmm(
    w: Walk,
    edges: EdgeOrder | None,
    x: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    keep_aggregate: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Launches the kernels; operands are checked by :mod:`graphfuse.ops`. Returns ``(out, aggregate)``."""
    dim, num_rows = x.size(1), w.num_rows
    out_dim = None if weight is None else weight.size(0)
    out = x.new_empty(num_rows, dim if out_dim is None else out_dim, dtype=out_dtype)
    aggregate = x.new_empty(num_rows, dim) if keep_aggregate else None
    if out.numel() == 0:
        return out, aggregate
    windows = w.row_mask is not None
    config, blocks, constants, merge_constants = _plan(windows, dim, x.dtype, out_dim, relu)
    partial = None
    if w.num_slots > 0:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = x.new_empty(w.num_slots * w.height, dim, dtype=dtype)
    num_tasks, num_loops = w.tasks.size(0), min(num_rows, w.num_cols)
    edge_ptr, edge_perm = (None, None) if edges is None else edges
    operands = (loop_weight, row_scale, col_scale, weight, bias)
    strides = (x.stride(0), 0, 0) if weight is None else (x.stride(0), *weight.stride())
    tensors: tuple[Tensor | None, ...]
    counts: tuple[int, ...]
    if windows:
        structure = (w.tasks, w.column, w.row_mask, edge_ptr, edge_perm, edge_weight)
        tensors = (x, out, partial, aggregate, *structure, *operands)
        counts = (num_tasks, num_rows, num_loops)
        run(_spmm_window_kernel, num_tasks * blocks, config.warps, tensors, counts, strides, constants)
    else:
        programs = (num_tasks + -(-num_rows // config.rows)) * blocks
        tensors = (x, out, partial, aggregate, w.ptr, w.tasks, w.column, edge_perm, edge_weight, *operands)
        counts = (num_tasks, num_rows, num_loops, w.split)
        run(_spmm_row_kernel, programs, config.warps, tensors, counts, strides, constants)
    if partial is not None:
        num_merges = w.merges.size(0)
        tensors = (x, out, partial, aggregate, w.merges, *operands)
        counts, programs = (num_merges, num_rows, num_loops), num_merges * blocks
        run(_spmm_merge_kernel, programs, config.merge_warps, tensors, counts, strides, merge_constants)
    return out, aggregate
