"""What a record and its transpose share: the packed tensors, built eagerly or on first use."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from graphfuse.formats import build, inputs, quick, reorder
from graphfuse.formats import packed as packing
from graphfuse.formats.filling import Filling
from graphfuse.formats.fingerprint import fingerprint
from graphfuse.formats.lasting import make_lasting
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import Walk, edge_order, walk

Key = tuple[int, int, int, torch.device]


class Structure:
    """Packed tensors of one graph. They are never written after they are made, but for refillable ones."""

    is_for_good = True  # whether it stays that of its edges, and is found by them
    filling: Filling | None = None  # that of its edges, if they do not

    def __init__(self, windows: Tensor, key: int, source: Tensor | None) -> None:
        self.windows = windows
        scalars = self.scalars
        self.num_edges = scalars.num_edges
        lengths = packing.lengths_of(windows)
        entries = lengths[3], lengths[len(lengths) // 2 + 3]
        num_dst, num_src = scalars.num_dst, scalars.num_src
        # (num_dst, num_src, num_edges, num_entries) of each direction
        self.sizes = (
            (num_dst, num_src, self.num_edges, entries[0]),
            (num_src, num_dst, self.num_edges, entries[1]),
        )
        self.fingerprint = key
        # the caller's edge list, for what is built on demand; an alias, so that a cache keyed weakly on the
        # caller's tensor object does not keep that object alive
        self.source = source
        self.rows: Tensor | None = None
        self.window_edges: Tensor | None = None
        self.row_edges: Tensor | None = None
        self.memo: dict[Any, Any] = {}
        self.lock = threading.RLock()
        self.number = next(_NUMBERS)
        if self.is_for_good:
            _remember(self)

    @property
    def scalars(self) -> packing.Scalars:
        """Sizes, known on the host."""
        return packing.scalars_of(self.windows)

    def packed(self) -> dict[str, Tensor]:
        """The packed tensors built so far, by attribute."""
        parts = {name: getattr(self, name) for name in ("windows", *_MAKERS)}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def lazy(self, name: str) -> Tensor:
        """The packed tensor called ``name``, built on first use."""
        built: Tensor | None = getattr(self, name)
        if built is None:
            tracing = torch.compiler.is_compiling()
            if tracing or (self.windows.is_cuda and torch.cuda.is_current_stream_capturing()):
                during = "tracing by torch.compile or torch.export" if tracing else "CUDA graph capture"
                raise RuntimeError(
                    f"the {name} of these row windows would be built during {during}; call "
                    "graphfuse.warmup(model, data), or the op itself, once before"
                )
            with self.lock:
                built = getattr(self, name)
                if built is None:
                    built = make_lasting(_MAKERS[name], self)
                    setattr(self, name, built)
        return built

    def row_counts(self) -> tuple[Tensor, Tensor] | None:
        """What :func:`.quick.count_rows` says, once; ``None`` where that does not suit."""
        found: tuple[Tensor, Tensor] | None = self.keep("row_counts", lambda: quick.count_rows(self.windows))
        return found

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, computed once and kept."""
        memo = self.memo
        if key not in memo:
            with self.lock:
                if key not in memo:
                    memo[key] = self._make(key, make)
        return memo[key]

    def _make(self, key: Any, make: Callable[[], Any]) -> Any:
        return make_lasting(make)

    def edge_index(self) -> Tensor:
        """The caller's edge list on the structure's device; raises if it was modified since."""
        if self.source is None:
            raise RuntimeError(
                "these row windows carry no edge list; build them with RowWindows.from_edge_index"
            )
        source = self.source.to(self.windows.device)
        if fingerprint(source) != self.fingerprint:
            raise RuntimeError(
                "the edge_index that these row windows were built from was modified since; build them again"
            )
        return source


# Live structures by size and device, so that an edge list that was copied (as `data.to(device)` does) is
# recognised by its fingerprint. Weak: a record lives as long as its users.
_LIVE: dict[Key, weakref.WeakSet[Structure]] = {}
_LIVE_LOCK = threading.Lock()
_NUMBERS = itertools.count()


