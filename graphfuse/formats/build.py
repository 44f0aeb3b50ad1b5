"""Edge list -> row windows, in torch operations that run on CPU and CUDA alike and give the same integers.

Everything here is a sort of integer keys followed by scans; there is no loop over windows. A *direction* is
one of the two ways to read the graph: rows are receivers (the forward pass) or rows are senders (the
transpose, for gradients).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 16  # rows of a row window
BLOCK = 8  # columns of a tensor-core block (TCB)

# Long windows are cut so that one slice is at most _MIN_SLICE entries, or what one of _SLICES equal shares of
# all entries would be, whichever is more: 4224 = 32 warps on each of 132 multiprocessors. Up to half as long
# again they may be one of _FEWER shares, which leaves less to merge. Fixed, not read off the GPU: the cuts
# decide the order of summation, and results must not change with the machine. A row takes less to merge.
_MIN_SLICE, _MIN_ROW_SLICE = 512, 128
_SLICES = 4224
_FEWER = 1760
_MOST = 1024  # slices of a window or row, as one program adds them all
_STEP = 32  # slices begin on multiples of the widest step of a kernel
# Rows of more edges are walked first, as a GPU waits for what it begins last. Where many are as long, those
# of more than twice the mean; on large graphs, which wait for longer ones alone, of more than such a share.
_LONG_ROW, _BEGUN_FIRST = 64, 8 * _SLICES


class Direction(NamedTuple):
    """Row windows of one direction before they are packed, all int32 but for the masks."""

    ptr: Tensor  # [num_windows + 1], entries of each window
    column: Tensor  # [num_entries], sorted within a window
    row_mask: Tensor  # int16[num_entries], bit r: row r of the window has this column
    tasks: Tensor  # [num_tasks, 4]: window, first entry, end, slot (-1: not cut), longest first
    merges: Tensor  # [num_merges, 4]: window, first slot, slots, 0
    split: int
    num_slots: int
    row_index: Tensor | None = None  # [16 * num_windows], see `index_of`; None: rows are cut as numbered


class Sorted(NamedTuple):
    """Edges in the order of the format: by window, column, copy, row."""

    place: Tensor  # int64[num_edges]: window * num_cols + column
    row: Tensor  # int64[num_edges]: row within its window
    copy: Tensor | None  # int64[num_edges]: k for the k-th copy of a repeated edge; None: no edge repeats
    perm: Tensor | None  # int64[num_edges]: positions in the caller's edge list, if asked for


def sort_edges(row: Tensor, col: Tensor, num_cols: int, with_perm: bool) -> Sorted:
    """Sorts edges by (window, column, copy, row); copies keep the caller's order."""
    key = row.to(torch.int64, copy=True).bitwise_right_shift_(4).mul_(num_cols).add_(col)
    key.bitwise_left_shift_(4).bitwise_or_(row & (WINDOW - 1))
    if not with_perm:
        # keys alone are half the bytes of keys with their permutation, and most graphs repeat no edge
        distinct = torch.unique(key)
        if distinct.numel() == key.numel():
            return Sorted(distinct >> 4, distinct & 15, None, None)
        del distinct
    key, perm = torch.sort(key, stable=True)
    repeated = key[1:] == key[:-1]
    if not bool(repeated.any()):
        return Sorted(key >> 4, key & 15, None, perm if with_perm else None)
    new = torch.nn.functional.pad(~repeated, (1, 0), value=True)
    position = torch.arange(key.numel(), device=key.device)
    copy = position - position[new][new.cumsum(0) - 1]
    # now by (place, row, copy); two stable sorts make it (place, copy, row) without a key that overflows
    by_copy = torch.sort(copy, stable=True).indices
    order = by_copy[torch.sort((key >> 4)[by_copy], stable=True).indices]
    return Sorted(key[order] >> 4, key[order] & 15, copy[order], perm[order] if with_perm else None)


