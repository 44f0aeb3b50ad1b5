"""PyG's layers exchanged for graphfuse's and back: same numbers, same objects, and a report."""

from __future__ import annotations

import copy
import os
import pickle
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer

import graphfuse
from graphfuse.nn._dispatch import path_taken
from graphfuse.train import datasets
from tests._models import MODELS, OUT, WIDTH, Inputs, Stack, run

ROOT = Path(__file__).parents[1]
LAYERS: dict[str, tuple[Any, ...]] = {
    "GCNConv": (WIDTH, OUT),
    "GATConv": (WIDTH, OUT, 2),
    "GATv2Conv": (WIDTH, OUT, 2),
    "AGNNConv": (),
    "TransformerConv": (WIDTH, OUT, 2),
}
GENERATED = ("propagate", "collect", "_orig_propagate", "_jinja_propagate")
GENERATED += ("edge_updater", "edge_collect", "_orig_edge_updater", "_jinja_edge_updater")


@pytest.fixture
def inputs(device: torch.device) -> Inputs:
    return Inputs(device)


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def layer(name: str, device: Any = "cpu", **options: Any) -> Any:
    return getattr(pyg, name)(*LAYERS[name], **options).to(device)


def public(module: torch.nn.Module) -> dict[str, str]:
    """The state of a layer but for parameters and modules, as text, and what its inspector knows."""
    state = {
        key: repr(value) for key, value in vars(module).items() if key not in ("_parameters", "_modules")
    }
    return state | {"signatures": repr(module.inspector._signature_dict)}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_before_between_and_after(
    name: str, inputs: Inputs, device: torch.device
) -> None:
    case = MODELS[name]
    model = case.make().to(device)
    with torch.no_grad():
        model.eval()(*case.arguments(inputs))  # draws lazy parameters
    model.train()
    state, parameters, modules = model.state_dict(), list(model.parameters()), list(model.modules())
    classes = list(map(type, modules))
    wanted = run(model, case, inputs)

    converted, report = graphfuse.convert(model)
    assert converted is model and list(model.modules()) == modules
    assert all(one is same for one, same in zip(model.parameters(), parameters, strict=True))
    assert len(report.swapped) == case.swapped
    assert [report[swapped] for swapped in report.swapped] == [[]] * case.swapped
    swapped = [model.get_submodule(name) for name in report.swapped]
    assert all(type(one).__module__.startswith("graphfuse.nn.") for one in swapped)
    close(run(model, case, inputs), wanted)
    assert [path_taken(one) for one in swapped] == [[]] * case.swapped

    twin = copy.deepcopy(model)
    if name != "to_hetero":  # the program of torch.fx in it cannot be pickled
        twin = pickle.loads(pickle.dumps(twin))
    twin.load_state_dict(state)
    assert [type(twin.get_submodule(name)) for name in report.swapped] == list(map(type, swapped))
    if name in ("Sequential", "to_hetero"):
        close(run(twin, case, inputs), wanted)
        assert path_taken(twin.get_submodule(report.swapped[0])) == []

    assert graphfuse.revert(model) is model and list(map(type, modules)) == classes
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(twin.state_dict())
    for one in (copy.deepcopy(model), graphfuse.revert(twin)):
        close(run(one, case, inputs), wanted)
        assert all(path_taken(module) is None for module in one.modules())


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_if_it_had_been_constructed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = getattr(graphfuse.nn, name)
    constructed, theirs, kept = public(ours(*LAYERS[name])), layer(name), layer(name)
    random = torch.get_rng_state()
    for cls, change, wanted in (
        (ours, graphfuse.convert, constructed),
        (getattr(pyg, name), graphfuse.revert, public(kept)),
    ):
        for attribute in GENERATED:  # as before the first object of the class
            monkeypatch.delattr(cls, attribute, raising=False) if attribute in vars(cls) else None
        change(theirs)
        assert type(theirs) is cls and theirs.inspector._cls is cls
        assert public(theirs) == wanted
        assert cls.propagate.__module__.endswith(f"{name}_propagate")
        assert cls.propagate.__module__.startswith(cls.__module__)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_fresh_process_converts_and_reverts(tmp_path: Path) -> None:
    """There no object of any of the classes was constructed."""
    inputs, models = Inputs(), {name: layer(name) for name in LAYERS}
    wanted = {name: models[name](inputs.x, inputs.edge_index).detach() for name in models}
    for name in models:  # a layer that was explained holds on to a method of its class
        models[name].explain, models[name].explain = True, False
    converted = graphfuse.convert(copy.deepcopy(torch.nn.ModuleDict(models))).model
    torch.save((models, dict(converted), wanted, inputs.x, inputs.edge_index), tmp_path / "models.pt")
    code = """
    import sys, torch, graphfuse
    theirs, ours, wanted, x, edge_index = torch.load(sys.argv[1], weights_only=False)
    for name in wanted:
        for model, change in ((theirs[name], graphfuse.convert), (ours[name], graphfuse.revert)):
            before = type(model)
            torch.testing.assert_close(model(x, edge_index), wanted[name])
            change(model)
            assert type(model) is not before
            torch.testing.assert_close(model(x, edge_index), wanted[name])
            assert type(model).propagate.__module__ == f"{type(model).__module__}_{name}_propagate"
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "models.pt"],
        env={**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        check=True,
    )


def test_hooks_stay(inputs: Inputs, device: torch.device) -> None:
    model = pyg.GAT(WIDTH, 4, 2, OUT, heads=2).to(device)
    seen: list[str] = []
    model.convs[0].register_forward_hook(lambda module, args, out: seen.append(type(module).__module__))
    model.convs[0].lin.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    handle = model.convs[1].register_message_forward_hook(lambda module, args, out: 3 * out)
    wanted = run(model, MODELS["GAT"], inputs)
    report = graphfuse.convert(model).report
    assert report["convs.0"] == []
    assert report["convs.1"] == ["a hook is registered on a step of message passing (message_forward_hooks)"]
    close(run(model, MODELS["GAT"], inputs), wanted)
    assert path_taken(model.convs[0]) == [] and path_taken(model.convs[1]) == report["convs.1"]
    assert seen == ["torch_geometric.nn.conv.gat_conv", "graphfuse.nn.gat_conv"]
    handle.remove()
    run(model, MODELS["GAT"], inputs)
    assert path_taken(model.convs[1]) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_explaining_and_decomposing(when: str, inputs: Inputs, device: torch.device) -> None:
    theirs = layer("GCNConv", device)
    ours = copy.deepcopy(theirs)
    graphfuse.convert(ours) if when == "after" else None
    for one in (theirs, ours):
        one.decomposed_layers = 2
    graphfuse.convert(ours)
    close([ours(inputs.x, inputs.edge_index)], [theirs(inputs.x, inputs.edge_index)])
    assert path_taken(ours) == ["decomposed_layers is 2; the kernels handle all features at once"]
    revert = copy.deepcopy(ours) if when == "before" else ours
    for one in (theirs, ours):
        one.decomposed_layers = 1
        one.explain = True
        one._edge_mask = torch.linspace(-1, 1, inputs.edge_index.size(1), device=device)
        one._loop_mask = inputs.edge_index[0] != inputs.edge_index[1]
    for change in (graphfuse.revert, graphfuse.convert):  # while it is being explained
        change(ours)
        close([ours(inputs.x, inputs.edge_index)], [theirs(inputs.x, inputs.edge_index)])
    assert graphfuse.why_not(ours, inputs.x, inputs.edge_index)
    ours.explain = theirs.explain = False  # leaves PyG's own propagate on the object
    for change in (graphfuse.revert, graphfuse.convert):
        change(ours)
        assert vars(ours)["propagate"].__func__ is type(ours)._jinja_propagate
        close([ours(inputs.x, inputs.edge_index)], [theirs(inputs.x, inputs.edge_index)])
    assert path_taken(ours) == []
    assert graphfuse.revert(revert) is revert


@pytest.mark.parametrize("algorithm", [GNNExplainer, AttentionExplainer])
def test_explainers_find_the_same_masks(algorithm: Any, inputs: Inputs, device: torch.device) -> None:
    model = pyg.GAT(WIDTH, 4, 2, OUT, heads=2).to(device)
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    masks = []
    for _ in range(2):
        torch.manual_seed(0)
        options = {"epochs": 3} if algorithm is GNNExplainer else {}
        explainer = Explainer(
            model,
            algorithm(**options),
            explanation_type="model",
            node_mask_type="attributes" if options else None,
            edge_mask_type="object",
            model_config=config,
        )
        found = explainer(inputs.x.detach(), inputs.edge_index, index=2)
        masks.append([found.edge_mask] + ([found.node_mask] if options else []))
        graphfuse.convert(model)
    close(masks[1], masks[0])
    if algorithm is GNNExplainer:
        model(inputs.x, inputs.edge_index)
        assert [path_taken(conv) for conv in model.convs] == [[], []]


def test_cached_graphs_are_kept(inputs: Inputs, device: torch.device) -> None:
    conv = layer("GCNConv", device, cached=True)
    wanted = conv(inputs.x, inputs.edge_index)
    kept = conv._cached_edge_index
    graphfuse.convert(conv)
    assert conv._cached_edge_index is kept
    close([conv(inputs.x, inputs.edge_index[:, :3])], [wanted])  # the graph given is not looked at
    conv._cached_edge_index = None
    close([conv(inputs.x, inputs.edge_index)], [wanted])
    assert path_taken(conv) == [] and conv._cached_windows is not None
    graphfuse.revert(conv)
    assert not hasattr(conv, "_cached_windows")
    close([conv(inputs.x, inputs.edge_index[:, :3])], [wanted])


def test_an_optimizer_keeps_working(inputs: Inputs, device: torch.device) -> None:
    def train(change_after: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = pyg.GCN(WIDTH, 4, 2, OUT).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(2):
            if step == change_after:
                graphfuse.convert(model)
            run(model, MODELS["GCN jk"], inputs)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    close(train(1), train(2))


@pytest.mark.parametrize("name", ["GCN jk", "HeteroConv", "TransformerConv"])
def test_lazy_layers_draw_the_same_parameters(name: str, inputs: Inputs, device: torch.device) -> None:
    case, states = MODELS[name], []
    for change in (lambda model: model, lambda model: graphfuse.convert(model).model):
        torch.manual_seed(0)
        model = change(case.make()).to(device)
        model(*case.arguments(inputs))
        states.append(model.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(map(torch.equal, states[0].values(), states[1].values()))


def test_filter_fn_chooses() -> None:
    model, seen = Stack(), []

    def choose(module: torch.nn.Module, name: str) -> bool:
        seen.append((name, type(module)))
        return name == "convs.1"

    report = graphfuse.convert(model, filter_fn=choose).report
    assert seen == [("convs.0", pyg.GCNConv), ("convs.1", pyg.GATv2Conv)]  # what has a twin, once each
    assert report.swapped == ("convs.1",)
    assert dict(report) == {"convs.0": ["filter_fn left it out"], "convs.1": []}
    assert isinstance(model.convs[2], graphfuse.nn.GATv2Conv)
    graphfuse.revert(model, lambda module, name: name != "convs.1")
    assert isinstance(model.convs[1], graphfuse.nn.GATv2Conv)
    with pytest.raises(ZeroDivisionError):
        graphfuse.convert(model, lambda module, name: 1 / 0)
    assert type(model.convs[0]) is pyg.GCNConv


class Derived(pyg.GATConv):
    pass


class OwnLayer(pyg.MessagePassing):
    pass


class OwnFused(graphfuse.nn.GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j


def test_the_report_says_why_not() -> None:
    scripted = torch.jit.script(pyg.GCNConv(2, 2))
    wide = pyg.TransformerConv(2, 300, aggr="max", dropout=1.0)
    filled = pyg.GATv2Conv(2, 2, edge_dim=2, fill_value="max")
    hooked = pyg.GATConv(2, 2, edge_dim=2)
    hooked.lin_edge = torch.nn.Sequential(torch.nn.Linear(2, 2))
    many = pyg.TransformerConv(2, 256, heads=32, edge_dim=2)
    sparse = pyg.GCNConv(2, 2, cached=True)
    sparse._cached_adj_t = object()  # type: ignore[assignment]
    plain = [pyg.GATConv(-1, 2, edge_dim=-1), pyg.TransformerConv(2, 2, edge_dim=2), pyg.AGNNConv(False)]
    ours = [graphfuse.nn.GraphTransformerLayer(4, 2), OwnFused(2, 2), graphfuse.nn.AGNNConv()]
    layers = [Derived(2, 2), OwnLayer(), pyg.SAGEConv(2, 2), scripted, wide, filled, hooked, many, sparse]
    model = torch.nn.ModuleList([*layers, *plain, *ours, torch.nn.Linear(2, 2)])
    report = graphfuse.convert(model).report
    assert dict(report) == {
        "0": ["Derived is derived from PyG's GATConv; derive it from graphfuse.nn.GATConv"],
        "1": ["graphfuse has no class for OwnLayer"],
        "2": ["graphfuse has no class for SAGEConv"],
        "3": ["the layer is a ScriptModule; convert the model before it is scripted or traced"],
        "4": [
            "the aggregation is 'max'; the kernels sum",
            "out_channels is 300; the kernels take heads of at most 256",
            "dropout is 1.0; the kernels take rates from 0 to below 1",
        ],
        "5": ["fill_value is 'max'; fused self-loops take a sum, a mean or a constant"],
        "6": ["lin_edge is not a plain linear map in the dtype of x"],
        "7": [
            "heads * max(out_channels, edge_dim) is over 4096 in powers of two (got 32 heads of 256, "
            "edge_dim 2)"
        ],
        "8": ["the layer has cached a SparseTensor"],
        **{name: [] for name in ("9", "10", "11", "12")},
        "13": ["OwnFused overrides `message`"],
        "14": [],
    }
    assert report.swapped == ("4", "5", "6", "7", "8", "9", "10", "11")
    assert [type(one) for one in model[:4]] == list(map(type, layers[:4]))
    again = graphfuse.convert(model).report
    assert dict(again) == dict(report) and again.swapped == ()
    graphfuse.revert(model)
    assert type(model[4]) is pyg.TransformerConv and type(model[13]) is OwnFused
    assert type(model[12]) is graphfuse.nn.GraphTransformerLayer and type(model[14]) is pyg.AGNNConv


def test_the_report_is_a_table() -> None:
    conv = pyg.GATConv(2, 300, aggr="max")
    model, report = graphfuse.convert(conv)
    assert model is conv and type(conv) is graphfuse.nn.GATConv
    assert repr(report) == "Report(1 of 1 layers swapped)"
    assert str(report).splitlines() == [
        "layer    class    swapped  why it will not fuse",
        "(model)  GATConv  yes      the aggregation is 'max'; the kernels sum",
        "                           out_channels is 300; the kernels take heads of at most 256",
    ]
    assert str(graphfuse.convert(torch.nn.Linear(2, 2)).report) == "no message passing layers"
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module \(got type\)"):
        graphfuse.convert(pyg.GCN)  # type: ignore[arg-type]


def test_wrappers_are_seen_through() -> None:
    model = pyg.GCN(WIDTH, 4, 2, OUT)
    assert graphfuse.convert(torch.nn.DataParallel(model)).report.swapped == (
        "module.convs.0",
        "module.convs.1",
    )
    graphfuse.revert(torch.nn.DataParallel(model))
    assert {type(conv) for conv in model.convs} == {pyg.GCNConv}


def test_a_compiled_model_notices(device: torch.device, inputs: Inputs) -> None:
    model, programs = layer("GCNConv", device), []

    def backend(program: Any, example_inputs: Any) -> Any:
        programs.append(program)
        return program

    compiled = torch.compile(model, backend=backend)
    wanted = compiled(inputs.x, inputs.edge_index).detach()
    compiled(inputs.x, inputs.edge_index)
    before = len(programs)
    assert graphfuse.convert(compiled).report.swapped == ("_orig_mod",)
    with torch.no_grad():
        model.bias += 1
    close([compiled(inputs.x, inputs.edge_index).detach()], [wanted + 1])
    assert len(programs) > before > 0  # compiled anew, for the other forward


@pytest.mark.parametrize(("name", "options"), [("GCN", {}), ("GAT", {"v2": True})])
def test_models_of_graphfuse_revert(
    name: str, options: dict[str, Any], inputs: Inputs, device: torch.device
) -> None:
    ours = getattr(graphfuse.nn.models, name)(WIDTH, 4, 2, OUT, **options).to(device)
    theirs = getattr(pyg, name)(WIDTH, 4, 2, OUT, **options).to(device)
    theirs.load_state_dict(ours.state_dict())
    graphfuse.revert(ours)
    assert list(map(type, ours.convs)) == list(map(type, theirs.convs))
    for found, wanted in zip(run(ours, MODELS[name], inputs), run(theirs, MODELS[name], inputs), strict=True):
        close([found], [wanted])


def test_the_example_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = datasets.planted_partition(num_nodes=20, num_classes=2, num_words=8)
    monkeypatch.setattr(datasets, "planted_partition", lambda: data)
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter would take long
    monkeypatch.setattr(sys, "argv", ["convert_gat.py", "--hidden_channels", "8", "--epochs", "2"])
    runpy.run_path(str(ROOT / "docs/examples/convert_gat.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "convs.1  GATConv  yes      GRAPHFUSE_DISABLE=1 is set" in printed and "Epoch: 002" in printed