def _remember(structure: Structure) -> None:
    s = structure.scalars
    with _LIVE_LOCK:
        for key in [key for key, alive in _LIVE.items() if not alive]:
            del _LIVE[key]
        key = (s.num_dst, s.num_src, s.num_edges, structure.windows.device)
        _LIVE.setdefault(key, weakref.WeakSet()).add(structure)


def find_live(edge_index: Tensor, num_src: int, num_dst: int) -> Structure | None:
    """The latest live structure on the same device that was built from equal edges in the same order."""
    with _LIVE_LOCK:
        candidates = list(_LIVE.get((num_dst, num_src, edge_index.size(1), edge_index.device), ()))
    if not candidates:
        return None
    key = fingerprint(edge_index)
    # of several, as with rows in other orders, always the same one: results depend on it in their last bit
    equal = [found for found in candidates if found.fingerprint == key]
    return max(equal, key=lambda found: found.number, default=None)


@advises
def build_structure(edge_index: Tensor, num_src: int, num_dst: int, method: str = "natural") -> Structure:
    """The windows of checked edges, both directions; raises if an index or a size is out of range.

    ``method`` is that of :func:`graphfuse.formats.reorder.cluster`.
    """
    inputs.check_sizes(edge_index, num_src, num_dst)
    num_src, num_dst = operator.index(num_src), operator.index(num_dst)  # NumPy's integers too
    sizes = (num_dst, num_src, edge_index.size(1))
    if method == "natural" and quick.suits(edge_index, edge_index.size(1), num_src, num_dst):
        found = quick.build_windows(edge_index, num_src, num_dst)
        if found is not None:
            structure = Structure(found.windows, found.fingerprint, edge_index.detach())
            structure.rows = found.rows
            return structure
    with _progress() as bar:
        bar.set_description("row windows: check")
        inputs.check_indices(edge_index, num_src, num_dst)
        key = fingerprint(edge_index)
        narrow = edge_index.element_size() < 4  # no index to torch
        src, dst = edge_index.int() if narrow else edge_index
        bar.update()
        bar.set_description("row windows: rows")
        forward = _build_direction(dst, src, num_dst, num_src, method)
        bar.update()
        bar.set_description("row windows: transpose")
        # finding an order once more would take longer than the look whether it is the same
        symmetric = method != "natural" and num_src == num_dst and _is_symmetric(src, dst, num_src)
        backward = forward if symmetric else _build_direction(src, dst, num_src, num_dst, method)
        if method == "natural" and num_src == num_dst:
            symmetric = all(
                torch.equal(getattr(forward, name), getattr(backward, name))
                for name in ("ptr", "column", "row_mask")
            )
        bar.update()
        windows = _pack_windows(forward, backward, symmetric, sizes)
        bar.update()
    return Structure(windows, key, edge_index.detach())


def _build_direction(row: Tensor, col: Tensor, num_rows: int, num_cols: int, method: str) -> build.Direction:
    order = reorder.cluster(row, col, num_rows, num_cols, method) if method != "natural" else None
    if order is not None and torch.equal(order, torch.arange(num_rows, device=order.device)):
        order = None  # "auto" often leaves it at that, and a kernel is spared the load
    return build.build_direction(row, col, num_rows, num_cols, order)


def _is_symmetric(src: Tensor, dst: Tensor, num_nodes: int) -> bool:
    keys = (torch.sort(row.long() * num_nodes + col).values for row, col in ((dst, src), (src, dst)))
    return torch.equal(*keys)


def _progress() -> tqdm[Any]:
    return tqdm(
        total=4, delay=2.0, disable=None, leave=False, bar_format="{desc} {n_fmt}/{total_fmt} {elapsed}"
    )


def _pack_windows(
    forward: build.Direction, backward: build.Direction, symmetric: bool, sizes: tuple[int, int, int]
) -> Tensor:
    """Both directions of the windows in one tensor; ``sizes`` is (num_dst, num_src, num_edges)."""
    if symmetric:
        backward = forward
    splits = (forward.split, backward.split, forward.num_slots, backward.num_slots)
    ordered = forward.row_index is not None or backward.row_index is not None
    sections = _window_sections(forward, ordered)
    sections += sections if symmetric else _window_sections(backward, ordered)
    return packing.pack(packing.WINDOWS, packing.Scalars(*sizes, int(symmetric), *splits), sections)


