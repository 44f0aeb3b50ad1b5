"""Hooks, subclasses and PyG's tools on our layers: PyG's numbers, and the reason where that is PyG's path."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.dense.linear import Linear

import graphfuse
from graphfuse.nn._dispatch import path_taken
from tests.nn._layers import CHANNELS, NAMES, OPTIONS, graph, nets, pair, paths, run

TRACED = "the model is being traced or exported to ONNX"
NO_EDGES = "the graph is a FakeTensor, which holds no edges to build row windows of; pass RowWindows"
DECOMPOSED = "decomposed_layers is 2; the kernels handle all features at once"


def same(ours: Any, theirs: Any, arguments: tuple[Any, ...], *reasons: str) -> None:
    """Output and all gradients, by the path that the reasons tell."""
    assert graphfuse.why_not(ours, *arguments) == list(reasons)
    same_numbers(ours, theirs, *arguments)
    assert path_taken(ours) == list(reasons)


def same_numbers(ours: Any, theirs: Any, *arguments: Any) -> None:
    found, wanted = (run(model, *arguments) for model in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def doubled(values: Any) -> Any:
    """Every float tensor in ``values``, times two."""
    if isinstance(values, Tensor):
        return 2 * values if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: doubled(value) for key, value in values.items()}
    return tuple(map(doubled, values)) if isinstance(values, tuple) else values


STEPS = [(name, step) for name in NAMES for step in ("propagate", "message", "aggregate")]
STEPS += [("GATConv", "edge_update"), ("GATv2Conv", "edge_update")]


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_hooks_of_steps_change_what_they_change_in_pyg(name: str, step: str, device: torch.device) -> None:
    """First what goes in, then what comes out as well; nothing when they are gone."""
    layers, arguments = pair(name, device), graph(device)
    plain = layers[1](*arguments)
    handles: list[Any] = []
    reasons: list[str] = []
    for kind in ("pre_hook", "hook"):
        for layer in layers:
            register = getattr(layer, f"register_{step}_forward_{kind}")
            handles.append(register(lambda *given: doubled(given[-1])))
        reasons.append(f"a hook is registered on a step of message passing ({step}_forward_{kind}s)")
        same(*layers, arguments, *reasons)
    assert not torch.allclose(layers[1](*arguments), plain)
    for handle in handles:
        handle.remove()
    assert graphfuse.why_not(layers[0], *arguments) == []


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_modules_are_called_around_the_kernels(name: str, device: torch.device) -> None:
    """Each changes its numbers: arguments, result, and the gradients on either side."""
    ours, theirs = pair(name, device)
    arguments = graph(device)
    plain = theirs(*arguments)
    seen: dict[Any, list[Any]] = {}
    for layer in (ours, theirs):
        calls = seen.setdefault(layer, [])
        layer.register_forward_pre_hook(lambda layer, given: (given[0] / 2, *given[1:]))
        layer.register_forward_hook(lambda layer, given, out: out / 2)
        layer.register_full_backward_pre_hook(lambda layer, grads: (grads[0] / 2,))
        layer.register_full_backward_hook(
            lambda layer, inner, outer, calls=calls: calls.append([inner[0], outer[0]])
        )
    same(ours, theirs, arguments)
    torch.testing.assert_close(seen[ours], seen[theirs], rtol=1e-4, atol=1e-5)
    assert len(seen[ours]) == 1 and not torch.allclose(theirs(*arguments), plain)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "AGNNConv"])
def test_hooks_of_all_modules_see_the_projections(name: str, device: torch.device) -> None:
    """Where a layer reads a projection's weight instead of calling it, or stacks it with others."""
    layers, arguments = pair(name, device), graph(device)
    plain = layers[1](*arguments)

    def hook(module: torch.nn.Module, _: Any, out: Any) -> Any:
        return out / 2 if type(module) is Linear else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        same(*layers, arguments)
        assert not torch.allclose(layers[1](*arguments), plain)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_hooks_of_all_modules_see_the_map_of_edges(name: str, device: torch.device) -> None:
    """It is folded into the kernel otherwise, but for GATv2Conv, which calls it."""
    layers, (x, edge_index) = pair(name, device, edge_dim=3), graph(device)
    arguments = (x, edge_index, torch.randn(edge_index.size(1), 3, device=device))
    plain = layers[1](*arguments)

    def hook(module: torch.nn.Module, _: Any, out: Any) -> Any:
        return 3 * out if any(module is layer.lin_edge for layer in layers) else None

    reason = "a hook of all modules is registered, and lin_edge is not called"
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        same(*layers, arguments, *([] if name == "GATv2Conv" else [reason]))
        assert not torch.allclose(layers[1](*arguments), plain)
    finally:
        handle.remove()
    same(*layers, arguments)


