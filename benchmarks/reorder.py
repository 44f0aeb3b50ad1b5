"""Ordering the rows of a graph: column entries before and after, and the time that it takes on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.datasets import Amazon, Coauthor

from benchmarks import graphs, synth
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.graphs import Graph
from benchmarks.truth import Error
from graphfuse.formats import reorder
from graphfuse.train import datasets


def _computers() -> tuple[Tensor, int]:
    data = Amazon(str(datasets.data_root() / "amazon"), "Computers")[0]
    return data.edge_index, int(data.num_nodes)


def _coauthor() -> tuple[Tensor, int]:
    data = Coauthor(str(datasets.data_root() / "coauthor"), "CS")[0]
    return data.edge_index, int(data.num_nodes)


def _small_reddit() -> tuple[Tensor, int]:
    indptr, indices = synth.community_graph("reddit", scale=0.04)
    source = torch.from_numpy(np.repeat(np.arange(indptr.size - 1), np.diff(indptr)))
    return torch.stack([source, torch.from_numpy(indices).long()]), indptr.size - 1


_LOADERS: dict[str, Callable[[], tuple[Tensor, int]]] = {
    "amazon-computers": _computers,
    "coauthor-cs": _coauthor,
    "reddit-4m": _small_reddit,  # the stand-in with 4 % of its nodes and edges
}
_STAND_INS = (*graphs.STAND_INS, "reddit-4m")


@functools.lru_cache(maxsize=1)
def _load(name: str) -> Graph:
    if name not in _LOADERS:
        return graphs.load(name, device())
    edge_index, num_nodes = _LOADERS[name]()
    return Graph(name, edge_index.to(device()), num_nodes)


def _problem(graph: str, ids: str) -> Problem:
    published = _load(graph)
    size = (published.num_nodes, published.num_nodes)
    src, dst = published.edge_index
    extra = {
        "ids": ids,
        "stand_in": graph in _STAND_INS,
        "entries_published": reorder.num_entries(dst, src, *size),
    }
    edge_index = published.edge_index
    if ids == "shuffled":
        generator = torch.Generator().manual_seed(1)
        edge_index = torch.randperm(size[0], generator=generator).to(edge_index.device)[edge_index]
    inputs = Graph(graph, edge_index, published.num_nodes)
    extra["entries_before"] = reorder.num_entries(edge_index[1], edge_index[0], *size)
    return Problem(
        facts={
            "graph": graph,
            "num_nodes": inputs.num_nodes,
            "num_edges": inputs.num_edges,
            "mode": "build",
            "extra": extra,
        },
        inputs=inputs,
        device=device(),
        check=functools.partial(_misplaced, inputs),
    )


def _misplaced(graph: Graph, results: Sequence[Tensor]) -> Error:
    # rows that the order lacks, or more entries than the given order has
    permutation, entries = results
    wanted = torch.arange(graph.num_nodes, device=permutation.device)
    if permutation.shape != wanted.shape:
        return Error(float("inf"), 0.0)
    src, dst = graph.edge_index
    more = int(entries) - reorder.num_entries(dst, src, graph.num_nodes, graph.num_nodes)
    return Error(float((permutation.sort().values != wanted).sum()) + max(more, 0), 0.0)


def _graphfuse(graph: Graph) -> Prepared:
    src, dst = graph.edge_index
    size = (graph.num_nodes, graph.num_nodes)

    def cluster() -> Tensor:
        return reorder.cluster(dst, src, *size)

    permutation = cluster()
    entries = reorder.num_entries(dst, src, *size, permutation)
    extra = {"entries_after": entries}
    return Prepared(cluster, lambda: (permutation, torch.tensor(entries)), extra=extra)


Bench(
    name="reorder",
    sweep=[
        {
            "graph": ("coauthor-cs", "amazon-computers", "blogcatalog3", "ego-twitter", "reddit-4m"),
            "ids": ("shuffled", "published"),
        },
        {"graph": ("dblp-2010", "reddit"), "ids": ("shuffled", "published")},
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse},
)
