"""Mixed precision as of PyG's layers: dtypes, errors, scaled losses, float64; and tensors on a second GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import graphfuse
from graphfuse import RowWindows
from graphfuse.kernels.device import kernel_problem
from graphfuse.nn import _dispatch
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import agree
from tests.nn._layers import EDGES, NAMES, graph, nets, pair, paths, run, two_gpus

# Layer, options, dtype of the features, and of the edges' weights or features; "half" is that of autocast.
FUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("GCNConv", {"bias": False}, "float32", ""),
    ("GCNConv", {}, "half", "float32"),
    ("GCNConv", {"normalize": False, "bias": False}, "float32", ""),
    ("GCNConv", {"normalize": False}, "half", "half"),
    ("GATConv", {"bias": False}, "float32", ""),
    ("GATConv", {"edge_dim": 3}, "half", "float32"),
    ("GATv2Conv", {"bias": False}, "half", ""),
    ("GATv2Conv", {"edge_dim": 3, "residual": True}, "float32", "half"),
    ("AGNNConv", {}, "float32", ""),
    ("AGNNConv", {}, "half", ""),
    ("TransformerConv", {}, "half", ""),
    ("TransformerConv", {"beta": True}, "float32", ""),
    ("TransformerConv", {"edge_dim": 3}, "float32", "half"),
    ("TransformerConv", {"edge_dim": 3}, "half", "half"),
]
FLOAT64 = "float64 runs on PyG's path; the kernels take float16, bfloat16 and float32"


def inputs(case: tuple[Any, ...], half: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Arguments of the layer of a case."""
    _, options, features, edges, *_ = case
    dtypes = {"half": half, "float32": torch.float32}
    x, edge_index = graph(device)
    if not edges:
        return x.to(dtypes[features]), edge_index
    of_edges = torch.rand(edge_index.size(1), 3, device=device).add(0.1).to(dtypes[edges])
    return x.to(dtypes[features]), edge_index, of_edges if "edge_dim" in options else of_edges[:, 0]


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_autocast(case: tuple[Any, ...], device: torch.device) -> None:
    """Output in PyG's dtype, gradients in that of their inputs; all of these are one comparison.

    How far PyG rounds a single number is a matter of luck.
    """
    half = (torch.bfloat16, torch.float16)[FUSED.index(case) % 2]
    ours, theirs = pair(case[0], device, **case[1])

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        arguments = inputs(case, half, device)
        exact = [one.double() if one.is_floating_point() else one for one in arguments]
        results = [run(layer, *arguments, half=half) for layer in (ours, theirs)]
        assert path_taken(ours) == []
        for mine, other in zip(*results, strict=True):
            assert mine.dtype is other.dtype
        results.append(run(copy.deepcopy(theirs).double(), *exact))
        yield "out", results[0][0], results[1][0], results[2][0]
        joined = (torch.cat([one.float().flatten() for one in result[1:]]) for result in results)
        yield "dall", *joined

    agree(draw, 4 if device.type == "cuda" else 1)


@pytest.mark.parametrize(
    ("name", "sizes", "products"),
    [
        ("GATv2Conv", (4, 4, 2), 1),
        ("TransformerConv", (4, 4, 2), 1),
        ("GraphTransformerLayer", (4, 2), 4),  # and O, W1 and W2
    ],
)
def test_autocast_multiplies_by_stacked_weights(
    name: str, sizes: tuple[int, ...], products: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = getattr(graphfuse.nn, name)(*sizes).to(device)
    x, edge_index = graph(device)
    seen, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *given: seen.append(linear(*given)) or seen[-1])
    with torch.autocast(device.type, torch.bfloat16):
        layer(x, edge_index)
    assert len(seen) == products and all(rows.dtype is torch.bfloat16 for rows in seen)


@pytest.mark.parametrize("name", ["GATv2Conv", "TransformerConv"])
def test_autocast_of_a_layer_in_the_other_half(name: str, device: torch.device) -> None:
    """Autocast refuses to stack weights in a dtype that is neither float32 nor its own."""
    layers = [layer.half() for layer in pair(name, device)]
    x, edge_index = graph(device)
    with torch.autocast(device.type, torch.bfloat16):
        results = [layer(x.half(), edge_index) for layer in layers]
    assert path_taken(layers[0]) == []
    torch.testing.assert_close(*results, rtol=5e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize("name", NAMES)
def test_scaled_losses(name: str, device: torch.device) -> None:
    """A step with NaN or Inf in its gradients is left out; the next one is PyG's."""
    x, edge_index = graph(device)
    spoilt = x.clone()
    spoilt[0, 0] = torch.inf
    results: list[list[Tensor]] = []
    for layer in pair(name, device):
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        for given in (spoilt, x):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                loss = layer(given, edge_index).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0**9  # halved once
            kept = list(map(torch.equal, before, layer.parameters()))
            assert all(kept) == (given is spoilt)
        assert all(parameter.grad.dtype is torch.float32 for parameter in layer.parameters())
        results.append([parameter.detach() for parameter in layer.parameters()])
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_float64(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is PyG's path; the interpreter has kernels for it."""
    ours, theirs = (layer.double() for layer in pair(name, device))
    x, edge_index = graph(device)
    x = x.double()
    if device.type == "cpu":
        assert graphfuse.why_not(ours, x, edge_index) == []
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(_dispatch, "kernel_problem", lambda _, dtype: kernel_problem(gpu, dtype))
    assert graphfuse.why_not(ours, x, edge_index) == [FLOAT64]
    torch.testing.assert_close(run(ours, x, edge_index), run(theirs, x, edge_index))
    assert path_taken(ours) == [FLOAT64]


@two_gpus
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ["edge_index", "RowWindows"])
def test_the_other_gpu(name: str, given: str) -> None:
    """Nothing asks for the current device, neither the first call nor those that find all compiled."""
    ours, theirs = nets(name, "cuda:1")
    x, edge_index = graph("cuda:1")
    edges: Any = (
        edge_index if given == "edge_index" else RowWindows.from_edge_index(EDGES, (7, 7)).to("cuda:1")
    )
    with torch.cuda.device(0):
        wanted = run(theirs, x, edge_index)
        for _ in range(2):
            found = run(ours, x, edges)
            assert torch.cuda.current_device() == 0 and paths(ours) == [[], []]
            assert all(one.device == x.device for one in found)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        ours, edges = ours.to("cuda:0"), edges.to("cuda:0")
        torch.testing.assert_close([one.to("cuda:1") for one in run(ours, x.to("cuda:0"), edges)], found)
