"""Launches every fused op in every row of its launch table again and again, with new data each time.

Every result has to be finite, and that of every tenth launch the same to the bit once more; of every
hundredth, the output and all gradients are held to the rule of ``graphfuse.testing``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench import device, machine
from benchmarks.soak_cases import Case, Problem, cases, make_graph, make_problem
from graphfuse.kernels.device import INTERPRETING
from graphfuse.testing import agree

LAUNCHES = 2000
REPEAT, COMPARE = 10, 100  # every so many launches, the first among them
_CHUNK = 100  # launches between two looks at what was found, each of which waits for the GPU
_NODES, _FEW_NODES = 2003, 43  # on a GPU, where hubs are cut as shipped; in the interpreter
_SHORT_SLICE = 32
_FEW = 256
_RESULTS = Path(__file__).parent / "results"
_INTEGERS = {2: torch.int16, 4: torch.int32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or a configuration failed, 2 where no kernel would run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="configurations: an op, the start of a name, a pattern"
    )
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of each configuration")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all; cuts the last one short")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a share; compiling is slow")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default benchmarks/results/<gpu>/reliability/soak.jsonl"
    )
    parser.add_argument("--list", action="store_true", help="print the configurations, and stop")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)  # of a process, set by --jobs
    given = parser.parse_args(arguments)
    chosen = select(given.names)
    unknown = [name for name in given.names if not select([name])]
    if unknown:
        parser.error(f"no configuration is called {' or '.join(unknown)}; --list prints all")
    if given.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    if device().type != "cuda" and not INTERPRETING:
        print("there is no GPU to soak; TRITON_INTERPRET=1 runs the kernels on the CPU", file=sys.stderr)
        return 2
    if given.jobs > 1:
        return _spread(given)
    turn, shares = map(int, given.share.split("/"))
    end = time.perf_counter() + given.seconds
    rows = list(_soak_all(chosen[turn::shares], given.launches, end, given.out))
    print(summary(rows, len(chosen[turn::shares])))
    return int(any(row["status"] != "ok" for row in rows))


def select(names: Sequence[str]) -> list[Case]:
    """The configurations that any of ``names`` fits; all if there is none."""

    def fits(name: str, wanted: str) -> bool:
        return name == wanted or name.startswith(wanted + "/") or fnmatch.fnmatchcase(name, wanted)

    return [case for case in cases() if not names or any(fits(case.name, wanted) for wanted in names)]


def _spread(given: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "benchmarks.soak", *given.names, f"--launches={given.launches}"]
    command += [f"--seconds={given.seconds}", *([] if given.out is None else [f"--out={given.out}"])]
    shares = [subprocess.Popen([*command, f"--share={turn}/{given.jobs}"]) for turn in range(given.jobs)]
    return int(any([share.wait() != 0 for share in shares]))  # a list, so that all are waited for


def _soak_all(
    chosen: Sequence[Case], launches: int, end: float, out: Path | None
) -> Iterator[dict[str, Any]]:
    for case in chosen:
        if time.perf_counter() >= end:
            return
        row = soak(case, launches, end)
        append(out, "soak", row)
        if row["status"] != "ok":
            print(f"{row['status']}: {case.name}: {row['message']}", flush=True)
        yield row
        if row["status"] == "lost":
            return


def append(out: Path | None, name: str, row: dict[str, Any]) -> None:
    """Adds a row to ``out``, or to the file called ``name`` among the results of this GPU."""
    if out is None:
        gpu = re.sub(r"[^a-z0-9]+", "-", str(machine()["gpu"]).lower())
        out = _RESULTS / gpu / "reliability" / f"{name}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")  # in one piece, as other processes write there too


def summary(rows: Sequence[dict[str, Any]], wanted: int) -> str:
    """What was done, and what was not."""
    launches, repeated, compared = (
        sum(row[field] for row in rows) for field in ("launches", "repeated", "compared")
    )
    bad = sum(row["status"] != "ok" for row in rows)
    text = f"{len(rows)} configurations, {launches} launches, {repeated} repeated, {compared} compared"
    text += f"; {bad} of the configurations went wrong"
    return text if len(rows) == wanted else f"{text}; not run: {wanted - len(rows)} configurations"


def soak(
    case: Case,
    launches: int = LAUNCHES,
    end: float = math.inf,
    repeat: int = REPEAT,
    compare: int = COMPARE,
) -> dict[str, Any]:
    """One configuration: its row of results.

    Args:
        case: What is launched.
        launches: Forward and backward passes.
        end: When to stop, by ``time.perf_counter``; a chunk is done at least.
        repeat: Every so many launches, one is done again and has to give the same bits.
        compare: Every so many launches, one is compared with the definition.
    """
    begin = time.perf_counter()
    found, where = _Findings(device()), machine()  # while the GPU still answers
    error: Exception | None = None
    try:
        with case.forced(None if found.on_gpu else _SHORT_SLICE):
            problem = make_problem(case, make_graph(_NODES if found.on_gpu else _FEW_NODES, device()))
            _launch_all(problem, found, launches, end, repeat, compare)
    except Exception as caught:
        error = caught
    status, message = "ok", None
    if error is not None:
        # after a fault in a kernel nothing runs any more on that GPU in this process
        status = "lost" if isinstance(error, torch.AcceleratorError) else "error"
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    elif found.wrong:
        status, message = "wrong", found.message()
    return {
        "name": case.name,
        "launches": found.launches,
        "repeated": found.repeated,
        "compared": found.compared,
        "wrong": found.wrong,
        "status": status,
        "message": message,
        "seconds": round(time.perf_counter() - begin, 3),
        **where,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


class _Findings:
    """Counts of a configuration; those that every launch adds to stay on the GPU until :meth:`read`."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.launches = self.repeated = self.compared = 0
        self.not_finite = self.different = 0
        self.misses: list[str] = []
        self._on_device = torch.zeros(2, dtype=torch.int64, device=device)

    def look(self, results: Sequence[Tensor]) -> None:
        """Counts a launch, and whether it gave something that is not finite."""
        # the largest number of each result is NaN or infinite if any is
        largest = [torch.linalg.vector_norm(value, math.inf, dtype=torch.float32) for value in results]
        self._on_device[0].add_(~torch.stack(largest).isfinite().all())
        self.launches += 1

    def look_again(self, results: Sequence[Tensor], again: Sequence[Tensor]) -> None:
        """Counts a launch of the same numbers, and whether it gave other bits."""
        differ = [torch.ne(_bits(one), _bits(other)).any() for one, other in zip(results, again, strict=True)]
        self._on_device[1].add_(torch.stack(differ).any())
        self.repeated += 1

    def read(self) -> None:
        """Waits for the GPU."""
        self.not_finite, self.different = self._on_device.tolist()

    @property
    def wrong(self) -> int:
        """Results that were, in any of the ways."""
        return self.not_finite + self.different + len(self.misses)

    def message(self) -> str:
        """How often in which way, and the first that broke the rule of comparison."""
        counts = {"not finite": self.not_finite, "different bits": self.different, "missed": len(self.misses)}
        text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{text}; {self.misses[0]}" if self.misses else text


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _launch_all(
    problem: Problem, found: _Findings, launches: int, end: float, repeat: int, compare: int
) -> None:
    results: list[Tensor] = []
    shapes: list[Tensor] = []  # of the results, known after the first launch
    for turn in range(launches):
        if turn % _CHUNK == 0 and turn > 0:
            found.read()
            if time.perf_counter() >= end:
                return
        problem.data.refill()
        results.clear()  # before the memory that they leave is filled with NaN
        if found.on_gpu:
            _poison(shapes)
        results = problem.launch()
        shapes = shapes or [torch.empty_like(value, device="meta") for value in results]
        found.look(results)
        if turn % repeat == 0:
            with _nan_in_new_memory():
                found.look_again(results, problem.launch())
        if turn % compare == 0:
            found.compared += 1
            miss = _miss(problem, results)
            found.misses += [] if miss is None else [miss]
    found.read()


def _poison(shapes: Sequence[Tensor]) -> None:
    # the caching allocator hands these blocks to whoever asks for as much next: the op, for its results
    held = [torch.full_like(shape, math.nan, device="cuda") for shape in shapes]
    del held


@contextlib.contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    # what the op keeps between its kernels is not in `shapes`; deterministic mode fills all that is new
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cuBLAS, which runs on one stream here
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _miss(problem: Problem, results: Sequence[Tensor]) -> str | None:
    """What breaks the error rule, given the results of the numbers that are there; they change if it does."""
    first = [results]

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        if first:
            actual: Sequence[Tensor] = first.pop()
        else:
            problem.data.refill()
            actual = problem.launch()
        yield from zip(problem.names, actual, problem.define(), problem.define(torch.float64), strict=True)

    # how far the definition rounds a few numbers is luck: then four launches are one comparison
    few = min(value.numel() for value in results) < _FEW
    try:
        agree(draw, 4 if few else 1)
    except AssertionError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
