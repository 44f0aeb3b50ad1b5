"""Launch configurations: a heuristic of the walk, the width and the element size, the same on every run.

No run-time autotuning: it races across threads, must not run inside a CUDA graph capture, and would let the
machine's mood choose the order of summation.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import torch

# What a memory system of 4 TB/s moves in the 3 us that one more captured kernel costs.
_LAUNCH_BYTES = 12_000_000

# The widest tile of summed features that the fused SpMM-GEMM keeps on chip.
MAX_FUSED_DIM = 256


class Config(NamedTuple):
    """How one kernel is launched."""

    block_dim: int  # features a program handles
    step: int  # column entries or edges per step of its loop
    stages: int  # software pipelining depth of the loop
    warps: int
    block_out: int = 16  # output features per step of the fused GEMM
    merge_warps: int = 4
    rows: int = 1  # rows a program of the row kernel handles


def _power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def prefers_rows(num_edges: int, num_entries: int, dim: int, dtype: torch.dtype, weighted: bool) -> bool:
    """Whether rows are walked one by one rather than in windows of 16.

    Windows read a shared column once and multiply on tensor cores. With little sharing (about one edge per
    column entry) that is masked work for nothing. Weights in float32 are not exact in TF32: rows only.
    """
    if weighted and dtype not in (torch.float16, torch.bfloat16):
        return True
    return num_edges <= 1.25 * num_entries


class GemmOrder(enum.Enum):
    """How A X W^T is computed."""

    FUSED = "(A X) W^T in one kernel, A X on chip"
    PROJECT = "A (X W^T), a dense product first"
    AGGREGATE = "(A X) W^T, a dense product afterwards"


@functools.cache
def gemm_order(num_entries: int, num_rows: int, dim: int, out_dim: int, size: int, keep: bool) -> GemmOrder:
    """Order of A X W^T by an estimate of bytes moved.

    Apart, X W^T (or A X) passes through memory once more and a second launch costs what _LAUNCH_BYTES take,
    but rows of the narrower width are gathered.

    Args:
        num_entries: Rows of X that are gathered.
        num_rows: Rows of X.
        dim: Columns of X.
        out_dim: Rows of W.
        size: Bytes of an element.
        keep: Whether A X is wanted too, which rules out :attr:`GemmOrder.PROJECT`.
    """
    apart = GemmOrder.PROJECT if dim > out_dim and not keep else GemmOrder.AGGREGATE
    if max(dim, out_dim) > MAX_FUSED_DIM:
        return apart
    gathered = out_dim if apart is GemmOrder.PROJECT else dim
    bytes_apart = (num_entries + 2 * num_rows) * gathered * size + _LAUNCH_BYTES
    return GemmOrder.FUSED if num_entries * dim * size <= bytes_apart else apart


@functools.cache
def spmm_window(dim: int, size: int, out_dim: int | None) -> Config:
    """Window kernel, elements of ``size`` bytes: one warp and 32 columns a step, for latency."""
    width = _power_of_two(dim, 16)
    if out_dim is None:
        block = min(width, 128 if size <= 2 else 64)
        return Config(block, 32, 3, 1)
    warps = 1 if width * size <= 256 else 4
    return Config(width, 32, 2, warps, min(_power_of_two(out_dim, 16), 32 if size > 2 else 64))


@functools.cache
def spmm_row(dim: int, size: int, out_dim: int | None) -> Config:
    """Row kernel: as many edges a step as keep about 1024 elements in flight."""
    width = _power_of_two(dim)
    block = width if out_dim is not None else min(width, 128)
    edges = min(32, max(4, 1024 // block))
    return Config(block, edges, 2, 1, _power_of_two(min(out_dim or 1, 16)), rows=4)


@functools.cache
def sddmm_window(dim: int) -> Config:
    """Window kernel, half precision."""
    return Config(min(_power_of_two(dim, 16), 128), 32, 2, 1)


@functools.cache
def sddmm_row(dim: int) -> Config:
    """Row kernel."""
    block = min(_power_of_two(dim), 128)
    return Config(block, min(32, max(4, 1024 // block)), 2, 1)
