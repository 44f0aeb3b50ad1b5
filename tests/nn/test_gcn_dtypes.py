"""GCNConv beside PyG's: dtypes that differ among its inputs, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphfuse
from graphfuse.nn import _dispatch, gcn_conv
from graphfuse.nn._dispatch import path_taken
from graphfuse.ops.gcn_layer import Sums
from graphfuse.testing import GRAPHS
from tests.nn._gat import few_edges
from tests.nn.test_gcn_conv import first_loops, pair

NO_FLOAT64 = "float64 runs on PyG's path; the kernels take float16, bfloat16 and float32"


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
    on_gpu = device.type == "cuda" and of_weights == torch.float64
    assert path_taken(ours) == ([NO_FLOAT64] if on_gpu else [])


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


def test_weights_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """As those in float64 on a GPU."""
    monkeypatch.setattr(
        gcn_conv, "kernel_problem", lambda _, dtype: NO_FLOAT64 if dtype == torch.float64 else None
    )
    ours, theirs = pair(8, 4, device, torch.float32)
    edge_index, x = few_edges(device), torch.randn(7, 8, device=device)
    edge_index = first_loops(edge_index)
    weight = torch.rand(edge_index.size(1), device=device, dtype=torch.float64)
    assert graphfuse.why_not(ours, x, edge_index, weight) == [NO_FLOAT64]
    torch.testing.assert_close(ours(x, edge_index, weight), theirs(x, edge_index, weight))
    assert path_taken(ours) == [NO_FLOAT64]


@pytest.mark.parametrize("out_channels", [4, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_bias_of_a_wider_dtype(dtype: torch.dtype, out_channels: int, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    layers = pair(8, out_channels, device, torch.float16)
    x = torch.randn(num_nodes, 8, device=device).half()
    for layer in layers:
        layer.bias.data = layer.bias.data.to(dtype)
    found, wanted = (layer(x, edge_index) for layer in layers)
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # projected rows are rounded to float16
    grads = [
        torch.autograd.grad(out.sum(), layer.bias) for out, layer in ((found, layers[0]), (wanted, layers[1]))
    ]
    torch.testing.assert_close(*grads)


def test_a_bias_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """It is added afterwards."""
    monkeypatch.setattr(
        gcn_conv, "kernel_problem", lambda _, dtype: NO_FLOAT64 if dtype == torch.float64 else None
    )
    layers = pair(8, 4, device, torch.float32)
    for layer in layers:
        layer.bias.data = layer.bias.data.double()
    found, wanted = (layer(torch.ones(7, 8, device=device), few_edges(device)) for layer in layers)
    assert found.dtype == torch.float64 and path_taken(layers[0]) == []
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_backward_keeps_no_sums_for_frozen_weights(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The gradient of x is A^T (g W); A^T g is for the weight's."""
    ran, call = [], Sums.__call__
    monkeypatch.setattr(Sums, "__call__", lambda sums, *given: ran.append(sums.how) or call(sums, *given))
    layer, _ = pair(8, 4, device, torch.float32)
    for trained in (False, True):
        ran.clear()
        layer.lin.weight.requires_grad_(trained)
        layer(torch.randn(7, 8, device=device, requires_grad=True), few_edges(device)).sum().backward()
        assert [how.keep_aggregate for how in ran] == [False, trained]


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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("first", "then"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float64, torch.float32)],
    ids=str,
)
def test_a_graph_cached_in_another_dtype(
    weighted: bool,
    first: torch.dtype,
    then: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """The weights that were cached stay as they are, as in PyG, and no kernel of a GPU takes float64."""
    for module in (gcn_conv, _dispatch):
        monkeypatch.setattr(
            module, "kernel_problem", lambda _, dtype: NO_FLOAT64 if dtype == torch.float64 else None
        )
    edge_index, (num_nodes, _) = GRAPHS["ragged"](device)
    edge_index = first_loops(edge_index)
    weight = [torch.rand(edge_index.size(1), device=device).to(first)] if weighted else []
    layers = pair(8, 4, device, first, cached=True)
    x = torch.randn(num_nodes, 8, device=device)
    for layer in layers:
        layer(x.to(first), edge_index, *weight)
        layer.to(then)
    reasons = [NO_FLOAT64] if first == torch.float64 else []
    assert graphfuse.why_not(layers[0], x.to(then), edge_index) == reasons
    found, wanted = (layer(x.to(then), edge_index) for layer in layers)
    assert path_taken(layers[0]) == reasons
    assert found.dtype == wanted.dtype == torch.promote_types(first, then)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
