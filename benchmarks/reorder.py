"""Rows that share columns in one window: the build, its entries, and what ops make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import ablation, graphs, row_windows
from benchmarks.bench import REGISTRY, Bench, Prepared, Problem, device
from benchmarks.graphs import Graph
from benchmarks.truth import Error
from graphfuse import RowWindows

_IDS = ("shuffled", "published")
_GRAPHS = ("cs", "computers", "blogcatalog3", "ego-twitter")


def _load(graph: str, ids: str) -> Graph:
    return graphs.load(f"{graph}:shuffled" if ids == "shuffled" else graph, device())


def _problem(graph: str, ids: str) -> Problem:
    entries_published = _load(graph, "published").windows.num_entries
    loaded = _load(graph, ids)
    extra = {
        "ids": ids,
        "stand_in": graph in graphs.STAND_INS,
        "entries_published": entries_published,
        "entries_before": loaded.windows.num_entries,
    }
    return Problem(
        facts={
            "graph": graph,
            "num_nodes": loaded.num_nodes,
            "num_edges": loaded.num_edges,
            "mode": "build",
            "extra": extra,
        },
        inputs=loaded,
        device=device(),
        check=lambda results: _wrong(loaded, results),
    )


def _wrong(graph: Graph, results: Sequence[Tensor]) -> Error:
    # edges that both directions should hold and do not, and entries beyond those of rows as numbered
    *decoded, entries = results
    differing = row_windows.differing(graph, decoded).value
    return Error(differing + max(int(entries) - graph.windows.num_entries, 0), 0.0)


def _build(method: str, graph: Graph) -> Prepared:
    def build() -> RowWindows:
        return RowWindows.from_edge_index(graph.edge_index, (graph.num_nodes, graph.num_nodes), method)

    windows = build()

    def results() -> Sequence[Tensor]:
        backward = windows.transpose().to_edge_index().flip(0)
        return windows.to_edge_index(), backward, torch.tensor(windows.num_entries)

    extra = {"entries_after": windows.num_entries, "nbytes": windows.nbytes}
    return Prepared(build, results, extra=extra)


Bench(
    name="reorder",
    sweep=[
        {"graph": (*_GRAPHS, "reddit-4m"), "ids": _IDS},
        {"graph": ("dblp-2010", "reddit"), "ids": _IDS},
    ],
    problem=_problem,
    providers={
        "graphfuse": lambda graph: _build("auto", graph),
        "natural": lambda graph: _build("natural", graph),
    },
)


def _op_problem(graph: str, ids: str, kind: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = _load(graph, ids)
    case: dict[str, Any] = {"graph": loaded.name, "dtype": dtype, "mode": mode}
    if kind == "spmm":
        made = REGISTRY["spmm"].problem(**case, head_dim=64)
    else:
        made = REGISTRY["attention"].problem(**case, shape=(1, 64))
    extra = {key: value for key, value in made.facts["extra"].items() if key not in ablation.OF_PEERS}
    extra |= {"kind": kind, "ids": ids}
    return dataclasses.replace(made, facts=made.facts | {"graph": graph, "extra": extra})


def _natural(i: ablation.Inputs) -> Prepared:
    return ablation.run_op(i, i.graph.windows)


Bench(
    name="reordered",
    sweep=[
        {
            "graph": (*_GRAPHS, "reddit"),
            "ids": _IDS,
            "kind": ("spmm", "sparse_attention"),
            "dtype": (torch.float16,),
            "mode": ("fwd",),
        }
    ],
    problem=_op_problem,
    providers={"graphfuse": ablation.reordered, "natural": _natural},
)
