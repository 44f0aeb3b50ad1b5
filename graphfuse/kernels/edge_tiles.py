"""Pieces of the kernels that make a number for each edge of a window, and sum rows on tensor cores."""

import triton
import triton.language as tl

from graphfuse.kernels.pairs import product_in_pairs
from graphfuse.kernels.tiles import rows_of_product


@triton.jit
def edges_of_step(packed_ptr, row_ptr, start, end, EDGES: tl.constexpr):
    # Columns and rows of the edges of a step, some edge's beyond the end; for what is loaded ahead of it.
    offs = tl.minimum(start + tl.arange(0, EDGES), end - 1)
    some = offs >= 0
    column = tl.load(packed_ptr + offs, mask=some, other=0) >> 5
    return column, tl.load(row_ptr + offs, mask=some, other=0)


@triton.jit
def of_heads(x_ptr, node, heads, HEADS: tl.constexpr):
    # x[node, heads], [EDGES, heads]
    return tl.load(x_ptr + node.to(tl.int64)[:, None] * HEADS + heads[None, :])


@triton.jit
def spread(x, DIM: tl.constexpr):
    # numbers of heads, [.., HEADS], as those of their features, [.., HEADS * DIM]
    ROWS: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, :, None], (ROWS, HEADS, DIM)).reshape(ROWS, HEADS * DIM)


@triton.jit
def weighted(x, weight, DIM: tl.constexpr):
    # Gathered rows of half precision times a weight of each head, two products an instruction: where a row
    # is used twice the compiler would take pairs apart.
    return product_in_pairs(x, spread(weight, DIM))


@triton.jit
def ones_of_rows(place, HALF: tl.constexpr):
    # 1 where an edge is one of a row of the window, [16, EDGES], in the place of tensor cores' left operand
    inner = rows_of_product(tl.float32)
    return tl.where(place[None, :] == inner[:, None], 1.0, 0.0).to(HALF)


@triton.jit
def eight_columns(x):
    # x [EDGES, GROUP], each column as often as it takes for eight in all: a product of fewer is no product of
    # tensor cores
    if x.shape[1] < 8:
        x = eight_columns(tl.join(x, x).reshape(x.shape[0], 2 * x.shape[1]))
    return x


@triton.jit
def as_many_columns(x, GROUP: tl.constexpr):
    # of sums of `eight_columns` those of each column once
    if x.shape[1] > GROUP:
        x, _ = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
        x = as_many_columns(x, GROUP)
    return x
