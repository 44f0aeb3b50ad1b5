"""Losses, scores and times of a run, kept on the device until somebody asks."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("loss", "val", "test", "train_ms", "eval_ms", "at_s")


class History:
    """A row for each epoch: ``loss``, ``val``, ``test``, ``train_ms``, ``eval_ms``, ``at_s``.

    Scores and ``eval_ms`` are NaN for epochs without an evaluation. ``at_s`` is the time from the start of
    training to the end of the epoch, evaluations included; set-up, pauses (writing a checkpoint) and the time
    between a stop and its continuation are not in it. On a GPU times are those of its clock, and nothing here
    waits for it but :meth:`resolve`.

    Args:
        device: Where the run is.
        higher_is_better: Of the scores.
    """

    def __init__(self, device: torch.device, higher_is_better: bool) -> None:
        self.rows: list[list[float]] = []
        self._device, self._sign = device, 1.0 if higher_is_better else -1.0
        self._pending: list[tuple[Tensor, Tensor | None, tuple[Any, Any, Any]]] = []
        self._start: Any = None
        self._before = 0.0

    def __len__(self) -> int:
        return len(self.rows) + len(self._pending)

    def mark(self) -> Any:
        """Now, on the device's clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def go(self) -> None:
        """Training starts, or goes on after a pause."""
        self.resolve()
        self._before = self.rows[-1][-1] if self.rows else 0.0
        self._start = self.mark()

    def append(self, loss: Tensor, scores: Tensor | None, marks: tuple[Any, Any, Any]) -> None:
        """An epoch is over.

        Args:
            loss: Its mean loss.
            scores: Of validation and test.
            marks: Before training, after it, and after the evaluation.
        """
        self._pending.append((loss, scores, marks))

    def resolve(self) -> list[list[float]]:
        """Reads what lies on the device; all rows."""
        if self._pending and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for loss, scores, (begin, trained, evaluated) in self._pending:
            val, test = (math.nan, math.nan) if scores is None else scores.tolist()
            eval_ms = math.nan if scores is None else self._ms(trained, evaluated)
            at_s = self._before + self._ms(self._start, evaluated) / 1e3
            self.rows.append([float(loss), val, test, self._ms(begin, trained), eval_ms, at_s])
        self._pending.clear()
        return self.rows

    def tensor(self) -> Tensor:
        """``float64[epochs, 6]``."""
        return torch.tensor(self.resolve(), dtype=torch.float64).view(-1, len(COLUMNS))

    def last(self) -> dict[str, float]:
        """The row of the last epoch."""
        return dict(zip(COLUMNS, self.resolve()[-1], strict=True))

    def best(self) -> int:
        """The epoch, from 0, of the best validation score, the first of equals; -1 if there is none."""
        val = [self._sign * row[1] for row in self.resolve()]
        scored = [epoch for epoch, score in enumerate(val) if not math.isnan(score)]
        return max(scored, key=lambda epoch: (val[epoch], -epoch), default=-1)

    def reached(self, target: float) -> float | None:
        """Seconds to the first validation score that is ``target`` or better, if one is."""
        found = (row[-1] for row in self.resolve() if self._sign * row[1] >= self._sign * target)
        return next(found, None)

    def column(self, name: str) -> list[float]:
        """One column, without NaN."""
        k = COLUMNS.index(name)
        return [row[k] for row in self.resolve() if not math.isnan(row[k])]

    def median(self, name: str) -> float:
        """Median of a column."""
        return statistics.median(self.column(name))

    def _ms(self, begin: Any, end: Any) -> float:
        if self._device.type == "cuda":
            return float(begin.elapsed_time(end))
        return 1e3 * float(end - begin)


@contextmanager
def timed(into: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    """Adds the milliseconds that the block takes, the GPU's work included, to ``into[name]``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    into[name] = into.get(name, 0.0) + 1e3 * (time.perf_counter() - begin)


def peak_mib(device: torch.device) -> float:
    """Most memory in use so far: allocated on the GPU, or the process's resident set on a CPU."""
    if device.type == "cuda":
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
