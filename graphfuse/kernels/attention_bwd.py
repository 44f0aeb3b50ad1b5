r"""Launching the backward of sparse attention: dq over the rows of the graph, dk and dv over its transpose.

The weights are recomputed from the maximum :math:`t` and the sum :math:`z` of the softmax,
:math:`p_{ij} = \exp(\lambda q_i^\top k_j - t_i) / z_i`, not from their LSE: in float32 that is off by 1e-3 at
scores of 1e4, and so would the weights be. (Half precision does take the LSE.) With the factor :math:`m_{ij}`
of dropout, 0 or 1 / (1 - rate):

.. math::
    \delta_i = g_i^\top o_i, \quad d_{ij} = p_{ij} (m_{ij}\, g_i^\top v_j - \delta_i), \quad
    dq_i = \lambda \sum_j d_{ij} k_j, \quad dk_j = \lambda \sum_i d_{ij} q_i, \quad
    dv_j = \sum_i m_{ij} p_{ij} g_i.

With edges, :math:`h` the gradient of their sums :math:`r`: :math:`\delta` gains :math:`h_i^\top r_i` and
:math:`g_i^\top v_j` gains :math:`h_i^\top a_{ij}`; :math:`du_i = \lambda \sum_j d_{ij} a_{ij}` and
:math:`da_{ij} = \lambda d_{ij} u_i + m_{ij} p_{ij} h_i`, summed over heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import float32_rows, launch
from graphfuse.kernels.attention import (
    Edges,
    Plan,
    Shape,
    Structure,
    row_launch,
    row_load,
    window_launch,
    window_load,
)
from graphfuse.kernels.attention_bwd_merge import merge_gradients
from graphfuse.kernels.attention_bwd_rows import attention_bwd_alone_kernel, attention_bwd_row_kernel
from graphfuse.kernels.attention_bwd_windows import attention_bwd_window_kernel
from graphfuse.kernels.attention_tiles import LOG2_E, inverse
from graphfuse.kernels.device import HALF
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import (
    after_previous,
    load_rows,
    product_of_rows,
    rows_and_heads,
    store_pairs,
    store_quads,
)


# What backward needs to know of each row and head, side by side so that a gather touches one sector: in half
# precision the pair (LSE in base 2, -delta), as the rounding of an LSE does the same to all weights of a row;
# else (maximum, 1 / sum, delta, -). And a copy of the gradient, where one is wanted.
#   grid      (ceil(num_rows * HEADS / ROWS),), as the GPU starts but 1.6 programs a nanosecond
@triton.jit(do_not_specialize=["num_rows"])
def _attention_delta_kernel(
    stats_ptr, copy_ptr, out_ptr, grad_ptr, edge_sum_ptr, edge_value_ptr, softmax_ptr, num_rows,
    GRAD_STRIDE: tl.constexpr, COPY_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    EDGE_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    place, live, offs_grad = rows_and_heads(num_rows, GRAD_STRIDE, HEADS, DIM, ROWS)
    grad = load_rows(grad_ptr, offs_grad, live, DIM, BLOCK_DIM)
    out = load_rows(out_ptr, place * DIM, live, DIM, BLOCK_DIM)
    top = tl.load(softmax_ptr + place * 2, mask=live, other=0.0)
    total = tl.load(softmax_ptr + place * 2 + 1, mask=live, other=1.0)
    delta = product_of_rows(out, grad, live, DIM, ACC)
    if edge_sum_ptr is not None:
        edge_sum = load_rows(edge_sum_ptr, place * EDGE_DIM, live, EDGE_DIM, BLOCK_EDGE)
        edge_value = load_rows(edge_value_ptr, place * EDGE_DIM, live, EDGE_DIM, BLOCK_EDGE)
        delta += product_of_rows(edge_sum, edge_value, live, EDGE_DIM, ACC)
    if copy_ptr is not None:
        offs_dim = tl.arange(0, BLOCK_DIM)[None, :]
        offs = place // HEADS * COPY_STRIDE + place % HEADS * DIM
        tl.store(copy_ptr + offs[:, None] + offs_dim, grad, mask=live[:, None] & (offs_dim < DIM))
    if out_ptr.dtype.element_ty.primitive_bitwidth > 16:
        store_quads(stats_ptr, place, live, top, inverse(total), delta, tl.zeros((ROWS,), dtype=ACC))
    else:
        lse = top * LOG2_E + tl.log2(tl.where(total == 0, 1.0, total))
        store_pairs(stats_ptr, place, live, lse, -delta)


class Saved(NamedTuple):
    """What forward left behind."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_scale: Tensor | None
    out: Tensor
    softmax: Tensor
    edge_sum: Tensor
    seed: Tensor | None
    edges: Edges | None


