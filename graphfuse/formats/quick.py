"""Row windows of a small graph in a fraction of the launches; the same integers as :mod:`.build` gives.

A mini-batch is built once and used once, and at some 100,000 edges the host's launches are all that its
build costs. So both directions are one problem here, of twice the edges, that is sorted once, and everything
the host has to know comes back in one copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.build import WINDOW, Direction, slice_length
from graphfuse.formats.fingerprint import fingerprint_tensor

MOST_EDGES = 1 << 20  # beyond, launches are no cost and the second copy of everything is


class Built(NamedTuple):
    """What the windows of a graph are made of."""

    forward: Direction
    backward: Direction
    symmetric: bool
    fingerprint: int


def suits(edge_index: Tensor, num_edges: int, num_src: int, num_dst: int) -> bool:
    """Whether this module builds a graph of this size sooner, on the device of ``edge_index``.

    On a CPU, which launches nothing, it does not.
    """
    nodes = num_src + num_dst
    fits = 0 < num_edges <= MOST_EDGES and min(num_src, num_dst) > 0 and nodes < 1 << 28  # keys of 63 bits
    return edge_index.is_cuda and fits


def build_windows(edge_index: Tensor, num_src: int, num_dst: int) -> Built | None:
    """Both directions of the windows, or ``None`` for a graph that :mod:`.build` has to look at.

    Those are graphs with a repeated edge, with a window so long that it is cut into slices, and with an
    index out of range. There must be edges.
    """
    num_edges, nodes, device = edge_index.size(1), max(num_src, num_dst), edge_index.device
    edges = edge_index.long()
    # rows of both directions after each other, those of the transpose in windows of their own
    row, col = edges.flip(0).reshape(-1), edges.reshape(-1)
    num_windows = -(-num_dst // WINDOW)
    all_windows = num_windows + -(-num_src // WINDOW)
    place = (row >> 4) * nodes + col
    place[num_edges:] += num_windows * nodes
    key = torch.sort(place << 4 | row & (WINDOW - 1)).values
    place, row = key >> 4, key & (WINDOW - 1)
    new = torch.ones(2 * num_edges, dtype=torch.bool, device=device)
    torch.ne(place[1:], place[:-1], out=new[1:])
    starts = new.nonzero().view(-1)  # waits for the GPU

    # bits of one entry are distinct, so their sum is their union; int64, as the running sum is long
    bits = torch.ones_like(row).bitwise_left_shift_(row)
    bits = bits.cumsum(0)
    last = torch.cat([starts[1:], starts.new_full((1,), 2 * num_edges)]) - 1
    total = bits[last]
    row_mask = torch.cat([total[:1], total.diff()]).to(torch.int16)
    place = place[starts]
    ptr = torch.searchsorted(place, torch.arange(all_windows + 1, device=device) * nodes)
    column = (place % nodes).to(torch.int32)

    length = ptr.diff()
    repeated = (key[1:] == key[:-1]).any()
    low, high = torch.aminmax(edges, dim=1)
    facts = [fingerprint_tensor(edges), repeated.long(), length.max(), ptr[num_windows]]
    known = torch.cat([torch.stack(facts), low, high]).tolist()  # waits for the GPU
    key_of_edges, repeats, longest, middle, *bounds = known
    low_src, low_dst, high_src, high_dst = bounds
    inside = min(low_src, low_dst) >= 0 and high_src < num_src and high_dst < num_dst
    splits = slice_length(middle), slice_length(column.numel() - middle)
    if repeats or longest > min(splits) or not inside:
        return None

    tasks = _tasks(ptr, length, num_windows, middle)
    ptr = ptr.to(torch.int32)
    forward = Direction(
        ptr[: num_windows + 1],
        column[:middle],
        row_mask[:middle],
        tasks[:num_windows],
        tasks.new_empty(0, 4),
        splits[0],
        0,
    )
    backward = Direction(
        ptr[num_windows:] - middle,
        column[middle:],
        row_mask[middle:],
        tasks[num_windows:],
        tasks.new_empty(0, 4),
        splits[1],
        0,
    )
    symmetric = num_src == num_dst and 2 * middle == column.numel()
    symmetric = symmetric and all(
        torch.equal(getattr(forward, name), getattr(backward, name)) for name in ("ptr", "column", "row_mask")
    )
    return Built(forward, backward, symmetric, key_of_edges)


def build_rows(edge_index: Tensor, num_src: int, num_dst: int, split: int) -> list[Tensor] | None:
    """The sections of the rows of both directions, or ``None`` for a graph that :mod:`.build` has to look at.

    Those have a row of more than ``split`` edges, which is cut into slices.
    """
    num_edges, nodes = edge_index.size(1), max(num_src, num_dst)
    key = edge_index.flip(0).reshape(-1) * nodes + edge_index.reshape(-1)
    key[num_edges:] += num_dst * nodes
    key = torch.sort(key).values
    ptr = torch.searchsorted(key, torch.arange(num_dst + num_src + 1, device=key.device) * nodes)
    if int(ptr.diff().max()) > split:
        return None
    ptr, column = ptr.to(torch.int32), (key % nodes).to(torch.int32)
    tasks, merges, back_tasks, back_merges = (ptr.new_empty(0, 4) for _ in range(4))
    return [
        *(ptr[: num_dst + 1], tasks, merges, column[:num_edges]),
        *(ptr[num_dst:] - num_edges, back_tasks, back_merges, column[num_edges:]),
    ]


def _tasks(ptr: Tensor, length: Tensor, num_windows: int, middle: int) -> Tensor:
    # every window is a task; the longest come first within each direction
    window = torch.arange(length.numel(), device=ptr.device)
    tasks = torch.stack([window, ptr[:-1], ptr[1:], torch.full_like(window, -1)], 1)
    tasks[num_windows:, 0] -= num_windows
    tasks[num_windows:, 1:3] -= middle
    behind = length.neg()
    behind[num_windows:] += 1 << 40
    order = torch.sort(behind, stable=True).indices
    return tasks[order].to(torch.int32)
