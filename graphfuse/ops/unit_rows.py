"""AGNN's queries and keys: rows divided by their lengths, in one launch each way."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from graphfuse.formats.memory import advises
from graphfuse.ops import _check
from graphfuse.ops._library import direct_apply, is_batched, once_differentiable, runs_directly
from graphfuse.ops.sddmm import contiguous_rows


def unit_rows(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""``factor * x / |x|``, ``x / |x|`` and ``1 / |x|``, row by row, the last without a gradient.

    As ``torch.nn.functional.normalize`` has it: no length is less than 1e-12, of float16 than its least
    number, so that rows of zeros give 0. The second result takes part in a gradient and need not hold the
    numbers: its reader has ``x`` and the lengths. A trace, and whatever else watches operations, gets
    PyTorch's own, which its compiler fuses.

    Args:
        x: ``float16 | bfloat16 | float32[num_rows, dim]`` (float64 on a CPU).
        factor: Dtype of ``x`` or a wider one, ``[1]``.

    Returns:
        ``[num_rows, dim]`` in the dtype of ``x``, twice; ``float32[num_rows, 1]`` (float64 if ``x`` is).
    """
    least = least_length(x.dtype)
    if runs_directly(x, factor) and x.numel() > 0 and _check.runs_kernel(x):
        results: tuple[Tensor, Tensor, Tensor] = _apply(x, factor, least)
        return results
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).clamp_min(least)
    # divided as in F.normalize, whose gradient cancels where rows are one number wide
    unit = x / length.to(x.dtype)
    return (unit * factor).to(x.dtype), unit, length.detach().reciprocal()


def least_length(dtype: torch.dtype) -> float:
    """What rows are divided by at least, of float16 the least number that it has."""
    return 2.0**-24 if dtype == torch.float16 else 1e-12


def scaled(x: Tensor, factor: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Launches the kernel for contiguous rows: the first result of :func:`unit_rows`, and ``1 / |x|``."""
    found: tuple[Tensor, Tensor] = _launchers().unit_rows(x, factor, least)
    return found


@functools.cache
def _launchers() -> Any:
    from graphfuse.kernels import unit_rows  # imports triton

    return unit_rows


class UnitRows(torch.autograd.Function):
    """Rows divided by their lengths, and the derivative."""

    @staticmethod
    @advises
    def forward(ctx: Any, x: Tensor, factor: Tensor, least: float) -> tuple[Tensor, Tensor, Tensor]:
        """Launches the kernel; the second result is one number that stands for all."""
        rows = contiguous_rows(x)
        query, inverse = scaled(rows, factor, least)
        inverse = inverse.unsqueeze(1)
        ctx.save_for_backward(rows, factor)
        ctx.least = least
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)  # or every backward would fill a gradient of the lengths with zeros
        return query, x.new_empty(1).expand(x.shape), inverse

    @staticmethod
    @once_differentiable
    @advises
    def backward(
        ctx: Any, d_scaled: Tensor | None, d_unit: Tensor | None, _: None
    ) -> tuple[Tensor, Tensor | None, None]:
        """Gradients of ``x`` and ``factor``."""
        x, factor = ctx.saved_tensors
        d_scaled = torch.zeros_like(x) if d_scaled is None else d_scaled
        d_unit = torch.zeros_like(x) if d_unit is None else d_unit
        dx, d_factor = gradients(x, factor, d_scaled, d_unit, ctx.least, ctx.needs_input_grad[1])
        return dx, d_factor, None


def gradients(
    x: Tensor,
    factor: Tensor,
    d_scaled: Tensor,
    d_unit: Tensor,
    least: float,
    learned: bool,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``x`` and, if it is ``learned``, of ``factor``.

    ``more``, contiguous and nobody else's, is added to that of ``x``.
    """
    if is_batched(d_scaled) or is_batched(d_unit):
        dx, d_factor = _gradients(x, factor, d_scaled, d_unit, least)
        return dx if more is None else dx + more, d_factor
    dx, partial = _launchers().unit_rows_bwd(
        x, factor, contiguous_rows(d_scaled), contiguous_rows(d_unit), least, more
    )
    return dx, partial.sum(0, keepdim=True).to(factor.dtype) if learned else None


def _gradients(
    x: Tensor, factor: Tensor, d_scaled: Tensor, d_unit: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    # what the kernel computes, in operations that torch.func can batch
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    unit = x / length.clamp_min(least)
    grad = d_unit + factor * d_scaled
    along = torch.where(length > least, (unit * grad).sum(-1, keepdim=True), 0.0)
    dx = (grad - unit * along) / length.clamp_min(least)
    return dx.to(x.dtype), (unit * d_scaled).sum().view(1).to(factor.dtype)


_apply = direct_apply(UnitRows)
