"""What is built for small graphs on a GPU is to the bit what is built for all others."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse import RowWindows
from graphfuse.formats import packed as packing
from graphfuse.formats import quick
from graphfuse.formats.fingerprint import MIX_1, MIX_2, POSITION, SOURCE
from graphfuse.formats.walk import copies
from graphfuse.testing import GRAPHS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Hypothesis takes no fixture
PARTS = ("packed_windows", "packed_rows", "packed_window_edges", "packed_row_edges")


def built(
    edge_index: torch.Tensor, size: tuple[int, int], small: bool
) -> tuple[RowWindows, list[torch.Tensor]]:
    """A record with all its parts, and what else is a function of the edges, by the way that is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "suits", lambda *_: small)
        record = RowWindows.from_edge_index(edge_index.clone(), size)
        found = [getattr(record, name) for name in PARTS]
        for view in (record, record.transpose()):
            found += [view.edges_per_row(), view.loops_per_row(), view.last_loop()]
            for walk in (view.walk(), view.row_walk()):
                counted = copies(walk)
                found.append(torch.zeros_like(walk.column) if counted is None else counted)
    return record, found


def same(edge_index: torch.Tensor, num_src: int, num_dst: int) -> bool:
    """Compares both builds; returns whether the quick one takes the graph."""
    wanted, others = built(edge_index, (num_src, num_dst), False)
    if edge_index.size(1) == 0 or min(num_src, num_dst) == 0:
        return False
    mine, ours = built(edge_index, (num_src, num_dst), True)
    assert mine.fingerprint == wanted.fingerprint == quick.fingerprint(edge_index)
    assert mine.symmetric is wanted.symmetric
    for one, other in zip(ours, others, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    found = quick.build_windows(edge_index, num_src, num_dst)
    assert found is None or found.fingerprint == wanted.fingerprint
    return found is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_both_builds_agree(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    edge_index, size = GRAPHS[graph](device)
    taken = same(edge_index.to(dtype), *size)
    columns = edge_index.unique(dim=1).size(1) if edge_index.numel() else 0
    assert taken == (edge_index.size(1) > 0 and columns == edge_index.size(1))  # all but with repeated edges


@pytest.mark.parametrize("square", [False, True], ids=["bipartite", "symmetric"])
def test_long_rows_are_tasks(square: bool, device: torch.device) -> None:
    # 65 edges are long, 64 are not; longest first, of equal ones the first
    dense = torch.zeros(200, 200, dtype=torch.bool)
    for row, edges in ((3, 65), (17, 64), (40, 90), (41, 65), (199, 90), (100, 200)):
        dense[row, 200 - edges :] = True
    dense[:, 150] = True
    if square:
        dense |= dense.t().clone()
    receivers, sources = dense.nonzero().t().to(device)
    edge_index = torch.stack([sources, receivers])
    assert same(edge_index, 200, 200)
    record = built(edge_index, (200, 200), True)[0]
    assert record.symmetric is square
    for view, edges in ((record, dense.sum(1)), (record.transpose(), dense.sum(0))):
        rows, tasks = view.row_walk(), view.row_walk().tasks.long().cpu()
        long = sorted((-int(count), row) for row, count in enumerate(edges) if count > rows.split)
        assert rows.split == 64 and len(long) > 0 and tasks[:, 3].tolist() == [-1] * len(long)
        assert [(-int(end - begin), int(row)) for row, begin, end, _ in tasks] == long
        assert torch.equal(torch.stack([rows.ptr.cpu()[tasks[:, 0] + i] for i in (0, 1)], 1), tasks[:, 1:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "_RANKED_ROWS", 199)  # more rows are not compared with each other
        assert quick.build_windows(edge_index, 200, 200) is None


@pytest.mark.parametrize("small", [False, True])
def test_sizes_of_numpy_become_pythons(small: bool, device: torch.device) -> None:
    edge_index, size = GRAPHS["bipartite"](device)
    record, parts = built(edge_index, tuple(map(np.int64, size)), small)
    assert all(map(torch.equal, parts, built(edge_index, size, small)[1]))
    scalars = packing.unpack(record.packed_windows).scalars
    assert {type(number) for number in (*record.sizes, *record.shape, *scalars)} == {int}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 90), st.integers(1, 90), st.lists(st.integers(0, 2**40), max_size=300, unique=True))
def test_random_graphs(num_src: int, num_dst: int, numbers: list[int]) -> None:
    places = sorted({number % (num_src * num_dst) for number in numbers}, key=hash)
    place = torch.tensor(places, dtype=torch.int64, device=DEVICE)
    assert same(torch.stack([place % num_src, place // num_src]), num_src, num_dst) == bool(places)


def test_what_is_left_to_the_other_build(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, edges, nodes = torch.empty(2, 0, device=device), quick.MOST_EDGES, quick.MOST_NODES
    with monkeypatch.context() as patch:
        patch.setattr(quick, "runs_on", lambda _: True)
        assert quick.suits(graph, edges, nodes - 5, 5) and quick.suits(graph, 1, 1, nodes - 1)
        many = [(edges + 1, 5, 5), (5, nodes - 4, 5), (5, 5, nodes - 4)]
        for sizes in (*many, (0, 5, 5), (5, 0, 5), (5, 5, 0)):
            assert not quick.suits(graph, *sizes), sizes
    assert quick.suits(graph, 5, 5, 5) is quick.runs_on(device)
    repeated = torch.tensor([[0, 1, 0], [2, 2, 2]], device=device)
    assert quick.build_windows(repeated, 3, 3) is None
    for wrong in ([[0, 3], [1, 1]], [[0, -1], [1, 1]], [[0, 1], [1, 3]], [[0, 1], [-9, 1]]):
        edges = torch.tensor(wrong, device=device)
        assert quick.build_windows(edges, 3, 3) is None
        monkeypatch.setattr(quick, "suits", lambda *_: True)
        with pytest.raises(IndexError):
            RowWindows.from_edge_index(edges, (3, 3))
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    hub, size = GRAPHS["hub"](device)
    assert quick.build_windows(hub, *size) is None  # a window of 99 entries is cut into slices
    record = RowWindows.from_edge_index(hub, size)
    assert quick.count_rows(record.packed_windows) is None
    assert record.row_walk().num_slots > 0 and same(hub, *size) is False


def test_edges_in_any_memory(device: torch.device) -> None:
    edge_index, size = GRAPHS["ragged"](device)
    wanted = RowWindows.from_edge_index(edge_index, size)
    pairs = edge_index.t().contiguous().t()
    wider = torch.cat([edge_index.new_full((2, 3), 9), edge_index], 1)[:, 3:]
    for edges in (pairs, wider, edge_index.to(torch.uint8), edge_index.int().t().contiguous().t()):
        found = quick.build_windows(edges, *size)
        assert found is not None and found.fingerprint == wanted.fingerprint == quick.fingerprint(edges)
        assert torch.equal(found.windows, wanted.packed_windows)
    far = torch.tensor([[0, -(2**62)], [2**40, 2**63 - 1]], device=device)
    assert quick.fingerprint(far) == int(hash_of(far)) and quick.build_windows(far, 3, 3) is None


def hash_of(edge_index: torch.Tensor) -> int:
    """The definition of the fingerprint, in Python's integers."""
    source, position, mix_1, mix_2 = (n % 2**64 for n in (SOURCE, POSITION, MIX_1, MIX_2))
    total = 0
    for place, (src, dst) in enumerate(edge_index.t().tolist(), 1):
        h = (place * position + src * source + dst) * mix_1 % 2**64
        h = h - 2**64 if h >= 2**63 else h
        h = (h ^ (h >> 29)) * mix_2 % 2**64
        h = h - 2**64 if h >= 2**63 else h
        total += h ^ (h >> 32)
    return (total + 2**63) % 2**64 - 2**63


def test_edited_edges_have_no_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "suits", lambda *_: True)
    edge_index, size = GRAPHS["ragged"](device)
    swapped, wrong = edge_index.clone(), edge_index.clone()
    swapped[:, :2] = swapped[:, :2].flip(1)
    wrong[0, 5] = 10**9
    for edited in (swapped, wrong):
        edges = edge_index.clone()
        record = RowWindows.from_edge_index(edges, size)
        edges.copy_(edited)
        with pytest.raises(RuntimeError, match="modified since"):
            record.window_edges()


def test_windows_too_many_to_rank_are_sorted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_RANKED", 2)
    for graph in ("ragged", "bipartite", "hub"):
        edge_index, size = GRAPHS[graph](device)
        assert same(edge_index.unique(dim=1).flip(1), *size)


def test_a_crowded_window_is_left_to_the_other_build(device: torch.device) -> None:
    side = quick._kernels().CROWD // 16 + 1
    src, dst = torch.arange(16 * side, device=device) % side, torch.arange(16 * side, device=device) // side
    assert quick._sort(torch.stack([src, dst]), side, 16, False) is None  # nor is it sorted, for ever


def test_no_number_of_a_header_is_specialised() -> None:
    for number in quick._lay_kernels().headed((0, 1, 16, 2**26)):
        assert number % 16 == 2 and number >> 4 in (0, 1, 16, 2**26) and number < 2**31


@pytest.mark.gpu
def test_other_numbers_compile_nothing() -> None:
    kernels, compiled = quick._kernels(), set[int]()
    for num_nodes in (17, 32, 301, 640, 4096, 5000):
        edge_index = torch.arange(2 * num_nodes - 2, device="cuda").view(2, -1) % num_nodes
        record = RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes))
        _ = record.packed_window_edges, record.edges_per_row()
        compiled.add(len(kernels._COMPILED))
    assert len(compiled) <= 2, compiled  # edges whose number is odd start elsewhere


class Counter(TorchDispatchMode):
    """Counts operations that launch: all but views and those that look at no values; kernels too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        kind = type(quick._lay_kernels().lay_kernel)
        run = kind.run

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(kernel.__name__)
            with torch.utils._python_dispatch._disable_current_modes():  # of the interpreter
                return run(kernel, *args, **kwargs)

        monkeypatch.setattr(kind, "run", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        views = ("view", "slice", "select", "detach", "alias", "set_", "narrow", "unbind", "unsqueeze")
        if name not in (*views, "empty", "new_empty", "empty_like"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_few_operations(device: torch.device) -> None:
    """A guard: each costs the host some microseconds, and a mini-batch pays them every time."""
    counts = []
    for parts in (PARTS[:1], PARTS[:2], PARTS):
        edge_index = torch.arange(600, device=device).view(2, 300) % 301  # no edge is repeated
        with pytest.MonkeyPatch.context() as patch, Counter(patch) as counter:
            patch.setattr(quick, "suits", lambda *_: True)
            record = RowWindows.from_edge_index(edge_index, (301, 301))
            for name in parts:
                getattr(record, name)
            record.edges_per_row(), record.loops_per_row()
        counts.append(len(counter.names))
    most = [count + 2 * (device.type == "cuda") for count in (10, 10, 17)]  # copies to the host
    assert all(count <= limit for count, limit in zip(counts, most, strict=True)), (counts, counter.names)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
def test_gpu_and_cpu_agree(graph: str) -> None:
    edge_index, size = GRAPHS[graph]("cpu")
    compare_devices(edge_index, size)


def compare_devices(edge_index: torch.Tensor, size: tuple[int, int]) -> None:
    mine, other = (RowWindows.from_edge_index(edge_index.to(device), size) for device in ("cpu", "cuda"))
    assert mine.fingerprint == other.fingerprint
    for name in PARTS:
        assert torch.equal(getattr(mine, name), getattr(other, name).cpu()), name
    for one, two in ((mine, other), (mine.transpose(), other.transpose())):
        assert torch.equal(one.edges_per_row(), two.edges_per_row().cpu())
        assert torch.equal(one.loops_per_row(), two.loops_per_row().cpu())
        assert torch.equal(one.last_loop(), two.last_loop().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("num_edges", [1, 511, 512, 9_492, 50_000, 200_000, quick.MOST_EDGES])
@pytest.mark.parametrize("shape", ["batch", "bipartite", "symmetric", "short", "loops"])
def test_gpu_and_cpu_agree_on_batches(shape: str, num_edges: int) -> None:
    generator = torch.Generator().manual_seed(num_edges)

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, (num_edges,), generator=generator)

    num_src = num_dst = num_edges // 2 + 40
    src, dst = draw(num_src), draw(num_dst)
    if shape == "batch":  # receivers come first, the rest has no in-edges
        dst = draw(num_dst // 10)
    elif shape == "bipartite":
        num_dst = num_edges // 20 + 3
        dst = draw(num_dst)
    elif shape == "symmetric":
        half = num_edges - num_edges // 2
        src, dst = torch.cat([src[:half], dst[:half]]), torch.cat([dst[:half], src[:half]])
    elif shape == "loops":
        dst = torch.where(draw(3) == 0, src, dst)
    edges = torch.unique(torch.stack([src, dst]), dim=1)[:, : quick.MOST_EDGES]
    edges = edges[:, torch.randperm(edges.size(1), generator=generator)]
    compare_devices(edges.int() if shape == "short" else edges, (num_src, num_dst))
    cuda = edges.cuda()
    taken = quick.suits(cuda, edges.size(1), num_src, num_dst)
    first, second = (quick.build_windows(cuda, num_src, num_dst) for _ in range(2))
    assert taken and first is not None and second is not None and torch.equal(first.windows, second.windows)


@pytest.mark.gpu
def test_one_synchronisation() -> None:
    edge_index = torch.arange(60_000, device="cuda").view(2, 30_000) % 30_011
    for _ in range(2):  # the first compiles
        edges = edge_index.clone()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                record = RowWindows.from_edge_index(edges, (30_011, 30_011))
                _ = record.edges_per_row(), record.loops_per_row(), copies(record.row_walk())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    assert len(waits) == 1, waits
