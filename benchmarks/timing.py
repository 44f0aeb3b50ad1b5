"""How long a call takes: on the GPU alone, or by the wall clock with providers taking turns."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

_FLUSHED_BYTES = 2**28  # more than any L2 cache, as in triton.testing.do_bench
_SLOW_S = 1.0  # a longer call is timed once
_LONGEST_HEAD_START_S = 3e-3


@dataclass(frozen=True)
class Timing:
    """Quantiles of one call's time, what took them, and the memory it used beyond what was there before."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    peak_mib: float | None  # None on a CPU
    timer: str
    ratio: tuple[float, float, float] | None = None  # quantiles of time / first provider's, of each round


def time_call(call: Call, device: torch.device, seconds: float) -> Timing:
    """Times single calls of what was called once before, for about ``seconds`` in all.

    On a GPU: between two CUDA events, L2 flushed before each call, with a spinning kernel ahead of it that
    lasts as long as the host needs to launch the call. So the figure is the time of the GPU; a call that
    synchronises shows the host's time as well.
    """
    if device.type != "cuda":
        return _time_on_cpu(call, seconds)
    total_s, host_s, peak_mib = _measure(call)
    if total_s > _SLOW_S:
        once = 1e3 * total_s
        return Timing(once, once, once, peak_mib, "wall clock, one call")
    head_start_s = min(1.5 * host_s + 2e-5, _LONGEST_HEAD_START_S)
    repeats = max(5, min(200, round(seconds / (total_s + head_start_s + 1e-4))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        flush(device)
        torch.cuda._sleep(round(head_start_s * 2e9))  # cycles, at about 2 GHz
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [float(begin.elapsed_time(end)) for begin, end in events]
    return Timing(*quantiles(times), peak_mib, "cuda events, L2 flushed")


def time_rounds(
    calls: Mapping[str, Call], device: torch.device, rounds: int, repeats: int
) -> dict[str, Timing]:
    """Times ``repeats`` of calls made once before by the wall clock, providers taking turns in every round.

    Taking turns exposes all providers to the same machine; the ratios are taken within a round.
    """
    peaks: dict[str, float | None] = dict.fromkeys(calls)
    if device.type == "cuda":
        peaks = {name: _measure(call)[2] for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _wait(device)
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            _wait(device)
            times[name].append(1e3 * (time.perf_counter() - begin) / repeats)
    timer = f"wall clock, {rounds} rounds of {repeats}"
    base = times[next(iter(calls))]
    found = {}
    for name in calls:
        ratio = quantiles([mine / first for mine, first in zip(times[name], base, strict=True)])
        found[name] = Timing(*quantiles(times[name]), peaks[name], timer, ratio)
    return found


def flush(device: torch.device) -> None:
    """Writes so much that nothing else is left in the GPU's caches."""
    _cache(device).zero_()


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """The 20, 50 and 80 percent quantiles."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return low, statistics.median(values), high


def release() -> None:
    """Gives memory back, so that one provider's garbage is not another's lack."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure(call: Call) -> tuple[float, float, float]:
    """Seconds until the GPU is done and until the host is, and the memory in use at most, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    call()
    host_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    total_s = time.perf_counter() - begin
    return total_s, host_s, (torch.cuda.max_memory_allocated() - before) / 2**20


def _time_on_cpu(call: Call, seconds: float) -> Timing:
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1e3 * seconds and len(times) < 200):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return Timing(*quantiles(times), None, "perf_counter")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@functools.cache
def _cache(device: torch.device) -> Tensor:
    return torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
