r"""Row kernels of sparse attention, backward: all heads of one row, plain multiply-adds.

Numbers that belong to edges are those of :mod:`.attention_rows`; their gradients come out too.
"""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import LOG2_E, exp, load_softmax, slope
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.merge_tiles import slice_width
from graphfuse.kernels.row_tiles import (
    addresses,
    begin_row,
    direction,
    row_task,
    step_of_row,
    together,
)
from graphfuse.kernels.tiles import (
    ONCE,
    after_previous,
    beside_previous,
    head_tile,
    loaded_width,
    sum_of_products,
)


@triton.jit
def load_stats(stats_ptr, place, mask, PRECISE: tl.constexpr, ALONE: tl.constexpr):
    # What the delta kernel stored: (maximum, 1 / sum, delta), or (LSE, -, delta) from the pair (LSE, -delta).
    # ALONE: what forward stored, and no delta.
    if ALONE:
        top, norm = load_softmax(stats_ptr, place, mask)
        delta = norm * 0.0
    elif PRECISE:
        top = tl.load(stats_ptr + place * 4, mask=mask, other=0.0)
        norm = tl.load(stats_ptr + place * 4 + 1, mask=mask, other=0.0)
        delta = tl.load(stats_ptr + place * 4 + 2, mask=mask, other=0.0)
    else:
        top = tl.load(stats_ptr + place * 2, mask=mask, other=0.0)
        norm = top
        delta = -tl.load(stats_ptr + place * 2 + 1, mask=mask, other=0.0)
    return top, norm, delta


@triton.jit
def softmax_weight(s, top, norm, PRECISE: tl.constexpr):
    # The weight of the score s, from what `load_stats` found. Where the softmax sums to 1 an edge is all of
    # its row: it must weigh 1 even if its score was added up in another order than the maximum was.
    if PRECISE:
        p = exp(s - top, True)
        return tl.where((norm == 1) & (p > 0.5), 1.0, p * norm)
    return tl.exp2(s * LOG2_E - top)


