r"""Launching the backward of additive attention, GAT's and GATv2's.

With the weights :math:`p` of scores :math:`s`, the factor :math:`m` of dropout, and the gradient :math:`g` of
the output :math:`o`,

.. math::
    \delta_i = g_i^\top o_i, \qquad ds_{ij} = p_{ij} (m_{ij}\, g_i^\top x_j - \delta_i), \qquad
    dx_j = \sum_i m_{ij} p_{ij} g_i,

and what the scores are made of gets the rest. Of GAT, :math:`s = \ell(u)`, all terms of :math:`u` get sums of
:math:`ds\, \ell'(u)`. Of GATv2, :math:`s = a^\top \ell(u)`, they get those of :math:`ds\, a \odot \ell'(u)`,
and :math:`a` gets :math:`\sum ds\, \ell(u)`, of which each receiver sums up its part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.walk import Walk
from graphfuse.kernels import launch
from graphfuse.kernels.additive import Operands, Shape, gathered_together, row_config
from graphfuse.kernels.additive_delta import additive_delta_kernel
from graphfuse.kernels.additive_rows import gat_bwd_row_kernel
from graphfuse.kernels.attention import Plan, Structure, row_launch, window_launch, window_load
from graphfuse.kernels.attention_bwd import both_at_once
from graphfuse.kernels.attention_bwd_merge import merge_gradients
from graphfuse.kernels.columns import column_sums
from graphfuse.kernels.gat_bwd_windows import gat_bwd_window_kernel
from graphfuse.kernels.gat_listed import backward_launch, lists_edges, only_edges
from graphfuse.kernels.gatv2_rows import gatv2_bwd_alone_kernel, gatv2_bwd_row_kernel
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device


class Saved(NamedTuple):
    """What forward left behind."""

    out: Tensor
    softmax: Tensor
    tilt: Tensor


class Plans(NamedTuple):
    """What backward launches."""

    delta: Launch | None  # None where the kernel of `rows` goes over both directions, without statistics
    rows: Plan | None  # None of GAT, whose receivers need no gather
    columns: Plan


def backward_plans(
    structures: tuple[Structure, Structure], grad: Tensor, given: Operands, saved: Saved, shape: Shape
) -> Plans:
    """What :func:`additive_bwd` launches for such operands without features of edges; no size is 0."""
    if _both_at_once(structures, given, shape):
        return _alone_plan(structures, grad, given, shape)
    listed, no_edges = lists_edges(structures[1].walk, shape, trained=True), (None, None)
    delta = _delta_plan(structures, grad, given, saved, shape, listed)
    if not shape.v2:
        return Plans(delta, None, _gat_plan(structures[1], grad, given, shape, no_edges))
    rows, columns = [
        _gatv2_plan(structure, grad, given, shape, no_edges, transposed)
        for structure, transposed in zip(structures, (False, True), strict=True)
    ]
    return Plans(delta, rows, columns)


def _both_at_once(structures: tuple[Structure, Structure], given: Operands, shape: Shape) -> bool:
    # of GATv2, as of dot-product attention
    plain = given.edge is None and given.loop_edge is None
    return shape.v2 and plain and both_at_once(structures, shape.dtype)


def _keyed(structures: tuple[Structure, Structure], shape: Shape, listed: bool) -> bool:
    # whether backward's kernel takes from a receiver its key of dropout
    w = structures[1].walk
    return shape.dropout > 0 and w.row_mask is not None and not (listed or _by_factors(w, shape))


def _by_factors(w: Walk, shape: Shape) -> int:
    # the heads of a program if GAT's backward walks windows with weights by factors, else 0
    rounded = shape.dropout > 0 and not shape.self_loops  # delta of rows of one edge, whose terms cancel
    if shape.v2 or w.row_mask is None or rounded or not 0 <= shape.slope <= 1:
        return 0
    load = window_load(w)
    config = launch.gat_window(shape.heads, shape.dim, shape.dropout > 0, True, True, load)
    # sums of factors pay where windows have more than a step or two (results: records.md, which has no heads
    # of fewer than 8 features)
    fits = load is not launch.Load.TINY and config.warps == 1 and shape.heads % config.rows == 0
    return config.rows if fits and shape.dim >= 8 else 0


def _delta_plan(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    given: Operands,
    saved: Saved,
    shape: Shape,
    listed: bool,
) -> Launch:
    (w, copies, _), kind = structures[0], (_keyed(structures, shape, listed), listed)
    strides = (grad.stride(0), given.x.stride(0) if listed else 0)
    dtypes = saved.out.dtype, given.other.dtype
    key = ("additive_delta", shape, strides, *dtypes, saved.tilt.numel() == 0, *kind)
    plan: Launch | None = w.plans.get(key)
    if plan is None:
        config = launch.whole_rows(shape.dim)
        rest: tuple[Any, ...] = (grad.size(0), given.other.size(0), *strides)
        rest += (shape.heads, shape.dim, config.rows)
        rest += (config.block_dim, shape.slope, shape.dropout if listed else 0.0, listed)
        rest += (not listed and _by_factors(structures[1].walk, shape), accumulator(shape.dtype))
        programs = -(-grad.size(0) * shape.heads // config.rows)
        graph = (only_edges(w, copies, shape) if listed else None,)
        plan = w.plans[key] = Launch(additive_delta_kernel, programs, config.warps, graph, rest)
    return plan


def _stats(
    plan: Launch, grad: Tensor, given: Operands, saved: Saved, shape: Shape, keyed: bool, listed: bool
) -> tuple[Tensor, Tensor]:
    # statistics of the receivers, and of GAT the gradient of a_dst or nothing, [0]
    a_dst = None if shape.v2 else given.own
    tilt = None if saved.tilt.numel() == 0 else saved.tilt
    num_rows, heads, _ = saved.softmax.shape
    # before records of GAT's receivers stand the centres
    sizes = (num_rows, heads, 2) if listed else (num_rows if shape.v2 else num_rows + 1, heads, 4)
    stats = saved.softmax.new_empty(*sizes)
    d_a_dst = stats if shape.v2 else given.own.new_empty(*((0,) if tilt is None else (num_rows, heads)))
    seed, d_own = given.seed if keyed else None, d_a_dst if tilt is not None else None
    a_src = None if shape.v2 else given.other
    outputs = (stats, d_own, saved.out, grad, tilt, a_dst, a_src, saved.softmax, seed)
    x = given.x if listed else None
    plan(outputs, (x,), aligned(grad, a_dst, a_src, seed, x), grad.get_device())
    return stats, d_a_dst


def _like(tensor: Tensor | None, wanted: bool, x: Tensor) -> Tensor:
    return x.new_empty(0) if tensor is None or not wanted else tensor.new_empty(*tensor.shape)


def additive_bwd(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    given: Operands,
    saved: Saved,
    shape: Shape,
    with_edges: bool,
    plans: Plans | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernels: GAT's over the transpose, as its receivers need no gather; GATv2's over both.

    Args:
        structures: The graph and its transpose.
        grad: Gradient of the output.
        given: Operands of forward.
        saved: Results of forward.
        shape: That of forward.
        with_edges: Whether the gradients of ``edge`` and ``loop_edge`` are wanted.
        plans: Those of :func:`backward_plans`, if they are at hand.

    Returns:
        Gradients of ``own``, ``other``, ``x``, ``edge`` and ``loop_edge``; ``[0]`` where there is none.
    """
    own, other, x, edge, loop_edge, _ = given
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return additive_bwd(structures, grad, given, saved, shape, with_edges, plans)
    dx = x.new_empty(*x.shape)
    d_edges = (_like(edge, with_edges, x), _like(loop_edge, with_edges, x))
    if grad.numel() == 0:
        return torch.zeros_like(own), torch.zeros_like(other), dx.zero_(), *d_edges
    if plans is None and _both_at_once(structures, given, shape):
        plans = _alone_plan(structures, grad, given, shape)
    listed = lists_edges(structures[1].walk, shape, trained=True)
    delta = _delta_plan(structures, grad, given, saved, shape, listed) if plans is None else plans.delta
    if delta is None:
        assert plans is not None
        return *_gatv2_bwd_alone(structures, grad, given, saved, shape, dx, plans), dx, *d_edges
    stats, d_a_dst = _stats(delta, grad, given, saved, shape, _keyed(structures, shape, listed), listed)
    of_edges = tuple(value if value.numel() else None for value in d_edges)
    if shape.v2:
        d_own, d_other = _gatv2_bwd(structures, grad, given, saved, shape, stats, dx, of_edges, plans)
    else:
        d_own, d_other = (
            d_a_dst,
            _gat_bwd(structures[1], grad, given, shape, stats, dx, of_edges, plans, listed),
        )
    return d_own, d_other, dx, *d_edges


