"""Row kernel of aggregation: how many edges a step takes, and how many rows a program.

A program has the edges of its next row on their way while it sums one, so that short rows want company; but
programs have to fill the GPU, and a long row is waited for. Read off sweeps on H200s
(results/nvidia-h200/weighted_rows.md).
"""

from __future__ import annotations

from typing import NamedTuple

from graphfuse.kernels.loads import FULL

_LONG = 128  # edges of a mean row: 65 gain nothing by wide steps, 492 do, between them nothing was swept
_SHORT = 48  # likewise: of few rows 34 gain by narrow steps, 60 lose


class Shape(NamedTuple):
    """What a program of the row kernel is."""

    block: int  # features
    step: int  # edges
    stages: int
    warps: int
    rows: int


def shape(width: int, fused: bool, num_rows: int, num_edges: int, num_tasks: int) -> Shape:
    """For rows of ``width`` features, a power of two; ``fused`` with a product, which wants all of them.

    Of few rows the longest is waited for. Where none is long, so that none is listed as a task, it is the
    start of programs: a row has one then, not one for 64 of its features (of the H100, small_maps.md).
    """
    if num_rows < FULL and not fused:
        even = num_tasks == 0 and num_edges <= _SHORT * num_rows
        if even and width > 64 and num_rows * width >= 64 * (FULL // 2):
            return Shape(min(width, 256), 8, 1, 1, 1)
        return Shape(min(width, 64), 32, 1, 1, 1)
    block = width if fused else min(width, 128)
    warps = 1 if block < 256 else 4
    if num_rows < FULL:
        return Shape(block, min(32, max(4, 1024 // block)), 2, warps, 1)
    if num_edges >= _LONG * num_rows:
        return Shape(block, min(32, max(4, 2048 // block)), 1, warps, 1)
    rows = 4 if num_rows >= 4 * FULL else 2 if num_rows >= 2 * FULL else 1
    if num_rows >= 64 * FULL and num_edges <= 16 * num_rows:
        rows = 8
    return Shape(block, min(16, max(4, 512 // block)), 1, warps, rows)
