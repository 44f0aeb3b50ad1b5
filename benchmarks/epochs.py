"""A training step on a whole graph: two layers, 128 random features to 128 to 16 classes, with Adam."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import graphfuse.nn
from benchmarks import captured_steps, graphs
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.captured_steps import DROPOUT, Inputs, Layers

_IN, _CLASSES = 128, 16
_WARM_UP = 2  # steps: in training other kernels are compiled than for the check
_NETS: dict[str, Layers] = {
    "gcn": ("GCNConv", 128, None),
    "gat": ("GATConv", 16, 8),
    "agnn": ("AGNNConv", 128, None),
    "transformer": ("TransformerConv", 16, 8),
}


def _problem(graph: str, kind: str, dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator().manual_seed(0)
    nodes = loaded.num_nodes
    data = Data(
        x=torch.randn(nodes, _IN, generator=random),
        y=torch.randint(_CLASSES, (nodes,), generator=random),
        train_mask=torch.ones(nodes, dtype=torch.bool),
    ).to(device())
    data.edge_index = loaded.edge_index
    _, width, heads = layers = _NETS[kind]
    facts = loaded.facts(dtype) | {"heads": heads or 1, "head_dim": width, "mode": mode}
    facts["extra"] |= {"kind": kind, "dropout": DROPOUT}
    inputs = Inputs(data, layers, dtype, captured=device().type == "cuda")
    return captured_steps.problem(inputs, facts, prepared=True)


def _step(package: Any, compiled: bool, i: Inputs) -> Prepared:
    """A step: of graphfuse a CUDA graph where there is a GPU, of PyG launched anew each time."""
    captured = i.captured and package is graphfuse.nn
    prepared = captured_steps.training_step(
        i, package, prepared=package is pyg, captured=captured, compiled=compiled
    )
    for _ in range(_WARM_UP):
        prepared.call()
    launched = "CUDA graph" if captured else "torch.compile" if compiled else "eager"
    return prepared._replace(extra={**prepared.extra, "launched": launched})


PROVIDERS: dict[str, captured_steps.Provider] = {
    "graphfuse": functools.partial(_step, graphfuse.nn, False),
    "pyg": functools.partial(_step, pyg, False),
    "pyg compiled": functools.partial(_step, pyg, True),
}

Bench(
    name="epochs",
    sweep=[
        {
            "graph": ("ego-twitter",),
            "kind": tuple(_NETS),
            "dtype": (torch.bfloat16, torch.float32),
            "mode": ("step",),
        }
    ],
    problem=_problem,
    providers=captured_steps.without_compiled(PROVIDERS),
)
