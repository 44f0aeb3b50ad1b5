"""Mini-batches, and graphs that change: the layers see the graph that is there, and give PyG's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    DataLoader,
    NeighborLoader,
    PrefetchLoader,
    RandomNodeLoader,
)
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph, trim_to_layer

from graphfuse import RowWindows
from graphfuse.nn import models
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import neighbor_batches
from graphfuse.transforms import ToRowWindows
from tests.nn.test_graph_inputs import EDGE_DIM, LAYERS, WIDTH, pair, same

LIBRARIES = torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE


def graph(num_nodes: int = 15, num_edges: int = 36, seed: int = 0, loops: bool = True) -> Data:
    """Random edges, among the first two thirds of the nodes; the others are isolated but for one pair."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes * 2 // 3, (2, num_edges), generator=generator)
    edge_index[:, 7] = torch.tensor([num_nodes - 1, num_nodes - 2])
    if not loops:
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return Data(
        x=torch.randn(num_nodes, WIDTH, generator=generator),
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.size(1), EDGE_DIM, generator=generator),
        edge_weight=torch.rand(edge_index.size(1), generator=generator),
    )


def agree(data: Data, name: str = "GCNConv", weights: bool = False) -> None:
    """The layer called ``name`` on ``data.edge_index``, ours and PyG's."""
    layers = pair(name, data.x.device)
    values = {"edge_weight": data.edge_weight} if weights else {}
    same(layers, data.x, data.edge_index, **values)


# The sampler


def test_all_neighbours_are_the_subgraph_of_the_hops() -> None:
    data = graph()
    for batch in neighbor_batches(data, [-1, -1], 5):
        seeds = batch.n_id[: batch.batch_size]
        assert torch.equal(batch.input_id, seeds)  # all nodes are seeds, in order
        nodes, *_ = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=15)
        assert torch.equal(batch.n_id.sort().values, nodes)
        inner, *_ = k_hop_subgraph(seeds, 1, data.edge_index, num_nodes=15)
        into = torch.isin(data.edge_index[1], inner).nonzero().view(-1)
        assert torch.equal(batch.e_id.sort().values, into)
        assert batch.num_sampled_nodes[:2] == [seeds.numel(), inner.numel() - seeds.numel()]
        assert sum(batch.num_sampled_nodes) == nodes.numel() == batch.num_nodes


def test_batches_are_neighborloaders() -> None:
    data = graph()
    degree = torch.bincount(data.edge_index[1], minlength=15)
    nodes = torch.tensor([5, 3, 14, 0, 9, 11, 2])
    batches = list(neighbor_batches(data, [3, 2], 3, nodes))
    assert [batch.batch_size for batch in batches] == [3, 3, 1]
    for batch in batches:
        assert torch.equal(batch.n_id[: batch.batch_size], nodes[batch.input_id])
        assert batch.n_id.unique().numel() == batch.n_id.numel() == sum(batch.num_sampled_nodes)
        assert batch.e_id.unique().numel() == batch.e_id.numel() == sum(batch.num_sampled_edges)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        receiver = batch.edge_index[1]
        assert bool((receiver.diff() >= 0).all())
        sampled = torch.bincount(receiver, minlength=batch.num_nodes)
        first, second, _ = batch.num_sampled_nodes
        wanted = torch.zeros_like(sampled)
        wanted[:first] = degree[batch.n_id[:first]].clamp(max=3)
        wanted[first : first + second] = degree[batch.n_id[first : first + second]].clamp(max=2)
        assert torch.equal(sampled, wanted)
        begin, reached = 0, first
        for found, edges in zip(batch.num_sampled_nodes[1:], batch.num_sampled_edges, strict=True):
            source = batch.edge_index[0, begin : begin + edges]
            new = dict.fromkeys(source[source >= reached].tolist())  # in the order that they are found in
            assert list(new) == list(range(reached, reached + found))
            begin, reached = begin + edges, reached + found
    edges = [batch.e_id for batch in batches]
    for seed, equal in ((0, True), (1, False)):
        again = [batch.e_id for batch in neighbor_batches(data, [3, 2], 3, nodes, seed)]
        assert all(map(torch.equal, edges, again)) == equal


