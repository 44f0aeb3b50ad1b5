"""Sampled product: one dot product of a row of `a` and a row of `b` per edge."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import EdgeOrder, Walk
from graphfuse.kernels import launch
from graphfuse.kernels.row_tiles import columns_of_step, first_columns, row_task
from graphfuse.kernels.run import Launch, accumulator, current_device
from graphfuse.kernels.tiles import after_previous, sum_of_products


# s[e] = <a[i], b[j]> for the edges e = (j -> i) of a row or of a slice of one.
#   grid      (num_tasks + num_rows,), as the row kernel of spmm
#   reads     a [num_rows, DIM], b [num_cols, DIM]; ptr, tasks, column, edge_perm
#   writes    s [num_edges], in the caller's order; every edge is written once
#   order     features left to right in blocks, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "split"])
def _sddmm_row_kernel(
    a_ptr, b_ptr, out_ptr, ptr_ptr, tasks_ptr, column_ptr, edge_perm_ptr, num_tasks, num_rows, split,
    a_stride, b_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, WITHOUT_LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    row, begin, end, _, listed = row_task(
        ptr_ptr, tasks_ptr, tl.program_id(0), num_tasks, num_rows, split, PACKED
    )
    if listed:
        return
    ahead = first_columns(column_ptr, begin, end, EDGES, STAGES)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        live = offs < end
        column, ahead = columns_of_step(column_ptr, offs, end, ahead, EDGES, STAGES)
        total = tl.zeros((EDGES,), dtype=ACC)
        for first in tl.range(0, DIM, BLOCK_DIM, num_stages=1):
            offs_dim = first + tl.arange(0, BLOCK_DIM)
            mask_dim = offs_dim < DIM
            a = tl.load(a_ptr + tl.cast(row, tl.int64) * a_stride + offs_dim, mask=mask_dim, other=0.0).to(
                ACC
            )
            offs_b = column[:, None].to(tl.int64) * b_stride + offs_dim[None, :]
            b = tl.load(b_ptr + offs_b, mask=live[:, None] & mask_dim[None, :], other=0.0).to(ACC)
            total += sum_of_products(a[None, :], b, live[:, None], 1, DIM)
        if WITHOUT_LOOPS:
            total = tl.where(column == row, 0.0, total)
        place = tl.load(edge_perm_ptr + offs, mask=live, other=0)
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=live)


def _plan(
    w: Walk, edges: EdgeOrder, dim: int, dtype: torch.dtype, strides: Any, without_loops: bool
) -> Launch:
    config = launch.sddmm_row(dim)
    num_tasks = w.tasks.size(0)
    rest: tuple[Any, ...] = (num_tasks, w.num_rows, w.split, *strides, dim, config.block_dim, config.step)
    rest += (config.stages, config.packed, without_loops, accumulator(dtype))
    by_row = (w.ptr, w.tasks, w.column, edges.perm)
    programs = num_tasks + w.num_rows
    return Launch(_sddmm_row_kernel, programs, config.warps, by_row, rest, packed=config.packed)


def sddmm(w: Walk, edges: EdgeOrder, a: Tensor, b: Tensor, without_loops: bool) -> Tensor:
    """Launches the kernel over the rows ``w``; operands are checked by :mod:`graphfuse.ops`."""
    index = a.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return sddmm(w, edges, a, b, without_loops)
    out = a.new_empty(edges.perm.numel())
    if out.numel() > 0:
        key = ("sddmm", a.dtype, a.size(1), a.stride(0), b.stride(0), without_loops)
        plan = w.plans.get(key)
        if plan is None:
            strides = (a.stride(0), b.stride(0))
            plan = w.plans[key] = _plan(w, edges, a.size(1), a.dtype, strides, without_loops)
        plan((a, b, out), (), (a.data_ptr() | b.data_ptr()) & 15 == 0, index)
    return out
