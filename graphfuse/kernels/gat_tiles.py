"""Weights of GAT's window kernels in half precision, two numbers to an instruction."""

import triton
import triton.language as tl

from graphfuse.kernels.attention_tiles import LOG2_E
from graphfuse.kernels.device import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.jit
def half_factors(u, shift, SLOPE: tl.constexpr, HALF: tl.constexpr):
    # As exp(leaky(a + d)) = max(exp(a) exp(d), exp(slope a) exp(slope d)) for a slope in [0, 1], two numbers
    # of each node make its weights: no score needs an exponential of its own. In half precision two products
    # or maxima are one instruction. `shift` is an exponent of 2 that both are divided by.
    return tl.exp2(u * LOG2_E - shift).to(HALF), tl.exp2(u * (LOG2_E * SLOPE) - shift).to(HALF)


@triton.jit
def greater_of_products(own, other):
    # max(own[0] * other[0], own[1] * other[1]), NaN where one of them is
    return tl.maximum(own[0] * other[0], own[1] * other[1], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def own_copy(a, b):
    return a


@triton.jit
def one_of_eight(totals):
    # Any of the eight of a row, which are the same: each thread takes its own, and asks no other.
    return tl.reduce(totals, 1, own_copy)


@triton.jit
def at_most(x, most):
    # The lesser of both, `most` where x is NaN: a GPU's minimum is that, but not every interpreter's.
    if _INTERPRETING:
        return tl.where(x < most, x, most)
    return tl.minimum(x, most)


@triton.jit
def ones_where_greater(a, b, like):
    # 1 where a > b, else 0, of the shape and dtype of `like`. A select would have the compiler take pairs of
    # halves apart, and need a register for each number; compared as a pair they stay one. a and b may be of
    # float32, of which no two are a pair.
    a, b = tl.broadcast_to(a, like.shape), tl.broadcast_to(b, like.shape)
    if a.dtype == like.dtype and tl.target_info.cuda_capability_geq(9, 0):
        NAME: tl.constexpr = (
            "set.gt.f16x2.f16x2 $0, $1, $2;"
            if like.dtype == tl.float16
            else "set.gt.bf16x2.bf16x2 $0, $1, $2;"
        )
        ones = tl.inline_asm_elementwise(NAME, "=r,r,r", [a, b], dtype=like.dtype, is_pure=True, pack=2)
    else:
        ones = tl.where(a > b, 1.0, 0.0).to(like.dtype)
    return ones


@triton.jit
def split_factors(a, against, factors, edges):
    # Of the factors of sources those of edges with a > against, and the second ones of the other edges; 0
    # elsewhere. [16, COLUMNS] each; `edges` has ones in all 16 bits of an edge, and zeros elsewhere.
    first, second = tl.broadcast_to(factors[0], edges.shape), tl.broadcast_to(factors[1], edges.shape)
    a, against = tl.broadcast_to(a, edges.shape), tl.broadcast_to(against, edges.shape)
    if a.dtype == first.dtype and tl.target_info.cuda_capability_geq(9, 0):
        KIND: tl.constexpr = "f16x2" if a.dtype == tl.float16 else "bf16x2"
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 m; set.gt.u32." + KIND + " m, $2, $3; "
            "lop3.b32 $0, $4, m, $6, 0x80; lop3.b32 $1, $5, m, $6, 0x20; }",
            "=r,=r,r,r,r,r,r", [a, against, first, second, edges], dtype=(first.dtype, first.dtype),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif a.dtype == tl.float32 and first.dtype != tl.float32 and tl.target_info.cuda_capability_geq(8, 0):
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 m, n; set.gt.u32.f32 m, $2, $4; set.gt.u32.f32 n, $3, $5; "
            "prmt.b32 m, m, n, 0x5410; lop3.b32 $0, $6, m, $8, 0x80; lop3.b32 $1, $7, m, $8, 0x20; }",
            "=r,=r,r,r,r,r,r,r,r", [a, against, first, second, edges], dtype=(first.dtype, first.dtype),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bent, there = a > against, edges != 0
        first, second = tl.where(there & bent, first, 0.0), tl.where(there & (bent == 0), second, 0.0)
    return first, second
