"""Inference of ten Graph Transformer layers of one head, as in the end-to-end experiment of Fused3S."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import graphfuse.nn
from benchmarks import captured_steps, graphs, molecules, truth
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.timing import time_call
from graphfuse import ops, reference
from graphfuse.train import loop, models

_DEPTH = 10
_MOLECULES = 1024  # of a batch
_BATCH = f"{_MOLECULES} molecules"
_SECONDS = 0.1  # of timing the attention alone, and the stack beside it


class Net(torch.nn.Module):
    """A stack of layers, in inference: the norms' statistics are those of the start."""

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer(width, heads=1) for _ in range(_DEPTH))

    def forward(self, x: Tensor, edges: Any) -> list[Tensor]:
        """What each layer gives: the check takes one layer after the other."""
        rows = []
        for layer in self.layers:
            x = layer(x, edges)
            rows.append(x)
        return rows


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    x: Tensor

    def net(self, layer: Any) -> Net:
        """The stack, with the same start for all."""
        torch.manual_seed(0)
        return Net(layer, self.x.size(1)).to(self.x.device, self.x.dtype).eval()


def _problem(graph: str, head_dim: int, dtype: torch.dtype, mode: str) -> Problem:
    loaded = _batch() if graph == _BATCH else graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    x = torch.randn(loaded.num_nodes, head_dim, device=device(), generator=random).to(dtype)
    inputs = Inputs(loaded, x)
    facts = loaded.facts(dtype) | {"heads": 1, "head_dim": head_dim, "mode": mode}
    facts["extra"] |= {"layers": _DEPTH} | ({"stand_in": True} if graph == _BATCH else {})
    return Problem(facts, inputs, device(), functools.partial(_check, inputs))


def _batch() -> graphs.Graph:
    """A batch of small graphs, as molhiv's."""
    edge_index, num_nodes = molecules.batch(_MOLECULES)
    return graphs.Graph(_BATCH, edge_index[:, edge_index[0].argsort(stable=True)].to(device()), num_nodes)


@torch.no_grad()
def _check(i: Inputs, results: Sequence[Tensor]) -> truth.Error:
    """Every layer on a sample of its rows, given what the one before it gave."""
    source, target = i.graph.edge_index
    at = truth.sample(target, source, i.graph.num_nodes)
    expected = []
    for layer, x in zip(i.net(reference.GraphTransformerLayer).layers, (i.x, *results), strict=False):
        exact, rounded = (_layer(layer, x, at, dtype) for dtype in (torch.float64, x.dtype))
        expected.append(truth.Expected(exact, rounded, at.rows, 2.0))
    return truth.worst(expected, results)


def _layer(layer: Any, x: Tensor, at: truth.Rows, dtype: torch.dtype) -> Tensor:
    """The rows ``at`` of a layer."""
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype)
    q, k, v = (lin(x)[:, None] for lin in (layer.lin_query, layer.lin_key, layer.lin_value))
    (out,) = truth.attention(at, truth.Operands(q, k, v), dtype)
    x = layer.norm_1(x[at.rows] + layer.lin_out(out[:, 0]))
    found: Tensor = layer.norm_2(x + layer.lin_2(layer.lin_1(x).relu()))
    return found


def _graphfuse(i: Inputs) -> Prepared:
    """The stack as a CUDA graph where there is a GPU, and what part of its time attention alone takes."""
    net, windows = i.net(graphfuse.nn.GraphTransformerLayer), i.graph.windows
    call = _replayed(lambda: net(i.x, windows), i.x.device)
    q, k, v = (torch.randn_like(i.x)[:, None] for _ in range(3))
    attention = _replayed(lambda: [ops.sparse_attention(q, k, v, windows) for _ in range(_DEPTH)], i.x.device)
    alone, whole = (time_call(timed, i.x.device, _SECONDS).p50_ms for timed in (attention, call))
    extra = {"attention_ms": alone, "attention / whole": alone / whole}
    return Prepared(call, call, models.path(net)[0], extra)


def _pyg(compiled: bool, i: Inputs) -> Prepared:
    net = i.net(reference.GraphTransformerLayer)
    if compiled:
        captured_steps.compile_in_place(*net.layers)  # once for all: they differ in their weights alone

    @torch.no_grad()
    def call() -> list[Tensor]:
        rows: list[Tensor] = net(i.x, i.graph.edge_index)
        return rows

    return Prepared(call, call)


def _replayed(call: Callable[[], list[Tensor]], on: torch.device) -> Callable[[], list[Tensor]]:
    call = torch.no_grad()(call)
    return loop.captured(call) if on.type == "cuda" else call


PROVIDERS: dict[str, captured_steps.Provider] = {
    "graphfuse": _graphfuse,
    "pyg": functools.partial(_pyg, False),
    "pyg compiled": functools.partial(_pyg, True),
}

Bench(
    name="graph_transformer",
    sweep=[
        {
            "graph": ("pubmed", "github", "ego-twitter", "reddit", _BATCH),
            "head_dim": (64, 128, 256),
            "dtype": (torch.float16,),
            "mode": ("fwd",),
        }
    ],
    problem=_problem,
    providers=captured_steps.without_compiled(PROVIDERS),
)
