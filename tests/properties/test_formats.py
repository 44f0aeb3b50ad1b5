"""The windows of random graphs against the dense matrix, through every copy, and against any change."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphfuse import RowWindows
from graphfuse.formats import load_windows, save_windows
from graphfuse.formats import packed as packing
from graphfuse.formats.reorder import METHODS
from graphfuse.formats.walk import copies, to_edge_index
from tests.properties import DEVICE, Graph, examples, graphs, on, permutation, seeds

PARTS = ("packed_windows", "packed_rows", "packed_window_edges", "packed_row_edges")
some_graphs = graphs(nodes=40, edges=120)
orders = st.sampled_from(METHODS)


def windows_of(graph: Graph, method: str = "natural") -> RowWindows:
    return RowWindows.from_edge_index(graph.edge_index, graph.size, method)


def complete(graph: Graph, method: str = "natural") -> RowWindows:
    windows = windows_of(graph, method)
    assert all(getattr(windows, part).dtype == torch.int32 for part in PARTS)
    return windows


@examples(60)
@given(graph=some_graphs, slices=st.booleans(), method=orders)
def test_both_walks_are_the_matrix(graph: Graph, slices: bool, method: str) -> None:
    with on("kernels", slices):
        windows = windows_of(graph, method).validate()
        wanted = graph.dense()
        for view, dense in ((windows, wanted), (windows.transpose(), wanted.t())):
            num_dst, num_src = dense.shape
            assert view.shape == (num_dst, num_src) and view.num_edges == graph.num_edges
            for w in (view.walk(), view.row_walk()):
                assert torch.equal(Graph(to_edge_index(w), num_src, num_dst).dense(), dense)
                covered = torch.zeros(w.num_entries, dtype=torch.int64, device=DEVICE)
                for _, begin, end, _ in w.tasks.tolist():
                    covered[begin:end] += 1
                assert covered.eq(1).all() or w.height == 1
            assert torch.equal(view.edges_per_row(), dense.sum(1))
            loops = torch.zeros(num_dst, dtype=torch.int64, device=DEVICE)
            loops[: min(dense.shape)] = dense.diagonal()
            assert torch.equal(view.loops_per_row(), loops)
        assert windows.symmetric is (graph.num_src == graph.num_dst and torch.equal(wanted, wanted.t()))
        twice = windows.transpose().transpose()
        assert twice.walk() is windows.walk() and twice.shape == windows.shape


@examples(60)
@given(graph=some_graphs, method=orders)
def test_edge_orders_lead_to_the_callers_edges(graph: Graph, method: str) -> None:
    windows, number = windows_of(graph, method), torch.arange(graph.num_edges, device=DEVICE)
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    copy_of = torch.zeros(graph.num_edges, dtype=torch.int64, device=DEVICE)
    for place, edge in enumerate(map(tuple, graph.edge_index.t().tolist())):
        copy_of[place], seen[edge] = seen[edge], seen[edge] + 1
    for view, edges in ((windows, graph.edge_index), (windows.transpose(), graph.edge_index.flip(0))):
        for walk, order in ((view.walk(), view.window_edges()), (view.row_walk(), view.row_edges())):
            perm = order.perm.long()
            assert torch.equal(perm.sort().values, number)
            assert torch.equal(edges[:, perm], to_edge_index(walk))
            # dropout tells the copies of an edge apart, the same way in both walks and directions
            counted = copies(walk)
            if counted is None:
                assert not copy_of.any()
                continue
            bits = torch.ones_like(walk.column) if order.ptr is None else torch.diff(order.ptr)
            assert torch.equal(copy_of[perm], torch.repeat_interleave(counted.long(), bits.long()))
    last = torch.full((graph.num_dst,), -1, device=DEVICE)
    for place, (src, dst) in enumerate(graph.edge_index.t().tolist()):
        last[dst] = place if src == dst else last[dst]
    assert torch.equal(windows.last_loop(), last)


@examples(60)
@given(graph=some_graphs, seed=seeds, method=orders)
def test_the_structure_forgets_the_order_of_edges(graph: Graph, seed: int, method: str) -> None:
    windows = windows_of(graph, method)
    other = windows_of(graph.in_order(permutation(graph.num_edges, seed)), method)
    for part in ("packed_windows", "packed_rows"):
        assert torch.equal(getattr(windows, part), getattr(other, part))
    size = (graph.num_dst, graph.num_src)
    flipped = RowWindows.from_edge_index(graph.edge_index.flip(0), size, method)
    for ours, theirs in ((windows.transpose(), flipped), (windows, flipped.transpose())):
        for one, two in ((ours.walk(), theirs.walk()), (ours.row_walk(), theirs.row_walk())):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if isinstance(a, Tensor))


@examples(20)
@given(
    graph=some_graphs,
    dtype=st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32]),
    method=orders,
)
def test_integers_of_any_size_and_copies_of_any_kind(graph: Graph, dtype: torch.dtype, method: str) -> None:
    windows = complete(graph, method)
    other = RowWindows.from_edge_index(graph.edge_index.to(dtype), graph.size, method)
    assert other.fingerprint == windows.fingerprint
    travelled = [
        windows.clone(),
        copy.copy(windows),
        copy.deepcopy(windows),
        windows.to("cpu").to(DEVICE),
        other,
    ]
    travelled += [pickle.loads(pickle.dumps(windows))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.safetensors"
        save_windows(path, windows)
        travelled += [
            load_windows(path).to(DEVICE),
            load_windows(path, edge_index=graph.edge_index).to(DEVICE),
        ]
        save_windows(path, windows.transpose(), edge_list=False)
        travelled += [load_windows(path, DEVICE, graph.edge_index).transpose()]
    for copied in travelled:
        assert all(torch.equal(getattr(copied, part), getattr(windows, part)) for part in PARTS)
        assert torch.equal(copied.edge_index().long(), graph.edge_index)
        assert copied.sizes == windows.sizes and copied.validate() is copied


@examples(60)
@given(graph=graphs(nodes=20, edges=40), data=st.data())
def test_validate_misses_no_change(graph: Graph, data: st.DataObject) -> None:
    windows = complete(graph).clone()
    packed = getattr(windows, data.draw(st.sampled_from(PARTS)))
    sections = [part for part in packing.unpack(packed).sections if part.numel()]
    if not sections:
        return
    section = data.draw(st.sampled_from(sections))
    place = data.draw(st.integers(0, section.numel() - 1))
    before = int(section[place])
    number = data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(before - 2, before + 2))
    section[place] = min(max(number, -(2**31)), 2**31 - 1)
    changed = int(section[place]) != before
    odd_mask = windows.num_entries % 2 or windows.transpose().num_entries % 2
    try:
        windows.validate()
    except ValueError as error:
        assert changed and "inconsistent row windows" in str(error)
    else:
        # two masks are one number, and the last may have no partner
        assert not changed or (odd_mask and (before ^ int(section[place])) & 0xFFFF == 0)


@examples(20)
@given(data=st.data(), size=st.sampled_from([16, 32]))
def test_blocks_are_dense(data: st.DataObject, size: int) -> None:
    block = st.tuples(st.integers(0, 2), st.integers(0, 3))
    drawn = torch.tensor(data.draw(st.lists(block, max_size=4)), dtype=torch.int64)
    blocks = drawn.view(-1, 2).t().to(DEVICE)
    windows = RowWindows.from_blocks(blocks[0], blocks[1], size, (3 * size, 4 * size)).validate()
    one = torch.ones((), dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    counts.index_put_(tuple(blocks), one, accumulate=True)
    wanted = torch.kron(counts, torch.ones(size, size, dtype=torch.int64, device=DEVICE))
    assert torch.equal(Graph(windows.to_edge_index(), 4 * size, 3 * size).dense(), wanted)
    src, dst = windows.edge_index()
    number = torch.arange(windows.num_edges, device=DEVICE)
    element = number % size**2
    assert torch.equal(dst, blocks[0][number // size**2] * size + element // size)
    assert torch.equal(src, blocks[1][number // size**2] * size + element % size)
