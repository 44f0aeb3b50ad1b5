"""What Nsight Compute says of the kernels of one benchmark: ``python -m benchmarks.profile --help``.

A time far above the gather floor has a reason: a unit that is busy, or warps that wait. For example:

    python -m benchmarks.profile additive --graphs github reddit --only kind=gat dtype=float16 mode=fwd \
        --kernels gat_window_kernel _additive_merge_kernel --out profile.jsonl

Caches keep what the calls before left there, as they do while a benchmark is timed.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import run as run  # fills the registry
from benchmarks.bench import REGISTRY, Bench, Case, machine
from benchmarks.cases import add_arguments, as_text, chosen
from benchmarks.sanitize import count_launches
from benchmarks.soak import append

SECTIONS: tuple[str, ...] = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "SchedulerStats",
)
SECTIONS += ("WarpStateStats", "InstructionStats", "Occupancy", "LaunchStats")
_MARK = "launched: "  # begins the line on which a case says how often it launched the kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if Nsight Compute saw no launch, 2 if there is none or no case fits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--kernels", nargs="+", required=True, metavar="NAME", help="that are looked at")
    parser.add_argument("--launches", type=int, default=1, help="of each kernel in a case, the first ones")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="rows are appended to")
    parser.add_argument("--call", action="store_true", help="call graphfuse once for each case, unprofiled")
    given = parser.parse_args(arguments)
    plan = chosen(given)
    if not plan:
        return 2
    if given.call:
        call(REGISTRY[given.bench], plan, given.kernels)
        return 0
    program = shutil.which("ncu")
    if program is None:
        print("ncu is not on the PATH; it is Nsight Compute, which CUDA's toolkit brings", file=sys.stderr)
        return 2
    command = [program, "--csv", "--page", "details", "--print-details", "all", "--clock-control", "none"]
    command += ["--cache-control", "none", "--kernel-name", f"regex:^({'|'.join(given.kernels)})$"]
    command += [part for section in SECTIONS for part in ("--section", section)]
    command += [sys.executable, "-m", "benchmarks.profile", *arguments, "--call"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = launches(done.stdout)
    rows = 0
    for case, number in zip(plan, _numbers(done.stdout), strict=False):
        seen = Counter[str]()
        for kernel, metrics in itertools.islice(found, number):
            seen[kernel] += 1
            if seen[kernel] > given.launches:
                continue
            of_case = {axis: as_text(value) for axis, value in case.items()}
            row = {"bench": given.bench, "case": of_case, "kernel": kernel, "metrics": metrics, **machine()}
            append(given.out, "profile", row)
            rows += 1
    print(f"{rows} launches" if rows else done.stdout)
    return int(not rows)


def call(bench: Bench, plan: Sequence[Case], kernels: Sequence[str]) -> None:
    """Calls graphfuse once for each case, and prints after each how often it launched the kernels."""
    for case in plan:
        with count_launches() as launched:
            problem = bench.problem(**case)
            bench.providers[next(iter(bench.providers))](problem.inputs).call()
        print(f"{_MARK}{sum(launched[kernel] for kernel in kernels)}", flush=True)


def _numbers(output: str) -> list[int]:
    lines = output.splitlines()
    return [int(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]


def launches(output: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernel and metrics, ``section: name [unit]`` -> value, of each launch in the CSV of ``output``."""
    lines = output.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    by_launch: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in csv.DictReader(io.StringIO("".join(lines[start:]))):
        if not row.get("Metric Name"):
            continue  # a rule's advice
        if ";" in row["Metric Value"]:
            continue  # a curve: what the occupancy would be with other registers
        _, metrics = by_launch.setdefault(row["ID"], (row["Kernel Name"], {}))
        unit = f" [{row['Metric Unit']}]" if row["Metric Unit"] else ""
        metrics[f"{row['Section Name']}: {row['Metric Name']}{unit}"] = _number(row["Metric Value"])
    yield from by_launch.values()


def _number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