def _plan(structure: Structure, shape: Shape, strides: tuple[int, ...], transposed: bool) -> Plan:
    w, copies, edge_perm = structure
    heads, dim, scale, dropout, dtype, edge_dim, loops = shape
    num_tasks, acc = w.tasks.size(0), accumulator(dtype)
    graph: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    if w.row_mask is not None:
        config = launch.attention_bwd_window(heads, dim, dropout > 0, loops, window_load(w))
        rest = (w.num_rows, *strides[:5], transposed, heads, dim, config.rows, config.block_dim)
        rest += (config.step, config.stages, config.warps, scale, dropout)
        main, w = window_launch(attention_bwd_window_kernel, structure, config, heads, loops, rest, acc)
    else:
        config = launch.attention_row(heads, dim, dtype.itemsize, row_load(w), True, edge_dim)
        graph = (w.ptr, w.tasks, w.column, copies, edge_perm)
        rest = (num_tasks, w.num_rows, w.split, *strides, transposed, heads, dim, edge_dim, config.rows)
        rest += (config.block_dim, config.block_out, config.step, config.stages, config.packed)
        rest += (scale, dropout, loops, acc)
        main = row_launch(attention_bwd_row_kernel, num_tasks + w.num_rows, config, heads, graph, rest)
    edge_dim = 0 if transposed else edge_dim
    parts = 2 if transposed or edge_dim > 0 else 1
    return Plan(main, merge_gradients(w, strides[0], heads, dim, edge_dim, parts, acc))


def both_at_once(structures: tuple[Structure, Structure], dtype: torch.dtype) -> bool:
    """Whether one kernel walks both directions of a graph whose edges have no numbers, and nothing before."""
    w, t = (structure.walk for structure in structures)
    if dtype in HALF or w.row_mask is not None or t.row_mask is not None:
        return False
    return float32_rows.one_backward(w.num_rows, w.num_cols, w.num_entries)


class Plans(NamedTuple):
    """What backward launches."""

    delta: Launch | None
    rows: Plan  # without `delta` its kernel goes over both directions
    columns: Plan


