"""Layers on windows whose rows stand in another order: PyG's numbers, in the caller's order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from graphfuse.kernels import launch
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, check
from graphfuse.transforms import ToRowWindows
from tests.nn._layers import NAMES, pair


# in float32 attention walks rows, which have one order: see test_gradients
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float16) for name in NAMES), ("GCNConv", torch.float32)], ids=str
)
def test_layers_agree_with_pyg(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "prefers_rows", lambda *sizes: False)
    for prefers in ("attention_prefers_rows", "gat_prefers_rows"):
        monkeypatch.setattr(launch, prefers, lambda *sizes: sizes[-1] is torch.float32)
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    x = torch.randn(num_nodes, 4, device=device).to(dtype)
    data = ToRowWindows(reorder="bisection")(Data(x=x, edge_index=edge_index.clone()))
    assert data.row_windows.walk().row_index is not None
    ours, theirs = pair(name, device)

    def run(layer: torch.nn.Module, graph: Any, x: Tensor) -> Tensor:
        return layer.to(x.dtype)(x, graph)

    graph = data.row_windows if dtype is torch.float32 else data.edge_index  # that is found in the cache
    given = {"x": x.detach().requires_grad_()}
    check(functools.partial(run, ours, graph), functools.partial(run, theirs, edge_index), given)
    assert path_taken(ours) == []


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
    x = torch.randn(num_nodes, 4, device=device, requires_grad=True)
    data = ToRowWindows(reorder="degree")(Data(x=x.detach(), edge_index=edge_index.clone()))
    assert data.row_windows.walk().row_index is not None
    layers, found = pair(name, device), []
    for layer, graph in zip(layers, (data.row_windows, edge_index), strict=True):
        out = layer(x, graph)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert path_taken(layers[0]) == []
