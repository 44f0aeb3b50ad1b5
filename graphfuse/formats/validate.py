"""Consistency of a record that was loaded or received, before a kernel trusts it.

A record is a function of its edges but for where it cuts long windows. So little is left to be trusted: what
is in range and in order is compared with the edges, and the rest with what a build makes of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphfuse.formats import build, inputs
from graphfuse.formats import packed as packing
from graphfuse.formats.fingerprint import fingerprint
from graphfuse.formats.walk import EdgeOrder, Walk, edge_order, walk

if TYPE_CHECKING:
    from graphfuse.formats.row_windows import RowWindows

# what a record may hold -> its kind and number of sections, as formats/structure.py packs them, but that
# windows with an order of the rows have two more
PARTS = {
    "windows": (packing.WINDOWS, 10),
    "rows": (packing.ROWS, 8),
    "window_edges": (packing.WINDOW_EDGES, 4),
    "row_edges": (packing.ROW_EDGES, 2),
}
_LOOK = (("", False), ("transposed ", True))  # how messages name the directions


def sections_of(name: str, schema: int) -> int:
    """Sections of the part ``name``; windows with an order of the rows have one more in each direction."""
    return PARTS[name][1] + 2 * (name == "windows" and schema == packing.ORDERED_SCHEMA)


def validate(record: RowWindows) -> None:
    """Raises ``ValueError`` naming the first thing that is wrong with ``record``."""
    structure = record._structure
    source = structure.source
    if source is not None:
        source = source.to(record.device)
        # an edge list that was modified since says nothing of the record, and raises where it is needed
        source = source if fingerprint(source) == structure.fingerprint else None
    check_parts(structure.packed(), source)


def check_parts(parts: dict[str, Tensor], edge_index: Tensor | None) -> None:
    """Raises ``ValueError`` naming the first thing that is wrong with packed tensors.

    Args:
        parts: ``windows`` and perhaps ``rows``, ``window_edges`` and ``row_edges``, sections within.
        edge_index: The edges they were built from, on their device; ``None`` if nobody knows them.
    """
    scalars = packing.scalars_of(parts["windows"])
    sizes = scalars[:3]
    _require(min(sizes) >= 0, f"the header must hold sizes of 0 or more (got {list(sizes)})")
    for name, packed in parts.items():
        of_part = packing.scalars_of(packed)
        _require(of_part[:3] == sizes, f"{name}: the header must hold {list(sizes)} (got {of_part[:3]})")
        agrees = of_part.symmetric == scalars.symmetric and scalars.symmetric in (0, 1)
        _require(agrees, f"{name}: `symmetric` must be 0 or 1 and that of the windows")
        _check_lengths(name, packed)
    walks = [walk(parts["windows"], transposed) for _, transposed in _LOOK]
    for (look, _), w in zip(_LOOK, walks, strict=True):
        _check_windows(f"{look}windows", w, scalars.num_edges)
    if scalars.symmetric:
        first, second = ((w.ptr, w.tasks, w.merges, w.column, _mask(w), _index(w)) for w in walks)
        shared = all(map(torch.equal, first, second))
        _require(
            shared and scalars.num_dst == scalars.num_src,
            "`symmetric` must mean that both directions hold the same",
        )
    keys = [_sorted_keys(_edges(w), swap) for w, (_, swap) in zip(walks, _LOOK, strict=True)]
    _require(torch.equal(*keys), "the transposed windows hold other edges than the windows")
    if edge_index is not None:
        _check_range(edge_index, scalars)
        listed = _sorted_keys((edge_index[1].long(), edge_index[0].long()), False)
        _require(torch.equal(keys[0], listed), "the windows hold other edges than the edge list")
    del keys
    for (look, transposed), w in zip(_LOOK, walks, strict=True):
        _check_built(look, w, transposed, parts, edge_index)
    if edge_index is None:
        _check_same_edges(parts, walks)


def _mask(w: Walk) -> Tensor:
    assert w.row_mask is not None
    return w.row_mask


def _index(w: Walk) -> Tensor:
    return w.ptr[:0] if w.row_index is None else w.row_index


def _edges(w: Walk) -> tuple[Tensor, Tensor]:
    return build.decode(w.ptr, w.column, _mask(w), w.row_index)


def _sorted_keys(pairs: tuple[Tensor, Tensor], swap: bool) -> Tensor:
    # a number for each edge, the same for both directions; all indices are below 2^31
    row, column = pairs[::-1] if swap else pairs
    return torch.sort(row << 32 | column).values


def _check_range(edge_index: Tensor, scalars: packing.Scalars) -> None:
    try:
        inputs.check_indices(edge_index, scalars.num_src, scalars.num_dst)
    except IndexError as error:
        raise ValueError(f"inconsistent row windows: {error}") from error


def _check_lengths(name: str, packed: Tensor) -> None:
    """What views of the sections take for granted."""
    kind, scalars, sections = packing.unpack(packed)
    lengths = [section.numel() for section in sections]
    schema = packing.header_of(packed)[0]
    held = (PARTS[name][0], sections_of(name, schema))
    known = (kind, len(lengths)) == held and packing.schema_of(*held) == schema
    _require(known, f"{name}: kind and sections must be {held} (got {(kind, len(lengths))})")
    half = len(lengths) // 2
    for (look, transposed), found in zip(_LOOK, (lengths[:half], lengths[half:]), strict=True):
        where = f"{look}{name.replace('_', ' ')}"
        num_rows = scalars.num_src if transposed else scalars.num_dst
        if kind in (packing.WINDOWS, packing.ROWS):
            height = build.WINDOW if kind == packing.WINDOWS else 1
            wanted = -(-num_rows // height) + 1
            _require(found[0] == wanted, f"{where}: `ptr` must have {wanted} entries (got {found[0]})")
            fours = found[1] % 4 == 0 and found[2] % 4 == 0
            _require(fours, f"{where}: `tasks` and `merges` must have rows of 4 (got {found[1:3]} numbers)")
            split = scalars.split_src if transposed else scalars.split_dst
            steps = split > 0 and split % build._STEP == 0
            _require(steps, f"{where}: `split` must be a positive multiple of {build._STEP} (got {split})")
        if kind == packing.WINDOWS:
            wanted = -(-found[3] // 2)
            _require(found[4] == wanted, f"{where}: `row_mask` must take {wanted} int32 (got {found[4]})")
            wanted = build.WINDOW * (found[0] - 1)
            _require(
                found[5:] in ([], [0], [wanted]),
                f"{where}: `row_index` must have no entries, or {wanted} (got {found[5:]})",
            )
        else:
            _require(
                found[-1] == scalars.num_edges,
                f"{where}: there must be {scalars.num_edges} edges (got {found[-1]})",
            )


def _check_windows(name: str, w: Walk, num_edges: int) -> None:
    num_windows = w.ptr.numel() - 1
    _check_ptr(name, "ptr", w.ptr, w.num_entries)
    if w.row_index is not None:
        # before anything is looked up in it
        known = torch.sort(w.row_index[: w.num_rows]).values, w.row_index[w.num_rows :]
        every = torch.arange(w.num_rows, dtype=torch.int32, device=w.ptr.device)
        once = torch.equal(known[0], every) and bool((known[1] == w.num_rows).all())
        wanted = f"each of the {w.num_rows} rows once, and {w.num_rows} after them"
        _require(once, f"{name}: `row_index` must hold {wanted}")
    length = torch.diff(w.ptr.long())
    column, mask = w.column.long(), _mask(w).long() & 0xFFFF
    inside = bool(((column >= 0) & (column < w.num_cols)).all())
    _require(inside, f"{name}: `column` must lie in [0, {w.num_cols})")
    window = torch.repeat_interleave(length, output_size=w.num_entries)
    place = window * max(w.num_cols, 1) + column
    _require(bool((place[1:] >= place[:-1]).all()), f"{name}: columns of a window must be sorted")
    _require(bool((mask > 0).all()), f"{name}: `row_mask` must not be empty")
    rows = torch.where(window == num_windows - 1, (w.num_rows - 1) % build.WINDOW + 1, build.WINDOW)
    _require(bool((mask >> rows == 0).all()), f"{name}: `row_mask` must not name rows beyond the last")
    # the k-th copy of an edge is in the k-th entry of its column, which dropout tells copies apart by
    again = (place[1:] == place[:-1]) & (mask[1:] & ~mask[:-1] != 0)
    _require(not bool(again.any()), f"{name}: `row_mask` must name the rows of a repeated column again")
    edges = int(build.edges_per_row(w.ptr, _mask(w), w.num_rows).sum())
    _require(edges == num_edges, f"{name}: `row_mask` must hold {num_edges} edges (got {edges})")
    _check_tasks(name, w, build.cut_tasks(w.ptr, w.split), "entries of every window")


def _check_ptr(name: str, field: str, ptr: Tensor, last: int) -> None:
    ptr = ptr.long()
    ends = (int(ptr[0]), int(ptr[-1]))
    _require(ends == (0, last), f"{name}: `{field}` must run from 0 to {last} (got {ends})")
    _require(bool((torch.diff(ptr) >= 0).all()), f"{name}: `{field}` must not decrease")


def _check_tasks(name: str, w: Walk, wanted: tuple[Tensor, Tensor, int], every: str) -> None:
    tasks, merges, num_slots = wanted
    _require(torch.equal(tasks, w.tasks), f"{name}: `tasks` must cover the {every} once, longest first")
    _require(torch.equal(merges, w.merges), f"{name}: `merges` must list the slots of all that is cut")
    _require(num_slots == w.num_slots, f"{name}: there must be {num_slots} slots (got {w.num_slots})")


def _check_built(
    look: str, windows: Walk, transposed: bool, parts: dict[str, Tensor], edge_index: Tensor | None
) -> None:
    """What is built on first use, in one direction, against its windows."""
    if len(parts) == 1:
        return
    row, column = _edges(windows)
    order = torch.sort(row.to(torch.int32), stable=True).indices  # of the windows, as seen from the rows
    in_order = row[order], column[order]
    if "rows" in parts:
        name, w = f"{look}rows", walk(parts["rows"], transposed)
        _check_ptr(name, "ptr", w.ptr, w.num_entries)
        held = torch.repeat_interleave(torch.diff(w.ptr.long()), output_size=w.num_entries)
        same = torch.equal(held, in_order[0]) and torch.equal(w.column.long(), in_order[1])
        _require(same, f"{name}: `ptr` and `column` must hold the edges of the windows, sorted")
        # rows may be cut into other numbers of slices than they are today
        row, _, slices, _ = w.merges.long().unbind(1)
        cut = bool(((row >= 0) & (row < w.num_rows)).all()) and int(slices.sum()) == w.num_slots
        _require(cut, f"{name}: `merges` must list the slots of all that is cut")
        slices = torch.ones(w.num_rows, dtype=torch.int64, device=w.ptr.device).index_copy_(0, row, slices)
        wanted = build.list_tasks(w.ptr, slices, w.split + 1)
        _check_tasks(name, w, wanted, f"edges of every row of more than {w.split}")
    if "window_edges" in parts:
        edges = edge_order(parts["window_edges"], transposed)
        _check_order(f"{look}window edges", edges, windows, in_order, order, transposed, edge_index)
    if "row_edges" in parts:
        edges = edge_order(parts["row_edges"], transposed)
        _check_order(f"{look}row edges", edges, windows, in_order, None, transposed, edge_index)


def _check_order(
    name: str,
    edges: EdgeOrder,
    windows: Walk,
    in_order: tuple[Tensor, Tensor],
    order: Tensor | None,
    transposed: bool,
    edge_index: Tensor | None,
) -> None:
    """An edge order, of the rows or, with ``order``, of the windows that it leads to rows from."""
    if edges.ptr is not None:
        bits = torch.zeros_like(windows.column)
        for bit in range(build.WINDOW):
            bits += (_mask(windows) >> bit) & 1
        starts = torch.nn.functional.pad(bits.cumsum(0), (1, 0))
        _require(torch.equal(edges.ptr.long(), starts), f"{name}: `ptr` must count the edges of the entries")
    perm = edges.perm.long()
    inside = bool(((perm >= 0) & (perm < perm.numel())).all())
    once = inside and bool((torch.zeros_like(perm).scatter_(0, perm, 1) == 1).all())
    _require(once, f"{name}: `perm` must name each of the {perm.numel()} edges once")
    perm = perm if order is None else perm[order]
    row, column = in_order
    copies = (row[1:] == row[:-1]) & (column[1:] == column[:-1])
    kept = not bool((copies & (perm[1:] < perm[:-1])).any())
    _require(kept, f"{name}: `perm` must keep the order of repeated edges")
    if edge_index is not None:
        listed = edge_index.long()[:, perm]
        same = torch.equal(listed, torch.stack([row, column] if transposed else [column, row]))
        _require(same, f"{name}: `perm` must lead to the edges in the edge list")


def _check_same_edges(parts: dict[str, Tensor], walks: list[Walk]) -> None:
    """That all edge orders number one edge list, where nobody knows it."""
    lists = []
    for (_, transposed), w in zip(_LOOK, walks, strict=True):
        row, column = _edges(w)
        pairs = torch.stack([row, column] if transposed else [column, row])
        for name in ("window_edges", "row_edges"):
            if name in parts:
                if name == "row_edges":
                    pairs = pairs[:, torch.sort(row.to(torch.int32), stable=True).indices]
                perm = edge_order(parts[name], transposed).perm.long()
                lists.append(torch.empty_like(pairs).index_copy_(1, perm, pairs))
    same = all(torch.equal(lists[0], other) for other in lists[1:])
    _require(same, "the edge orders must number the edges of one list")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"inconsistent row windows: {message}")
