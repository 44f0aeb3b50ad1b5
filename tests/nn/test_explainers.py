"""PyG's explainers find in our networks what they find in PyG's, and leave them fused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import (
    AttentionExplainer,
    CaptumExplainer,
    Explainer,
    ExplainerAlgorithm,
    Explanation,
    GNNExplainer,
)

import graphfuse
from graphfuse.nn._dispatch import path_taken
from tests.nn._layers import EXPLAINED, NAMES, graph, layers, nets, pair

HOOKED = "a hook is registered on a step of message passing (message_forward_hooks)"
MODEL = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
BOTH = {"node_mask_type": "attributes", "edge_mask_type": "object"}
WITH_ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")


def explained(
    model: torch.nn.Module, algorithm: ExplainerAlgorithm, given: tuple[Tensor, ...], **options: Any
) -> tuple[Explanation, list[Any]]:
    """The explanation, and how our layers ran meanwhile: a module's hook is in no kernel's way."""
    seen: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda layer, *_: seen.append(path_taken(layer)))
        for layer in layers(model)
        if type(layer).__module__.startswith("graphfuse")
    ]
    explainer = Explainer(model, algorithm, explanation_type="model", model_config=MODEL, **(options or BOTH))
    torch.manual_seed(5)  # masks start at random
    x, edge_index, *rest = given
    found = explainer(x, edge_index, **dict(zip(("edge_weight",), rest, strict=False)))
    for handle in handles:
        handle.remove()
    return found, seen


def agree(models: Any, make: Any, given: tuple[Tensor, ...], **options: Any) -> list[Any]:
    """Both explanations are the same; how our layers ran."""
    (mine, seen), (other, _) = (explained(model, make(), given, **options) for model in models)
    masks = [key for key in ("node_mask", "edge_mask") if other.get(key) is not None]
    assert masks
    for key in masks:
        torch.testing.assert_close(mine[key], other[key], rtol=1e-4, atol=1e-5)
        assert other[key].abs().sum() > 0
    for layer in layers(models[0]):  # nothing of it is left
        assert graphfuse.why_not(layer, *given) == []
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_gnn_explainer(name: str, device: torch.device) -> None:
    first, *seen = agree(pair(name, device), functools.partial(GNNExplainer, epochs=3), graph(device))
    assert first == []  # the prediction that is to be explained
    assert seen == [[EXPLAINED]] * len(seen) and len(seen) > 2


@pytest.mark.parametrize("name", NAMES)
def test_attention_explainer(name: str, device: torch.device) -> None:
    models, given, mask = pair(name, device), graph(device), {"edge_mask_type": "object"}
    if name in WITH_ATTENTION:
        seen = agree(models, AttentionExplainer, given, **mask)
        assert seen == [[], [HOOKED]]
        return
    for model in models:  # the weights of AGNNConv are made within its message
        with pytest.raises(ValueError, match="Could not collect any attention coefficients"):
            explained(model, AttentionExplainer(), given, **mask)


@pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients")
@pytest.mark.parametrize("name", NAMES)
def test_captum_explainer(name: str, device: torch.device) -> None:
    """With masks of edges on PyG's path; attributions of features alone come through the kernels."""
    pytest.importorskip("captum")
    models, given = pair(name, device), graph(device)
    first, *seen = agree(models, functools.partial(CaptumExplainer, "IntegratedGradients", n_steps=2), given)
    assert first == [] and seen == [[EXPLAINED]] * len(seen) and len(seen) > 1
    make = functools.partial(CaptumExplainer, "Saliency")
    seen = agree(models, make, given, node_mask_type="attributes")
    assert len(seen) > 1 and seen == [[]] * len(seen)


def test_weights_of_edges(device: torch.device) -> None:
    x, edge_index = graph(device)
    weight = torch.rand(edge_index.size(1), device=device)
    seen = agree(pair("GCNConv", device), functools.partial(GNNExplainer, epochs=2), (x, edge_index, weight))
    assert seen[1:] == [[EXPLAINED]] * (len(seen) - 1)


def test_a_layer_left_out_stays_fused(device: torch.device) -> None:
    models = nets("GATConv", device)
    for model in models:
        model.layers[0].explain = False
    seen = agree(models, functools.partial(GNNExplainer, epochs=1), graph(device))
    assert seen[2::2] == [[]] * (len(seen) // 2 - 1)
    assert seen[3::2] == [[EXPLAINED]] * (len(seen) // 2 - 1)


@pytest.mark.parametrize("kind", ["GCN", "GAT"])
def test_models(kind: str, device: torch.device) -> None:
    ours, theirs = (
        getattr(one, kind)(4, 4, 2, out_channels=3).to(device) for one in (graphfuse.nn.models, pyg)
    )
    ours.load_state_dict(theirs.state_dict())
    agree((ours, theirs), functools.partial(GNNExplainer, epochs=2), graph(device))
