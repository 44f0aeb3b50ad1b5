"""Five layers as PyG's, each from four columns to four, so that any two of them stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse
from graphfuse.nn._dispatch import path_taken

HEADS: dict[str, Any] = {"heads": 2, "concat": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "GATConv": HEADS,
    "GATv2Conv": HEADS,
    "AGNNConv": {},
    "TransformerConv": HEADS,
}
NAMES = tuple(OPTIONS)
CHANNELS: dict[str, tuple[int, ...]] = dict.fromkeys(NAMES, (4, 4)) | {"AGNNConv": ()}
EXPLAINED = "the layer is being explained (layer.explain is True), which needs every message"

# Seven nodes, one without edges; a repeated edge, and two self-loops.
EDGES = torch.tensor([[0, 0, 1, 2, 4, 4, 5, 3, 2, 5, 1], [1, 1, 0, 0, 3, 3, 0, 3, 2, 4, 5]])

# On one GPU this is no GPU test, so that --require-gpu does not ask for a second one.
two_gpus = pytest.mark.gpu if torch.cuda.device_count() > 1 else pytest.mark.skip(reason="needs two GPUs")


def graph(device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Features and edges."""
    return torch.randn(len(EDGES[0]) - 4, 4).to(device), EDGES.to(device)


def pair(name: str, device: Any = "cpu", **options: Any) -> tuple[Any, Any]:
    """Our layer and PyG's with equal weights, none of them 0."""
    theirs, ours = (
        getattr(one, name)(*CHANNELS[name], **OPTIONS[name], **options) for one in (pyg, graphfuse.nn)
    )
    for key, parameter in theirs.named_parameters():
        if key.endswith(("bias", "beta")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(device), theirs.to(device)


class Net(torch.nn.Module):
    """Layers in a row."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).tanh()
        return x


def nets(name: str, device: Any = "cpu", depth: int = 2, **options: Any) -> tuple[Net, Net]:
    """Our network of one kind of layer and PyG's with equal weights."""
    ours, theirs = zip(*(pair(name, device, **options) for _ in range(depth)), strict=True)
    return Net(list(ours)), Net(list(theirs))


def paths(model: torch.nn.Module) -> list[list[str] | None]:
    """How the last forward of each layer of ours ran."""
    return [path_taken(layer) for layer in layers(model)]


def layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of message passing in ``model``."""
    return (layer for layer in model.modules() if isinstance(layer, pyg.MessagePassing))


def run(model: torch.nn.Module, *arguments: Any, half: torch.dtype | None = None) -> list[Tensor]:
    """Output, under autocast to ``half``, and the gradients of the first argument and of all parameters."""
    x = arguments[0].detach().requires_grad_()
    with torch.autocast(x.device.type, half, enabled=half is not None):
        out = model(x, *arguments[1:])
    return [out, *torch.autograd.grad(out.double().square().sum(), [x, *model.parameters()])]
