"""A kernel that nothing compiles, and launches of it without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphfuse.kernels import run


class StubKernel:
    """In place of a ``triton.jit`` function: hands the options it is compiled or launched with to ``met``."""

    def __init__(self, met: Callable[[dict[str, Any]], None]) -> None:
        self._met = met

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
        self._met(options)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self._met(options)


def launch(
    monkeypatch: pytest.MonkeyPatch, met: Callable[[dict[str, Any]], None], **given: Any
) -> run.Launch:
    """A launch of such a kernel, as on a GPU of compute capability 9.0."""
    monkeypatch.setattr(run, "INTERPRETING", False)
    monkeypatch.setattr(run, "_COMPILED", {})
    monkeypatch.setattr(run, "_overlaps", lambda index: True)
    monkeypatch.setattr(run, "specialization", lambda *arguments: ())
    monkeypatch.setattr(run, "_launcher_of", lambda kernel: (None, None, ()))
    return run.Launch(StubKernel(met), 1, 1, (), (), **given)
