"""The windows are those of a definition in plain Python, on every hostile graph."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from graphfuse import RowWindows
from graphfuse.formats import build
from graphfuse.formats.walk import Walk
from graphfuse.testing import GRAPHS


def define_windows(edge_index: torch.Tensor, num_rows: int) -> list[list[tuple[int, int]]]:
    """For each window its (column, row mask) entries; the k-th copy of an edge in the k-th entry."""
    windows = []
    for first in range(0, num_rows, 16):
        copies: dict[tuple[int, int], int] = defaultdict(int)
        entries: dict[tuple[int, int], int] = defaultdict(int)
        for col, row in edge_index.t().tolist():
            if first <= row < first + 16:
                entries[col, copies[row, col]] |= 1 << (row - first)
                copies[row, col] += 1
        windows.append([(col, mask) for (col, _), mask in sorted(entries.items())])
    return windows


def read_windows(w: Walk) -> list[list[tuple[int, int]]]:
    masks = [mask & 0xFFFF for mask in w.row_mask.tolist()]
    entries = list(zip(w.column.tolist(), masks, strict=True))
    ptr = w.ptr.tolist()
    return [entries[begin:end] for begin, end in pairwise(ptr)]


@pytest.mark.parametrize("graph", GRAPHS)
def test_windows_match_definition(graph: str, device: torch.device, cut: bool) -> None:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst)).validate()
    assert windows.shape == (num_dst, num_src)
    assert windows.num_edges == edge_index.size(1)
    assert read_windows(windows.walk()) == define_windows(edge_index, num_dst)
    assert read_windows(windows.transpose().walk()) == define_windows(edge_index.flip(0), num_src)


@pytest.mark.parametrize("graph", GRAPHS)
def test_rows_match_definition(graph: str, device: torch.device, cut: bool) -> None:
    edge_index, size = GRAPHS[graph](device)
    record = RowWindows.from_edge_index(edge_index, size)
    for view, edges in ((record, edge_index), (record.transpose(), edge_index.flip(0))):
        w = view.row_walk()
        columns, ptr = w.column.tolist(), w.ptr.tolist()
        found = [columns[begin:end] for begin, end in pairwise(ptr)]
        wanted = [sorted(edges[0, edges[1] == row].tolist()) for row in range(w.num_rows)]
        assert found == wanted
        long = [row for row in range(w.num_rows) if ptr[row + 1] - ptr[row] > w.split]
        assert sorted(set(w.tasks[:, 0].tolist())) == long
        covered = sorted((begin, end) for _, begin, end, _ in w.tasks.tolist())
        assert sum(end - begin for begin, end in covered) == sum(ptr[row + 1] - ptr[row] for row in long)
        assert view.edges_per_row().tolist() == [len(row) for row in wanted]


@pytest.mark.parametrize("graph", GRAPHS)
def test_edge_order_leads_back_to_the_callers_edges(graph: str, device: torch.device) -> None:
    edge_index, size = GRAPHS[graph](device)
    record = RowWindows.from_edge_index(edge_index, size)
    for view, edges in ((record, edge_index), (record.transpose(), edge_index.flip(0))):
        in_order = view.to_edge_index()
        order = view.window_edges()
        assert torch.equal(edges[:, order.perm.long()], in_order)
        assert torch.equal(torch.diff(order.ptr), count_bits(view.walk().row_mask))
        rows = view.row_walk()
        by_row = torch.stack([rows.column.long(), torch.repeat_interleave(torch.diff(rows.ptr).long())])
        assert torch.equal(edges[:, view.row_edges().perm.long()], by_row)
        # copies of an edge keep the caller's order
        for perm, listed in ((order.perm, in_order), (view.row_edges().perm, by_row)):
            seen: dict[tuple[int, ...], int] = {}
            for position, edge in zip(perm.tolist(), listed.t().tolist(), strict=True):
                assert seen.get(tuple(edge), -1) < position
                seen[tuple(edge)] = position


def count_bits(row_mask: torch.Tensor) -> torch.Tensor:
    counts = [(mask & 0xFFFF).bit_count() for mask in row_mask.tolist()]
    return torch.tensor(counts, dtype=torch.int32, device=row_mask.device)


def test_a_repeated_edge_takes_the_next_entry_of_its_column() -> None:
    # rows 0 and 1 see column 5; row 0 sees it three times
    edge_index = torch.tensor([[5, 5, 5, 5], [0, 1, 0, 0]])
    w = RowWindows.from_edge_index(edge_index, (6, 2)).walk()
    assert w.column.tolist() == [5, 5, 5]
    assert w.row_mask.tolist() == [0b11, 0b01, 0b01]


def test_tasks_are_longest_first_and_slices_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_MIN_SLICE", 64)
    hub = torch.stack([torch.arange(1, 300), torch.zeros(299).long()])
    few = torch.tensor([[1, 2, 3], [40, 41, 80]])
    w = RowWindows.from_edge_index(torch.cat([hub, few], 1), (300, 300)).walk()
    length = (w.tasks[:, 2] - w.tasks[:, 1]).tolist()
    assert length == sorted(length, reverse=True)
    assert length[:5] == [64, 64, 64, 64, 43]  # ceil(299 / 5), rounded up to a step of 32
    assert w.num_slots == 5
    assert w.merges.tolist() == [[0, 0, 5, 0]]


@pytest.mark.parametrize(
    ("entries", "length"),
    [(0, 512), (901_120, 512), (1_081_344, 640), (1_341_115, 768), (2_684_592, 768), (3_300_000, 800)],
)
def test_slices_grow_with_the_graph(entries: int, length: int) -> None:
    assert build.slice_length(entries) == length


@pytest.mark.parametrize(
    ("edges", "cut", "length"),
    [(49_216, True, 128), (578_006, True, 160), (578_006, False, 512), (115_000_000, True, 27_232)],
)
def test_rows_are_cut_finer_where_windows_are_cut(edges: int, cut: bool, length: int) -> None:
    assert build.row_slice_length(edges, cut) == length


@pytest.mark.parametrize(
    ("edges", "rows", "cut", "split"),
    [(0, 0, False, 64), (10_556, 2708, False, 64), (88_648, 1000, False, 192), (491_722, 13_752, True, 96),
     (667_966, 10_312, True, 160), (30_000_000, 30_000, True, 2016), (115_000_000, 232_965, True, 3424)],
)  # fmt: skip
def test_rows_of_more_than_twice_the_mean_are_long(edges: int, rows: int, cut: bool, split: int) -> None:
    assert build.row_split(edges, rows, cut) == split


def test_a_record_cuts_its_rows_so() -> None:
    star = torch.stack([torch.arange(600), torch.zeros(600, dtype=torch.long)])
    windows = RowWindows.from_edge_index(star, (600, 1))
    rows = windows.walks(True, False).forward
    assert rows.split == 128 and rows.tasks[:, 1:3].tolist() == [
        [128 * i, min(128 * i + 128, 600)] for i in range(5)
    ]


@pytest.mark.parametrize("edges", [256, 257, 300, 511, 512, 2000])
def test_a_hub_has_only_so_many_slices(edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    monkeypatch.setattr(build, "_MOST", 8)
    hub = torch.stack([torch.arange(edges), torch.zeros(edges).long()])
    record = RowWindows.from_edge_index(hub, (edges, 20)).validate()
    for w in (record.walk(), record.row_walk()):
        slices = w.tasks[w.tasks[:, 3] >= 0]
        slices = slices[slices[:, 3].argsort()]
        assert w.num_slots == len(slices) <= 8
        assert slices[0, 1] == 0 and slices[-1, 2] == edges
        assert torch.equal(slices[1:, 1], slices[:-1, 2])  # one after the other, and none empty
        assert (slices[:, 1] < slices[:, 2]).all() and (slices[:-1, 2] % 32 == 0).all()


def test_symmetric_structure_shares_memory_but_not_edge_order() -> None:
    edge_index, size = GRAPHS["symmetric"]()
    record = RowWindows.from_edge_index(edge_index, size)
    assert record.symmetric
    assert record.walk().column.data_ptr() == record.transpose().walk().column.data_ptr()
    assert not torch.equal(record.window_edges().perm, record.transpose().window_edges().perm)
    one_way = RowWindows.from_edge_index(edge_index[:, :-1], size)
    assert not one_way.symmetric
    assert record.packed_windows.nbytes < one_way.packed_windows.nbytes


def test_loops_are_counted_and_the_last_one_found() -> None:
    edge_index = torch.tensor([[0, 1, 1, 20, 1, 20], [0, 1, 1, 20, 0, 3]])
    record = RowWindows.from_edge_index(edge_index, (21, 21))
    expected = torch.zeros(21, dtype=torch.int64)
    expected[0], expected[1], expected[20] = 1, 2, 1
    assert torch.equal(record.loops_per_row(), expected)
    assert torch.equal(record.transpose().loops_per_row(), expected)
    last = torch.full((21,), -1)
    last[0], last[1], last[20] = 0, 2, 3
    assert torch.equal(record.last_loop(), last)
    # more columns than rows: a column beyond the last row is no loop
    wide = RowWindows.from_edge_index(torch.tensor([[0, 30, 14], [0, 14, 14]]), (31, 15))
    assert wide.loops_per_row().tolist() == [1] + [0] * 13 + [1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs_round_trip(data: st.DataObject) -> None:
    num_src, num_dst = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = data.draw(st.lists(edge, max_size=60))
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    record = RowWindows.from_edge_index(edge_index, (num_src, num_dst)).validate()
    assert sorted(map(tuple, record.to_edge_index().t().tolist())) == sorted(edges)
    assert read_windows(record.walk()) == define_windows(edge_index, num_dst)
    assert torch.equal(record.transpose().transpose().to_edge_index(), record.to_edge_index())
    shuffled = edge_index[:, torch.randperm(len(edges))]
    again = RowWindows.from_edge_index(shuffled, (num_src, num_dst))
    assert torch.equal(
        record.packed_windows, again.packed_windows
    )  # the structure forgets the order of edges


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "blocks", "edges"), [("Cora", 7.5, 8.3), ("PubMed", 9.3, 7.7), ("github", 29.4, 8.3)]
)
def test_published_statistics(
    name: str, blocks: float, edges: float, data_root: Path, device: torch.device
) -> None:
    from torch_geometric.datasets import GitHub, Planetoid

    family = "musae-github" if name == "github" else "planetoid"
    with FileLock(data_root / f"{family}.lock"):  # PyG writes what another worker would read
        if name == "github":
            data = GitHub(str(data_root / family))[0]
        else:
            data = Planetoid(str(data_root / family), name)[0]
    windows = RowWindows.from_edge_index(data.edge_index.to(device), (data.num_nodes,) * 2).validate()
    assert f"blocks_per_window={blocks}, edges_per_block={edges}," in repr(windows)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
def test_cpu_and_gpu_build_the_same_integers(graph: str) -> None:
    edge_index, size = GRAPHS[graph]()
    records = [RowWindows.from_edge_index(edge_index.to(device), size) for device in ("cpu", "cuda")]
    assert records[0].fingerprint == records[1].fingerprint
    for part in ("packed_windows", "packed_rows", "packed_window_edges", "packed_row_edges"):
        cpu, gpu = (getattr(record, part).cpu() for record in records)
        assert torch.equal(cpu, gpu), part
