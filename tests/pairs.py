"""Which combinations of values a test runs with: at night all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def with_dtypes(values: Iterable[Any], dtypes: Iterable[torch.dtype]) -> list[tuple[Any, torch.dtype]]:
    """Each of ``values`` with each of ``dtypes``; by day a third with bfloat16, whose code is float16's."""
    return [
        (value, dtype)
        for (place, value), dtype in itertools.product(enumerate(values), dtypes)
        if NIGHTLY or dtype is not torch.bfloat16 or place % 3 == 0
    ]


def in_turns(values: Iterable[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of ``values`` with each of ``others``; by day, without a GPU, with one of them, in turns."""
    return [
        (value, other)
        for (place, value), (turn, other) in itertools.product(enumerate(values), enumerate(others))
        if NIGHTLY or torch.cuda.is_available() or place % len(others) == turn
    ]
