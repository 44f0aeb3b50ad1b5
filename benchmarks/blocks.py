"""Mini-batches: cutting a sampled block into row windows, and a training step that begins with doing so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

import graphfuse.nn
from benchmarks import graphs, truth
from benchmarks.bench import Bench, Prepared, Problem, device
from graphfuse import RowWindows
from graphfuse.testing import neighbor_batches
from graphfuse.train import models

_NUM_NEIGHBORS = (10, 5)
_IN, _CLASSES = 100, 47  # those of ogbn-products
# convolution, hidden channels of a head, heads; the last layer has one head
_NETS = {"gcn": ("GCNConv", 128, None), "gat": ("GATConv", 16, 8), "transformer": ("TransformerConv", 32, 4)}
_PARTS = ("rows", "window_edges", "row_edges")  # what a record builds on first use


class Net(torch.nn.Module):
    """100 -> 128 in all heads, ReLU, -> 47."""

    def __init__(self, package: Any, kind: str) -> None:
        super().__init__()
        name, width, heads = _NETS[kind]
        conv = getattr(package, name)
        self.first = conv(_IN, width) if heads is None else conv(_IN, width, heads=heads)
        self.last = conv(width * (heads or 1), _CLASSES)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """Class scores of every node."""
        scores: Tensor = self.last(self.first(x, edges).relu(), edges)
        return scores


@dataclass(frozen=True)
class Inputs:
    """What providers are given. ``batch.edge_index`` itself goes to no layer: it is to have no record."""

    batch: Data
    label: Tensor  # of the seeds
    kind: str
    mode: str

    def net(self, package: Any) -> Net:
        """The network of the layers of ``package``, with the same start for all."""
        torch.manual_seed(0)
        return Net(package, self.kind).to(self.batch.x.device, self.batch.x.dtype)

    def loss(self, scores: Tensor) -> Tensor:
        """Of the seeds, which come first."""
        return F.cross_entropy(scores[: self.label.numel()], self.label)

    def fresh_edges(self) -> Tensor:
        """As a loader hands them over: a tensor that was never seen before."""
        return self.batch.edge_index.clone()


def _problem(graph: str, edges: int, kind: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator().manual_seed(0)
    seeds = torch.randperm(loaded.num_nodes, generator=random)
    first, second = _NUM_NEIGHBORS
    num_seeds = -(-edges // (first + first * second))
    data = Data(edge_index=loaded.edge_index, num_nodes=loaded.num_nodes)
    batch = next(neighbor_batches(data, _NUM_NEIGHBORS, num_seeds, seeds))
    batch.x = torch.randn(batch.num_nodes, _IN, generator=random).to(device(), dtype)
    label = torch.randint(_CLASSES, (batch.batch_size,), generator=random).to(device())
    inputs = Inputs(batch, label, kind, mode)
    facts = loaded.facts(dtype)
    facts["extra"] = facts["extra"] | {
        "kind": kind,
        "seeds": batch.batch_size,
        "num_neighbors": list(_NUM_NEIGHBORS),
    }
    facts |= {"graph": f"{graph}, {edges} edges", "num_nodes": batch.num_nodes, "num_edges": batch.num_edges}
    if mode == "build":
        check = functools.partial(_differing, inputs)
    else:
        results = [_results(inputs, inputs.net(pyg).to(precise)) for precise in (torch.float64, dtype)]
        expected = [
            truth.Expected(exact, rounded, None, factor)
            for exact, rounded, factor in zip(*results, (2.0, 3.0), strict=True)
        ]
        check = functools.partial(truth.worst, expected)
    return Problem(facts | {"mode": mode}, inputs, device(), check)


def _results(i: Inputs, net: Net) -> Sequence[Tensor]:
    """Scores of the seeds, and the gradients of all parameters as one."""
    parameters = list(net.parameters())
    scores = net(i.batch.x.to(parameters[0].dtype), i.fresh_edges())
    gradients = torch.autograd.grad(i.loss(scores), parameters)
    return scores[: i.label.numel()].detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _step(package: Any, i: Inputs) -> Prepared:
    net = i.net(package)
    checked = _results(i, net)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        i.loss(net(i.batch.x, i.fresh_edges())).backward()

    taken = models.path(net)[0]
    return Prepared(step, lambda: checked, "-" if taken == "pyg" else taken)


def _differing(i: Inputs, decoded: Sequence[Tensor]) -> truth.Error:
    # edges that both directions should hold and do not
    keys = [edges[0] * i.batch.num_nodes + edges[1] for edges in (i.batch.edge_index, *decoded)]
    wanted, *found = (torch.sort(key).values for key in keys)
    if any(key.shape != wanted.shape for key in found):
        return truth.Error(float("inf"), 0.0)
    return truth.Error(float(sum(int((key != wanted).sum()) for key in found)), 0.0)


def _build(i: Inputs) -> Prepared:
    """All that forward and backward of the network build: windows, and what is added on first use."""
    size = (i.batch.num_nodes, i.batch.num_nodes)
    windows = RowWindows.from_edge_index(i.fresh_edges(), size)
    i.loss(i.net(graphfuse.nn)(i.batch.x, windows)).backward()
    parts = [name for name in _PARTS if name in windows.__getstate__()]

    def build() -> RowWindows:
        windows = RowWindows.from_edge_index(i.batch.edge_index, size)
        for name in parts:
            getattr(windows, f"packed_{name}")
        return windows

    def decoded() -> Sequence[Tensor]:
        windows = build()
        return windows.to_edge_index(), windows.transpose().to_edge_index().flip(0)

    return Prepared(build, decoded, extra={"parts": ["windows", *parts], "nbytes": windows.nbytes})


def _build_csr(i: Inputs) -> Prepared:
    """What PyG can prepare: CSC, as whose order the edges are in, and CSR."""
    size = (i.batch.num_nodes, i.batch.num_nodes)

    def build() -> EdgeIndex:
        return EdgeIndex(i.batch.edge_index, sparse_size=size, sort_order="col").fill_cache_()

    def decoded() -> Sequence[Tensor]:
        edges = build()
        (col_ptr, row), _ = edges.get_csc()
        (row_ptr, col), _ = edges.get_csr()
        by_col, by_row = (torch.repeat_interleave(torch.diff(ptr)) for ptr in (col_ptr, row_ptr))
        return torch.stack([row, by_col]), torch.stack([by_row, col])

    return Prepared(build, decoded)


def _provider(package: Any, build: Callable[[Inputs], Prepared], i: Inputs) -> Prepared:
    return build(i) if i.mode == "build" else _step(package, i)


Bench(
    name="blocks",
    sweep=[
        {
            "graph": ("uniform-1m-12m",),
            "edges": (10_000, 50_000, 200_000),
            "kind": tuple(_NETS),
            "dtype": (torch.float32,),
            "mode": ("step", "build"),
        }
    ],
    problem=_problem,
    providers={
        "graphfuse": functools.partial(_provider, graphfuse.nn, _build),
        "pyg": functools.partial(_provider, pyg, _build_csr),
    },
    take_turns=True,
)
