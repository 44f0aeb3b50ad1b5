"""What a call takes when its gathers cost nothing: ``python -m benchmarks.near --help``.

Every column of the walks is replaced by one of the first 16, whose rows stay in the L1 cache, and the call is
timed before and after. What is left is launches, arithmetic, and the waits between them: a kernel that takes
longer than its floor even so is not held up by the memory that the floor measures. For example:

    python -m benchmarks.near additive --graphs github ego-twitter --only kind=gat shape=4x32,8x16 dtype=float16

Results are compared with float64 before, not after, when they are sums over other columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import run as run  # fills the registry
from benchmarks.bench import REGISTRY, Bench, Case, device, machine
from benchmarks.cases import add_arguments, as_text, chosen
from benchmarks.soak import append
from benchmarks.timing import release, time_call
from benchmarks.tune import walks_of
from graphfuse.formats.walk import Walk

COLUMNS = 16  # rows of 128 numbers of half precision of so many nodes are 4 KB


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong, 2 if no case fits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.near", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing, a call")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="rows are appended to")
    given = parser.parse_args(arguments)
    plan = chosen(given)
    if not plan:
        return 2
    wrong = False
    for case in plan:
        release()
        row = timed(REGISTRY[given.bench], case, given.seconds)
        wrong |= row["status"] == "wrong"
        append(given.out, "near", row)
        shown = " ".join(f"{name}={row[name]:.4f}" for name in ("ms", "near_ms", "floor_ms") if row.get(name))
        print(" ".join(as_text(value) for value in case.values()), row["status"], shown, flush=True)
    return int(wrong)


def timed(bench: Bench, case: Case, seconds: float) -> dict[str, Any]:
    """A row: the case, its floor, and the time of graphfuse's call with its own columns and with near ones."""
    problem = bench.problem(**case)
    prepared = bench.providers[next(iter(bench.providers))](problem.inputs)
    error = problem.check(prepared.results())
    row: dict[str, Any] = {"bench": bench.name, "case": {axis: as_text(value) for axis, value in case.items()}}
    row |= {"columns": COLUMNS, "floor_ms": problem.floor_ms, **machine()}
    if error.wrong:
        return row | {"status": "wrong", "max_error": error.value, "limit": error.limit}
    far = time_call(prepared.call, device(), seconds)
    folded = [walk.column for walk in _each(problem.inputs)]
    kept = [column.clone() for column in folded]
    for column in folded:
        column.remainder_(COLUMNS)
    try:
        prepared.call()
        near = time_call(prepared.call, device(), seconds)
    finally:  # other cases of the graph walk the same record
        for column, before in zip(folded, kept, strict=True):
            column.copy_(before)
    return row | {"status": "ok", "ms": far.p50_ms, "near_ms": near.p50_ms}


def _each(inputs: Any) -> Iterator[Walk]:
    # walks that are views of one column list once
    seen = set[int]()
    for walk in walks_of(inputs):
        if walk.column.data_ptr() not in seen:
            seen.add(walk.column.data_ptr())
            yield walk


if __name__ == "__main__":
    raise SystemExit(main())
