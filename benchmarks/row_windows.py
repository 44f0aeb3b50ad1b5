"""Building row windows and their transpose from an edge list on the device: a time of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.truth import Error
from graphfuse import RowWindows


def _problem(graph: str, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    windows = loaded.windows
    statistics = windows.statistics() | {
        "entries": windows.num_entries,
        "nbytes": windows.nbytes,
        "symmetric": windows.symmetric,
        "stand_in": graph in graphs.STAND_INS,
    }
    return Problem(
        facts={
            "graph": graph,
            "num_nodes": loaded.num_nodes,
            "num_edges": loaded.num_edges,
            "mode": mode,
            "extra": statistics,
        },
        inputs=loaded,
        device=device(),
        check=lambda results: differing(loaded, results),
    )


def differing(graph: graphs.Graph, decoded: Sequence[Tensor]) -> Error:
    """Edges that both directions should hold and do not."""
    wanted = _sorted_keys(graph.edge_index, graph.num_nodes)
    count = 0
    for edges in decoded:
        found = _sorted_keys(edges, graph.num_nodes)
        if found.shape != wanted.shape:
            return Error(float("inf"), 0.0)
        count += int((found != wanted).sum())
    return Error(float(count), 0.0)


def _sorted_keys(edge_index: Tensor, num_nodes: int) -> Tensor:
    return torch.sort(edge_index[0] * num_nodes + edge_index[1]).values


def _graphfuse(graph: graphs.Graph) -> Prepared:
    size = (graph.num_nodes, graph.num_nodes)

    def build() -> RowWindows:
        # both directions are built and packed here; transpose() only swaps them
        return RowWindows.from_edge_index(graph.edge_index, size)

    def decoded() -> Sequence[Tensor]:
        windows = build()
        return windows.to_edge_index(), windows.transpose().to_edge_index().flip(0)

    return Prepared(build, decoded)


Bench(
    name="row_windows",
    sweep=[{"graph": ("cora", "uniform-1m-12m", "reddit", "products"), "mode": ("build",)}],
    problem=_problem,
    providers={"graphfuse": _graphfuse},
)