def _gat_bwd(
    structure: Structure,
    grad: Tensor,
    given: Operands,
    shape: Shape,
    stats: Tensor,
    dx: Tensor,
    of_edges: tuple[Tensor | None, ...],
    plans: Plans | None,
    listed: bool,
) -> Tensor:
    # fills dx and of_edges, and returns the gradient of a_src
    a_dst, a_src, x, edge, loop_edge, seed = given
    w, d_a_src = structure.walk, a_src.new_empty(*a_src.shape)
    if dx.numel() == 0:
        return d_a_src
    plan = _gat_plan(structure, grad, given, shape, of_edges) if plans is None else plans.columns
    partial = None
    if plan.merge is not None:
        width = slice_width(shape.heads * shape.dim, shape.heads)
        partial = stats.new_empty(w.num_slots * w.height, width)
    outputs: tuple[Tensor | None, ...] = (dx, d_a_src, partial)
    operands: tuple[Tensor | None, ...]
    if listed:
        operands = (a_src, a_dst, x, grad, stats, seed)
    elif w.row_mask is not None:
        operands = (a_src, x, grad, stats, seed)
    else:
        outputs = (dx, d_a_src, *of_edges, partial)
        operands = (a_src, x, grad, edge, loop_edge, stats, seed)
    plan.main(outputs, operands, aligned(*operands), x.get_device())
    if plan.merge is not None:
        plan.merge((dx, None, d_a_src, partial), (), True, x.get_device())
    return d_a_src


