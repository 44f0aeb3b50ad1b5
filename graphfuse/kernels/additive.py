"""Launching the forward of additive attention, GAT's and GATv2's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import Walk
from graphfuse.kernels import float32_rows, gat_listed, launch, merge_shapes
from graphfuse.kernels.additive_rows import additive_row_kernel
from graphfuse.kernels.additive_tiles import finish
from graphfuse.kernels.attention import Plan, Structure, row_launch, row_load, window_launch, window_load
from graphfuse.kernels.attention_tiles import shift_of
from graphfuse.kernels.device import HALF
from graphfuse.kernels.gat_listed import Shape as Shape
from graphfuse.kernels.gat_windows import gat_window_kernel
from graphfuse.kernels.merge_tiles import highest_of_slots, merge_task, over_slots, rows_by_heads
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous, rows_at


# Joins the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEIGHT / ROWS, ceil(HEADS / BLOCK_HEADS))
#   reads     slots ACC [num_slots, HEIGHT, HEADS, 3]: maximum and sums; partial ACC [num_slots, HEIGHT, ..]:
#             HEADS * DIM sums of x, and then as many of the tilt if it is wanted; merges, and row_index of
#             windows
@triton.jit(do_not_specialize=["num_rows"])
def _additive_merge_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, merges_ptr, row_index_ptr, bias_ptr,
    num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HEIGHT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    PARTS: tl.constexpr = 1 if tilt_ptr is None else 2
    window, begin, end, first = merge_task(merges_ptr, HEIGHT, ROWS)
    nth, inner, head = rows_by_heads(first, tl.program_id(1), SLOTS, ROWS, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    top = tl.full(head.shape, float("-inf"), dtype=ACC)
    total = tl.zeros(head.shape, dtype=ACC)
    high = tl.zeros(head.shape, dtype=ACC)
    acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        slot = start + nth
        live = (slot < end) & (head < HEADS)
        mask_own = live[:, None] & (offs_dim < DIM)[None, :]
        offs_slot = slot.to(tl.int64) * HEIGHT + inner
        offs = slots_ptr + (offs_slot * HEADS + head) * 3
        slice_top = tl.load(offs, mask=live, other=float("-inf"))
        higher = tl.maximum(top, slice_top)
        shift = shift_of(higher)
        rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift)
        total = total * rescale + tl.load(offs + 1, mask=live, other=0.0) * weight
        at = partial_ptr + (offs_slot * PARTS * HEADS * DIM + head * DIM)[:, None] + offs_dim[None, :]
        acc = acc * rescale[:, None] + tl.load(at, mask=mask_own, other=0.0) * weight[:, None]
        if tilt_ptr is not None:
            high = high * rescale + tl.load(offs + 2, mask=live, other=0.0) * weight
            more = tl.load(at + HEADS * DIM, mask=mask_own, other=0.0)
            tilt = tilt * rescale[:, None] + more * weight[:, None]
        top = higher
    if SLOTS > 1:
        top, factor = highest_of_slots(top, SLOTS)
        total, high = over_slots(total * factor, SLOTS), over_slots(high * factor, SLOTS)
        acc, tilt = over_slots(acc * factor[:, None], SLOTS), over_slots(tilt * factor[:, None], SLOTS)
        _, inner, head = rows_by_heads(first, tl.program_id(1), 1, ROWS, BLOCK_HEADS)
    rows = rows_at(row_index_ptr, window * HEIGHT + inner)
    place, mask = rows.to(tl.int64) * HEADS + head, (rows < num_rows) & (head < HEADS)
    finish(
        out_ptr, softmax_ptr, tilt_ptr, sum_ptr, bias_ptr, place, mask,
        (place * DIM)[:, None] + offs_dim[None, :], mask[:, None] & (offs_dim < DIM)[None, :],
        (head * DIM)[:, None] + offs_dim[None, :], top, total, high, acc, tilt, DROPOUT,
    )  # fmt: skip


class Operands(NamedTuple):
    """Tensors that forward takes; heads of a row and all but rows are contiguous."""

    own: Tensor  # GAT: a_dst [num_dst, heads], dtype of other; GATv2: x_dst [num_dst, heads, dim]
    other: Tensor  # GAT: a_src [num_src, heads]; GATv2: att [heads, dim]; its dtype is that of the result
    x: Tensor  # [num_src, heads, dim]
    edge: Tensor | None  # [num_edges, heads], of GATv2 [num_edges, heads, dim]
    loop_edge: Tensor | None  # as edge, of the loops
    seed: Tensor | None


def gathered_together(config: launch.Config) -> int:
    """PAIR of window kernels: heads, of ``config.rows``, whose rows are gathered at once, 64 features."""
    return min(config.rows, max(1, 64 // config.block_dim))


def _merge(w: Walk, shape: Shape, tilted: bool) -> Launch | None:
    if w.num_slots == 0:
        return None
    block_heads, block_dim, _ = merge_shapes.heads_of(shape.heads, shape.dim, tilted=tilted)
    graph, groups, acc = (w.merges, w.row_index), -(-shape.heads // block_heads), accumulator(shape.dtype)
    adds = merge_shapes.of_softmax(w.height, block_heads * block_dim * (1 + tilted), tilted)
    rest: tuple[Any, ...] = (w.num_rows, shape.heads, shape.dim, block_heads, block_dim, w.height)
    rest += (*adds[:3], shape.dropout, acc)
    programs = w.merges.size(0) * w.height // adds.rows
    return Launch(_additive_merge_kernel, programs, adds.warps, graph, rest, groups=groups)


def row_config(w: Walk, shape: Shape, backward: bool) -> launch.Config:
    """How the row kernels are launched."""
    row = launch.gatv2_row if shape.v2 else launch.gat_row
    return row(shape.heads, shape.dim, shape.dtype.itemsize, row_load(w), backward)


def _plan(structure: Structure, shape: Shape, strides: tuple[int, int], tilted: bool) -> Plan:
    w, copies, edge_perm = structure
    heads, dim, slope, dropout, loops, v2, dtype = shape
    num_tasks, num_loops, acc = w.tasks.size(0), min(w.num_rows, w.num_cols), accumulator(dtype)
    graph: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    if gat_listed.lists_edges(w, shape, tilted):
        return Plan(gat_listed.forward_launch(w, copies, shape, strides[0]), _merge(w, shape, tilted))
    if w.row_mask is not None:
        config = launch.gat_window(heads, dim, dropout > 0, False, tilted, window_load(w))
        pair = gathered_together(config)
        rest = (w.num_rows, num_loops, strides[0], heads, dim, config.rows, pair, config.block_dim)
        guess = config.guess and 0 <= slope <= 1  # beyond, scores do not grow with their terms
        rest += (config.step, config.stages, guess, slope, dropout)
        main, w = window_launch(gat_window_kernel, structure, config, heads, loops, rest, acc)
    else:
        config = row_config(w, shape, backward=False)
        graph = (w.ptr, w.tasks, w.column, copies, edge_perm)
        rest = (num_tasks, w.num_rows, num_loops, w.split, *strides, heads, dim, config.rows)
        rows = 1
        if not (v2 or dtype in HALF):
            rows = float32_rows.rows_of_gat(w.num_rows, heads, dim, tilted, row_load(w))
        rest += (config.block_dim, rows, config.step, config.stages, config.packed)
        rest += (slope, dropout, loops, v2, acc)
        programs = num_tasks + -(-w.num_rows // rows)
        main = row_launch(additive_row_kernel, programs, config, heads, graph, rest)
    return Plan(main, _merge(w, shape, tilted))


def forward_plan(
    structure: Structure,
    given: Operands,
    shape: Shape,
    tilted: bool,
    bias: Tensor | None = None,
    keep_softmax: bool = True,
) -> Plan:
    """What :func:`additive_fwd` launches for such operands, as it was prepared when they first came."""
    strides = (given.x.stride(0), given.own.stride(0))
    missing = structure.copies is None, given.edge is None, given.loop_edge is None, bias is None
    key = ("additive_fwd", shape, strides, given.other.dtype, tilted, keep_softmax, *missing)
    plans = structure.walk.plans
    plan: Plan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(structure, shape, strides, tilted)
    return plan


def additive_fwd(
    structure: Structure,
    given: Operands,
    shape: Shape,
    tilted: bool,
    plan: Plan | None = None,
    bias: Tensor | None = None,
    keep_softmax: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Launches the kernels over ``structure``; operands are checked by :mod:`graphfuse.ops`.

    Args:
        structure: The graph.
        given: Operands; heads of ``x`` and of GATv2's ``own`` may stand side by side, ``[:, heads * dim]``.
        shape: What to prepare for.
        tilted: Whether to return GAT's tilt.
        plan: That of :func:`forward_plan`, if it is at hand.
        bias: ``[heads * dim]``, contiguous, dtype of ``other``.
        keep_softmax: Whether there will be a backward pass.

    Returns:
        The output ``[num_rows, heads, dim]``, heads side by side if those of ``x`` are; maximum and sum of
        the softmax, ``[num_rows, heads, 2]``, or None; the tilt, of the shape of the output, or nothing,
        ``[0]``; the output plus the bias, if there is one.
    """
    own, other, x, edge, loop_edge, seed = given
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return additive_fwd(structure, given, shape, tilted, plan, bias, keep_softmax)
    w = structure.walk
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = other.new_empty(w.num_rows, *x.shape[1:])
    softmax = x.new_empty(w.num_rows, shape.heads, 2, dtype=acc) if keep_softmax else None
    tilt = x.new_empty(*(out.shape if tilted else (0,)))
    with_bias = None if bias is None else other.new_empty(*out.shape)
    if out.numel() == 0:
        return out, softmax, tilt, with_bias
    if plan is None:
        plan = forward_plan(structure, given, shape, tilted, bias, keep_softmax)
    partial = slots = None
    if plan.merge is not None:
        rows = w.num_slots * w.height
        partial = x.new_empty(rows, shape.heads * shape.dim * (1 + tilted), dtype=acc)
        slots = x.new_empty(rows, shape.heads, 3, dtype=acc)
    outputs = (out, softmax, tilt if tilted else None, with_bias, partial, slots)
    operands: tuple[Tensor | None, ...] = (own, other, x, edge, loop_edge, seed, bias)
    if w.row_mask is not None:
        operands = (other, own, x, seed, bias)
    plan.main(outputs, operands, aligned(*operands), index)
    if plan.merge is not None:
        plan.merge(outputs, (bias,), aligned(bias), index)
    return out, softmax, tilt, with_bias
