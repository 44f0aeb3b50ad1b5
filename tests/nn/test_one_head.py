"""Inference of GraphTransformerLayer with one head: fewer products, and a norm within attention's kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import reference, testing
from graphfuse.kernels.device import HALF
from graphfuse.nn import GraphTransformerLayer, _projection
from graphfuse.nn._projection import one_head
from graphfuse.ops import attention
from graphfuse.testing import GRAPHS
from graphfuse.train.loop import captured
from tests.nn.test_norm import make


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch of attention, whether a residual and a norm were part of it."""
    pytest.importorskip("triton")
    kernels, normed = attention.launchers()[0], list[bool]()
    launch = kernels.attention_fwd

    def noted(*given: Any, residual: Any = None, **options: Any) -> Any:
        normed.append(residual is not None)
        return launch(*given, residual=residual, **options)

    monkeypatch.setattr(kernels, "attention_fwd", noted)
    monkeypatch.setattr(_projection, "_PAYS", 0)
    return normed


def pair(dim: int, norm: str, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """A layer and its definition in inference, none of their numbers at its start."""
    ours, theirs = (
        layer(dim, 1, norm=norm, **options).to(device).eval()
        for layer in (GraphTransformerLayer, reference.GraphTransformerLayer)
    )
    for one in (theirs.norm_1, theirs.norm_2):
        one.load_state_dict(make(norm, dim, device).state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(ours: Any, theirs: Any, x: Tensor, edge_index: Tensor) -> None:
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(x.double(), edge_index)
        found = ours.to(x.dtype)(x, edge_index)
        testing.assert_close("out", found, theirs.to(x.dtype)(x, edge_index), exact)


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("dim", [7, 24])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("graph", ["hub", "isolated", "repeated"])
def test_numbers(
    graph: str, norm: str, dim: int, dtype: torch.dtype, device: torch.device, launched: list[bool]
) -> None:
    edge_index, (num_nodes, _) = GRAPHS[graph](device)
    compare(*pair(dim, norm, device), torch.randn(num_nodes, dim, device=device).to(dtype), edge_index)
    assert launched == [dtype in HALF]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_cut_windows(
    norm: str, device: torch.device, launched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    edge_index, (num_nodes, _) = GRAPHS["hub"](device)
    x = torch.randn(num_nodes, 48, device=device).half()[:, :24]  # strided rows
    compare(*pair(24, norm, device), x, edge_index)
    assert launched == [True]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_nan_stays_with_its_neighbours(norm: str, device: torch.device, launched: list[bool]) -> None:
    edge_index, (num_nodes, _) = GRAPHS["isolated"](device)
    ours, theirs = pair(24, norm, device)
    x = torch.randn(num_nodes, 24, device=device).half()
    x[edge_index[0, 0]] = float("nan")
    with torch.no_grad():
        found, wanted = ours.half()(x, edge_index), theirs.half()(x, edge_index)
    assert launched == [True]
    assert torch.equal(found.isnan(), wanted.isnan()) and 0 < wanted.isnan().sum() < wanted.numel()


@pytest.mark.parametrize("name", ["lin_key", "norm_1"])
def test_a_hook_is_called(name: str, device: torch.device, launched: list[bool]) -> None:
    edge_index, (num_nodes, _) = GRAPHS["hub"](device)
    ours, theirs = pair(24, "batch", device)
    calls = list[Any]()
    ours.get_submodule(name).register_forward_hook(lambda module, *given: calls.append(module))
    compare(ours, theirs, torch.randn(num_nodes, 24, device=device).half(), edge_index)
    assert launched == [False] and len(calls) == 1


def test_when_weights_are_not_multiplied(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = pair(24, "batch", device)
    layers = [layer.lin_query, layer.lin_key, layer.lin_value, layer.lin_out]
    x = torch.randn(100, 24, device=device)
    monkeypatch.setattr(_projection, "_PAYS", 4)
    assert one_head(x, *layers) is None  # gradients are recorded
    with torch.no_grad():
        query, value = one_head(x, *layers) or (x, x)
        assert query.shape == value.shape == (100, 1, 24)
        assert one_head(x[:95], *layers) is None
        assert one_head(x.double(), *layers) is None
        with torch.autocast(device.type, torch.bfloat16):
            assert one_head(x, *layers) is None


def test_what_the_layer_does_not_fold(device: torch.device, launched: list[bool]) -> None:
    edge_index, (num_nodes, _) = GRAPHS["hub"](device)
    x = torch.randn(num_nodes, 24, device=device).half()
    edge_attr = torch.randn(edge_index.size(1), 3, device=device).half()
    with torch.no_grad():
        GraphTransformerLayer(24, 2).to(device).half().eval()(x, edge_index)
        GraphTransformerLayer(24, 1, edge_dim=3).to(device).half().eval()(x, edge_index, edge_attr)
        GraphTransformerLayer(24, 1, norm="layer", dropout=0.5).to(device).half().train()(x, edge_index)
    GraphTransformerLayer(24, 1).to(device).half().eval()(x, edge_index)
    assert launched == [False] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_large_graphs(norm: str, dim: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    edge_index = torch.randint(20_003, (2, 300_000), device=device)
    edge_index[1, :20_000] = 5  # whose window is cut
    x = torch.randn(20_003, dim, device=device).to(dtype)
    ours, theirs = pair(dim, norm, device)
    compare(ours, theirs, x, edge_index)
    with torch.no_grad():
        replay = captured(lambda: ours(x, edge_index))
        wanted = ours(x, edge_index)
        assert torch.equal(replay(), wanted)
