"""Forward of sparse attention: SDDMM, softmax and SpMM in one kernel, the scores stay on chip."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import Walk
from graphfuse.kernels import launch
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    exp,
    group_tile,
    inverse,
    kept,
    load_bits,
    rate_of,
    shift_of,
    signed,
    store_softmax,
    window_step,
)
from graphfuse.kernels.run import Launch, accumulator, current_device
from graphfuse.kernels.tiles import dot, load_task


@triton.jit
def one_row(
    q_ptr, k_ptr, v_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, num_rows, row, bit, head,
    offs_dim, mask_dim, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, STEP: tl.constexpr,
    RATE: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the window kernel does, for one row and head, which sees nothing of the other rows' neighbours: slow.
    mask_row = mask_dim & (row < num_rows)
    q = tl.load(q_ptr + tl.cast(row, tl.int64) * Q_STRIDE + offs_dim, mask=mask_row, other=0.0)
    q = signed(q, SCALE).to(ACC)
    top = tl.full((1,), float("-inf"), dtype=ACC)
    total = tl.zeros((1,), dtype=ACC)
    acc = tl.zeros(offs_dim.shape, dtype=ACC)
    for start in tl.range(begin, end, STEP):
        offs = start + tl.arange(0, STEP)
        bits = tl.load(row_mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
        live = ((bits >> bit) & 1) != 0
        column = tl.load(column_ptr + offs, mask=live, other=0)
        mask = live[:, None] & mask_dim[None, :]
        offs_row = column[:, None].to(tl.int64)
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
        s = tl.where(live, tl.sum(q[None, :] * k, 1), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shift = shift_of(higher) * RATE
        p = tl.exp2(s * RATE - shift)
        rescale = tl.exp2(top * RATE - shift)
        total = total * rescale + tl.sum(p, 0)
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live, other=0)
            p = tl.where(kept(seed_ptr, tl.zeros_like(column) + row, column, copy, head, DROPOUT), p, 0.0)
        acc = acc * rescale + tl.sum(p[:, None] * v, 0)
        top = higher
    return top, total, acc


# GROUP heads of 16 rows, tensor cores. The heads of a group stand below each other in one tile, q padded with
# zeros to the width of the group, so that a gathered row of k or v is read whole however narrow its heads are;
# of the tile's sums each head takes its own columns.
#   grid      (num_tasks * groups,): one program = one task (a window or a slice of one) and one group; all
#             tasks of a group run before the next, so that its columns of k and v stay in L2
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM]; tasks, column, row_mask
#   writes    out [num_rows, HEADS, DIM]; softmax ACC [num_rows, HEADS, 2]: maximum and sum, (0, 0) where no
#             edge; slices of a cut window write both and acc to their slot
#   on chip   top, total ACC [GROUP * 16]: running maximum (of q k, before scale) and sum; acc ACC
#             [GROUP * 16, BLOCK_DIM]
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows"])
def _attention_window_kernel(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, tasks_ptr, column_ptr, row_mask_ptr, copy_ptr,
    q_ptr, k_ptr, v_ptr, seed_ptr, num_tasks, num_rows,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, inner, heads, mask_dim, own = group_tile(window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    offs_dim = head * DIM + tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & own
    q = tl.load(q_ptr + rows[:, None].to(tl.int64) * Q_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    q = signed(q, SCALE)
    top = tl.full((GROUP * 16,), float("-inf"), dtype=ACC)
    total = tl.zeros((GROUP * 16,), dtype=ACC)
    acc = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(column_ptr, copy_ptr, start, end, bits, inner, COLUMNS, ACC)
        bits = next_bits
        offs_row = column[:, None].to(tl.int64)
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_dim[None, :], mask=mask_dim[None, :], other=0.0)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_dim[None, :], mask=mask_dim[None, :], other=0.0)
        s = dot(q, tl.trans(k), outside, ACC)
        higher = tl.maximum(top, tl.max(s, 1))
        shift = shift_of(higher) * RATE
        p = tl.exp2(s * RATE - shift[:, None])
        rescale = tl.exp2(top * RATE - shift)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT > 0:
            keep = kept(seed_ptr, rows[:, None], column[None, :], copy[None, :], heads[:, None], DROPOUT)
            p = tl.where(keep, p, 0.0)
        acc = dot(p.to(v.dtype), v, acc * rescale[:, None], ACC)
        top = higher
    # -inf + NaN and 0 * NaN are NaN: a NaN or Inf in one node would reach all 16 rows of its window
    if tl.max(((acc * 0) != 0).to(tl.int32)) > 0:
        for place in tl.range(0, GROUP * 16):
            top_one, total_one, acc_one = one_row(
                q_ptr, k_ptr, v_ptr, column_ptr, row_mask_ptr, copy_ptr, seed_ptr, begin, end, num_rows,
                window * 16 + place % 16, place % 16, head + place // 16, offs_dim,
                mask_dim & (tl.arange(0, BLOCK_DIM) // DIM == place // 16), Q_STRIDE, K_STRIDE, V_STRIDE,
                512 // BLOCK_DIM, RATE, SCALE, DROPOUT, ACC,
            )  # fmt: skip
            here = tl.arange(0, GROUP * 16) == place
            top, total = tl.where(here, top_one, top), tl.where(here, total_one, total)
            acc = tl.where(here[:, None], acc_one[None, :], acc)
    top *= RATE / LOG2_E
    if partial_ptr is not None:
        if slot >= 0:
            offs = (slot.to(tl.int64) * 16 + inner) * HEADS + heads
            tl.store(slots_ptr + offs * 2, top, mask=heads < HEADS)
            tl.store(slots_ptr + offs * 2 + 1, total, mask=heads < HEADS)
            offs_row = (slot.to(tl.int64) * 16 + inner) * HEADS * DIM
            tl.store(partial_ptr + offs_row[:, None] + offs_dim[None, :], acc, mask=own)
            return
    out = acc * (inverse(total) / (1.0 - DROPOUT))[:, None]
    offs = rows.to(tl.int64) * HEADS
    store_softmax(softmax_ptr, offs + heads, (rows < num_rows) & (heads < HEADS), top, total)
    offs_out = (offs * DIM)[:, None] + offs_dim[None, :]
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask)


# All heads of one row, plain multiply-adds: one exponential per edge and head, and sums in float32 proper.
#   grid      ((num_tasks + num_rows) * groups,): slices of long rows, then one row a program; a row too wide
#             for one program is dealt out in groups of BLOCK_HEADS heads
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM]; ptr, tasks, column
#   writes    as the window kernel, slices [1, HEADS, DIM]
#   on chip   top, total ACC [BLOCK_HEADS]; acc ACC [BLOCK_HEADS, BLOCK_DIM]
#   order     edges left to right within a row or slice, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "split"])
def _attention_row_kernel(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, column_ptr, copy_ptr,
    q_ptr, k_ptr, v_ptr, seed_ptr, num_tasks, num_rows, split,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth > 16
    programs = num_tasks + num_rows
    pid = tl.program_id(0) % programs
    slot = -1
    if pid < num_tasks:
        row, begin, end, slot = load_task(tasks_ptr, pid)
    else:
        row = pid - num_tasks
        begin = tl.load(ptr_ptr + row)
        end = tl.load(ptr_ptr + row + 1)
        if end - begin > split:
            return  # its slices were listed as tasks
    heads = (tl.program_id(0) // programs) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = (heads < HEADS)[:, None] & (offs_dim < DIM)[None, :]
    offs_head = heads[:, None] * DIM + offs_dim[None, :]
    q = tl.load(q_ptr + tl.cast(row, tl.int64) * Q_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    top = tl.full((BLOCK_HEADS,), float("-inf"), dtype=ACC)
    total = tl.zeros((BLOCK_HEADS,), dtype=ACC)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        live = offs < end
        column = tl.load(column_ptr + offs, mask=live, other=0)
        offs_row = column[:, None, None].to(tl.int64)
        gathered = live[:, None, None] & mask[None, :, :]
        k = tl.load(k_ptr + offs_row * K_STRIDE + offs_head[None, :, :], mask=gathered, other=0.0).to(ACC)
        v = tl.load(v_ptr + offs_row * V_STRIDE + offs_head[None, :, :], mask=gathered, other=0.0).to(ACC)
        s = tl.sum(q[None, :, :] * k, 2) * SCALE
        s = tl.where(live[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        shift = shift_of(higher)
        p = exp(s - shift[None, :], PRECISE)
        rescale = exp(top - shift, PRECISE)
        total = total * rescale + tl.sum(p, 0)
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live, other=0)
            dst = tl.zeros_like(p).to(tl.int32) + row
            p = tl.where(kept(seed_ptr, dst, column[:, None], copy[:, None], heads[None, :], DROPOUT), p, 0.0)
        acc = acc * rescale[:, None] + tl.sum(p[:, :, None] * v, 0)
        top = higher
    if partial_ptr is not None:
        if slot >= 0:
            offs_slot = tl.cast(slot, tl.int64) * HEADS + heads
            tl.store(slots_ptr + offs_slot * 2, top, mask=heads < HEADS)
            tl.store(slots_ptr + offs_slot * 2 + 1, total, mask=heads < HEADS)
            tl.store(partial_ptr + tl.cast(slot, tl.int64) * HEADS * DIM + offs_head, acc, mask=mask)
            return
    out = acc * (inverse(total) / (1.0 - DROPOUT))[:, None]
    store_softmax(softmax_ptr, tl.cast(row, tl.int64) * HEADS + heads, heads < HEADS, top, total)
    tl.store(
        out_ptr + tl.cast(row, tl.int64) * HEADS * DIM + offs_head,
        out.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


# Joins the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEADS,)
#   reads     slots ACC [num_slots, HEIGHT, HEADS, 2]: maximum and sum; partial ACC [num_slots, HEIGHT, HEADS,
#             DIM]
@triton.jit(do_not_specialize=["num_merges", "num_rows"])
def _attention_merge_kernel(
    out_ptr, softmax_ptr, partial_ptr, slots_ptr, merges_ptr, num_merges, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_merges
    window, first, count, _ = load_task(merges_ptr, tl.program_id(0) % num_merges)
    inner, offs_dim = tl.arange(0, HEIGHT), tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    top = tl.full((HEIGHT,), float("-inf"), dtype=ACC)
    total = tl.zeros((HEIGHT,), dtype=ACC)
    acc = tl.zeros((HEIGHT, BLOCK_DIM), dtype=ACC)
    for slot in tl.range(first, first + count):
        offs = (tl.cast(slot, tl.int64) * HEIGHT + inner) * HEADS + head
        slice_top = tl.load(slots_ptr + offs * 2)
        higher = tl.maximum(top, slice_top)
        shift = shift_of(higher)
        rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift)
        total = total * rescale + tl.load(slots_ptr + offs * 2 + 1) * weight
        part = tl.load(
            partial_ptr + offs[:, None] * DIM + offs_dim[None, :], mask=mask_dim[None, :], other=0.0
        )
        acc = acc * rescale[:, None] + part * weight[:, None]
        top = higher
    out = acc * (inverse(total) / (1.0 - DROPOUT))[:, None]
    rows = window * HEIGHT + inner
    offs_out = rows.to(tl.int64) * HEADS + head
    store_softmax(softmax_ptr, offs_out, rows < num_rows, top, total)
    tl.store(
        out_ptr + offs_out[:, None] * DIM + offs_dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & mask_dim[None, :],
    )


class Shape(NamedTuple):
    """What the launches of one attention are prepared for."""

    heads: int
    dim: int
    scale: float
    dropout: float
    dtype: torch.dtype


class _Plan(NamedTuple):
    main: Launch
    merge: Launch | None


def _plan(w: Walk, copies: Tensor | None, shape: Shape, strides: tuple[int, int, int]) -> _Plan:
    heads, dim, scale, dropout, dtype = shape
    num_tasks, acc = w.tasks.size(0), accumulator(dtype)
    if w.row_mask is not None:
        config = launch.attention_window(heads, dim, dropout > 0)
        structure: tuple[Tensor | None, ...] = (w.tasks, w.column, w.row_mask, copies)
        rest: tuple[Any, ...] = (num_tasks, w.num_rows, *strides, heads, dim, config.rows, config.block_dim)
        rest += (config.step, config.stages, scale, dropout, acc)
        programs = num_tasks * -(-heads // config.rows)
        main = Launch(_attention_window_kernel, programs, config.warps, structure, rest)
    else:
        config = launch.attention_row(heads, dim, dtype.itemsize)
        structure = (w.ptr, w.tasks, w.column, copies)
        rest = (num_tasks, w.num_rows, w.split, *strides, heads, dim, config.rows, config.block_dim)
        rest += (config.step, config.stages, scale, dropout, acc)
        programs = (num_tasks + w.num_rows) * -(-heads // config.rows)
        main = Launch(_attention_row_kernel, programs, config.warps, structure, rest)
    merge = None
    if w.num_slots > 0:
        num_merges, block = w.merges.size(0), launch.attention_merge(dim)
        rest = (num_merges, w.num_rows, heads, dim, block, w.height, dropout, acc)
        merge = Launch(_attention_merge_kernel, num_merges * heads, 4, (w.merges,), rest)
    return _Plan(main, merge)


def attention_fwd(
    w: Walk, copies: Tensor | None, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Launches the kernels over ``w``; operands are checked by :mod:`graphfuse.ops`.

    Returns:
        The output ``[num_rows, heads, dim]``, and maximum and sum of the softmax,
        ``[num_rows, heads, 2]``.
    """
    index = q.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return attention_fwd(w, copies, q, k, v, seed, shape)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((w.num_rows, shape.heads, shape.dim))
    softmax = q.new_empty((w.num_rows, shape.heads, 2), dtype=acc)
    if out.numel() == 0:
        return out, softmax
    strides = (q.stride(0), k.stride(0), v.stride(0))
    key = ("attention_fwd", shape, strides, copies is None)
    plan = w.plans.get(key)
    if plan is None:
        plan = w.plans[key] = _plan(w, copies, shape, strides)
    partial = slots = None
    if plan.merge is not None:
        rows = w.num_slots * w.height
        partial = q.new_empty((rows, shape.heads, shape.dim), dtype=acc)
        slots = q.new_empty((rows, shape.heads, 2), dtype=acc)
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0
    outputs = (out, softmax, partial, slots)
    plan.main(outputs, (q, k, v, seed), aligned, index)
    if plan.merge is not None:
        plan.merge(outputs, (), True, index)
    return out, softmax
