"""Row windows of a small graph in a fraction of the launches; the same integers as :mod:`.build` gives.

A mini-batch is built once and used once, and at some 100,000 edges the host's launches are all that its
build costs. So both directions are one problem here, of twice the edges; its keys are dealt out to windows
and sorted within them, which takes two launches where a sort by digits takes ten; what torch would take
dozens of operations for is one of the few kernels of :mod:`.quick_kernels` and :mod:`.lay_kernels`; and
everything the host has to know comes back in one copy.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import packed as packing
from graphfuse.formats.build import WINDOW, row_split, slice_length
from graphfuse.formats.walk import know_no_copies, walk

# beyond, launches are no cost and the second copy of everything is; keys have bits for more
MOST_EDGES, MOST_NODES = 1 << 20, 1 << 22
# windows up to which each is compared with all others, which takes their square; rows up to which long ones
# are compared with all
_RANKED, _RANKED_ROWS = 1 << 14, 1 << 17
_SHARED_WINDOWS = (0, 1, 2, 3, 4) * 2  # sections of a symmetric structure, by the first that holds the same
_SHARED_ROWS = (0, 1, 2, 3) * 2
_SHARED_EDGES = (0, 1, 0, 3)


class Built(NamedTuple):
    """What the record of a graph is made of."""

    windows: Tensor  # packed
    rows: Tensor  # packed
    fingerprint: int


class Facts(NamedTuple):
    """What the kernels tell the host, in the order in which they write it."""

    fingerprint: int = 0
    odd: int = 0  # not 0: an index is out of range or an edge is repeated
    lopsided: int = 0  # not 0: the directions differ
    longest: int = 0  # entries of the longest window
    middle: int = 0  # entries of the forward direction
    total: int = 0  # entries of both
    crowded: int = 0  # edges of the window that has most
    long: int = 0  # rows that are tasks
    back_long: int = 0  # likewise, of the transpose


class _Sorted(NamedTuple):
    key: Tensor  # int64[2 * num_edges]
    order: Tensor | None  # int32[2 * num_edges], which edge each key was
    table: Tensor
    facts: Facts


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


def fingerprint(edge_index: Tensor) -> int:
    """:func:`graphfuse.formats.fingerprint.fingerprint` in one launch."""
    kernels = _kernels()
    with torch.cuda.device_of(edge_index):
        facts = torch.zeros(len(Facts._fields), dtype=torch.int64, device=edge_index.device)
        _over_edges(kernels.edges_kernel, (facts,), edge_index, 0, 0, False)
        return int(facts[0])


def build_windows(edge_index: Tensor, num_src: int, num_dst: int) -> Built | None:
    """Both directions of the windows and rows, or ``None`` for a graph that :mod:`.build` has to look at.

    Those are graphs with a repeated edge, with a window so long that it is cut into slices, with long rows
    among very many, and with an index out of range. There must be edges.
    """
    with torch.cuda.device_of(edge_index):
        return _build_windows(edge_index, num_src, num_dst)


def _build_windows(edge_index: Tensor, num_src: int, num_dst: int) -> Built | None:
    num_edges, num_windows, back_windows = edge_index.size(1), _windows_of(num_dst), _windows_of(num_src)
    found = _sort(edge_index, num_src, num_dst, False)
    if found is None:
        return None
    facts = found.facts
    middle, back = facts.middle, facts.total - facts.middle
    splits = slice_length(middle), slice_length(back)
    long, back_long = facts.long, facts.back_long
    unranked = long + back_long > 0 and max(num_dst, num_src) > _RANKED_ROWS
    if unranked or facts.longest > min(splits):
        return None
    symmetric = num_src == num_dst and not facts.lopsided
    scalars = packing.Scalars(num_dst, num_src, num_edges, int(symmetric), *splits, 0, 0)
    lengths = [num_windows + 1, 4 * num_windows, 0, middle, -(-middle // 2)]
    lengths += [back_windows + 1, 4 * back_windows, 0, back, -(-back // 2)]
    row_splits = _row_splits(num_edges, num_dst, num_src)
    layouts = (
        packing.Layout(packing.WINDOWS, scalars, lengths, _SHARED_WINDOWS if symmetric else None),
        packing.Layout(
            packing.ROWS,
            packing.Scalars(*scalars[:4], *row_splits, 0, 0, long, back_long),
            [num_dst + 1, 4 * long, 0, num_edges, num_src + 1, 4 * back_long, 0, num_edges],
            _SHARED_ROWS if symmetric else None,
        ),
    )
    headers, (windows, rows) = packing.blank(layouts, edge_index.device)
    directions = 1 if symmetric else 2
    _lay_graph(windows, rows, headers, found, scalars, directions)
    if long + back_long > 0:
        kernels = _lay_kernels()
        _kernels().launch(
            *(kernels.list_kernel, (-(-max(num_dst, num_src) // kernels.ROWS), directions), rows),
            *(kernels.headed(headers[1]), num_dst, num_src, *row_splits, kernels.ROWS),
        )
    for packed in (windows, rows):
        know_no_copies(packed)
    return Built(windows, rows, facts.fingerprint)


class Place(NamedTuple):
    """Packed windows and rows, neither symmetric nor cut, that have room for graphs of different sizes."""

    windows: Tensor
    rows: Tensor
    headers: list[tuple[int, ...]]  # as :func:`graphfuse.formats.packed.blank` gives them


def refill(place: Place, edge_index: Tensor) -> Facts | None:
    """Lays the windows and rows of other edges out in a place, if there is room for their entries.

    ``None``, and nothing is written, for a graph with a repeated edge, with an index out of range or with a
    window of more edges than are sorted here. There must be edges, and no more than room.
    """
    scalars, room = packing.scalars_of(place.windows), packing.lengths_of(place.windows)[3]
    with torch.cuda.device_of(edge_index):
        found = _sort(edge_index, scalars.num_src, scalars.num_dst, False)
        if found is None:
            return None
        facts = found.facts
        if max(facts.middle, facts.total - facts.middle) <= room:
            scalars = scalars._replace(num_edges=edge_index.size(1))
            _lay_graph(*place, found, scalars, 2)
        return facts


def build_edges(windows: Tensor, edge_index: Tensor, key: int) -> tuple[Tensor, Tensor] | None:
    """The packed edge orders of packed windows and their rows, or ``None`` where :mod:`.build` has to look.

    That is for what :func:`build_windows` returns nothing for, and for edge lists that do not have the
    fingerprint ``key``.
    """
    scalars, lengths = packing.scalars_of(windows), packing.lengths_of(windows)
    middle, back, num_edges = lengths[3], lengths[8], scalars.num_edges
    with torch.cuda.device_of(windows):
        found = _sort(edge_index, scalars.num_src, scalars.num_dst, True)
        if found is None or found.facts.fingerprint != key:
            return None
        shared = _SHARED_EDGES if scalars.symmetric else None
        layouts = (
            packing.Layout(
                packing.WINDOW_EDGES, scalars, [middle + 1, num_edges, back + 1, num_edges], shared
            ),
            packing.Layout(packing.ROW_EDGES, scalars, [num_edges] * 2, None),
        )
        headers, (of_windows, of_rows) = packing.blank(layouts, windows.device)
        _lay((None, None, None, of_windows, of_rows), headers, found, scalars, 2)
    return of_windows, of_rows


def count_rows(windows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Edges and self-loops of each row, ``int64[num_dst + num_src]``, rows of the transpose last.

    Of a symmetric structure, whose transpose has the same, ``int64[num_dst]``. ``None`` for what this module
    would not build: larger graphs, windows that have an order of their rows or are cut into slices.
    """
    scalars = packing.scalars_of(windows)
    whole = scalars.slots_dst == scalars.slots_src == 0 and not packing.is_ordered(windows)
    if not (whole and suits(windows, scalars.num_edges, scalars.num_src, scalars.num_dst)):
        return None
    kernels, directions = _lay_kernels(), 1 if scalars.symmetric else 2
    num_rows = scalars.num_dst if scalars.symmetric else scalars.num_dst + scalars.num_src
    edges = torch.empty(num_rows, dtype=torch.int64, device=windows.device)
    loops = torch.empty_like(edges)
    parts = [
        part for w in (walk(windows, False), walk(windows, True)) for part in (w.ptr, w.column, w.row_mask)
    ]
    with torch.cuda.device_of(windows):
        _kernels().launch(
            *(kernels.degrees_kernel, _grid_of_windows(scalars, directions), edges, loops, *parts),
            *(scalars.num_dst, scalars.num_src, kernels.COLUMNS),
            warps=1,
        )
    return edges, loops


