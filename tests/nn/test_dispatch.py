"""Every reason for PyG's path is a sentence, and that path gives PyG's numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer

import graphfuse
from graphfuse.nn import GCNConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS


@pytest.fixture
def graph(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    edge_index, _ = GRAPHS["ragged"](device)
    return torch.randn(33, 4, device=device), edge_index


@pytest.fixture
def layers(device: torch.device) -> tuple[GCNConv, pyg.GCNConv]:
    ours, theirs = GCNConv(4, 4).to(device), pyg.GCNConv(4, 4).to(device)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def falls_back(layers, graph, *reasons: str) -> None:
    ours, theirs = layers
    assert graphfuse.why_not(ours, *graph) == list(reasons)
    torch.testing.assert_close(ours(*graph), theirs(*graph))
    assert path_taken(ours) == list(reasons)


def test_nothing_to_say(layers, graph) -> None:
    assert path_taken(layers[0]) is None
    falls_back(layers, graph)


def test_disable(layers, graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    falls_back(layers, graph, "GRAPHFUSE_DISABLE=1 is set")
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "0")
    falls_back(layers, graph)


def test_strict(layers, graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    layers[0](*graph)
    layers[0].explain = True
    with pytest.raises(RuntimeError, match=r"GCNConv is not fused: .*being explained.*GRAPHFUSE_STRICT=1"):
        layers[0](*graph)


def test_transforms_of_torch_func(layers, graph) -> None:
    x, edge_index = graph
    reason = "torch.func or forward-mode differentiation transforms the call"

    def run(layer: torch.nn.Module) -> list[torch.Tensor]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return layer(x, edge_index).square().sum()

        batch = torch.stack([x, 2 * x])
        value, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        return [torch.func.grad(loss)(x), torch.func.vmap(loss)(batch), value, tangent]

    torch.testing.assert_close(*map(run, layers))
    assert path_taken(layers[0]) == [reason]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert graphfuse.why_not(layers[0], dual, edge_index) == [reason]
    assert graphfuse.why_not(layers[0], *graph) == []


def test_explain_on_and_off(layers, graph) -> None:
    mask = torch.randn(graph[1].size(1), device=graph[0].device)
    for layer in layers:
        layer.explain = True
        layer._edge_mask = mask
        layer._loop_mask = graph[1][0] != graph[1][1]
    falls_back(
        layers, graph, "the layer is being explained (layer.explain is True), which needs every message"
    )
    for layer in layers:
        layer.explain = False  # leaves PyG's own propagate on the object
    falls_back(layers, graph)


def test_explainer_finds_the_same_mask(layers, graph, device: torch.device) -> None:
    masks = []
    for layer in layers:
        torch.manual_seed(0)
        config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
        explainer = Explainer(
            layer,
            GNNExplainer(epochs=3),
            explanation_type="model",
            edge_mask_type="object",
            model_config=config,
        )
        masks.append(explainer(*graph).edge_mask)
    torch.testing.assert_close(*masks)
    assert masks[0].abs().sum() > 0


def test_decomposed_layers(layers, graph) -> None:
    for layer in layers:
        layer.decomposed_layers = 2
    falls_back(layers, graph, "decomposed_layers is 2; the kernels handle all features at once")
    for layer in layers:
        layer.decomposed_layers = 1
    falls_back(layers, graph)


@pytest.mark.parametrize("step", ["propagate", "message", "aggregate"])
@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_hooks_are_called(step: str, kind: str, layers, graph) -> None:
    seen: list[Any] = []
    name = f"register_{step}_forward_{kind}"
    handles = [getattr(layer, name)(lambda *args: seen.append(args[0])) for layer in layers]
    sentence = f"a hook is registered on a step of message passing ({step}_forward_{kind}s)"
    falls_back(layers, graph, sentence)
    assert [type(layer) for layer in seen] == [GCNConv, pyg.GCNConv]
    for handle in handles:
        handle.remove()
    falls_back(layers, graph)


def test_module_hooks_do_not_matter(layers, graph) -> None:
    seen: list[int] = []
    layers[0].register_forward_hook(lambda *args: seen.append(1))
    falls_back(layers, graph)
    assert seen == [1]


def test_a_replaced_step_is_obeyed(layers, graph) -> None:
    layers[0].message = lambda x_j, edge_weight: x_j * 0
    assert graphfuse.why_not(layers[0], *graph) == ["`message` was replaced on this layer object"]
    bias = layers[0].bias.expand(33, 4)
    torch.testing.assert_close(layers[0](*graph), bias)


def test_an_overridden_step_is_obeyed(graph, device: torch.device) -> None:
    class Doubled(GCNConv):
        def message(self, x_j: torch.Tensor, edge_weight: torch.Tensor) -> torch.Tensor:
            return 2 * super().message(x_j, edge_weight)

    class Renamed(GCNConv):
        pass

    doubled, plain = Doubled(4, 4, bias=False).to(device), Renamed(4, 4, bias=False).to(device)
    plain.load_state_dict(doubled.state_dict())
    assert graphfuse.why_not(doubled, *graph) == ["Doubled overrides `message`"]
    assert graphfuse.why_not(plain, *graph) == []
    torch.testing.assert_close(doubled(*graph), 2 * plain(*graph))


@pytest.mark.parametrize("aggr", ["mean", "max", "median"])
def test_other_aggregations(aggr: str, graph, device: torch.device) -> None:
    ours, theirs = GCNConv(4, 4, aggr=aggr).to(device), pyg.GCNConv(4, 4, aggr=aggr).to(device)
    ours.load_state_dict(theirs.state_dict())
    falls_back((ours, theirs), graph, f"the aggregation is '{aggr}'; the kernels sum")


@pytest.mark.parametrize("node_dim", [1, -1])
def test_nodes_in_columns(node_dim: int, graph, device: torch.device) -> None:
    options = {"normalize": False, "node_dim": node_dim}
    ours, theirs = GCNConv(4, 33, **options).to(device), pyg.GCNConv(4, 33, **options).to(device)
    ours.load_state_dict(theirs.state_dict())
    falls_back((ours, theirs), graph, f"node_dim is {node_dim}; the kernels take a row for each node")
    for layer in (ours, theirs):
        layer.node_dim = 0
    falls_back((ours, theirs), graph)


def test_masks_reach_the_messages_whatever_was_made_before(graph, device: torch.device) -> None:
    # PyG generates propagate per class, and a class that derived from PyG's layer would keep its base's
    pyg.GCNConv(4, 4)
    layer = GCNConv(4, 4, bias=False).to(device)
    layer.explain = True
    layer._edge_mask = torch.full((graph[1].size(1),), -50.0, device=device)  # sigmoid: no edge counts
    layer._loop_mask = graph[1][0] != graph[1][1]
    masked = layer(*graph)
    layer.explain = False
    degree = torch.bincount(graph[1][1], minlength=33) + 1
    torch.testing.assert_close(masked, layer.lin(graph[0]) / degree[:, None])


def test_foreign_layers_are_named() -> None:
    (reason,) = graphfuse.why_not(pyg.GCNConv(2, 2))
    assert reason == (
        "torch_geometric.nn.conv.gcn_conv.GCNConv is not a graphfuse layer; see graphfuse.convert(model) or "
        "graphfuse.nn"
    )


def test_a_model_is_asked_once_it_has_run(layers, graph) -> None:
    model = torch.nn.ModuleDict({"conv": layers[0], "other": GCNConv(4, 4).to(graph[0].device)})
    (reason,) = graphfuse.why_not(model, *graph)
    assert reason.endswith(
        "ModuleDict is a model; ask one of its layers, or the model without arguments once it has run"
    )
    model["conv"](*graph)
    assert graphfuse.why_not(model) == ["other: it has not run"]
    model["other"].aggr = "mean"
    model["other"](*graph)
    assert graphfuse.why_not(model) == ["other: the aggregation is 'mean'; the kernels sum"]


def test_each_reason_is_logged_once(layers, graph, caplog: pytest.LogCaptureFixture) -> None:
    layers[0].decomposed_layers = 4
    with caplog.at_level(logging.INFO, "graphfuse"):
        for _ in range(3):
            layers[0](*graph)
    assert [record.message for record in caplog.records] == [
        "GCNConv is not fused: decomposed_layers is 4; the kernels handle all features at once"
    ]


def test_double_backward_works(layers, graph) -> None:
    x, edge_index = graph
    x = x.requires_grad_()
    grads = []
    for layer in layers:
        first = torch.autograd.grad(layer(x, edge_index).pow(3).sum(), x, create_graph=True)[0]
        grads.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()]))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
