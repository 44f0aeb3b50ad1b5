r"""Row kernel of sparse attention, forward: all heads of one row, plain multiply-adds.

One exponential per edge and head, sums in float32 proper, and the place for numbers that belong to edges:
with ``edge_attr`` :math:`a` and ``edge_query`` :math:`u` the score of an edge is
:math:`\lambda (q_i^\top k_j + u_i^\top a_{ij})`, and ``edge_sum`` is the weighted sum of :math:`a`, as
``out`` is that of :math:`v`.
"""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import (
    exp,
    inverse,
    shift_of,
    store_softmax,
    to_be_repeated,
)
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.norm_tiles import store_sum
from graphfuse.kernels.row_tiles import (
    addresses,
    begin_row,
    row_task,
    step_of_row,
    together,
)
from graphfuse.kernels.tiles import (
    ONCE,
    after_previous,
    head_tile,
    loaded_width,
    sum_of_products,
)


@triton.jit
def sums_of_row(
    shift, q, edge_query, k_ptr, v_ptr, key_scale_ptr, edge_attr_ptr, edge_perm_ptr, ptr_ptr, column_ptr,
    copy_ptr, seed_ptr, row, begin, end, heads, offs_head, mask, offs_edge, mask_head, mask_edge,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, EDGE_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, EDGE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_EDGE: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
    DROPOUT: tl.constexpr, LOOPS: tl.constexpr, PRECISE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # The maximum of a row's scores, and what it adds up, which is the same for any `shift` of its heads that
    # is not far from that; 0 if it is None, which costs a score nothing.
    EDGE_WIDTH: tl.constexpr = 1 if PRECISE else EDGE_DIM  # how its tile is laid out is up to the compiler
    top = tl.full((EDGES, BLOCK_HEADS), float("-inf"), dtype=ACC)
    total = tl.zeros((EDGES, BLOCK_HEADS), dtype=ACC)
    acc = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    edge_acc = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_EDGE), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads)[None, :] + row, heads[None, :], False)
    first_edge, ahead = begin_row(ptr_ptr, column_ptr, row, begin, end, row + 1, LOOPS, EDGES, STAGES)
    for start in tl.range(first_edge, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        column, ahead, live = step_of_row(column_ptr, offs, row, begin, end, ahead, LOOPS, EDGES, STAGES)
        offs_other = column[:, None, None].to(tl.int64)
        gathered = live[:, None, None] & mask[None, :, :]
        at = addresses(k_ptr, offs_other, offs_head, K_STRIDE)
        k = tl.load(at, mask=gathered, other=0.0).to(ACC)
        if key_scale_ptr is not None:
            v = k
        else:
            at = addresses(v_ptr, offs_other, offs_head, V_STRIDE)
            v = tl.load(at, mask=gathered, other=0.0).to(ACC)
            if PRECISE and BLOCK_HEADS == 1 and BLOCK_DIM <= 64:  # of others the compiler does by itself
                k = together(k, v, end >> 31)
        s = sum_of_products(q[None, :, :], k, live[:, None, None], 2, loaded_width(DIM, K_STRIDE))
        if key_scale_ptr is not None:
            offs_scale = column[:, None].to(tl.int64) * HEADS + heads[None, :]
            s *= tl.load(key_scale_ptr + offs_scale, mask=live[:, None] & mask_head[None, :], other=0.0)
        if edge_attr_ptr is not None:
            place = tl.load(edge_perm_ptr + offs, mask=live, other=0)[:, None].to(tl.int64)
            at = edge_attr_ptr + place * EDGE_STRIDE + offs_edge[None, :]
            edge_attr = tl.load(at, mask=live[:, None] & mask_edge[None, :], other=0.0).to(ACC)[:, None, :]
            s += sum_of_products(edge_query[None, :, :], edge_attr, live[:, None, None], 2, EDGE_WIDTH)
        s = tl.where(live[:, None], s * SCALE, float("-inf"))
        top = tl.maximum(top, s)
        p = exp(s if shift is None else s - shift[None, :], PRECISE)
        total += p
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live & (offs >= begin), other=0)
            other_key = of_copy(key_of(seed_ptr, column[:, None], 0, True), copy[:, None])
            p *= kept(own_key, other_key, DROPOUT, 1.0)
        acc += p[:, :, None] * v
        if edge_attr_ptr is not None:
            edge_acc += p[:, :, None] * edge_attr
    top, total, acc, edge_acc = tl.max(top, 0), tl.sum(total, 0), tl.sum(acc, 0), tl.sum(edge_acc, 0)
    rescale = exp((0.0 if shift is None else shift) - shift_of(top), PRECISE)
    return top, total * rescale, acc * rescale[:, None], edge_acc * rescale[:, None]


