"""GCNConv beside PyG's: dtypes that differ among its inputs, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphfuse.testing import GRAPHS
from tests.nn.test_gcn_conv import first_loops, pair


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "of_weights"), [(torch.float32, torch.float64), (torch.float16, torch.float32)], ids=str
)
def test_weights_of_a_wider_dtype(
    options: dict[str, Any], dtype: torch.dtype, of_weights: torch.dtype, device: torch.device
) -> None:
    """The result has the dtype that PyG's messages have."""
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    edge_index = first_loops(edge_index)
    ours, theirs = pair(8, 4, device, dtype, **options)
    x = torch.randn(num_nodes, 8, device=device).to(dtype)
    weight = torch.rand(edge_index.size(1), device=device).add(0.1).to(of_weights)
    found, wanted = (layer.to(dtype)(x, edge_index, weight) for layer in (ours, theirs))
    assert found.dtype == wanted.dtype == of_weights
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("out_channels", [4, 12])  # the narrow side is gathered
@pytest.mark.parametrize("trained", ["nothing", "x", "bias"])
def test_features_that_backward_does_not_need_may_be_written_to(
    trained: str, out_channels: int, device: torch.device
) -> None:
    """As with PyG's layer, of whose parameters most are frozen."""
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    layers, start = pair(8, out_channels, device, torch.float32), torch.randn(num_nodes, 8, device=device)
    found = []
    for layer in layers:
        layer.requires_grad_(False).bias.requires_grad_(trained == "bias")
        leaf = start.clone().requires_grad_(trained == "x")
        x = leaf + 0
        out = layer(x, edge_index)
        x.zero_()
        found.append([out])
        if trained != "nothing":
            found[-1] += torch.autograd.grad(out.sum(), leaf if trained == "x" else layer.bias)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("out_channels", [4, 12])
def test_a_bias_of_a_wider_dtype(out_channels: int, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    layers = pair(8, out_channels, device, torch.float16)
    x = torch.randn(num_nodes, 8, device=device).half()
    for layer in layers:
        layer.bias.data = layer.bias.data.float()
    found, wanted = (layer(x, edge_index) for layer in layers)
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_that_an_evaluation_cached_is_trained_on(weighted: bool, device: torch.device) -> None:
    """Where PyG's layer keeps an inference tensor, which autograd does not save."""
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    edge_index = first_loops(edge_index)
    weight = torch.rand(edge_index.size(1), device=device) if weighted else None
    (layer, _), (other, _) = (pair(8, 4, device, torch.float32, cached=True) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(num_nodes, 8, device=device)
    with torch.inference_mode():
        layer(x, edge_index, weight)
    results = []
    for one in (layer, other):
        out = one(x, edge_index, weight)
        results.append([out, *torch.autograd.grad(out.square().sum(), one.parameters())])
    torch.testing.assert_close(*results)
