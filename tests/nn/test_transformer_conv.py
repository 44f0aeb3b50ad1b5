"""TransformerConv against PyG's: signatures, parameters, numbers, options, every way round the kernel."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import graphfuse
from graphfuse import RowWindows, ops
from graphfuse.nn import TransformerConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.ops import _aggregate
from graphfuse.testing import GRAPHS
from tests.nn._transformer import pair

NO_EDGE_DIM = "edge_attr is given to a layer without edge_dim, which adds it to the values as it is"
MISFIT = "edge_attr is not a matrix of edge_dim columns, a row for each edge, in the dtype of x"
NO_RATE = "dropout is 1.0; the kernels take rates from 0 to below 1"
NO_WEIGHTS = "return_attention_weights is set in a layer with edge features, which fold"

OPTIONS: list[dict[str, Any]] = [
    {},
    {"heads": 3, "concat": False, "beta": True},
    {"heads": 2, "bias": False, "root_weight": False, "beta": True},
    {"edge_dim": 3, "dropout": 0.5, "flow": "target_to_source"},
]


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signatures(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (TransformerConv, pyg.TransformerConv))
    assert list(ours.parameters) == list(theirs.parameters)
    for mine, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
        assert (mine.default, mine.kind) == (other.default, other.kind)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("channels", [5, (5, 7)], ids=str)
def test_same_seed_same_weights_same_repr(channels: Any, options: dict[str, Any]) -> None:
    layers, attributes = [], []
    for cls in (TransformerConv, pyg.TransformerConv):
        torch.manual_seed(3)
        layers.append(cls(channels, 4, **options))
        names = "in_channels out_channels heads concat beta dropout edge_dim root_weight aggr flow node_dim"
        attributes.append([getattr(layers[-1], name) for name in names.split()])
    for _ in range(2):
        ours, theirs = (layer.state_dict() for layer in layers)
        assert list(ours) == list(theirs)
        assert all(map(torch.equal, ours.values(), theirs.values()))
        for layer in layers:
            torch.manual_seed(4)
            layer.reset_parameters()
    assert repr(layers[0]) == repr(layers[1]) and repr(layers[0]).startswith("TransformerConv(")
    assert attributes[0] == attributes[1]


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("channels", [-1, (-1, -1)], ids=str)
def test_lazy_channels(channels: Any, options: dict[str, Any], device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    x: Any = torch.randn(num_src, 5, device=device)
    x = x if channels == -1 else (x, torch.randn(num_dst, 7, device=device))
    layers, results = [], []
    for cls in (TransformerConv, pyg.TransformerConv):
        torch.manual_seed(0)
        layers.append(cls(channels, 6, **options).to(device))
        torch.manual_seed(1)  # most weights are drawn in the first forward
        results.append(layers[-1](x, edge_index))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(layers[0](x, edge_index), results[1])  # now stacked
    assert path_taken(layers[0]) == []
    layers[1].load_state_dict(layers[0].state_dict())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("weights", [None, False, True])
def test_pygs_path_is_pygs_to_the_bit(
    options: dict[str, Any], two: bool, weights: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"]()
    edge_index = edge_index.flip(0) if "flow" in options else edge_index
    ours, theirs = pair((4, 5) if two else 4, 6, torch.device("cpu"), torch.float32, **options)
    x: Any = torch.randn(num_src, 4)
    x = (x, torch.randn(num_dst, 5)) if two else x
    edge_attr = torch.randn(edge_index.size(1), 3) if "edge_dim" in options else None
    results = []
    for layer in (ours, theirs):
        torch.manual_seed(1)  # dropout
        out = layer(x, edge_index, edge_attr, return_attention_weights=weights)
        if weights is not None:
            assert out[1][0] is edge_index
            out = torch.cat([out[0].flatten(), out[1][1].flatten()])
        results.append([out, *torch.autograd.grad(out.square().sum(), layer.parameters(), allow_unused=True)])
        assert layer._alpha is None
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other) if other is not None else mine is None
    assert path_taken(ours)[0] == "GRAPHFUSE_DISABLE=1 is set"


def falls_back(layers: Any, arguments: tuple[Any, ...], *reasons: str) -> None:
    ours, theirs = layers
    assert graphfuse.why_not(ours, *arguments) == list(reasons)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    assert path_taken(ours) == list(reasons)


def test_reasons(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x, edge_attr = torch.randn(33, 4, device=device), torch.randn(edge_index.size(1), 3, device=device)
    make = functools.partial(pair, 4, device=device, dtype=torch.float32)
    plain = make(width=4)
    falls_back(plain, (x, edge_index))
    falls_back(plain, ([x, x], edge_index))
    featured = make(width=4, edge_dim=3)
    falls_back(featured, (x, edge_index, edge_attr))
    assert graphfuse.why_not(featured[0], x, edge_index) == [MISFIT]
    for wrong in (
        edge_attr[1:],
        edge_attr[:, :2],
        edge_attr.double(),
        edge_attr[:, :, None],
        edge_attr.cpu().numpy(),
    ):
        assert graphfuse.why_not(featured[0], x, edge_index, wrong) == [MISFIT]
    with pytest.raises(AssertionError):
        featured[0](x, edge_index)
    hooked = make(width=4, edge_dim=3)
    for layer in hooked:
        layer.lin_edge.register_forward_hook(lambda module, args, out: 2 * out)
    falls_back(hooked, (x, edge_index, edge_attr), "lin_edge is not a plain linear map in the dtype of x")
    falls_back(
        make(width=16, heads=64, edge_dim=3),
        (x, edge_index, edge_attr),
    )
    wide = (
        "heads * max(out_channels, edge_dim) is over 4096 in powers of two (got 128 heads of 33, edge_dim 3)"
    )
    falls_back(make(width=33, heads=128, edge_dim=3), (x, edge_index, edge_attr), wide)
    falls_back(plain, (x, edge_index, edge_attr[:, :1, None]), NO_EDGE_DIM)
    falls_back(plain, (x, edge_index, None, False))
    falls_back(featured, (x, edge_index, edge_attr, False), NO_WEIGHTS)
    falls_back(plain, (x, edge_index, None, 1))  # PyG looks for a bool
    falls_back(make(width=257), (x, edge_index), "out_channels is 257; the kernels take heads of at most 256")
    falls_back(make(width=4, dropout=1.0), (x, edge_index), NO_RATE)
    falls_back(make(width=4, aggr="mean"), (x, edge_index), "the aggregation is 'mean'; the kernels sum")
    assert graphfuse.why_not(plain[0], x[None], edge_index)[0].startswith("the features have 3 dimensions")
    assert graphfuse.why_not(plain[0], (x, None), edge_index) == ["the features are not a dense tensor"]
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    with pytest.raises(RuntimeError, match="TransformerConv is not fused: return_attention_weights is set"):
        featured[0](x, edge_index, edge_attr, return_attention_weights=True)


@pytest.mark.parametrize("x", [None, (torch.ones(3, 4), None), (torch.ones(3, 4), torch.ones(3, 5))])
def test_errors_are_pygs(x: Any) -> None:
    messages = []
    for cls in (TransformerConv, pyg.TransformerConv):
        with pytest.raises((RuntimeError, TypeError)) as error:
            cls(4, 4)(x, torch.zeros(2, 1, dtype=torch.int64))
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_row_windows_in_place_of_edge_index(two: bool, flow: str, device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite" if two else "self_loops"](device)
    forwards = flow == "source_to_target"
    edge_index = edge_index if forwards else edge_index.flip(0)
    size = (num_src, num_dst) if forwards else (num_dst, num_src)
    windows = RowWindows.from_edge_index(edge_index, size)
    ours, theirs = pair(4, 4, device, torch.float32, flow=flow)
    x: Any = torch.randn(num_src, 4, device=device)
    x = (x, torch.randn(num_dst, 4, device=device)) if two else x
    torch.testing.assert_close(ours(x, windows), theirs(x, edge_index))
    assert path_taken(ours) == []
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        ours(x[0][:5] if two else x[:5], windows)


@pytest.mark.parametrize("disabled", [False, True])
def test_kinds_of_edge_index(disabled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if disabled:
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(20, 18, device, torch.float32)
    x = torch.randn(33, 20, device=device)
    wanted = theirs(x, edge_index)
    wrapped = EdgeIndex(edge_index, sparse_size=(33, 33)).sort_by("col").values
    for given in (edge_index.int(), wrapped):
        torch.testing.assert_close(ours(x, given), wanted)
        assert len(path_taken(ours)) == disabled


@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor])
def test_sparse_tensors_run_pygs_path(convert, device: torch.device) -> None:
    edge_index, _ = GRAPHS["self_loops"](device)
    adj_t = convert(edge_index.flip(0), size=(37, 37))
    layers = pair(4, 4, device, torch.float32, heads=2)
    x = torch.randn(37, 4, device=device)
    reason = f"the graph is a {adj_t.layout} tensor; pass an edge_index tensor or RowWindows"
    falls_back(layers, (x, adj_t), reason)


def test_explaining(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(4, 4, device, torch.float32, heads=2)
    x, masks = torch.randn(33, 4, device=device), []
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explain = functools.partial(
        Explainer, explanation_type="model", edge_mask_type="object", model_config=config
    )
    for layer in layers:
        masks.append(explain(layer, AttentionExplainer())(x, edge_index).edge_mask)
        layer.explain = True
        layer._edge_mask = torch.linspace(-3, 3, edge_index.size(1), device=device)
    torch.testing.assert_close(*masks)
    assert masks[0].abs().sum() > 0
    reason = "the layer is being explained (layer.explain is True), which needs every message"
    falls_back(layers, (x, edge_index), reason)


def test_decomposed_layers_fail_as_pygs(device: torch.device) -> None:
    errors = []
    for layer in pair(4, 4, device, torch.float32):
        layer.decomposed_layers = 2
        with pytest.raises(RuntimeError) as error:
            layer(torch.randn(33, 4, device=device), GRAPHS["ragged"](device)[0])
        errors.append(str(error.value))
    assert errors[0] == errors[1]


CHANGES = ["hooked", "replaced", "parametrised", "patched", "one bias less"]
PROJECTIONS = [(4, "", 1), ((4, 4), "", 2), ((4, 4), "one bias less", 3), *((4, one, 4) for one in CHANGES)]


@pytest.mark.parametrize(("channels", "change", "products"), PROJECTIONS)
def test_projections(
    channels: Any, change: str, products: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(channels, 6, device, torch.float32)
    seen: list[int] = []
    for layer in (ours, theirs):
        value = layer.lin_value
        if change == "hooked":
            value.register_forward_hook(lambda *arguments: 2 * arguments[-1])
        elif change == "replaced":
            layer.lin_value = torch.nn.Sequential(torch.nn.Tanh(), value)
        elif change == "parametrised":
            torch.nn.utils.parametrizations.weight_norm(value)
        elif change == "patched":
            value.forward = lambda x, forward=value.forward: forward(x).tanh()
        elif change:
            value.bias = None
    x: Any = torch.randn(33, 4, device=device)
    x = x if channels == 4 else (x, torch.randn(33, 4, device=device))
    wanted = theirs(x, edge_index)
    for module in (torch.nn.functional, _aggregate):  # a layer as one Function has the latter
        linear = module.linear
        count = functools.partial(lambda linear, *given: seen.append(1) or linear(*given), linear)
        monkeypatch.setattr(module, "linear", count)
    torch.testing.assert_close(ours(x, edge_index), wanted)
    assert path_taken(ours) == [] and len(seen) == products


GATES = [("", 1), ("hooked", 0), ("replaced", 0), ("with a bias", 0), ("wide", 0), ("autocast", 0)]


@pytest.mark.parametrize(("change", "kernels"), GATES)
def test_gate(change: str, kernels: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    autocast = change == "autocast"
    dtype = torch.bfloat16 if autocast else torch.float32  # one dtype, so that only autocast is in the way
    layers = pair(4, 6, device, dtype, heads=2, beta=True)
    for layer in layers:
        gate = layer.lin_beta
        if change == "hooked":
            gate.register_forward_hook(lambda *arguments: 2 * arguments[-1])
        elif change == "replaced":
            layer.lin_beta = torch.nn.Sequential(gate, torch.nn.Tanh())
        elif change == "with a bias":
            gate.bias = torch.nn.Parameter(torch.ones(1, device=device))
    if change == "wide":
        monkeypatch.setattr("graphfuse.nn.transformer_conv.MAX_GATE_DIM", 11)
    seen: list[int] = []
    gated_skip = ops.gated_skip
    monkeypatch.setattr(ops, "gated_skip", lambda *given: seen.append(1) or gated_skip(*given))
    x, results = torch.randn(33, 4, device=device).to(dtype), []
    for layer in layers:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = layer(x, edge_index)
        results.append([out, *torch.autograd.grad(out.square().sum(), layer.parameters())])
    tolerance = {"rtol": 5e-2, "atol": 5e-1} if autocast else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(*results, **tolerance)
    assert path_taken(layers[0]) == [] and len(seen) == kernels


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_autocast_gives_pygs_dtype(options: dict[str, Any], device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32, **options)
    x = torch.randn(33, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, wanted = ours(x, edge_index), theirs(x, edge_index)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted, atol=3e-2, rtol=3e-2)
    assert path_taken(ours) == []
    out.float().sum().backward()
    assert ours.lin_value.weight.grad.dtype == torch.float32


def test_dropout_is_for_training(device: torch.device) -> None:
    # every node has one in-neighbour, whose weight is 1 if it is kept
    edge_index = torch.stack([torch.arange(40, device=device), torch.arange(40, device=device).roll(1)])
    ours, theirs = pair(4, 3, device, torch.float32, heads=2, dropout=0.75, root_weight=False)
    x = torch.randn(40, 4, device=device)
    ours.eval(), theirs.eval()
    value = ours(x, edge_index)
    torch.testing.assert_close(value, theirs(x, edge_index))
    ours.train()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ours(x, edge_index))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    factor = (results[0] / value).view(40, 2, 3)
    kept = factor[:, :, 0] > 0
    torch.testing.assert_close(factor, 4.0 * kept[:, :, None].expand(-1, -1, 3).float())
    assert 5 <= kept.sum() <= 40 and not torch.equal(kept[:, 0], kept[:, 1])
    assert path_taken(ours) == []


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_an_activation_in_place_may_follow(options: dict[str, Any], device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    gradients = []
    for layer in pair(4, 4, device, torch.float32, **options):
        out = layer(torch.ones(33, 4, device=device), edge_index).relu_()
        gradients.append(torch.autograd.grad(out.square().sum(), layer.lin_value.weight)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_pickle_and_deepcopy(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x = torch.randn(33, 4, device=device)
    layer = TransformerConv(4, 4, heads=2, beta=True).to(device)
    wanted = layer(x, edge_index)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, edge_index), wanted)
        assert path_taken(twin) == []


class Net(torch.nn.Module):
    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class WeightsNet(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.conv((x, x), edge_index, return_attention_weights=True)


@pytest.mark.parametrize("net", [Net, WeightsNet])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_torchscript_takes_pygs_path(net: type[Net], options: dict[str, Any]) -> None:
    edge_index, _ = GRAPHS["ragged"]()
    ours, theirs = pair(4, 4, torch.device("cpu"), torch.float32, **options)
    x = torch.randn(33, 4)
    torch.testing.assert_close(torch.jit.script(net(ours))(x, edge_index), net(theirs)(x, edge_index))
