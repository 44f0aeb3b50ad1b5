"""How kernels that add the slices of cut windows and rows are launched (results/nvidia-h200/merges.md)."""

from __future__ import annotations

import functools
from typing import NamedTuple

from graphfuse.kernels.launch import power_of_two


class Merge(NamedTuple):
    """How the slices of a cut window or row are added."""

    slots: int  # slices that are loaded at a time
    rows: int  # of a slice, in a program
    stages: int  # of the loop
    warps: int


@functools.cache
def of_sums(height: int, width: int, whole: bool = False, longest: int = 128) -> Merge:
    """Merges of plain sums: slices ``[height, width]``, of windows (16) or rows (1).

    Args:
        height: Rows of a slice.
        width: Features of it that a program adds.
        whole: All rows in one program, for a product.
        longest: Slices of a row, of which an eighth on their way is enough.
    """
    if height == 1:
        return _of_rows(width, longest)
    rows = height if whole else 8
    # of two slices of a narrow row a pipeline costs more than it brings; those of hubs follow one another
    return Merge(1, rows, 1 if width <= 64 and not whole else _stages(rows * width), 4)


@functools.cache
def of_softmax(height: int, width: int, tilted: bool = False) -> Merge:
    """Merges of attention's forward, likewise; ``tilted``: half of ``width`` are the sums of GAT's tilt."""
    if height == 1:
        return _of_rows(width)
    if tilted and width <= 128:
        return Merge(2, 2, 2, 1)
    if tilted and width <= 256:
        return Merge(4, 2, 1, 2)
    return Merge(1, 8, _stages(8 * width), 4)


@functools.cache
def of_gradients(height: int, width: int) -> Merge:
    """Merges of attention's backward, likewise."""
    if height == 1:
        return _of_rows(width)
    rows = 8 if width <= 64 else 4
    # Asked for together, without a pipeline, whose barriers cost merges of two slices more than it brings: 16
    # numbers a thread at most, 32 of rows wider than 128.
    return Merge(max(1, min(4, 4096 // (rows * width))), rows, 1, 4)


@functools.cache
def heads_of(heads: int, dim: int, edge_dim: int = 0, tilted: bool = False) -> tuple[int, int, int]:
    """Of merges the heads, features and numbers of an edge of a program: 64 sums, or ``tilted`` 32 pairs."""
    block_dim, block_edge = power_of_two(dim, 16), power_of_two(edge_dim)
    width = max(block_dim * (1 + tilted), block_edge)
    return min(power_of_two(heads), max(1, 64 // width)), block_dim, block_edge


def _of_rows(width: int, longest: int = 128) -> Merge:
    # More on their way costs merges of two slices what it brings hubs.
    slices = min(16, power_of_two(-(-longest // 8), 4))
    return Merge(max(1, min(slices, 2048 // power_of_two(width))), 1, 1, 1 if slices <= 8 else 4)


def _stages(elements: int) -> int:
    # of a pipeline that holds a slice's elements so many times, in 32 KB
    return max(1, min(4, 8192 // elements))
