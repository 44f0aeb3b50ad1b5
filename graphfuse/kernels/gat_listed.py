"""Launching GAT's kernel over the edges of windows: where it is, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.listed import listed
from graphfuse.formats.walk import Walk, row_masks
from graphfuse.kernels import walk_rules
from graphfuse.kernels.gat_edges import gat_edge_kernel
from graphfuse.kernels.run import Launch, accumulator

GROUP, EDGES, STAGES = 8, 32, 3  # heads of a program, edges of a step (results: listed_edges.md)


class Shape(NamedTuple):
    """What the launches of one additive attention are prepared for."""

    heads: int
    dim: int
    slope: float  # of the LeakyReLU below 0
    dropout: float
    self_loops: bool  # whether each node that is source and receiver has one loop, and no other
    v2: bool
    dtype: torch.dtype


def lists_edges(w: Walk, shape: Shape, tilted: bool) -> bool:
    """Whether the kernel here is launched: of GAT's attention over the windows of ``w``."""
    if shape.v2 or w.row_mask is None or w.refilled or w.num_edges == 0 or not 0 <= shape.slope <= 1:
        return False
    which = (w.num_rows, w.num_cols, w.num_edges, w.num_entries, shape.heads, shape.dim)
    return walk_rules.gat_lists_edges(*which, tilted, shape.dropout > 0, shape.dtype)


def edge_launch(w: Walk, copies: Tensor | None, shape: Shape, x_stride: int) -> Launch:
    """Of ``gat_edge_kernel``.

    Args:
        w: The graph.
        copies: Of each entry of it, how many equal ones stand before; with dropout.
        shape: The attention.
        x_stride: Between rows of x.
    """
    edges, (row_mask, loops) = listed(w, copies), row_masks(w, shape.self_loops)
    graph: tuple[Tensor | None, ...] = (edges.ptr, edges.tasks, edges.packed, edges.row, edges.copies)
    graph += (w.ptr if loops else None, w.tasks, w.row_index, w.column, row_mask, copies)
    rest: tuple[Any, ...] = (w.num_rows, min(w.num_rows, w.num_cols), x_stride, shape.heads, shape.dim, GROUP)
    rest += (EDGES, STAGES, shape.slope, shape.dropout, loops, accumulator(shape.dtype))
    return Launch(gat_edge_kernel, w.tasks.size(0), 1, graph, rest, groups=shape.heads // GROUP)
