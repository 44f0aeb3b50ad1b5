"""Whether a layer's forward may run fused, and in one sentence each why not.

A fused kernel computes what `propagate` computes, but runs none of it: no `message`, no hook, no explainer
sees the edges. So it may only run when nobody would notice.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation

from graphfuse.formats import RefillableWindows, RowWindows
from graphfuse.formats.environment import is_on, is_set
from graphfuse.kernels.device import kernel_problem

log = logging.getLogger("graphfuse")

_STEPS = (
    "aggregate",
    "edge_update",
    "edge_updater",
    "message",
    "message_and_aggregate",
    "propagate",
    "update",
)
_HOOKS = tuple(
    f"_{step}_forward_{kind}hooks"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_", "")
)
_hooks_of = operator.itemgetter(*_HOOKS)
_INTEGERS = (torch.int32, torch.int64)
_RECORDS = (RowWindows, RefillableWindows)
SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_SUMS = ("add", "sum")
_ROWS = (0, -2)  # the dimension of the nodes in a matrix that has a row for each


class NotFused(RuntimeError):
    """A layer that was told to fuse, with ``GRAPHFUSE_STRICT=1``, and cannot."""


def holds(layer: MessagePassing, base: type, x: Any, edge_index: Any) -> bool:
    """Whether :func:`common_reasons` plainly has nothing to say; ``False`` may mean that one has to look.

    The same conditions without their sentences: this runs on every forward, when little else does.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    state = layer.__dict__
    kind = type(edge_index)
    return (
        state["_explain"] is not True
        and state["_decomposed_layers"] == 1
        and state["node_dim"] in _ROWS
        and state["aggr"] in _SUMS
        and _only_sums(state["_modules"].get("aggr_module"))
        and not any(_hooks_of(state))
        and state.keys().isdisjoint(_STEPS)
        and not _overridden(type(layer), base)
        and (
            kind in _RECORDS
            or (
                kind is Tensor
                and edge_index.dtype in _INTEGERS
                and edge_index.dim() == 2
                and edge_index.size(0) == 2
            )
        )
        and (_fits(x) if type(x) is Tensor else type(x) is tuple and all(map(_fits, x)))
        and not is_set("GRAPHFUSE_DISABLE")
        and not _is_transformed()
    )


def _fits(x: Any) -> bool:
    return (
        type(x) is Tensor
        and x.dim() == 2
        and x.layout is torch.strided
        and kernel_problem(x.device, x.dtype) is None
    )


def is_plain_tensor(x: Any) -> bool:
    """Whether ``x`` is a tensor or parameter and of no other class, but for those that torch.export makes."""
    if type(x) in (Tensor, Parameter):  # torch.func.functional_call puts tensors in parameters' places
        return True
    exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return exporting and isinstance(x, FakeTensor)


def common_reasons(
    layer: MessagePassing, base: type, x: Any, edge_index: Any, projects: bool = False
) -> Iterator[str]:
    """Sentences for the conditions that all layers share; nothing if they all hold.

    Args:
        layer: The layer whose forward asks.
        base: graphfuse's class that defines this forward; a subclass may have overridden its steps.
        x: Features of the nodes, or those of sources and receivers if the layer takes a pair.
        edge_index: What the user passed for the graph.
        projects: Whether all that the layer does with features is to project them: then they may be a
            ``torch.sparse`` matrix, as their projection is dense.
    """
    if _is_disabled():
        yield "GRAPHFUSE_DISABLE=1 is set"
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace and the ONNX exporter built on it
        yield "the model is being traced or exported to ONNX"
        return  # what follows would be traced as well
    if not torch.compiler.is_compiling() and _is_transformed():
        yield "torch.func or forward-mode differentiation transforms the call"
    if layer.explain is True:
        yield "the layer is being explained (layer.explain is True), which needs every message"
    if layer.decomposed_layers != 1:
        yield f"decomposed_layers is {layer.decomposed_layers}; the kernels handle all features at once"
    if layer.node_dim not in _ROWS:
        yield f"node_dim is {layer.node_dim}; the kernels take a row for each node"
    state = layer.__dict__
    for hooks in _HOOKS:
        if state[hooks]:
            yield f"a hook is registered on a step of message passing ({hooks[1:]})"
    yield from _overridden(type(layer), base)
    for step in _STEPS:  # one by one: Dynamo of torch 2.11 knows no set operation on a module's state
        if step in state and not _is_generated(state[step], layer):
            yield f"`{step}` was replaced on this layer object"
    if layer.aggr not in _SUMS:
        yield f"the aggregation is {layer.aggr!r}; the kernels sum"
    elif not _only_sums(layer._modules.get("aggr_module")):
        yield "`aggr_module` was replaced or has a hook; the kernels sum"
    yield from _edge_index_reasons(edge_index)
    features = x if isinstance(x, (tuple, list)) else (x,)
    yield from dict.fromkeys(reason for one in features for reason in _feature_reasons(one, projects))


def _only_sums(aggregation: Any) -> bool:
    # `propagate` calls the module that the layer has, whatever `aggr` says; a forward of its own counts too
    if type(aggregation) is not SumAggregation or "forward" in aggregation.__dict__:
        return False
    before = aggregation._forward_pre_hooks or aggregation._backward_pre_hooks
    return not before and not aggregation._forward_hooks and not aggregation._backward_hooks


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a trace keeps its environment
def _is_disabled() -> bool:
    return is_on("GRAPHFUSE_DISABLE")