def _window_sections(half: build.Direction, ordered: bool) -> list[Tensor]:
    even = torch.nn.functional.pad(half.row_mask, (0, half.row_mask.numel() % 2))  # two masks in one int32
    sections = [half.ptr, half.tasks, half.merges, half.column, even.view(torch.int32)]
    if ordered:  # at least one direction is, and the other has nothing here
        sections.append(half.ptr.new_empty(0) if half.row_index is None else half.row_index)
    return sections


def _build_rows(structure: Structure) -> Tensor:
    scalars = structure.scalars
    cut = scalars.slots_dst + scalars.slots_src > 0
    length = build.row_slice_length(scalars.num_edges, cut)
    split_dst = build.row_split(scalars.num_edges, scalars.num_dst, cut)
    split_src = build.row_split(scalars.num_edges, scalars.num_src, cut)
    sections, slots = _row_sections(walk(structure.windows, False), length, split_dst)
    if scalars.symmetric:
        backward, backward_slots = sections, slots
    else:
        backward, backward_slots = _row_sections(walk(structure.windows, True), length, split_src)
    scalars = scalars._replace(
        split_dst=split_dst,
        split_src=split_src,
        slots_dst=slots,
        slots_src=backward_slots,
        long_dst=sections[1].numel() // 4 - slots,
        long_src=backward[1].numel() // 4 - backward_slots,
    )
    return packing.pack(packing.ROWS, scalars, sections + backward)


def _row_sections(windows: Walk, length: int, split: int) -> tuple[list[Tensor], int]:
    assert windows.row_mask is not None
    row, column = build.decode(windows.ptr, windows.column, windows.row_mask, windows.row_index)
    row, order = torch.sort(row.to(torch.int32), stable=True)  # window order is by column and copy
    bounds = torch.arange(windows.num_rows + 1, device=row.device, dtype=torch.int32)
    ptr = torch.searchsorted(row, bounds).to(torch.int32)
    tasks, merges, num_slots = build.cut_tasks(ptr, length, split + 1)
    return [ptr, tasks, merges, column[order].to(torch.int32)], num_slots


def _build_window_edges(structure: Structure) -> Tensor:
    scalars, given = structure.scalars, structure.source
    sizes = (scalars.num_edges, scalars.num_src, scalars.num_dst)
    ordered = packing.is_ordered(structure.windows)
    if given is not None and not ordered and quick.suits(structure.windows, *sizes):
        found = quick.build_edges(
            structure.windows, given.to(structure.windows.device), structure.fingerprint
        )
        if found is not None:
            structure.row_edges = found[1]
            return found[0]
    source = structure.edge_index()
    sections: list[Tensor] = []
    for transposed in (False, True):
        row, col = (source[0], source[1]) if transposed else (source[1], source[0])
        w = walk(structure.windows, transposed)
        if w.row_index is not None:
            row = build.inverse(w.row_index[: w.num_rows]).index_select(0, row.long())
        edges = build.sort_edges(row, col, w.num_cols, with_perm=True)
        assert edges.perm is not None
        # in a symmetric structure the entries are shared; the permutation is not, as w_ij need not be w_ji
        shared = transposed and scalars.symmetric
        ptr = sections[0] if shared else build.entry_starts(edges).to(torch.int32)
        sections += [ptr, edges.perm.to(torch.int32)]
    return packing.pack(packing.WINDOW_EDGES, scalars, sections)


def _build_row_edges(structure: Structure) -> Tensor:
    of_windows = structure.lazy("window_edges")
    if structure.row_edges is not None:
        return structure.row_edges  # the quick build makes both
    sections: list[Tensor] = []
    for transposed in (False, True):
        w = walk(structure.windows, transposed)
        assert w.row_mask is not None
        row, _ = build.decode(w.ptr, w.column, w.row_mask, w.row_index)
        order = torch.sort(row.to(torch.int32), stable=True).indices
        sections.append(edge_order(of_windows, transposed).perm[order])
    return packing.pack(packing.ROW_EDGES, structure.scalars, sections)


_MAKERS: dict[str, Callable[[Structure], Tensor]] = {
    "rows": _build_rows,
    "window_edges": _build_window_edges,
    "row_edges": _build_row_edges,
}
