"""A kernel that nothing compiles, and launches of it without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from graphfuse.kernels import run


class StubKernel:
    """In place of a ``triton.jit`` function: hands the options it is compiled with to ``met``.

    Args:
        met: Is told of them.
        warps: Of a block of what is compiled.
    """

    def __init__(self, met: Callable[[dict[str, Any]], None], warps: int) -> None:
        self._met, self._warps = met, warps

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> Any:
        self._met(options)
        return SimpleNamespace(metadata=SimpleNamespace(num_warps=self._warps))


def launch(
    monkeypatch: pytest.MonkeyPatch,
    met: Callable[[dict[str, Any]], None],
    programs: int = 1,
    warps: int = 1,
    launched: Callable[..., None] = lambda *arguments: None,
    **given: Any,
) -> run.Launch:
    """A launch of such a kernel, as on a GPU of compute capability 9.0, which ``launched`` is told of."""
    monkeypatch.setattr(run, "INTERPRETING", False)
    monkeypatch.setattr(run, "_COMPILED", {})
    monkeypatch.setattr(run, "_overlaps", lambda index: True)
    monkeypatch.setattr(run, "specialization", lambda *arguments: ())
    monkeypatch.setattr(run, "_launcher_of", lambda kernel: (launched, lambda index: index, ()))
    return run.Launch(StubKernel(met, warps), programs, 1, (), (), **given)
