"""Consistency of a record that was loaded or received, before a kernel trusts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graphfuse.formats import build
from graphfuse.formats.walk import Walk

if TYPE_CHECKING:
    from graphfuse.formats.row_windows import RowWindows


def validate(record: RowWindows) -> None:
    """Raises ``ValueError`` naming the first thing that is wrong with ``record``."""
    for name, view in (("windows", record), ("transposed windows", record.transpose())):
        _check_walk(name, view.walk(), view.num_edges)
    # both directions must hold the same edges
    forward = record.to_edge_index()
    backward = record.transpose().to_edge_index().flip(0)
    width = max(record.shape[1], 1)
    keys = [torch.sort(edges[1] * width + edges[0]).values for edges in (forward, backward)]
    _require(torch.equal(*keys), "the transposed windows hold other edges than the windows")


def _check_walk(name: str, w: Walk, num_edges: int) -> None:
    assert w.row_mask is not None
    num_windows = -(-w.num_rows // build.WINDOW)
    ptr = w.ptr.long()
    _require(ptr.numel() == num_windows + 1, f"{name}: `ptr` must have {num_windows + 1} entries")
    ends = (int(ptr[0]), int(ptr[-1]))
    _require(ends == (0, w.num_entries), f"{name}: `ptr` must run from 0 to {w.num_entries} (got {ends})")
    length = torch.diff(ptr)
    _require(bool((length >= 0).all()), f"{name}: `ptr` must not decrease")
    column, mask = w.column.long(), w.row_mask.long() & 0xFFFF
    inside = bool(((column >= 0) & (column < w.num_cols)).all())
    _require(inside, f"{name}: `column` must lie in [0, {w.num_cols})")
    window = torch.repeat_interleave(length, output_size=w.num_entries)
    place = window * max(w.num_cols, 1) + column
    _require(bool((place[1:] >= place[:-1]).all()), f"{name}: columns of a window must be sorted")
    _require(bool((mask > 0).all()), f"{name}: `row_mask` must not be empty")
    rows = torch.where(window == num_windows - 1, (w.num_rows - 1) % build.WINDOW + 1, build.WINDOW)
    _require(bool((mask >> rows == 0).all()), f"{name}: `row_mask` must not name rows beyond the last")
    edges = int(build.edges_per_row(w.ptr, w.row_mask, w.num_rows).sum())
    _require(edges == num_edges, f"{name}: `row_mask` must hold {num_edges} edges (got {edges})")
    _check_tasks(name, w)


def _check_tasks(name: str, w: Walk) -> None:
    tasks = w.tasks.long()
    tasks = tasks[torch.sort(tasks[:, 0] * (w.num_entries + 1) + tasks[:, 1]).indices]
    window, begin, end, slot = tasks.unbind(1)
    known = bool(((window >= 0) & (window < w.ptr.numel() - 1)).all())
    _require(known, f"{name}: `tasks` must cover windows 0 to {w.ptr.numel() - 2}")
    seen = torch.unique(window)
    ends_meet = torch.equal(begin[1:], end[:-1]) and (begin.numel() == 0 or int(begin[0]) == 0)
    inside = bool(((w.ptr.long()[window] <= begin) & (end <= w.ptr.long()[window + 1])).all())
    covers = seen.numel() == w.ptr.numel() - 1 and (end.numel() == 0 or int(end[-1]) == w.num_entries)
    _require(ends_meet and inside and covers, f"{name}: `tasks` must cover the entries of every window once")
    slices = slot >= 0
    order = torch.arange(w.num_slots, device=slot.device)
    _require(torch.equal(slot[slices], order), f"{name}: slices must have the slots 0 to {w.num_slots - 1}")
    cut, count = torch.unique_consecutive(window[slices], return_counts=True)
    merges = torch.stack([cut, count.cumsum(0) - count, count, torch.zeros_like(cut)], 1)
    _require(
        torch.equal(merges, w.merges.long()), f"{name}: `merges` must list the slots of every cut window"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"inconsistent row windows: {message}")