def entry_starts(edges: Sorted) -> Tensor:
    """First edge of each column entry, ``int64[num_entries + 1]``, the number of edges last."""
    num_edges = edges.place.numel()
    new = torch.ones(num_edges + 1, dtype=torch.bool, device=edges.place.device)
    if num_edges > 0:
        inner = new[1:-1]
        torch.ne(edges.place[1:], edges.place[:-1], out=inner)
        if edges.copy is not None:
            inner |= edges.copy[1:] != edges.copy[:-1]
    return new.nonzero().view(-1)


def build_direction(
    row: Tensor, col: Tensor, num_rows: int, num_cols: int, order: Tensor | None = None
) -> Direction:
    """Row windows of the matrix with a one at every (row, col), of rows in ``order``, ``int64[num_rows]``."""
    row_index = None
    if order is not None:
        row, row_index = inverse(order).index_select(0, row), index_of(order)  # of int32 too
    edges = sort_edges(row, col, num_cols, with_perm=False)
    starts = entry_starts(edges)
    place = edges.place[starts[:-1]]
    # bits of one entry are distinct, so their sum is their union; int64, as the running sum is long
    bits = torch.cumsum(torch.ones_like(edges.row).bitwise_left_shift_(edges.row), 0)
    total = torch.nn.functional.pad(bits, (1, 0))[starts]
    row_mask = torch.diff(total).to(torch.int16)
    del edges, bits, total
    num_windows = -(-num_rows // WINDOW)
    bounds = torch.arange(num_windows + 1, device=place.device) * num_cols
    ptr = torch.searchsorted(place, bounds).to(torch.int32)
    column = (place % max(num_cols, 1)).to(torch.int32)
    split = slice_length(column.numel())
    tasks, merges, num_slots = cut_tasks(ptr, split)
    return Direction(ptr, column, row_mask, tasks, merges, split, num_slots, row_index)


def index_of(order: Tensor) -> Tensor:
    """The row at each place of all windows, ``int32[16 * num_windows]``; num_rows beyond the last row."""
    num_rows = order.numel()
    return torch.nn.functional.pad(order, (0, -num_rows % WINDOW), value=num_rows).to(torch.int32)


def inverse(order: Tensor) -> Tensor:
    """The place of each row in ``order``, ``int64[num_rows]``."""
    place = torch.empty(order.numel(), dtype=torch.int64, device=order.device)
    place[order.long()] = torch.arange(order.numel(), device=order.device)
    return place


def slice_length(num_entries: int) -> int:
    """Longest run of entries that one program walks."""
    longer = min(_share(num_entries, _FEWER), _MIN_SLICE * 3 // 2)
    return max(_MIN_SLICE, longer, _share(num_entries, _SLICES))


def row_slice_length(num_edges: int, cut: bool) -> int:
    """Longest run of edges of a row that one program walks; ``cut`` if windows are cut, else no row is."""
    if not cut:
        return slice_length(num_edges)
    return max(min(_MIN_SLICE, _MIN_ROW_SLICE), _share(num_edges, _SLICES))


def row_split(num_edges: int, num_rows: int, cut: bool) -> int:
    """Edges of the longest row that is no task; ``cut`` if windows are cut."""
    twice_mean = _share(2 * num_edges, max(num_rows, 1))
    long = max(_LONG_ROW, twice_mean, _share(num_edges, _BEGUN_FIRST))
    return min(row_slice_length(num_edges, cut), long)


def _share(num_entries: int, shares: int) -> int:
    return -(-num_entries // shares // _STEP) * _STEP


def cut_tasks(ptr: Tensor, split: int, least: int = 0) -> tuple[Tensor, Tensor, int]:
    """Tasks (longest first), merges and the number of slots for the windows or rows that ``ptr`` bounds.

    Args:
        ptr: ``int32[n + 1]``, where each window begins.
        split: Windows with more entries than this are cut into equal slices, at most ``_MOST``.
        least: Windows with fewer entries are no tasks, the kernel finds those through ``ptr``.
    """
    return list_tasks(ptr, _ceil(torch.diff(ptr.long()), split), least)


def list_tasks(ptr: Tensor, slices: Tensor, least: int) -> tuple[Tensor, Tensor, int]:
    """As :func:`cut_tasks`, of windows that are to be cut into so many slices, or about as many."""
    ptr = ptr.to(torch.int64)
    length = torch.diff(ptr)
    slices = slices.clamp(1, _MOST)
    share = _ceil(_ceil(length, slices), _STEP) * _STEP
    share = torch.where(slices > 1, share, length.clamp(min=1))
    slices = _ceil(length, share).clamp_(min=1)
    cut = (slices > 1).nonzero().view(-1)
    slices = torch.where(length < least, 0, slices)
    window = torch.repeat_interleave(slices)
    rank = torch.arange(window.numel(), device=ptr.device) - (slices.cumsum(0) - slices)[window]
    is_slice = slices[window] > 1
    begin = ptr[window] + rank * share[window]
    end = torch.minimum(begin + share[window], ptr[1:][window])
    slot = torch.where(is_slice, is_slice.cumsum(0) - 1, -1)
    order = torch.sort(begin - end, stable=True).indices
    tasks = torch.stack([window, begin, end, slot], 1)[order].to(torch.int32)
    count = slices[cut]
    merges = torch.stack([cut, count.cumsum(0) - count, count, torch.zeros_like(cut)], 1).to(torch.int32)
    return tasks, merges, int(count.sum())


def _ceil(a: Tensor, b: Tensor | int) -> Tensor:
    return a.add(b).sub_(1).div_(b, rounding_mode="floor")


def places_of(row: Tensor, num_rows: int, row_index: Tensor | None) -> Tensor:
    """Where rows of these numbers stand; with an index -1 where there is none of that number."""
    if row_index is None:
        return row
    return torch.where(row < num_rows, inverse(row_index[:num_rows])[row.clamp(max=num_rows - 1)], -1)


def decode(
    ptr: Tensor, column: Tensor, row_mask: Tensor, row_index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and columns, int64, of all edges in the order of the format."""
    bit = torch.arange(WINDOW, device=column.device, dtype=torch.int16)
    entry, offset = ((row_mask[:, None] >> bit) & 1).nonzero(as_tuple=True)
    window = torch.repeat_interleave(torch.diff(ptr).long(), output_size=column.numel())
    row = window[entry] * WINDOW + offset
    return row if row_index is None else row_index[row].long(), column[entry].long()


def edges_per_row(ptr: Tensor, row_mask: Tensor, num_rows: int, row_index: Tensor | None = None) -> Tensor:
    """Edges of each row, ``int64[num_rows]``."""
    bounds = ptr.long()
    counts = []
    for bit in range(WINDOW):
        running = torch.cumsum((row_mask >> bit) & 1, 0, dtype=torch.int32)
        total = torch.nn.functional.pad(running, (1, 0))[bounds]
        counts.append(torch.diff(total))
    found = torch.stack(counts, 1).view(-1)[:num_rows].long()
    return found if row_index is None else found[inverse(row_index[:num_rows])]


def loops_per_row(
    ptr: Tensor, column: Tensor, row_mask: Tensor, num_rows: int, row_index: Tensor | None = None
) -> Tensor:
    """Edges with column == row, of each row, ``int64[num_rows]``."""
    window = torch.repeat_interleave(torch.diff(ptr).long(), output_size=column.numel())
    offset = places_of(column, num_rows, row_index) - window * WINDOW
    inside = ((offset >= 0) & (offset < WINDOW)).nonzero().view(-1)
    offset, mask = offset[inside], row_mask[inside].long() & 0xFFFF
    loops = ((mask >> offset) & 1).long()
    loops_at = torch.zeros(max(num_rows, 1), dtype=torch.int64, device=column.device)
    # clamp: a column beyond the last row has no loop bit, and adds 0 to whatever row it lands on
    loops_at.index_add_(0, column[inside].long().clamp_(max=max(num_rows - 1, 0)), loops)
    return loops_at[:num_rows]