def _gat_plan(
    structure: Structure, grad: Tensor, given: Operands, shape: Shape, of_edges: tuple[Tensor | None, ...]
) -> Plan:
    strides, plans = (given.x.stride(0), grad.stride(0)), structure.walk.plans
    missing = structure.copies is None, given.edge is None, *[value is None for value in of_edges]
    key = ("gat_bwd", shape, strides, given.other.dtype, *missing)
    plan: Plan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _gat_bwd_plan(structure, given, shape, strides)
    return plan


def _gat_bwd_plan(structure: Structure, given: Operands, shape: Shape, strides: tuple[int, int]) -> Plan:
    w, copies, edge_perm = structure
    heads, dim, slope, dropout, loops, _, dtype = shape
    num_tasks, num_loops, acc = w.tasks.size(0), min(w.num_rows, w.num_cols), accumulator(dtype)
    graph: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    if lists_edges(w, shape, trained=True):
        main = backward_launch(w, copies, shape, strides)
    elif w.row_mask is not None:
        split = _by_factors(w, shape) > 0
        config = launch.gat_window(heads, dim, dropout > 0, True, split, window_load(w))
        rest = (w.num_rows, num_loops, *strides, heads, dim, config.rows, gathered_together(config))
        rest += (config.block_dim, config.step, config.stages, config.warps, split, slope, dropout)
        main, w = window_launch(gat_bwd_window_kernel, structure, config, heads, loops, rest, acc)
    else:
        config = row_config(w, shape, backward=True)
        graph = (w.ptr, w.tasks, w.column, copies, edge_perm)
        rest = (num_tasks, w.num_rows, num_loops, w.split, *strides, heads, dim, config.rows)
        rest += (config.block_dim, config.step, config.stages, config.packed, slope, dropout, loops, acc)
        main = row_launch(gat_bwd_row_kernel, num_tasks + w.num_rows, config, heads, graph, rest)
    return Plan(main, merge_gradients(w, heads * dim, heads, dim, 1, 2, acc))


def _gatv2_bwd(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    given: Operands,
    saved: Saved,
    shape: Shape,
    stats: Tensor,
    dx: Tensor,
    of_edges: tuple[Tensor | None, ...],
    plans: Plans | None,
) -> tuple[Tensor, Tensor]:
    # fills dx and of_edges, and returns the gradients of x_dst and att
    x_dst, att, x, edge, loop_edge, seed = given
    d_dst = x_dst.new_empty(*x_dst.shape)
    d_att = torch.empty_like(d_dst, dtype=att.dtype)  # of each receiver
    merges: list[tuple[Launch, tuple[Tensor | None, ...]]] = []  # as in attention_bwd
    for structure, first, second in ((structures[0], d_dst, d_att), (structures[1], dx, None)):
        if first.numel() == 0:
            continue
        w, transposed = structure.walk, second is None
        filled = (None, None) if transposed else of_edges
        plan = None if plans is None else plans.columns if transposed else plans.rows
        if plan is None:
            plan = _gatv2_plan(structure, grad, given, shape, filled, transposed)
        partial = None
        if plan.merge is not None:
            width = shape.heads * shape.dim * (1 if transposed else 2)
            partial = stats.new_empty(w.num_slots * w.height, width)
        out = saved.out if x.dtype == torch.float32 and not transposed else None
        operands = (x, x_dst, att, grad, out, edge, loop_edge, stats, seed)
        plan.main((first, second, *filled, partial), operands, aligned(*operands), x.get_device())
        if plan.merge is not None:
            merges.append((plan.merge, (first, second, None, partial)))
    for merge, outputs in merges:
        merge(outputs, (), True, x.get_device())
    return d_dst, column_sums(d_att if d_att.dim() == 2 else d_att.flatten(1), att.dtype).view(att.shape)