def _delta_plan(structure: Structure, grad: Tensor, shape: Shape, copy_stride: int) -> Launch:
    plans = structure.walk.plans
    key = ("attention_delta", shape, grad.stride(0), copy_stride)
    plan: Launch | None = plans.get(key)
    if plan is None:
        config = launch.whole_rows(max(shape.dim, shape.edge_dim))
        if shape.dtype not in HALF:  # a thread has four numbers, as in row kernels, whose sums this meets
            config = launch.attention_delta(max(shape.dim, shape.edge_dim))
        blocks = launch.power_of_two(shape.dim), launch.power_of_two(shape.edge_dim)
        rest: tuple[Any, ...] = (grad.size(0), grad.stride(0), copy_stride, shape.heads, shape.dim)
        rest += (shape.edge_dim, config.rows, *blocks, accumulator(shape.dtype))
        programs = -(-grad.size(0) * shape.heads // config.rows)
        plan = plans[key] = Launch(_attention_delta_kernel, programs, config.warps, (), rest)
    return plan


def _direction_plan(
    structure: Structure,
    grad: Tensor,
    saved: Saved,
    shape: Shape,
    with_edge_attr: bool,
    transposed: bool,
    out_stride: int,
) -> Plan:
    edges, pairs = saved.edges, ((saved.q, grad), (saved.k, saved.v))
    own, other = pairs[::-1] if transposed else pairs
    strides = (out_stride, *[tensor.stride(0) for tensor in (*own, *other)])
    strides += (0 if edges is None else edges.attr.stride(0),)
    given = (structure.copies is None, saved.key_scale is None, with_edge_attr)
    key = ("attention_bwd", shape, strides, transposed, *given)
    plans = structure.walk.plans
    plan: Plan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(structure, shape, strides, transposed)
    return plan


def _alone_plan(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    saved: Saved,
    shape: Shape,
    out_stride: int,
    copies: bool,
) -> Plans:
    strides = (out_stride, *[tensor.stride(0) for tensor in (saved.q, grad, saved.k, saved.v)])
    given = (structures[0].copies is None, saved.key_scale is None, copies)
    key, plans = ("attention_bwd_alone", shape, strides, *given), structures[0].walk.plans
    plan: Plans | None = plans.get(key)
    if plan is not None:
        return plan
    (w, own_copies, _), (t, other_copies, _) = structures
    heads, dim, scale, dropout, dtype, _, loops = shape
    config, acc = launch.attention_row(heads, dim, dtype.itemsize, row_load(w), True), accumulator(dtype)
    graph = (w.ptr, w.tasks, w.column, own_copies, t.ptr, t.tasks, t.column, other_copies)
    tasks = w.tasks.size(0), t.tasks.size(0)
    rest: tuple[Any, ...] = (tasks[0], w.num_rows, w.split, tasks[1], t.num_rows, t.split, *strides)
    rest += (heads, dim, config.rows, config.block_dim, config.step, config.stages, config.packed)
    rest += (scale, dropout, loops, acc)
    programs = sum(tasks) + w.num_rows + t.num_rows
    main = row_launch(attention_bwd_alone_kernel, programs, config, heads, graph, rest)
    merges = [merge_gradients(one, out_stride, heads, dim, 0, parts, acc) for one, parts in ((w, 1), (t, 2))]
    plan = plans[key] = Plans(None, Plan(main, merges[0]), Plan(main, merges[1]))
    return plan


def backward_plans(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    saved: Saved,
    shape: Shape,
    out_stride: int,
    copies: bool = False,
    with_edge_attr: bool = False,
) -> Plans:
    """What :func:`attention_bwd` launches for such operands, as it was prepared when they first came.

    Args:
        structures: As of :func:`attention_bwd`.
        grad: Likewise.
        saved: Likewise.
        shape: Likewise.
        out_stride: That of the rows that are written.
        copies: Whether ``grad`` is copied, to such rows.
        with_edge_attr: As of :func:`attention_bwd`.
    """
    if saved.edges is None and both_at_once(structures, shape.dtype):
        return _alone_plan(structures, grad, saved, shape, out_stride, copies)
    rows, columns = [
        _direction_plan(structure, grad, saved, shape, with_edge_attr, transposed, out_stride)
        for structure, transposed in zip(structures, (False, True), strict=True)
    ]
    return Plans(_delta_plan(structures[0], grad, shape, out_stride * copies), rows, columns)


def attention_bwd(
    structures: tuple[Structure, Structure],
    grad: Tensor,
    edge_value: Tensor | None,
    saved: Saved,
    shape: Shape,
    with_edge_attr: bool = True,
    plans: Plans | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernels over both directions.

    Args:
        structures: The graph and its transpose.
        grad: Gradient of the output.
        edge_value: Gradient of the weighted sums of ``edges.attr``, contiguous.
        saved: Operands and results of forward.
        shape: That of forward.
        with_edge_attr: Whether the gradient of ``edges.attr`` is wanted.
        plans: Those of :func:`backward_plans`, if they are at hand; then there are no ``edges``.
        into: Where the gradients of ``q``, ``k`` and ``v`` go, and then a copy of ``grad`` if one is wanted,
            rows of one stride; ``None`` makes the three.

    Returns:
        Gradients of ``q``, ``k``, ``v``, ``edges.query`` and ``edges.attr``; ``[0]`` where there is none.
        With a ``key_scale``, ``saved.k`` is ``saved.v``, and the first of their gradients is that of the
        keys, ``key_scale * v``, the second that of the values alone.
    """
    q, k, v, edges = saved.q, saved.k, saved.v, saved.edges
    index = q.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return attention_bwd(structures, grad, edge_value, saved, shape, with_edge_attr, plans, into)
    dq, dk, dv, *copies = into or [q.new_empty(*one.shape) for one in (q, k, v)]
    if plans is None:
        d_query, d_attr = q.new_empty(0), q.new_empty(0)
    else:
        d_query = d_attr = saved.edge_sum  # as empty, and nobody's result
    if edges is not None:
        d_query = q.new_empty(*edges.query.shape)
        d_attr = q.new_empty(edges.attr.shape if with_edge_attr else 0)
    if grad.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), d_query, d_attr
    if plans is None:
        plans = backward_plans(structures, grad, saved, shape, dq.stride(0), False, d_attr.numel() > 0)
    third = None if edges is None else d_query
    partials: list[Tensor | None] = []
    sums, numbers = shape.heads * shape.dim, 0 if third is None else shape.heads * shape.edge_dim
    for structure, plan, width in (
        (structures[0], plans.rows, slice_width(sums, numbers)),
        (structures[1], plans.columns, 2 * sums),
    ):
        num_slots = 0 if plan.merge is None else structure.walk.num_slots * structure.walk.height
        partials.append(saved.softmax.new_empty(num_slots, width) if num_slots else None)
    copy = copies[0] if copies else None
    if plans.delta is None:
        outputs: tuple[Tensor | None, ...] = (dq, dk, dv, copy, *partials)
        operands: tuple[Tensor | None, ...] = (q, grad, k, v, saved.key_scale, saved.out, saved.softmax)
        operands += (saved.seed,)
        plans.rows.main(outputs, operands, aligned(*outputs[:4], *operands), index)
    else:
        _in_three(structures, plans, (dq, dk, dv, d_query, d_attr, copy), partials, grad, edge_value, saved)
    # The second kernel may run beside the first: what merges read has to stay until both are done.
    for plan, first, second, last, partial in (
        (plans.rows, dq, None, third, partials[0]),
        (plans.columns, dk, dv, None, partials[1]),
    ):
        if plan.merge is not None:
            plan.merge((first, second, last, partial), (), aligned(first, second), index)
    return dq, dk, dv, d_query, d_attr


def _in_three(
    structures: tuple[Structure, Structure],
    plans: Plans,
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    partials: Sequence[Tensor | None],
    grad: Tensor,
    edge_value: Tensor | None,
    saved: Saved,
) -> None:
    # statistics of the receivers, then the kernels of either direction
    dq, dk, dv, d_query, d_attr, copy = results
    edges, index = saved.edges, grad.get_device()
    assert plans.delta is not None
    stats = saved.softmax.new_empty(*saved.softmax.shape[:2], 2 if dq.dtype in HALF else 4)
    edge_sum = None if edge_value is None else saved.edge_sum
    outputs: tuple[Tensor | None, ...] = (stats, copy, saved.out, grad, edge_sum, edge_value, saved.softmax)
    plans.delta(outputs, (), aligned(copy, grad, edge_value), index)
    numbers: tuple[Tensor | None, ...] = (None, None, None)
    if edges is not None and edge_value is not None:
        numbers = (edges.query, edge_value, edges.attr)
    receivers, sources = (saved.q, grad), (saved.k, saved.v)
    for structure, plan, first, second, own, other, partial in (
        (structures[0], plans.rows, dq, None, receivers, sources, partials[0]),
        (structures[1], plans.columns, dk, dv, sources, receivers, partials[1]),
    ):
        if first.numel() == 0:
            continue
        operands: tuple[Tensor | None, ...]
        if structure.walk.row_mask is not None:
            outputs = (first, second, partial)
            operands = (*own, *other, saved.key_scale, stats, saved.seed)
        else:
            third = d_query if edges is not None and second is None else None
            wanted = d_attr if third is not None and d_attr.numel() > 0 else None
            exact = first.dtype == torch.float32 and edges is None and second is None
            outputs = (first, second, third, wanted, partial)
            operands = (*own, saved.out if exact else None, *other, saved.key_scale, *numbers, stats)
            operands += (saved.seed,)
        plan.main(outputs, operands, aligned(first, second, *operands), index)
