"""Arithmetic of half precision, two numbers an instruction, and what GATv2 makes of a pair of rows with it.

Each result is rounded, as PyG's are, which makes a tensor of each. Products of scores are added up in half
precision as far as one thread has four pairs of them, and in float32 from there on. Of float32 everything is
as it would be without these functions.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import leaky
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.tiles import sum_of_products

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.constexpr_function
def _assembly(name, dtype):
    # a sum is one of products, with 1, and so is a product: GPUs before Hopper have no other of bfloat16
    kind, one = ("f16x2", "0x3c003c00") if dtype == tl.float16 else ("bf16x2", "0x3f803f80")
    return {
        "sum": f"{{ .reg .b32 one; mov.b32 one, {one}; fma.rn.{kind} $0, $1, one, $2; }}",
        "product": f"{{ .reg .b32 no; mov.b32 no, 0x80008000; fma.rn.{kind} $0, $1, $2, no; }}",
        "sum of products": f"fma.rn.{kind} $0, $1, $2, $3;",
        "maximum": f"max.NaN.{kind} $0, $1, $2;",
        "sum where positive": "{ .reg .pred a, b; .reg .b32 no; mov.b32 no, 0; "
        f"setp.gt.{kind} a|b, $4, no; mov.f32 $0, $2; mov.f32 $1, $3; "
        "@a add.f32 $0, $2, $5; @b add.f32 $1, $3, $6; }",
    }[name]


@triton.jit
def _in_pairs(NAME: tl.constexpr, x, y, z):
    if _INTERPRETING or not tl.target_info.cuda_capability_geq(8, 0):
        a, b = x.to(tl.float32), y.to(tl.float32)
        if NAME == "sum":
            found = a + b
        elif NAME == "product":
            found = a * b
        elif NAME == "sum of products":
            found = a * b + z.to(tl.float32)
        else:
            found = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
        found = found.to(x.dtype)
    else:
        LINE: tl.constexpr = _assembly(NAME, x.dtype)
        if NAME == "sum of products":
            found = tl.inline_asm_elementwise(LINE, "=r,r,r,r", [x, y, z], x.dtype, True, 2)
        else:
            found = tl.inline_asm_elementwise(LINE, "=r,r,r", [x, y], x.dtype, True, 2)
    return found


@triton.jit
def product_in_pairs(x, y):
    return _in_pairs("product", x, y, y)


@triton.jit
def sum_of_rows(x, y):
    y = tl.broadcast_to(y, x.shape)
    return x + y if x.dtype.primitive_bitwidth > 16 else _in_pairs("sum", x, y, y)


@triton.jit
def bent_rows(u, SLOPE: tl.constexpr):
    # the LeakyReLU of u
    if u.dtype.primitive_bitwidth > 16:
        bent = leaky(u, SLOPE)
    else:
        less = product_in_pairs(u, tl.full(u.shape, SLOPE, tl.float32).to(u.dtype))
        bent = _in_pairs("maximum", u, less, u) if SLOPE > 0 and SLOPE <= 1 else tl.where(u > 0, u, less)
    return bent


@triton.jit
def _halved(x):
    # the even and the odd pairs of the last axis
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    D: tl.constexpr = x.shape[2]
    even, odd = tl.split(x.reshape(A, B, D // 4, 2, 2).permute(0, 1, 2, 4, 3))
    return even.reshape(A, B, D // 2), odd.reshape(A, B, D // 2)


@triton.jit
def _doubled(x):
    # With as many of -0, which add nothing: the sum over an axis as long as that of the rows is where their
    # threads are, as it has to be; Triton would move the rows else.
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    D: tl.constexpr = x.shape[2]
    return tl.join(x, tl.full(x.shape, 0.0, x.dtype) * -1.0).reshape(A, B, 2 * D)


@triton.jit
def _words(x):
    # x, two numbers in a word: what is loaded before a loop would be put together in each of its steps
    return product_in_pairs(x, tl.full(x.shape, 1.0, tl.float32).to(x.dtype))


@triton.jit
def scores_of(bent, att, live, WIDTH: tl.constexpr, ACC: tl.constexpr):
    # The product of `att` and the row of an edge, of each head; for `live` see `sum_of_products`.
    if bent.dtype.primitive_bitwidth > 16 or att.dtype != bent.dtype:
        s = sum_of_products(att.to(ACC)[None, :, :], bent.to(ACC), live, 2, WIDTH)
    else:
        a = tl.broadcast_to(att[None, :, :], bent.shape)
        if bent.shape[2] < 8:
            part = product_in_pairs(bent, a).to(ACC)
        else:
            even, odd = _halved(bent)
            b0, b2 = _halved(even)
            b1, b3 = _halved(odd)
            even, odd = _halved(a)
            a0, a2 = _halved(even)
            a1, a3 = _halved(odd)
            part = product_in_pairs(b0, _words(a0))
            part = _in_pairs("sum of products", b1, _words(a1), part)
            part = _in_pairs("sum of products", b2, _words(a2), part)
            part = _in_pairs("sum of products", b3, _words(a3), part)
            part = _doubled(_doubled(part.to(ACC)))
        s = tl.sum(part, 2)
    return s


@triton.jit
def sum_where_positive(acc, u, x):
    # acc + x where u > 0, else acc; of u in half precision
    x = tl.broadcast_to(x, acc.shape)
    if _INTERPRETING or not tl.target_info.cuda_capability_geq(9, 0):
        acc = tl.where(u > 0, acc + x, acc)
    else:
        LINE: tl.constexpr = _assembly("sum where positive", u.dtype)
        acc = tl.inline_asm_elementwise(LINE, "=&f,=&f,f,f,r,f,f", [acc, u, x], tl.float32, True, 2)
    return acc
