r"""Kernel of GAT's attention over the edges of windows: a weight for each edge and head, none masked.

:mod:`graphfuse.kernels.gat_windows` makes 16 weights of each column entry and head, one for each row of its
window, of which all but the few that are edges are masked. Here an edge has one, :math:`w_e`, and what
tensor cores sum is :math:`w_e x_j`, by a tile of ones that tells the row of each edge. A column that several
rows of a window share is gathered for each of them.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent
from graphfuse.kernels.attention_tiles import LOG2_E, agreed, either, inverse, store_softmax
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_results import store_sums
from graphfuse.kernels.gat_windows import walk_again
from graphfuse.kernels.tiles import after_previous, dot, finite, load_task, rows_at, rows_of_product

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.jit
def _edges_of_step(packed_ptr, row_ptr, start, end, EDGES: tl.constexpr):
    # Columns and rows of the edges of a step, some edge's beyond the end; for what is loaded ahead of it.
    offs = tl.minimum(start + tl.arange(0, EDGES), end - 1)
    some = offs >= 0
    column = tl.load(packed_ptr + offs, mask=some, other=0) >> 4
    return column, tl.load(row_ptr + offs, mask=some, other=0)


@triton.jit
def _of_heads(x_ptr, node, heads, HEADS: tl.constexpr):
    # x[node, heads], [EDGES, heads]
    return tl.load(x_ptr + node.to(tl.int64)[:, None] * HEADS + heads[None, :])


@triton.jit
def _spread(x, DIM: tl.constexpr):
    # numbers of heads, [.., HEADS], as those of their features, [.., HEADS * DIM]
    ROWS: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, :, None], (ROWS, HEADS, DIM)).reshape(ROWS, HEADS * DIM)


@triton.jit
def _weighted(x, weight, DIM: tl.constexpr):
    # Gathered rows of half precision times a weight of each head, two products an instruction.
    weight = _spread(weight, DIM)
    if _INTERPRETING or not tl.target_info.cuda_capability_geq(9, 0):
        x = (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    else:
        NAME: tl.constexpr = (
            "mul.rn.f16x2 $0, $1, $2;" if x.dtype == tl.float16 else "mul.rn.bf16x2 $0, $1, $2;"
        )
        x = tl.inline_asm_elementwise(NAME, "=r,r,r", [x, weight], dtype=x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def _of_loops(
    guess, own, a_src_ptr, x_ptr, seed_ptr, rows, with_loop, heads, offs_dim, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Where the sums of 16 rows begin: at their loops, of those that have one here.
    mask = with_loop[:, None]
    offs_row = rows.to(tl.int64)[:, None]
    u = own + tl.load(a_src_ptr + offs_row * HEADS + heads[None, :], mask=mask, other=0.0).to(ACC)
    total = tl.where(mask, tl.exp2(exponent(u, SLOPE) - guess), 0.0).to(x_ptr.dtype.element_ty).to(ACC)
    weight = total
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, rows[:, None], heads[None, :], False)
        weight *= kept(own_key, key_of(seed_ptr, rows[:, None], 0, True), DROPOUT, 1.0)
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_dim[None, :], mask=mask, other=0.0).to(ACC)
    return total, _spread(weight, DIM) * x


# GROUP heads of 16 rows, tensor cores, over the edges of a window; without the tilt.
#   grid      (num_tasks, groups): one program = one task (a window or a slice of one) and one group
#   reads     a_src [num_cols, HEADS], a_dst [num_rows, HEADS], x [num_cols, HEADS, DIM]; edge_tasks, packed,
#             edge_row, row_index; edge_ptr with LOOPS; edge_copy and seed with DROPOUT. The structure of the
#             entries, from ptr to copy, is read where the guess was not good enough
#   writes    as `gat_window_kernel`
#   on chip   total ACC [16, GROUP], acc ACC [16, GROUP * DIM]. The score that the mean of the first sources
#             would make serves as the maximum; weights, and their products with x, are rounded as x is
#   order     edges left to right within a task, no atomics: bitwise reproducible
#   requires  a power of two as GROUP, of which HEADS is a multiple, and as DIM; a slope in [0, 1]
@triton.jit(do_not_specialize=["num_rows", "num_loops"])
def gat_edge_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, edge_ptr, edge_tasks_ptr, packed_ptr,
    edge_row_ptr, edge_copy_ptr, ptr_ptr, tasks_ptr, row_index_ptr, column_ptr, row_mask_ptr, copy_ptr,
    a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, bias_ptr, num_rows, num_loops,
    X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    window, begin, end, slot = load_task(edge_tasks_ptr, tl.program_id(0))
    head = tl.program_id(1) * GROUP
    heads, offs_dim = head + tl.arange(0, GROUP), head * DIM + tl.arange(0, GROUP * DIM)
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    mask_row = (rows < num_rows)[:, None]
    column, row = _edges_of_step(packed_ptr, edge_row_ptr, begin, end, EDGES)
    other, own = _of_heads(a_src_ptr, column, heads, HEADS), _of_heads(a_dst_ptr, row, heads, HEADS)
    column, row = _edges_of_step(packed_ptr, edge_row_ptr, begin + EDGES, end, EDGES)
    at_rows = rows.to(tl.int64)[:, None] * HEADS + heads[None, :]
    own_of_rows = tl.load(a_dst_ptr + at_rows, mask=mask_row, other=0.0).to(ACC)
    mean = tl.sum(other.to(ACC), 0)[None, :] / EDGES
    guess = exponent(own_of_rows + mean, SLOPE)
    if LOOPS:
        first = begin == tl.load(edge_ptr + window)
        total, acc = _of_loops(
            guess, own_of_rows, a_src_ptr, x_ptr, seed_ptr, rows, first & (rows < num_loops), heads, offs_dim,
            X_STRIDE, HEADS, DIM, SLOPE, DROPOUT, ACC,
        )  # fmt: skip
    else:
        total, acc = tl.zeros((16, GROUP), dtype=ACC), tl.zeros((16, GROUP * DIM), dtype=ACC)
    seen = tl.zeros((EDGES,), dtype=tl.int32)
    inner = rows_of_product(ACC)[:, None]
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        its_column = packed >> 4
        x = tl.load(x_ptr + its_column.to(tl.int64)[:, None] * X_STRIDE + offs_dim[None, :])
        # a step ahead, in registers: Triton would pipeline them through shared memory, and make each weight
        # in all the threads that read it
        next_other = _of_heads(a_src_ptr, column, heads, HEADS)
        next_own = _of_heads(a_dst_ptr, row, heads, HEADS)
        column, row = _edges_of_step(packed_ptr, edge_row_ptr, start + 2 * EDGES, end, EDGES)
        live = offs < end
        if LOOPS or DROPOUT > 0:
            its_row = tl.load(edge_row_ptr + at)
        if LOOPS:  # each node brings one of its own
            live = live & (its_column != its_row)
        place = tl.where(live, packed & 15, 16)
        seen |= tl.where(live, 1 << place, 0)
        d = own.to(ACC)
        p = tl.exp2(exponent(d + other.to(ACC), SLOPE) - exponent(d + mean, SLOPE)).to(HALF)
        ones = tl.where(place[None, :] == inner, 1.0, 0.0).to(HALF)
        total = dot(ones, p, total, ACC)  # of what rows are multiplied with: it adds up to 1
        if DROPOUT > 0:
            other_key = key_of(seed_ptr, its_column[:, None], 0, True)
            if edge_copy_ptr is not None:
                other_key = of_copy(other_key, tl.load(edge_copy_ptr + at)[:, None])
            own_key = key_of(seed_ptr, its_row[:, None], heads[None, :], False)
            p *= kept(own_key, other_key, DROPOUT, 1.0).to(HALF)
        acc = dot(ones, _weighted(x, p, DIM), acc, ACC)
        other, own = next_other, next_own
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows of its window
    some = (tl.reduce(seen, 0, either) >> tl.arange(0, 16)) & 1
    good = ((total >= 2.0**-8) & (total <= 2.0**30)) | ((total == 0) & (some == 0)[:, None])
    if agreed(finite(acc) & (tl.min(good.to(tl.int32)) > 0)):
        top = tl.where(total == 0, float("-inf"), guess) / LOG2_E
        whole = True
        if slots_ptr is not None:
            whole = slot < 0
            if slot >= 0:
                at_slot = slot.to(tl.int64) * 16 + tl.arange(0, 16)[:, None]
                at_slot = slots_ptr + (at_slot * HEADS + heads[None, :]) * 3
                tl.store(at_slot, top)
                tl.store(at_slot + 1, total)
        if whole:
            store_softmax(softmax_ptr, at_rows, mask_row, top, total)
        store_sums(
            out_ptr, tilt_ptr, sum_ptr, partial_ptr, bias_ptr, slot, num_rows, rows, offs_dim,
            offs_dim < HEADS * DIM, _spread(inverse(total), DIM), None, None, acc, None, HEADS, DIM, DROPOUT,
        )  # fmt: skip
    else:
        for g in tl.static_range(GROUP):
            walk_again(
                out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr,
                row_index_ptr, column_ptr, row_mask_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr,
                bias_ptr, num_rows, num_loops, head + g, X_STRIDE, HEADS, DIM, DIM, SLOPE, DROPOUT, LOOPS,
                ACC,
            )  # fmt: skip
