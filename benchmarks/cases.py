"""Cases of a benchmark as the command line names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.bench import Case


def fits(case: Case, only: Sequence[str]) -> bool:
    """Whether the case has these values: ``shape=4x32``, ``mode=fwd``, or ``dropout=none`` if it has none."""
    return all(as_text(case.get(axis)) == value for axis, value in pairs(only).items())


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` of each.

    Raises:
        ValueError: one of them is not of this form.
    """
    found = [text.partition("=") for text in texts]
    if any(not mark or not value for _, mark, value in found):
        raise ValueError(f"write NAME=VALUE (got {' '.join(texts)})")
    return {name: value for name, _, value in found}


def as_text(value: Any) -> str:
    """A value of a case as the command line has it: ``4x32``, ``float16``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.").lower()
