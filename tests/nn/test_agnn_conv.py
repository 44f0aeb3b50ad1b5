"""AGNNConv against PyG's: numbers, every gradient, state, options, and when it does not fuse."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse
from graphfuse import RowWindows
from graphfuse.nn import AGNNConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, agree, compare
from tests.pairs import in_turns

SQUARE = [name for name in GRAPHS if not name.startswith("bipartite")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pair(device: Any = "cpu", **options: Any) -> tuple[AGNNConv, pyg.AGNNConv]:
    theirs, ours = pyg.AGNNConv(**options).to(device), AGNNConv(**options).to(device)
    with torch.no_grad():
        theirs.beta.fill_(1.7)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("method", ["__init__", "forward", "message"])
def test_signatures(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (AGNNConv, pyg.AGNNConv))
    assert list(ours.parameters) == list(theirs.parameters)
    assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def test_state_and_repr() -> None:
    ours, theirs = AGNNConv(), pyg.AGNNConv()
    assert repr(ours) == repr(theirs) == "AGNNConv()"
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["beta"]
    assert torch.equal(ours.beta, theirs.beta) and isinstance(ours.beta, torch.nn.Parameter)
    frozen = AGNNConv(requires_grad=False)
    assert list(frozen.state_dict()) == ["beta"] and not list(frozen.parameters())
    with torch.no_grad():
        ours.beta.fill_(3.0)
    ours.reset_parameters()
    assert ours.beta.item() == 1.0


def call(layer: torch.nn.Module, edge_index: Any, x: Tensor, beta: Tensor) -> Tensor:
    layer = copy.deepcopy(layer).to(x.dtype)
    out: Tensor = torch.func.functional_call(layer, {"beta": beta}, (x, edge_index))
    return out


FLOWS = ("target_to_source", "source_to_target", "source_to_target")
CASES = [  # every graph, at night with every dtype; widths, loops and flow in turn
    (graph, dtype, (1, 7, 16, 33, 64, 100)[turn % 6], bool(turn % 2), FLOWS[turn % 3])
    for turn, (graph, dtype) in enumerate(in_turns(SQUARE, DTYPES))
]


@pytest.mark.parametrize(("graph", "dtype", "width", "loops", "flow"), CASES, ids=str)
def test_output_and_gradients_match_pygs(
    graph: str, dtype: torch.dtype, width: int, loops: bool, flow: str, device: torch.device
) -> None:
    """Four draws are one comparison: how far PyG rounds one number, the gradient of beta, is luck.

    Rows are between 0.5 and 2 long, as the derivative of a normalisation blows up the rounding of short ones.
    """
    edge_index, (num_nodes, _) = GRAPHS[graph](device)
    ours, theirs = pair(device, add_self_loops=loops, flow=flow)

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        x = torch.nn.functional.normalize(torch.randn(num_nodes, width, device=device))
        x *= torch.empty(num_nodes, 1, device=device).uniform_(0.5, 2.0)
        inputs = {"x": x.to(dtype).requires_grad_(), "beta": ours.beta.detach().to(dtype).requires_grad_()}
        assert graphfuse.why_not(copy.deepcopy(ours).to(dtype), inputs["x"], edge_index) == []
        ops = (functools.partial(call, layer, edge_index) for layer in (ours, theirs))
        return compare(*ops, inputs)

    agree(draw, 4)


def test_rows_of_zeros(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(device)
    x = torch.randn(33, 8, device=device)
    x[::3] = 0
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), (leaf, layer.beta))])
    # to rows of zeros a gradient comes divided by 1e-12: rounding and all
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)
    assert path_taken(ours) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_zeros_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Against float32: PyG divides 0 by 0 in float16."""
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(device)
    x = torch.randn(33, 8, device=device).to(dtype)
    x[::3] = 0
    wanted = theirs(x.float(), edge_index)
    found = ours.to(dtype)(x, edge_index)
    assert path_taken(ours) == []
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_reaches_whom_it_reaches_in_pygs(dtype: torch.dtype, loops: bool, device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = (layer.to(dtype) for layer in pair(device, add_self_loops=loops))
    x = torch.linspace(-1, 1, 33 * 8, device=device).view(33, 8).to(dtype)
    for node in (3, 12, 24, 31):
        bad = x.clone()
        bad[node, 0] = torch.inf
        found, wanted = ours(bad, edge_index), theirs(bad, edge_index)
        assert torch.equal(found.isfinite().all(1), wanted.isfinite().all(1)), node


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_pygs_path_is_pygs_to_the_bit(loops: bool, flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index, _ = GRAPHS["self_loops"]()
    ours, theirs = pair(add_self_loops=loops, flow=flow)
    x = torch.randn(37, 9)
    wanted = theirs(x, edge_index)
    assert torch.equal(ours(x, edge_index), wanted) and torch.equal(ours(x, edge_index.int()), wanted)
    assert torch.equal(ours(x, RowWindows.from_edge_index(edge_index, (37, 37))), wanted)
    taken = path_taken(ours)
    assert taken is not None and taken[0] == "GRAPHFUSE_DISABLE=1 is set"


def test_row_windows_in_place_of_edge_index(device: torch.device) -> None:
    edge_index, _ = GRAPHS["self_loops"](device)
    windows = RowWindows.from_edge_index(edge_index, (37, 37))
    x = torch.randn(37, 9, device=device)
    for loops in (True, False):  # one record
        ours, theirs = pair(device, add_self_loops=loops)
        torch.testing.assert_close(ours(x, windows), theirs(x, edge_index))
        assert path_taken(ours) == []
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        ours(x[:5], windows)


def test_reasons(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x = torch.randn(33, 4, device=device)

    def falls_back(features: Any, reason: str, **options: Any) -> None:
        ours, theirs = pair(device, **options)
        assert graphfuse.why_not(ours, features, edge_index) == [reason]
        torch.testing.assert_close(ours(features, edge_index), theirs(features, edge_index))
        assert path_taken(ours) == [reason]

    wide = torch.randn(33, 300, device=device)
    falls_back(wide, "the features are 300 wide; the kernels take at most 256")
    falls_back(x, "the aggregation is 'mean'; the kernels sum", aggr="mean")
    double = [layer.double() for layer in pair(device)]
    assert graphfuse.why_not(double[0], x, edge_index) == [
        "beta is torch.float64 and the features are torch.float32"
    ]
    torch.testing.assert_close(*(layer(x, edge_index) for layer in double))
    ours, theirs = pair(device)
    found, wanted = (layer(x.half(), edge_index) for layer in (ours, theirs))
    assert path_taken(ours) == [] and found.dtype is wanted.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    falls_back(x[:, :0], "the features have no columns")
    ours, _ = pair(device)
    pairs = "the features are a pair; AGNNConv takes one set of nodes"
    assert graphfuse.why_not(ours, (x, x), edge_index) == [pairs]
    hooked, theirs = pair(device)
    for layer in (hooked, theirs):
        layer.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    torch.testing.assert_close(hooked(x, edge_index), theirs(x, edge_index))
    assert path_taken(hooked)[0].startswith("a hook is registered")
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    with pytest.raises(RuntimeError, match="AGNNConv is not fused: the features are 300 wide"):
        ours(wide, edge_index)


def test_an_activation_in_place_may_follow(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(device)
    grads = []
    for layer in (ours, theirs):
        x = torch.linspace(-1, 1, 33 * 4, device=device).view(33, 4).requires_grad_()
        grads.append(torch.autograd.grad(layer(x, edge_index).relu_().sum(), x)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


class Net(torch.nn.Module):
    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


def test_torchscript_takes_pygs_path() -> None:
    edge_index, _ = GRAPHS["ragged"]()
    ours, theirs = pair()
    x = torch.randn(33, 4)
    torch.testing.assert_close(torch.jit.script(Net(ours))(x, edge_index), theirs(x, edge_index))


def test_autocast_keeps_float32(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(device)
    x = torch.randn(33, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found, wanted = ours(x, edge_index), theirs(x, edge_index)
    assert path_taken(ours) == [] and found.dtype is wanted.dtype is torch.float32
    torch.testing.assert_close(found, wanted)
