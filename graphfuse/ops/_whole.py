"""Layers as one node of autograd's graph, where the host is what a step waits for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.ops import _aggregate, _check, columns
from graphfuse.ops._aggregate import Aggregation
from graphfuse.ops._library import for_gradient, is_batched, runs_directly


def runs_whole(x: Tensor, numel: int, *parameters: Tensor) -> bool:
    """Whether a layer on ``x`` may be one Function: its tensors are plain and small, and autograd records.

    Each node of autograd's graph costs as much host time as the launch of a kernel or two. On a large graph
    nobody waits for the host, and kernels beside those of attention have their say.

    Args:
        x: Features of the nodes, or what a sparse matrix of them holds.
        numel: Elements of the result, or of what its kernels read.
        parameters: Those of the layer.
    """
    if not (torch.is_grad_enabled() and runs_directly(x, *parameters) and x.layout is torch.strided):
        return False
    dtype, index = x.dtype, x.get_device()
    for parameter in parameters:
        if parameter.dtype is not dtype or parameter.get_device() != index:
            return False
    small = 0 < numel < columns.LARGE
    return small and _check.runs_kernel(x) and not torch.is_autocast_enabled(x.device.type)


class Features(NamedTuple):
    """What linear maps are taken of: rows, or a sparse matrix that nobody differentiates in."""

    x: Tensor  # the rows, or the values of the entries
    entries: RowWindows | None = None


class Maps(NamedTuple):
    """Linear maps of the same features, that are taken in one product."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]  # one for each, or none

    @classmethod
    def of(cls, parameters: Sequence[Tensor], count: int) -> Maps:
        """``count`` maps, whose weights come first."""
        return cls(parameters[:count], parameters[count:])


def projected(windows: RowWindows, features: Features, maps: Maps) -> tuple[Tensor, Tensor | None]:
    """The rows that the maps make of the features, side by side; and the stacked weights.

    Of a sparse matrix there are none: a gradient of it is all they would be for.
    """
    x, entries = features
    weight, bias = _stacked(maps, turned=entries is not None)
    if entries is not None:
        return _aggregate.run(_sum_of(entries, x.dtype), weight, x, None, None, bias)[0], None
    return _aggregate.linear(_plans(windows), x, weight, bias), weight


def _stacked(maps: Maps, turned: bool) -> tuple[Tensor, Tensor | None]:
    # weights one below the other or, turned, their columns side by side; biases one behind the other
    weights, biases = maps
    if (
        (turned or len(weights) > 1)
        and len(weights) <= _kernels().MOST
        and weights[0].numel() > 0
        and all([one.is_contiguous() for one in (*weights, *biases)])
    ):
        found: tuple[Tensor, Tensor | None] = _kernels().stacked(weights, biases, turned)
        return found
    if turned:
        weights = [weight.t() for weight in weights]
    weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights), int(turned))
    bias = biases[0] if len(biases) == 1 else torch.cat(tuple(biases)) if biases else None
    return weight, bias


@functools.cache
def _kernels() -> Any:
    from graphfuse.kernels import stacked  # imports triton

    return stacked


def _sum_of(entries: RowWindows, dtype: torch.dtype) -> Aggregation:
    # the product with a sparse matrix, whose rows receive what its columns send
    def prepare() -> Aggregation:
        return Aggregation(entries.walks(True, True), None, None, False, False, dtype)

    found: Aggregation = entries.memo(("features", dtype), prepare)
    return found


def _plans(windows: RowWindows) -> dict[Any, Any]:
    found: dict[Any, Any] = windows.memo("linear maps", dict)
    return found


def row_gradients(
    windows: RowWindows,
    grad: Tensor,
    features: Features | None,
    weight: Tensor | None,
    of_bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of what :func:`projected` was given, from that of the rows.

    Args:
        windows: The graph.
        grad: That of the rows, side by side.
        features: What was mapped; None if no weight gets a gradient.
        weight: The stacked weights; None if the features get none.
        of_bias: The gradient that a bias gets the sum of; None if none gets any.

    Returns:
        Those of the features, of the stacked weights and of the bias.
    """
    plans = None if is_batched(grad) else _plans(windows)
    dx = None if weight is None else _aggregate.linear(plans, grad, weight.t())
    if features is None:
        return dx, None, None if of_bias is None else columns.bias_gradient(of_bias)
    x, entries = features
    if entries is None:
        return dx, *_aggregate.linear_grad(plans, grad, x, of_bias, grad.dtype)
    of_weights = _gradient_of_sparse(grad, x, entries)
    return dx, of_weights, None if of_bias is None else columns.bias_gradient(of_bias)


def _gradient_of_sparse(grad: Tensor, values: Tensor, entries: RowWindows) -> Tensor:
    how = _sum_of(entries, values.dtype)
    how = how._replace(graph=for_gradient(how.graph, grad).transpose())
    weights = _aggregate.differentiable(how, grad, values, None, None, None)[0]
    # a parameter takes no gradient that is laid out in another way
    if is_batched(grad):
        return weights.t().contiguous()
    return _stacked(Maps((weights,), ()), turned=True)[0]


def map_gradients(
    windows: RowWindows,
    grad: Tensor,
    features: Features | None,
    weight: Tensor | None,
    widths: Sequence[int],
    biased: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the features and, as :meth:`Maps.of` takes them, of the parameters.

    Args:
        windows: The graph.
        grad: That of the rows, side by side.
        features: What was mapped; None if no weight gets a gradient.
        weight: The stacked weights; None if the features get none.
        widths: Columns of each map.
        biased: Whether the maps have biases.
    """
    dx, of_weights, of_biases = row_gradients(windows, grad, features, weight, grad if biased else None)
    found: list[Tensor | None] = [None] * len(widths)
    if of_weights is not None:
        found = [*of_weights.split_with_sizes(widths)]
    if of_biases is not None:
        found += of_biases.split_with_sizes(widths)
    return dx, found
