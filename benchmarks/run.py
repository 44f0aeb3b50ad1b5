"""Runs benchmarks, appends their records to files and prints a table: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks import ablation as ablation
from benchmarks import additive as additive
from benchmarks import attention as attention
from benchmarks import attention_steps as attention_steps
from benchmarks import blocks as blocks
from benchmarks import blocksparse as blocksparse
from benchmarks import captured_steps as captured_steps
from benchmarks import compiled as compiled
from benchmarks import cora_step as cora_step
from benchmarks import edge_attention as edge_attention
from benchmarks import epochs as epochs
from benchmarks import gcn_step as gcn_step
from benchmarks import graph_transformer as graph_transformer
from benchmarks import host_time as host_time
from benchmarks import molecules as molecules
from benchmarks import reorder as reorder
from benchmarks import row_windows as row_windows
from benchmarks import spmm as spmm
from benchmarks import transformer_step as transformer_step
from benchmarks.bench import REGISTRY, Bench, Case, Record, machine, to_json
from benchmarks.cases import add_only, fits, nothing_fits
from benchmarks.rows import describe, recorded_peers

_RESULTS = Path(__file__).parent / "results"
_COLUMNS = ("op", "graph", "D", "dtype", "mode", "provider", "p50 ms", "/ floor", "PyG /", "peer /", "status")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a row is wrong or an error (one that did not fit in memory, or in the budget, is not)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(REGISTRY)}; default all")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default benchmarks/results/<gpu>/<op>.jsonl"
    )
    parser.add_argument("--graphs", nargs="+", metavar="GRAPH", help="instead of those of the sweeps")
    parser.add_argument(
        "--also", nargs="+", default=(), metavar="PROVIDER", help=f"of {', '.join(compiled.ALSO)}"
    )
    add_only(parser)
    parser.add_argument(
        "--alone", action="store_true", help="graphfuse and the floor; to <gpu>/floors.jsonl by default"
    )
    parser.add_argument("--quick", action="store_true", help="one case a graph, timed briefly")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no row after this time")
    parser.add_argument("--list", action="store_true", help="print benchmarks and their cases, and stop")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(REGISTRY))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(REGISTRY)}")
    strange = sorted(set(given.also) - set(compiled.ALSO))
    if strange:
        parser.error(f"there is no provider {', '.join(strange)}; there are {', '.join(compiled.ALSO)}")
    benches = [compiled.extended(REGISTRY[name], given.also) for name in given.names or REGISTRY]
    cases = [(bench, case) for bench in benches for case in bench.cases(given.graphs, given.quick)]
    plan = [(bench, case) for bench, case in cases if fits(case, given.only)]
    if not plan:
        names = ", ".join(bench.name for bench in benches)
        parser.error(nothing_fits(names, [case for _, case in cases], given.only))
    rows = [
        f"{bench.name} {case.get('graph', '')}" for bench, case in plan for _ in _asked(bench, given.alone)
    ]
    if given.list:
        for bench, case in plan:
            print(bench.name, *(f"{axis}={value}" for axis, value in case.items()))
        return 0
    end = float("inf") if given.budget is None else time.perf_counter() + given.budget
    records: list[Record] = []
    with tqdm(total=len(rows), unit="row", disable=None) as bar:
        for record in _measure(plan, given.quick, given.alone, end):
            _append(given.out, "floors" if given.alone else record.op, record)
            records.append(record)
            bar.set_postfix_str(f"{record.op} {record.graph} {record.provider}")
            bar.update()
    print(table(records))
    for what, count in Counter(rows[len(records) :]).items():
        print(f"out of budget, not run: {count} rows of {what}")
    return int(any(record.status in ("wrong", "error") for record in records))


def _asked(bench: Bench, alone: bool) -> Sequence[str]:
    return list(bench.providers)[: 1 if alone else None]


def _measure(plan: Sequence[tuple[Bench, Case]], quick: bool, alone: bool, end: float) -> Iterator[Record]:
    for bench, case in plan:
        rows = bench.rows(case, quick)
        for _ in _asked(bench, alone):
            if time.perf_counter() >= end:
                return
            yield next(rows)


def _append(out: Path | None, name: str, record: Record) -> None:
    if out is None:
        gpu = re.sub(r"[^a-z0-9]+", "-", str(machine()["gpu"]).lower())
        out = _RESULTS / gpu / f"{name}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(to_json(record)) + "\n")


def table(records: Sequence[Record]) -> str:
    """The records as text, with ratios to the floor, PyG and the best peer, and what went wrong below."""
    pyg = {describe(record): record.p50_ms for record in records if record.provider == "pyg"}
    lines: list[tuple[str, ...]] = [_COLUMNS]
    notes = []
    for record in records:
        time_ms, theirs = record.p50_ms, pyg.get(describe(record))
        over_floor = time_ms / record.floor_ms if time_ms and record.floor_ms else None
        speedup = theirs / time_ms if time_ms and theirs and record.provider != "pyg" else None
        peer = None if record.provider == "pyg" else min(recorded_peers(record).values(), default=None)
        texts = (
            *describe(record),
            record.provider,
            None if time_ms is None else f"{time_ms:.4f}",
            None if over_floor is None else f"{over_floor:.2f}",
            None if speedup is None else f"{speedup:.2f}",
            f"{peer / time_ms:.2f}" if time_ms and peer else None,
            record.status,
        )
        lines.append(tuple("-" if text is None else str(text) for text in texts))
        if record.message is not None:
            notes.append(f"{' '.join(lines[-1][:6])}: {record.message}")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*shown, *notes])


if __name__ == "__main__":
    sys.exit(main())
