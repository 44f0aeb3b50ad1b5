"""What is built for small graphs on a GPU is to the bit what is built for all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse import RowWindows
from graphfuse.formats import quick, structure
from graphfuse.testing import GRAPHS


def same(edge_index: torch.Tensor, num_src: int, num_dst: int) -> bool:
    """Compares both builds, if the quick one takes the graph, which is returned."""
    if edge_index.size(1) == 0 or min(num_src, num_dst) == 0:
        return False
    found = quick.build_windows(edge_index, num_src, num_dst)
    if found is None:
        return False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "suits", lambda *_: False)
        wanted = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
        assert found.fingerprint == wanted.fingerprint and found.symmetric is wanted.symmetric
        sizes = (num_dst, num_src, edge_index.size(1))
        assert torch.equal(structure._pack_windows(*found[:3], sizes), wanted.packed_windows)
        rows = wanted.packed_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "suits", lambda *_: True)
        mine = RowWindows.from_edge_index(edge_index.clone(), (num_src, num_dst))
        assert torch.equal(mine.packed_windows, wanted.packed_windows) and torch.equal(mine.packed_rows, rows)
    return True


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_both_builds_agree(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    edge_index, size = GRAPHS[graph](device)
    taken = same(edge_index.to(dtype), *size)
    columns = edge_index.unique(dim=1).size(1) if edge_index.numel() else 0
    assert taken == (edge_index.size(1) > 0 and columns == edge_index.size(1))  # all but with repeated edges


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 90), st.integers(1, 90), st.lists(st.integers(0, 2**40), max_size=300, unique=True))
def test_random_graphs(num_src: int, num_dst: int, numbers: list[int]) -> None:
    places = sorted({number % (num_src * num_dst) for number in numbers}, key=hash)
    place = torch.tensor(places, dtype=torch.int64)
    assert same(torch.stack([place % num_src, place // num_src]), num_src, num_dst) == bool(places)


def test_what_is_left_to_the_other_build(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.empty(2, 0, device=device)
    assert not quick.suits(large, quick.MOST_EDGES + 1, 5, 5) and not quick.suits(large, 5, 1 << 28, 5)
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
    assert quick.build_rows(hub, *size, split=32) is None


class Counter(TorchDispatchMode):
    """Counts operations that launch: all but views and those that look at no values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        views = ("view", "slice", "select", "detach", "alias", "set_", "empty", "new_empty", "unsqueeze")
        self.count += name not in views
        return func(*args, **(kwargs or {}))


def test_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard: each costs the host some microseconds, and a mini-batch pays them every time."""
    counts = []
    for small in (True, False):
        monkeypatch.setattr(quick, "suits", lambda *_, small=small: small)
        edge_index = torch.arange(600).view(2, 300) % 301  # no edge is repeated
        with Counter() as counter:
            _ = RowWindows.from_edge_index(edge_index, (301, 301)).packed_rows
        counts.append(counter.count)
    assert counts[0] <= 150 and counts[0] < 0.5 * counts[1], counts


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
def test_gpu_and_cpu_agree(graph: str) -> None:
    edge_index, size = GRAPHS[graph]("cpu")
    records = [RowWindows.from_edge_index(edge_index.to(device), size) for device in ("cpu", "cuda")]
    for name in ("packed_windows", "packed_rows"):
        mine, other = (getattr(record, name).cpu() for record in records)
        assert torch.equal(mine, other)
