"""Windows that are cut into longer slices, where each has several programs."""

from __future__ import annotations

import pytest
import torch

from graphfuse import RowWindows
from graphfuse.formats.walk import Walk, longer_slices


def cut(num_dst: int, degree: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Walk:
    """Windows of slices of at most 32 entries: the first of ``degree``, the others of one each."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    hub = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.long)])
    rest = torch.arange(16, num_dst)
    edges = torch.cat([hub, torch.stack([rest * 0, rest])], 1)
    return RowWindows.from_edge_index(edges.to(device), (degree, num_dst)).walk()


@pytest.mark.parametrize("degree", [65, 96, 127, 128, 129, 500])
def test_every_entry_is_in_one_slice(
    degree: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = cut(17, degree, monkeypatch, device)
    longer = longer_slices(w, 2)
    assert longer is not w and longer.split == 64 and 0 < longer.num_slots < w.num_slots
    covered = torch.zeros(w.num_entries, dtype=torch.long)
    slots = list[tuple[int, int]]()
    for window, begin, end, slot in longer.tasks.tolist():
        assert int(w.ptr[window]) <= begin <= end <= int(w.ptr[window + 1]) and end - begin <= 64
        covered[begin:end] += 1
        slots += [(slot, window)] if slot >= 0 else []
    assert (covered == 1).all()
    (merge,) = longer.merges.tolist()
    assert sorted(slots) == [(slot, 0) for slot in range(longer.num_slots)]
    assert merge == [0, 0, longer.num_slots, 0]
    assert longer_slices(w, 2) is longer


def test_slices_that_fit_into_one_are_no_slices(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = cut(17, 40, monkeypatch, device)
    longer = longer_slices(w, 2)
    assert w.num_slots == 2 and longer.num_slots == 0 and longer.merges.numel() == 0
    assert longer.tasks[:, 3].tolist() == [-1, -1]


def test_as_long_is_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    w = cut(17, 500, monkeypatch, device)
    assert w.num_slots > 0 and longer_slices(w, 1) is w


def test_shorter_ones_have_no_room(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    w = cut(17, 500, monkeypatch, device)
    with pytest.raises(ValueError, match=r"not shorter \(got times=0\.5\)"):
        longer_slices(w, 0.5)


@pytest.mark.gpu
def test_none_is_looked_for_during_capture(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    w = cut(17, 500, monkeypatch, device)
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with pytest.raises(RuntimeError, match="during CUDA graph capture"), torch.cuda.graph(graph):
        number += 1  # PyTorch warns of an empty graph
        longer_slices(w, 2)
    assert longer_slices(w, 2) is not w
