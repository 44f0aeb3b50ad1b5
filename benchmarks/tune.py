"""Sweeps a row of the launch table offline: ``python -m benchmarks.tune --help``.

The table, ``graphfuse/kernels/launch.py`` and, of what adds slices, ``merge_shapes.py``, is code that nothing
changes at run time. This times a benchmark with other values in what one of its functions returns, checks
each result as every benchmark does, and prints which to write there. For example:

    python -m benchmarks.tune attention attention_window --graphs reddit --only shape=8x16 mode=fwd \
        --vary guess=0,1 registers=none,128,168

A function that returns a number, how long slices are, has it in ``times``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from benchmarks import floors
from benchmarks import run as run  # fills the registry
from benchmarks.bench import REGISTRY, Bench, Case, Problem, device, machine
from benchmarks.cases import add_arguments, as_text, chosen, pairs
from benchmarks.timing import release, time_call
from graphfuse.formats import walk
from graphfuse.kernels import launch, merge_shapes
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.launch import Config
from graphfuse.kernels.merge_shapes import Merge
from graphfuse.kernels.run import Launch

_RESULTS = Path(__file__).parent / "results"
_SECONDS = 0.05  # of timing, a configuration
_THREADS = 16  # that compile

# what functions of the table return: its fields
_FIELDS = {"Config": Config._fields, "Merge": Merge._fields, "float": ("times",)}

Change = dict[str, Any]  # field -> what stands there instead


class NoSuchCall(Exception):
    """A case that makes none of the calls that are to be changed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a configuration gave a wrong result, 2 if nothing was swept."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("function", metavar="FUNCTION", help="of the table")
    parser.add_argument(
        "--calls", nargs="+", default=(), metavar="PARAMETER=VALUE", help="of FUNCTION; others stay"
    )
    parser.add_argument("--vary", nargs="+", required=True, metavar="FIELD=A,B,..", help="all combinations")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after this time")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default benchmarks/results/<gpu>/tune.jsonl"
    )
    given = parser.parse_args(arguments)
    try:
        table_of, fields = where(given.function)
        found = list(changes(given.vary, fields))
    except ValueError as error:
        parser.error(str(error))
    takes = inspect.signature(getattr(table_of, given.function)).parameters
    for name in pairs(given.calls).keys() - takes.keys():
        parser.error(f"{given.function} has no parameter {name}; it has {', '.join(takes)}")
    bench = REGISTRY[given.bench]
    plan = chosen(given)
    if not plan:
        return 2
    end, swept, failed = time.perf_counter() + given.seconds, 0, 0
    for case in plan:
        release()
        rows: list[dict[str, Any]] = []
        try:
            for row in _sweep(bench, case, given.function, pairs(given.calls), found, end):
                rows.append(row)
                _append(given.out, row)  # at once: a sweep that is cut short keeps what it has
        except NoSuchCall as error:
            print(error, file=sys.stderr)
            continue
        print(table(case, rows))
        swept += 1
        failed += sum(row["status"] == "wrong" for row in rows)
    return int(failed > 0) if swept else 2


def where(function: str) -> tuple[Any, tuple[str, ...]]:
    """The module of the table that has ``function``, and the fields of what it returns.

    Raises:
        ValueError: there is none.
    """
    for module in (launch, merge_shapes):
        returned = getattr(getattr(module, function, None), "__annotations__", {}).get("return")
        if returned in _FIELDS:
            return module, _FIELDS[returned]
    raise ValueError(f"the launch table has no function {function}")


def changes(vary: Sequence[str], fields: Sequence[str] = Config._fields) -> Iterator[Change]:
    """Nothing, which is the table itself, and all combinations of ``FIELD=A,B``.

    Raises:
        ValueError: there is no such field, or a value is neither ``none`` nor a number.
    """
    axes: dict[str, list[float | None]] = {}
    for field, values in pairs(vary).items():
        if field not in fields:
            raise ValueError(f"there is no {field} in what is returned; it has {', '.join(fields)}")
        axes[field] = [None if value == "none" else _number(value) for value in values.split(",")]
    yield {}
    for combination in itertools.product(*axes.values()):
        yield dict(zip(axes, combination, strict=True))


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


