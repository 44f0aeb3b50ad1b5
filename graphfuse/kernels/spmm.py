"""Aggregation: y = relu(r * (A (c * x)) W^T + b), over row windows or over rows, with or without W."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import EdgeOrder, Walk, longer_slices, row_masks
from graphfuse.kernels import copies, launch, merge_shapes
from graphfuse.kernels.gathered import gathered
from graphfuse.kernels.merge_tiles import merge_task, over_slots, rows_of_slice, store_slice
from graphfuse.kernels.row_tiles import first_columns, row_sum
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import (
    after_previous,
    finish_tile,
    load_task,
    rows_at,
    window_sum,
)


# Sum over the neighbours of 16 rows at a time, tensor cores.
#   grid      (num_tasks, blocks): one program = one task (a window or a slice of one) x BLOCK_DIM features;
#             all tasks of one feature block run before the next, so that a narrower x stays in L2
#   reads     x [num_cols, X_DIM], rows X_STRIDE apart, zeros after DIM; tasks, row_index, column, row_mask;
#             optional operands; LOOPS, see formats.walk.row_masks, with loop_weight
#   writes    out [num_rows, OUT_DIM]; slices of a cut window write partial ACC [16, BLOCK_DIM] to their slot
#   on chip   acc ACC [16, BLOCK_DIM]; with `weight` BLOCK_DIM >= DIM and the tile is multiplied by it there
#   order     steps left to right within a task, entries of one as `dealt`, no atomics: bitwise reproducible
#   requires  contiguous features; offsets of x and out are int64
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def _spmm_window_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr,
    loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, bias_ptr,
    num_rows, num_loops, weight_stride_out, weight_stride_in, X_STRIDE: tl.constexpr,
    X_DIM: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, LOOPS: tl.constexpr,
    RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    acc = window_sum(
        x_ptr, column_ptr, row_mask_ptr, col_scale_ptr, window, begin, end, offs_dim, offs_dim < X_DIM,
        X_STRIDE, BLOCK_DIM, COLUMNS, STAGES, LOOPS == 1, ACC,
    )  # fmt: skip
    if partial_ptr is not None:
        if slot >= 0:
            store_slice(partial_ptr + first_of_block(slot, 16, DIM, BLOCK_DIM), acc)
            return
    finish_tile(
        acc, x_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, weight_stride_out,
        weight_stride_in, bias_ptr, aggregate_ptr, out_ptr, rows, num_rows, num_loops, offs_dim, mask_dim,
        X_STRIDE, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, 16, RELU, ACC,
    )  # fmt: skip


# Sum over the neighbours of one row, plain adds: no masked work where windows share few columns, and the only
# way of edge weights: a window has to load as many, and to scatter them into a tile first.
#   grid      (num_tasks + ceil(num_rows / ROWS), blocks): first long rows and slices, then ROWS rows a
#             program (the GPU starts 1.6 programs a nanosecond, which short rows outrun)
#   reads     x [num_cols, X_DIM]; ptr, tasks, column; the optional operands
#   writes    out [num_rows, OUT_DIM]; slices write partial ACC [1, DIM] to their slot
#   on chip   acc ACC [EDGES, BLOCK_DIM]; columns and places of the next EDGES edges, of this row or the next:
#             what rows of a program wait for is x alone
#   order     edges left to right within a row or slice, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops", "split"])
def _spmm_row_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, ptr_ptr, tasks_ptr, column_ptr, edge_perm_ptr,
    edge_weight_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, bias_ptr,
    num_tasks, num_rows, num_loops, split, weight_stride_out, weight_stride_in, X_STRIDE: tl.constexpr,
    X_DIM: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
    RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    pid = tl.program_id(0)
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    if pid < num_tasks:
        first, begin, end, slot = load_task(tasks_ptr, pid)
        last, limit = first + 1, end
    else:
        first = (pid - num_tasks) * ROWS
        last = tl.minimum(first + ROWS, num_rows)
        begin = tl.load(ptr_ptr + first)
        end = tl.load(ptr_ptr + first + 1)
        limit = tl.load(ptr_ptr + last)
        slot = -1
    columns = first_columns(column_ptr, begin, limit, EDGES, STAGES)
    places = columns
    if edge_weight_ptr is not None:
        places = first_columns(edge_perm_ptr, begin, limit, EDGES, STAGES)
    for row in tl.range(first, last):
        next_end = end
        if slot < 0:
            next_end = tl.load(ptr_ptr + tl.minimum(row + 2, last))
        if (pid < num_tasks) | (end - begin <= split):  # else it was listed as a task, or its slices were
            acc, columns, places = row_sum(
                x_ptr, column_ptr, edge_perm_ptr, edge_weight_ptr, col_scale_ptr, row, begin, end, limit,
                columns, places, offs_dim, offs_dim < X_DIM, X_STRIDE, BLOCK_DIM, EDGES, STAGES,
                loop_weight_ptr is not None, ACC,
            )  # fmt: skip
            whole = True
            if partial_ptr is not None:
                whole = slot < 0
                if slot >= 0:
                    offs = tl.cast(slot, tl.int64) * DIM + offs_dim[None, :]
                    tl.store(partial_ptr + offs, acc, mask=mask_dim[None, :])
            if whole:
                finish_tile(
                    acc, x_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr,
                    weight_stride_out, weight_stride_in, bias_ptr, aggregate_ptr, out_ptr,
                    row + tl.arange(0, 1), num_rows, num_loops, offs_dim, mask_dim,
                    X_STRIDE, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, 1, RELU, ACC,
                )  # fmt: skip
        else:
            columns = first_columns(column_ptr, end, limit, EDGES, STAGES)
            if edge_weight_ptr is not None:
                places = first_columns(edge_perm_ptr, end, limit, EDGES, STAGES)
        begin, end = end, next_end


@triton.jit
def first_of_block(slot, HEIGHT: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    # where a program's features of a slot begin in `partial`
    BLOCKS: tl.constexpr = (DIM + BLOCK_DIM - 1) // BLOCK_DIM
    return (tl.cast(slot, tl.int64) * BLOCKS + tl.program_id(1)) * (HEIGHT * BLOCK_DIM)


# Adds the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order, and finishes it.
#   grid      (num_merges * HEIGHT / ROWS, blocks): one program = ROWS rows, all of them with `weight`
#   reads     partial ACC [num_slots, blocks, HEIGHT * BLOCK_DIM] of windows, see `store_slice`, or
#             [num_slots, DIM] of rows; merges, row_index of windows
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def _spmm_merge_kernel(
    x_ptr, out_ptr, partial_ptr, aggregate_ptr, merges_ptr, row_index_ptr, loop_weight_ptr, row_scale_ptr,
    col_scale_ptr, weight_ptr, bias_ptr, num_rows, num_loops, weight_stride_out,
    weight_stride_in, X_STRIDE: tl.constexpr, X_DIM: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_OUT: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, first = merge_task(merges_ptr, HEIGHT, ROWS)
    offs_dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    if HEIGHT == 1:
        nth = tl.arange(0, SLOTS)
        acc = tl.zeros((SLOTS, BLOCK_DIM), dtype=ACC)
        for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
            slot = start + nth
            offs = slot.to(tl.int64)[:, None] * DIM + offs_dim[None, :]
            acc += tl.load(partial_ptr + offs, mask=(slot < end)[:, None] & mask_dim[None, :], other=0.0)
        acc = over_slots(acc, SLOTS)
    else:
        place = first * BLOCK_DIM + tl.arange(0, ROWS * BLOCK_DIM)
        numbers = tl.zeros((ROWS * BLOCK_DIM,), dtype=ACC)
        for slot in tl.range(begin, end, num_stages=STAGES):
            numbers += tl.load(partial_ptr + first_of_block(slot, HEIGHT, DIM, BLOCK_DIM) + place)
        acc = rows_of_slice(numbers, ROWS)
    inner = first + tl.arange(0, ROWS)
    finish_tile(
        acc, x_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, weight_stride_out,
        weight_stride_in, bias_ptr, aggregate_ptr, out_ptr, rows_at(row_index_ptr, window * HEIGHT + inner),
        num_rows, num_loops, offs_dim, mask_dim, X_STRIDE, DIM, OUT_DIM, BLOCK_DIM, BLOCK_OUT, ROWS, RELU,
        ACC,
    )  # fmt: skip


class Plan(NamedTuple):
    """Launches for one combination of width, dtypes, strides and operands."""

    num_rows: int
    dim: int  # of the sums
    out_dim: int  # of what is returned
    dtype: torch.dtype | None  # of that; None if it is that of x
    keep_aggregate: bool
    by_rows: bool
    main: Launch
    merge: Launch | None
    num_partial: int  # partial sums, of slices


class Scales(NamedTuple):
    """Factors of an aggregation; all that are there are contiguous."""

    edge_weight: Tensor | None
    loop_weight: Tensor | None
    row_scale: Tensor | None
    col_scale: Tensor | None


def over_windows(
    w: Walk, dim: int, x_dim: int, size: int, out_dim: int | None = None, scaled: bool = False
) -> tuple[launch.Config, Walk]:
    """How windows are walked for sums of ``dim`` features, and with which slices.

    Args:
        w: The walk, of windows.
        dim: Features of a sum.
        x_dim: Features of a row as it is gathered.
        size: Bytes of one.
        out_dim: Those of a product in the same kernel.
        scaled: Whether columns have factors.
    """
    load = launch.load(w.tasks.size(0), w.num_entries)
    config = launch.spmm_window(x_dim, size, out_dim, load, scaled)
    blocks = -(-dim // config.block_dim)
    return config, longer_slices(w, launch.spmm_slices(blocks, size, w.tasks.size(0), w.num_slots, load))


def _plan(
    w: Walk,
    edges: EdgeOrder | None,
    dim: int,
    dtype: torch.dtype,
    out_dim: int | None,
    weight_strides: tuple[int, ...],
    x_stride: int,
    x_dim: int,
    relu: bool,
    loops: bool,
    scaled: bool,
    keep_aggregate: bool,
    out_dtype: torch.dtype,
) -> Plan:
    windows = w.row_mask is not None
    if windows:
        config, w = over_windows(w, dim, x_dim, dtype.itemsize, out_dim, scaled)
    else:
        config = launch.spmm_row(x_dim, out_dim, w.num_rows, w.num_entries, w.tasks.size(0))
    blocks = -(-dim // config.block_dim)
    shape = (x_stride, x_dim, dim, dim if out_dim is None else out_dim, config.block_dim, config.block_out)
    epilogue = (relu, accumulator(dtype))
    num_tasks, num_loops = w.tasks.size(0), min(w.num_rows, w.num_cols)
    if windows:
        row_mask, with_loops = row_masks(w, loops)
        structure = (w.tasks, w.row_index, w.column, row_mask)
        counts: tuple[int, ...] = (w.num_rows, num_loops)
        rest = (*counts, *weight_strides, *shape, config.step, config.stages, with_loops, *epilogue)
        warps, registers = config.warps, config.registers
        main = Launch(_spmm_window_kernel, num_tasks, warps, structure, rest, registers, blocks)
    else:
        programs = num_tasks + -(-w.num_rows // config.rows)
        counts = (num_tasks, w.num_rows, num_loops, w.split)
        rest = (*counts, *weight_strides, *shape, config.rows, config.step, config.stages, *epilogue)
        by_row = (w.ptr, w.tasks, w.column, None if edges is None else edges.perm)
        main = Launch(_spmm_row_kernel, programs, config.warps, by_row, rest, groups=blocks)
    merge = None
    if w.num_slots > 0:
        longest = w.num_slots - 2 * (w.merges.size(0) - 1)  # at most, as the others have two and more
        adds = merge_shapes.of_sums(w.height, config.block_dim, out_dim is not None, longest)
        rest = (w.num_rows, num_loops, *weight_strides, *shape, w.height, *adds[:3], *epilogue)
        programs, cut = w.merges.size(0) * w.height // adds.rows, (w.merges, w.row_index)
        merge = Launch(_spmm_merge_kernel, programs, adds.warps, cut, rest, groups=blocks)
    returned = (dim if out_dim is None else out_dim, None if out_dtype == dtype else out_dtype)
    num_partial = w.num_slots * (w.height * blocks * config.block_dim if windows else dim)
    return Plan(w.num_rows, dim, *returned, keep_aggregate, not windows, main, merge, num_partial)


def plan_of(
    w: Walk,
    edges: EdgeOrder | None,
    x: Tensor,
    dim: int,
    scales: Scales,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    keep_aggregate: bool,
    out_dtype: torch.dtype,
) -> Plan:
    """What :func:`launch_plan` launches for such operands, as it was prepared when they first came.

    Args:
        w: The graph.
        edges: Where the edges' weights stand.
        x: Rows as they are gathered, ``[num_cols, at least dim]``.
        dim: Features of a sum.
        scales: As of :func:`launch_plan`, as are ``weight`` and ``bias``.
        weight: See there.
        bias: See there.
        relu: Whether negative results become 0.
        keep_aggregate: Whether the sums are returned beside their product with ``weight``.
        out_dtype: That of the result.
    """
    out_dim, strides = (None, (0, 0)) if weight is None else (weight.size(0), weight.stride())
    there = (scales.loop_weight is not None, scales.col_scale is not None)
    shape = (dim, x.dtype, out_dim, strides, x.stride(0), x.size(1), relu, *there)
    dtypes = [None if vector is None else vector.dtype for vector in (*scales, bias)]
    key = ("spmm", *shape, keep_aggregate, out_dtype, *dtypes)
    plan: Plan | None = w.plans.get(key)
    if plan is None:
        plan = w.plans[key] = _plan(w, edges, *shape, keep_aggregate, out_dtype)
    return plan


def launch_plan(
    plan: Plan,
    x: Tensor,
    scales: Scales,
    weight: Tensor | None,
    bias: Tensor | None,
    all_aligned: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launches the kernels. Returns ``(out, aggregate)``.

    Args:
        plan: That of :func:`plan_of` for these operands.
        x: Rows as they are gathered.
        scales: Factors.
        weight: ``[out_dim, dim]``.
        bias: ``[out_dim]``, contiguous.
        all_aligned: Whether all of them start on 16 bytes.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return launch_plan(plan, x, scales, weight, bias, all_aligned)
    rows, dim, out_dim, out_dtype, keep, by_rows, main, merge, num_partial = plan
    out = x.new_empty(rows, out_dim) if out_dtype is None else x.new_empty(rows, out_dim, dtype=out_dtype)
    aggregate = x.new_empty(rows, dim) if keep else None
    if rows == 0 or out_dim == 0:
        return out, aggregate
    partial = None
    if merge is not None:
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = x.new_empty(num_partial, dtype=acc)
    outputs = (x, out, partial, aggregate)
    operands = (*scales[1:], weight, bias)
    main(outputs, (scales[0], *operands) if by_rows else operands, all_aligned, index)
    if merge is not None:
        merge(outputs, operands, all_aligned, index)
    return out, aggregate


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
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return spmm(
                w, edges, x, edge_weight, loop_weight, row_scale, col_scale, weight, bias, relu,
                keep_aggregate, out_dtype,
            )  # fmt: skip
    sizes, dim, size = (w.num_entries, w.num_rows, w.num_cols), x.size(1), x.element_size()
    scale = col_scale if w.row_mask is not None else None  # rows multiply in passing
    if copies.gathers_copies(*sizes, dim, size, scale is not None):
        if scale is not None:
            scale, col_scale = scale.contiguous(), None
        x = gathered(w.plans, x[:, None], copies.gathered_width(*sizes, dim, size), scale)[:, 0]
    # an expanded gradient is not contiguous, say
    vectors = [
        None if vector is None else vector.contiguous()
        for vector in (edge_weight, loop_weight, row_scale, col_scale, bias)
    ]
    scales, bias = Scales(*vectors[:4]), vectors[4]
    plan = plan_of(w, edges, x, dim, scales, weight, bias, relu, keep_aggregate, out_dtype)
    return launch_plan(plan, x, scales, weight, bias, aligned(x, weight, *vectors))
