"""A training step of a two-layer network of GAT, GATv2 or AGNN on a large graph: its time, and all memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from benchmarks import graphs, truth
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.transformer_step import training_step

_IN, _CLASSES = 602, 41  # Reddit's features and classes


class Gat(torch.nn.Module):
    """602 -> 8 heads of 8, ELU, -> 41; of GATConv or GATv2Conv."""

    def __init__(self, conv: type[torch.nn.Module]) -> None:
        super().__init__()
        self.first = conv(_IN, 8, heads=8)
        self.last = conv(64, _CLASSES)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """Class scores of every node."""
        scores: Tensor = self.last(F.elu(self.first(x, edges)), edges)
        return scores


class Agnn(torch.nn.Module):
    """602 -> 128, ReLU, two AGNNConv, -> 41."""

    def __init__(self, conv: type[torch.nn.Module]) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(_IN, 128), torch.nn.Linear(128, _CLASSES)
        self.first, self.last = conv(), conv()

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """Class scores of every node."""
        x = self.first(self.before(x).relu(), edges)
        scores: Tensor = self.after(self.last(x, edges))
        return scores


_NETS = {"gat": (Gat, "GATConv"), "gatv2": (Gat, "GATv2Conv"), "agnn": (Agnn, "AGNNConv")}


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    kind: str
    x: Tensor
    label: Tensor

    def net(self, package: Any) -> torch.nn.Module:
        """The network of the layers of ``package``, with the same start for all."""
        torch.manual_seed(0)
        net, layer = _NETS[self.kind]
        return net(getattr(package, layer)).to(self.x.device, self.x.dtype)


def _problem(graph: str, kind: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    x = torch.randn(loaded.num_nodes, _IN, device=device(), generator=random).to(dtype)
    label = torch.randint(_CLASSES, (loaded.num_nodes,), device=device(), generator=random)
    inputs = Inputs(loaded, kind, x, label)
    expected = _expected(inputs)
    facts = loaded.facts(dtype)
    facts["extra"] |= {"kind": kind}
    return Problem(
        facts=facts | {"mode": mode},
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([expected], results),
    )


@torch.no_grad()
def _expected(i: Inputs) -> truth.Expected:
    """Scores of a sample of nodes before the first step."""
    num_nodes = i.graph.num_nodes
    edge_index = i.graph.edge_index
    loops = torch.arange(num_nodes, device=edge_index.device)
    edge_index = torch.cat([edge_index[:, edge_index[0] != edge_index[1]], torch.stack([loops, loops])], 1)
    source, target = edge_index
    every = truth.edges_of(loops, target, source, num_nodes)
    sampled = truth.sample(target, source, num_nodes)
    net: Any = i.net(pyg)
    exact, rounded = (_scores(net, i.x, every, sampled, dtype) for dtype in (torch.float64, i.x.dtype))
    return truth.Expected(exact, rounded, sampled.rows, 2.0)


def _scores(net: Any, x: Tensor, every: truth.Rows, sampled: truth.Rows, dtype: torch.dtype) -> Tensor:
    def linear(lin: Any, x: Tensor) -> Tensor:
        return F.linear(x.to(dtype), lin.weight.to(dtype), None if lin.bias is None else lin.bias.to(dtype))

    if isinstance(net, Agnn):
        hidden = _agnn(net.first, linear(net.before, x).relu(), every, dtype)
        return linear(net.after, _agnn(net.last, hidden, sampled, dtype))
    hidden = F.elu(_gat(net.first, x, every, dtype, linear))
    return _gat(net.last, hidden, sampled, dtype, linear)


def _gat(conv: Any, x: Tensor, at: truth.Rows, dtype: torch.dtype, linear: Any) -> Tensor:
    size = (-1, conv.heads, conv.out_channels)
    if isinstance(conv, pyg.GATConv):
        value = linear(conv.lin, x).view(size)
        a_src, a_dst = ((value * att.to(dtype)).sum(2) for att in (conv.att_src, conv.att_dst))

        def score(i: Tensor, j: Tensor) -> Tensor:
            return F.leaky_relu(a_src[j] + a_dst[i], 0.2)
    else:
        value, receiver = (linear(lin, x).view(size) for lin in (conv.lin_l, conv.lin_r))

        def score(i: Tensor, j: Tensor) -> Tensor:
            return (F.leaky_relu(value[j] + receiver[i], 0.2) * conv.att.to(dtype)).sum(2)

    return truth.weighted(at, score, value, dtype).flatten(1) + conv.bias.to(dtype)


def _agnn(conv: Any, x: Tensor, at: truth.Rows, dtype: torch.dtype) -> Tensor:
    unit = F.normalize(x, dim=1)
    beta = conv.beta.to(dtype)
    return truth.weighted(
        at, lambda i, j: beta * (unit[i] * unit[j]).sum(1, keepdim=True), x[:, None], dtype
    )[:, 0]


def _provider(package: Any, edges_of: Any, i: Inputs) -> Prepared:
    return training_step(i.net(package), i.x, edges_of(i.graph), i.label)


Bench(
    name="attention_steps",
    sweep=[
        {
            "graph": ("reddit",),
            "kind": ("gat", "gatv2", "agnn"),
            "dtype": (torch.bfloat16,),
            "mode": ("step",),
        }
    ],
    problem=_problem,
    providers={
        "graphfuse": functools.partial(_provider, graphfuse.nn, lambda graph: graph.windows),
        "pyg": functools.partial(_provider, pyg, lambda graph: graph.edge_index),
    },
)