def test_sampled_edges_are_not_always_the_same_ones() -> None:
    star = Data(edge_index=torch.stack([torch.arange(1, 9), torch.zeros(8).long()]), num_nodes=9)
    drawn = torch.cat([next(neighbor_batches(star, [2], 1, seed=seed)).e_id for seed in range(60)])
    assert torch.bincount(drawn, minlength=8).min() >= 4  # of 15 expected


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"`batch_size` must be positive .got 0."):
        next(neighbor_batches(graph(), [2], 0))
    with pytest.raises(ValueError, match=r"`num_neighbors` must be -1, for all, or more .got \[2, -2\]."):
        next(neighbor_batches(graph(), [2, -2], 1))


@pytest.mark.skipif(not LIBRARIES, reason="NeighborLoader's own sampler is of pyg-lib or torch-sparse")
def test_all_neighbours_are_those_of_pygs_sampler() -> None:
    data = graph()
    loader = NeighborLoader(data, num_neighbors=[-1, -1], batch_size=5)
    for batch, wanted in zip(neighbor_batches(data, [-1, -1], 5), loader, strict=True):
        assert torch.equal(batch.e_id.sort().values, wanted.e_id.sort().values)
        assert batch.num_sampled_nodes == wanted.num_sampled_nodes
        assert batch.num_sampled_edges == wanted.num_sampled_edges
        agree(wanted)


@pytest.mark.gpu
def test_batches_do_not_depend_on_the_device() -> None:
    batches = zip(  # `cuda` moves a Data in place
        neighbor_batches(graph(), [3, 2], 5), neighbor_batches(graph().cuda(), [3, 2], 5), strict=True
    )
    for here, there in batches:
        assert there.edge_index.is_cuda and there.x.is_cuda
        for key in ("edge_index", "n_id", "e_id", "input_id", "x"):
            assert torch.equal(here[key], there[key].cpu()), key
        assert here.num_sampled_nodes == there.num_sampled_nodes


# Loaders


