"""Graphs that change after they were windowed: the layers see the edges that are there, as PyG's do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from graphfuse import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.transforms import ToRowWindows
from tests.nn.test_graph_inputs import WIDTH, pair, same
from tests.transforms.test_loaders import agree, graph

CHANGES: dict[str, Callable[[Data], Data]] = {
    "ToUndirected": T.ToUndirected(),
    "AddSelfLoops": T.AddSelfLoops("edge_weight"),
    "AddRemainingSelfLoops": T.AddRemainingSelfLoops("edge_weight"),
    "RemoveSelfLoops": T.RemoveSelfLoops("edge_weight"),
    "RemoveIsolatedNodes": T.RemoveIsolatedNodes(),
    "LargestConnectedComponents": T.LargestConnectedComponents(),
    "RandomLinkSplit train": lambda data: T.RandomLinkSplit()(data)[0],
    "RandomLinkSplit test": lambda data: T.RandomLinkSplit(0.2, 0.3)(data)[2],
    "subgraph": lambda data: data.subgraph(torch.tensor([9, 3, 0, 12, 4, 7])),
    "edge_subgraph": lambda data: data.edge_subgraph(torch.arange(5, 30)),
    "sort": lambda data: data.sort(),
    "coalesce": lambda data: data.coalesce(),
    "clone": lambda data: data.clone(),
    "deep copy": copy.deepcopy,
    "new edges": lambda data: data.update({"edge_index": data.edge_index.flip(0)}),
    "new nodes": lambda data: data.update({"x": torch.ones(18, WIDTH)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_graph_is_cut_anew(change: str, device: torch.device) -> None:
    data = graph(loops=False)
    prepared = ToRowWindows()(data)
    changed = CHANGES[change](copy.copy(prepared)).to(device)
    # PyG coalesces edges without their weights; of several loops at a node it takes any
    agree(changed, weights="Loops" not in change and changed.edge_weight.size(0) == changed.num_edges)
    again = ToRowWindows()(changed)
    assert again.row_windows.matches(again.edge_index)
    assert again.row_windows.shape == (again.num_nodes, again.num_nodes)
    if prepared.edge_index is data.edge_index:
        assert prepared.row_windows.matches(data.edge_index)


@pytest.mark.parametrize("first", [True, False])
def test_place_in_compose(first: bool, device: torch.device) -> None:
    others = [T.RemoveIsolatedNodes(), T.ToUndirected()]
    transform = T.Compose([ToRowWindows(), *others] if first else [*others, ToRowWindows()])
    data = transform(graph(loops=False)).to(device)
    agree(data, "TransformerConv")
    assert data.row_windows.matches(data.edge_index) != first
    if not first:
        same(pair("GATConv", device), data.x, data.row_windows, given=data.edge_index)


def _assign(edge_index: Tensor) -> None:
    edge_index.data = edge_index.roll(1, 1).flip(0)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda edge_index: edge_index[0, :9].fill_(2),
    "copy": lambda edge_index: edge_index.copy_(edge_index.flip(0).clone()),
    "set": lambda edge_index: edge_index.set_(edge_index.flip(0).contiguous()),
    "data": _assign,
}


@pytest.mark.parametrize(
    ("edit", "inference"), [*((edit, False) for edit in EDITS), ("item", True), ("copy", True)]
)
def test_an_edit_in_place_is_seen(edit: str, inference: bool, device: torch.device) -> None:
    with torch.inference_mode(inference):
        data = ToRowWindows()(graph().to(device))
        assert data.edge_index.is_inference() == inference
        layers = pair("GCNConv", device)
        before = layers[0](data.x, data.edge_index)
        EDITS[edit](data.edge_index)
        found = layers[0](data.x, data.edge_index)
        assert not torch.equal(found, before)
        torch.testing.assert_close(found, layers[1](data.x, data.edge_index))


def test_an_edit_leaves_copies_alone(device: torch.device) -> None:
    """Copies share what was built, but not the list of edges that weights are put in order by."""
    data = graph(loops=False).to(device)
    agree(data)
    twin, late = data.clone(), data.clone()
    agree(twin)
    found, twins = (row_windows(one.edge_index, 15, 15) for one in (data, twin))
    assert twins.packed_windows is found.packed_windows
    data.edge_index[0, :9] = 2
    for other in (twin, late, data):
        agree(other, weights=True)


class Stored(InMemoryDataset):
    def __init__(self, root: Path, pre_transform: Any) -> None:
        super().__init__(str(root), pre_transform=pre_transform)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> list[str]:
        return ["data.pt"]

    def process(self) -> None:
        listed = [self.pre_transform(graph(12, 20, seed, loops=False)) for seed in range(3)]
        self.save(listed, self.processed_paths[0])


@pytest.mark.parametrize("first", [True, False])
def test_a_stored_data_set(first: bool, tmp_path: Path, device: torch.device) -> None:
    transforms = [T.ToUndirected(), ToRowWindows()]
    transform = T.Compose(transforms[::-1] if first else transforms)
    for _ in range(2):  # built, then loaded
        stored = Stored(tmp_path, transform)
    data = stored[1].to(device)
    assert isinstance(data.row_windows, RowWindows)
    assert data.row_windows.matches(data.edge_index) != first
    agree(data)
    if not first:
        weight = data.edge_weight
        same(pair("GCNConv", device), data.x, data.row_windows, given=data.edge_index, edge_weight=weight)
    (batch,) = DataLoader(stored, batch_size=3)
    agree(batch.to(device))
