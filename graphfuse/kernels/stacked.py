"""Parameters of several linear maps of the same features, stacked for one product by one launch.

PyTorch takes two, for weights and for biases, and three where weights are turned on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.run import Launch, aligned, current_device
from graphfuse.kernels.tiles import after_previous

MOST = 4  # maps at a time
_BLOCK = 32  # rows and columns of a tile


# Copies weights one below the other or, TURNED, side by side, and biases one behind the other.
#   grid      (cdiv(width, BLOCK) * cdiv(dim, BLOCK), maps): one program = a tile of one map
#   reads     first, second .. [width, dim]; first_bias .. [width]
#   writes    weight [maps * width, dim] or, TURNED, [dim, maps * width]; bias [maps * width]
@triton.jit(do_not_specialize=["width", "dim"])
def _stacked_kernel(
    weight_ptr, bias_ptr, first_ptr, second_ptr, third_ptr, fourth_ptr, first_bias_ptr, second_bias_ptr,
    third_bias_ptr, fourth_bias_ptr, width, dim, MAPS: tl.constexpr, TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    after_previous()
    blocks = tl.cdiv(dim, BLOCK)
    rows = (tl.program_id(0) // blocks) * BLOCK + tl.arange(0, BLOCK)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < width)[:, None] & (place < dim)[None, :]
    of_row, of_place = rows.to(tl.int64)[:, None], place.to(tl.int64)[None, :]
    weights = (first_ptr, second_ptr, third_ptr, fourth_ptr)
    biases = (first_bias_ptr, second_bias_ptr, third_bias_ptr, fourth_bias_ptr)
    for nth in tl.static_range(MAPS):
        if tl.program_id(1) == nth:
            tile = tl.load(weights[nth] + of_row * dim + of_place, mask=mask)
            before = tl.cast(width, tl.int64) * nth
            if TURNED:
                tl.store(weight_ptr + of_place * MAPS * width + before + of_row, tile, mask=mask)
            else:
                tl.store(weight_ptr + (before + of_row) * dim + of_place, tile, mask=mask)
            if bias_ptr is not None:
                if tl.program_id(0) % blocks == 0:
                    bias = tl.load(biases[nth] + rows, mask=rows < width)
                    tl.store(bias_ptr + before + rows, bias, mask=rows < width)


@functools.lru_cache(maxsize=256)
def _plan(
    index: int, dtype: torch.dtype, maps: int, shape: tuple[int, int], biased: bool, turned: bool
) -> Launch:
    width, dim = shape
    programs = -(-width // _BLOCK) * -(-dim // _BLOCK)
    return Launch(_stacked_kernel, programs, 4, (), (width, dim, maps, turned, _BLOCK), groups=maps)


def stacked(
    weights: Sequence[Tensor], biases: Sequence[Tensor], turned: bool
) -> tuple[Tensor, Tensor | None]:
    """Launches the kernel.

    Args:
        weights: One to four of one shape, ``[width, dim]``, contiguous; no size is 0.
        biases: One for each, ``[width]``, contiguous, or none.
        turned: Whether the result has the columns of the weights for its rows.

    Returns:
        The weights, one below the other or, turned, side by side; the biases, one behind the other, or None.
    """
    like = weights[0]
    index = like.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return stacked(weights, biases, turned)
    maps, (width, dim) = len(weights), like.shape
    weight = like.new_empty(dim, maps * width) if turned else like.new_empty(maps * width, dim)
    bias = like.new_empty(maps * width) if biases else None
    missing = (None,) * (MOST - maps)
    given = (*weights, *missing, *(biases or (None,) * maps), *missing)
    plan = _plan(index, like.dtype, maps, (width, dim), bool(biases), turned)
    plan((weight, bias), given, aligned(*given), index)
    return weight, bias
