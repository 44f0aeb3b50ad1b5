"""Launching GAT's kernels over the edges of windows: where they are, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.listed import MAX_COLS, listed
from graphfuse.formats.walk import Walk, row_masks
from graphfuse.kernels import walk_rules
from graphfuse.kernels.gat_bwd_edges import gat_bwd_edge_kernel
from graphfuse.kernels.gat_edges import gat_edge_kernel
from graphfuse.kernels.run import Launch, accumulator

FEATURES, EDGES, STAGES = 64, 32, 3  # of a program, of a step, of a pipeline (results: listed_edges.md)


class Shape(NamedTuple):
    """What the launches of one additive attention are prepared for."""

    heads: int
    dim: int
    slope: float  # of the LeakyReLU below 0
    dropout: float
    self_loops: bool  # whether each node that is source and receiver has one loop, and no other
    v2: bool
    dtype: torch.dtype


def lists_edges(w: Walk, shape: Shape, trained: bool) -> bool:
    """Whether the kernels here are launched: of GAT's attention over the windows of ``w``."""
    if shape.v2 or w.row_mask is None or w.refilled or w.num_edges == 0 or not 0 <= shape.slope <= 1:
        return False
    which = (w.num_rows, w.num_cols, w.num_edges, w.num_entries, shape.heads, shape.dim)
    return walk_rules.gat_lists_edges(*which, trained, shape.dropout > 0, shape.dtype)


def only_edges(w: Walk, copies: Tensor | None, shape: Shape) -> Tensor | None:
    """The column of each row's only edge, -1 if it has none or several; None where its result is exact.

    That is without dropout, as it is x, and with self-loops, where each row has two. None, too, where a list
    could not hold the columns, of a walk whose other direction alone is listed.
    """
    rounded = shape.dropout > 0 and not shape.self_loops and w.num_cols <= MAX_COLS
    return listed(w, copies).only if rounded else None


def forward_launch(w: Walk, copies: Tensor | None, shape: Shape, x_stride: int) -> Launch:
    """Of ``gat_edge_kernel``.

    Args:
        w: The graph.
        copies: Of each entry of it, how many equal ones stand before; with dropout.
        shape: The attention.
        x_stride: Between rows of x.
    """
    edges, (row_mask, loops) = listed(w, copies), row_masks(w, shape.self_loops)
    graph: tuple[Tensor | None, ...] = (edges.ptr, edges.tasks, edges.packed, edges.row, edges.copies)
    graph += (None, w.ptr) if loops else (edges.only, None)
    graph += (w.tasks, w.row_index, w.column, row_mask, copies)
    return _launch(gat_edge_kernel, w, graph, shape, (x_stride,), loops)


def backward_launch(w: Walk, copies: Tensor | None, shape: Shape, strides: tuple[int, int]) -> Launch:
    """Of ``gat_bwd_edge_kernel``, likewise; ``strides`` of rows of x and of the gradient."""
    edges = listed(w, copies)
    graph = (edges.ptr, edges.tasks, edges.packed, edges.row, edges.copies, w.row_index)
    return _launch(gat_bwd_edge_kernel, w, graph, shape, strides, shape.self_loops)


def _launch(
    kernel: Any, w: Walk, graph: tuple[Tensor | None, ...], shape: Shape, strides: tuple[int, ...], loops: Any
) -> Launch:
    heads = FEATURES // shape.dim
    rest: tuple[Any, ...] = (w.num_rows, min(w.num_rows, w.num_cols), *strides, shape.heads, shape.dim, heads)
    rest += (EDGES, STAGES, shape.slope, shape.dropout, loops, accumulator(shape.dtype))
    return Launch(kernel, w.tasks.size(0), 1, graph, rest, groups=shape.heads // heads)