def halve_forward(lin: Linear) -> None:
    forward = lin.forward
    lin.forward = lambda x: forward(x) / 2


CHANGES: dict[str, Any] = {
    "forward of the object": halve_forward,
    "backward pre-hook": lambda lin: lin.register_full_backward_pre_hook(lambda lin, grads: (2 * grads[0],)),
    "bias": lambda lin: setattr(lin, "bias", torch.nn.Parameter(torch.ones_like(lin.weight[:, 0]))),
    "pruned": lambda lin: prune.random_unstructured(lin, "weight", 2),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "AGNNConv"])
@pytest.mark.parametrize("change", CHANGES)
def test_projections_with_more_than_a_weight(name: str, change: str, device: torch.device) -> None:
    layers, arguments = pair(name, device), graph(device)
    for layer in layers:
        torch.manual_seed(0)
        for lin in (module for module in layer.modules() if type(module) is Linear):
            CHANGES[change](lin)
    same(*layers, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_another_aggregation_module(name: str, device: torch.device) -> None:
    """PyG's propagate calls it."""
    reason = "`aggr_module` was replaced or has a hook; the kernels sum"
    layers, arguments = pair(name, device), graph(device)
    handles = [layer.aggr_module.register_forward_hook(lambda *given: doubled(given[-1])) for layer in layers]
    same(*layers, arguments, reason)
    for handle in handles:
        handle.remove()
    same(*layers, arguments)
    for layer in layers:
        layer.aggr_module = pyg.MeanAggregation()
    same(*layers, arguments, reason)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name: str, reentrant: bool, device: torch.device) -> None:
    """What is unpacked in backward is unpacked once."""
    ours, theirs = pair(name, device)
    x, edge_index = graph(device)

    def checkpointed(layer: Any) -> list[Tensor]:
        features = x.clone().requires_grad_()
        out = checkpoint(layer, features, edge_index, use_reentrant=reentrant)
        out.square().sum().backward()
        return [out, *(one.grad for one in (features, *layer.parameters()))]

    torch.testing.assert_close(checkpointed(ours), checkpointed(theirs), rtol=1e-4, atol=1e-5)
    assert path_taken(ours) == []


@pytest.mark.parametrize("name", ["GCNConv", "AGNNConv"])
def test_decomposed_layers(name: str, device: torch.device) -> None:
    """As an argument; the others refuse them, as PyG's do (see the tests of each layer)."""
    layers, arguments = pair(name, device, decomposed_layers=2), graph(device)
    same(*layers, arguments, DECOMPOSED)
    layers[0].decomposed_layers = 1
    assert graphfuse.why_not(layers[0], *arguments) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", ["message", "aggregate", "update"])
def test_subclasses_run_their_own_steps(name: str, step: str, device: torch.device) -> None:
    plain, changed = pair(name, device), []
    for layer, prefix in zip(plain, ("Ours", "Theirs"), strict=True):
        base: Any = getattr(type(layer), step)

        @functools.wraps(base)  # PyG reads the signature
        def own(*arguments: Any, base: Any = base, **options: Any) -> Tensor:
            return 2 * base(*arguments, **options)

        # PyG generates one propagate for each name
        cls = type(prefix + step + name, (type(layer),), {step: own, "__module__": __name__})
        changed.append(cls(*CHANNELS[name], **OPTIONS[name]).to(device))
        changed[-1].load_state_dict(layer.state_dict())
    arguments = graph(device)
    same(*changed, arguments, f"Ours{step}{name} overrides `{step}`")
    assert not torch.allclose(changed[1](*arguments), plain[1](*arguments))


