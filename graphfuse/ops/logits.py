"""The terms of nodes in GAT's scores, in one launch each way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphfuse.formats.memory import advises
from graphfuse.kernels.device import HALF
from graphfuse.ops import _check
from graphfuse.ops._heads import contiguous_heads
from graphfuse.ops._library import direct_apply, is_batched, once_differentiable, runs_directly

_NONE = (None, None)  # in the places of the vectors


def logits(x: Tensor, left: Tensor, right: Tensor | None = None) -> tuple[Tensor, ...]:
    """Sums of ``x * left`` and, if given, ``x * right`` over features, kept in float32.

    A trace, and whatever else watches operations, gets PyTorch's own, which its compiler fuses.

    Args:
        x: ``float16 | bfloat16 | float32[num_rows, heads, dim]`` (float64 on a CPU).
        left: ``[heads, dim]``, in the dtype of ``x``, or in float32 where that is half precision.
        right: Likewise.

    Returns:
        ``[num_rows, heads]`` in the dtype of ``left``, once or twice.
    """
    vectors = (left,) if right is None else (left, right)
    if runs_directly(x, *vectors) and _fits(x):
        found: tuple[Tensor, ...] = _apply(x, *vectors)
        return found
    if left.dtype not in HALF:
        return tuple((x * vector).sum(dim=-1) for vector in vectors)
    # one product with a block-diagonal matrix: reads x once, rounds no term, and stores none for backward
    heads, channels = x.shape[1:]
    column = torch.stack(vectors, -1).view(heads, channels, len(vectors), 1)
    blocks = column * torch.eye(heads, dtype=x.dtype, device=x.device).view(heads, 1, 1, heads)
    terms: tuple[Tensor, ...] = (x.flatten(1) @ blocks.view(heads * channels, -1)).split(heads, 1)
    return terms


def _fits(x: Tensor) -> bool:
    return x.numel() > 0 and _check.runs_kernel(x) and fits(x.size(1), x.size(2))


def fits(heads: int, dim: int) -> bool:
    """Whether the kernel holds a row of so many heads on chip."""
    widest: int = _launchers().MAX_WIDTH
    return 1 << (heads - 1).bit_length() + (dim - 1).bit_length() <= widest


@functools.cache
def _launchers() -> Any:
    from graphfuse.kernels import logits  # imports triton

    return logits


def terms(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Launches the kernel for contiguous heads, and vectors as of :func:`logits` or ``[1, heads, dim]``."""
    found: tuple[Tensor, ...] = _launchers().logits(x, *vectors, *_NONE[len(vectors) :])
    return found[: len(vectors)]


def gradients(
    x: Tensor, vectors: Sequence[Tensor], grads: Sequence[Tensor], more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and, side by side, of the vectors that :func:`terms` was given.

    ``more``, contiguous and nobody else's, is added to that of ``x``.
    """
    if any(map(is_batched, grads)):
        columns = [grad.unsqueeze(-1) for grad in grads]
        pairs = zip(columns, vectors, strict=True)
        parts = [(grad * vector).to(x.dtype).reshape(x.shape) for grad, vector in pairs]
        dx = functools.reduce(torch.add, parts if more is None else [more, *parts])
        rows = x.view(-1, *vectors[0].shape[-2:])
        return dx, torch.stack([(grad * rows).sum(0).view(vectors[0].shape) for grad in columns])
    missing = _NONE[len(vectors) :]
    given = (*vectors, *missing, *[grad.contiguous() for grad in grads], *missing, more)
    found: tuple[Tensor, Tensor] = _launchers().logits_bwd(x, *given)
    return found


class Logits(torch.autograd.Function):
    """The terms, and their derivative."""

    @staticmethod
    @advises
    def forward(ctx: Any, x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Launches the kernel."""
        x, vectors = contiguous_heads(x), tuple([vector.contiguous() for vector in vectors])
        ctx.save_for_backward(x, *vectors)
        return terms(x, *vectors)

    @staticmethod
    @once_differentiable
    @advises
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of ``x`` and the vectors."""
        x, *vectors = ctx.saved_tensors
        dx, d_vectors = gradients(x, vectors, grads)
        return dx, *d_vectors.unbind()


_apply = direct_apply(Logits)
