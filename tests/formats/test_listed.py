"""The edges of windows, one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphfuse import RowWindows
from graphfuse.formats import listed_kernels as kernels
from graphfuse.formats import quick_kernels
from graphfuse.formats.listed import listed
from graphfuse.formats.walk import copies, to_edge_index
from graphfuse.testing import GRAPHS


@pytest.mark.parametrize("reorder", ["natural", "degree"])
@pytest.mark.parametrize(
    "graph", ["ragged", "hub", "repeated", "self_loops", "bipartite", "isolated", "many"]
)
def test_they_are_those_of_the_windows(
    graph: str, reorder: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    many = torch.randint(150, (2, 3000), generator=generator).to(device)
    monkeypatch.setitem(GRAPHS, "many", lambda _: (many, (150, 150)))
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 1024 if graph == "many" else 32)
    edge_index, size = GRAPHS[graph](device)
    windows = RowWindows.from_edge_index(edge_index, size, reorder=reorder)
    for w in (windows.walk(), windows.transpose().walk()):
        if graph == "many":  # programs, and steps of one
            assert w.num_entries > kernels.BLOCK and w.tasks[:, 1:3].diff().max() > kernels.COLUMNS
        found = listed(w, None)
        assert found is listed(w, None)
        assert torch.equal(torch.stack([found.packed >> 5, found.row]).long(), to_edge_index(w))
        places = torch.arange(16 * (w.ptr.numel() - 1), device=device) if w.row_index is None else w.row_index
        window = torch.searchsorted(found.ptr, torch.arange(w.num_edges, device=device), right=True) - 1
        assert torch.equal(places[window * 16 + (found.packed & 15)].long(), found.row.long())
        alone = torch.bincount(found.row, minlength=w.num_rows)[found.row] == 1
        assert torch.equal((found.packed & 16).bool(), alone)
        only = torch.full((w.num_rows,), -1, dtype=torch.int32, device=device)
        only[found.row[alone]] = found.packed[alone] >> 5
        assert torch.equal(found.only, only)
        # a task has the edges of its entries
        bits = (w.row_mask[:, None] >> torch.arange(16, dtype=torch.int16, device=device)) & 1
        before = torch.nn.functional.pad(bits.sum(1).cumsum(0), (1, 0))
        assert torch.equal(found.tasks[:, 1:3].long(), before[w.tasks[:, 1:3].long()])
        assert torch.equal(found.tasks[:, ::3], w.tasks[:, ::3]) and int(found.ptr[-1]) == w.num_edges


def test_directions_of_a_symmetric_graph_share_them(device: torch.device) -> None:
    edges = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 0, 2, 1, 2, 2]], device=device)
    windows = RowWindows.from_edge_index(edges, (3, 3))
    assert windows.symmetric
    w = windows.walk()
    first, second = (
        listed(w, copies(w)),
        listed(windows.transpose().walk(), copies(windows.transpose().walk())),
    )
    assert first is not second and first.packed is second.packed and first.copies is second.copies
    assert first.copies is not None and sorted(first.copies.tolist()) == [0, 0, 0, 0, 0, 1]
    assert listed(w, None).copies is None


def test_a_capture_waits_for_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, size = GRAPHS["ragged"](device)
    w = RowWindows.from_edge_index(edge_index, size).walk()
    found = listed(w, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert listed(w, None) is found
    on_gpu = w._replace(column=SimpleNamespace(is_cuda=True), plans={})
    with pytest.raises(RuntimeError, match="the list of edges, for GAT, would be built during CUDA graph"):
        listed(on_gpu, None)


def test_they_can_be_saved_for_backward(device: torch.device) -> None:
    edge_index, size = GRAPHS["ragged"](device)
    with torch.inference_mode():
        found = listed(RowWindows.from_edge_index(edge_index, size).walk(), None)
    assert not found.packed.is_inference() and not found.tasks.is_inference()


def test_kernels_are_launched_where_the_windows_lie(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the current GPU they would find another's memory; of several, that is not always theirs."""
    edge_index, size = GRAPHS["ragged"](device)
    w = RowWindows.from_edge_index(edge_index, size).walk()
    around: list[torch.Tensor] = []
    device_of, launch = torch.cuda.device_of, quick_kernels.launch

    def noted(*args: Any, **options: Any) -> None:
        assert around and around[-1] is w.column
        launch(*args, **options)

    monkeypatch.setattr(torch.cuda, "device_of", lambda x: around.append(x) or device_of(x))
    monkeypatch.setattr(quick_kernels, "launch", noted)
    assert listed(w, None).packed.device == w.column.device
