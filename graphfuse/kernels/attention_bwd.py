r"""Backward of sparse attention: dq over the rows of the graph, dk and dv over those of its transpose.

The weights are recomputed from the maximum :math:`t` and the sum :math:`z` of the softmax,
:math:`p_{ij} = \exp(\lambda q_i^\top k_j - t_i) / z_i`, not from their LSE: in float32 that is off by 1e-3 at
scores of 1e4, and so would the weights be. With the factor :math:`m_{ij}` of dropout, 0 or 1 / (1 - rate):

.. math::
    \delta_i = g_i^\top o_i, \quad d_{ij} = p_{ij} (m_{ij}\, g_i^\top v_j - \delta_i), \quad
    dq_i = \lambda \sum_j d_{ij} k_j, \quad dk_j = \lambda \sum_i d_{ij} q_i, \quad
    dv_j = \sum_i m_{ij} p_{ij} g_i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import Walk, Walks
from graphfuse.kernels import launch
from graphfuse.kernels.attention import Shape
from graphfuse.kernels.attention_tiles import (
    LOG2_E,
    exp,
    group_tile,
    inverse,
    kept,
    load_bits,
    of_receivers,
    rate_of,
    signed,
    slope,
    window_step,
)
from graphfuse.kernels.device import HALF
from graphfuse.kernels.run import Launch, accumulator, current_device
from graphfuse.kernels.tiles import dot, load_task


# What backward needs to know of each row and head, side by side so that a gather touches one sector: in half
# precision the pair (LSE in base 2, delta), where the rounding of an LSE does the same to all weights of a row;
# else (maximum, 1 / sum, delta, -).
#   grid      (num_rows * groups,), groups of BLOCK_HEADS heads
@triton.jit(do_not_specialize=["num_rows"])
def _attention_delta_kernel(
    stats_ptr, out_ptr, grad_ptr, softmax_ptr, num_rows,
    GRAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    heads = (tl.program_id(0) // num_rows) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = (heads < HEADS)[:, None] & (offs_dim < DIM)[None, :]
    offs = heads[:, None] * DIM + offs_dim[None, :]
    out = tl.load(out_ptr + row * HEADS * DIM + offs, mask=mask, other=0.0).to(ACC)
    grad = tl.load(grad_ptr + row * GRAD_STRIDE + offs, mask=mask, other=0.0).to(ACC)
    place, live = row * HEADS + heads, heads < HEADS
    top = tl.load(softmax_ptr + place * 2, mask=live, other=0.0)
    total = tl.load(softmax_ptr + place * 2 + 1, mask=live, other=1.0)
    delta = tl.sum(out * grad, 1)
    if out_ptr.dtype.element_ty.primitive_bitwidth > 16:
        tl.store(stats_ptr + place * 4, top, mask=live)
        tl.store(stats_ptr + place * 4 + 1, inverse(total), mask=live)
        tl.store(stats_ptr + place * 4 + 2, delta, mask=live)
    else:
        lse = top * LOG2_E + tl.log2(tl.where(total == 0, 1.0, total))
        tl.store(stats_ptr + place * 2, lse, mask=live)
        tl.store(stats_ptr + place * 2 + 1, delta, mask=live)


# GROUP heads of 16 rows, tensor cores, below each other in one tile as in the forward kernel. The rows are
# receivers: (own, own_value) is (q, grad), and (other, other_value) is (k, v); dq comes out. TRANSPOSED: they
# are sources, the pairs are swapped, and dk and dv come out.
#   grid      (num_tasks * groups,), as the forward kernel
#   reads     own and other [.., HEADS, DIM]; stats ACC [num_receivers, HEADS, 2]
#   writes    first (dq or dk) and, if TRANSPOSED, second (dv) [num_rows, HEADS, DIM]; slices to their slot
#   order     entries left to right within a task, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows"])
def _attention_bwd_window_kernel(
    first_ptr, second_ptr, partial_ptr, tasks_ptr, column_ptr, row_mask_ptr, copy_ptr,
    own_ptr, own_value_ptr, other_ptr, other_value_ptr, stats_ptr, seed_ptr, num_tasks, num_rows,
    OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr,
    OTHER_VALUE_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    RATE: tl.constexpr = rate_of(SCALE)
    head = tl.program_id(0) // num_tasks * GROUP
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0) % num_tasks)
    rows, inner, heads, mask_dim, mask_own = group_tile(window, head, HEADS, DIM, GROUP, BLOCK_DIM)
    offs_dim = head * DIM + tl.arange(0, BLOCK_DIM)
    live_row = (rows < num_rows) & (heads < HEADS)
    mask = (rows < num_rows)[:, None] & mask_own
    offs_row = rows[:, None].to(tl.int64)
    own = tl.load(own_ptr + offs_row * OWN_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    own = signed(own, SCALE)
    own_value = tl.load(own_value_ptr + offs_row * OWN_VALUE_STRIDE + offs_dim[None, :], mask=mask, other=0.0)
    if not TRANSPOSED:
        stats = stats_ptr + (rows.to(tl.int64) * HEADS + heads)[:, None] * 2
        lse = tl.load(stats, mask=live_row[:, None], other=0.0)
        delta = tl.load(stats + 1, mask=live_row[:, None], other=0.0)
    first = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    second = tl.zeros((GROUP * 16, BLOCK_DIM), dtype=ACC)
    bits = load_bits(row_mask_ptr, begin, end, COLUMNS)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS)
        column, copy, outside = window_step(column_ptr, copy_ptr, start, end, bits, inner, COLUMNS, ACC)
        bits = next_bits
        offs_other = column[:, None].to(tl.int64)
        offs = offs_other * OTHER_STRIDE + offs_dim[None, :]
        other = tl.load(other_ptr + offs, mask=mask_dim[None, :], other=0.0)
        offs = offs_other * OTHER_VALUE_STRIDE + offs_dim[None, :]
        other_value = tl.load(other_value_ptr + offs, mask=mask_dim[None, :], other=0.0)
        if TRANSPOSED:
            lse, delta = of_receivers(stats_ptr, column, head, HEADS, GROUP, COLUMNS)
        s = dot(own, tl.trans(other), outside, ACC)
        p = tl.exp2(s * RATE - lse)
        dropped = p
        if DROPOUT == 0:
            # of a row with one edge this is 0 but for the rounding of sums, which half precision will not show
            dp = dot(own_value, tl.trans(other_value), tl.broadcast_to(-delta, outside.shape), ACC)
            ds = p * dp
        else:
            dp = dot(own_value, tl.trans(other_value), tl.zeros_like(outside), ACC)
            dst, src = rows[:, None], column[None, :]
            if TRANSPOSED:
                dst, src = src, dst
            keep = kept(seed_ptr, dst, src, copy[None, :], heads[:, None], DROPOUT)
            dp = tl.where(keep, dp / (1.0 - DROPOUT), 0.0)
            dropped = tl.where(keep, p / (1.0 - DROPOUT), 0.0)
            ds = slope(p, dp, delta, False)
        first = dot(ds.to(other.dtype), other, first, ACC)
        if TRANSPOSED:
            second = dot(dropped.to(other_value.dtype), other_value, second, ACC)
    first *= SCALE
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            PARTS: tl.constexpr = 2 if TRANSPOSED else 1
            offs_slot = (slot.to(tl.int64) * 16 + inner) * HEADS * PARTS * DIM
            offs_slot = offs_slot[:, None] + offs_dim[None, :]
            tl.store(partial_ptr + offs_slot, first, mask=mask_own)
            if TRANSPOSED:
                tl.store(partial_ptr + offs_slot + HEADS * DIM, second, mask=mask_own)
    if whole:
        offs_out = offs_row * HEADS * DIM + offs_dim[None, :]
        tl.store(first_ptr + offs_out, first.to(first_ptr.dtype.element_ty), mask=mask)
        if TRANSPOSED:
            tl.store(second_ptr + offs_out, second.to(second_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_stats(stats_ptr, place, mask, PRECISE: tl.constexpr):
    # what the delta kernel stored: (maximum, 1 / sum, delta), or (LSE, -, delta)
    if PRECISE:
        norm = tl.load(stats_ptr + place * 4 + 1, mask=mask, other=0.0)
        return tl.load(stats_ptr + place * 4, mask=mask, other=0.0), norm, tl.load(
            stats_ptr + place * 4 + 2, mask=mask, other=0.0
        )
    lse = tl.load(stats_ptr + place * 2, mask=mask, other=0.0)
    return lse, lse, tl.load(stats_ptr + place * 2 + 1, mask=mask, other=0.0)


@triton.jit
def weight(s, top, norm, PRECISE: tl.constexpr):
    # softmax of the score s, from what `load_stats` found
    if PRECISE:
        return exp(s - top, True) * norm
    return tl.exp2(s * LOG2_E - top)


# All heads of one row, plain multiply-adds; otherwise as the window kernel.
#   grid      (num_tasks + num_rows,), as the forward kernel
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "split"])
def _attention_bwd_row_kernel(
    first_ptr, second_ptr, partial_ptr, ptr_ptr, tasks_ptr, column_ptr, copy_ptr,
    own_ptr, own_value_ptr, other_ptr, other_value_ptr, stats_ptr, seed_ptr, num_tasks, num_rows, split,
    OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr,
    OTHER_VALUE_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth > 16
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
    mask_head = heads < HEADS
    mask = mask_head[:, None] & (offs_dim < DIM)[None, :]
    offs_head = heads[:, None] * DIM + offs_dim[None, :]
    offs_row = tl.cast(row, tl.int64)
    own = tl.load(own_ptr + offs_row * OWN_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    own_value = tl.load(own_value_ptr + offs_row * OWN_VALUE_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    if not TRANSPOSED:
        place = (offs_row * HEADS + heads)[None, :]
        top, norm, delta = load_stats(stats_ptr, place, mask_head[None, :], PRECISE)
    first = tl.zeros((BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    second = tl.zeros((BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        live = offs < end
        column = tl.load(column_ptr + offs, mask=live, other=0)
        offs_other = column[:, None, None].to(tl.int64)
        gathered = live[:, None, None] & mask[None, :, :]
        offs_gathered = offs_other * OTHER_STRIDE + offs_head[None, :, :]
        other = tl.load(other_ptr + offs_gathered, mask=gathered, other=0.0).to(ACC)
        offs_gathered = offs_other * OTHER_VALUE_STRIDE + offs_head[None, :, :]
        other_value = tl.load(other_value_ptr + offs_gathered, mask=gathered, other=0.0).to(ACC)
        if TRANSPOSED:
            place = column[:, None].to(tl.int64) * HEADS + heads[None, :]
            top, norm, delta = load_stats(stats_ptr, place, live[:, None] & mask_head[None, :], PRECISE)
        s = tl.sum(own[None, :, :] * other, 2) * SCALE
        p = weight(tl.where(live[:, None], s, float("-inf")), top, norm, PRECISE)
        dp = tl.sum(own_value[None, :, :] * other_value, 2)
        dropped = p
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live, other=0)
            dst, src = tl.zeros_like(p).to(tl.int32) + row, column[:, None]
            if TRANSPOSED:
                dst, src = src, dst
            keep = kept(seed_ptr, dst, src, copy[:, None], heads[None, :], DROPOUT)
            dp = tl.where(keep, dp / (1.0 - DROPOUT), 0.0)
            dropped = tl.where(keep, p / (1.0 - DROPOUT), 0.0)
        ds = tl.where(live[:, None], slope(p, dp, delta, PRECISE), 0.0)
        first += tl.sum(ds[:, :, None] * other, 0)
        if TRANSPOSED:
            second += tl.sum(dropped[:, :, None] * other_value, 0)
    first *= SCALE
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            parts = 2 if TRANSPOSED else 1
            offs_slot = tl.cast(slot, tl.int64) * HEADS * DIM * parts + offs_head
            tl.store(partial_ptr + offs_slot, first, mask=mask)
            if TRANSPOSED:
                tl.store(partial_ptr + offs_slot + HEADS * DIM, second, mask=mask)
    if whole:
        offs_out = offs_row * HEADS * DIM + offs_head
        tl.store(first_ptr + offs_out, first.to(first_ptr.dtype.element_ty), mask=mask)
        if TRANSPOSED:
            tl.store(second_ptr + offs_out, second.to(second_ptr.dtype.element_ty), mask=mask)


# Adds the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEADS,)
#   reads     partial ACC [num_slots, HEIGHT, PARTS, HEADS, DIM]
@triton.jit(do_not_specialize=["num_merges", "num_rows"])
def _attention_bwd_merge_kernel(
    first_ptr, second_ptr, partial_ptr, merges_ptr, num_merges, num_rows,
    PARTS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HEIGHT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // num_merges
    window, begin, count, _ = load_task(merges_ptr, tl.program_id(0) % num_merges)
    inner, offs_dim = tl.arange(0, HEIGHT), tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < DIM
    rows = window * HEIGHT + inner
    offs_out = (rows.to(tl.int64)[:, None] * HEADS + head) * DIM + offs_dim[None, :]
    mask = (rows < num_rows)[:, None] & mask_dim[None, :]
    for part in tl.static_range(PARTS):
        acc = tl.zeros((HEIGHT, BLOCK_DIM), dtype=ACC)
        for slot in tl.range(begin, begin + count):
            offs = ((tl.cast(slot, tl.int64) * HEIGHT + inner[:, None]) * PARTS + part) * HEADS + head
            acc += tl.load(partial_ptr + offs * DIM + offs_dim[None, :], mask=mask_dim[None, :], other=0.0)
        if part == 0:
            tl.store(first_ptr + offs_out, acc.to(first_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(second_ptr + offs_out, acc.to(second_ptr.dtype.element_ty), mask=mask)


class _Plan(NamedTuple):
    main: Launch
    merge: Launch | None


def _plan(w: Walk, copies: Tensor | None, shape: Shape, strides: tuple[int, ...], transposed: bool) -> _Plan:
    heads, dim, scale, dropout, dtype = shape
    num_tasks, acc = w.tasks.size(0), accumulator(dtype)
    if w.row_mask is not None:
        config = launch.attention_bwd_window(heads, dim, dropout > 0)
        structure: tuple[Tensor | None, ...] = (w.tasks, w.column, w.row_mask, copies)
        rest: tuple[Any, ...] = (num_tasks, w.num_rows, *strides, transposed, heads, dim, config.rows)
        rest += (config.block_dim, config.step, config.stages, scale, dropout, acc)
        programs = num_tasks * -(-heads // config.rows)
        main = Launch(_attention_bwd_window_kernel, programs, config.warps, structure, rest)
    else:
        config = launch.attention_row(heads, dim, dtype.itemsize)
        structure = (w.ptr, w.tasks, w.column, copies)
        rest = (num_tasks, w.num_rows, w.split, *strides, transposed, heads, dim, config.rows)
        rest += (config.block_dim, config.step, config.stages, scale, dropout, acc)
        programs = (num_tasks + w.num_rows) * -(-heads // config.rows)
        main = Launch(_attention_bwd_row_kernel, programs, config.warps, structure, rest)
    merge = None
    if w.num_slots > 0:
        num_merges, block = w.merges.size(0), launch.attention_merge(dim)
        rest = (num_merges, w.num_rows, 2 if transposed else 1, heads, dim, block, w.height, acc)
        merge = Launch(_attention_bwd_merge_kernel, num_merges * heads, 4, (w.merges,), rest)
    return _Plan(main, merge)


def attention_bwd(
    walks: Walks,
    copies: tuple[Tensor | None, Tensor | None],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax: Tensor,
    seed: Tensor | None,
    shape: Shape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernels over both directions; returns the gradients of ``q``, ``k`` and ``v``."""
    index = q.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return attention_bwd(walks, copies, grad, q, k, v, out, softmax, seed, shape)
    dq, dk, dv = (q.new_empty(tensor.shape) for tensor in (q, k, v))
    if grad.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    stats = softmax.new_empty((*softmax.shape[:2], 2 if shape.dtype in HALF else 4))
    plans = walks.forward.plans
    key: tuple[Any, ...] = ("attention_delta", shape, grad.stride(0))
    if key not in plans:
        config, acc = launch.attention_row(shape.heads, shape.dim, shape.dtype.itemsize), accumulator(shape.dtype)
        rest = (out.size(0), grad.stride(0), shape.heads, shape.dim, config.rows, config.block_dim, acc)
        programs = out.size(0) * -(-shape.heads // config.rows)
        plans[key] = Launch(_attention_delta_kernel, programs, config.warps, (), rest)
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | grad.data_ptr()) & 15 == 0
    plans[key]((stats, out, grad, softmax), (), aligned, index)
    receivers, sources = (q, grad), (k, v)
    for w, copy, first, second, own, other in (
        (walks.forward, copies[0], dq, None, receivers, sources),
        (walks.backward, copies[1], dk, dv, sources, receivers),
    ):
        if first.numel() == 0:
            continue
        strides = tuple(tensor.stride(0) for tensor in (*own, *other))
        key = ("attention_bwd", shape, strides, copy is None, second is None)
        plan = w.plans.get(key)
        if plan is None:
            plan = w.plans[key] = _plan(w, copy, shape, strides, second is not None)
        partial = None
        if plan.merge is not None:
            parts = 1 if second is None else 2
            partial = softmax.new_empty((w.num_slots * w.height, parts, shape.heads, shape.dim))
        plan.main((first, second, partial), (*own, *other, stats, seed), aligned, index)
        if plan.merge is not None:
            plan.merge((first, second, partial), (), True, index)
    return dq, dk, dv