def _feature_reasons(x: Any, projects: bool) -> Iterator[str]:
    if not isinstance(x, Tensor) or (
        x.layout != torch.strided and not (projects and x.layout in SPARSE_LAYOUTS)
    ):
        yield "the features are not a dense tensor"
    elif x.dim() != 2:
        yield f"the features have {x.dim()} dimensions; the kernels take 2"
    else:
        problem = kernel_problem(x.device, x.dtype)
        if problem is not None:
            yield problem


def _edge_index_reasons(edge_index: Any) -> Iterator[str]:
    if isinstance(edge_index, EdgeIndex) and torch.compiler.is_compiling():
        yield "the graph is an EdgeIndex, whose writes a trace does not see; pass edge_index.as_tensor()"
    if isinstance(edge_index, (RowWindows, EdgeIndex)):
        return
    if isinstance(edge_index, (list, tuple)) and any(isinstance(one, RowWindows) for one in edge_index):
        raise ValueError(
            "`edge_index` is a list of RowWindows, as a batch keeps those of its graphs; window the batch as "
            "a whole (apply ToRowWindows to it) or pass its edge_index"
        )
    if not isinstance(edge_index, Tensor):
        yield f"the graph is a {type(edge_index).__name__}; pass an edge_index tensor or RowWindows"
    elif edge_index.layout != torch.strided:
        yield f"the graph is a {edge_index.layout} tensor; pass an edge_index tensor or RowWindows"
    elif edge_index.dtype not in _INTEGERS or edge_index.dim() != 2 or edge_index.size(0) != 2:
        shape = list(edge_index.shape)
        yield f"edge_index must be int32 or int64 of shape [2, num_edges] (got {edge_index.dtype} {shape})"
    elif not torch.compiler.is_compiling() and _holds_no_numbers(edge_index):
        kind = type(edge_index).__name__
        yield f"the graph is a {kind}, which holds no edges to build row windows of; pass RowWindows"


def _holds_no_numbers(x: Tensor) -> bool:
    # FakeTensor, FunctionalTensor and other classes that run operations themselves
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _overridden(cls: Any, base: Any) -> tuple[str, ...]:
    return _find_overridden(cls, base)


@functools.cache
def _find_overridden(cls: Any, base: Any) -> tuple[str, ...]:
    reasons = []
    for step in _STEPS:
        mine, own = getattr(cls, step), getattr(base, step)
        generated = mine.__module__.endswith(("_propagate", "_edge_updater"))
        if mine is not own and not generated and mine is not getattr(MessagePassing, step):
            reasons.append(f"{cls.__name__} overrides `{step}`")
    return tuple(reasons)


def _is_generated(method: Any, layer: MessagePassing) -> bool:
    # `explain` and `decomposed_layers` put PyG's own methods on the object, and leave one there when unset
    cls = type(layer)
    return getattr(method, "__func__", None) in (cls._jinja_propagate, cls._orig_propagate)


def fall_back(layer: MessagePassing, reasons: list[str], edge_index: Any) -> Any:
    """Notes that ``layer`` runs PyG's path; raises instead with ``GRAPHFUSE_STRICT=1``.

    Returns:
        ``edge_index`` as PyG's path takes it.
    """
    sentence = f"{type(layer).__name__} is not fused: {'; '.join(reasons)}"
    if os.environ.get("GRAPHFUSE_STRICT", "0") not in ("", "0"):
        raise NotFused(f"{sentence} (GRAPHFUSE_STRICT=1 forbids PyG's path)")
    if path_taken(layer) != reasons and not torch.compiler.is_compiling():  # logging would break the graph
        note(layer, reasons)
        _log_once(sentence)
    if isinstance(edge_index, RowWindows):
        edge_index = edge_index.edge_index()
    if isinstance(edge_index, Tensor) and edge_index.dtype == torch.int32:
        edge_index = edge_index.long()  # PyG's scatter wants int64
    return edge_index


def note(layer: torch.nn.Module, reasons: list[str]) -> None:
    """Keeps what :func:`path_taken` tells; a trace, which many calls share, leaves no note."""
    if not torch.compiler.is_compiling():
        layer.__dict__["_not_fused"] = reasons


@functools.lru_cache(maxsize=256)
def _log_once(sentence: str) -> None:
    log.info(sentence)


def path_taken(layer: torch.nn.Module) -> list[str] | None:
    """How ``layer`` last ran, outside a trace: ``[]`` fused, else the reasons; ``None`` if it did not run."""
    taken: list[str] | None = layer.__dict__.get("_not_fused")
    return taken


def why_not(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Why ``layer(*args, **kwargs)`` would not run fused, a sentence per reason; empty if it would.

    Nothing is computed. Example: ``graphfuse.why_not(conv, x, edge_index)``. Of a model, which is given
    without arguments, it is what held when its layers last ran, each sentence behind the name of its layer.
    """
    reasons: list[str] = []
    ask = getattr(layer, "why_not_fused", None)
    if ask is not None:
        reasons = ask(*args, **kwargs)
        return reasons
    name = f"{type(layer).__module__}.{type(layer).__name__}"
    inner = [(at, module) for at, module in layer.named_modules() if hasattr(module, "why_not_fused")]
    if not inner:
        return [f"{name} is not a graphfuse layer; see graphfuse.convert(model) or graphfuse.nn"]
    if args or kwargs:
        return [f"{name} is a model; ask one of its layers, or the model without arguments once it has run"]
    for at, module in inner:
        taken = path_taken(module)
        if taken is None:
            reasons.append(f"{at}: it has not run")
        else:
            reasons += [f"{at}: {reason}" for reason in taken]
    return reasons
