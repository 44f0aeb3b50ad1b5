"""A training step of a two-layer TransformerConv network on a large graph: its time, and all its memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from benchmarks import graphs, truth
from benchmarks import row_windows as row_windows
from benchmarks.bench import REGISTRY, Bench, Prepared, Problem, device
from benchmarks.timing import release
from graphfuse.train import models

_IN, _HEADS, _HIDDEN, _CLASSES = 602, 4, 32, 41  # Reddit's features and classes
_WARM_UP = 2  # steps: the optimizer's state is made in the first
_BUILD = REGISTRY["row_windows"]


class Net(torch.nn.Module):
    """602 -> 4 heads of 32, ReLU, -> 41."""

    def __init__(self, conv: type[torch.nn.Module]) -> None:
        super().__init__()
        self.first = conv(_IN, _HIDDEN, heads=_HEADS)
        self.last = conv(_HEADS * _HIDDEN, _CLASSES)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """Class scores of every node."""
        scores: Tensor = self.last(self.first(x, edges).relu(), edges)
        return scores


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    x: Tensor
    label: Tensor

    def net(self, conv: type[torch.nn.Module]) -> Net:
        """The network, with the same start for all."""
        torch.manual_seed(0)
        return Net(conv).to(self.x.device, self.x.dtype)


def _problem(graph: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    x = torch.randn(loaded.num_nodes, _IN, device=device(), generator=random).to(dtype)
    label = torch.randint(_CLASSES, (loaded.num_nodes,), device=device(), generator=random)
    inputs = Inputs(loaded, x, label)
    expected = _expected(inputs)
    return Problem(
        facts=loaded.facts(dtype) | {"heads": _HEADS, "head_dim": _HIDDEN, "mode": mode},
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([expected], results),
    )


@torch.no_grad()
def _expected(i: Inputs) -> truth.Expected:
    """Scores of a sample of nodes before the first step."""
    net = i.net(pyg.TransformerConv)
    source, target = i.graph.edge_index
    every = torch.arange(i.graph.num_nodes, device=i.x.device)
    every_node = truth.edges_of(every, target, source, i.graph.num_nodes)
    sampled = truth.sample(target, source, i.graph.num_nodes)
    exact, rounded = (
        _layer(net.last, _layer(net.first, i.x, every_node, dtype).relu(), sampled, dtype)
        for dtype in (torch.float64, i.x.dtype)
    )
    return truth.Expected(exact, rounded, sampled.rows, 2.0)


def _layer(conv: Any, x: Tensor, at: truth.Rows, dtype: torch.dtype) -> Tensor:
    """The rows ``at`` of a TransformerConv layer."""

    def project(lin: Any, rows: Tensor) -> Tensor:
        return F.linear(rows.to(dtype), lin.weight.to(dtype), lin.bias.to(dtype))

    size = (-1, conv.heads, conv.out_channels)
    q, k, v = (project(lin, x).view(size) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    (out,) = truth.attention(at, truth.Operands(q, k, v), dtype)
    return out.flatten(1) + project(conv.lin_skip, x[at.rows])


def _provider(conv: type[torch.nn.Module], edges_of: Any, i: Inputs) -> Prepared:
    return training_step(i.net(conv), i.x, edges_of(i.graph), i.label)


def training_step(net: torch.nn.Module, x: Tensor, edges: Any, label: Tensor) -> Prepared:
    """A whole step of ``net(x, edges)`` with Adam; it is checked by its scores before the first one."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    with torch.no_grad():
        checked = net(x, edges)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x, edges).float(), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(_WARM_UP):
        step()
    extra: dict[str, Any] = {}
    if x.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    loss = float(step())
    if x.is_cuda:
        # of everything there is: graph, windows, features, parameters, optimizer, and what the step makes
        extra["total_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss} after {_WARM_UP} steps")
    taken = models.path(net)[0]
    return Prepared(step, lambda: (checked,), "-" if taken == "pyg" else taken, extra)


Bench(
    name="transformer_step",
    sweep=[{"graph": ("reddit",), "dtype": (torch.bfloat16,), "mode": ("step",)}],
    problem=_problem,
    providers={
        "graphfuse": functools.partial(_provider, graphfuse.nn.TransformerConv, lambda graph: graph.windows),
        "pyg": functools.partial(_provider, pyg.TransformerConv, lambda graph: graph.edge_index),
    },
)


def _build(graph: graphs.Graph) -> Prepared:
    """Building the windows that a step takes as given, the edge list beside them."""
    prepared = _BUILD.providers["graphfuse"](graph)
    extra: dict[str, Any] = {}
    if graph.edge_index.is_cuda:
        release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - graph.edge_index.nbytes
        prepared.call()
        extra["total_peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return prepared._replace(extra=extra)


# timed and checked as in `row_windows`, all memory counted as for the step
Bench(
    name="transformer_build",
    sweep=[{"graph": ("reddit",), "mode": ("build",)}],
    problem=_BUILD.problem,
    providers={"graphfuse": _build},
)
