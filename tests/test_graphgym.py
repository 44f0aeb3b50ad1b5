"""Frameworks around a layer: GraphGym, Lightning, OGB's evaluators, PyG's lookup by name."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.resolver import resolver

import graphfuse
from graphfuse.nn._dispatch import path_taken
from tests.nn._layers import CHANNELS, NAMES, graph, paths

ROOT = Path(__file__).parents[1]
GRAPHGYMS = {"fusedgcnconv": "gcnconv", "fusedgatconv": "gatconv"}  # those that GraphGym has itself


@pytest.fixture
def graphgym() -> Any:
    """PyG's GraphGym with our layers in it."""
    pytest.importorskip("yacs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GraphGym's, if Lightning is not there to train with
        import torch_geometric.graphgym as found

        importlib.import_module("graphfuse.graphgym")
    found.set_cfg(found.cfg)
    return found


def batch(device: torch.device) -> Data:
    x, edge_index = graph(device)
    y = torch.arange(7, device=device) % 3
    return Data(x, edge_index, y=y, train_mask=y > 0, split="train")


@pytest.mark.parametrize("layer_type", GRAPHGYMS)
def test_a_model_of_graphgyms(layer_type: str, graphgym: Any, device: torch.device) -> None:
    """One line of the configuration is another; checkpoints go from one to the other."""
    graphgym.cfg.gnn.dim_inner, graphgym.cfg.gnn.layers_mp = 4, 2
    graphgym.cfg.gnn.head = "node"
    models = []
    for name in (layer_type, GRAPHGYMS[layer_type]):
        graphgym.cfg.gnn.layer_type = name
        models.append(graphgym.create_model(to_device=False, dim_in=4, dim_out=3).to(device))
    models[0].load_state_dict(models[1].state_dict())
    data, results = batch(device), []
    for model in models:
        scores, labels = model(data.clone())
        loss = F.cross_entropy(scores, labels)
        results.append([scores, *torch.autograd.grad(loss, model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert paths(models[0]) == [[], []] and len(results[0][0]) == 4


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_graphgym(name: str, graphgym: Any, device: torch.device) -> None:
    config = graphgym.models.layer.LayerConfig(dim_in=4, dim_out=4, has_bias=False)
    ours = graphgym.GeneralLayer(f"fused{name.lower()}", config).to(device)
    options = {} if name == "AGNNConv" else {"bias": True}  # GeneralLayer's, as there is no batch norm
    theirs = getattr(pyg, name)(*CHANNELS[name], **options).to(device)
    theirs.load_state_dict(ours.layer.model.state_dict())
    data = batch(device)
    wanted = F.normalize(theirs(data.x, data.edge_index).relu(), dim=1)
    torch.testing.assert_close(ours(data).x, wanted)
    assert path_taken(ours.layer.model) == []


def test_widths_and_options_of_graphgym(graphgym: Any) -> None:
    config = graphgym.models.layer.LayerConfig(dim_in=3, dim_out=4)
    with pytest.raises(ValueError, match=r"got 3 and 4\); set gnn.layers_pre_mp"):
        graphgym.GeneralLayer("fusedagnnconv", config)
    layer = graphgym.GeneralLayer("fusedgatv2conv", config, heads=2, concat=False)
    assert repr(layer.layer.model) == "GATv2Conv(3, 4, heads=2)"


def test_graphgym_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yacs", None)
    monkeypatch.delitem(sys.modules, "graphfuse.graphgym", raising=False)
    with pytest.raises(
        ImportError, match=r"cannot be used here .*yacs.*; pip install yacs pytorch-lightning"
    ):
        importlib.import_module("graphfuse.graphgym")


def lightning() -> Any:
    """Lightning under the name that PyG's data modules know it by."""
    found = importlib.util.find_spec("lightning") is not None
    return pytest.importorskip("lightning.pytorch" if found else "pytorch_lightning")


@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers, loggers and torch itself
def test_lightning(device: torch.device) -> None:
    """Five steps on a whole graph end where those of PyG's layers end."""
    pl = lightning()
    from torch_geometric.data.lightning import LightningNodeData

    class Module(pl.LightningModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, data: Data, _: int) -> Tensor:
            scores = self.model(data.x, data.edge_index)
            return F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    models = [cls(4, 4, 2, 3) for cls in (graphfuse.nn.models.GCN, pyg.GCN)]
    models[0].load_state_dict(models[1].state_dict())
    data = batch(torch.device("cpu"))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for model in models:
        trainer = pl.Trainer(max_epochs=5, devices=1, accelerator=device.type, **options)
        trainer.fit(Module(model), LightningNodeData(data, loader="full"))
        assert trainer.global_step == 5
    torch.testing.assert_close(*(dict(model.named_parameters()) for model in models), rtol=1e-4, atol=1e-4)
    assert paths(models[0]) == [[], []]


@pytest.mark.filterwarnings("ignore")
def test_lightning_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lightning()
    if not torch.cuda.is_available():
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter would take minutes on 2,708 nodes
    script = str(ROOT / "docs/examples/frameworks/lightning_gat.py")
    monkeypatch.setattr(sys, "argv", [script, "--dataset", "quickstart", "--epochs", "2"])
    runpy.run_path(script, run_name="__main__")
    assert "epoch 002" in capsys.readouterr().out


def test_ogb_evaluator(device: torch.device) -> None:
    evaluators = pytest.importorskip("ogb.nodeproppred", exc_type=ImportError)
    model, data = graphfuse.nn.models.GCN(4, 4, 2, 3).to(device), batch(device)
    labels = model(data.x, data.edge_index).argmax(1, keepdim=True)
    found = evaluators.Evaluator("ogbn-arxiv").eval({"y_true": data.y[:, None], "y_pred": labels})
    assert found == {"acc": pytest.approx((labels[:, 0] == data.y).float().mean().item())}


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_models_by_name(name: str, device: torch.device) -> None:
    """As PyG looks up activations and norms; PyG itself has no lookup of models."""
    found = []
    for models in (graphfuse.nn.models, pyg.models):
        classes = list(filter(inspect.isclass, vars(models).values()))
        found.append(resolver(classes, {}, name.lower(), BasicGNN, None, 4, 4, 2, out_channels=3))
    ours, theirs = (model.to(device) for model in found)
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = graph(device)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert repr(ours) == repr(theirs) and paths(ours) == [[], []]
