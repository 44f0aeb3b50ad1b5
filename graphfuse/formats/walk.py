"""What a kernel walks: one direction of a packed structure, as named views."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import packed as packing
from graphfuse.formats.build import WINDOW, cut_tasks, decode, places_of
from graphfuse.formats.by_tensor import ByTensor
from graphfuse.formats.filling import Filling
from graphfuse.formats.lasting import make_lasting

# Entries from which on row masks without self-loops are kept, 2 bytes an entry, so that kernels need not look
# for the loop of each node in every step; and how many are made at once.
_CLEARED, _CHUNK = 1 << 17, 1 << 22


class Walk(NamedTuple):
    """One direction of a structure: windows of 16 rows, or (``height == 1``) single rows.

    With windows, a task is a window or a slice of a long one, and every window has at least one. With rows,
    only long rows are tasks, or their slices, so that they are walked first; a row of at most ``split`` edges
    is found through ``ptr``.
    """

    height: int
    num_rows: int
    num_cols: int
    ptr: Tensor  # int32[num_windows + 1]
    tasks: Tensor  # int32[num_tasks, 4]: window, first entry, end, slot or -1
    merges: Tensor  # int32[num_merges, 4]: window, first slot, slots, 0
    column: Tensor  # int32[num_entries]
    row_mask: Tensor | None  # int16[num_entries], bit r: row r of the window; None for rows
    row_index: Tensor | None  # int32[16 * num_windows], their rows, then num_rows; None: as numbered
    split: int
    num_slots: int
    plans: dict[Any, Any]  # launches that were prepared for this walk
    derived: dict[str, Tensor | None]  # made of the structure, for both directions if they are equal
    refilled: bool = False  # whether its edges change; then there may be room behind the entries
    num_edges: int = 0  # those the structure was built with

    @property
    def num_entries(self) -> int:
        """Column entries: what one gather of a matrix reads."""
        return self.column.numel()


_WALKS: ByTensor[dict[bool, Walk]] = ByTensor()  # the directions of packed tensors
# packed tensors in which no edge is repeated, if that is known, and whether their edges change
_NO_COPIES: ByTensor[bool] = ByTensor()
_LOCK = threading.RLock()


def walk(packed: Tensor, transposed: bool) -> Walk:
    """The forward (``transposed=False``) or backward direction of ``packed`` windows or rows.

    One object for as long as ``packed`` lives, so that what was prepared for a walk serves a registered op
    too, which receives nothing but tensors.
    """
    directions = _WALKS.get(packed)
    if directions is None:
        with _LOCK:
            directions = _WALKS.get(packed)
            if directions is None:
                directions = _WALKS[packed] = {}
    if transposed not in directions:
        with _LOCK:
            if transposed not in directions:
                directions[transposed] = _walk(packed, transposed, directions.get(not transposed))
    return directions[transposed]


def _walk(packed: Tensor, transposed: bool, other: Walk | None) -> Walk:
    if other is not None and packing.scalars_of(packed).symmetric:
        return other._replace(plans={})
    kind, scalars, sections = packing.unpack(packed)
    derived: dict[str, Tensor | None] = {}
    refilled = _NO_COPIES.get(packed)
    if refilled is not None:
        derived["copies"] = None
    rows, cols = scalars.num_dst, scalars.num_src
    split, slots = scalars.split_dst, scalars.slots_dst
    if transposed:
        rows, cols, split, slots = cols, rows, scalars.split_src, scalars.slots_src
    if kind == packing.WINDOWS:
        half = len(sections) // 2
        ptr, tasks, merges, column, mask, *index = sections[half:] if transposed else sections[:half]
        row_mask = mask.view(torch.int16)[: column.numel()]
        row_index = index[0] if index and index[0].numel() > 0 else None
        found = (ptr, tasks.view(-1, 4), merges.view(-1, 4), column, row_mask, row_index)
        return Walk(WINDOW, rows, cols, *found, split, slots, {}, derived, bool(refilled), scalars.num_edges)
    if kind == packing.ROWS:
        ptr, tasks, merges, column = sections[4:] if transposed else sections[:4]
        cut, num_edges = (ptr, tasks.view(-1, 4), merges.view(-1, 4), column), scalars.num_edges
        return Walk(1, rows, cols, *cut, None, None, split, slots, {}, derived, bool(refilled), num_edges)
    raise ValueError(f"the packed graph is of kind {kind}, wanted windows or rows")


def filled(w: Walk) -> Walk:
    """``w`` without the room behind its entries; waits for the GPU if there may be any.

    Raises:
        RuntimeError: a CUDA graph is being captured, which must not wait, and there may be any.
    """
    if not w.refilled:
        return w
    if w.ptr.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the edges of refillable row windows were counted during CUDA graph capture, which must not wait "
            "for the GPU; decode them before"
        )
    end = int(w.ptr[-1])
    return w._replace(column=w.column[:end], row_mask=None if w.row_mask is None else w.row_mask[:end])


def to_edge_index(w: Walk) -> Tensor:
    """The edges of ``w`` in its own order: ``int64[2, num_edges]``, sources (columns) over receivers."""
    w = filled(w)
    if w.row_mask is None:
        row = torch.repeat_interleave(torch.diff(w.ptr).long(), output_size=w.num_entries)
        return torch.stack([w.column.long(), row])
    row, column = decode(w.ptr, w.column, w.row_mask, w.row_index)
    return torch.stack([column, row])


def know_no_copies(packed: Tensor, refilled: bool = False) -> None:
    """Tells that no edge of ``packed`` is repeated, so that :func:`copies` need not look.

    With ``refilled`` its edges change, and nothing may be derived of those that it has now.
    """
    with _LOCK:
        _NO_COPIES[packed] = refilled


def copies(w: Walk) -> Tensor | None:
    """How many equal entries stand before each, ``int32[num_entries]``; ``None`` if no edge is repeated.

    Computed once; the first call waits for the GPU.

    Raises:
        RuntimeError: a CUDA graph is being captured, which must not wait, and no call came before.
    """
    if "copies" not in w.derived:
        must_not_capture(w, "the counts of repeated edges, for dropout,")
        owner = torch.repeat_interleave(torch.diff(w.ptr).long(), output_size=w.num_entries)
        new = torch.ones(w.num_entries, dtype=torch.bool, device=w.column.device)
        new[1:] = (owner[1:] != owner[:-1]) | (w.column[1:] != w.column[:-1])
        place = torch.arange(w.num_entries, device=w.column.device)
        found = (place - torch.where(new, place, 0).cummax(0).values).to(torch.int32)
        w.derived["copies"] = None if bool(new.all()) else found
    return w.derived["copies"]


def row_masks(w: Walk, self_loops: bool) -> tuple[Tensor | None, int]:
    """The row masks for a window kernel, and its LOOPS.

    0: all edges count. With ``self_loops`` each node brings a loop of its own, and those that are entries do
    not count. 1: they are in the masks, and the kernel tells them by their places; so on small graphs, of
    which a record may serve one step, and where edges change. 2: the masks came without; so on large ones,
    and where rows have an order of their own.
    """
    if not self_loops:
        return w.row_mask, 0
    if w.row_index is None and (w.num_entries < _CLEARED or w.refilled):
        return w.row_mask, 1
    return masks_without_loops(w), 2


def masks_without_loops(w: Walk) -> Tensor:
    """The row masks without self-loops, ``int16[num_entries]``.

    Computed once; the first call waits for the GPU.

    Raises:
        RuntimeError: a CUDA graph is being captured, which must not wait, and no call came before.
    """
    assert w.row_mask is not None
    if "masks" not in w.derived:
        must_not_capture(w, "the row masks without self-loops")
        masks = w.row_mask.clone()
        for begin in range(0, w.num_entries, _CHUNK):
            column, mask = w.column[begin : begin + _CHUNK], masks[begin : begin + _CHUNK]
            entry = torch.arange(begin, begin + column.numel(), dtype=torch.int32, device=column.device)
            window = torch.searchsorted(w.ptr, entry, right=True, out_int32=True) - 1
            offset = places_of(column, w.num_rows, w.row_index) - window * WINDOW
            bit = torch.where((offset >= 0) & (offset < WINDOW), 1 << offset.clamp(0, WINDOW - 1), 0)
            mask &= ~bit.to(torch.int16)
        w.derived["masks"] = None if torch.equal(masks, w.row_mask) else masks
    found = w.derived["masks"]
    return w.row_mask if found is None else found


def longer_slices(w: Walk, times: float) -> Walk:
    """``w`` with slices ``times`` as long, for heads in groups, or wide rows.

    Found once; the first call waits for the GPU.

    Raises:
        RuntimeError: a CUDA graph is being captured, which must not wait, and no call came before.
        ValueError: ``times`` is less than 1. Kernels have room for the slices of the record, not for more.
    """
    if times == 1:
        return w
    if times < 1:
        raise ValueError(f"slices can be longer than those of the record, not shorter (got times={times})")
    key = ("longer_slices", times)
    longer: Walk | None = w.plans.get(key)
    if longer is None:
        must_not_capture(w, "the slices of windows for several heads or wide rows")
        split = int(times * w.split)
        tasks, merges, num_slots = make_lasting(cut_tasks, w.ptr, split)
        longer = w._replace(tasks=tasks, merges=merges, split=split, num_slots=num_slots)
        w.plans[key] = longer
    return longer


def must_not_capture(
    w: Walk, what: str, how: str = "in training mode, or run the op and its backward once"
) -> None:
    """Raises ``RuntimeError`` if a CUDA graph is being captured, during which ``what`` cannot be built."""
    if w.column.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be built during CUDA graph capture; call graphfuse.warmup(model, data) before, "
            f"{how}"
        )


class EdgeOrder(NamedTuple):
    """Where per-edge values of the caller lie, seen from a walk."""

    ptr: Tensor | None  # int32[num_entries + 1], edges before each entry; None for rows (an entry is an edge)
    perm: Tensor  # int32[num_edges]: position in the caller's edge list of the walk's e-th edge


def edge_order(packed: Tensor, transposed: bool) -> EdgeOrder:
    """The forward or backward direction of a packed edge order."""
    kind, _, sections = packing.unpack(packed)
    if kind == packing.WINDOW_EDGES:
        return EdgeOrder(*(sections[2:] if transposed else sections[:2]))
    if kind == packing.ROW_EDGES:
        return EdgeOrder(None, sections[int(transposed)])
    raise ValueError(f"the packed graph is of kind {kind}, wanted an edge order")


class Walks(NamedTuple):
    """Both directions of a structure, with the caller's edges seen from each if they are needed."""

    forward: Walk
    backward: Walk
    edges: EdgeOrder | None
    backward_edges: EdgeOrder | None
    source: tuple[Tensor, Tensor | None, bool]  # what :func:`walks` read
    filling: Filling | None = None  # None: the edges stay

    def require_same_edges(self) -> None:
        """Before a backward pass: raises ``RuntimeError`` if there are other edges now than forward saw."""
        if self.filling is not None:
            self.filling.require()

    def transpose(self) -> Walks:
        """The directions swapped."""
        graph, order, transposed = self.source
        swapped = (graph, order, not transposed)
        return Walks(self.backward, self.forward, self.backward_edges, self.edges, swapped, self.filling)


def walks(graph: Tensor, order: Tensor | None, transposed: bool, filling: Filling | None = None) -> Walks:
    """Both directions of packed windows or rows and, if given, of the packed edge order that fits them."""
    forward, backward = walk(graph, transposed), walk(graph, not transposed)
    source = (graph, order, transposed)
    if order is None:
        return Walks(forward, backward, None, None, source, filling)
    edges, backward_edges = edge_order(order, transposed), edge_order(order, not transposed)
    return Walks(forward, backward, edges, backward_edges, source, filling)
