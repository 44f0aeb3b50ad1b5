"""What to do when memory runs out, said by the error that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Run = TypeVar("_Run", bound=Callable[..., Any])

ADVICE = (
    "graphfuse: half precision, torch.utils.checkpoint and mini-batches need less; row windows can be built "
    "on the CPU and moved. See docs/memory.md"
)


def advises(run: _Run) -> _Run:
    """``run``, whose ``torch.OutOfMemoryError`` ends with :data:`ADVICE`."""

    @functools.wraps(run)
    def advised(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            # the same error: another one would keep the frames of this one, and with them what they hold
            if ADVICE not in str(error):
                error.args = (f"{error} {ADVICE}",)
            raise

    return advised  # type: ignore[return-value]
