"""The edges of windows one by one, for kernels that make a number for each edge, not for each of 16 rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.build import WINDOW
from graphfuse.formats.lasting import make_lasting
from graphfuse.formats.walk import Walk, must_not_capture

MAX_COLS = 1 << 27  # a column and a row of its window share 31 bits
_CHUNK = 1 << 22  # entries that are taken apart at once


class Listed(NamedTuple):
    """The edges of a walk over windows, in the order of its entries; edges of one entry stand together."""

    ptr: Tensor  # int32[num_windows + 1]: the first edge of each window
    tasks: Tensor  # int32[num_tasks, 4]: window, first edge, end, slot or -1
    packed: Tensor  # int32[num_edges]: 16 times the column, plus which of the window's rows
    row: Tensor  # int32[num_edges]
    copies: Tensor | None  # int32[num_edges], those of each edge's entry


def listed(w: Walk, copies: Tensor | None) -> Listed:
    """The edges of ``w``, which walks windows whose edges stay.

    These are 8 bytes an edge and 4 an entry, with ``copies`` 4 an edge more. Found once for both directions
    of a symmetric structure; the first call waits for the GPU.

    Args:
        w: The walk; it has an edge, and at most ``MAX_COLS`` columns.
        copies: Of each entry how many equal ones stand before it, or None.

    Raises:
        RuntimeError: a CUDA graph is being captured, which must not wait, and no call came before.
    """
    key = ("listed", copies is None)
    found: Listed | None = w.plans.get(key)
    if found is None:
        must_not_capture(w, "the list of edges, for GAT,", "in evaluation mode, or run the op once")
        found = w.plans[key] = make_lasting(_listed, w, copies)
    return found


def _listed(w: Walk, copies: Tensor | None) -> Listed:
    derived = w.derived
    if "edges" not in derived:
        # in this order: another thread may look for the last
        derived["edges_before"], derived["edge_rows"], derived["edges"] = _taken_apart(w)
    before, row, packed = derived["edges_before"], derived["edge_rows"], derived["edges"]
    assert packed is not None and row is not None and before is not None
    tasks = w.tasks.clone()
    tasks[:, 1:3] = before[w.tasks[:, 1:3].long()]
    if copies is not None:
        if "edge_copies" not in derived:
            counts = torch.diff(before).long()
            derived["edge_copies"] = torch.repeat_interleave(copies, counts, output_size=packed.numel())
        copies = derived["edge_copies"]
    return Listed(before[w.ptr.long()], tasks, packed, row, copies)


def _taken_apart(w: Walk) -> tuple[Tensor, Tensor, Tensor]:
    # edges before each entry, int32[num_entries + 1], rows, packed
    assert w.row_mask is not None
    device, bit = w.column.device, torch.arange(WINDOW, dtype=torch.int16, device=w.column.device)
    packed, rows = (torch.empty(w.num_edges, dtype=torch.int32, device=device) for _ in range(2))
    before = torch.zeros(w.num_entries + 1, dtype=torch.int32, device=device)
    done = 0
    for begin in range(0, w.num_entries, _CHUNK):
        column, mask = w.column[begin : begin + _CHUNK], w.row_mask[begin : begin + _CHUNK]
        there = ((mask[:, None] >> bit) & 1).bool()
        before[begin + 1 : begin + 1 + column.numel()] = there.sum(1).cumsum(0) + done
        entry, inner = there.nonzero(as_tuple=True)
        window = torch.searchsorted(w.ptr, (entry + begin).to(torch.int32), right=True) - 1
        place, some = window * WINDOW + inner, slice(done, done + entry.numel())
        packed[some] = column[entry] * WINDOW + inner.to(torch.int32)
        rows[some] = (place if w.row_index is None else w.row_index[place]).to(torch.int32)
        done += entry.numel()
    return before, rows, packed