class Sampler(BaseSampler):
    """The sampler of :mod:`graphfuse.testing` behind PyG's own NeighborLoader."""

    def __init__(self, data: Data, num_neighbors: Sequence[int]) -> None:
        self.data, self.num_neighbors = data, num_neighbors

    def sample_from_edges(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        (batch,) = neighbor_batches(self.data, self.num_neighbors, index.node.numel(), index.node)
        row, col = batch.edge_index
        hops = batch.num_sampled_nodes, batch.num_sampled_edges
        return SamplerOutput(
            batch.n_id, row, col, batch.e_id, None, *hops, metadata=(index.input_id, index.time)
        )


def neighbor_loader(data: Data, num_neighbors: Sequence[int], **options: Any) -> NeighborLoader:
    sampler = Sampler(data, num_neighbors)
    return NeighborLoader(data, num_neighbors, neighbor_sampler=sampler, batch_size=6, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_neighbor_loader(name: str, device: torch.device) -> None:
    data = ToRowWindows()(graph(9, 14))
    nodes = torch.tensor([4, 1, 8])
    (batch,) = neighbor_loader(data, [2, 2], input_nodes=nodes)
    (ours,) = neighbor_batches(data, [2, 2], 3, nodes)
    assert torch.equal(batch.edge_index, ours.edge_index) and set(ours.keys()) <= set(batch.keys())
    assert not batch.row_windows.matches(batch.edge_index)  # PyG passes other attributes on as they are
    batch = batch.to(device)
    same(pair(name, device), batch.x, batch.edge_index, backward=True)
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        pair(name, device)[0](batch.x, batch.row_windows)


def test_a_loaders_transform_windows_each_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ToRowWindows()(graph())
    batches = [batch.to(device) for batch in neighbor_loader(data, [2, 2], transform=ToRowWindows())]
    assert len(batches) == 3
    monkeypatch.setattr(RowWindows, "from_edge_index", None)  # nothing is built
    for batch in batches:
        assert batch.row_windows.matches(batch.edge_index)
        agree(batch)
    same(pair("GATConv", device), batch.x, batch.row_windows, given=batch.edge_index)


@pytest.mark.parametrize("name", [*LAYERS, "EdgeIndex"])
def test_trimmed_layers(name: str, device: torch.device) -> None:
    """The second layer takes the edges of the first hop alone, and the features of those."""
    data = graph(14, 24).to(device)
    (batch,) = neighbor_batches(data, [2, 2], 3, torch.tensor([4, 1, 7]))
    edges = name == "TransformerConv"
    if name == "EdgeIndex":
        name, size = "GATConv", (batch.num_nodes,) * 2
        batch.edge_index = EdgeIndex(batch.edge_index, sparse_size=size, sort_order="col")
    layers = pair(name, device, WIDTH, WIDTH, **({"edge_dim": EDGE_DIM} if edges else {}))
    found = []
    for layer in layers:
        x, *of_edges = batch.x, batch.edge_index, batch.edge_attr
        for hop in range(2):
            x, *of_edges = trim_to_layer(hop, batch.num_sampled_nodes, batch.num_sampled_edges, x, *of_edges)
            x = layer(x, *(of_edges if edges else of_edges[:1]))
        found.append(x[: batch.batch_size])
    assert path_taken(layers[0]) == []
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_bipartite_blocks(name: str, device: torch.device) -> None:
    """A hop as a block of its own: all nodes send, the seeds receive."""
    for batch in neighbor_batches(graph(9, 14).to(device), [3], 5):
        x = batch.x, batch.x[: batch.batch_size]
        same(pair(name, device), x, batch.edge_index)


@pytest.mark.parametrize(("model", "cache"), [("GCN", False), ("GAT", True)])
def test_layer_wise_inference(model: str, cache: bool, device: torch.device) -> None:
    data = ToRowWindows()(graph(14, 24))
    ours, theirs = (getattr(package, model)(WIDTH, 6, 2, 5).to(device).eval() for package in (models, pyg))
    ours.load_state_dict(theirs.state_dict())
    found, wanted = (  # PyG looks up cached nodes, on the device, in what it keeps on the embeddings'
        net.inference(neighbor_loader(data, [-1]), device, embedding_device=device, cache=cache)
        for net in (ours, theirs)
    )
    assert [path_taken(conv) for conv in ours.convs] == [[], []]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_random_node_loader(device: torch.device) -> None:
    batches = [*RandomNodeLoader(ToRowWindows()(graph(loops=False)), num_parts=3, shuffle=True)]
    assert [batch.num_nodes for batch in batches] == [5, 5, 5]
    for batch in batches:
        agree(batch.to(device), weights=True)


class Clusters(ClusterData):
    """Without METIS, which the libraries bring."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return torch.arange(num_nodes) % self.num_parts


@pytest.mark.parametrize("between", [False, True])
def test_cluster_loader(between: bool, device: torch.device) -> None:
    data = ToRowWindows()(graph(loops=False))
    clusters = Clusters(data, num_parts=4, log=False, keep_inter_cluster_edges=between)
    batches = [*ClusterLoader(clusters, batch_size=2)] if between else [*clusters]
    for batch in batches:
        assert batch.num_edges > 0
        agree(batch.to(device), weights=True)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_graphs(name: str, device: torch.device) -> None:
    listed = [graph(5, 8, seed=1), graph(3, 8, seed=2), Data(x=torch.ones(2, WIDTH)), graph(4, 9, seed=3)]
    listed[2].edge_index = torch.empty(2, 0, dtype=torch.int64)
    for data in listed:
        for key in ("edge_attr", "edge_weight"):
            data.pop(key, None)
    (batch,) = DataLoader([ToRowWindows()(data) for data in listed], batch_size=4)
    batch = batch.to(device)
    same(pair(name, device), batch.x, batch.edge_index)


def test_batches_of_edge_index(device: torch.device) -> None:
    listed = [graph(5, 8, seed) for seed in range(3)]
    for data in listed:
        data.edge_index, order = EdgeIndex(data.edge_index, sparse_size=(5, 5)).sort_by("col")
        data.edge_weight, data.edge_attr = data.edge_weight[order], data.edge_attr[order]
    (batch,) = DataLoader([ToRowWindows()(data) for data in listed], batch_size=3)
    assert isinstance(batch.edge_index, EdgeIndex) and batch.edge_index.is_sorted_by_col
    agree(batch.to(device), "GATConv")


@pytest.mark.gpu
def test_pinned_and_prefetched_batches() -> None:
    listed = [ToRowWindows()(graph(seed=seed)) for seed in range(6)]
    loader = PrefetchLoader(DataLoader(listed, batch_size=2, pin_memory=True), device=torch.device("cuda"))
    for i, batch in enumerate(loader):
        assert batch.x.is_cuda and batch.row_windows[0].device.type == "cuda"
        agree(batch)
        windows = batch.row_windows[1]
        assert windows.validate().matches(listed[2 * i + 1].edge_index)
