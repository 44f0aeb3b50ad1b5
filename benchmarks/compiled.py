"""Providers that a run has to ask for, as they compile for long or are seldom installed: ``--also``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import additive, attention, flex, spmm
from benchmarks.baselines import PygSum
from benchmarks.bench import Bench, Prepared, Unsupported
from benchmarks.captured_steps import compile_in_place
from benchmarks.graphs import Graph

_SLOPE = 0.2  # of GATv2's leaky ReLU


def _pyg_attention(i: attention.Inputs) -> Prepared:
    layer = attention.pyg_layer(i)
    compile_in_place(layer)
    return i.run(lambda q, k, v: layer(q, k, v, i.graph.edge_index))


def _pyg_additive(i: additive.Inputs) -> Prepared:
    layer, edge_index = additive.pyg_layer(i)
    compile_in_place(layer)
    return i.run(lambda **operands: layer(edge_index, **operands))


def _pyg_sum(i: spmm.Inputs) -> Prepared:
    layer = PygSum()
    compile_in_place(layer)
    return i.run(lambda x: layer(x, i.graph.edge_index, i.edge_weight))


def _pyg_layer(i: spmm.LayerInputs) -> Prepared:
    layer = PygSum()
    compile_in_place(layer)  # of the layer the aggregation: the dense product is cuBLAS's in either case
    return i.around(lambda x: layer(x, i.graph.edge_index))


def _flex_attention(i: attention.Inputs) -> Prepared:
    reason = flex.unsupported(i.graph, i.operands.dropout)
    if reason is not None:
        raise Unsupported(reason)
    mask = flex.block_mask(i.graph)
    blocks = mask.kv_num_blocks
    extra = {"blocks": int(blocks.sum()), "blocks in all": blocks.numel() ** 2}
    compiled = i.operands.q.is_cuda  # on a CPU the definition, which makes all scores, serves as a check
    return i.run(flex.attention(mask, compiled))._replace(extra=extra)


def _turbo(graph: Graph) -> tuple[Any, Any]:
    """The module, which few have installed, and the graph as it wants it."""
    turbo_gnn: Any = importlib.import_module("turbo_gnn")
    make = turbo_gnn.AdjacencyForwardBackwardWithNodeBuckets.from_edge_list
    return turbo_gnn, make(graph.edge_index, graph.num_nodes, index_dtype=torch.int32)


def _turbo_attention(i: attention.Inputs) -> Prepared:
    if i.operands.dropout > 0:
        raise Unsupported("turbo_gnn has no dropout of the attention weights")
    turbo_gnn, graph = _turbo(i.graph)
    scale = i.operands.q.size(2) ** -0.5

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # what it calls Q is gathered from senders, what it calls K stays with receivers
        out: Tensor = turbo_gnn.graph_transformer_aggr(graph, q, Q=k, K=q, V=v, scale=scale)
        return out.view_as(q)

    return i.run(attend)


def _turbo_additive(i: additive.Inputs) -> Prepared:
    if i.kind != "gatv2":
        raise Unsupported(f"turbo_gnn has no kernel of {i.kind}; of these, GATv2 alone")
    turbo_gnn, graph = _turbo(i.graph)

    def attend(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        given = {"x_neighbors": x_src, "attention_weights": att, "negative_slope": _SLOPE}
        out: Tensor = turbo_gnn.gatv2_aggr(graph, x_dst, **given)
        return out.view_as(x_dst)

    return i.run(attend)


# provider -> benchmark -> what prepares it
ALSO: dict[str, dict[str, Callable[[Any], Prepared]]] = {
    "pyg compiled": {
        "attention": _pyg_attention,
        "additive": _pyg_additive,
        "spmm": _pyg_sum,
        "spmm_weighted": _pyg_sum,
        "spmm_normalized": _pyg_sum,
        "spmm_gemm": _pyg_layer,
    },
    "flex_attention": {"attention": _flex_attention},
    "turbo_gnn": {"attention": _turbo_attention, "additive": _turbo_additive},
}


@dataclass(frozen=True)
class Extended(Bench):
    """A benchmark with more providers; not registered, as it stands in for one that is."""

    def __post_init__(self) -> None:
        pass


def extended(bench: Bench, names: Sequence[str]) -> Bench:
    """``bench`` with those of the named providers that it has; itself if it has none of them."""
    more: Mapping[str, Any] = {name: ALSO[name][bench.name] for name in names if bench.name in ALSO[name]}
    if not more:
        return bench
    fields = {field.name: getattr(bench, field.name) for field in dataclasses.fields(bench)}
    return Extended(**fields | {"providers": {**bench.providers, **more}})
