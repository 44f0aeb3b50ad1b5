"""Features that are a torch.sparse matrix: projected as PyG does it, and fused from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import graphfuse.nn as ours
from graphfuse import why_not
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS

LAYERS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "GATConv": {"heads": 2, "residual": True},
    "GATv2Conv": {"heads": 2, "share_weights": True},
    "TransformerConv": {"heads": 2, "beta": True},
}
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_features_fuse(name: str, layout: str, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    generator = torch.Generator(device).manual_seed(3)
    dense = torch.rand(num_nodes, 12, device=device, generator=generator)
    dense *= torch.rand(dense.shape, device=device, generator=generator) < 0.2
    x = dense.to_sparse(layout=LAYOUTS[layout])
    theirs = getattr(pyg, name)(12, 4, **LAYERS[name]).to(device)
    layer = getattr(ours, name)(12, 4, **LAYERS[name]).to(device)
    layer.load_state_dict(theirs.state_dict())
    assert why_not(layer, x, edge_index) == []
    found, wanted = layer(x, edge_index), theirs(dense, edge_index)
    assert path_taken(layer) == []
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (found**2).sum().backward()
    (wanted**2).sum().backward()
    for (key, mine), other in zip(layer.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_one_side_of_two_may_be_sparse(device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    x_src, x_dst = torch.rand(num_src, 12, device=device), torch.rand(num_dst, 5, device=device)
    theirs = pyg.TransformerConv((12, 5), 4, heads=2).to(device)
    layer = ours.TransformerConv((12, 5), 4, heads=2).to(device)
    layer.load_state_dict(theirs.state_dict())
    for pair in ((x_src.to_sparse(), x_dst), (x_src, x_dst.to_sparse_csr())):
        found = layer(pair, edge_index)
        assert path_taken(layer) == []
        torch.testing.assert_close(found, theirs((x_src, x_dst), edge_index), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_gcn_with_weights_and_a_cache(weighted: bool, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    weight = torch.rand(edge_index.size(1), device=device) if weighted else None
    dense = torch.eye(num_nodes, device=device)  # as where nodes have no features
    layer = ours.GCNConv(num_nodes, 3, cached=True).to(device)
    theirs = pyg.GCNConv(num_nodes, 3).to(device)
    layer.load_state_dict(theirs.state_dict())
    for _ in range(2):
        found = layer(dense.to_sparse_csr(), edge_index, weight)
        assert path_taken(layer) == []
        torch.testing.assert_close(found, theirs(dense, edge_index, weight), rtol=1e-4, atol=1e-5)


def test_a_layer_without_a_projection_says_why_not(device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    x = torch.eye(num_nodes, device=device).to_sparse()
    assert why_not(ours.AGNNConv(), x, edge_index) == ["the features are not a dense tensor"]