NO_LOOPS = {name: {} if name == "TransformerConv" else {"add_self_loops": False} for name in NAMES}


def hetero(x: Tensor, edge_index: Tensor, two: bool) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    """Edges of two types: within one set of nodes, or from one to another and back."""
    if not two:
        return {"a": x}, {("a", "to", "a"): edge_index, ("a", "of", "a"): edge_index.flip(0)}
    edge_index = torch.stack([edge_index[0], edge_index[1].clamp(max=4)])
    return {"a": x, "b": x[2:]}, {("a", "to", "b"): edge_index, ("b", "of", "a"): edge_index.flip(0)}


def same_of_hetero(models: Any, features: Any, edges: Any) -> None:
    results = []
    for model in models:
        torch.manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        out = list(model(features, edges).values())
        grads = torch.autograd.grad(sum(one.square().sum() for one in out), model.parameters())
        results.append([*out, *grads])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert paths(models[0]) and not any(taken != [] for taken in paths(models[0]))


@pytest.mark.parametrize("name", NAMES)
def test_to_hetero(name: str, device: torch.device) -> None:
    """A copy of the layer for each type of edges, all of them fused."""
    homogeneous = nets(name, device, depth=1, **NO_LOOPS[name])
    takes_two = name not in ("GCNConv", "AGNNConv")
    features, edges = hetero(*graph(device), takes_two)
    models = [pyg.to_hetero(model, (list(features), list(edges))) for model in homogeneous]
    same_of_hetero(models, features, edges)
    if takes_two:
        return
    features, edges = hetero(*graph(device), True)
    errors = []
    for model in homogeneous:
        with pytest.raises((ValueError, AttributeError)) as error:
            pyg.to_hetero(model, (list(features), list(edges)))(features, edges)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_hetero_conv(device: torch.device) -> None:
    features, edges = hetero(*graph(device), True)
    pairs = [pair(name, device, **NO_LOOPS[name]) for name in ("GATConv", "TransformerConv")]
    models = [pyg.HeteroConv(dict(zip(edges, convs, strict=True))) for convs in zip(*pairs, strict=True)]
    same_of_hetero(models, features, edges)


@pytest.mark.parametrize("name", NAMES)
def test_summary(name: str, device: torch.device) -> None:
    texts = [pyg.summary(model, *graph(device)) for model in nets(name, device)]
    assert texts[0] == texts[1] and f"(0){name}" in texts[0]


@pytest.mark.parametrize("name", ["GCNConv", "AGNNConv", "TransformerConv"])
def test_torchscript_of_layers_that_ran_fused(name: str, device: torch.device) -> None:
    ours, theirs = nets(name, device, depth=1)
    x, edge_index = graph(device)
    ours(x, edge_index)
    assert paths(ours) == [[]]
    same_numbers(torch.jit.script(ours), theirs, x, edge_index)


@pytest.mark.skipif(torch_geometric.__version__ < "2.8", reason="older PyG scripts its own")
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_pyg_scripts_these_no_more(name: str) -> None:
    for model in nets(name):
        with pytest.raises(RuntimeError):
            torch.jit.script(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces(name: str, device: torch.device) -> None:
    """What is recorded is PyG's path; for other features too."""
    ours, theirs = pair(name, device)
    x, edge_index = graph(device)
    traced = torch.jit.trace(ours, (x, edge_index), check_trace=False)
    assert path_taken(ours) == [TRACED]
    same_numbers(traced, theirs, torch.randn_like(x), edge_index)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(name: str, device: torch.device) -> None:
    """What make_fx and AOTAutograd call the layer with; they see PyG's path."""
    ours, theirs = pair(name, device)
    x, edge_index = graph(device)
    parameters = dict(ours.named_parameters())

    def call(parameters: Any, x: Tensor, edge_index: Tensor) -> Any:
        return functional_call(ours, parameters, (x, edge_index))

    traced = make_fx(call, tracing_mode="symbolic")(parameters, x, edge_index)
    assert path_taken(ours) == [NO_EDGES]
    torch.testing.assert_close(traced(parameters, 2 * x, edge_index), theirs(2 * x, edge_index))
    same(ours, theirs, (x, edge_index))