# All heads of one row.
#   grid      (num_tasks + num_rows, groups): long rows or slices, then one row a program; a row too wide
#             for one program is dealt out in groups of BLOCK_HEADS heads
#   reads     q [num_rows, HEADS, DIM]; k, v [num_cols, HEADS, DIM]; ptr, tasks, column; edge_query [num_rows,
#             HEADS, EDGE_DIM]; edge_attr [num_edges, EDGE_DIM], in the caller's order: edge_perm. With
#             key_scale ACC [num_cols, HEADS] k serves as v, and multiplied with it as keys; x for `sum`
#   writes    as the window kernel, and edge_sum [num_rows, HEADS, EDGE_DIM]; of a slice both sums to its slot
#   on chip   top, total ACC [EDGES, BLOCK_HEADS]; acc ACC [EDGES, BLOCK_HEADS, BLOCK_DIM], edge_acc likewise:
#             each place of a step keeps sums of its own, so that no edge waits for another
#   order     edges of a place left to right, then places, no atomics: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "split"])
def attention_row_kernel(
    out_ptr, sum_ptr, softmax_ptr, edge_sum_ptr, partial_ptr, slots_ptr,
    ptr_ptr, tasks_ptr, column_ptr, copy_ptr, edge_perm_ptr, q_ptr, k_ptr, v_ptr, key_scale_ptr,
    edge_query_ptr, edge_attr_ptr, seed_ptr, x_ptr, num_tasks, num_rows, split, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, EDGE_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, EDGE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    PRECISE: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth > 16
    row, begin, end, slot, listed = row_task(
        ptr_ptr, tasks_ptr, tl.program_id(0), num_tasks, num_rows, split, PACKED
    )
    if listed:
        return
    offs_row = tl.cast(row, tl.int64)
    heads, offs_head, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    offs_edge = tl.arange(0, BLOCK_EDGE)
    mask_head, mask_edge = heads < HEADS, offs_edge < EDGE_DIM
    mask_query = mask_head[:, None] & mask_edge[None, :]
    offs_query = heads[:, None] * EDGE_DIM + offs_edge[None, :]
    q = tl.load(q_ptr + offs_row * Q_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    edge_query = None
    if edge_attr_ptr is not None:
        own_query = edge_query_ptr + offs_row * HEADS * EDGE_DIM + offs_query
        edge_query = tl.load(own_query, mask=mask_query, other=0.0).to(ACC)
    top, total, acc, edge_acc = sums_of_row(
        None, q, edge_query, k_ptr, v_ptr, key_scale_ptr, edge_attr_ptr, edge_perm_ptr, ptr_ptr,
        column_ptr, copy_ptr, seed_ptr, row, begin, end, heads, offs_head, mask, offs_edge,
        mask_head, mask_edge, K_STRIDE, V_STRIDE, EDGE_STRIDE, HEADS, DIM, EDGE_DIM, BLOCK_HEADS, BLOCK_DIM,
        BLOCK_EDGE, EDGES, STAGES, SCALE, DROPOUT, LOOPS, PRECISE, ACC,
    )  # fmt: skip
    if to_be_repeated(top, end - begin > 1):
        top, total, acc, edge_acc = sums_of_row(
            shift_of(top), q, edge_query, k_ptr, v_ptr, key_scale_ptr, edge_attr_ptr, edge_perm_ptr, ptr_ptr,
            column_ptr, copy_ptr, seed_ptr, row, begin, end, heads, offs_head, mask, offs_edge,
            mask_head, mask_edge, K_STRIDE, V_STRIDE, EDGE_STRIDE, HEADS, DIM, EDGE_DIM, BLOCK_HEADS,
            BLOCK_DIM, BLOCK_EDGE, EDGES, STAGES, SCALE, DROPOUT, LOOPS, PRECISE, ACC,
        )  # fmt: skip
    if partial_ptr is not None:
        if slot >= 0:
            offs_slot = tl.cast(slot, tl.int64) * HEADS
            tl.store(slots_ptr + (offs_slot + heads) * 2, top, mask=mask_head)
            tl.store(slots_ptr + (offs_slot + heads) * 2 + 1, total, mask=mask_head)
            partial_ptr += offs_slot * (DIM + EDGE_DIM)
            tl.store(partial_ptr + offs_head, acc, mask=mask)
            if edge_attr_ptr is not None:
                tl.store(partial_ptr + HEADS * DIM + offs_query, edge_acc, mask=mask_query)
            return
    norm = (inverse(total) / (1.0 - DROPOUT))[:, None]
    store_softmax(softmax_ptr, offs_row * HEADS + heads, mask_head, top, total)
    out = acc * norm
    store_sum(sum_ptr, x_ptr, out, offs_row, offs_head, mask, R_STRIDE, HEADS * DIM)
    tl.store(
        out_ptr + offs_row * HEADS * DIM + offs_head,
        out.to(out_ptr.dtype.element_ty),
        mask=mask,
        eviction_policy=ONCE,
    )
    if edge_attr_ptr is not None:
        edge_sum = (edge_acc * norm).to(edge_sum_ptr.dtype.element_ty)
        tl.store(edge_sum_ptr + offs_row * HEADS * EDGE_DIM + offs_query, edge_sum, mask=mask_query)
