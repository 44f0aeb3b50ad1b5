"""Row windows of a small graph in a fraction of the launches; the same integers as :mod:`.build` gives.

A mini-batch is built once and used once, and at some 100,000 edges the host's launches are all that its
build costs. So both directions are one problem here, of twice the edges, that is sorted once; what torch
would take dozens of operations for is one of the few kernels of :mod:`.quick_kernels`; and everything the
host has to know comes back in one copy.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import packed as packing
from graphfuse.formats.build import WINDOW, slice_length
from graphfuse.formats.walk import Walk, edge_order, walk

# beyond, launches are no cost and the second copy of everything is; keys have bits for more
MOST_EDGES, MOST_NODES = 1 << 20, 1 << 22
_RANKED = 1 << 14  # windows up to which each is compared with all others, which takes their square
_SHARED_WINDOWS = (0, 1, 2, 3, 4) * 2  # sections of a symmetric structure, by the first that holds the same
_SHARED_ROWS = (0, 1, 2, 3) * 2
_SHARED_EDGES = (0, 1, 0, 3)

_Both = tuple[Walk, Walk]  # the directions


class Built(NamedTuple):
    """What the windows of a graph are made of."""

    windows: Tensor  # packed
    fingerprint: int


class Facts(NamedTuple):
    """What the kernels tell the host, in the order in which they write it."""

    fingerprint: int = 0
    odd: int = 0  # not 0: an index is out of range or an edge is repeated
    lopsided: int = 0  # not 0: the directions differ
    longest: int = 0  # entries of the longest window
    middle: int = 0  # entries of the forward direction
    total: int = 0  # entries of both


class _Sorted(NamedTuple):
    order: Tensor  # int64[2 * num_edges], the edge that each key was, those of the transpose last
    key: Tensor  # int64[2 * num_edges]
    number: Tensor  # int32[2 * num_edges], entries up to each key, its own included


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernels of a build run there: on a GPU that Triton compiles for."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    compiles = os.environ.get("TRITON_INTERPRET", "0") != "1"
    return compiles and (torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0))


def suits(graph: Tensor, num_edges: int, num_src: int, num_dst: int) -> bool:
    """Whether this module builds a graph of this size sooner, on the device of ``graph``.

    On a CPU, which launches nothing, it does not.
    """
    fits = 0 < num_edges <= MOST_EDGES and min(num_src, num_dst) > 0 and num_src + num_dst <= MOST_NODES
    return fits and runs_on(graph.device)


def suits_rows(windows: Tensor) -> bool:
    """Whether this module goes from packed windows to rows.

    It does if they have no order of the rows and none is cut into slices, so that no row is either.
    """
    scalars = packing.unpack(windows).scalars
    whole = scalars.slots_dst == scalars.slots_src == 0 and not packing.is_ordered(windows)
    return whole and suits(windows, scalars.num_edges, scalars.num_src, scalars.num_dst)


def fingerprint(edge_index: Tensor) -> int:
    """:func:`graphfuse.formats.fingerprint.fingerprint` in one launch."""
    with torch.cuda.device_of(edge_index):
        facts = _facts(edge_index)
        _write_keys(None, facts, edge_index, 0, 0)
        return int(facts[0])


def build_windows(edge_index: Tensor, num_src: int, num_dst: int) -> Built | None:
    """Both directions of the windows, or ``None`` for a graph that :mod:`.build` has to look at.

    Those are graphs with a repeated edge, with a window so long that it is cut into slices, and with an
    index out of range. There must be edges.
    """
    with torch.cuda.device_of(edge_index):
        return _build_windows(edge_index, num_src, num_dst)


def _build_windows(edge_index: Tensor, num_src: int, num_dst: int) -> Built | None:
    kernels, device, num_edges = _kernels(), edge_index.device, edge_index.size(1)
    num_windows, back_windows = -(-num_dst // WINDOW), -(-num_src // WINDOW)
    all_windows = num_windows + back_windows
    facts = _facts(edge_index)
    _, key, number = _sort(edge_index, num_src, num_dst, facts)
    ptr = torch.empty(all_windows + 1, dtype=torch.int32, device=device)
    task = torch.empty(all_windows, dtype=torch.int64, device=device)
    kernels.launch(
        *(kernels.bounds_kernel, _grid(all_windows), ptr, task, facts, key, number),
        *(2 * num_edges, num_windows, all_windows, kernels.BLOCK),
    )
    task = _in_order(task)
    known = Facts(*facts.tolist())  # waits for the GPU

    middle = known.middle
    splits = slice_length(middle), slice_length(known.total - middle)
    if known.odd or known.longest > min(splits):
        return None
    symmetric = num_src == num_dst and not known.lopsided
    lengths = [
        length
        for windows, entries in ((num_windows, middle), (back_windows, known.total - middle))
        for length in (windows + 1, 4 * windows, 0, entries, -(-entries // 2))
    ]
    scalars = packing.Scalars(num_dst, num_src, num_edges, int(symmetric), *splits, 0, 0)
    shared = _SHARED_WINDOWS if symmetric else None
    windows = packing.blank(packing.WINDOWS, scalars, lengths, shared, device)
    forward, backward = both = _both(windows)
    num_keys, num_tasks = (num_edges, num_windows) if symmetric else (2 * num_edges, all_windows)
    kernels.launch(
        *(kernels.entries_kernel, _grid(num_keys)),
        *(forward.column, forward.row_mask, backward.column, backward.row_mask),
        *(key, number, num_keys, num_windows, middle, kernels.BLOCK),
    )
    kernels.launch(
        *(kernels.tasks_kernel, _grid(num_tasks)),
        *(forward.ptr, forward.tasks, backward.ptr, backward.tasks),
        *(task, ptr, num_tasks, num_windows, middle, kernels.BLOCK),
    )
    _know_no_copies(both)
    return Built(windows, known.fingerprint)


def count_rows(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Edges and self-loops of each row, ``int64[num_dst + num_src]``, rows of the transpose last.

    Of a symmetric structure, whose transpose has the same, ``int64[num_dst]``.
    """
    kernels, scalars = _kernels(), packing.unpack(windows).scalars
    directions = 1 if scalars.symmetric else 2
    num_rows = scalars.num_dst if scalars.symmetric else scalars.num_dst + scalars.num_src
    edges = torch.empty(num_rows, dtype=torch.int64, device=windows.device)
    loops = torch.empty_like(edges)
    with torch.cuda.device_of(windows):
        kernels.launch(
            *(kernels.count_kernel, _grid_of_windows(scalars, directions), edges, loops),
            *(*_entries(_both(windows)), scalars.num_dst, scalars.num_src, kernels.COLUMNS),
            warps=1,
        )
    return edges, loops


