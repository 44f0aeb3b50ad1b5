"""Times the kernels of this tree against those of another, in turns: ``python -m benchmarks.against --help``.

Whether a change made something faster is not to be read off two runs: machines, and hours of one, differ by
more than most changes do. Here a process for each tree prepares the same case, checks its result, and is then
timed for a moment while the other one waits. For example, in a checkout:

    git worktree add ../before main
    python -m benchmarks.against ../before spmm --graphs cora github --only head_dim=64 mode=fwd
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triton import knobs

from benchmarks import run as run  # fills the registry
from benchmarks.cases import add_arguments, as_text, chosen
from benchmarks.markdown import table
from benchmarks.timing import quantiles
from graphfuse.kernels.device import INTERPRETING

HERE = Path(__file__).resolve().parents[1]
_COMPILERS = 8  # processes of each tree that compile, before anything is timed

# What runs in each tree, and asks nothing of it but what is older than this file. A line of JSON is answered
# by another; whatever else a tree prints goes where errors go.
_WORKER = """
import argparse, json, sys

answers, sys.stdout = sys.stdout, sys.stderr

from benchmarks import floors, run
from benchmarks.bench import REGISTRY, machine
from benchmarks.cases import add_arguments, as_text, chosen
from benchmarks.timing import release, time_call


def answer(**what):
    print(json.dumps(what), file=answers, flush=True)


parser = argparse.ArgumentParser()
add_arguments(parser)
given = parser.parse_args()
bench = REGISTRY[given.bench]
cases = {" ".join(map(as_text, case.values())): case for case in chosen(given)}
provider = bench.providers[next(iter(bench.providers))]
problem = prepared = None
answer(**machine())
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if "seconds" in asked:
            answer(ms=time_call(prepared.call, problem.device, asked["seconds"]).p50_ms)
            continue
        problem = prepared = None
        release()
        with floors.unmeasured():
            problem = bench.problem(**cases[asked["case"]])
        prepared = provider(problem.inputs)
        error = problem.check(prepared.results())
        answer(**({"failed": f"its result is off by {error.value:.3g}"} if error.wrong else {}))
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])
"""


class Worker:
    """A process that runs cases of one tree."""

    def __init__(self, tree: Path, arguments: Sequence[str]) -> None:
        path = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if tree != HERE:
            env.pop("GRAPHFUSE_COMMIT", None)  # of this tree
            # Triton finds what it compiled by source and options, but how a tree has it compiled may differ.
            env["TRITON_CACHE_DIR"] = str(
                Path(knobs.cache.dir) / f"{tree.name}-{zlib.crc32(bytes(tree)):08x}"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *arguments], cwd=tree, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.machine = self.answer()

    def ask(self, **what: Any) -> None:
        """Begins something; :meth:`answer` waits for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # there will be no answer
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """What came of it: ``failed`` says what went wrong."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"failed": f"the process ended with status {self._process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a case failed in this tree, 2 if none was compared."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("tree", type=Path, metavar="TREE", help="another checkout")
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of both trees (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.03, help="of timing, in a round (default: 0.03)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="to which a line of JSON a case is added")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds is at least 1 (got {given.rounds})")
    tree = given.tree.resolve()
    if not (tree / "benchmarks/run.py").is_file():
        parser.error(f"{given.tree} is no checkout of graphfuse: it has no benchmarks/run.py")
    names = [" ".join(map(as_text, case.values())) for case in chosen(given)]
    if not names:
        return 2
    named = [given.bench]
    named += ["--graphs", *given.graphs] if given.graphs else []
    named += ["--only", *(f"{axis}={values}" for axis, values in given.only.items())] if given.only else []
    if not INTERPRETING:
        _compile((HERE, tree), named, names)
    workers = Worker(HERE, named), Worker(tree, named)
    rows: list[dict[str, Any]] = []
    try:
        for name in names:
            rows.append(_compare(workers, name, given))
            if given.out is not None:  # at once: a run that is cut short keeps what it has
                with given.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    finally:
        for worker in workers:
            worker.close()
    print(as_table(rows))
    if any("here" in row["failed"] for row in rows):
        return 1
    return 0 if any("ratio" in row for row in rows) else 2


def _compile(trees: Sequence[Path], named: Sequence[str], names: Sequence[str]) -> None:
    # Into Triton's cache, which processes of a tree share: each of these prepares its part of the cases once.
    count = min(_COMPILERS, len(names), max(1, (os.cpu_count() or 1) // len(trees)))

    def share(tree: Path, place: int) -> None:
        worker = Worker(tree, named)
        for name in names[place::count]:
            worker.ask(case=name)
            worker.answer()  # what fails is said when it is timed
        worker.close()

    with ThreadPoolExecutor(count * len(trees)) as pool:
        for tree in trees:
            for place in range(count):
                pool.submit(share, tree, place)


def _compare(workers: tuple[Worker, Worker], name: str, given: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"op": "against", "bench": given.bench, "case": name, "failed": {}}
    for place, worker in zip(("here", "there"), workers, strict=True):
        row[place] = worker.machine
        worker.ask(case=name)
    for place, worker in zip(("here", "there"), workers, strict=True):
        failed = worker.answer().get("failed")
        if failed is not None:
            row["failed"][place] = failed
    if row["failed"]:
        return row
    times: dict[str, list[float]] = {"here": [], "there": []}
    for turn in range(given.rounds):
        for place, worker in list(zip(times, workers, strict=True))[:: 1 if turn % 2 == 0 else -1]:
            worker.ask(seconds=given.seconds)
            found = worker.answer()
            if "failed" in found:
                return row | {"failed": {place: found["failed"]}}
            times[place].append(found["ms"])
    low, ratio, high = quantiles([here / there for here, there in zip(*times.values(), strict=True)])
    row |= {f"{place}_ms": quantiles(ms)[1] for place, ms in times.items()}
    return row | {"ratio": ratio, "ratio_p20": low, "ratio_p80": high}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each case: both times, and quantiles of the ratio of a round."""
    lines = []
    for row in rows:
        if row["failed"]:
            lines.append(
                (row["case"], *["-"] * 4, "; ".join(f"{at}: {why}" for at, why in row["failed"].items()))
            )
            continue
        spread = f"{row['ratio_p20']:.3f} to {row['ratio_p80']:.3f}"
        times = (f"{row['here_ms']:.4f}", f"{row['there_ms']:.4f}")
        lines.append((row["case"], *times, f"{row['ratio']:.3f}", spread, ""))
    return table(("case", "here, ms", "there, ms", "here / there", "20 to 80 %", ""), lines)


if __name__ == "__main__":
    raise SystemExit(main())
