"""Gathered rows of half precision on the way from memory to tensor cores, with no stop in shared memory.

A product A X of tensor cores wants pairs of rows of X in one register: thread t has, of 16 rows, 2 (t % 4),
the next, and those 8 further on, of feature t // 4 of 8. Which entries of a window are these rows, and which
features these, is up to whoever makes A and reads the result: so a thread loads 8 features of a row at once,
lets these be the same feature of several products, and of two rows pairs what it has. Triton moves nothing
between threads then, as the layouts say the same; of rows copied to shared memory each number is written and
read once more, by threads that wait for both.
"""

import triton
import triton.language as tl

from graphfuse.kernels.device import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)
_WORDS = tl.constexpr(4)  # of 16 bytes, the widest load


@triton.jit
def entries_of_threads(COLUMNS: tl.constexpr):
    # The entries of a step by who loads them, [4, COLUMNS / 4]: a thread has some that follow one another.
    return tl.arange(0, 4)[:, None] * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :]


@triton.jit
def entries_of_columns(COLUMNS: tl.constexpr):
    # the same entries in the order of the columns of A
    place = tl.arange(0, COLUMNS)
    nth = place // 16 * 4 + place // 8 % 2 * 2 + place % 2
    return place % 8 // 2 * (COLUMNS // 4) + nth


@triton.jit
def gather_words(
    x_ptr, column, first, X_STRIDE: tl.constexpr, X_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    # Features [first, first + BLOCK_DIM) of rows `column` [4, entries], 0 from X_DIM on, in words of two that
    # begin on 4 bytes: [4, 8, entries, pieces, words].
    RUN: tl.constexpr = min(BLOCK_DIM // 16, _WORDS)
    PIECES: tl.constexpr = BLOCK_DIM // 16 // RUN
    lane, piece, word = tl.arange(0, 8), tl.arange(0, PIECES), tl.arange(0, RUN)
    inner = first // 2 + lane[:, None, None] * RUN + piece[None, :, None] * (8 * RUN) + word[None, None, :]
    at = column.to(tl.int64)[:, None, :, None, None] * (X_STRIDE // 2) + inner[None, :, None, :, :]
    words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    if X_DIM % BLOCK_DIM == 0:
        words = tl.load(words_ptr + at)
    else:
        words = tl.load(words_ptr + at, mask=(inner < X_DIM // 2)[None, :, None, :, :], other=0)
    return words


@triton.jit
def _operand(words, HALF: tl.constexpr):
    # the lower half of each word as an operand [columns of A, words of a row]
    x = words.to(tl.int16).to(HALF, bitcast=True)
    x = x.reshape(4, 8, x.shape[2] // 4, 2, 2, x.shape[3], x.shape[4])
    x = x.permute(2, 3, 0, 4, 5, 6, 1)
    return x.reshape(x.shape[0] * 16, x.shape[4] * x.shape[5] * 8)


@triton.jit
def add_product(a, words, even, odd, HALF: tl.constexpr, ACC: tl.constexpr):
    # even and odd features of A X, each added to its sum; `a` has its columns as `entries_of_columns` says
    even = _dot(a, _operand(words, HALF), even, ACC)
    odd = _dot(a, _operand(words >> 16, HALF), odd, ACC)
    return even, odd


@triton.jit
def _dot(a, x, acc, ACC: tl.constexpr):
    if _INTERPRETING and a.dtype == tl.bfloat16:  # it would multiply the bit patterns
        return tl.dot(a.to(tl.float32), x.to(tl.float32), acc, out_dtype=ACC)
    return tl.dot(a, x, acc, out_dtype=ACC)


@triton.jit
def in_order(even, odd):
    # sums of even and odd features, as `add_product` has them, side by side: [16, BLOCK_DIM]
    WORDS: tl.constexpr = even.shape[1] // 8
    RUN: tl.constexpr = min(WORDS, _WORDS)
    SHAPE: tl.constexpr = (16, WORDS // RUN, RUN, 8)
    even = even.reshape(SHAPE).permute(0, 1, 3, 2)
    odd = odd.reshape(SHAPE).permute(0, 1, 3, 2)
    return tl.join(even, odd).reshape(16, WORDS * 16)


@triton.jit
def twos(bits, row, x_ptr):
    # 2 where a row has an entry, else 0, as A for x: bits int16 [columns], row [16]. 2 is one bit of a half,
    # the last but one from the left, so two elements are a rotation and a mask.
    if not _INTERPRETING and tl.target_info.cuda_capability_geq(8, 0):
        SHAPE: tl.constexpr = (16, bits.shape[0])
        shift = tl.broadcast_to(((14 - row) & 31)[:, None], SHAPE)
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2; and.b32 $0, $0, 0x40004000;",
            "=r,r,r,r", [tl.broadcast_to(bits[None, :], SHAPE), shift], dtype=x_ptr.dtype.element_ty, is_pure=True, pack=2,
        )  # fmt: skip
    return tl.where(((bits.to(tl.int32)[None, :] >> row[:, None]) & 1) != 0, 2.0, 0.0).to(
        x_ptr.dtype.element_ty
    )