def build_rows(windows: Tensor, edges_of_rows: Tensor) -> Tensor:
    """The packed rows of packed windows; ``edges_of_rows`` is that of :func:`count_rows`."""
    scalars = packing.unpack(windows).scalars
    num_edges = scalars.num_edges
    lengths = [scalars.num_dst + 1, 0, 0, num_edges, scalars.num_src + 1, 0, 0, num_edges]
    split = slice_length(num_edges)
    scalars = scalars._replace(split_dst=split, split_src=split)
    shared = _SHARED_ROWS if scalars.symmetric else None
    rows = packing.blank(packing.ROWS, scalars, lengths, shared, windows.device)
    forward, backward = both = _both(rows)
    given = _both(windows)
    outputs = (forward.column, backward.column, forward.ptr, backward.ptr)
    directions = 1 if scalars.symmetric else 2
    _scatter(given, scalars, edges_of_rows, outputs, (None,) * 4, directions)
    if given[0].derived.get("copies", ...) is None:
        _know_no_copies(both)
    return rows


def build_window_edges(windows: Tensor, edge_index: Tensor, key: int) -> Tensor | None:
    """The packed edge order of packed windows, or ``None`` for a graph that :mod:`.build` has to look at.

    Those are graphs with a repeated edge, and edge lists that do not have the fingerprint ``key``.
    """
    kernels, scalars = _kernels(), packing.unpack(windows).scalars
    num_edges, middle, back = scalars.num_edges, *(w.num_entries for w in _both(windows))
    with torch.cuda.device_of(windows):
        facts = _facts(edge_index)
        order, _, number = _sort(edge_index, scalars.num_src, scalars.num_dst, facts)
        known = Facts(*facts.tolist())  # waits for the GPU
        if known.odd or known.fingerprint != key:
            return None
        lengths = [middle + 1, num_edges, back + 1, num_edges]
        shared = _SHARED_EDGES if scalars.symmetric else None
        packed = packing.blank(packing.WINDOW_EDGES, scalars, lengths, shared, windows.device)
        kernels.launch(
            *(kernels.edges_kernel, _grid(2 * num_edges), *packing.unpack(packed).sections),
            *(order, number, num_edges, middle, kernels.BLOCK),
        )
    return packed


