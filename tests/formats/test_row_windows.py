"""The record travels: devices, copies, pickles, files, worker processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from graphfuse import RowWindows, clear_cache
from graphfuse.formats import build, load_windows, save_windows
from graphfuse.formats import packed as packing
from graphfuse.testing import GRAPHS


@pytest.fixture
def record() -> RowWindows:
    edge_index, size = GRAPHS["repeated"]()
    return RowWindows.from_edge_index(edge_index, size)


def same(a: RowWindows, b: RowWindows) -> bool:
    return (
        a.shape == b.shape
        and a.fingerprint == b.fingerprint
        and torch.equal(a.packed_windows.cpu(), b.packed_windows.cpu())
        and torch.equal(a.row_edges().perm.cpu(), b.row_edges().perm.cpu())
    )


def saved_and_loaded(record: RowWindows) -> RowWindows:
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)  # importing graphfuse registers the class as safe
    assert isinstance(loaded, RowWindows)
    return loaded


@pytest.mark.parametrize(
    "travel",
    [
        lambda record: record.cpu(),
        lambda record: record.clone(),
        lambda record: record.detach(),
        lambda record: record.contiguous(),
        lambda record: record.share_memory_(),
        lambda record: record.to("cpu", non_blocking=True),
        lambda record: record.to(device="cpu", non_blocking=True),
        lambda record: pickle.loads(pickle.dumps(record)),
        copy.deepcopy,
        saved_and_loaded,
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_copies_are_equal_and_work(record: RowWindows, travel, lazy: bool) -> None:
    if lazy:
        _ = record.packed_rows, record.packed_row_edges
    moved = travel(record)
    assert same(moved.validate(), record)
    assert same(travel(record.transpose()), record.transpose())


@pytest.mark.gpu
def test_to_the_gpu_and_back(record: RowWindows) -> None:
    on_gpu = record.pin_memory().to("cuda", non_blocking=True)
    assert on_gpu.device == torch.device("cuda:0")
    assert on_gpu.to("cuda") is on_gpu
    assert same(on_gpu.validate(), record)  # edge order is built on the GPU, from the edge list on the CPU
    assert same(record.cuda(), record)
    assert same(on_gpu.cpu(), record)
    on_gpu.record_stream(torch.cuda.current_stream())


def test_clone_shares_nothing(record: RowWindows) -> None:
    edge_index = record.edge_index()
    cloned = record.clone()
    assert cloned.packed_windows.data_ptr() != record.packed_windows.data_ptr()
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 20
    assert cloned.window_edges() is not None
    with pytest.raises(RuntimeError, match="was modified since"):
        record.window_edges()


@pytest.mark.parametrize("reorder", ["natural", "degree"])
@pytest.mark.parametrize("kind", ["edges", "sparse", "file", "moved"])
def test_nothing_that_is_kept_is_an_inference_tensor(reorder: str, kind: str, tmp_path: Path) -> None:
    edge_index, size = GRAPHS["repeated"]()
    with torch.inference_mode():
        given = edge_index
        if kind == "sparse":
            given = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edge_index.size(1)), size)
        record = RowWindows.from_edge_index(given, size, reorder=reorder)
        if kind == "file":
            save_windows(tmp_path / "graph.safetensors", record)
            record = load_windows(tmp_path / "graph.safetensors")
        elif kind == "moved":
            record = record.clone()
        for view in (record, record.transpose()):
            parts = [view.packed_windows, view.packed_rows, view.packed_window_edges, view.packed_row_edges]
            parts += [view.walk().column, view.row_walk().column, view.row_edges().perm, view.walk().ptr]
            _ = view.edges_per_row(), view.loops_per_row(), view.last_loop()  # copies of what is kept
            view.memo("one", lambda: torch.ones(1))
            parts += [kept for kept in view._structure.memo.values() if isinstance(kept, Tensor)]
            assert not any(part.is_inference() for part in parts) and len(parts) >= 12
    assert not record.edge_index().is_inference()


def test_what_a_record_counts_is_returned_as_a_copy(record: RowWindows) -> None:
    for method in (record.edges_per_row, record.loops_per_row, record.last_loop):
        wanted = method().clone()
        method().add_(1)
        assert torch.equal(method(), wanted)
    record.statistics()["windows"] = 0
    assert record.statistics()["windows"] > 0


def test_data_moves_copies_and_batches_the_record(record: RowWindows) -> None:
    data = Data(x=torch.ones(20, 3), edge_index=record.edge_index(), row_windows=record)
    for moved in (data.clone(), data.to("cpu"), copy.copy(data), copy.deepcopy(data), data.contiguous()):
        assert same(moved.row_windows, record)
    deep = copy.deepcopy(data)
    assert deep.row_windows.edge_index().data_ptr() == deep.edge_index.data_ptr()  # still one edge list
    batch = Batch.from_data_list([data, data])
    assert isinstance(batch.row_windows, list)  # left alone: the docs say to window the batch
    assert batch.edge_index.size(1) == 2 * record.num_edges
    assert data.num_nodes == 20 and data.num_edges == record.num_edges


def test_repr_and_bytes(record: RowWindows) -> None:
    text = repr(record)
    for part in ("num_dst=20", "num_edges=", "windows=2", "blocks_per_window=", "nbytes=", "device='cpu'"):
        assert part in text
    before = record.nbytes
    _ = record.packed_rows
    assert record.nbytes > before


def test_an_unknown_packed_tensor_is_read_from_its_header(record: RowWindows) -> None:
    copied = record.packed_windows.clone()
    known = packing.unpack(copied)
    assert known.scalars == packing.unpack(record.packed_windows).scalars
    assert all(map(torch.equal, known.sections, packing.unpack(record.packed_windows).sections))


def test_views_do_not_keep_a_record_alive() -> None:
    import gc
    import weakref

    edge_index, size = GRAPHS["hub"]()
    record = RowWindows.from_edge_index(edge_index, size)
    record.walks(rows=True, with_edges=True)  # what an op keeps for backward; it holds the packed tensors
    record.walks(rows=False, with_edges=False)
    _ = record.walk()
    gone = weakref.ref(record.packed_windows)
    gc.disable()  # reference counts alone must free it: on a GPU, memory cannot wait for the collector
    try:
        del record
        assert gone() is None
    finally:
        gc.enable()


def corrupt(record: RowWindows, section: int, index: int, value: int) -> RowWindows:
    broken = record.clone()
    packing.unpack(broken.packed_windows).sections[section].view(-1)[index] = value
    return broken


@pytest.mark.parametrize(
    ("section", "index", "value", "message"),
    [
        (0, -1, 3, "`ptr` must run from 0"),
        (0, 1, -2, "`ptr` must not decrease"),
        (3, 0, 99, r"`column` must lie in \[0, 20\)"),
        (3, 0, 19, "must be sorted"),
        (4, 0, 0, "`row_mask` must not be empty"),
        (1, 0, 7, "`tasks` must cover"),
        (1, 1, 1, "`tasks` must cover"),
    ],
)
def test_validate_names_what_is_wrong(
    record: RowWindows, section: int, index: int, value: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(record, section, index, value).validate()


@pytest.mark.parametrize(
    ("section", "index", "value", "message"),
    [
        (1, 1, 1, "rows: `tasks` must cover the edges of every row of more than 32"),
        (1, 7, -1, "rows: `tasks` must cover"),
        (2, 0, 1, "rows: `tasks` must cover"),
        (2, 0, -1, "rows: `merges` must list the slots"),
        (2, 0, 100, "rows: `merges` must list the slots"),
        (2, 1, 1, "rows: `merges` must list the slots"),
        (2, 2, 3, "rows: `merges` must list the slots"),
        (2, 2, 2**30, "rows: `merges` must list the slots"),
    ],
)
def test_validate_looks_at_slices_of_rows(
    section: int, index: int, value: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    record = RowWindows.from_edge_index(*GRAPHS["hub"]())
    assert record.row_walk().num_slots == 4
    broken = record.clone()
    packing.unpack(broken.packed_rows).sections[section].view(-1)[index] = value
    with pytest.raises(ValueError, match=message):
        broken.validate()


@pytest.mark.parametrize("shortest", [512, 32])
def test_records_that_list_no_long_rows_are_read(shortest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those built before long rows were tasks: of rows that are not cut there is none."""
    monkeypatch.setattr(build, "_MIN_SLICE", shortest)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_LONG_ROW", 1 << 20)
        record = RowWindows.from_edge_index(*GRAPHS["hub"]())
        assert record.row_walk().tasks.size(0) == record.row_walk().num_slots == (0 if shortest > 99 else 4)
    state = pickle.dumps(record)
    del record
    clear_cache()
    read = pickle.loads(state).validate()
    assert read.row_walk().split == shortest and read.row_walk().tasks.size(0) == read.row_walk().num_slots


