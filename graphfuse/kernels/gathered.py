"""Rows as a gather likes them: each on 16 bytes, and scaled already."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.run import Launch, accumulator, aligned, current_device
from graphfuse.kernels.tiles import after_previous, rows_and_heads


# Copies heads of rows, zeros after their features.
#   grid      (ceil(num_rows * HEADS / ROWS),)
#   reads     x [num_rows, HEADS, DIM], rows X_STRIDE apart; scale [num_rows] if there is one
#   writes    out [num_rows, HEADS, WIDTH]: x, times the scale of its row in ACC, and 0
@triton.jit(do_not_specialize=["num_rows"])
def _gathered_kernel(
    out_ptr, x_ptr, scale_ptr, num_rows, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    place, live, offs_x = rows_and_heads(num_rows, X_STRIDE, HEADS, DIM, ROWS)
    offs_dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = live[:, None] & (offs_dim < DIM)
    x = tl.load(x_ptr + offs_x[:, None] + offs_dim, mask=mask, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + place // HEADS, mask=live, other=0.0).to(ACC)
        # 0 times a scale that is no number would be none
        x = tl.where(mask, (x.to(ACC) * scale[:, None]).to(x.dtype), 0.0)
    at = out_ptr + (place * WIDTH)[:, None] + offs_dim
    tl.store(at, x, mask=live[:, None] & (offs_dim < WIDTH))


def gathered(plans: dict[Any, Any], x: Tensor, width: int, scale: Tensor | None = None) -> Tensor:
    """A copy of ``x`` with ``width`` features a head, zeros at the end, each row times its ``scale``.

    Args:
        plans: Where launches are kept.
        x: ``[num_rows, heads, dim]`` with contiguous heads, rows may be strided.
        width: At least ``dim``.
        scale: ``[num_rows]``, contiguous, or nothing.
    """
    index = x.get_device()
    if index >= 0 and index != current_device():
        with torch.cuda.device(index):
            return gathered(plans, x, width, scale)
    num_rows, heads, dim = x.shape
    out = x.new_empty(num_rows, heads, width)
    if out.numel() == 0:
        return out
    scale_dtype = None if scale is None else scale.dtype
    key = ("gathered", x.dtype, *x.shape, x.stride(0), width, scale_dtype)
    plan = plans.get(key)
    if plan is None:
        config = launch.rows_at_once(width, num_rows * heads)
        rest = (num_rows, x.stride(0), heads, dim, width, config.block_dim, config.rows, accumulator(x.dtype))
        programs = -(-num_rows * heads // config.rows)
        plan = plans[key] = Launch(_gathered_kernel, programs, config.warps, (), rest)
    plan((out, x, scale), (), aligned(x, scale), index)
    return out
