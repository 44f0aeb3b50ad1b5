"""Block masks, matrices that are dense in some square blocks, as an edge list."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from graphfuse.formats.inputs import INTEGERS, LIMIT

SIZES = (16, 32, 64, 128)


def as_edge_index(
    block_rows: Tensor, block_cols: Tensor, block_size: int, shape: tuple[int, int] | None
) -> tuple[Tensor, int, int]:
    """``(edge_index, num_src, num_dst)`` of a block mask: an edge for each element of each block, in order.

    Element (r, c) of block b is edge ``(b * block_size + r) * block_size + c``.
    """
    if isinstance(block_size, float) or block_size not in SIZES:
        raise ValueError(f"`block_size` must be one of {SIZES} (got {block_size})")
    for name, blocks in (("block_rows", block_rows), ("block_cols", block_cols)):
        is_tensor = isinstance(blocks, Tensor)
        if not is_tensor or blocks.dtype not in INTEGERS or blocks.dim() != 1 or blocks.is_meta:
            got = type(blocks).__name__
            got = f"{list(blocks.shape)}, {blocks.dtype} on {blocks.device}" if is_tensor else got
            raise ValueError(f"`{name}` must be an integer tensor of one dimension (got {got})")
    if block_rows.shape != block_cols.shape or block_rows.device != block_cols.device:
        raise ValueError(
            "`block_cols` must have the length and device of `block_rows` "
            f"(got {block_cols.numel()} on {block_cols.device}, wanted {block_rows.numel()} on "
            f"{block_rows.device})"
        )
    blocks = torch.stack([block_cols.long(), block_rows.long()])
    if shape is None:
        ends = (blocks.amax(1) + 1).tolist() if blocks.numel() > 0 else [0, 0]
        shape = (ends[1] * block_size, ends[0] * block_size)
    try:
        num_dst, num_src = map(operator.index, shape)
    except (TypeError, ValueError):
        raise ValueError(f"`shape` must be (num_dst, num_src) (got {shape})") from None
    if num_dst % block_size != 0 or num_src % block_size != 0:
        raise ValueError(f"`shape` must be multiples of the block size {block_size} (got {shape})")
    if blocks.numel() > 0:
        low, high = torch.stack([blocks.amin(1), blocks.amax(1)]).tolist()
        for name, place, size in (("block_rows", 1, num_dst), ("block_cols", 0, num_src)):
            if low[place] < 0 or high[place] >= size // block_size:
                raise IndexError(
                    f"`{name}` must lie in [0, {size // block_size}), {size} // {block_size} of `shape` "
                    f"(got {low[place]} to {high[place]})"
                )
    if blocks.size(1) * block_size**2 > LIMIT:
        raise ValueError(
            f"`block_rows` holds {blocks.size(1)} blocks of {block_size}, more than {LIMIT} elements; split "
            "the mask by rows"
        )
    inner = torch.arange(block_size, device=blocks.device)
    shape3 = (blocks.size(1), block_size, block_size)
    src = (blocks[0, :, None, None] * block_size + inner[None, None, :]).expand(shape3)
    dst = (blocks[1, :, None, None] * block_size + inner[None, :, None]).expand(shape3)
    return torch.stack([src.reshape(-1), dst.reshape(-1)]), num_src, num_dst
