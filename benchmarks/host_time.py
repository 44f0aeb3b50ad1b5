"""Host time of a layer's forward on a graph too small to keep a GPU busy, beside calling its op by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from benchmarks import truth
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.timing import time_call
from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch
from graphfuse.ops.logits import logits
from graphfuse.ops.unit_rows import unit_rows
from graphfuse.train import models

_NUM_NODES, _NUM_EDGES = 64, 256
_WIDTH, _HEADS = 32, 4  # columns in and out, in heads of 8; GCN and AGNN have one head
_GPU_SECONDS = 0.05

_LAYERS: dict[str, Callable[[Any], torch.nn.Module]] = {  # of a package
    "gcn": lambda package: package.GCNConv(_WIDTH, _WIDTH),
    "gat": lambda package: package.GATConv(_WIDTH, _WIDTH // _HEADS, _HEADS),
    "gatv2": lambda package: package.GATv2Conv(_WIDTH, _WIDTH // _HEADS, _HEADS),
    "agnn": lambda package: package.AGNNConv(),
    "transformer": lambda package: package.TransformerConv(_WIDTH, _WIDTH // _HEADS, _HEADS),
    "graph_transformer": lambda package: package.GraphTransformerLayer(_WIDTH, _HEADS, norm="layer"),
}


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    kind: str
    x: Tensor
    edge_index: Tensor
    windows: RowWindows
    grad: bool

    def layer(self, package: Any) -> torch.nn.Module:
        """The layer of ``package``, with the same parameters for all."""
        torch.manual_seed(0)
        return _LAYERS[self.kind](package).to(self.x.device)


def _problem(kind: str, grad: bool, mode: str) -> Problem:
    random = torch.Generator().manual_seed(0)
    edge_index = torch.randint(_NUM_NODES, (2, _NUM_EDGES), generator=random).to(device())
    x = torch.randn(_NUM_NODES, _WIDTH, generator=random).to(device())
    windows = RowWindows.from_edge_index(edge_index, (_NUM_NODES, _NUM_NODES))
    inputs = Inputs(kind, x, edge_index, windows, grad)
    definition = inputs.layer(reference if kind == "graph_transformer" else pyg)
    with torch.no_grad():
        rounded = definition(x, edge_index)
        exact = definition.double()(x.double(), edge_index)
    expected = truth.Expected(exact, rounded, None, 2.0)
    return Problem(
        facts={
            "graph": "random",
            "num_nodes": _NUM_NODES,
            "num_edges": _NUM_EDGES,
            "head_dim": _WIDTH,
            "dtype": "float32",
            "mode": mode,
            "extra": {"kind": kind, "grad": grad},
        },
        inputs=inputs,
        device=torch.device("cpu"),  # the host is what is timed: between calls nothing waits for the GPU
        check=lambda results: truth.worst([expected], results),
    )


class Ops(NamedTuple):
    """The ops with the record in hand."""

    spmm_gemm: Callable[..., Tensor]  # x, weight, bias, scale, loop_weight
    gat: Callable[..., Tensor]  # a_src, a_dst, x
    gatv2: Callable[..., Tensor]  # x_src, x_dst, att
    attention: Callable[..., Tensor]  # q, k, v
    agnn: Callable[..., Tensor]  # q, k, v, key_scale


def _public(w: RowWindows) -> Ops:
    """Through ``graphfuse.ops``, which checks the arguments."""

    def spmm_gemm(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, loop_weight: Tensor) -> Tensor:
        return ops.spmm_gemm(w, x, weight, bias, loop_weight=loop_weight, row_scale=scale, col_scale=scale)

    return Ops(
        spmm_gemm,
        lambda a_src, a_dst, x: ops.gat_attention(a_src, a_dst, x, w, self_loops=True),
        lambda x_src, x_dst, att: ops.gatv2_attention(x_src, x_dst, att, w, self_loops=True),
        lambda q, k, v: ops.sparse_attention(q, k, v, w),
        lambda q, k, v, scale: ops.sparse_attention(q, k, v, w, 1.0, self_loops=True, key_scale=scale),
    )


def _registered(w: RowWindows) -> Ops:
    """Through ``torch.ops.graphfuse``, on the packed tensors that the public ops would choose."""
    call: Any = torch.ops.graphfuse

    def packed(rows: bool) -> tuple[Any, ...]:
        return (w.packed_rows if rows else w.packed_windows, None, False, *w.shape)

    shape = (_HEADS, _WIDTH // _HEADS)
    of_rows = packed(True)
    of_width = packed(launch.prefers_rows(*w.sizes, _WIDTH, torch.float32, True))
    of_gat = packed(launch.gat_prefers_rows(*w.sizes, *shape, True, False, *[torch.float32] * 2))
    of_heads = packed(launch.attention_prefers_rows(*w.sizes, *shape, False, torch.float32))
    of_agnn = packed(launch.attention_prefers_rows(*w.sizes, 1, _WIDTH, False, torch.float32))
    scale = (_WIDTH // _HEADS) ** -0.5

    def spmm_gemm(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, loop_weight: Tensor) -> Tensor:
        how = (scale, scale, False, False, x.dtype)
        found: Tensor = call.spmm.default(*of_width, *how, x, None, loop_weight, weight, bias)[0]
        return found

    def gat(a_src: Tensor, a_dst: Tensor, x: Tensor) -> Tensor:
        how = (0.2, 0.0, True, False, torch.is_grad_enabled())
        found: Tensor = call.additive_attention.default(*of_gat, *how, a_dst, a_src, x, None, None, None)[0]
        return found

    def gatv2(x_src: Tensor, x_dst: Tensor, att: Tensor) -> Tensor:
        how = (0.2, 0.0, True, True, False)
        found: Tensor = call.additive_attention.default(*of_rows, *how, x_dst, att, x_src, None, None, None)[
            0
        ]
        return found

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operands = (q, k, v, None, None, None, None)
        found: Tensor = call.attention.default(*of_heads, scale, 0.0, False, *operands)[0]
        return found

    def agnn(q: Tensor, k: Tensor, v: Tensor, key_scale: Tensor) -> Tensor:
        found: Tensor = call.attention.default(
            *of_agnn, 1.0, 0.0, True, q, k, v, None, None, None, key_scale
        )[0]
        return found

    return Ops(spmm_gemm, gat, gatv2, attention, agnn)


# What each layer computes, written down for these options alone: the same launches in the same order. They
# return calls without arguments, as whoever writes this has parameters and record in variables.


def _gcn(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    weight, bias = layer.lin.weight, layer.bias
    degree = (w.edges_per_row() - w.loops_per_row() + 1).float()
    scale, loop_weight = degree.double().pow(-0.5).float(), torch.ones_like(degree)
    return lambda: op.spmm_gemm(x, weight, bias, scale, loop_weight)


def _gat(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    weight, att_src, att_dst, bias = layer.lin.weight, layer.att_src, layer.att_dst, layer.bias
    heads, width = att_src.shape[1:]

    def call() -> Tensor:
        rows = F.linear(x, weight).view(-1, heads, width)
        out = op.gat(*logits(rows, att_src[0], att_dst[0]), rows)
        return out.view(-1, heads * width) + bias

    return call


def _gatv2(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    left, right, att, bias = layer.lin_l, layer.lin_r, layer.att, layer.bias
    weights, biases = (left.weight, right.weight), (left.bias, right.bias)
    heads, width = att.shape[1:]

    def call() -> Tensor:
        x_l, x_r = F.linear(x, torch.cat(weights), torch.cat(biases)).split(heads * width, 1)
        out = op.gatv2(x_l.view(-1, heads, width), x_r.view(-1, heads, width), att[0])
        return out.view(-1, heads * width) + bias

    return call


def _agnn(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    beta = layer.beta

    def call() -> Tensor:
        query, key, inverse = unit_rows(x, beta)
        out = op.agnn(query[:, None], key[:, None], x[:, None], inverse).view(x.shape)
        return out.clone() if out.requires_grad else out

    return call


def _transformer(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    maps = (layer.lin_query, layer.lin_key, layer.lin_value, layer.lin_skip)
    weights, biases = [one.weight for one in maps], [one.bias for one in maps]
    heads, width = layer.heads, layer.out_channels

    def call() -> Tensor:
        *qkv, skip = F.linear(x, torch.cat(weights), torch.cat(biases)).split(heads * width, 1)
        out = op.attention(*(rows.view(-1, heads, width) for rows in qkv))
        return out.view(-1, heads * width) + skip

    return call


def _graph_transformer(layer: Any, x: Tensor, w: RowWindows, op: Ops) -> Callable[[], Tensor]:
    weights = [layer.lin_query.weight, layer.lin_key.weight, layer.lin_value.weight]
    out_map, map_1, map_2 = ((one.weight, one.bias) for one in (layer.lin_out, layer.lin_1, layer.lin_2))
    norms = [(one.normalized_shape, one.weight, one.bias, one.eps) for one in (layer.norm_1, layer.norm_2)]
    heads, width = layer.heads, layer.head_dim

    def call() -> Tensor:
        qkv = F.linear(x, torch.cat(weights)).split(heads * width, 1)
        out = op.attention(*(rows.view(-1, heads, width) for rows in qkv)).view(-1, heads * width)
        hidden = F.layer_norm(x + F.linear(out, *out_map), *norms[0])
        return F.layer_norm(hidden + F.linear(F.linear(hidden, *map_1).relu(), *map_2), *norms[1])

    return call


_BY_HAND = {
    "gcn": _gcn,
    "gat": _gat,
    "gatv2": _gatv2,
    "agnn": _agnn,
    "transformer": _transformer,
    "graph_transformer": _graph_transformer,
}


def _prepared(i: Inputs, run: Callable[[], Tensor], path: Callable[[], str] = lambda: "-") -> Prepared:
    call = run if i.grad else torch.no_grad()(run)
    result = call().detach()
    extra: dict[str, Any] = {}
    if i.x.is_cuda:
        # to be less than the host's, or the queue of launches fills up and the host waits
        extra["gpu_ms"] = time_call(call, i.x.device, _GPU_SECONDS).p50_ms
    return Prepared(call, lambda: (result,), path(), extra)


def _by_hand(choose: Callable[[RowWindows], Ops], i: Inputs) -> Prepared:
    layer = i.layer(graphfuse.nn)
    return _prepared(i, _BY_HAND[i.kind](layer, i.x, i.windows, choose(i.windows)))


def _layer(i: Inputs) -> Prepared:
    """The layer called as usual: the record is found by the identity of ``edge_index``."""
    layer, x, edge_index = i.layer(graphfuse.nn), i.x, i.edge_index
    return _prepared(i, lambda: layer(x, edge_index), lambda: models.path(layer)[0])


# the op by hand comes first, so that the record of the layer holds its ratio to that
Bench(
    name="host_time",
    sweep=[{"kind": tuple(_LAYERS), "grad": (True, False), "mode": ("fwd",)}],
    problem=_problem,
    providers={
        "graphfuse.ops": functools.partial(_by_hand, _public),
        "torch.ops.graphfuse": functools.partial(_by_hand, _registered),
        "graphfuse": _layer,
    },
    take_turns=True,
)