@contextlib.contextmanager
def changed(function: str, calls: dict[str, str], change: Change) -> Iterator[list[Any]]:
    """Within, ``function`` of the launch table changes what it returns to such calls, which it lists."""
    table_of, _ = where(function)
    original = getattr(table_of, function)
    signature = inspect.signature(original)
    found: list[Any] = []

    def patched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        returned = original(*args, **kwargs)
        meant = all(as_text(bound.arguments[name]) == value for name, value in calls.items())
        if meant:
            whole = isinstance(returned, tuple)
            returned = returned._replace(**change) if whole else change.get("times", returned)
            found.append(returned)
        return returned

    with mock.patch.object(table_of, function, patched):
        yield found


def _sweep(
    bench: Bench, case: Case, function: str, calls: dict[str, str], found: Sequence[Change], end: float
) -> Iterator[dict[str, Any]]:
    with floors.unmeasured():
        problem = bench.problem(**case)
    provider = next(iter(bench.providers))

    def with_change(change: Change, action: Callable[[], Any]) -> Any:
        forget_launches()
        with changed(function, calls, change) as met:
            result = action()
        if not met:
            which = " ".join(as_text(value) for value in case.values())
            wanted = " with " + " ".join(f"{name}={value}" for name, value in calls.items()) if calls else ""
            raise NoSuchCall(f"{which} makes no call of {function}{wanted}; nothing was swept")
        return result

    def once() -> None:  # what is captured is launched while it is prepared
        bench.providers[provider](problem.inputs).call()

    if not INTERPRETING:
        _compile([functools.partial(with_change, change, once) for change in found])
    for change in tqdm(found, unit="configuration", disable=None):
        if time.perf_counter() >= end:
            return
        row: dict[str, Any] = {
            "op": "tune",
            "bench": bench.name,
            "function": function,
            "calls": calls,
            "change": change,
        }
        row |= {"case": {axis: as_text(value) for axis, value in case.items()}, **machine()}
        yield row | with_change(change, functools.partial(_measure, bench, provider, problem))


def _measure(bench: Bench, provider: str, problem: Problem) -> dict[str, Any]:
    try:
        prepared = bench.providers[provider](problem.inputs)
        error = problem.check(prepared.results())
        if error.wrong:
            return {"status": "wrong", "max_error": error.value, "limit": error.limit}
        timing = time_call(prepared.call, problem.device, _SECONDS)
    except Exception as error:
        return {"status": "error", "message": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"status": "ok", "p50_ms": timing.p50_ms, "p20_ms": timing.p20_ms}


def forget_launches() -> None:
    """Makes all walks choose configurations anew: they keep what they launch."""
    for directions in walk._WALKS.values():
        for one in directions.values():
            one.plans.clear()


def _compile(calls: Sequence[Callable[[], Any]]) -> None:
    """Compiles what the calls would launch, side by side and without launching it, into Triton's cache."""
    wanted: list[tuple[Launch, Any, Any, int]] = []

    def collect(self: Launch, outputs: Any, operands: Any, aligned: bool, index: int) -> None:
        wanted.append((self, outputs, operands, index))

    with mock.patch.object(Launch, "__call__", collect):
        for call in calls:
            with contextlib.suppress(Exception):  # the sweep will say what fails
                call()

    def compiled(launch: Launch, *arguments: Any) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device()):  # likewise
            launch.compile(*arguments)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda one: compiled(*one), wanted))


def table(case: Case, rows: Sequence[dict[str, Any]]) -> str:
    """The configurations from the fastest on, with ratios to the table's own, and what went wrong."""
    own = next((row.get("p50_ms") for row in rows if not row["change"]), None)
    lines = [" ".join(f"{axis}={as_text(value)}" for axis, value in case.items())]
    for row in sorted(rows, key=lambda row: row.get("p50_ms", float("inf"))):
        change = " ".join(f"{field}={value}" for field, value in row["change"].items()) or "as it is"
        if row["status"] == "ok":
            ratio = f"{row['p50_ms'] / own:.3f}" if own else "-"
            lines.append(f"{row['p50_ms']:10.4f} ms  {ratio:>6}  {change}")
        else:
            lines.append(f"{row['status']:>13}          {change}  {row.get('message', '')}")
    return "\n".join(lines)


def _append(out: Path | None, row: dict[str, Any]) -> None:
    if out is None:
        out = _RESULTS / re.sub(r"[^a-z0-9]+", "-", str(machine()["gpu"]).lower()) / "tune.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
