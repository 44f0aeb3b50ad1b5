"""When each kernel of one call begins and ends: ``python -m benchmarks.timeline --help``.

A call that is far above the gather floor spends its time in one of its kernels, or between them. For example:

    python -m benchmarks.timeline spmm --graphs github --only dtype=float16 mode=fwd --out timeline.jsonl

L2 is flushed before each call, and a spinning kernel lasts as long as the host needs to launch it, as while
benchmarks are timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import run as run  # fills the registry
from benchmarks.bench import REGISTRY, Bench, Case, device, machine
from benchmarks.cases import add_arguments, as_text, chosen
from benchmarks.soak import append
from benchmarks.timing import flush, release, time_call

_CALLS = 12
_SPINNING = "spin_kernel"  # what torch.cuda._sleep launches
_SPINS = 2_000_000  # cycles, a millisecond
_SECONDS = 0.1


class Span(NamedTuple):
    """A kernel; microseconds."""

    kernel: str
    begin: float
    end: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 2 if there is no GPU or no case fits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="rows are appended to")
    given = parser.parse_args(arguments)
    plan = chosen(given)
    if not plan:
        return 2
    if not torch.cuda.is_available():
        print("kernels are looked at while a GPU runs them, and there is none", file=sys.stderr)
        return 2
    for case in plan:
        row = measure(REGISTRY[given.bench], case)
        append(given.out, "timeline", row)
        print(f"{' '.join(row['case'].values())}: {row['call_us']:.1f} us, the floor {row['floor_us']} us")
        for kernel, begin, end in row["kernels"]:
            print(f"{begin:10.1f} {end:10.1f}  {kernel}")
    return 0


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    """The row of a case, of what graphfuse launches for it."""
    release()
    problem = bench.problem(**case)
    call = bench.providers[next(iter(bench.providers))](problem.inputs).call
    call()
    timing = time_call(call, device(), _SECONDS)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # else it warns
        for _ in range(_CALLS):
            flush(device())
            torch.cuda._sleep(_SPINS)
            call()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {
        "bench": bench.name,
        "case": {axis: as_text(value) for axis, value in case.items()},
        "call_us": 1e3 * timing.p50_ms,
        "floor_us": None if problem.floor_ms is None else round(1e3 * problem.floor_ms, 1),
        "kernels": medians(list(calls(spans))),
        **machine(),
    }


def calls(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The kernels of each call, in the order of their begin: those behind a spin, but for the next flush."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if _SPINNING in span.kernel:
            if found:
                found[-1].pop()
            found.append([])
        elif found:
            found[-1].append(span)
    yield from found


def medians(found: Sequence[Sequence[Span]]) -> list[Span]:
    """Of most calls' number of kernels: begin and end of each, after the call's first began."""
    if not any(found):
        return []
    most = Counter(len(spans) for spans in found).most_common(1)[0][0]
    alike = [spans for spans in found if len(spans) == most]
    return [
        Span(
            alike[0][i].kernel,
            statistics.median(spans[i].begin - spans[0].begin for spans in alike),
            statistics.median(spans[i].end - spans[0].begin for spans in alike),
        )
        for i in range(most)
    ]


if __name__ == "__main__":
    sys.exit(main())
