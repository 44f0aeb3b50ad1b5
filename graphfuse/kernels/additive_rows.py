r"""Row kernels of additive attention, GAT's and GATv2's: all heads of one row, plain multiply-adds.

The score of an edge is, for GAT, :math:`\ell(a_j + d_i + b_e)` with the LeakyReLU :math:`\ell`, and for GATv2
(V2) :math:`a^\top \ell(x_j + y_i + b_e)`; :math:`b` are numbers of the edges, if there are any. Both
gather one row of x per edge. For GAT's tilt see :mod:`graphfuse.kernels.gat_windows`.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import finish, leaky, leaky_slope, load_copies, load_stats, slopes
from graphfuse.kernels.attention_tiles import exp, shift_of, to_be_repeated
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.pairs import bent_rows, scores_of, sum_of_rows
from graphfuse.kernels.row_tiles import (
    all_together,
    begin_row,
    row_of_program,
    row_task,
    rows_of_program,
    step_of_row,
)
from graphfuse.kernels.tiles import ONCE, after_previous, head_tile, loaded_width


@triton.jit
def sums_of_row(
    shift, own, att, x_ptr, other_ptr, edge_ptr, loop_edge_ptr, edge_perm_ptr, ptr_ptr, column_ptr, copy_ptr,
    seed_ptr, tilt_ptr, row, begin, end, num_loops, heads, offs_head, mask, mask_head, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, V2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # The maximum of a row's scores, and what it adds up, which is the same for any `shift` of its heads that
    # is not far from that; 0 if it is None, which costs a score nothing.
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 16
    top = tl.full((EDGES, BLOCK_HEADS), float("-inf"), dtype=ACC)
    total = tl.zeros((EDGES, BLOCK_HEADS), dtype=ACC)
    high = tl.zeros((EDGES, BLOCK_HEADS), dtype=ACC)
    acc = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    tilt = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads)[None, :] + row, heads[None, :], False)
    first_edge, ahead = begin_row(ptr_ptr, column_ptr, row, begin, end, num_loops, LOOPS, EDGES, STAGES)
    for start in tl.range(first_edge, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        its_loop = offs < begin
        column, ahead, live = step_of_row(column_ptr, offs, row, begin, end, ahead, LOOPS, EDGES, STAGES)
        if edge_ptr is not None:
            place = tl.load(edge_perm_ptr + offs, mask=live & (offs >= begin), other=0).to(tl.int64)
        gathered = live[:, None, None] & mask[None, :, :]
        offs_x = column[:, None, None].to(tl.int64) * X_STRIDE + offs_head[None, :, :]
        rows = tl.load(x_ptr + offs_x, mask=gathered, other=0.0)
        live = live[:, None]
        if V2:
            # of other shapes, and without dropout, there is room for more programs, which bring more
            if PRECISE and DROPOUT > 0 and BLOCK_HEADS > 1 and BLOCK_HEADS * BLOCK_DIM >= 128:
                rows = all_together(rows, end >> 31)
            u = sum_of_rows(rows, own[None, :, :])
            if edge_ptr is not None:
                at = edge_ptr + (place[:, None, None] * HEADS * DIM + offs_head[None, :, :])
                if LOOPS:
                    own_at = loop_edge_ptr + (tl.cast(row, tl.int64) * HEADS * DIM + offs_head)
                    at = tl.where(its_loop[:, None, None], own_at[None, :, :], at)
                u = sum_of_rows(u, tl.load(at, mask=gathered, other=0.0))
            s = scores_of(bent_rows(u, SLOPE), att, gathered, loaded_width(DIM, X_STRIDE), ACC)
        else:
            if PRECISE and DROPOUT == 0 and BLOCK_HEADS > 1 and BLOCK_HEADS * BLOCK_DIM <= 64:
                rows = all_together(rows, end >> 31)  # of others the compiler does by itself
            offs_other = column[:, None].to(tl.int64) * HEADS + heads[None, :]
            other = tl.load(other_ptr + offs_other, mask=live & mask_head[None, :], other=0.0)
            u = own[None, :] + other.to(ACC)
            if edge_ptr is not None:
                at = edge_ptr + place[:, None] * HEADS + heads[None, :]
                if LOOPS:
                    own_at = loop_edge_ptr + (tl.cast(row, tl.int64) * HEADS + heads)
                    at = tl.where(its_loop[:, None], own_at[None, :], at)
                u += tl.load(at, mask=live & mask_head[None, :], other=0.0).to(ACC)
            s = leaky(u, SLOPE)
        s = tl.where(live, s, float("-inf"))
        top = tl.maximum(top, s)
        p = exp(s if shift is None else s - shift[None, :], PRECISE)
        total += p
        if tilt_ptr is not None:
            high += tl.where(u > 0, p, 0.0)
        if DROPOUT > 0:
            copy = load_copies(copy_ptr, offs, (offs >= begin) & (offs < end))
            other_key = of_copy(key_of(seed_ptr, column[:, None], 0, True), copy[:, None])
            p *= kept(own_key, other_key, DROPOUT, 1.0)
        x = rows.to(ACC)
        acc += p[:, :, None] * x
        if tilt_ptr is not None:
            tilt += tl.where(u > 0, p, 0.0)[:, :, None] * x
    top = tl.max(top, 0)
    rescale = exp((0.0 if shift is None else shift) - shift_of(top), PRECISE)
    total, high = tl.sum(total, 0) * rescale, tl.sum(high, 0) * rescale
    rescale = rescale[:, None]
    return top, total, high, tl.sum(acc, 0) * rescale, tl.sum(tilt, 0) * rescale


# All heads of one row.
#   grid      (num_tasks + ceil(num_rows / ROWS), groups): long rows or slices, then ROWS rows a program; a
#             row too wide for one program is dealt out in groups of BLOCK_HEADS heads. PACKED programs share
#             a block, see kernels/packing.py; those beyond the last find no row
#   reads     x [num_cols, HEADS, DIM]; ptr, tasks, column; of GAT a_dst [num_rows, HEADS] as own and a_src
#             [num_cols, HEADS] as other, of V2 x_dst [num_rows, HEADS, DIM] and att [HEADS, DIM]; edge and,
#             with LOOPS, loop_edge [.., HEADS] or, of V2, [.., HEADS, DIM], in the caller's order: edge_perm
#   writes    out and, if wanted, GAT's tilt and sum, out + bias [HEADS, DIM], [num_rows, HEADS, DIM]; softmax
#             ACC [num_rows, HEADS, 2]; slices write theirs to their slot
#   on chip   top, total, high ACC [EDGES, BLOCK_HEADS]; acc, tilt ACC [EDGES, BLOCK_HEADS, BLOCK_DIM]: each
#             place of a step keeps sums of its own, so that no edge waits for another
#   order     loop, edges of a place left to right, then places, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops", "split"])
def additive_row_kernel(
    out_ptr, softmax_ptr, tilt_ptr, sum_ptr, partial_ptr, slots_ptr, ptr_ptr, tasks_ptr, column_ptr, copy_ptr,
    edge_perm_ptr, own_ptr, other_ptr, x_ptr, edge_ptr, loop_edge_ptr, seed_ptr, bias_ptr,
    num_tasks, num_rows, num_loops, split, X_STRIDE: tl.constexpr, OWN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, V2: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    for i in tl.range(0, rows_of_program(num_tasks, ROWS)):
        row, begin, end, slot, exists = row_of_program(
            ptr_ptr, tasks_ptr, i, num_tasks, num_rows, split, ROWS
        )
        offs_row = tl.cast(row, tl.int64)
        heads, offs_head, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
        mask_head = heads < HEADS
        if V2:
            own = tl.load(own_ptr + offs_row * OWN_STRIDE + offs_head, mask=mask, other=0.0)
            att = tl.load(other_ptr + offs_head, mask=mask, other=0.0)
        else:
            own = tl.load(own_ptr + offs_row * OWN_STRIDE + heads, mask=mask_head, other=0.0).to(ACC)
            att = None
        top, total, high, acc, tilt = sums_of_row(
            None, own, att, x_ptr, other_ptr, edge_ptr, loop_edge_ptr, edge_perm_ptr, ptr_ptr,
            column_ptr, copy_ptr, seed_ptr, tilt_ptr, row, begin, end, num_loops, heads, offs_head, mask,
            mask_head, X_STRIDE, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, EDGES, STAGES, SLOPE, DROPOUT, LOOPS,
            V2, ACC,
        )  # fmt: skip
        if to_be_repeated(top, end - begin > 1):
            top, total, high, acc, tilt = sums_of_row(
                shift_of(top), own, att, x_ptr, other_ptr, edge_ptr, loop_edge_ptr, edge_perm_ptr, ptr_ptr,
                column_ptr, copy_ptr, seed_ptr, tilt_ptr, row, begin, end, num_loops, heads, offs_head, mask,
                mask_head, X_STRIDE, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, EDGES, STAGES, SLOPE, DROPOUT, LOOPS,
                V2, ACC,
            )  # fmt: skip
        whole = exists
        if partial_ptr is not None:
            whole = exists & (slot < 0)
            if slot >= 0:
                PARTS: tl.constexpr = 1 if tilt_ptr is None else 2
                offs_slot = tl.cast(slot, tl.int64) * HEADS
                tl.store(slots_ptr + (offs_slot + heads) * 3, top, mask=mask_head)
                tl.store(slots_ptr + (offs_slot + heads) * 3 + 1, total, mask=mask_head)
                at = partial_ptr + offs_slot * PARTS * DIM + offs_head
                tl.store(at, acc, mask=mask)
                if tilt_ptr is not None:
                    tl.store(slots_ptr + (offs_slot + heads) * 3 + 2, high, mask=mask_head)
                    tl.store(at + HEADS * DIM, tilt, mask=mask)
        if whole:
            finish(
                out_ptr, softmax_ptr, tilt_ptr, sum_ptr, bias_ptr, offs_row * HEADS + heads, mask_head,
                offs_row * HEADS * DIM + offs_head, mask, offs_head, top, total, high, acc, tilt, DROPOUT,
            )  # fmt: skip


# All heads of one row of GAT, which is a source: what its neighbours, the receivers, say of it.
#   grid      as the forward kernel, one row a program
#   reads     a_src [num_rows, HEADS], x [num_rows, HEADS, DIM], grad [num_cols, HEADS, DIM]; stats ACC
#             [num_cols, HEADS, 4]; edge and loop_edge [.., HEADS]; ptr, tasks, column, edge_perm
#   writes    dx [num_rows, HEADS, DIM], d_a_src [num_rows, HEADS], d_edge and d_loop_edge as the edges'
#             numbers; slices write the first two to their slot
#   order     as the forward kernel: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "num_loops", "split"])
def gat_bwd_row_kernel(
    dx_ptr, d_a_src_ptr, d_edge_ptr, d_loop_edge_ptr, partial_ptr, ptr_ptr, tasks_ptr, column_ptr, copy_ptr,
    edge_perm_ptr, a_src_ptr, x_ptr, grad_ptr, edge_ptr, loop_edge_ptr, stats_ptr, seed_ptr,
    num_tasks, num_rows, num_loops, split, X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 16
    row, begin, end, slot, listed = row_task(
        ptr_ptr, tasks_ptr, tl.program_id(0), num_tasks, num_rows, split, PACKED
    )
    if listed:
        return
    offs_row = tl.cast(row, tl.int64)
    heads, offs_head, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    mask_head = heads < HEADS
    x = tl.load(x_ptr + offs_row * X_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    own = tl.load(a_src_ptr + offs_row * HEADS + heads, mask=mask_head, other=0.0).to(ACC)
    d_own = tl.zeros((EDGES, BLOCK_HEADS), dtype=ACC)
    dx = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads)[None, :] + row, heads[None, :], True)
    first_edge, ahead = begin_row(ptr_ptr, column_ptr, row, begin, end, num_loops, LOOPS, EDGES, STAGES)
    for start in tl.range(first_edge, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        its_loop = offs < begin
        column, ahead, live = step_of_row(column_ptr, offs, row, begin, end, ahead, LOOPS, EDGES, STAGES)
        if edge_ptr is not None:
            place = tl.load(edge_perm_ptr + offs, mask=(offs >= begin) & (offs < end), other=0)
            place = place[:, None].to(tl.int64) * HEADS + heads[None, :]
        gathered = live[:, None, None] & mask[None, :, :]
        offs_grad = column[:, None, None].to(tl.int64) * GRAD_STRIDE + offs_head[None, :, :]
        grad = tl.load(grad_ptr + offs_grad, mask=gathered, other=0.0).to(ACC)
        mask_edge = live[:, None] & mask_head[None, :]
        receiver = column[:, None].to(tl.int64) * HEADS + heads[None, :]
        shift, norm, delta, a_dst = load_stats(stats_ptr, receiver, mask_edge)
        u = own[None, :] + a_dst
        if edge_ptr is not None:
            at = edge_ptr + place
            if LOOPS:
                own_at = loop_edge_ptr + (offs_row * HEADS + heads)
                at = tl.where(its_loop[:, None], own_at[None, :], at)
            u += tl.load(at, mask=mask_edge, other=0.0).to(ACC)
        factor = tl.full((EDGES, BLOCK_HEADS), 1.0, dtype=ACC)
        if DROPOUT > 0:
            copy = load_copies(copy_ptr, offs, (offs >= begin) & (offs < end))
            other_key = key_of(seed_ptr, column[:, None], heads[None, :], False)
            factor = kept(own_key, of_copy(other_key, copy[:, None]), DROPOUT, 1.0 / (1.0 - DROPOUT))
        dp = tl.sum(x[None, :, :] * grad, 2) * factor
        ds, dropped = slopes(leaky(u, SLOPE), mask_edge, dp, shift, norm, delta, factor, PRECISE)
        du = ds * leaky_slope(u, SLOPE)
        d_own += du
        dx += dropped[:, :, None] * grad
        if d_edge_ptr is not None:
            listed_edge = mask_head[None, :] & ((offs >= begin) & (offs < end))[:, None]
            tl.store(d_edge_ptr + place, du.to(d_edge_ptr.dtype.element_ty), mask=listed_edge)
        if d_loop_edge_ptr is not None:
            at = d_loop_edge_ptr + (offs_row * HEADS + heads[None, :] + tl.zeros_like(receiver))
            mask_loop = mask_head[None, :] & its_loop[:, None]
            tl.store(at, du.to(d_loop_edge_ptr.dtype.element_ty), mask=mask_loop)
    d_own, dx = tl.sum(d_own, 0), tl.sum(dx, 0)
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            partial_ptr += tl.cast(slot, tl.int64) * slice_width(HEADS * DIM, HEADS)
            tl.store(partial_ptr + offs_head, dx, mask=mask)
            tl.store(partial_ptr + HEADS * DIM + heads, d_own, mask=mask_head)
    if whole:
        at = dx_ptr + offs_row * HEADS * DIM + offs_head
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
        at = d_a_src_ptr + offs_row * HEADS + heads
        tl.store(at, d_own.to(d_a_src_ptr.dtype.element_ty), mask=mask_head)