def build_row_edges(windows: Tensor, edges_of_rows: Tensor, window_edges: Tensor) -> Tensor:
    """The packed edge order of the rows of packed windows, from that of the windows."""
    scalars = packing.unpack(windows).scalars
    lengths = [scalars.num_edges] * 2
    packed = packing.blank(packing.ROW_EDGES, scalars, lengths, None, windows.device)
    order, back_order = edge_order(window_edges, False), edge_order(window_edges, True)
    outputs = (*packing.unpack(packed).sections, None, None)
    _scatter(_both(windows), scalars, edges_of_rows, outputs, (*order, *back_order), 2)
    return packed


def _facts(edge_index: Tensor) -> Tensor:
    return torch.zeros(len(Facts._fields), dtype=torch.int64, device=edge_index.device)


def _write_keys(key: Tensor | None, facts: Tensor, edge_index: Tensor, num_src: int, num_dst: int) -> None:
    kernels, num_edges = _kernels(), edge_index.size(1)
    kernels.launch(
        *(kernels.keys_kernel, _grid(num_edges), key, facts, edge_index),
        *(num_edges, num_src, num_dst, *edge_index.stride(), kernels.BLOCK),
    )


def _sort(edge_index: Tensor, num_src: int, num_dst: int, facts: Tensor) -> _Sorted:
    kernels, num_edges = _kernels(), edge_index.size(1)
    key = torch.empty(2 * num_edges, dtype=torch.int64, device=edge_index.device)
    _write_keys(key, facts, edge_index, num_src, num_dst)
    key, order = torch.sort(key)
    new = torch.empty(2 * num_edges, dtype=torch.int32, device=edge_index.device)
    windows = -(-num_dst // WINDOW)
    kernels.launch(
        *(kernels.flags_kernel, _grid(2 * num_edges), new, facts, key, num_edges, windows, kernels.BLOCK)
    )
    return _Sorted(order, key, torch.cumsum(new, 0, dtype=torch.int32))


def _in_order(key: Tensor) -> Tensor:
    # of numbers that are all different
    kernels, count = _kernels(), key.numel()
    if count > _RANKED:
        return torch.sort(key).values
    order = torch.empty_like(key)
    kernels.launch(kernels.rank_kernel, (-(-count // kernels.KEYS),), order, key, count, kernels.KEYS)
    return order


def _scatter(
    windows: _Both,
    scalars: packing.Scalars,
    edges_of_rows: Tensor,
    outputs: tuple[Tensor | None, ...],
    orders: tuple[Tensor | None, ...],
    directions: int,
) -> None:
    # outputs and orders of both directions, as rows_kernel takes them
    kernels = _kernels()
    behind = (0, 0) if scalars.symmetric else (scalars.num_dst, scalars.num_edges)
    ends = torch.cumsum(edges_of_rows, 0)
    with torch.cuda.device_of(ends):
        kernels.launch(
            *(kernels.rows_kernel, _grid_of_windows(scalars, directions), *outputs, *_entries(windows)),
            *(*orders, edges_of_rows, ends, scalars.num_dst, scalars.num_src, *behind, kernels.COLUMNS),
            warps=1,
        )


def _both(packed: Tensor) -> _Both:
    return walk(packed, False), walk(packed, True)


def _know_no_copies(walks: _Both) -> None:
    for w in walks:
        w.derived["copies"] = None  # what formats.walk.copies would find


def _entries(windows: _Both) -> list[Tensor | None]:
    return [part for w in windows for part in (w.ptr, w.column, w.row_mask)]


def _grid(count: int) -> tuple[int]:
    return (-(-count // _kernels().BLOCK),)


def _grid_of_windows(scalars: packing.Scalars, directions: int) -> tuple[int, int]:
    return -(-max(scalars.num_dst, scalars.num_src) // WINDOW), directions


@functools.cache
def _kernels() -> Any:
    from graphfuse.formats import quick_kernels  # imports triton

    return quick_kernels
