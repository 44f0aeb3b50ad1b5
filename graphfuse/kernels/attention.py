"""Launching the forward of sparse attention: SDDMM, softmax and SpMM in one kernel, scores stay on chip."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.formats.walk import Walk, longer_slices, row_masks
from graphfuse.kernels import launch, merge_shapes
from graphfuse.kernels.attention_rows import attention_row_kernel
from graphfuse.kernels.attention_tiles import inverse, shift_of, store_softmax
from graphfuse.kernels.attention_windows import attention_window_kernel
from graphfuse.kernels.merge_tiles import highest_of_slots, merge_task, over_slots, rows_by_heads
from graphfuse.kernels.norm_tiles import after_residual, store_sum
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import ONCE, after_previous, rows_at


# Joins the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEIGHT / ROWS, ceil(HEADS / BLOCK_HEADS))
#   reads     slots ACC [num_slots, HEIGHT, HEADS, 2]: maximum and sum; partial ACC [num_slots, HEIGHT,
#             HEADS * (DIM + EDGE_DIM)]: the sums of v of all heads, then those of edge_attr; merges, and
#             row_index of windows; x and what comes with it as the window kernel
@triton.jit(do_not_specialize=["num_rows"])
def _attention_merge_kernel(
    out_ptr, sum_ptr, softmax_ptr, edge_sum_ptr, partial_ptr, slots_ptr, merges_ptr, row_index_ptr, x_ptr,
    offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, num_rows, R_STRIDE: tl.constexpr, EPS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, EDGE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    window, begin, end, first = merge_task(merges_ptr, HEIGHT, ROWS)
    nth, inner, head = rows_by_heads(first, tl.program_id(1), SLOTS, ROWS, BLOCK_HEADS)
    offs_dim, offs_edge = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_EDGE)
    mask_dim, mask_edge = (offs_dim < DIM)[None, :], (offs_edge < EDGE_DIM)[None, :]
    top = tl.full(head.shape, float("-inf"), dtype=ACC)
    total = tl.zeros(head.shape, dtype=ACC)
    acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    edge_acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_EDGE), dtype=ACC)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        slot = start + nth
        live = (slot < end) & (head < HEADS)
        offs_slot = slot.to(tl.int64) * HEIGHT + inner
        offs = offs_slot * HEADS + head
        slice_top = tl.load(slots_ptr + offs * 2, mask=live, other=float("-inf"))
        higher = tl.maximum(top, slice_top)
        shift = shift_of(higher)
        rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift)
        total = total * rescale + tl.load(slots_ptr + offs * 2 + 1, mask=live, other=0.0) * weight
        at = partial_ptr + (offs_slot * HEADS * (DIM + EDGE_DIM) + head * DIM)[:, None] + offs_dim[None, :]
        acc = acc * rescale[:, None] + tl.load(at, mask=live[:, None] & mask_dim, other=0.0) * weight[:, None]
        if EDGE_DIM > 0:
            offs_edges = offs_slot * HEADS * (DIM + EDGE_DIM) + HEADS * DIM + head * EDGE_DIM
            at = partial_ptr + offs_edges[:, None] + offs_edge[None, :]
            more = tl.load(at, mask=live[:, None] & mask_edge, other=0.0)
            edge_acc = edge_acc * rescale[:, None] + more * weight[:, None]
        top = higher
    if SLOTS > 1:
        top, factor = highest_of_slots(top, SLOTS)
        total, acc = over_slots(total * factor, SLOTS), over_slots(acc * factor[:, None], SLOTS)
        edge_acc = over_slots(edge_acc * factor[:, None], SLOTS)
        _, inner, head = rows_by_heads(first, tl.program_id(1), 1, ROWS, BLOCK_HEADS)
    norm = (inverse(total) / (1.0 - DROPOUT))[:, None]
    rows = rows_at(row_index_ptr, window * HEIGHT + inner)
    offs_out = rows.to(tl.int64) * HEADS + head
    mask_row = (rows < num_rows) & (head < HEADS)
    store_softmax(softmax_ptr, offs_out, mask_row, top, total)
    at, mask = out_ptr + offs_out[:, None] * DIM + offs_dim[None, :], mask_row[:, None] & mask_dim
    residual = (x_ptr, offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, sum_ptr)
    out = after_residual(acc * norm, rows, offs_dim, mask, residual, R_STRIDE, DIM, EPS, ACC)
    offs_row, place = rows.to(tl.int64)[:, None], (head * DIM)[:, None] + offs_dim[None, :]
    store_sum(sum_ptr, x_ptr, out, offs_row, place, mask, R_STRIDE, HEADS * DIM)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
    if EDGE_DIM > 0:
        at = edge_sum_ptr + offs_out[:, None] * EDGE_DIM + offs_edge[None, :]
        tl.store(at, (edge_acc * norm).to(edge_sum_ptr.dtype.element_ty), mask=mask_row[:, None] & mask_edge)


class Shape(NamedTuple):
    """What the launches of one attention are prepared for."""

    heads: int
    dim: int
    scale: float
    dropout: float
    dtype: torch.dtype
    edge_dim: int = 0
    self_loops: bool = False  # whether each node has one loop, and no other


class Structure(NamedTuple):
    """One direction of the graph, with what only some attentions need of it."""

    walk: Walk
    copies: Tensor | None  # of each entry, how many equal ones stand before; with dropout
    edge_perm: Tensor | None  # position in the caller's edge list of each edge; with edge_attr


def window_load(w: Walk) -> launch.Load:
    """What the tasks of ``w`` ask of the GPU, which walks windows."""
    return launch.load(w.tasks.size(0), w.num_entries)


def over_windows(w: Walk, config: launch.Config, heads: int) -> Walk:
    """``w`` with the slices of a kernel whose programs have ``config.rows`` of ``heads`` heads each."""
    groups = -(-heads // config.rows)
    times = launch.slices(groups, config.block_dim, w.tasks.size(0), w.num_slots, w.num_entries)
    return longer_slices(w, times)


def window_launch(
    kernel: Any,
    structure: Structure,
    config: launch.Config,
    heads: int,
    self_loops: bool,
    rest: tuple[Any, ...],
    acc: tl.dtype,
) -> tuple[Launch, Walk]:
    """Prepares a window kernel of attention.

    Args:
        kernel: What is launched.
        structure: The graph.
        config: How it is launched.
        heads: In all; a program has ``config.rows`` of them.
        self_loops: Whether each node has one loop, and no other.
        rest: Parameters between those of the graph and the last two, LOOPS (see :func:`.row_masks`) and ACC.
        acc: ACC.

    Returns:
        The launch, and the walk whose slices it writes.
    """
    w = over_windows(structure.walk, config, heads)
    row_mask, loops = row_masks(w, self_loops)
    graph = (w.ptr if self_loops else None, w.tasks, w.row_index, w.column, row_mask, structure.copies)
    rest += (loops, acc)
    groups = -(-heads // config.rows)
    return Launch(kernel, w.tasks.size(0), config.warps, graph, rest, config.registers, groups), w


def row_launch(
    kernel: Any,
    programs: int,
    config: launch.Config,
    heads: int,
    graph: tuple[Tensor | None, ...],
    rest: tuple[Any, ...],
) -> Launch:
    """Prepares a row kernel of attention, of whose ``heads`` a program has ``config.rows``."""
    groups = -(-heads // config.rows)
    return Launch(kernel, programs, config.warps, graph, rest, config.registers, groups, config.packed)


def row_load(w: Walk) -> launch.RowLoad:
    """What the rows of ``w`` ask of the GPU, which walks rows."""
    return launch.row_load(w.num_rows, w.num_cols, w.num_entries)


class Edges(NamedTuple):
    """Numbers that belong to edges."""

    query: Tensor  # [num_dst, heads, edge_dim]
    attr: Tensor  # [num_edges, edge_dim], contiguous rows


class Residual(NamedTuple):
    """What the result is added to; of one head also a norm of that, which takes the place of the result."""

    x: Tensor | None  # [num_rows, heads * dim], contiguous features; None: the sum is the result once more
    offset: Tensor | None = None  # [dim], contiguous, as are the following
    weight: Tensor | None = None  # None: there is no norm, and the sum is returned beside the result
    bias: Tensor | None = None
    mean: Tensor | None = None  # batch norm's; layer norm takes each row's own
    var: Tensor | None = None
    eps: float = 0.0


_NONE: tuple[None, ...] = (None,) * 6  # in place of a residual's tensors


class Plan(NamedTuple):
    """What is launched for a walk."""

    main: Launch
    merge: Launch | None


def _plan(
    structure: Structure, shape: Shape, strides: tuple[int, ...], scaled: bool, residual: Residual | None
) -> Plan:
    w, copies, edge_perm = structure
    heads, dim, scale, dropout, dtype, edge_dim, loops = shape
    num_tasks, acc = w.tasks.size(0), accumulator(dtype)
    after = (0, 0.0)
    if residual is not None and residual.x is not None:
        after = (residual.x.stride(0), float(residual.eps))
    graph: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    if w.row_mask is not None:
        config = launch.attention_window(heads, dim, dtype.itemsize, dropout > 0, scaled, window_load(w))
        rest = (w.num_rows, *strides[:3], *after, heads, dim, config.rows, config.block_dim)
        rest += (config.step, config.stages, config.warps, config.guess, scale, dropout)
        main, w = window_launch(attention_window_kernel, structure, config, heads, loops, rest, acc)
    else:
        config = launch.attention_row(heads, dim, dtype.itemsize, row_load(w), False, edge_dim)
        graph = (w.ptr, w.tasks, w.column, copies, edge_perm)
        rest = (num_tasks, w.num_rows, w.split, *strides, after[0], heads, dim, edge_dim, config.rows)
        rest += (config.block_dim, config.block_out, config.step, config.stages, config.packed)
        rest += (scale, dropout, loops, acc)
        main = row_launch(attention_row_kernel, num_tasks + w.num_rows, config, heads, graph, rest)
    merge = None
    if w.num_slots > 0:
        blocks = merge_shapes.heads_of(heads, dim, edge_dim)
        adds = merge_shapes.of_softmax(w.height, blocks[0] * (blocks[1] + blocks[2] * (edge_dim > 0)))
        rest = (w.num_rows, *after, heads, dim, edge_dim, *blocks, w.height, *adds[:3], dropout, acc)
        programs, graph = w.merges.size(0) * w.height // adds.rows, (w.merges, w.row_index)
        groups = -(-heads // blocks[0])
        merge = Launch(_attention_merge_kernel, programs, adds.warps, graph, rest, groups=groups)
    return Plan(main, merge)


def forward_plan(
    structure: Structure,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_scale: Tensor | None,
    edges: Edges | None,
    shape: Shape,
    residual: Residual | None = None,
    keep_softmax: bool = True,
) -> Plan:
    """What :func:`attention_fwd` launches for such operands, as it was prepared when they first came."""
    strides = (q.stride(0), k.stride(0), v.stride(0), 0 if edges is None else edges.attr.stride(0))
    missing = structure.copies is None, key_scale is None, keep_softmax
    key: tuple[Any, ...] = ("attention_fwd", shape, strides, *missing)
    if residual is not None:
        stride = None if residual.x is None else residual.x.stride(0)
        key += (stride, residual.eps, *[None if t is None else t.dtype for t in residual[1:6]])
    plans = structure.walk.plans
    plan: Plan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(structure, shape, strides, key_scale is not None, residual)
    return plan


def attention_fwd(
    structure: Structure,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_scale: Tensor | None,
    seed: Tensor | None,
    edges: Edges | None,
    shape: Shape,
    plan: Plan | None = None,
    residual: Residual | None = None,
    keep_softmax: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Launches the kernels over ``structure``; operands are checked by :mod:`graphfuse.ops`.

    Args:
        structure: The graph.
        q: ``[num_rows, heads, dim]``, or heads side by side, ``[num_rows, heads * dim]``.
        k: Likewise, of the columns.
        v: Likewise.
        key_scale: Factors of ``v`` that make ``k``.
        seed: That of dropout.
        edges: Numbers of edges.
        shape: What to prepare for.
        plan: That of :func:`forward_plan`, if it is at hand.
        residual: Without edges' numbers; a norm in inference alone, of one head and windows.
        keep_softmax: Whether there will be a backward pass.

    Returns:
        The output, of the shape of ``q``; maximum and sum of the softmax, ``[num_rows, heads, 2]``, or None;
        the weighted sums of ``edges.attr``, ``[num_rows, heads, edge_dim]``, or nothing, ``[0]``; the output
        plus ``residual.x``, where there is no norm, or None.
    """
    index = q.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return attention_fwd(
                structure, q, k, v, key_scale, seed, edges, shape, plan, residual, keep_softmax
            )
    w = structure.walk
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape)
    softmax = q.new_empty(w.num_rows, shape.heads, 2, dtype=acc) if keep_softmax else None
    edge_sum = q.new_empty(*((0,) if edges is None else (w.num_rows, shape.heads, shape.edge_dim)))
    total = q.new_empty(*q.shape) if residual is not None and residual.weight is None else None
    if out.numel() == 0:
        return out, softmax, edge_sum, total
    if plan is None:
        plan = forward_plan(structure, q, k, v, key_scale, edges, shape, residual, keep_softmax)
    partial = slots = None
    if plan.merge is not None:
        rows = w.num_slots * w.height
        partial = q.new_empty(rows, shape.heads * (shape.dim + shape.edge_dim), dtype=acc)
        slots = q.new_empty(rows, shape.heads, 2, dtype=acc)
    outputs: tuple[Tensor | None, ...] = (out, total, softmax, partial, slots)
    more: tuple[Tensor | None, ...] = _NONE if residual is None else residual[:6]
    operands: tuple[Tensor | None, ...] = (q, k, v, key_scale, seed, *more)
    written = None if edges is None else edge_sum
    if w.row_mask is None:
        outputs = (out, total, softmax, written, partial, slots)
        operands = (q, k, v, key_scale, *(edges or (None, None)), seed, more[0])
    plan.main(outputs, operands, aligned(*operands), index)
    if plan.merge is not None:
        plan.merge((out, total, softmax, written, partial, slots), more, aligned(*more), index)
    return out, softmax, edge_sum, total
