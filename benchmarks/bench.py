"""A benchmark, the record of one measurement, and the registry."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import Call, Timing, release, time_call, time_rounds
from benchmarks.truth import Error

REGISTRY: dict[str, Bench] = {}

Case = dict[str, Any]  # one value for each axis of a sweep
_SECONDS, _QUICK_SECONDS = 0.1, 0.03  # of timing, a row
_ROUNDS, _QUICK_ROUNDS = (30, 100), (3, 5)  # rounds, and calls in each, of providers that take turns


@dataclass(frozen=True)
class Record:
    """One row of results; a failure is a row too."""

    op: str
    provider: str
    graph: str | None = None
    num_nodes: int | None = None
    num_edges: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    mode: str | None = None  # fwd | fwd+bwd | build | step
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    timer: str | None = None  # what took the times
    floor_ms: float | None = None  # the gather floor, measured in the same run; None where none applies
    peak_mib: float | None = None  # memory of a call beyond inputs and prepared structures, outputs included
    gb_per_s: float | None = None  # bytes that any provider must move / p50
    max_error: float | None = None
    limit: float | None = None
    path: str = "-"  # of graphfuse: fused | generic
    status: str = "ok"  # ok | oom | wrong | error | unsupported
    message: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # what only some benchmarks report
    gpu: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    commit: str | None = None
    date: str | None = None


class Prepared(NamedTuple):
    """A provider, ready for one problem."""

    call: Call  # what is timed
    results: Callable[[], Sequence[Tensor]]  # what is compared with the truth; also warms the call up
    path: str = "-"
    extra: Mapping[str, Any] = {}  # what it adds to its record's
    floor_ms: float | None = None  # that of a structure of its own; None: the problem's


@dataclass(frozen=True)
class Problem:
    """One case of a sweep, the same for all providers.

    Args:
        facts: Fields of the record, such as ``graph``, ``num_nodes`` and ``dtype``.
        inputs: What providers are prepared from.
        device: Where they run.
        check: The error of a provider's results.
        floor_ms: The least time the problem could take, if that is known.
        bytes_moved: What any provider must move, if that says something.
    """

    facts: dict[str, Any]
    inputs: Any
    device: torch.device
    check: Callable[[Sequence[Tensor]], Error]
    floor_ms: float | None = None
    bytes_moved: int | None = None


@dataclass(frozen=True)
class Bench:
    """A benchmark. Making one registers it under its name.

    Args:
        name: The ``op`` of its records.
        sweep: Grids of cases: axis -> values; the cases are the products of each grid.
        problem: Makes the problem of a case, called with the case as keywords.
        providers: Name -> what prepares it from the inputs of a problem. graphfuse comes first.
        take_turns: Whether providers are timed in alternation, by the wall clock.
    """

    name: str
    sweep: Sequence[Mapping[str, Sequence[Any]]]
    problem: Callable[..., Problem]
    providers: Mapping[str, Callable[[Any], Prepared]]
    take_turns: bool = False

    def __post_init__(self) -> None:
        if self.name in REGISTRY:
            raise ValueError(f"there is already a benchmark called {self.name!r}")
        REGISTRY[self.name] = self

    def cases(self, graphs: Sequence[str] | None = None, quick: bool = False) -> list[Case]:
        """The cases of the sweep, graph after graph, as only one is kept loaded.

        Args:
            graphs: Takes the place of the axis ``graph``, where there is one.
            quick: Keep only the first case of every graph.
        """
        found: dict[str | None, list[Case]] = {}
        for grid in self.sweep:
            axes = dict(grid)
            if graphs and "graph" in axes:
                axes["graph"] = graphs
            for values in itertools.product(*axes.values()):
                case = dict(zip(axes, values, strict=True))
                of_graph = found.setdefault(case.get("graph"), [])
                if case not in of_graph and not (quick and of_graph):
                    of_graph.append(case)
        return list(itertools.chain.from_iterable(found.values()))

    def rows(self, case: Case, quick: bool = False) -> Iterator[Record]:
        """Measures every provider, a row each; the next begins when its row is asked for."""
        named = {key: value for key, value in case.items() if key in ("graph", "head_dim", "mode")}
        if "dtype" in case:
            named["dtype"] = _name(case["dtype"])
        if "shape" in case:
            named["extra"] = {"shape": list(case["shape"])}
        release()  # of a provider that ran out of memory
        try:
            problem = self.problem(**case)
        except Exception as error:
            for provider in self.providers:
                yield self._record(provider, named, **_failure(error))
            return
        if self.take_turns:
            yield from self._rows_in_turns(problem, quick)
            return
        for provider in self.providers:
            yield self._row(provider, problem, quick)

    def _row(self, provider: str, problem: Problem, quick: bool) -> Record:
        try:
            release()
            prepared, checked = self._prepare(provider, problem)
            if checked["status"] == "wrong":
                return self._record(provider, problem.facts, **checked)
            timing = time_call(prepared.call, problem.device, _QUICK_SECONDS if quick else _SECONDS)
            return self._timed(provider, problem, checked, timing)
        except Exception as error:
            return self._record(provider, problem.facts, floor_ms=problem.floor_ms, **_failure(error))

    def _rows_in_turns(self, problem: Problem, quick: bool) -> Iterator[Record]:
        calls: dict[str, Call] = {}
        outcome: dict[str, dict[str, Any]] = {}
        for provider in self.providers:
            try:
                prepared, outcome[provider] = self._prepare(provider, problem)
                if outcome[provider]["status"] == "ok":
                    prepared.call()
                    calls[provider] = prepared.call
            except Exception as error:
                outcome[provider] = _failure(error)
        timings: dict[str, Timing] = {}
        try:
            if calls:
                timings = time_rounds(calls, problem.device, *(_QUICK_ROUNDS if quick else _ROUNDS))
        except Exception as error:
            outcome |= dict.fromkeys(calls, _failure(error))
        for provider, found in outcome.items():
            if provider in timings:
                yield self._timed(provider, problem, found, timings[provider])
            else:
                yield self._record(provider, problem.facts, **found)

    def _prepare(self, provider: str, problem: Problem) -> tuple[Prepared, dict[str, Any]]:
        """The provider, and the fields of the record that say whether its results are right."""
        prepared = self.providers[provider](problem.inputs)
        value, limit = error = problem.check(prepared.results())
        fields: dict[str, Any] = {"max_error": value, "limit": limit, "path": prepared.path, "status": "ok"}
        fields["extra"] = {**problem.facts.get("extra", {}), **prepared.extra}
        fields["floor_ms"] = problem.floor_ms if prepared.floor_ms is None else prepared.floor_ms
        if error.wrong:
            message = f"the error is {value:.2e}, more than {limit:.2e}; not timed"
            fields |= {"status": "wrong", "message": message}
        return prepared, fields

    def _timed(self, provider: str, problem: Problem, checked: dict[str, Any], timing: Timing) -> Record:
        fields = dict(
            p20_ms=timing.p20_ms,
            p50_ms=timing.p50_ms,
            p80_ms=timing.p80_ms,
            timer=timing.timer,
            peak_mib=timing.peak_mib,
            **checked,
        )
        if problem.bytes_moved is not None:
            fields["gb_per_s"] = problem.bytes_moved / timing.p50_ms / 1e6
        if timing.ratio is not None:
            ratio = dict(zip(("p20", "p50", "p80"), timing.ratio, strict=True))
            first = next(iter(self.providers))
            fields["extra"] = fields["extra"] | {f"time over {first}": ratio}
        return self._record(provider, problem.facts, **fields)

    def _record(self, provider: str, facts: dict[str, Any], **fields: Any) -> Record:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return Record(op=self.name, provider=provider, **{**machine(), "date": date, **facts, **fields})


def to_json(record: Record) -> dict[str, Any]:
    """The record as a JSON object; NaN and infinity, which JSON lacks, become strings."""
    return {
        key: str(value) if isinstance(value, float) and value - value != 0 else value
        for key, value in dataclasses.asdict(record).items()
    }


@functools.cache
def device() -> torch.device:
    """Where benchmarks run: the first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@functools.cache
def machine() -> dict[str, str | None]:
    """The fields of a record that say where it was measured, and with what."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """``GRAPHFUSE_COMMIT``, for copies without a repository, or what git says; ``+`` marks local changes."""
    named = os.environ.get("GRAPHFUSE_COMMIT")
    if named:
        return named
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Unsupported(Exception):
    """A provider cannot express a problem; the message is a sentence that says why."""


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, Unsupported):
        return {"status": "unsupported", "message": str(error)}
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text.lower()
    error.__traceback__ = error.__context__ = None  # frames hold the tensors that did not fit
    return {"status": "oom" if memory else "error", "message": text}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
