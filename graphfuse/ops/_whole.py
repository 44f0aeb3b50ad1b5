"""Layers as one node of autograd's graph, where the host is what a step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.ops import _check, columns
from graphfuse.ops._library import is_batched, runs_directly


def runs_whole(x: Tensor, width: int, *parameters: Tensor) -> bool:
    """Whether a layer on ``x`` may be one Function: its tensors are plain and small, and autograd records.

    Each node of autograd's graph costs as much host time as the launch of a kernel or two. On a large graph
    nobody waits for the host, and kernels beside those of attention have their say.

    Args:
        x: Features of the nodes.
        width: Columns of the result, or of what its kernels read.
        parameters: Those of the layer.
    """
    if not (torch.is_grad_enabled() and runs_directly(x, *parameters) and x.layout is torch.strided):
        return False
    dtype, index = x.dtype, x.get_device()
    for parameter in parameters:
        if parameter.dtype is not dtype or parameter.get_device() != index:
            return False
    small = 0 < x.size(0) * width < columns.LARGE
    return small and _check.runs_kernel(x) and not torch.is_autocast_enabled(x.device.type)


class Maps(NamedTuple):
    """Linear maps of the same features, that are taken in one product."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]  # one for each, or none

    @classmethod
    def of(cls, parameters: Sequence[Tensor], count: int) -> Maps:
        """``count`` maps, whose weights come first."""
        return cls(parameters[:count], parameters[count:])


def projected(x: Tensor, maps: Maps) -> tuple[Tensor, Tensor]:
    """The rows that the maps make of those of ``x``, side by side; and the stacked weights."""
    weight = _stacked(maps.weights)
    return F.linear(x, weight, _stacked(maps.biases) if maps.biases else None), weight


def _stacked(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(tuple(parameters))


def bias_gradient(grad: Tensor) -> Tensor:
    """The sum of the rows of ``grad``: that of a bias, in a layer for which :func:`runs_whole` holds."""
    return grad.sum(0) if is_batched(grad) else columns.own_sum(grad)


def map_gradients(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, widths: Sequence[int], biased: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of ``x`` and, as :meth:`Maps.of` takes them, of the parameters.

    Args:
        grad: That of the rows, side by side.
        x: The features; None if no weight gets a gradient.
        weight: The stacked weights; None if ``x`` gets none.
        widths: Columns of each map.
        biased: Whether the maps have biases.
    """
    dx = None if weight is None else torch.mm(grad, weight)
    of_weights = [None] * len(widths) if x is None else torch.mm(grad.t(), x).split_with_sizes(widths)
    of_biases = bias_gradient(grad).split_with_sizes(widths) if biased else ()
    return dx, [*of_weights, *of_biases]
