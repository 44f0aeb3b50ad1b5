"""A residual and the norm after it, of inference, in one launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfuse.formats.memory import advises
from graphfuse.kernels.device import kernel_problem
from graphfuse.ops._library import runs_directly
from graphfuse.ops.sddmm import contiguous_rows

_MAX_DIM = 4096  # a row that a program holds on chip


class Norm(NamedTuple):
    """The numbers of a norm, ``[dim]`` each."""

    weight: Tensor
    bias: Tensor
    mean: Tensor | None  # of batch norm; layer norm's are those of a row
    var: Tensor | None
    eps: float


def fits(x: Tensor, y: Tensor, norm: Norm, offset: Tensor | None = None) -> bool:
    """Whether :func:`residual_norm` takes these: of one dtype and device, while nothing is traced."""
    given = [tensor for tensor in (*norm[:4], offset) if tensor is not None]
    if torch.is_grad_enabled() or not runs_directly(x, y, *given):
        return False
    if x.dtype is not y.dtype or x.dtype is torch.float64 or kernel_problem(x.device, x.dtype) is not None:
        return False
    if not all(tensor.device == x.device for tensor in (y, *given)):
        return False
    if x.dim() != 2 or x.shape != y.shape or x.numel() == 0 or x.size(1) > _MAX_DIM:
        return False
    return all(tensor.numel() == x.size(1) and tensor.is_contiguous() for tensor in given)


@advises
def residual_norm(x: Tensor, y: Tensor, norm: Norm, offset: Tensor | None = None) -> Tensor:
    r"""Rows :math:`w \odot (z - \mu) / \sqrt{\sigma^2 + \epsilon} + b` of :math:`z = x + y + c`.

    Args:
        x: ``float16 | bfloat16 | float32[num_rows, dim]``.
        y: Likewise.
        norm: With :math:`\mu` and :math:`\sigma^2` of the columns, or without, those of each row.
        offset: :math:`c`, ``[dim]``, or None.

    Returns:
        ``[num_rows, dim]`` in the dtype of ``x``; what lies between is kept in float32.
    """
    found: Tensor = _launcher()(contiguous_rows(x), contiguous_rows(y), *norm, offset)
    return found


@functools.cache
def _launcher() -> Any:
    from graphfuse.kernels.residual_norm import residual_norm  # imports triton

    return residual_norm