def test_validate_compares_both_directions() -> None:
    edge_index, size = GRAPHS["ragged"]()
    record = RowWindows.from_edge_index(edge_index, size)
    broken = record.clone()
    column = packing.unpack(broken.packed_windows).sections[8]  # of the transpose
    column[-1] = (int(column[-1]) + 1) % 33 if int(column[-1]) < 32 else 31
    with pytest.raises(ValueError, match=r"hold other edges|must be sorted"):
        broken.validate()


def test_a_foreign_schema_is_refused(record: RowWindows) -> None:
    other = record.packed_windows.clone()
    other[0] = 99
    with pytest.raises(ValueError, match="schema 99"):
        packing.unpack(other)


def unpickled(name: str, place: int, value: int) -> RowWindows:
    """A record whose packed tensor ``name`` came with another number in its header."""
    edge_index, size = GRAPHS["repeated"]()
    record = RowWindows.from_edge_index(edge_index, size)
    _ = record.packed_rows, record.packed_window_edges, record.packed_row_edges
    state = record.__getstate__()
    state[name] = state[name].clone()
    state[name][place] = value
    blank = RowWindows.__new__(RowWindows)
    blank.__setstate__(pickle.loads(pickle.dumps(state)))
    return blank


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("windows", 1, 7, r"the header must name a kind of \{1: 'windows', .*\} \(got 7\)"),
        ("windows", 1, packing.ROWS, r"rows: kind and sections must be \(2, 8\) \(got \(2, 10\)\)"),
        ("windows", 2, 4000, r"windows: `ptr` must have 251 entries \(got 3\)"),
        ("windows", 3, 4000, r"transposed windows: `ptr` must have 251 entries"),
        ("windows", 3, -5, r"windows: the header must hold sizes of 0 or more \(got \[20, -5, "),
        ("windows", 4, 1 << 20, r"windows: an entry must hold 1 to 16 edges \(got 1048576 edges in"),
        ("windows", 5, 2, r"windows: `symmetric` must be 0, or 1 for a square matrix"),
        ("windows", 6, 3, r"windows: `split` must be a positive multiple of"),
        ("windows", 8, 9, r"windows: there must be 0 slots \(got 9\)"),
        ("windows", 9, 9, r"transposed windows: there must be 0 slots \(got 9\)"),
        ("windows", 12, 1, r"section 0 .* must lie in \[64, \d+\] \(got 3 numbers from 32\)"),
        ("windows", 18, 1 << 20, r"section 3 .* from 33554432\); build the windows again"),
        ("windows", 19, 1 << 20, r"section 3 of the packed graph must lie in .* \(got 1048576 numbers"),
        ("windows", 19, -1, r"section 3 of the packed graph must lie in .* \(got -1 numbers"),
        ("windows", 33, 8, r"section 10 of the packed graph must lie in .* \(got 8 numbers from 0\)"),
        ("rows", 2, 21, r"rows: `ptr` must have 22 entries \(got 21\)"),
        ("rows", 4, 9, r"rows: there must be 9 edges"),
        ("rows", 8, 1, r"rows: there must be 0 slots \(got 1\)"),
        ("window_edges", 4, 9, r"window edges: there must be 9 edges"),
        ("row_edges", 4, 9, r"row edges: there must be 9 edges"),
        ("row_edges", 15, 1 << 30, r"section 1 of the packed graph must lie in"),
    ],
)
@pytest.mark.parametrize("move", [False, True])
def test_a_header_that_does_not_fit_is_refused(
    name: str, place: int, value: int, message: str, move: bool
) -> None:
    with pytest.raises(ValueError, match=message):
        record = unpickled(name, place, value)
        record = record.clone() if move else record  # takes the header along
        walk = record.row_walk() if name == "rows" else record.walk()
        assert walk and record.window_edges() and record.row_edges()


@pytest.mark.parametrize("change", [Tensor.long, lambda x: x[:40], lambda x: x[None], lambda x: x[::2]])
def test_what_is_no_packed_tensor_is_refused(record: RowWindows, change: Callable[[Tensor], Tensor]) -> None:
    state = record.__getstate__()
    state["windows"] = change(state["windows"])
    with pytest.raises(ValueError, match=r"a packed graph must be int32\[64 or more\] \(got torch\.int"):
        RowWindows.__new__(RowWindows).__setstate__(state)


@pytest.mark.parametrize("graph", GRAPHS)
def test_headers_of_every_graph_fit(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shortest in (build._MIN_SLICE, 32):  # the other cuts windows and rows
        monkeypatch.setattr(build, "_MIN_SLICE", shortest)
        clear_cache()
        record = RowWindows.from_edge_index(*GRAPHS[graph]())
        _ = record.packed_rows, record.packed_row_edges
        copied = pickle.loads(pickle.dumps(record))
        assert same(copied, record) and copied.row_walk().num_entries == record.num_edges
