"""A bias of all rows of a large matrix: added, and its gradient summed, at the speed of the memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from graphfuse.formats.memory import advises
from graphfuse.kernels.device import kernel_problem
from graphfuse.ops import _check
from graphfuse.ops._library import direct_apply, is_batched, once_differentiable, runs_directly
from graphfuse.ops.sddmm import contiguous_rows

# Elements from which on the kernels save more than the host time of launching them, which a step on fewer
# waits for anyway.
LARGE = 1 << 23


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``x + bias``, for a trace and whatever else watches operations by PyTorch's own.

    Args:
        x: ``[num_rows, dim]``.
        bias: ``[dim]``.
    """
    if x.dtype is not bias.dtype or not _runs(x, bias) or x.numel() < LARGE:
        return x + bias
    y: Tensor = _apply_bias(x, bias)
    return y


def with_bias_gradient(y: Tensor, bias: Tensor) -> Tensor:
    """``y``, to which a product has added ``bias`` without recording that: gives ``bias`` its gradient.

    Args:
        y: ``[num_rows, dim]``.
        bias: ``[dim]``.
    """
    found: Tensor = _apply_gradient(y, bias)
    return found


def sums_quickly(x: Tensor, dim: int, bias: Tensor) -> bool:
    """Whether a product of ``x`` with ``dim`` columns should leave the gradient of ``bias`` to these kernels.

    Args:
        x: The factor, ``[num_rows, any]``.
        dim: Columns of the product.
        bias: ``[dim]``.
    """
    if not (torch.is_grad_enabled() and bias.requires_grad and _runs(x, bias)):
        return False
    return x.dim() == 2 and x.size(0) * dim >= LARGE


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.sum(0)`` in ``dtype``, of an ``x`` that nothing differentiates."""
    fits = not torch.is_grad_enabled() and not is_batched(x) and _runs(x) and _check.runs_kernel(x)
    if fits and x.numel() > 0:
        found: Tensor = _launchers().column_sums(contiguous_rows(x), dtype)
        return found
    total: Tensor = x.sum(0)
    return total if total.dtype == dtype else total.to(dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the rows of ``grad`` in its dtype, or ``dtype``, where kernels are known to run."""
    dtype = dtype or grad.dtype
    if is_batched(grad):
        return grad.sum(0).to(dtype)
    found: Tensor = _launchers().column_sums(contiguous_rows(grad), dtype)
    return found


def _runs(x: Tensor, *others: Tensor) -> bool:
    # asked before any size, which a trace would take for a condition on its symbols
    return runs_directly(x, *others) and kernel_problem(x.device, x.dtype) is None


@functools.cache
def _launchers() -> Any:
    from graphfuse.kernels import columns  # imports triton

    return columns


class AddBias(torch.autograd.Function):
    """The sum, and its derivative."""

    @staticmethod
    @advises
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Launches the kernel."""
        y: Tensor = _launchers().add_bias(contiguous_rows(x), bias.contiguous())
        return y

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of ``x`` and ``bias``."""
        return grad, bias_gradient(grad) if ctx.needs_input_grad[1] else None


class BiasGradient(torch.autograd.Function):
    """Nothing, and the derivative of a bias."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        """``y``."""
        ctx.dtype = bias.dtype
        ctx.mark_dirty(y)  # or the result would be a view, which nothing may change in place
        return y

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``y`` and ``bias``."""
        return grad, bias_gradient(grad, ctx.dtype)


_apply_bias = direct_apply(AddBias)
_apply_gradient = direct_apply(BiasGradient)
