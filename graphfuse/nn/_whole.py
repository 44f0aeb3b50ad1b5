"""Layers that are no more than their parameters, as one Function; None where ops have to compose them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.nn._projection import may_read
from graphfuse.nn._sparse_features import features_of
from graphfuse.ops._whole import Maps
from graphfuse.ops.gat_layer import gat_layer
from graphfuse.ops.gatv2_layer import gatv2_layer
from graphfuse.ops.transformer_layer import transformer_layer


def gat(layer: Any, x: Tensor, graph: RowWindows) -> Tensor | None:
    """A GATConv of one set of nodes, without edge features."""
    # a parameter that is missing was made something else
    lin, own = layer._modules.get("lin"), layer._parameters
    att_src, att_dst, bias = own.get("att_src"), own.get("att_dst"), own.get("bias")
    if lin is None or att_src is None or att_dst is None or bias is None or not _is_joined(layer):
        return None
    if not may_read(lin) or lin._parameters["bias"] is not None:
        return None
    features, weight = features_of(x, x.dtype), lin._parameters["weight"]
    if features is None or weight.size(1) != x.size(1):
        return None
    return gat_layer(
        features,
        weight,
        att_src,
        att_dst,
        bias,
        _directed(layer, graph),
        layer.negative_slope,
        layer.dropout if layer.training else 0.0,
        bool(layer.add_self_loops),
    )


def gatv2(layer: Any, x: Tensor, graph: RowWindows) -> Tensor | None:
    """A GATv2Conv of one set of nodes, without edge features."""
    names = ("lin_l",) if layer.share_weights else ("lin_l", "lin_r")
    maps, att, bias = _maps(layer, x, names), layer._parameters.get("att"), layer._parameters.get("bias")
    features = features_of(x, x.dtype)
    if features is None or maps is None or att is None or bias is None or not _is_joined(layer):
        return None
    return gatv2_layer(
        features,
        maps,
        att,
        bias,
        _directed(layer, graph),
        layer.negative_slope,
        layer.dropout if layer.training else 0.0,
        bool(layer.add_self_loops),
    )


def transformer(layer: Any, x: Tensor, windows: RowWindows) -> Tensor | None:
    """A TransformerConv of one set of nodes, without edge features."""
    joined = layer.concat or layer.heads == 1
    if not (joined and layer.root_weight) or layer._modules.get("lin_beta") is not None:
        return None
    maps = _maps(layer, x, ("lin_query", "lin_key", "lin_value", "lin_skip"))
    features = features_of(x, x.dtype)
    if maps is None or features is None:
        return None
    dropout = layer.dropout if layer.training else 0.0
    return transformer_layer(features, maps, layer.heads, windows, dropout)


def _maps(layer: Any, x: Tensor, names: tuple[str, ...]) -> Maps | None:
    # for what does not fit the modules have their words
    layers: list[Any] = [layer._modules[name] for name in names]
    if not may_read(*layers):
        return None
    parameters = [lin._parameters for lin in layers]
    weights = [own["weight"] for own in parameters]
    biases = [own["bias"] for own in parameters if own["bias"] is not None]
    shape = (layer.heads * layer.out_channels, x.size(1))
    fits = all([weight.shape == shape for weight in weights]) and len(biases) in (0, len(weights))
    return Maps(weights, biases) if fits else None


def _is_joined(layer: Any) -> bool:
    # heads side by side, and nothing but a bias after them
    return (layer.concat or layer.heads == 1) and layer._modules.get("res") is None


def _directed(layer: Any, graph: RowWindows) -> RowWindows:
    return graph if layer.flow == "source_to_target" else graph.transpose()
