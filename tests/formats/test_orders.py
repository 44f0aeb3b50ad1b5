"""Records whose windows hold rows in another order: the same graph, whichever order that is."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import graphfuse
from graphfuse import RowWindows, clear_cache
from graphfuse.formats import load_windows, reorder, save_windows
from graphfuse.formats import packed as packing
from graphfuse.formats.build import decode
from graphfuse.formats.cache import row_windows
from graphfuse.formats.walk import copies, masks_without_loops, row_masks
from graphfuse.testing import GRAPHS
from graphfuse.transforms import ToRowWindows
from tests.formats.test_build import define_windows, read_windows

OTHERS = tuple(method for method in reorder.METHODS if method != "natural")


def build(graph: str, method: str, device: torch.device | str = "cpu") -> RowWindows:
    edge_index, size = GRAPHS[graph](device)
    return RowWindows.from_edge_index(edge_index, size, reorder=method)


def order_of(view: RowWindows) -> Tensor:
    row_index = view.walk().row_index
    return (
        torch.arange(view.shape[0], device=view.device) if row_index is None else row_index[: view.shape[0]]
    )


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_same_graph(graph: str, method: str, device: torch.device, cut: bool) -> None:
    windows, natural = build(graph, method, device).validate(), build(graph, "natural", device)
    for view, other in ((windows, natural), (windows.transpose(), natural.transpose())):
        src, dst = view.edge_index()
        (num_rows, num_cols), w = view.shape, view.walk()
        order = reorder.cluster(dst, src, num_rows, num_cols, method)
        assert torch.equal(order_of(view).long(), order)
        moved = torch.stack([src, order.argsort()[dst]])
        assert read_windows(w) == define_windows(moved, num_rows)
        assert view.num_entries == reorder.num_entries(dst, src, num_rows, num_cols, order)
        if w.row_index is not None:
            assert w.row_index.tolist() == order.tolist() + [num_rows] * (-num_rows % 16)
        assert torch.equal(view.edge_index()[:, view.window_edges().perm.long()], view.to_edge_index())
        for name in ("edges_per_row", "loops_per_row", "last_loop"):
            assert torch.equal(getattr(view, name)(), getattr(other, name)())
        ours, theirs = view.row_walk(), other.row_walk()
        assert all(map(torch.equal, ours[3:7], theirs[3:7])) and ours.num_slots == theirs.num_slots
        assert torch.equal(view.row_edges().perm, other.row_edges().perm)
        assert view.statistics()["edges_per_entry"] == view.num_edges / max(view.num_entries, 1)
    assert windows.symmetric == natural.symmetric


@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite", "bipartite_tall"])
def test_copies_and_masks_without_loops(graph: str, device: torch.device) -> None:
    windows = build(graph, "degree", device)
    for view in (windows, windows.transpose()):
        w = view.walk()
        assert w.row_index is not None
        masks, order = masks_without_loops(w), w.row_index.tolist()
        window = torch.repeat_interleave(torch.diff(w.ptr).long()).tolist()
        entries = zip(window, w.column.tolist(), w.row_mask.tolist(), masks.tolist(), strict=True)
        cleared = 0
        for at, column, mask, without in entries:
            kept = [bit for bit in range(16) if mask >> bit & 1 and order[16 * at + bit] != column]
            assert [bit for bit in range(16) if without >> bit & 1] == kept
            cleared += mask != without
        assert (cleared > 0) is (int(view.loops_per_row().sum()) > 0)
        assert masks_without_loops(w) is masks  # computed once
        seen: dict[tuple[int, int], int] = {}
        found = copies(w)
        found = torch.zeros_like(w.column) if found is None else found
        for at, column, copy_ in zip(window, w.column.tolist(), found.tolist(), strict=True):
            assert copy_ == seen.get((at, column), 0)
            seen[at, column] = copy_ + 1


@pytest.mark.parametrize("graph", ["repeated", "self_loops", "ragged"])
def test_masks_without_loops_of_rows_as_numbered(
    graph: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = build(graph, "natural", device).walk()
    for loops in (0, 1):
        masks, found = row_masks(w, bool(loops))
        assert masks is w.row_mask and found == loops  # of a small graph
    monkeypatch.setattr("graphfuse.formats.walk._CLEARED", 0)
    monkeypatch.setattr("graphfuse.formats.walk._CHUNK", 5)
    masks, found = row_masks(w, True)
    assert masks is masks_without_loops(w) and found == 2
    rows, columns = decode(w.ptr, w.column, w.row_mask)
    left = decode(w.ptr, w.column, masks)
    assert torch.equal(torch.stack(left), torch.stack([rows, columns])[:, rows != columns])
    assert (masks is w.row_mask) is not bool((rows == columns).any())


@pytest.mark.parametrize(
    ("graph", "made"), [("repeated", 4), ("self_loops", 2), ("full", 1), ("symmetric", 1)]
)
def test_what_is_derived_is_one_where_directions_are_equal(graph: str, made: int) -> None:
    windows = build(graph, "natural")
    before, walks = windows.nbytes, (windows.walk(), windows.transpose().walk())
    found = [part for w in walks for part in (masks_without_loops(w), copies(w)) if part is not w.row_mask]
    of_bytes = {id(part): part.nbytes for part in found if part is not None}
    assert len(of_bytes) == made
    assert (walks[0].derived is walks[1].derived) is windows.symmetric is (graph in ("full", "symmetric"))
    assert windows.nbytes - before == sum(of_bytes.values())


def test_a_capture_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = build("self_loops", "degree").walk()
    on_gpu = w._replace(column=SimpleNamespace(is_cuda=True), derived={})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="the row masks without self-loops would be built during CUDA graph"
    ):
        masks_without_loops(on_gpu)
    with pytest.raises(
        RuntimeError, match="the counts of repeated edges, for dropout, would be built during"
    ):
        copies(on_gpu)
    prepared = masks_without_loops(w)
    assert masks_without_loops(w._replace(column=on_gpu.column)) is prepared


@pytest.mark.parametrize("graph", GRAPHS)
def test_natural_rows_take_nothing(graph: str) -> None:
    edge_index, size = GRAPHS[graph]()
    natural = RowWindows.from_edge_index(edge_index, size).packed_windows
    assert packing.header_of(natural)[0] == 1 and len(packing.unpack(natural).sections) == 10
    for method in reorder.METHODS:
        windows = RowWindows.from_edge_index(edge_index, size, method)
        if all(view.walk().row_index is None for view in (windows, windows.transpose())):
            assert torch.equal(windows.packed_windows, natural)
        else:
            assert method != "natural" and packing.header_of(windows.packed_windows)[0] == 2
    assert torch.equal(RowWindows.from_edge_index(edge_index, size, "natural").packed_windows, natural)


def test_directions_and_what_they_share() -> None:
    symmetric = build("symmetric", "bisection")
    forward, backward = symmetric.walk(), symmetric.transpose().walk()
    assert symmetric.symmetric and forward.row_index is not None and backward.row_index is not None
    assert forward.row_index.data_ptr() == backward.row_index.data_ptr()
    assert forward.column.data_ptr() == backward.column.data_ptr()
    bipartite = build("bipartite", "bisection")
    assert order_of(bipartite).numel() == 21 and order_of(bipartite.transpose()).numel() == 50
    # rows in order of their edges stay as they are, and take no memory
    one_way = RowWindows.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2), reorder="degree")
    assert one_way.walk().row_index is None and one_way.transpose().walk().row_index is not None
    assert packing.unpack(one_way.packed_windows).sections[5].numel() == 0
    one_way.validate()


def test_an_unknown_way_is_named() -> None:
    wanted = r"`reorder` must be one of auto, natural, degree, polish, bisection \(got 'best'\)"
    for call in (
        lambda: RowWindows.from_edge_index(torch.tensor([[0], [1]]), reorder="best"),
        lambda: ToRowWindows(reorder="best"),
    ):
        with pytest.raises(ValueError, match=wanted):
            call()


def through_torch_save(record: RowWindows) -> RowWindows:
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


TRAVELS = {
    "to": lambda record: record.to("cpu"),
    "clone": RowWindows.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda record: pickle.loads(pickle.dumps(record)),
    "torch.save": through_torch_save,
    "share_memory": lambda record: record.clone().share_memory_(),
}


@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("graph", ["bipartite", "symmetric"])
def test_copies_of_a_record_keep_its_order(graph: str, travel: str) -> None:
    record = build(graph, "bisection")
    for view in (record, record.transpose()):
        moved = TRAVELS[travel](view).validate()
        assert torch.equal(order_of(moved), order_of(view)) and moved.sizes == view.sizes
        assert torch.equal(moved.to_edge_index(), view.to_edge_index())
        assert torch.equal(moved.window_edges().perm, view.window_edges().perm)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_record() -> None:
    for graph in GRAPHS:
        for method in OTHERS:
            ours, theirs = build(graph, method, "cuda"), build(graph, method)
            assert torch.equal(ours.packed_windows.cpu(), theirs.packed_windows)
            for name in ("packed_rows", "packed_window_edges", "packed_row_edges"):
                assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name))
            assert torch.equal(ours.cpu().packed_windows, theirs.packed_windows)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("graph", ["repeated", "bipartite", "symmetric"])
def test_files(graph: str, lazy: bool, tmp_path: Path) -> None:
    windows, path = build(graph, "bisection"), tmp_path / "graph.safetensors"
    if lazy:
        _ = windows.packed_rows, windows.packed_window_edges, windows.packed_row_edges
    save_windows(path, windows.transpose())
    loaded = load_windows(path).validate()
    assert loaded.transposed and torch.equal(loaded.packed_windows, windows.packed_windows)
    assert loaded.nbytes == windows.nbytes and loaded.sizes == windows.transpose().sizes
    assert torch.equal(order_of(loaded.transpose()), order_of(windows))


def swap(row_index: Tensor) -> None:
    row_index[:2] = row_index[:2].flip(0)


MISTAKES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "twice": (lambda rows: rows[1].copy_(rows[0]), "`row_index` must hold each of the 20 rows once, and 20"),
    "negative": (lambda rows: rows[3].fill_(-1), "`row_index` must hold each of the 20 rows once"),
    "beyond": (lambda rows: rows[3].fill_(20), "`row_index` must hold each of the 20 rows once"),
    "far": (lambda rows: rows[3].fill_(2**31 - 1), "`row_index` must hold each of the 20 rows once"),
    "padding": (lambda rows: rows[-1].fill_(21), "`row_index` must hold .*, and 20 after them"),
    "padding is a row": (lambda rows: rows[-1].fill_(0), "`row_index` must hold .*, and 20 after them"),
    "others": (swap, "hold other edges than the"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("section", [5, 11])
def test_a_wrong_order_is_refused(section: int, mistake: str) -> None:
    windows = build("repeated", "bisection").clone()
    change, message = MISTAKES[mistake]
    change(packing.unpack(windows.packed_windows).sections[section])
    with pytest.raises(ValueError, match=message):
        windows.validate()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 1, r"windows: kind and sections must be \(1, 10\) \(got \(1, 12\)\)"),
        (0, 3, "the packed graph has schema 3, this graphfuse reads 1 and 2; build"),
        (23, 31, r"windows: `row_index` must have no entries, or 32 \(got \[31\]\)"),
        (35, 0, None),  # rows of the transpose as numbered: only the numbers tell
        (35, 1 << 20, "section 11 of the packed graph must lie in"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(place: int, value: int, message: str | None) -> None:
    windows = build("repeated", "degree")
    state = windows.__getstate__()
    state["windows"] = state["windows"].clone()
    state["windows"][place] = value
    blank = RowWindows.__new__(RowWindows)
    with pytest.raises(ValueError, match=message or "hold other edges than the"):
        blank.__setstate__(pickle.loads(pickle.dumps(state)))
        _ = blank.walk()
        blank.validate()


def test_a_second_schema_wants_an_order() -> None:
    state = build("repeated", "natural").__getstate__()
    state["windows"] = state["windows"].clone()
    state["windows"][0] = 2
    with pytest.raises(ValueError, match=r"windows: kind and sections must be \(1, 12\) \(got \(1, 10\)\)"):
        RowWindows.__new__(RowWindows).__setstate__(state)


def test_layers_find_what_the_transform_attached() -> None:
    edge_index, (num_nodes, _) = GRAPHS["ragged"]()
    clear_cache()
    data = ToRowWindows(edge_order=True, reorder="bisection")(
        Data(x=torch.randn(num_nodes, 4), edge_index=edge_index.clone())
    )
    packed = data.row_windows.packed_windows
    assert packing.is_ordered(packed)
    assert row_windows(data.edge_index, num_nodes, num_nodes).packed_windows is packed
    for moved in (
        copy.copy(data),
        copy.deepcopy(data),
        data.clone().to("cpu"),
        pickle.loads(pickle.dumps(data)),
    ):
        found = row_windows(moved.edge_index, num_nodes, num_nodes)
        assert torch.equal(found.packed_windows, packed)
    out = graphfuse.nn.GCNConv(4, 4)(data.x, data.edge_index)
    assert out.shape == (num_nodes, 4)


def test_of_two_records_of_equal_edges_the_latest_is_found() -> None:
    edge_index, size = GRAPHS["ragged"]()
    clear_cache()
    gc.collect()
    kept = [build("ragged", method) for method in ("natural", "degree", "bisection", "natural", "degree") * 3]
    for count in range(len(kept), 0, -1):
        found = row_windows(edge_index.clone(), *size)
        assert found.packed_windows is kept[count - 1].packed_windows
        del found, kept[count - 1]