def _over_edges(
    kernel: Any,
    outputs: tuple[Tensor | None, ...],
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *rest: Any,
) -> None:
    kernels, num_edges = _kernels(), edge_index.size(1)
    kernels.launch(
        *(kernel, (-(-num_edges // kernels.BLOCK),), *outputs, edge_index),
        *(num_edges, num_src, num_dst, *edge_index.stride(), *rest, kernels.BLOCK),
    )


def _sort(edge_index: Tensor, num_src: int, num_dst: int, with_order: bool) -> _Sorted | None:
    """The keys of the edges in both directions, sorted; ``None`` as of :func:`build_windows`."""
    kernels, device, num_edges = _kernels(), edge_index.device, edge_index.size(1)
    num_windows = _windows_of(num_dst)
    all_windows = num_windows + _windows_of(num_src)
    # the facts, and four numbers of each window, see quick_kernels
    table = torch.zeros(kernels.FACTS + 4 * (all_windows + 1), dtype=torch.int64, device=device)
    keys = torch.empty(2, 2 * num_edges, dtype=torch.int64, device=device)
    mixed, key = keys.unbind()
    orders: tuple[Tensor | None, ...] = (None, None)
    if with_order:
        orders = torch.empty(2, 2 * num_edges, dtype=torch.int32, device=device).unbind()
    sizes = (num_edges, num_windows, all_windows)
    row_splits = _row_splits(num_edges, num_dst, num_src)
    ranked = all_windows <= _RANKED
    _over_edges(kernels.edges_kernel, (table,), edge_index, num_src, num_dst, True)
    grid = (-(-all_windows // kernels.RUN),)
    kernels.launch(*(kernels.sums_kernel, grid, table, None, *sizes, False, kernels.BLOCK, kernels.RUN))
    _over_edges(kernels.keys_kernel, (mixed, orders[0], table), edge_index, num_src, num_dst)
    kernels.launch(
        *(kernels.sort_kernel, (-(-2 * num_edges // kernels.KEYS),), key, orders[1], mixed, orders[0], table),
        *(num_windows, all_windows, *row_splits, kernels.KEYS),
    )
    span = kernels.SPAN if ranked else kernels.RUN
    grid = (max(-(-all_windows // span), -(-num_edges // kernels.BLOCK)),)
    kernels.launch(*(kernels.sums_kernel, grid, table, key, *sizes, ranked, kernels.BLOCK, span))
    if not ranked:
        place = table[kernels.FACTS + kernels.PLACE.value * (all_windows + 1) :][:all_windows]
        place[torch.argsort(place)] = torch.arange(all_windows, device=device)
    facts = Facts(*table[: len(Facts._fields)].tolist())  # waits for the GPU
    return None if facts.odd or facts.crowded > kernels.CROWD else _Sorted(key, orders[1], table, facts)


def _lay_graph(
    windows: Tensor,
    rows: Tensor,
    headers: list[tuple[int, ...]],
    found: _Sorted,
    scalars: packing.Scalars,
    directions: int,
) -> None:
    outputs = (windows, windows.view(torch.int16), rows, None, None)
    _lay(outputs, headers, found, scalars, directions)


def _lay(
    outputs: tuple[Tensor | None, ...],
    headers: list[tuple[int, ...]],
    found: _Sorted,
    scalars: packing.Scalars,
    directions: int,
) -> None:
    kernels, num_windows = _lay_kernels(), _windows_of(scalars.num_dst)
    _kernels().launch(
        *(kernels.lay_kernel, _grid_of_windows(scalars, directions), *outputs, *map(kernels.headed, headers)),
        *(found.key, found.order, found.table, scalars.num_edges, scalars.num_dst, scalars.num_src),
        *(num_windows, num_windows + _windows_of(scalars.num_src), kernels.COLUMNS),
        warps=1,
    )


def _row_splits(num_edges: int, num_dst: int, num_src: int) -> tuple[int, int]:
    # of a graph whose windows are not cut
    return row_split(num_edges, num_dst, False), row_split(num_edges, num_src, False)


def _windows_of(num_rows: int) -> int:
    return -(-num_rows // WINDOW)


def _grid_of_windows(scalars: packing.Scalars, directions: int) -> tuple[int, int]:
    return _windows_of(max(scalars.num_dst, scalars.num_src)), directions


@functools.cache
def _kernels() -> Any:
    from graphfuse.formats import quick_kernels  # imports triton

    return quick_kernels


@functools.cache
def _lay_kernels() -> Any:
    from graphfuse.formats import lay_kernels

    return lay_kernels
