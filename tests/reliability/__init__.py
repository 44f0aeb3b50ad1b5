"""Layers, graphs and runs that the tests of reliability share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse
from graphfuse import reference
from graphfuse.nn._dispatch import path_taken

ON_GPU = torch.cuda.is_available()
# of tests that do more on a GPU, so that the job there, which chooses by this mark, runs them too
larger_on_gpu = pytest.mark.gpu if ON_GPU else pytest.mark.filterwarnings()
WIDTH, EDGE_DIM = 8, 3
HEADS: dict[str, Any] = {"heads": 2, "dropout": 0.3}


class Layer(NamedTuple):
    """A layer of ``WIDTH`` columns, with options that lead it through kernels of its own."""

    kind: str
    options: Mapping[str, Any] = MappingProxyType({})
    edges: str | None = None  # the keyword of forward that takes numbers of edges

    def make(self, width: int = WIDTH, out: int = 4, **changed: Any) -> torch.nn.Module:
        """Ours."""
        return self._made(getattr(graphfuse.nn, self.kind), width, out, changed)

    def definition(self, width: int = WIDTH, out: int = 4, **changed: Any) -> torch.nn.Module:
        """PyG's, or what stands in its place."""
        theirs = getattr(pyg, self.kind, None) or getattr(reference, self.kind)
        return self._made(theirs, width, out, changed)

    def _made(self, kind: Any, width: int, out: int, changed: dict[str, Any]) -> torch.nn.Module:
        channels = {"AGNNConv": (), "GraphTransformerLayer": (width,)}.get(self.kind, (width, out))
        made = kind(*channels, **{**self.options, **changed})
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1 and "norm" not in name:  # biases, which start at 0
                torch.nn.init.uniform_(parameter, 0.5, 1.0)
        return made

    def values(self, num_edges: int, device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Numbers of edges, as keywords of forward."""
        if self.edges is None:
            return {}
        if self.edges == "edge_weight":
            return {self.edges: torch.rand(num_edges, device=device).add(0.1).to(dtype)}
        return {self.edges: torch.randn(num_edges, EDGE_DIM, device=device).to(dtype)}


_OF_EDGES: dict[str, Any] = {"edge_dim": EDGE_DIM}
LAYERS: dict[str, Layer] = {
    "GCNConv": Layer("GCNConv"),
    "GCNConv, weights": Layer("GCNConv", edges="edge_weight"),
    "GATConv": Layer("GATConv", HEADS),
    "GATConv, edges": Layer("GATConv", HEADS | _OF_EDGES, "edge_attr"),
    "GATv2Conv": Layer("GATv2Conv", HEADS),
    "GATv2Conv, edges": Layer("GATv2Conv", HEADS | _OF_EDGES, "edge_attr"),
    "AGNNConv": Layer("AGNNConv"),
    "TransformerConv": Layer("TransformerConv", HEADS | {"beta": True}),
    "TransformerConv, edges": Layer("TransformerConv", HEADS | _OF_EDGES, "edge_attr"),
    "GraphTransformerLayer": Layer("GraphTransformerLayer", {"heads": 2, "norm": "layer", "dropout": 0.3}),
}
PLAIN = [name for name, layer in LAYERS.items() if layer.edges is None]


def random_edges(num_nodes: int, num_edges: int, device: Any = "cpu", seed: int = 0) -> Tensor:
    """Random edges, the same on every device, some twice; a tenth of the nodes has none; node 0 is a hub."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes - num_nodes // 10, (2, num_edges), generator=generator)
    spokes = torch.randperm(num_nodes - num_nodes // 10, generator=generator)[: num_nodes // 2]
    hub = torch.zeros_like(spokes)
    parts = [edges, edges[:, ::9], torch.stack([spokes, hub]), torch.stack([hub, spokes])]
    edge_index = torch.cat(parts, 1)
    return edge_index[:, torch.randperm(edge_index.size(1), generator=generator)].to(device)


def step(
    layer: torch.nn.Module, x: Tensor, edge_index: Any, seed: int = 1, **values: Tensor
) -> dict[str, Tensor]:
    """Output and all gradients of one training step, whose dropout ``seed`` decides."""
    torch.manual_seed(seed)
    inputs = {"x": x, **values}
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = layer(inputs["x"], edge_index, **{name: inputs[name] for name in values})
    # uneven, and as exact in half precision
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out)
    wanted = inputs | dict(layer.named_parameters())
    grads = torch.autograd.grad(out, list(wanted.values()), cotangent)
    found = {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {"out": out.detach(), **found}


def fused(
    run: Callable[..., dict[str, Tensor]], layer: torch.nn.Module, *given: Any, **values: Tensor
) -> Any:
    """``run`` of a layer of ours, which must have taken the kernels."""
    found = run(layer, *given, **values)
    assert path_taken(layer) == [], path_taken(layer)
    return found
