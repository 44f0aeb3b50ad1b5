"""What Nsight Compute says of the kernels of one benchmark: ``python -m benchmarks.profile --help``.

A time far above the gather floor has a reason: a unit that is busy, or warps that wait. For example:

    python -m benchmarks.profile additive --graphs reddit --only kind=agnn shape=1x64 mode=fwd \
        --kernels attention_window_kernel
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import run as run  # fills the registry
from benchmarks.bench import REGISTRY, machine
from benchmarks.cases import as_text, fits
from benchmarks.soak import append

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats")
SECTIONS += ("WarpStateStats", "InstructionStats", "Occupancy", "LaunchStats")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if Nsight Compute saw no launch, 2 if there is none or the case is not one."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("bench", choices=sorted(REGISTRY), metavar="BENCH", help="of benchmarks.run")
    parser.add_argument("--graphs", nargs="+", metavar="GRAPH", help="instead of those of the sweep")
    parser.add_argument("--only", nargs="+", default=(), metavar="AXIS=VALUE", help="must leave one case")
    parser.add_argument("--kernels", nargs="+", required=True, metavar="NAME", help="that are looked at")
    parser.add_argument("--launches", type=int, default=1, help="of these kernels, from the first on")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="rows are appended to")
    parser.add_argument("--call", action="store_true", help="call graphfuse once, unprofiled, and stop")
    given = parser.parse_args(arguments)
    plan = [case for case in REGISTRY[given.bench].cases(given.graphs) if fits(case, given.only)]
    if len(plan) != 1:
        print(
            f"{len(plan)} cases of {given.bench} are {' '.join(given.only)}; one is wanted", file=sys.stderr
        )
        return 2
    if given.call:
        bench = REGISTRY[given.bench]
        problem = bench.problem(**plan[0])
        bench.providers[next(iter(bench.providers))](problem.inputs).call()
        return 0
    program = shutil.which("ncu")
    if program is None:
        print("ncu is not on the PATH; it is Nsight Compute, which CUDA's toolkit brings", file=sys.stderr)
        return 2
    command = [program, "--csv", "--page", "details", "--print-details", "all", "--clock-control", "none"]
    command += [part for section in SECTIONS for part in ("--section", section)]
    command += [
        "--kernel-name",
        f"regex:^({'|'.join(given.kernels)})$",
        "--launch-count",
        str(given.launches),
    ]
    command += [sys.executable, "-m", "benchmarks.profile", *arguments, "--call"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    case = {axis: as_text(value) for axis, value in plan[0].items()}
    found = list(launches(done.stdout))
    for kernel, metrics in found:
        row = {"bench": given.bench, "case": case, "kernel": kernel, "metrics": metrics, **machine()}
        append(given.out, "profile", row)
    print(f"{len(found)} launches" if found else done.stdout)
    return int(not found)


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
