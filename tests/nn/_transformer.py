"""What the tests of TransformerConv share: a pair of layers, and their comparison on a hostile graph."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from graphfuse.nn import TransformerConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, agree, compare


class Options(NamedTuple):
    """What a layer and its input vary in besides graph, heads, channels and dtype."""

    concat: bool = True
    beta: bool = False
    bias: bool = True
    root_weight: bool = True
    backwards: bool = False  # flow='target_to_source'
    two: bool = False  # a pair of features; a bipartite graph always gets one
    edges: bool = False  # features of edges


def pair(channels: Any, width: int, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    theirs = pyg.TransformerConv(channels, width, **options).to(device, dtype)
    ours = TransformerConv(channels, width, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def call(layer: torch.nn.Module, edge_index: Any, **values: Tensor) -> Tensor:
    """The layer in the dtype of its inputs, parameters and features as arguments."""
    x: Any = tuple(values.pop(name) for name in ("x_src", "x_dst", "x") if name in values)
    layer = copy.deepcopy(layer).to(x[0].dtype)
    arguments = (x if len(x) == 2 else x[0], edge_index, values.pop("edge_attr", None))
    parameters = {name.replace("__", "."): value for name, value in values.items()}
    out = torch.func.functional_call(layer, parameters, arguments)
    assert not path_taken(layer)  # PyG's has none, ours must be empty
    return out


def compare_with_pyg(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, channels: int, options: Options
) -> None:
    """Output and the gradients of every input and projection, ``channels`` to a head.

    Weight and bias of a projection are one gradient: that of a bias may be a single number, and how far PyG
    rounds a single number is a matter of luck. On a GPU four draws are one comparison, for the same reason.
    """
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    *flags, backwards, two, edges = options
    arguments: dict[str, Any] = dict(zip(Options._fields, flags, strict=False))
    if backwards:
        arguments["flow"], edge_index = "target_to_source", edge_index.flip(0)
    if edges:
        arguments["edge_dim"] = 5
    two = two or num_src != num_dst
    shapes = {"x_src": (num_src, 13), "x_dst": (num_dst, 18)} if two else {"x": (num_src, 13)}
    shapes |= {"edge_attr": (edge_index.size(1), 5)} if edges else {}

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        layers = pair((13, 18) if two else 13, channels, device, dtype, heads=heads, **arguments)
        inputs = {name.replace(".", "__"): value for name, value in layers[1].named_parameters()}
        for name, shape in shapes.items():
            inputs[name] = torch.randn(shape, device=device).to(dtype).requires_grad_()
        ours, theirs = (functools.partial(call, layer, edge_index) for layer in layers)
        for name, *values in compare(ours, theirs, inputs):
            yield name.split("__")[0], *values

    agree(draw, 4 if device.type == "cuda" else 1)
