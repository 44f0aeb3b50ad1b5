"""What fused layers return for ``return_attention_weights``, and its gradients, against PyG's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

from graphfuse import RowWindows
from graphfuse.nn import GATConv, GATv2Conv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from tests.nn import _gat
from tests.nn._transformer import pair


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("options", [{}, {"heads": 3, "concat": False}, {"heads": 2, "beta": True}], ids=str)
def test_transformer_conv(options: dict[str, Any], flow: str, two: bool, device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite" if two else "repeated"](device)
    size = (num_src, num_dst)
    if flow == "target_to_source":
        edge_index, size = edge_index.flip(0), size[::-1]
    ours, theirs = pair(4, 5, device, torch.float32, flow=flow, dropout=0.5, **options)
    ours.eval(), theirs.eval()
    x: Any = torch.randn(num_src, 4, device=device)
    x = (x, torch.randn(num_dst, 4, device=device)) if two else x
    windows = RowWindows.from_edge_index(edge_index, size)
    results = []
    for layer, graph in ((theirs, edge_index), (ours, edge_index), (ours, windows)):
        out, (returned, alpha) = layer(x, graph, return_attention_weights=False)  # False returns them too
        loss = out.sum() + alpha.square().sum()
        results.append([out, returned, alpha, *torch.autograd.grad(loss, layer.parameters())])
    assert path_taken(ours) == [] and ours._alpha is None and results[1][1] is edge_index
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-5)


def test_weights_are_those_before_dropout(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32, dropout=0.5)
    x = torch.randn(33, 4, device=device)
    out, (_, alpha) = ours(x, edge_index, return_attention_weights=True)
    _, (_, wanted) = theirs(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(alpha, wanted)
    assert not torch.allclose(out, ours.eval()(x, edge_index))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3, "concat": False, "edge_dim": 3}, {"heads": 2, "add_self_loops": False, "edge_dim": 3}],
    ids=str,
)
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_gat(cls: Any, options: dict[str, Any], flow: str, device: torch.device) -> None:
    """Self-loops come last, and the weights carry gradients."""
    edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
    layers = _gat.make(cls, 4, 5, device=device, flow=flow, dropout=0.5, **options)
    x = torch.randn(num_nodes, 4, device=device)
    of_edges = (torch.randn(edge_index.size(1), 3, device=device),) if "edge_dim" in options else ()
    results = []
    for layer in layers:
        out, (returned, alpha) = layer.eval()(x, edge_index, *of_edges, return_attention_weights=True)
        loss = out.sum() + alpha.square().sum()
        gradients = torch.autograd.grad(loss, layer.parameters(), allow_unused=True)
        results.append([out, returned, alpha, *gradients])
    assert path_taken(layers[0]) == []
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_gat_drops_what_it_returns_as_dropped(cls: Any, device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layer = cls(4, 3, heads=2, dropout=0.5, bias=False).to(device)
    x = torch.randn(33, 4, device=device)
    out, ((source, receiver), alpha) = layer(x, edge_index, return_attention_weights=True)
    assert path_taken(layer) == [] and 0.2 < (alpha == 0).float().mean() < 0.8
    lin = layer.lin if cls is GATConv else layer.lin_l
    messages = alpha[:, :, None] * lin(x).view(33, 2, 3)[source]
    wanted = torch.zeros(33, 2, 3, device=device).index_add(0, receiver, messages)
    torch.testing.assert_close(out, wanted.view(33, 6))


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}], ids=str)
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_an_edge_index_stays_one(cls: Any, options: dict[str, Any], device: torch.device) -> None:
    """With the sizes that it knows, and not sorted once loops stand at its end."""
    ours, theirs = cls(4, 5, **options).to(device), getattr(pyg, cls.__name__)(4, 5, **options).to(device)
    ours.load_state_dict(theirs.state_dict())
    edge_index, (num_nodes, size) = GRAPHS["repeated"](device)
    both = torch.cat([edge_index, edge_index.flip(0)], 1)
    given = EdgeIndex(both, sparse_size=(num_nodes, size), is_undirected=True).sort_by("col").values
    x = torch.randn(num_nodes, 4, device=device)
    found, wanted = (layer(x, given, return_attention_weights=True)[1][0] for layer in (ours, theirs))
    assert path_taken(ours) == [] and type(found) is type(wanted) is EdgeIndex
    torch.testing.assert_close(found.as_tensor(), wanted.as_tensor())
    for one in (found, wanted):
        one.validate()
    assert found.sparse_size() == wanted.sparse_size() == (num_nodes, size)
    assert (found.sort_order, found.is_undirected) == (wanted.sort_order, wanted.is_undirected)
