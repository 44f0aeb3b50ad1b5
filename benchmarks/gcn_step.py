"""A training step of a two-layer GCN on a large graph, beside one on a matrix made by hand for cuSPARSE."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import graphfuse.nn
from benchmarks import graphs, truth
from benchmarks.baselines import SparseSum
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.transformer_step import training_step

_IN, _HIDDEN, _CLASSES = 602, 128, 41  # Reddit's features and classes, the width of configs/reddit_gcn.yaml


class Net(torch.nn.Module):
    """602 -> 128, ReLU, -> 41."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.first = conv(_IN, _HIDDEN)
        self.last = conv(_HIDDEN, _CLASSES)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """Class scores of every node."""
        scores: Tensor = self.last(self.first(x, edges).relu(), edges)
        return scores


class SparseConv(torch.nn.Module):
    """Graph convolution with a matrix, normalised and with self-loops, in the place of the edges."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor, matrix: SparseSum) -> Tensor:
        """The rows of ``matrix`` times what the linear map makes of ``x``."""
        return matrix(self.lin(x)) + self.bias


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    x: Tensor
    label: Tensor

    def net(self, conv: Any) -> Net:
        """The network, with the same start for all."""
        torch.manual_seed(0)
        start = Net(pyg.GCNConv).state_dict()
        net = Net(conv)
        net.load_state_dict(start)
        return net.to(self.x.device, self.x.dtype)

    def normalised(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Edges with self-loops, and GCN's weight of each."""
        edge_index, weight = gcn_norm(self.graph.edge_index, None, self.graph.num_nodes, dtype=dtype)
        return edge_index, weight


def _problem(graph: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    x = torch.randn(loaded.num_nodes, _IN, device=device(), generator=random).to(dtype)
    label = torch.randint(_CLASSES, (loaded.num_nodes,), device=device(), generator=random)
    inputs = Inputs(loaded, x, label)
    expected = _expected(inputs)
    return Problem(
        facts=loaded.facts(dtype) | {"head_dim": _HIDDEN, "mode": mode},
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([expected], results),
    )


@torch.no_grad()
def _expected(i: Inputs) -> truth.Expected:
    """Scores of a sample of nodes before the first step."""
    num_nodes = i.graph.num_nodes
    net: Any = i.net(pyg.GCNConv)
    (source, target), weight = i.normalised(torch.float64)
    every = truth.edges_of(torch.arange(num_nodes, device=i.x.device), target, source, num_nodes)
    sampled = truth.sample(target, source, num_nodes)

    def layer(conv: Any, x: Tensor, at: truth.Rows, dtype: torch.dtype) -> Tensor:
        x = F.linear(x.to(dtype), conv.lin.weight.to(dtype))
        bias: Tensor = conv.bias.to(dtype)
        return truth.row_sum(at, x, weight, dtype) + bias

    exact, rounded = (
        layer(net.last, layer(net.first, i.x, every, dtype).relu(), sampled, dtype)
        for dtype in (torch.float64, i.x.dtype)
    )
    return truth.Expected(exact, rounded, sampled.rows, 2.0)


def _provider(package: Any, edges_of: Any, i: Inputs) -> Prepared:
    conv = functools.partial(package.GCNConv, cached=True)
    return training_step(i.net(conv), i.x, edges_of(i.graph), i.label)


def _sparse(i: Inputs) -> Prepared:
    edge_index, weight = i.normalised(torch.float32)  # degrees counted in half precision stop at 256
    matrix = SparseSum(edge_index, i.graph.num_nodes, i.x.dtype, weight.to(i.x.dtype))
    del edge_index, weight
    return training_step(i.net(SparseConv), i.x, matrix, i.label)


Bench(
    name="gcn_step",
    sweep=[{"graph": ("reddit",), "dtype": (torch.float32, torch.bfloat16), "mode": ("step",)}],
    problem=_problem,
    providers={  # graphfuse last: its windows stay with the graph, and would count as memory of the others
        "torch.sparse": _sparse,
        "pyg": functools.partial(_provider, pyg, lambda graph: graph.edge_index),
        "graphfuse": functools.partial(_provider, graphfuse.nn, lambda graph: graph.windows),
    },
)
