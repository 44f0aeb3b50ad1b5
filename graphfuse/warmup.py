"""One step of a model ahead of time, so that what is built on first use exists, and no trace of it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch_geometric.data import HeteroData
from torch_geometric.data.data import BaseData


def warmup(model: torch.nn.Module, *arguments: Any, **keywords: Any) -> torch.nn.Module:
    """Runs ``model`` once, so that nothing is left to build when its first real step runs.

    One forward pass and, if the model is in training mode and has parameters that require a gradient, one
    backward pass from ones build what layers build on first use: row windows, the orders of edges, the counts
    of repeated edges that dropout needs, compiled kernels and their launches. Afterwards the same call can be
    captured in a CUDA graph or timed. Call it in the mode, and under the autocast, of what comes.

    ``warmup(model, data)`` takes the arguments from a ``Data``, ``Batch`` or ``HeteroData`` by the names of
    the parameters of ``model.forward``: ``edge_weight`` is ``data.edge_weight``, ``x_dict`` (or ``x``, if the
    data is heterogeneous) is ``data.x_dict``, and a parameter called ``data`` is the data itself. Otherwise
    the arguments are those of the model: ``warmup(model, x, edge_index)``. The edges must be the tensors that
    the model is called with later, as row windows belong to them.

    Gradients, buffers, the random number generators of PyTorch (that of the CPU and those of the GPUs used)
    and modes are as before. What a first call does for good is done: lazy parameters are initialised, with
    the numbers that the generator gives next, and a layer with ``cached=True`` keeps its graph.

    Args:
        model: Any module. One wrapped in ``DistributedDataParallel`` or ``DataParallel`` runs without its
            wrapper, so that no other process is waited for.
        *arguments: The data, or what the model takes.
        **keywords: What the model takes by name.

    Returns:
        ``model``.

    Raises:
        ValueError: the data lacks what a parameter without default needs.

    Note:
        On a GPU the step runs on a stream of its own, as before a capture, and is waited for. Gradients are
        taken of the tensors of the result, also within tuples, lists and dictionaries.
    """
    inner = _unwrapped(model)
    if len(arguments) == 1 and not keywords and isinstance(arguments[0], BaseData):
        bound = _bound(inner, arguments[0])
        arguments, keywords = bound.args, bound.kwargs

    def step(backward: bool = False) -> None:
        with torch.set_grad_enabled(backward):
            given, named = _mapped((arguments, keywords), _cut)
            results = [tensor for tensor in _tensors(inner(*given, **named)) if tensor.requires_grad]
        if backward and results:
            with warnings.catch_warnings():
                # of a leaf that another result, still alive, has seen on the caller's stream
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    held = [*inner.parameters(), *inner.buffers(), *_tensors((arguments, keywords))]
    gpus = sorted({tensor.device.index for tensor in held if tensor.is_cuda})
    if any(map(is_lazy, held)):
        with _on_own_stream(gpus), _evaluating(inner):
            step()
    trains = inner.training and any(parameter.requires_grad for parameter in inner.parameters())
    with torch.random.fork_rng(gpus), _kept_buffers(inner), _kept_gradients(inner), _on_own_stream(gpus):
        step(trains)
    return model


def _unwrapped(model: Any) -> torch.nn.Module:
    """The module below wrappers that talk to other processes; one that compiles stays."""
    inner = getattr(model, "_orig_mod", model)
    return _unwrapped(inner.module) if isinstance(inner, (DistributedDataParallel, DataParallel)) else model


def _bound(model: Any, data: Any) -> inspect.BoundArguments:
    """What ``data`` holds of the arguments of ``model``."""
    plain = getattr(model, "_orig_mod", model)
    forward = f"{type(plain).__name__}.forward"
    signature = inspect.signature(plain.forward)
    bound = signature.bind_partial()
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = _find(data, name)
        if value is not None:
            bound.arguments[name] = value
        elif parameter.default is parameter.empty:
            keys = ", ".join(dict.fromkeys(data.keys())) or "nothing"
            raise ValueError(
                f"`data` must hold {name!r}, which {forward} takes (it holds {keys}); call "
                "warmup(model, *arguments) with what the model takes"
            )
    if not bound.arguments:
        raise ValueError(
            f"`data` cannot be matched with {forward}{signature}, which names no argument that it holds; "
            "call warmup(model, *arguments) with what the model takes"
        )
    return bound


def _find(data: Any, name: str) -> Any:
    if isinstance(data, HeteroData):
        key = name.removesuffix("_dict")
        stores = (*data.node_stores, *data.edge_stores)
        found = {store._key: store[key] for store in stores if key in store} or data._global_store.get(name)
    else:
        found = data.to_dict().get(name)
    return data if name == "data" and found is None else found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, BaseData):
        yield from _tensors(value.to_dict())
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with the tensors in it replaced; the containers are new, tensors without change the same."""
    if isinstance(value, BaseData):
        return copy.copy(value).apply(function)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_mapped(part, function) for part in value)
    if type(value) is list:
        return [_mapped(part, function) for part in value]
    if type(value) is dict:
        return {key: _mapped(part, function) for key, part in value.items()}
    return function(value)


def _cut(value: Any) -> Any:
    """A leaf in the place of a tensor that requires a gradient: the graph behind it is the caller's."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


@contextlib.contextmanager
def _on_own_stream(gpus: list[int]) -> Iterator[None]:
    if not gpus:
        yield
        return
    stream = torch.cuda.Stream(gpus[0])
    stream.wait_stream(torch.cuda.current_stream(gpus[0]))
    with torch.cuda.stream(stream):
        yield
    for gpu in gpus:
        torch.cuda.synchronize(gpu)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _kept_buffers(model: torch.nn.Module) -> Iterator[None]:
    buffers = [
        (module, name, buffer, buffer.detach().clone() if _has_values(buffer) else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                # compared, as a write would age an edge_index, and batch norm writes without a new version
                if value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)


def _has_values(buffer: Tensor) -> bool:
    return not is_lazy(buffer) and buffer.layout is torch.strided


@contextlib.contextmanager
def _kept_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Sets gradients aside, and what would be called with them, such as optimizers that run in backward."""
    kept = []
    for parameter in model.parameters():
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        kept.append((parameter, parameter.grad, hooks, dict(hooks)))
        parameter.grad = None
        hooks.clear()
    try:
        yield
    finally:
        for parameter, grad, hooks, entries in kept:
            parameter.grad = grad
            hooks.update(entries)
