"""The edges of windows one by one, for kernels that make a number for each edge, not for each of 16 rows."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from graphfuse.formats.lasting import make_lasting
from graphfuse.formats.walk import Walk, must_not_capture

MAX_COLS = 1 << 26  # a column, whether its row has but this edge, and a row of its window share 31 bits
_PARTS = ("edges_before", "edge_ptr", "edge_tasks", "edge_rows", "only_edges", "edges")


class Listed(NamedTuple):
    """The edges of a walk over windows, in the order of its entries; edges of one entry stand together."""

    ptr: Tensor  # int32[num_windows + 1]: the first edge of each window
    tasks: Tensor  # int32[num_tasks, 4]: window, first edge, end, slot or -1
    packed: Tensor  # int32[num_edges]: 32 times the column, 16 if its row has no other edge, and which row
    row: Tensor  # int32[num_edges]
    only: Tensor  # int32[num_rows]: the column of a row's only edge, -1 if it has none or several
    copies: Tensor | None  # int32[num_edges], those of each edge's entry


def listed(w: Walk, copies: Tensor | None) -> Listed:
    """The edges of ``w``, which walks windows whose edges stay.

    These are 8 bytes an edge, 4 an entry and 4 a row, with ``copies`` 4 an edge more. Found once for both
    directions of a symmetric structure, by kernels that run where GAT's do; nothing waits for the GPU.

    Args:
        w: The walk of a record, as it is; it has an edge, and at most ``MAX_COLS`` columns.
        copies: Of each entry how many equal ones stand before it, or None.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would list them in every replay, and no call came
            before.
    """
    key = ("listed", copies is None)
    found: Listed | None = w.plans.get(key)
    if found is None:
        must_not_capture(
            w,
            "the list of edges, for GAT,",
            "in the mode that is captured, or run the op, and its backward, once",
        )
        with torch.cuda.device_of(w.column):  # which kernels are not told, unlike PyTorch's operations
            found = w.plans[key] = make_lasting(_listed, w, copies)
    return found


def _listed(w: Walk, copies: Tensor | None) -> Listed:
    derived = w.derived
    if "edges" not in derived:
        # in this order: another thread may look for the last
        derived |= zip(_PARTS, _taken_apart(w), strict=True)
    before, ptr, tasks, row, only, packed = cast(list[Tensor], [derived[name] for name in _PARTS])
    if copies is not None:
        if "edge_copies" not in derived:
            counts = torch.diff(before).long()
            derived["edge_copies"] = torch.repeat_interleave(copies, counts, output_size=packed.numel())
        copies = derived["edge_copies"]
    return Listed(ptr, tasks, packed, row, only, copies)


def _taken_apart(w: Walk) -> tuple[Tensor, ...]:
    # edges before each entry, int32[num_entries + 1], and what there is of a list without copies
    from graphfuse.formats import listed_kernels as kernels  # imports triton
    from graphfuse.formats.quick_kernels import launch

    assert w.row_mask is not None
    counts = w.column.new_zeros(w.num_entries + 1)
    grid = (-(-w.num_entries // kernels.BLOCK),)
    launch(kernels.count_kernel, grid, counts[1:], w.row_mask, w.num_entries, kernels.BLOCK)
    before = counts.cumsum(0, dtype=torch.int32)
    packed, row = (w.column.new_empty(w.num_edges) for _ in range(2))
    degrees, only = w.column.new_zeros(w.num_rows), w.column.new_full((w.num_rows,), -1)
    graph = (before, w.tasks, w.row_index, w.column, w.row_mask, w.num_rows, kernels.COLUMNS)
    launch(kernels.apart_kernel, (w.tasks.size(0),), packed, row, degrees, *graph, warps=1)
    grid = (-(-w.num_edges // kernels.BLOCK),)
    launch(kernels.only_kernel, grid, packed, only, row, degrees, w.num_edges, kernels.BLOCK)
    tasks = w.tasks.clone()
    tasks[:, 1:3] = before.index_select(0, w.tasks[:, 1:3].flatten()).view(-1, 2)
    return before, before.index_select(0, w.ptr), tasks, row, only, packed
