"""The sum over the entries of a window, on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.operands import (
    add_product,
    entries_of_columns,
    entries_of_threads,
    gather_words,
    in_order,
    twos,
)
from graphfuse.kernels.tiles import (
    dot_exact,
    finite,
    load_bits,
    nothing,
    placed,
    places,
    rows_of_product,
    without_loop,
)


@triton.jit
def _direct_sum(
    x_ptr, column_ptr, row_mask_ptr, begin, end, first, X_DIM: tl.constexpr, X_STRIDE: tl.constexpr,
    BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # As `window_sum`, of half precision, with STAGES steps on their way to registers. A step beyond the end
    # reads the last entry again, for no row: no other node's NaN can enter.
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    row = rows_of_product(ACC)
    of_threads, of_columns = entries_of_threads(COLUMNS), entries_of_columns(COLUMNS)
    even = tl.zeros((16, BLOCK_DIM // 2), dtype=ACC)
    odd = tl.zeros((16, BLOCK_DIM // 2), dtype=ACC)
    x, bits = nothing(), nothing()
    column = tl.load(column_ptr + tl.minimum(begin + of_threads, end - 1))
    for i in tl.static_range(STAGES):
        start = begin + i * COLUMNS
        x += (gather_words(x_ptr, column, first, X_STRIDE, X_DIM, BLOCK_DIM),)
        column = tl.load(column_ptr + tl.minimum(start + COLUMNS + of_threads, end - 1))
        offs = start + of_columns
        bits += (tl.load(row_mask_ptr + offs, mask=offs < end, other=0),)
    for ahead in tl.range(begin + STAGES * COLUMNS, end + STAGES * COLUMNS, STAGES * COLUMNS, num_stages=1):
        next_x, next_bits = nothing(), nothing()
        for i in tl.static_range(STAGES):
            start = ahead + i * COLUMNS
            even, odd = add_product(twos(bits[i], row, x_ptr), x[i], even, odd, HALF, ACC)
            next_x += (gather_words(x_ptr, column, first, X_STRIDE, X_DIM, BLOCK_DIM),)
            column = tl.load(column_ptr + tl.minimum(start + COLUMNS + of_threads, end - 1))
            offs = start + of_columns
            next_bits += (tl.load(row_mask_ptr + offs, mask=offs < end, other=0),)
        x, bits = next_x, next_bits
    return in_order(even, odd) * 0.5


@triton.jit
def _staged_sum(
    x_ptr, column_ptr, row_mask_ptr, col_scale_ptr, window, begin, end, first, X_DIM: tl.constexpr,
    X_STRIDE: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WITHOUT_LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # As `window_sum`, with STAGES steps on their way to shared memory.
    offs_dim = first + tl.arange(0, BLOCK_DIM)
    mask_dim = offs_dim < X_DIM
    bit = 1 << rows_of_product(ACC)
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    acc = tl.zeros((16, BLOCK_DIM), dtype=ACC)
    # This loop runs once. Without it, where a step has fewer columns than a warp has lanes, the compiler for
    # GPUs branches around each copy of columns: a tenth more instructions.
    todo = 1
    while todo > 0:
        todo = 0
        next_bits = load_bits(row_mask_ptr, begin, end, COLUMNS, SIZE).to(tl.int32)
        for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
            bits = next_bits
            next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS, SIZE).to(tl.int32)
            # the last step re-reads the last entry: no other node's NaN can enter through a masked lane
            offs = tl.minimum(start + tl.arange(0, COLUMNS), end - 1)
            column = tl.load(column_ptr + offs)
            offs_x = column[:, None].to(tl.int64) * X_STRIDE + offs_dim[None, :]
            x = tl.load(x_ptr + offs_x, mask=mask_dim[None, :], other=0.0)
            if col_scale_ptr is not None:
                scale = tl.load(col_scale_ptr + column).to(ACC)
                x = (x.to(ACC) * scale[:, None]).to(x_ptr.dtype.element_ty)
            if WITHOUT_LOOPS:
                if SIZE == 32:
                    column = tl.load(column_ptr + tl.minimum(start + places(COLUMNS, SIZE), end - 1))
                bits = without_loop(bits, column, window)
            valid = (bits[None, :] & bit[:, None]) != 0
            acc = dot_exact(placed(tl.where(valid, 1.0, 0.0).to(x.dtype)), x, acc, ACC)
    return acc


@triton.jit
def window_sum(
    x_ptr, column_ptr, row_mask_ptr, col_scale_ptr, window, begin, end, first, X_DIM: tl.constexpr,
    X_STRIDE: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    DIRECT: tl.constexpr, WITHOUT_LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Sum over the entries [begin, end) of a window, of features from `first` on: ACC [16, BLOCK_DIM]. A tile
    # of 16 rows x COLUMNS entries (bits) times the gathered rows of x. DIRECT: rows are of half precision and
    # start on 4 bytes. WITHOUT_LOOPS: self-loops are in the masks, and do not count.
    if DIRECT and col_scale_ptr is None and not WITHOUT_LOOPS:
        acc = _direct_sum(
            x_ptr, column_ptr, row_mask_ptr, begin, end, first, X_DIM, X_STRIDE, BLOCK_DIM, COLUMNS, STAGES,
            ACC,
        )  # fmt: skip
    else:
        acc = _staged_sum(
            x_ptr, column_ptr, row_mask_ptr, col_scale_ptr, window, begin, end, first, X_DIM, X_STRIDE,
            BLOCK_DIM, COLUMNS, STAGES, WITHOUT_LOOPS, ACC,
        )  # fmt: skip
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows through the dot. Then, and only then,
    # sum again entry by entry and let each row see its own neighbours alone.
    if not finite(acc):
        row, offs_dim = tl.arange(0, 16), first + tl.arange(0, BLOCK_DIM)
        mask_dim = offs_dim < X_DIM
        acc = tl.zeros((16, BLOCK_DIM), dtype=ACC)
        for entry in tl.range(begin, end):
            column = tl.load(column_ptr + entry)
            bits = tl.load(row_mask_ptr + entry).to(tl.int32)
            x = tl.load(x_ptr + column.to(tl.int64) * X_STRIDE + offs_dim, mask=mask_dim, other=0.0).to(ACC)
            if col_scale_ptr is not None:
                x = x * tl.load(col_scale_ptr + column).to(ACC)
            if WITHOUT_LOOPS:
                bits = without_loop(bits, column, window)
            valid = ((bits >> row) & 1) != 0
            term = tl.broadcast_to(x[None, :], (16, BLOCK_DIM))
            acc += tl.where(valid[:, None], term, 0.0)
    return acc
