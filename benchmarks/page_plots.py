"""Plots of results, as SVG that can be read without colours and that holds its data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure  # not pyplot: it would look for a screen
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.markdown import figure as numeral
from benchmarks.page_training import KINDS, Training
from benchmarks.rows import Case

Data = dict[str, dict[str, list[float]]]  # row of the plot -> kind -> values

# filled and hatched, dots and crosses: told apart without colours
_LOOKS = {"graphfuse": ("#0072B2", "", "o"), "pyg": ("#ffffff", "////", "x")}
_MODES = {"fwd": "o", "fwd+bwd": "^", "step": "s", "build": "D"}


def scores(trainings: Sequence[Training]) -> Data:
    """The test score of each seed."""
    found = {_label(one): {kind: list(of_kind) for kind, of_kind in one.scores.items()} for one in trainings}
    return {label: kinds for label, kinds in found.items() if kinds}


def values(trainings: Sequence[Training], name: str) -> Data:
    """One number of each kind of layers."""
    found = {
        _label(one): {kind: [one.value(kind, name)] for kind in KINDS if one.value(kind, name) is not None}
        for one in trainings
    }
    return {label: kinds for label, kinds in found.items() if kinds}


def ratios(benches: Mapping[str, Sequence[Case]], of: Callable[[Case], float | None]) -> Data:
    """A ratio of each case of each benchmark, by pass."""
    found: Data = {}
    for case in (case for cases in benches.values() for case in cases):
        ratio = of(case)
        if ratio is not None:
            mode = case.what[4].split(",")[0]
            found.setdefault(case.what[0], {}).setdefault(mode, []).append(ratio)
    return found


def draw_scores(data: Data, title: str) -> Figure:
    """Each seed as a mark, over a box from quartile to quartile with a line at the median.

    Each row has its own axis, as scores of two data sets lie far apart.
    """
    figure = Figure(figsize=(9, 0.8 + 1.1 * len(data)), layout="constrained")
    figure.suptitle(title)
    for axes, (label, kinds) in zip(
        figure.subplots(len(data), squeeze=False)[:, 0], data.items(), strict=True
    ):
        axes.set(yticks=range(len(kinds)), yticklabels=[KINDS[kind] for kind in kinds])
        axes.set_title(label, fontsize="medium", loc="left")
        axes.invert_yaxis()
        for place, (kind, found) in enumerate(kinds.items()):
            colour, hatch, marker = _LOOKS[kind]
            if len(found) > 1:
                low, middle, high = statistics.quantiles(found, method="inclusive")
                box = {"facecolor": colour, "hatch": hatch, "alpha": 0.4, "edgecolor": "black"}
                axes.barh(place, high - low, left=low, height=0.7, **box)
                axes.plot([middle, middle], [place - 0.35, place + 0.35], color="black", linewidth=2)
            spread = [place + 0.06 * (7 * k % 11 - 5) for k in range(len(found))]  # equal scores stay apart
            axes.plot(found, spread, marker, color="black", markersize=2.5, linestyle="none")
    return figure


def draw_bars(data: Data, title: str, unit: str) -> Figure:
    """A bar for each number, labelled with it, on a logarithmic axis."""
    figure, axes = on_logarithmic_rows(data, title, unit)
    everything = [value for kinds in data.values() for (value,) in kinds.values()]
    axes.set_xlim(min(everything) / 2, max(everything) * 3)
    if max(everything) > 1e4 * min(everything):  # numbers between powers of ten would touch
        axes.xaxis.set_major_locator(LogLocator())
    for kind, (colour, hatch, _) in _LOOKS.items():
        rows = [(row, kinds[kind][0]) for row, kinds in enumerate(data.values()) if kind in kinds]
        places = [row + (0.2 if kind == "pyg" else -0.2) for row, _ in rows]
        bars = axes.barh(
            places, [value for _, value in rows], height=0.36, color=colour, hatch=hatch, edgecolor="black",
            label=KINDS[kind],
        )  # fmt: skip
        axes.bar_label(bars, labels=[numeral(value) for _, value in rows], padding=3)
    figure.legend(loc="outside lower center", ncols=len(KINDS))
    return figure


def draw_ratios(data: Data, title: str, unit: str) -> Figure:
    """A mark for each case, its shape by pass, on a logarithmic axis with a line at 1."""
    figure, axes = on_logarithmic_rows(data, title, unit)
    axes.axvline(1.0, color="black", linewidth=1)
    shown: set[str] = set()
    for row, of_modes in enumerate(data.values()):
        for k, (mode, ratios_of_mode) in enumerate(of_modes.items()):
            place = row + 0.25 * (k - (len(of_modes) - 1) / 2)
            label = None if mode in shown else mode
            shown.add(mode)
            axes.plot(
                ratios_of_mode, [place] * len(ratios_of_mode), _MODES.get(mode, "v"), label=label,
                markerfacecolor="none", markeredgecolor="black", markersize=5, linestyle="none",
            )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=len(shown))
    return figure


def on_logarithmic_rows(data: Data, title: str, unit: str, height: float = 0.55) -> tuple[Figure, Any]:
    """A figure with a labelled row for each of ``data``, the first on top, over a logarithmic axis."""
    figure = Figure(figsize=(9, 1.4 + height * len(data)), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=unit, xscale="log", yticks=range(len(data)), yticklabels=list(data))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(len(data) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", which="major", linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _label(training: Training) -> str:
    return f"{training.name}, {training.mode}"


def write(figure: Figure, data: Data, path: Path) -> None:
    """Writes a plot with its data as its description; the same bytes for the same data."""
    described = json.dumps(rounded(data))
    with matplotlib.rc_context({"svg.hashsalt": "graphfuse", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": described})
    lines = path.read_text().splitlines()  # matplotlib leaves blanks at the ends of lines
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def data_of(path: Path) -> Data:
    """What :func:`write` put into a file."""
    (described,) = ElementTree.parse(path).iter("{http://purl.org/dc/elements/1.1/}description")
    found: Data = json.loads(described.text or "")
    return found


def rounded(data: Data) -> Data:
    """With six significant digits."""
    return {
        row: {kind: [float(f"{value:.6g}") for value in found] for kind, found in kinds.items()}
        for row, kinds in data.items()
    }
