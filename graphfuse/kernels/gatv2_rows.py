"""Row kernels of GATv2's attention, backward: all heads of one row, plain multiply-adds."""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import leaky_slope, load_copies, load_stats, slopes
from graphfuse.kernels.attention_tiles import load_softmax
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.pairs import bent_rows, scores_of, sum_of_rows, sum_where_positive
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
)

_COUNTS = ["num_tasks", "num_rows", "num_loops", "split"]


@triton.jit
def load_weights(stats_ptr, place, mask, ALONE: tl.constexpr):
    # What makes a weight of a score, shift and norm, and delta; ALONE: of forward's softmax, and no delta.
    if ALONE:
        shift, norm = load_softmax(stats_ptr, place, mask)
        delta = norm * 0.0
    else:
        shift, norm, delta, _ = load_stats(stats_ptr, place, mask)
    return shift, norm, delta


@triton.jit
def gradients_of_row(
    first_ptr, d_att_ptr, d_edge_ptr, d_loop_edge_ptr, partial_ptr, ptr_ptr, column_ptr, copy_ptr,
    edge_perm_ptr, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, out_ptr, edge_ptr, loop_edge_ptr, stats_ptr,
    seed_ptr, row, begin, end, slot, num_loops, SRC_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr,
    GRAD_STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr, ALONE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # What the kernels below do for the edges [begin, end) of a row. ALONE, of float32: there was no delta
    # kernel, stats are the softmax of forward, and out is read for either direction.
    PRECISE: tl.constexpr = x_src_ptr.dtype.element_ty.primitive_bitwidth > 16
    WIDTH: tl.constexpr = loaded_width(loaded_width(DIM, SRC_STRIDE), DST_STRIDE)
    offs_row = tl.cast(row, tl.int64)
    heads, offs_head, mask = head_tile(HEADS, DIM, BLOCK_HEADS, BLOCK_DIM)
    mask_head = heads < HEADS
    att = tl.load(att_ptr + offs_head, mask=mask, other=0.0)
    if TRANSPOSED:
        own = tl.load(x_src_ptr + offs_row * SRC_STRIDE + offs_head, mask=mask, other=0.0)
    else:
        own = tl.load(x_dst_ptr + offs_row * DST_STRIDE + offs_head, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + offs_row * GRAD_STRIDE + offs_head, mask=mask, other=0.0).to(ACC)[
            None, :, :
        ]
        place = (offs_row * HEADS + heads)[None, :]
        shift, norm, delta = load_weights(stats_ptr, place, mask_head[None, :], ALONE)
    own_out = None
    if out_ptr is not None and not TRANSPOSED:
        own_out = tl.load(out_ptr + offs_row * HEADS * DIM + offs_head, mask=mask, other=0.0).to(ACC)
    # the gradient of the own row, through scores (att apart), in half precision what does not hang on the
    # slope apart, and through sums; the part of d_att
    scored = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    level = tl.zeros((EDGES, BLOCK_HEADS), dtype=ACC)
    summed = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    d_att = tl.zeros((EDGES, BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    if DROPOUT > 0:
        own_key = key_of(seed_ptr, tl.zeros_like(heads)[None, :] + row, heads[None, :], TRANSPOSED)
    first_edge, ahead = begin_row(ptr_ptr, column_ptr, row, begin, end, num_loops, LOOPS, EDGES, STAGES)
    for start in tl.range(first_edge, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        its_loop = offs < begin
        column, ahead, live = step_of_row(column_ptr, offs, row, begin, end, ahead, LOOPS, EDGES, STAGES)
        if edge_ptr is not None:
            edge = tl.load(edge_perm_ptr + offs, mask=(offs >= begin) & (offs < end), other=0)
            edge = edge[:, None, None].to(tl.int64) * HEADS * DIM + offs_head[None, :, :]
        gathered = live[:, None, None] & mask[None, :, :]
        offs_other = column[:, None, None].to(tl.int64)
        mask_edge = live[:, None] & mask_head[None, :]
        if TRANSPOSED:
            at = addresses(x_dst_ptr, offs_other, offs_head, DST_STRIDE)
            other = tl.load(at, mask=gathered, other=0.0)
            at = addresses(grad_ptr, offs_other, offs_head, GRAD_STRIDE)
            grad = tl.load(at, mask=gathered, other=0.0)
            if not ALONE:
                other = together(other, grad, end >> 31)
            x, grad = own[None, :, :].to(ACC), grad.to(ACC)
            receiver = column[:, None].to(tl.int64) * HEADS + heads[None, :]
            shift, norm, delta = load_weights(stats_ptr, receiver, mask_edge, ALONE)
        else:
            offs_gathered = offs_other * SRC_STRIDE + offs_head[None, :, :]
            other = tl.load(x_src_ptr + offs_gathered, mask=gathered, other=0.0)
            x = other.to(ACC)
        u = sum_of_rows(other, own[None, :, :])
        if edge_ptr is not None:
            at = edge_ptr + edge
            if LOOPS:
                own_at = loop_edge_ptr + (offs_row * HEADS * DIM + offs_head)
                at = tl.where(its_loop[:, None, None], own_at[None, :, :], at)
            u = sum_of_rows(u, tl.load(at, mask=gathered, other=0.0))
        factor = tl.full((EDGES, BLOCK_HEADS), 1.0, dtype=ACC)
        if DROPOUT > 0:
            copy = load_copies(copy_ptr, offs, (offs >= begin) & (offs < end))
            other_key = key_of(seed_ptr, column[:, None], heads[None, :], not TRANSPOSED)
            factor = kept(own_key, of_copy(other_key, copy[:, None]), DROPOUT, 1.0 / (1.0 - DROPOUT))
        bent = bent_rows(u, SLOPE)
        s = scores_of(bent, att, gathered, WIDTH, ACC)  # as forward adds it up
        base = delta
        if ALONE and TRANSPOSED:
            at = addresses(out_ptr, offs_other, offs_head, HEADS * DIM)
            out = tl.load(at, mask=gathered, other=0.0).to(ACC)
            dp, base = tl.sum(grad * (x * factor[:, :, None] - out), 2), 0.0
        elif own_out is not None:
            dp, base = tl.sum(grad * (x * factor[:, :, None] - tl.expand_dims(own_out, 0)), 2), 0.0
        else:
            dp = tl.sum(grad * x, 2) * factor
        ds, dropped = slopes(s, mask_edge, dp, shift, norm, base, factor, PRECISE)
        if PRECISE:
            scored += ds[:, :, None] * leaky_slope(u, SLOPE)
        else:
            scored, level = sum_where_positive(scored, u, ds[:, :, None]), level + ds
        if TRANSPOSED:
            summed += dropped[:, :, None] * grad
        else:
            d_att += ds[:, :, None] * bent.to(ACC)
            if d_edge_ptr is not None or d_loop_edge_ptr is not None:
                value = ds[:, :, None] * leaky_slope(u, SLOPE) * att[None, :, :].to(ACC)
            if d_edge_ptr is not None:
                listed_edge = mask[None, :, :] & ((offs >= begin) & (offs < end))[:, None, None]
                tl.store(d_edge_ptr + edge, value.to(d_edge_ptr.dtype.element_ty), mask=listed_edge)
            if d_loop_edge_ptr is not None:
                at = d_loop_edge_ptr + (offs_row * HEADS * DIM + offs_head[None, :, :] + offs_other * 0)
                mask_loop = mask[None, :, :] & its_loop[:, None, None]
                tl.store(at, value.to(d_loop_edge_ptr.dtype.element_ty), mask=mask_loop)
    scored, summed, d_att = tl.sum(scored, 0), tl.sum(summed, 0), tl.sum(d_att, 0)
    if not PRECISE:
        scored = SLOPE * tl.sum(level, 0)[:, None] + (1.0 - SLOPE) * scored
    first = att.to(ACC) * scored
    if TRANSPOSED:
        first += summed
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            PARTS: tl.constexpr = 1 if TRANSPOSED else 2
            partial_ptr += tl.cast(slot, tl.int64) * PARTS * HEADS * DIM
            tl.store(partial_ptr + offs_head, first, mask=mask)
            if not TRANSPOSED:
                tl.store(partial_ptr + HEADS * DIM + offs_head, d_att, mask=mask)
    if whole:
        at = offs_row * HEADS * DIM + offs_head
        tl.store(first_ptr + at, first.to(first_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
        if not TRANSPOSED:
            tl.store(d_att_ptr + at, d_att.to(d_att_ptr.dtype.element_ty), mask=mask)


# All heads of one row of GATv2, which is a receiver: its neighbours are sources, of which x is gathered.
# TRANSPOSED: it is a source, and x_dst and grad of the receivers are.
#   grid      as the forward kernel, one row a program
#   reads     x_src, x_dst, grad [.., HEADS, DIM], att [HEADS, DIM]; stats ACC [num_receivers, HEADS, 4];
#             edge and loop_edge [.., HEADS, DIM]; ptr, tasks, column, edge_perm; in float32, if the rows are
#             receivers, out: g x - delta is then g (x - out), which loses no bits
#   writes    first: d_x_dst or, TRANSPOSED, d_x_src [num_rows, HEADS, DIM]; of receivers d_att, a row's part
#             of it, [num_rows, HEADS, DIM], d_edge and d_loop_edge; slices write the first two to their slot
#   order     as the forward kernel: bitwise reproducible
@triton.jit(do_not_specialize=_COUNTS)
def gatv2_bwd_row_kernel(
    first_ptr, d_att_ptr, d_edge_ptr, d_loop_edge_ptr, partial_ptr, ptr_ptr, tasks_ptr, column_ptr, copy_ptr,
    edge_perm_ptr, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, own_out_ptr, edge_ptr, loop_edge_ptr, stats_ptr,
    seed_ptr, num_tasks, num_rows, num_loops, split, SRC_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr,
    GRAD_STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    beside_previous() if TRANSPOSED else after_previous()
    row, begin, end, slot, listed = row_task(
        ptr_ptr, tasks_ptr, tl.program_id(0), num_tasks, num_rows, split, PACKED
    )
    if listed:
        return
    gradients_of_row(
        first_ptr, d_att_ptr, d_edge_ptr, d_loop_edge_ptr, partial_ptr, ptr_ptr, column_ptr, copy_ptr,
        edge_perm_ptr, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, own_out_ptr, edge_ptr, loop_edge_ptr,
        stats_ptr, seed_ptr, row, begin, end, slot, num_loops, SRC_STRIDE, DST_STRIDE, GRAD_STRIDE,
        TRANSPOSED, False, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, EDGES, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
    )  # fmt: skip
    if TRANSPOSED:
        after_previous()


# Both directions in float32, and nothing before, as attention_bwd_alone_kernel.
#   grid      (num_tasks + num_other_tasks + num_rows + num_cols, groups), likewise
#   reads     x_src, x_dst, grad, att, as above; of forward out and softmax; of either walk ptr, tasks, column
#             and copy
#   writes    d_x_dst, d_att and d_x_src, as above; slices to their walk's slots
#   order     as above
@triton.jit(do_not_specialize=[*_COUNTS, "num_other_tasks", "num_cols", "other_split"])
def gatv2_bwd_alone_kernel(
    d_dst_ptr, d_att_ptr, d_src_ptr, partial_ptr, other_partial_ptr,
    ptr_ptr, tasks_ptr, column_ptr, copy_ptr, other_ptr_ptr, other_tasks_ptr, other_column_ptr,
    other_copy_ptr, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, out_ptr, softmax_ptr, seed_ptr,
    num_tasks, num_rows, num_loops, split, num_other_tasks, num_cols, other_split,
    SRC_STRIDE: tl.constexpr, DST_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    sources, nth = direction(tl.program_id(0), num_tasks, num_other_tasks, num_rows)
    if sources:
        row, begin, end, slot, listed = row_task(
            other_ptr_ptr, other_tasks_ptr, nth, num_other_tasks, num_cols, other_split, PACKED
        )
        if not listed:
            gradients_of_row(
                d_src_ptr, None, None, None, other_partial_ptr, other_ptr_ptr, other_column_ptr,
                other_copy_ptr, None, x_src_ptr, x_dst_ptr, att_ptr, grad_ptr, out_ptr, None, None,
                softmax_ptr, seed_ptr, row, begin, end, slot, num_loops, SRC_STRIDE, DST_STRIDE, GRAD_STRIDE,
                True, True, HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, EDGES, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
    else:
        row, begin, end, slot, listed = row_task(ptr_ptr, tasks_ptr, nth, num_tasks, num_rows, split, PACKED)
        if not listed:
            gradients_of_row(
                d_dst_ptr, d_att_ptr, None, None, partial_ptr, ptr_ptr, column_ptr, copy_ptr, None, x_src_ptr,
                x_dst_ptr, att_ptr, grad_ptr, out_ptr, None, None, softmax_ptr, seed_ptr, row, begin, end,
                slot, num_loops, SRC_STRIDE, DST_STRIDE, GRAD_STRIDE, False, True, HEADS, DIM, BLOCK_HEADS,
                BLOCK_DIM, EDGES, STAGES, SLOPE, DROPOUT, LOOPS, ACC,
            )  # fmt: skip
