"""Row kernels of attention in float32: how many edges a step takes, and how many warps.

Where there are many rows a program is a warp, or two, and a step an edge, or a few: more, and registers leave
few programs on a multiprocessor, steps at the end of a row are emptier, and sums of more edges are added to
one another at its end. Where rows are long, or fewer than the GPU holds, the longest is waited for, and steps
are wider. Each edge of a step has a sum of its own, which makes sums of many more exact; those of one edge
after the other are as exact as the definition's, which is all that is asked. Read off sweeps on one H200
(results/nvidia-h200/float32_rows.md).
"""

from __future__ import annotations

from graphfuse.kernels.loads import FULL, RowLoad

Wide = tuple[int, int]  # edges of a step, and warps

FEW_EDGES, SHORT_ROWS = 1 << 17, 10  # of a graph, and of its rows in the mean


def attention(heads: int, width: int, load: RowLoad, backward: bool) -> Wide:
    """Of dot-product attention, in whatever adds up the same scores; heads of ``width`` numbers in all."""
    if load is RowLoad.SHORT:
        return min(32, max(2, 128 // width)), max(1, width // 128)
    if load is RowLoad.NORMAL:
        if heads > 1 and width == 256:
            return 1, 2
        if width == 128:
            return 2, 2 if backward and heads > 1 else 1
        step = 2 if heads > 1 and width == 64 else max(4, 256 // width)
        return min(32, step), 1 if width <= 64 else 8
    if width == 64:
        return 8, 4
    warps = 2 if heads == 1 and width <= 128 else 4
    return min(32, max(4, 1024 // width)), 8 if width > 256 else 1 if width <= 32 else warps


def gat(heads: int, width: int, load: RowLoad, backward: bool) -> Wide:
    """Of GAT's, which reads but one row an edge and has a softmax for each head.

    Two to four heads of 128 numbers in all keep eight edges a step: with four there would be fewer weights
    than a warp has threads, and each would compute several.
    """
    if load is RowLoad.SHORT:
        return attention(heads, width, load, backward)
    if load is RowLoad.NORMAL:
        if width == 64:
            return 2 if backward and heads > 1 else 4, 1
        if width == 128 and (heads == 1 or heads > 4):
            return 2 if backward and heads == 1 else 4, 1
    if heads == 1 or width != 64:
        warps = 1 if width <= 32 or (heads > 1 and width == 128) else 2 if width <= 128 else 4
        return min(32, max(4, 1024 // width)), 8 if width > 256 else warps
    if load is RowLoad.FEW:
        return 8 if backward else 16, 2
    return 4 if backward else 16, 1


def rows_of_gat(num_rows: int, heads: int, dim: int, tilted: bool, load: RowLoad) -> int:
    """How many rows a program of GAT's forward goes through (results/nvidia-h200/rows_of_a_program.md).

    Programs of one row end sooner than others can begin. A second row takes registers: all other kernels lose
    by it, as do one head, and narrow heads with the ``tilted`` sums of training.
    """
    pays = heads > 1 and (dim >= 32 or not tilted)
    return 2 if pays and load is RowLoad.NORMAL and num_rows >= 4 * FULL else 1


def gatv2(heads: int, width: int, load: RowLoad, backward: bool) -> Wide:
    """Of GATv2's, which computes more for an edge than it reads.

    A thread has two products of a score at the least: ``sum_of_products`` of ``tiles.py`` asks for that.
    """
    if load is RowLoad.SHORT:
        return max(1, attention(heads, width, load, backward)[0] // 2), max(1, width // 128)
    if load is RowLoad.NORMAL and width in (64, 128):
        return (128 if backward else 256) // width, 1
    if width <= 64 and (load is RowLoad.NORMAL or (load is RowLoad.LONG and backward)):
        return min(16, 256 // width), 2 if width == 64 and backward else 1
    warps = 2 if heads == 1 and width == 128 else 4 if width <= 256 else 8
    step = min(16, max(2, 512 // width))
    return step, min(warps, max(1, step * width // 64))


def one_backward(num_rows: int, num_cols: int, num_edges: int) -> bool:
    """Whether backward is one kernel of both directions, in place of three (results: one_backward.md).

    Each edge then reads the result of its receiver as well, and nothing is made of that beforehand: which
    pays where launches are what is waited for, or rows are short.
    """
    return num_edges <= max(FEW_EDGES, SHORT_ROWS * max(num_rows, num_cols))
