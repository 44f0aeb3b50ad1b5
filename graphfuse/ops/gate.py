"""Public gated skip connection: a learned mean of two rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats.memory import advises
from graphfuse.ops import _check
from graphfuse.ops._library import (
    below_autograd,
    direct_apply,
    is_batched,
    once_differentiable,
    runs_directly,
)
from graphfuse.ops.sddmm import contiguous_rows

MAX_DIM = 4096  # a row that a program holds on chip


def gated_skip(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    r"""A mean of two rows, weighed by a learned gate: the skip connection of Shi et al.

    .. math::
        y_i = \beta_i s_i + (1 - \beta_i)\, o_i, \qquad
        \beta_i = \mathrm{sigmoid}(w_1^\top o_i + w_2^\top s_i + w_3^\top (o_i - s_i))

    One kernel forward, two backward; the concatenation of the three rows never reaches memory.

    Args:
        out: Rows :math:`o`, ``float16 | bfloat16 | float32[num_rows, dim]`` (float64 on a CPU), ``dim`` at
            most 4096; rows may be strided.
        skip: Rows :math:`s`, dtype and shape of ``out``; rows may be strided.
        weight: :math:`w_1, w_2, w_3` side by side, dtype of ``out``, ``[1, 3 * dim]``.

    Returns:
        ``[num_rows, dim]`` in the dtype of ``out``; sums are kept in float32.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.

    Note:
        Saved for backward: the three arguments. Bitwise reproducible, forward and backward. Not
        differentiable twice. On a CPU this runs :func:`graphfuse.reference.gated_skip`, unless
        ``TRITON_INTERPRET=1``. Source: Shi et al., IJCAI 2021 (arXiv:2009.03509), equation 5.
    """
    _check.matrix("out", out, None, None)
    num_rows, dim = out.shape
    _check.matrix("skip", skip, num_rows, out.device, dim)
    _check.matrix("weight", weight, 1, out.device, 3 * dim)
    _check.same_dtype("skip", skip, "out", out.dtype)
    _check.same_dtype("weight", weight, "out", out.dtype)
    if dim > MAX_DIM:
        raise ValueError(f"`out` must have at most {MAX_DIM} columns (got {dim})")
    if not torch.compiler.is_compiling():
        _check.runs_kernel(out, "out")
    y: Tensor
    if runs_directly(out, skip, weight):
        y = _apply(True, out, skip, weight)
    else:
        y = torch.ops.graphfuse.gated_skip(out, skip, weight)
    return y


@functools.cache
def _launchers() -> tuple[Any, Any]:
    from graphfuse.kernels.gate import gated_skip, gated_skip_bwd  # imports triton

    return gated_skip, gated_skip_bwd


@advises
def _run(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    if not _check.runs_kernel(out):
        return reference.gated_skip(out, skip, weight).contiguous()
    if out.numel() == 0:
        return out.new_empty(out.shape)
    y: Tensor = _launchers()[0](contiguous_rows(out), contiguous_rows(skip), weight.contiguous())
    return y


@advises
def _run_backward(grad: Tensor, out: Tensor, skip: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not _check.runs_kernel(out):
        return _definition_backward(grad, out, skip, weight)
    if out.numel() == 0:
        return out.new_empty(out.shape), out.new_empty(out.shape), weight.new_zeros(weight.shape)
    rows = (contiguous_rows(tensor) for tensor in (grad, out, skip))
    found: tuple[Tensor, Tensor, Tensor] = _launchers()[1](*rows, weight.contiguous())
    return found


def _definition_backward(
    grad: Tensor, out: Tensor, skip: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # not by autograd, which does not run below itself
    rows = torch.cat([out, skip, out - skip], -1)
    w1, w2, w3 = weight.split(out.size(1), 1)
    b = torch.nn.functional.linear(rows, weight).sigmoid()
    dz = (grad * (skip - out)).sum(1, keepdim=True) * b * (1 - b)
    do, ds = (1 - b) * grad + dz * (w1 + w3), b * grad + dz * (w2 - w3)
    return do.contiguous(), ds.contiguous(), dz.t() @ rows


class GatedSkip(torch.autograd.Function):
    """The gated skip connection and its derivative."""

    @staticmethod
    def forward(ctx: Any, direct: bool, out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
        """Launches itself if ``direct``, else calls the registered op."""
        ctx.direct = direct
        ctx.save_for_backward(out, skip, weight)
        if direct:
            return _run(out, skip, weight)
        y: Tensor = below_autograd(torch.ops.graphfuse.gated_skip, out, skip, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``out``, ``skip`` and ``weight``."""
        if ctx.direct and not is_batched(grad):
            return None, *_run_backward(grad, *ctx.saved_tensors)
        return None, *torch.ops.graphfuse.gated_skip_backward(grad, *ctx.saved_tensors)


_apply = direct_apply(GatedSkip)


def _fake(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    return out.new_empty(out.shape)


def _fake_backward(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in given)


def _no_derivative(*arguments: Tensor) -> Any:
    return below_autograd(torch.ops.graphfuse.gated_skip_backward, *arguments)


_LIBRARY = torch.library.Library("graphfuse", "FRAGMENT")
_ROWS = "Tensor out, Tensor skip, Tensor weight"
_LIBRARY.define(f"gated_skip({_ROWS}) -> Tensor")
_LIBRARY.impl("gated_skip", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("gated_skip", functools.partial(GatedSkip.apply, False), "Autograd")
torch.library.register_fake("graphfuse::gated_skip", _fake, lib=_LIBRARY)
_LIBRARY.define(f"gated_skip_backward(Tensor grad, {_ROWS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.impl("gated_skip_backward", _run_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("gated_skip_backward", _no_derivative, "Autograd")
torch.library.register_fake("graphfuse::gated_skip_backward", _fake_backward, lib=_LIBRARY)
