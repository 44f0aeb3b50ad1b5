"""The record of a plain edge_index: found, never stale, never leaked."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch_geometric import EdgeIndex

from graphfuse import RowWindows, clear_cache
from graphfuse.formats import cache, structure
from graphfuse.formats.cache import row_windows
from graphfuse.testing import GRAPHS


@pytest.fixture(autouse=True)
def fresh() -> object:
    clear_cache()
    gc.collect()
    yield
    clear_cache()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts builds."""
    counted: list[int] = []
    build = RowWindows.from_edge_index

    def counting(edge_index, size=None):
        counted.append(1)
        return build(edge_index, size)

    monkeypatch.setattr(RowWindows, "from_edge_index", staticmethod(counting))
    return counted


def edges() -> torch.Tensor:
    return GRAPHS["ragged"]()[0]


def test_second_call_finds_the_record(builds: list[int]) -> None:
    edge_index = edges()
    first = row_windows(edge_index, 33, 33)
    assert row_windows(edge_index, 33, 33) is first
    assert len(builds) == 1


def test_sizes_are_part_of_the_key(builds: list[int]) -> None:
    edge_index = edges()
    small, large = row_windows(edge_index, 33, 33), row_windows(edge_index, 33, 40)
    assert (small.shape, large.shape) == ((33, 33), (40, 33))
    assert row_windows(edge_index, 33, 33) is small
    assert len(builds) == 2


@pytest.mark.parametrize("edit", ["item", "copy_", "view", "detach", "out"])
def test_in_place_edits_are_seen(edit: str) -> None:
    edge_index = edges()
    before = row_windows(edge_index, 33, 33)
    if edit == "item":
        edge_index[0, 0] = (edge_index[0, 0] + 1) % 33
    elif edit == "copy_":
        edge_index.copy_(edge_index.roll(1, 1))
    elif edit == "view":
        edge_index[0].add_(1).remainder_(33)
    elif edit == "detach":
        edge_index.detach().flip(1).copy_(edge_index)
        edge_index.detach()[1, :3] = 7
    else:
        torch.remainder(edge_index + 5, 33, out=edge_index)
    after = row_windows(edge_index, 33, 33)
    assert after is not before
    assert after.matches(edge_index)


def test_writes_that_torch_does_not_count_need_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = edges()
    before = row_windows(edge_index, 33, 33)
    edge_index.data[0, 0] = (edge_index[0, 0] + 1) % 33
    assert row_windows(edge_index, 33, 33) is before  # documented: `.data` bypasses the version
    monkeypatch.setenv("GRAPHFUSE_CHECK", "1")
    after = row_windows(edge_index, 33, 33)
    assert after is not before
    assert after.matches(edge_index)


def test_a_copy_is_recognised_by_its_fingerprint(builds: list[int]) -> None:
    edge_index = edges()
    record = row_windows(edge_index, 33, 33)
    found = row_windows(edge_index.clone(), 33, 33)  # what data.to(device) makes
    assert torch.equal(found.packed_windows, record.packed_windows)
    assert found.packed_windows is record.packed_windows
    assert len(builds) == 1
    other = edge_index.flip(1)  # same edges, other order: edge weights would land elsewhere
    assert row_windows(other, 33, 33).packed_windows is not record.packed_windows
    assert len(builds) == 2


def test_records_die_with_their_edge_index() -> None:
    def alive() -> int:
        gc.collect()
        return sum(len(structures) for structures in structure._LIVE.values())

    before = alive()  # what other tests hold
    for _ in range(50):
        row_windows(edges(), 33, 33)
    gc.collect()
    assert not list(cache._KNOWN.values())
    row_windows(GRAPHS["hub"]()[0], 100, 100)  # structures of other sizes are dropped from the register
    assert alive() <= before + 1


def test_an_id_that_is_used_again_finds_nothing_of_the_dead() -> None:
    old, new = edges(), edges().flip(1)
    record = row_windows(old, 33, 33)
    new.copy_(old.flip(1))
    # as if `old` had died unseen, and `new` lay where it was and looked the same
    entries = cache._KNOWN._entries
    owner, known = entries[id(old)]
    entries[id(new)] = owner, known._replace(state=cache._state(new))
    assert row_windows(new, 33, 33) is not record
    assert row_windows(new, 33, 33).matches(new)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        edge_index = edges().clone()
        assert edge_index.is_inference()
        assert row_windows(edge_index, 33, 33) is row_windows(edge_index, 33, 33)


def test_edge_index_class() -> None:
    wrapped = EdgeIndex(edges(), sparse_size=(33, 33))
    record = row_windows(wrapped, 33, 33)
    assert row_windows(wrapped, 33, 33) is record
    wrapped[0, 0] = (int(wrapped[0, 0]) + 1) % 33
    assert row_windows(wrapped, 33, 33) is not record


def test_a_record_passes_through_if_it_fits() -> None:
    record = RowWindows.from_edge_index(edges(), (33, 33))
    assert row_windows(record, 33, 33) is record
    with pytest.raises(ValueError, match=r"row windows of shape \(34, 34\) \(got \(33, 33\)\)"):
        row_windows(record, 34, 34)


def test_threads_build_once(builds: list[int]) -> None:
    edge_index = edges()
    found: list[RowWindows] = []
    start = threading.Barrier(8)

    def look_up() -> None:
        start.wait()
        found.append(row_windows(edge_index, 33, 33))

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert all(record is found[0] for record in found)


@pytest.mark.gpu
def test_a_cold_capture_says_what_to_do_and_a_warm_one_pins() -> None:
    edge_index = edges().cuda()
    graph = torch.cuda.CUDAGraph()
    message = r"call graphfuse\.warmup\(model, data\) before the capture"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        torch.ones(1, device="cuda").add_(1)
        row_windows(edge_index, 33, 33)
    torch.cuda.synchronize()
    record = row_windows(edge_index, 33, 33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert row_windows(edge_index, 33, 33) is record
        torch.ones(1, device="cuda").add_(1)
    assert any(pinned is record for pinned in cache._PINNED)


def test_an_edge_index_of_another_size_is_refused_though_equal_edges_are_live(device: torch.device) -> None:
    edges = torch.tensor([[0, 1], [1, 0]], device=device)
    kept = row_windows(edges, 5, 5)
    with pytest.raises(ValueError, match="9"):
        row_windows(EdgeIndex(edges.clone(), sparse_size=(9, 9)), 5, 5)
    assert kept.shape == (5, 5)
