"""Heads of rows as kernels read them: contiguous, and on 16 bytes where they are gathered often."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from graphfuse.formats.walk import Walk
from graphfuse.kernels import copies


def contiguous_heads(x: Tensor) -> Tensor:
    """``x`` with the heads of a row contiguous; its rows may stay strided, by an even number.

    Of a row that starts anywhere a thread may hold one number, and a sum of such products has no one value.
    """
    row, head, column = x.stride()
    fits = row > 0 and row % 2 == 0 and head == x.size(2) and column == 1
    return x if fits else x.contiguous()


def width_of(w: Walk, x: Tensor) -> int:
    """Features of a head of ``x`` as it is gathered over ``w``, those that are 0 included."""
    return copies.gathered_width(w.num_entries, w.num_rows, w.num_cols, x.size(2), x.element_size())


def padded(w: Walk, x: Tensor, width: int) -> Tensor:
    """``x`` with contiguous heads of ``width`` features, those beyond its own 0: no score or sum changes."""
    x = contiguous_heads(x)
    return x if width == x.size(2) else _gathered()(w.plans, x, width)


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """``x`` without the features that :func:`padded` added to those of ``like``."""
    features = like.size(-1)
    return x if x.size(-1) == features or x.numel() == 0 else x[..., :features].contiguous()


@functools.cache
def _gathered() -> Any:
    from graphfuse.kernels.gathered import gathered  # imports triton

    return gathered
