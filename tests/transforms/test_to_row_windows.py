"""The transform in every place PyG takes one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader

import graphfuse
from graphfuse import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.nn import GCNConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from graphfuse.transforms import ToRowWindows


def data() -> Data:
    edge_index, _ = GRAPHS["ragged"]()
    return Data(x=torch.randn(33, 4), edge_index=edge_index.clone())


def test_attaches_a_record_and_leaves_the_input_alone() -> None:
    before = data()
    after = ToRowWindows()(before)
    assert "row_windows" not in before
    assert after.edge_index is before.edge_index
    assert isinstance(after.row_windows, RowWindows)
    assert after.row_windows.shape == (33, 33)
    assert after.row_windows.matches(after.edge_index)
    assert row_windows(after.edge_index, 33, 33) is after.row_windows  # the layer finds it
    assert after.num_nodes == 33 and after.num_edges == before.num_edges


def test_repr_shows_all_arguments() -> None:
    assert repr(ToRowWindows()) == "ToRowWindows(edge_order=False, reorder='natural')"
    composed = T.Compose([T.ToUndirected(), ToRowWindows(edge_order=True, reorder="auto")])
    assert "ToRowWindows(edge_order=True, reorder='auto')" in repr(composed)
    assert composed(data()).row_windows.symmetric


def test_edge_order_is_built_at_once() -> None:
    lazy, eager = (ToRowWindows(edge_order=order)(data()).row_windows for order in (False, True))
    assert eager.nbytes > lazy.nbytes


def test_what_was_prepared_is_found_after_a_move(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = copy.deepcopy(ToRowWindows()(data())).to(device)
    assert moved.row_windows.device == moved.edge_index.device
    monkeypatch.setattr(RowWindows, "from_edge_index", None)  # nothing is built
    found = row_windows(moved.edge_index, 33, 33)
    assert torch.equal(found.packed_windows, moved.row_windows.packed_windows)


def test_structural_transforms_leave_no_stale_record_in_use(device: torch.device) -> None:
    prepared = ToRowWindows()(data()).to(device)
    layer, x = GCNConv(4, 4).to(device), prepared.x
    for change in (T.ToUndirected(), T.AddSelfLoops(), lambda d: d.subgraph(torch.arange(20, device=device))):
        changed = change(copy.copy(prepared))
        out = layer(changed.x, changed.edge_index)
        assert path_taken(layer) == []
        fresh = RowWindows.from_edge_index(changed.edge_index, (changed.num_nodes,) * 2)
        assert torch.equal(out, layer(changed.x, fresh))
    assert x is prepared.x


def test_hetero_data() -> None:
    hetero = HeteroData()
    hetero["paper"].x, hetero["author"].x = torch.ones(20, 2), torch.ones(7, 2)
    hetero["author", "writes", "paper"].edge_index = torch.tensor([[0, 6, 3], [19, 2, 2]])
    hetero["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [2, 3]])
    hetero["paper", "likes", "author"].weight = torch.ones(3)  # an edge store without edge_index
    after = ToRowWindows()(hetero)
    assert after["author", "writes", "paper"].row_windows.shape == (20, 7)
    assert after["paper", "cites", "paper"].row_windows.shape == (20, 20)
    assert "row_windows" not in after["paper", "likes", "author"]


class Stored(InMemoryDataset):
    def __init__(self, root: Path, pre_transform) -> None:
        super().__init__(str(root), pre_transform=pre_transform)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> list[str]:
        return ["data.pt"]

    def process(self) -> None:
        self.save([self.pre_transform(data())], self.processed_paths[0])


def test_pre_transform_is_saved_and_loaded_safely(tmp_path: Path) -> None:
    for _ in range(2):  # built, then loaded; pytest turns an unsafe reload's warning into an error
        stored = Stored(tmp_path, ToRowWindows())[0]
        assert isinstance(stored.row_windows, RowWindows)
        assert stored.row_windows.validate().matches(stored.edge_index)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_transform_and_batches(workers: int, device: torch.device) -> None:
    listed = [ToRowWindows()(data()) for _ in range(3)]
    loader = DataLoader(listed, batch_size=3, num_workers=workers)
    batch = next(iter(loader)).to(device)
    assert isinstance(batch.row_windows, list)
    layer = GCNConv(4, 4).to(device)
    out = layer(batch.x, batch.edge_index)
    singles = [layer(one.x.to(device), one.edge_index.to(device)) for one in listed]
    torch.testing.assert_close(out, torch.cat(singles))
    with pytest.raises(ValueError, match="window the batch as a whole"):
        layer(batch.x, batch.row_windows)
    windowed = ToRowWindows()(batch)
    assert torch.equal(layer(windowed.x, windowed.row_windows), out)


@pytest.mark.parametrize("prepared", [False, True])
def test_graphs_of_a_batch_with_a_record(prepared: bool) -> None:
    single = ToRowWindows() if prepared else copy.copy
    listed = [single(data()) for _ in range(2)]
    batch = Batch.from_data_list(listed)
    windowed = ToRowWindows()(batch)
    for one, example in zip(listed, windowed.to_data_list(), strict=True):
        assert torch.equal(example.edge_index, one.edge_index) and torch.equal(example.x, one.x)
        assert "row_windows" not in example
    assert isinstance(windowed.row_windows, RowWindows)
    assert ("row_windows" in batch.get_example(1)) is prepared  # the batch before is as it was


def test_graphs_of_a_hetero_batch_with_a_record() -> None:
    kind = ("author", "writes", "paper")
    hetero = HeteroData()
    hetero["paper"].x, hetero["author"].x = torch.ones(20, 2), torch.ones(7, 2)
    hetero[kind].edge_index = torch.tensor([[0, 6, 3], [19, 2, 2]])
    batch = Batch.from_data_list([ToRowWindows()(hetero), ToRowWindows()(hetero)])
    example = ToRowWindows()(batch).get_example(1)
    assert torch.equal(example[kind].edge_index, hetero[kind].edge_index)
    assert "row_windows" not in example[kind]
    assert batch.get_example(1)[kind].row_windows.shape == (20, 7)


def test_pickles_and_registers() -> None:
    transform = pickle.loads(pickle.dumps(ToRowWindows(edge_order=True)))
    assert transform.edge_order
    assert graphfuse.transforms.ToRowWindows is ToRowWindows