def _gatv2_bwd_alone(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    given: Operands,
    saved: Saved,
    shape: Shape,
    dx: Tensor,
    plans: Plans,
) -> tuple[Tensor, Tensor]:
    # fills dx, and returns the gradients of x_dst and att
    x_dst, att, x, _, _, seed = given
    d_dst = x_dst.new_empty(*x_dst.shape)
    d_att = torch.empty_like(d_dst, dtype=att.dtype)  # of each receiver
    assert plans.rows is not None
    partials, merges = [], (plans.rows.merge, plans.columns.merge)
    for structure, merge, parts in zip(structures, merges, (2, 1), strict=True):
        width = parts * shape.heads * shape.dim
        partials.append(None if merge is None else x.new_empty(structure.walk.num_slots, width))
    operands = (x, x_dst, att, grad, saved.out, saved.softmax, seed)
    plans.rows.main((d_dst, d_att, dx, *partials), operands, aligned(*operands), x.get_device())
    for merge, first, second, partial in zip(merges, (d_dst, dx), (d_att, None), partials, strict=True):
        if merge is not None:
            merge((first, second, None, partial), (), True, x.get_device())
    return d_dst, column_sums(d_att if d_att.dim() == 2 else d_att.flatten(1), att.dtype).view(att.shape)


def _alone_plan(
    structures: tuple[Structure, Structure], grad: Tensor, given: Operands, shape: Shape
) -> Plans:
    strides = (given.x.stride(0), given.own.stride(0), grad.stride(0))
    key = ("gatv2_bwd_alone", shape, strides, given.other.dtype, structures[0].copies is None)
    plans = structures[0].walk.plans
    plan: Plans | None = plans.get(key)
    if plan is not None:
        return plan
    (w, copies, _), (t, other_copies, _) = structures
    heads, dim, slope, dropout, loops, _, dtype = shape
    config, acc = row_config(w, shape, backward=True), accumulator(dtype)
    graph = (w.ptr, w.tasks, w.column, copies, t.ptr, t.tasks, t.column, other_copies)
    tasks, num_loops = (w.tasks.size(0), t.tasks.size(0)), min(w.num_rows, w.num_cols)
    rest: tuple[Any, ...] = (tasks[0], w.num_rows, num_loops, w.split, tasks[1])
    rest += (t.num_rows, t.split, *strides, heads, dim, config.rows, config.block_dim, config.step)
    rest += (config.stages, config.packed, slope, dropout, loops, acc)
    programs = sum(tasks) + w.num_rows + t.num_rows
    main = row_launch(gatv2_bwd_alone_kernel, programs, config, heads, graph, rest)
    merges = [merge_gradients(one, heads * dim, heads, dim, 0, parts, acc) for one, parts in ((w, 2), (t, 1))]
    plan = plans[key] = Plans(None, Plan(main, merges[0]), Plan(main, merges[1]))
    return plan


def _gatv2_plan(
    structure: Structure,
    grad: Tensor,
    given: Operands,
    shape: Shape,
    of_edges: tuple[Tensor | None, ...],
    transposed: bool,
) -> Plan:
    strides, plans = (given.x.stride(0), given.own.stride(0), grad.stride(0)), structure.walk.plans
    missing = structure.copies is None, given.edge is None, *[value is None for value in of_edges]
    key = ("gatv2_bwd", shape, strides, given.other.dtype, transposed, *missing)
    plan: Plan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _gatv2_bwd_plan(structure, shape, strides, transposed)
    return plan


def _gatv2_bwd_plan(
    structure: Structure, shape: Shape, strides: tuple[int, int, int], transposed: bool
) -> Plan:
    w, copies, edge_perm = structure
    heads, dim, slope, dropout, loops, _, dtype = shape
    num_tasks, num_loops = w.tasks.size(0), min(w.num_rows, w.num_cols)
    config = row_config(w, shape, backward=True)
    graph = (w.ptr, w.tasks, w.column, copies, edge_perm)
    rest: tuple[Any, ...] = (num_tasks, w.num_rows, num_loops, w.split, *strides, transposed, heads, dim)
    acc = accumulator(dtype)
    rest += (config.rows, config.block_dim, config.step, config.stages, config.packed)
    rest += (slope, dropout, loops, acc)
    main = row_launch(gatv2_bwd_row_kernel, num_tasks + w.num_rows, config, heads, graph, rest)
    return Plan(main, merge_gradients(w, heads * dim, heads, dim, 0, 1 if transposed else 2, acc))
