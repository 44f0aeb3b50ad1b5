"""PyG's layers in a model exchanged for graphfuse's, in place, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

from graphfuse import nn
from graphfuse.kernels.device import kernel_problem
from graphfuse.nn._additive import edge_attr_reasons
from graphfuse.nn._attention import edge_reasons, head_reasons, is_plain
from graphfuse.nn._dispatch import common_reasons
from graphfuse.nn.graph_transformer_layer import width_reasons

Filter = Callable[[torch.nn.Module, str], bool]

_TWINS: dict[type, type] = {
    getattr(pyg, cls.__name__): cls
    for cls in (nn.GCNConv, nn.GATConv, nn.GATv2Conv, nn.AGNNConv, nn.TransformerConv)
}
_ORIGINALS = {ours: theirs for theirs, ours in _TWINS.items()}
_LAYERS = (*_ORIGINALS, nn.GraphTransformerLayer)
_ONLY_OURS = ("_cached_windows", "_not_fused")  # attributes that PyG's objects do not have


class Report(Mapping[str, list[str]]):
    """What :func:`convert` found: the name of each message passing layer, and why it will not fuse.

    An empty list says that nothing known without inputs keeps the layer from fusing. Printed as a table.

    Args:
        reasons: By the name that ``model.named_modules()`` gives the layer first; ``""`` is the model itself.
        classes: The name of the class of each layer.
        swapped: The layers whose class was exchanged.
    """

    def __init__(
        self, reasons: dict[str, list[str]], classes: dict[str, str], swapped: tuple[str, ...]
    ) -> None:
        self._reasons = reasons
        self._classes = classes
        self.swapped = swapped

    def __getitem__(self, name: str) -> list[str]:
        return self._reasons[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reasons)

    def __len__(self) -> int:
        return len(self._reasons)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({len(self.swapped)} of {len(self)} layers swapped)"

    def __str__(self) -> str:
        if not self:
            return "no message passing layers"
        rows = [("layer", "class", "swapped", "why it will not fuse")]
        for name, reasons in self.items():
            swapped = "yes" if name in self.swapped else "no"
            first, *others = reasons or ["-"]
            rows.append((name or "(model)", self._classes[name], swapped, first))
            rows += [("", "", "", reason) for reason in others]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
        return "\n".join("  ".join((*map(str.ljust, row, widths), row[3])) for row in rows)


class Converted(NamedTuple):
    """The model that was given, and what became of its layers."""

    model: torch.nn.Module
    report: Report


def convert(model: torch.nn.Module, filter_fn: Filter | None = None) -> Converted:
    """Turns PyG's layers in ``model`` into graphfuse's of the same names, in place.

    ``GCNConv``, ``GATConv``, ``GATv2Conv``, ``AGNNConv`` and ``TransformerConv`` are exchanged wherever
    ``model.named_modules()`` finds them, by giving the layer object the other class. So the object stays, and
    with it parameters, buffers, hooks, modes, cached graphs, and whoever holds it: optimizers, schedulers,
    ``DistributedDataParallel``. :func:`revert` undoes it. Layers of a class derived from one of the five, of
    other classes, and scripted ones are left alone, and the report says so.

    Args:
        model: A module, or a layer itself.
        filter_fn: Called with a layer and its name; a layer for which it is false is left alone. ``None``
            takes all.

    Returns:
        ``(model, report)``: the object that was given, and a :class:`graphfuse.convert.Report`.

    Raises:
        TypeError: ``model`` is no module.
    """
    reasons: dict[str, list[str]] = {}
    classes: dict[str, str] = {}
    swaps: dict[str, MessagePassing] = {}
    for name, module in _modules(model):
        scripted = isinstance(module, torch.jit.ScriptModule)
        kind = getattr(module, "original_name", "") if scripted else type(module).__name__
        if not isinstance(module, MessagePassing) and not (scripted and kind in _names()):
            continue
        classes[name], reasons[name] = kind, []
        if type(module) in _TWINS and (filter_fn is None or filter_fn(module, name)):
            swaps[name] = module
        elif not isinstance(module, _LAYERS):
            reasons[name] = [_why_left_alone(module)]
    for module in swaps.values():  # after all were found: a filter that raises leaves the model as it was
        _exchange(module, _TWINS[type(module)])
    modules = dict(model.named_modules())
    for name in reasons:
        reasons[name] = reasons[name] or _known_reasons(modules[name])
    return Converted(model, Report(reasons, classes, tuple(swaps)))


def revert(model: torch.nn.Module, filter_fn: Filter | None = None) -> torch.nn.Module:
    """Turns graphfuse's layers in ``model`` into PyG's of the same names, in place.

    The inverse of :func:`convert`, and as well for layers that were built as graphfuse's, such as those of
    :mod:`graphfuse.nn.models`. ``GraphTransformerLayer``, which PyG lacks, and derived classes are left
    alone.

    Args:
        model: A module, or a layer itself.
        filter_fn: Called with a layer and its name; a layer for which it is false is left alone. ``None``
            takes all.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
    """
    for module in [
        module
        for name, module in _modules(model)
        if type(module) in _ORIGINALS and (filter_fn is None or filter_fn(module, name))
    ]:
        _exchange(module, _ORIGINALS[type(module)])
    return model


def _modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module (got {type(model).__name__}); pass the model")
    return list(model.named_modules())


def _names() -> set[str]:
    return {theirs.__name__ for theirs in _TWINS}


def _exchange(layer: Any, cls: Any) -> None:
    """Makes ``layer`` an object of ``cls``, its twin."""
    # PyG makes `propagate` of a class when its first object is constructed, which need not have happened;
    # without the layer's own constructor no parameter is made and no random number drawn
    blank = cls.__new__(cls)
    MessagePassing.__init__(blank)
    state, previous = layer.__dict__, type(layer)
    layer.__class__ = cls
    for name in ("inspector", "_user_args", "_fused_user_args", "_edge_user_args"):
        state[name] = blank.__dict__[name]
    # `explain` and `decomposed_layers` leave the class's generated method on the object when they are unset
    if getattr(state.get("propagate"), "__func__", None) is previous._jinja_propagate:
        layer.propagate = cls._jinja_propagate.__get__(layer, MessagePassing)
    if layer.explain:
        layer._explain = None
        layer.explain = True  # inspects explain_message too
    if cls is nn.GCNConv:
        layer._cached_windows = None
    elif cls in _TWINS:
        for name in _ONLY_OURS:
            state.pop(name, None)


def _why_left_alone(module: Any) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "the layer is a ScriptModule; convert the model before it is scripted or traced"
    kind = type(module)
    if kind in _TWINS:
        return "filter_fn left it out"
    for theirs in _TWINS:
        if isinstance(module, theirs):
            name = theirs.__name__
            return f"{kind.__name__} is derived from PyG's {name}; derive it from graphfuse.nn.{name}"
    return f"graphfuse has no class for {kind.__name__}"


def _known_reasons(layer: Any) -> list[str]:
    """Why a layer of graphfuse will not fuse, as far as its own state tells."""
    base = next(cls for cls in type(layer).__mro__ if cls in _LAYERS)
    no_edges = torch.empty(2, 0, dtype=torch.int64)
    reasons = list(common_reasons(layer, base, (), no_edges))  # no features, so nothing is said of them
    like = next(layer.parameters(), None)
    if like is None:
        return reasons
    if like.is_cuda:  # a model on the CPU may be about to move
        problem = kernel_problem(like.device, like.dtype)
        reasons += [] if problem is None else [problem]
    if base is nn.GCNConv and layer._cached_adj_t is not None:
        reasons.append("the layer has cached a SparseTensor")
    if base in (nn.GATConv, nn.GATv2Conv, nn.TransformerConv):
        reasons += head_reasons(layer)
    if base is nn.GraphTransformerLayer:
        reasons += width_reasons(layer)
    if base not in (nn.GCNConv, nn.AGNNConv):
        lin = layer.lin_edge
        if lin is not None and not any(map(torch.nn.parameter.is_lazy, lin.parameters())):
            like = torch.empty(0, 1, dtype=like.dtype, device=like.device)
            no_attr = like.new_empty(0, lin.weight.size(1) if is_plain(lin) else 1)
            no_edges = no_edges.to(like.device)
            if base in (nn.TransformerConv, nn.GraphTransformerLayer):
                width = layer.out_channels if base is nn.TransformerConv else layer.head_dim
                reasons += edge_reasons(lin, no_attr, like, no_edges, layer.heads, width)
            else:
                reasons += edge_attr_reasons(layer, no_attr, like, no_edges)
    return reasons