@triton.jit
def gradients_of_row(
    first_ptr, second_ptr, d_edge_query_ptr, d_edge_attr_ptr, partial_ptr, ptr_ptr, column_ptr, copy_ptr,
    edge_perm_ptr, own_ptr, own_value_ptr, out_ptr, other_ptr, other_value_ptr, key_scale_ptr, edge_query_ptr,
    edge_value_ptr, edge_attr_ptr, stats_ptr, seed_ptr, row, begin, end, slot, OUT_STRIDE: tl.constexpr,
    OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr, OTHER_STRIDE: tl.constexpr,
    OTHER_VALUE_STRIDE: tl.constexpr, EDGE_STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALONE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EDGE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the kernels below do for the edges [begin, end) of a row. ALONE, of float32: there was no delta
    # kernel, stats are the softmax of forward, and out is read for either direction.
    PRECISE: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth > 16
    WIDTH: tl.constexpr = loaded_width(DIM, OTHER_STRIDE)
    EDGE_WIDTH: tl.constexpr = 1 if PRECISE else EDGE_DIM  # as in forward
    heads, offs_head, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    offs_edge = tl.arange(0, BLOCK_EDGE)
    mask_head, mask_edge = heads < HEADS, offs_edge < EDGE_DIM
    mask_query = mask_head[:, None] & mask_edge[None, :]
    offs_query = heads[:, None] * EDGE_DIM + offs_edge[None, :]
    offs_row = tl.cast(row, tl.int64)
    own = tl.load(own_ptr + offs_row * OWN_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    own_value = tl.load(own_value_ptr + offs_row * OWN_VALUE_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)
    if not TRANSPOSED:
        place = (offs_row * HEADS + heads)[None, :]
        top, norm, delta = load_stats(stats_ptr, place, mask_head[None, :], PRECISE, ALONE)
        if edge_attr_ptr is not None:
            offs_own = (offs_row * HEADS * EDGE_DIM + offs_query)[None, :, :]
            edge_query = tl.load(edge_query_ptr + offs_own, mask=mask_query[None, :, :], other=0.0).to(ACC)
            edge_value = tl.load(edge_value_ptr + offs_own, mask=mask_query[None, :, :], other=0.0).to(ACC)
    first = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    second = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    d_edge_query = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_EDGE), dtype=ACC)
    own_out = None
    if out_ptr is not None and not TRANSPOSED:
        own_out = tl.load(out_ptr + offs_row * HEADS * DIM + offs_head, mask=mask, other=0.0).to(ACC)
    if TRANSPOSED and key_scale_ptr is not None:
        scale = tl.load(key_scale_ptr + offs_row * HEADS + heads, mask=mask_head, other=0.0)[None, :]
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads)[None, :] + row, heads[None, :], TRANSPOSED)
    first_edge, ahead = begin_row(ptr_ptr, column_ptr, row, begin, end, row + 1, LOOPS, EDGES, STAGES)
    for start in tl.range(first_edge, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        column, ahead, live = step_of_row(column_ptr, offs, row, begin, end, ahead, LOOPS, EDGES, STAGES)
        offs_other = column[:, None, None].to(tl.int64)
        gathered = live[:, None, None] & mask[None, :, :]
        at = addresses(other_ptr, offs_other, offs_head, OTHER_STRIDE)
        other = tl.load(at, mask=gathered, other=0.0).to(ACC)
        if key_scale_ptr is not None and not TRANSPOSED:
            other_value = other
        else:
            at = addresses(other_value_ptr, offs_other, offs_head, OTHER_VALUE_STRIDE)
            other_value = tl.load(at, mask=gathered, other=0.0).to(ACC)
            if not ALONE:
                other = together(other, other_value, end >> 31)
        if TRANSPOSED:
            place = column[:, None].to(tl.int64) * HEADS + heads[None, :]
            top, norm, delta = load_stats(
                stats_ptr, place, live[:, None] & mask_head[None, :], PRECISE, ALONE
            )
        s = sum_of_products(own[None, :, :], other, live[:, None, None], 2, WIDTH)  # as forward adds it up
        if key_scale_ptr is not None:
            if not TRANSPOSED:
                offs_scale = column[:, None].to(tl.int64) * HEADS + heads[None, :]
                mask_scale = live[:, None] & mask_head[None, :]
                scale = tl.load(key_scale_ptr + offs_scale, mask=mask_scale, other=0.0)
            s *= scale
        dp = tl.sum(own_value[None, :, :] * other_value, 2)
        if edge_attr_ptr is not None:
            edge = tl.load(edge_perm_ptr + offs, mask=live, other=0)[:, None].to(tl.int64)
            live_edge = live[:, None] & mask_edge[None, :]
            at = edge_attr_ptr + edge * EDGE_STRIDE + offs_edge[None, :]
            edge_attr = tl.load(at, mask=live_edge, other=0.0).to(ACC)[:, None, :]
            if TRANSPOSED:
                offs_gathered = offs_other * HEADS * EDGE_DIM + offs_query[None, :, :]
                gathered = live[:, None, None] & mask_query[None, :, :]
                edge_query = tl.load(edge_query_ptr + offs_gathered, mask=gathered, other=0.0).to(ACC)
                edge_value = tl.load(edge_value_ptr + offs_gathered, mask=gathered, other=0.0).to(ACC)
            s += sum_of_products(edge_query, edge_attr, live[:, None, None], 2, EDGE_WIDTH)
            dp += tl.sum(edge_value * edge_attr, 2)
        p = softmax_weight(tl.where(live[:, None], s * SCALE, float("-inf")), top, norm, PRECISE)
        dropped = p
        if DROPOUT > 0:
            copy = tl.zeros_like(column)
            if copy_ptr is not None:
                copy = tl.load(copy_ptr + offs, mask=live & (offs >= begin), other=0)
            other_key = key_of(seed_ptr, column[:, None], heads[None, :], not TRANSPOSED)
            factor = kept(own_key, of_copy(other_key, copy[:, None]), DROPOUT, 1.0 / (1.0 - DROPOUT))
            dp, dropped = dp * factor, p * factor
            if own_out is not None:
                other_value *= factor[:, :, None]
        if ALONE and TRANSPOSED:
            at = addresses(out_ptr, offs_other, offs_head, HEADS * DIM)
            other_out = tl.load(at, mask=gathered, other=0.0).to(ACC)
            gap = own_value[None, :, :]
            if DROPOUT > 0:
                gap *= factor[:, :, None]
            gap = tl.sum(other_value * (gap - other_out), 2)
            ds = tl.where(live[:, None], slope(p, gap, 0.0, PRECISE), 0.0)
        elif own_out is not None:
            gap = tl.sum(own_value[None, :, :] * (other_value - tl.expand_dims(own_out, 0)), 2)
            ds = tl.where(live[:, None], slope(p, gap, 0.0, PRECISE), 0.0)
        else:
            ds = tl.where(live[:, None], slope(p, dp, delta, PRECISE), 0.0)
        if key_scale_ptr is not None and not TRANSPOSED:
            ds *= scale
        first += ds[:, :, None] * other
        if TRANSPOSED:
            second += dropped[:, :, None] * other_value
        elif edge_attr_ptr is not None:
            d_edge_query += ds[:, :, None] * edge_attr
            if d_edge_attr_ptr is not None:
                d_edge = tl.sum((ds * SCALE)[:, :, None] * edge_query + dropped[:, :, None] * edge_value, 1)
                at = d_edge_attr_ptr + edge * EDGE_DIM + offs_edge[None, :]
                tl.store(at, d_edge.to(d_edge_attr_ptr.dtype.element_ty), mask=live_edge)
    first, second, d_edge_query = tl.sum(first, 0), tl.sum(second, 0), tl.sum(d_edge_query, 0)
    first *= SCALE
    d_edge_query *= SCALE
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            NUMBERS: tl.constexpr = 0 if TRANSPOSED else HEADS * EDGE_DIM
            SLOT: tl.constexpr = slice_width(HEADS * (2 * DIM if TRANSPOSED else DIM), NUMBERS)
            partial_ptr += tl.cast(slot, tl.int64) * SLOT
            tl.store(partial_ptr + offs_head, first, mask=mask)
            if TRANSPOSED:
                tl.store(partial_ptr + HEADS * DIM + offs_head, second, mask=mask)
            elif edge_attr_ptr is not None:
                tl.store(partial_ptr + HEADS * DIM + offs_query, d_edge_query, mask=mask_query)
    if whole:
        offs_out = offs_row * OUT_STRIDE + offs_head
        tl.store(first_ptr + offs_out, first.to(first_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
        if TRANSPOSED:
            tl.store(
                second_ptr + offs_out, second.to(second_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE
            )
        elif edge_attr_ptr is not None:
            at = d_edge_query_ptr + offs_row * HEADS * EDGE_DIM + offs_query
            tl.store(at, d_edge_query.to(d_edge_query_ptr.dtype.element_ty), mask=mask_query)


# All heads of one row. The rows are receivers: (own, own_value) is (q, grad), and (other, other_value) is
# (k, v); dq comes out and, of edges that carry numbers, the gradients of edge_query and edge_attr.
# TRANSPOSED: they are sources, the pairs are swapped, and dk and dv come out.
#   grid      (num_tasks + num_rows, groups), as the forward kernel; one group with edge_attr
#   reads     as the forward kernel; edge_value [num_receivers, HEADS, EDGE_DIM], the gradient of edge_sum; in
#             float32, if the rows are receivers, out: g v - delta is then g (v - out), which loses no bits
#   writes    first (dq or dk) and, if TRANSPOSED, second (dv) [num_rows, HEADS, DIM], strided rows, else
#             d_edge_query [num_rows, HEADS, EDGE_DIM] and d_edge_attr [num_edges, EDGE_DIM]; slices to their
#             slot
#   on chip   first, second ACC [EDGES, BLOCK_HEADS, BLOCK_DIM], d_edge_query: a sum for each place of a step
#   order     as the forward kernel: bitwise reproducible
@triton.jit(do_not_specialize=["num_tasks", "num_rows", "split"])
def attention_bwd_row_kernel(
    first_ptr, second_ptr, d_edge_query_ptr, d_edge_attr_ptr, partial_ptr,
    ptr_ptr, tasks_ptr, column_ptr, copy_ptr, edge_perm_ptr,
    own_ptr, own_value_ptr, own_out_ptr, other_ptr, other_value_ptr, key_scale_ptr, edge_query_ptr,
    edge_value_ptr, edge_attr_ptr, stats_ptr, seed_ptr, num_tasks, num_rows, split,
    OUT_STRIDE: tl.constexpr, OWN_STRIDE: tl.constexpr, OWN_VALUE_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, OTHER_VALUE_STRIDE: tl.constexpr, EDGE_STRIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EDGE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr, SCALE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    beside_previous() if TRANSPOSED else after_previous()
    row, begin, end, slot, listed = row_task(
        ptr_ptr, tasks_ptr, tl.program_id(0), num_tasks, num_rows, split, PACKED
    )
    if listed:
        return
    gradients_of_row(
        first_ptr, second_ptr, d_edge_query_ptr, d_edge_attr_ptr, partial_ptr, ptr_ptr, column_ptr, copy_ptr,
        edge_perm_ptr, own_ptr, own_value_ptr, own_out_ptr, other_ptr, other_value_ptr, key_scale_ptr,
        edge_query_ptr, edge_value_ptr, edge_attr_ptr, stats_ptr, seed_ptr, row, begin, end, slot, OUT_STRIDE,
        OWN_STRIDE, OWN_VALUE_STRIDE, OTHER_STRIDE, OTHER_VALUE_STRIDE, EDGE_STRIDE, TRANSPOSED, False, HEADS,
        DIM, EDGE_DIM, BLOCK_HEADS, BLOCK_DIM, BLOCK_EDGE, EDGES, STAGES, SCALE, DROPOUT, LOOPS, ACC,
    )  # fmt: skip
    if TRANSPOSED:
        after_previous()


# Both directions in float32, and nothing before: what the delta kernel would tell of a receiver, each edge
# finds for itself.
#   grid      (num_tasks + num_other_tasks + num_rows + num_cols, groups): long rows of receivers, or slices,
#             then of sources, then one row a program likewise
#   reads     q, grad [num_rows, HEADS, DIM], k, v [num_cols, HEADS, DIM], strided rows; key_scale as above;
#             of forward out and softmax; of either walk ptr, tasks, column and copy
#   writes    dq, dk, dv, strided rows, and a copy of grad if one is wanted; slices to their walk's slots
#   on chip   as above
#   order     as above
@triton.jit(
    do_not_specialize=["num_tasks", "num_rows", "split", "num_other_tasks", "num_cols", "other_split"]
)
def attention_bwd_alone_kernel(
    dq_ptr, dk_ptr, dv_ptr, d_copy_ptr, partial_ptr, other_partial_ptr,
    ptr_ptr, tasks_ptr, column_ptr, copy_ptr, other_ptr_ptr, other_tasks_ptr, other_column_ptr,
    other_copy_ptr, q_ptr, grad_ptr, k_ptr, v_ptr, key_scale_ptr, out_ptr, softmax_ptr, seed_ptr,
    num_tasks, num_rows, split, num_other_tasks, num_cols, other_split,
    OUT_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
    SCALE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    sources, nth = direction(tl.program_id(0), num_tasks, num_other_tasks, num_rows)
    if not sources:
        row, begin, end, slot, listed = row_task(ptr_ptr, tasks_ptr, nth, num_tasks, num_rows, split, PACKED)
        if not listed:
            gradients_of_row(
                dq_ptr, None, None, None, partial_ptr, ptr_ptr, column_ptr, copy_ptr, None, q_ptr, grad_ptr,
                out_ptr, k_ptr, v_ptr, key_scale_ptr, None, None, None, softmax_ptr, seed_ptr, row, begin,
                end, slot, OUT_STRIDE, Q_STRIDE, GRAD_STRIDE, K_STRIDE, V_STRIDE, 0, False, True, HEADS, DIM,
                0, BLOCK_HEADS, BLOCK_DIM, 1, EDGES, STAGES, SCALE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
            if d_copy_ptr is not None:  # of slices each copies the row
                _, offs, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
                grad = tl.load(grad_ptr + row.to(tl.int64) * GRAD_STRIDE + offs, mask=mask, other=0.0)
                tl.store(d_copy_ptr + row.to(tl.int64) * OUT_STRIDE + offs, grad, mask=mask)
    else:
        row, begin, end, slot, listed = row_task(
            other_ptr_ptr, other_tasks_ptr, nth, num_other_tasks, num_cols, other_split, PACKED
        )
        if not listed:
            gradients_of_row(
                dk_ptr, dv_ptr, None, None, other_partial_ptr, other_ptr_ptr, other_column_ptr,
                other_copy_ptr, None, k_ptr, v_ptr, out_ptr, q_ptr, grad_ptr, key_scale_ptr, None, None, None,
                softmax_ptr, seed_ptr, row, begin, end, slot, OUT_STRIDE, K_STRIDE, V_STRIDE, Q_STRIDE,
                GRAD_STRIDE, 0, True, True, HEADS, DIM, 0, BLOCK_HEADS, BLOCK_DIM, 1, EDGES, STAGES, SCALE,
                DROPOUT, LOOPS, ACC,
            )  # fmt: skip
