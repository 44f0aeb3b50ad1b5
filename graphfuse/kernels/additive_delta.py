"""Kernel of what backward of additive attention has to know of each receiver."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import inverse
from graphfuse.kernels.dropout import key_of
from graphfuse.kernels.gat_records import centre_of, store_records
from graphfuse.kernels.tiles import after_previous, load_rows, product_of_rows, rows_and_heads, store_quads


# What backward needs to know of each receiver and head, side by side so that a gather touches one sector:
# (shift, norm, delta, a_dst), where a weight is exp(s - shift) * norm. In half precision shift is the LSE and
# norm 1: the rounding of an LSE does the same to all weights of a row. With a seed dropout's key stands in
# its place. RECORDS: instead there is a record of `gat_records.py` of so many heads, if it is not 0. Of GAT
# also the gradient of a_dst. LISTED: LSE and delta alone, each of all heads side by side; with `only`, the
# columns of rows of one edge, or -1, delta of these is that of x as it is, not of a result that was rounded
# when dropout scaled it: a hub would add the difference up.
#   grid      (ceil(num_rows * HEADS / ROWS),)
@triton.jit(do_not_specialize=["num_rows", "num_cols"])
def additive_delta_kernel(
    stats_ptr, d_a_dst_ptr, out_ptr, grad_ptr, tilt_ptr, a_dst_ptr, a_src_ptr, softmax_ptr, seed_ptr,
    only_ptr, x_ptr, num_rows, num_cols, GRAD_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, LISTED: tl.constexpr, RECORDS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    place, live, offs_grad = rows_and_heads(num_rows, GRAD_STRIDE, HEADS, DIM, ROWS)
    # all loads before any store, behind which they would wait
    grad = load_rows(grad_ptr, offs_grad, live, DIM, BLOCK_DIM)
    out = load_rows(out_ptr, place * DIM, live, DIM, BLOCK_DIM, True)
    if tilt_ptr is not None:
        tilt = load_rows(tilt_ptr, place * DIM, live, DIM, BLOCK_DIM, True)
    top = tl.load(softmax_ptr + place * 2, mask=live, other=0.0)
    total = tl.load(softmax_ptr + place * 2 + 1, mask=live, other=1.0)
    own = tl.zeros((ROWS,), dtype=ACC)
    if a_dst_ptr is not None:
        own = tl.load(a_dst_ptr + place, mask=live, other=0.0).to(ACC)
    if RECORDS > 0:
        centre = centre_of(a_src_ptr, place % HEADS, num_cols, HEADS, ACC)
    delta = product_of_rows(out, grad, live, DIM, ACC)
    if only_ptr is not None:
        column = tl.load(only_ptr + place // HEADS, mask=live, other=-1)
        alone = column >= 0
        offs_x = column.to(tl.int64) * X_STRIDE + place % HEADS * DIM
        x = load_rows(x_ptr, offs_x, alone, DIM, BLOCK_DIM)
        kept = tl.max((out != 0).to(tl.int32), 1) > 0  # of a result of zeros delta is 0 anyway
        exact = product_of_rows(x, grad, alone, DIM, ACC) * (1.0 / (1.0 - DROPOUT))
        delta = tl.where(alone, tl.where(kept, exact, 0.0), delta)
    if grad_ptr.dtype.element_ty.primitive_bitwidth > 16:
        norm = inverse(total)
    else:
        top += tl.log(tl.where(total == 0, 1.0, total))
        norm = tl.full((ROWS,), 1.0, dtype=ACC)
        if seed_ptr is not None:
            key = key_of(seed_ptr, place // HEADS, place % HEADS, False)
            norm = key.to(tl.float32, bitcast=True)
    if LISTED:
        at = stats_ptr + place + place // HEADS * HEADS
        tl.store(at, top, mask=live)
        tl.store(at + HEADS, delta, mask=live)
    elif RECORDS > 0:
        store_records(
            stats_ptr, place, live, top, delta, own, centre, HEADS, RECORDS, SLOPE, grad_ptr.dtype.element_ty,
            a_src_ptr.dtype.element_ty,
        )  # fmt: skip
    else:
        store_quads(stats_ptr, place, live, top, norm, delta, own)
    if tilt_ptr is not None:
        d_a_dst = (1.0 - SLOPE) * product_of_rows(tilt, grad, live, DIM, ACC)
        tl.store(d_a_dst_ptr + place, d_a_dst.to(d_a_dst_ptr.dtype.element_ty), mask=live)
