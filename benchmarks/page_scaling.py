"""Plots of how kernels compare and grow: speed-up of each project, memory, time over edges and features."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure  # not pyplot: it would look for a screen

from benchmarks.markdown import figure as numeral
from benchmarks.page_plots import Data, on_logarithmic_rows
from benchmarks.rows import PROJECTS, Case, recorded_peers

_OPS = ("spmm", "attention")
_WIDTH, _DTYPE, _MODE = "64", "float16", "fwd+bwd"
_FLOOR = "gather floor"
# told apart without colours
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo")
_LINES = tuple(itertools.product(("-", "--", ":"), ("o", "^", "s", "x", "D")))


def speedups(benches: Mapping[str, Sequence[Case]]) -> Data:
    """Graph -> project -> time of attention, one head of 64 forward in float16, over that of graphfuse."""
    found: Data = {}
    for case in _by_edges(benches.get("attention", ()), _WIDTH, "fwd"):
        times = _times(case)
        ours, _ = times.pop("graphfuse", None), times.pop(_FLOOR, None)
        if ours and times:
            found[case.what[1]] = {name: [ms / ours] for name, ms in times.items()}
    return found


def memory(benches: Mapping[str, Sequence[Case]]) -> Data:
    """Graph -> layers -> MiB that such attention needs with backward, beyond its inputs."""
    found: Data = {}
    for case in _by_edges(benches.get("attention", ()), _WIDTH, _MODE):
        needs = {kind: case.of[kind].peak_mib for kind in ("graphfuse", "pyg") if kind in case.of}
        known = {kind: [mib] for kind, mib in needs.items() if mib}
        if "graphfuse" in known:
            found[case.what[1]] = known
    return found


def scaling(benches: Mapping[str, Sequence[Case]]) -> Data:
    """Panel -> who -> edges, or features, and milliseconds with backward in float16, in turns.

    Over edges: all graphs, 64 features. Over features: the graph with the most edges that has several widths.
    """
    found: Data = {}
    for op in _OPS:
        cases = benches.get(op, ())
        found[f"{op}: edges"] = _series((_edges(case), case) for case in _by_edges(cases, _WIDTH, _MODE))
        widths: dict[str, list[Case]] = {}
        for case in _by_edges(cases, None, _MODE):
            widths.setdefault(case.what[1], []).append(case)
        several = [graph for graph, of_graph in widths.items() if len(of_graph) > 1]
        if several:
            graph = several[-1]
            of_graph = sorted(widths[graph], key=lambda case: int(case.what[2]))
            found[f"{op}: features, {graph}"] = _series((int(case.what[2]), case) for case in of_graph)
    return {panel: series for panel, series in found.items() if series}


def draw_speedups(data: Data, title: str) -> Figure:
    """A group of bars for each graph, one for each project, on a logarithmic axis with a line at 1."""
    names = list(dict.fromkeys(name for of_graph in data.values() for name in of_graph))
    figure, axes = on_logarithmic_rows(data, title, "times graphfuse's", 0.3 + 0.13 * len(names))
    axes.axvline(1.0, color="black", linewidth=1)
    height = 0.8 / len(names)
    for at, name in enumerate(names):
        rows = [(row, of_graph[name][0]) for row, of_graph in enumerate(data.values()) if name in of_graph]
        places = [row + height * (at - (len(names) - 1) / 2) for row, _ in rows]
        shade = str(0.95 - 0.6 * at / len(names))
        bars = axes.barh(
            places, [value for _, value in rows], height=height, color=shade, edgecolor="black",
            linewidth=0.5, hatch=_HATCHES[at % len(_HATCHES)], label=name,
        )  # fmt: skip
        axes.bar_label(bars, labels=[numeral(value) for _, value in rows], padding=2, fontsize="x-small")
    most = max(value for of_graph in data.values() for (value,) in of_graph.values())
    axes.set_xlim(0.8, 1.5 * most)
    figure.legend(loc="outside lower center", ncols=min(len(names), 4))
    return figure


def draw_scaling(data: Data, title: str) -> Figure:
    """A panel for each series of numbers, both axes logarithmic, a line and marks for each provider."""
    names = list(dict.fromkeys(name for series in data.values() for name in series))
    looks = dict(zip(names, itertools.cycle(_LINES)))
    rows = -(-len(data) // 2)
    figure = Figure(figsize=(9, 0.8 + 3.2 * rows), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for axes, (panel, series) in zip(panels, data.items(), strict=False):
        axes.set(xscale="log", yscale="log", ylabel="ms")
        axes.set_title(panel, fontsize="medium")
        axes.grid(which="major", linewidth=0.5)
        for name, numbers in series.items():
            line, mark = looks[name]
            axes.plot(
                numbers[::2], numbers[1::2], linestyle=line, marker=mark, color="black", label=name,
                markerfacecolor="none", markersize=5, linewidth=0.8,
            )  # fmt: skip
        ticks = sorted({x for numbers in series.values() for x in numbers[::2]})
        if len(ticks) <= 4:  # two or three widths
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
    for axes in panels[len(data) :]:
        axes.set_visible(False)
    legends = (axes.get_legend_handles_labels() for axes in panels)
    found = {label: handle for one in legends for handle, label in zip(*one, strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4))
    return figure


def _series(cases: Iterable[tuple[int, Case]]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for x, case in cases:
        if case.time_ms("graphfuse"):
            for name, ms in _times(case).items():
                series.setdefault(name, []).extend((float(x), ms))
    return series


def _times(case: Case) -> dict[str, float]:
    times = {provider: record.p50_ms for provider, record in case.of.items()}
    ours = case.of["graphfuse"]
    times |= {_FLOOR: ours.floor_ms, **recorded_peers(ours)}
    return {PROJECTS.get(name, name): ms for name, ms in times.items() if ms}


def _edges(case: Case) -> int:
    return case.of["graphfuse"].num_edges or 0


def _by_edges(cases: Sequence[Case], width: str | None, mode: str) -> list[Case]:
    found = []
    for case in cases:
        op, _, its_width, dtype, its_mode = case.what
        meant = op in _OPS and (dtype, its_mode) == (_DTYPE, mode) and "graphfuse" in case.of
        if meant and (its_width == width if width else its_width.isdecimal()) and _edges(case):
            found.append(case)
    return sorted(found, key=lambda case: (_edges(case), case.what[1]))
