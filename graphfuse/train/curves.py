"""Learning curves and memory of runs, drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from graphfuse.train.history import COLUMNS
from graphfuse.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"graphfuse": "#0072B2", "pyg": "#D55E00"}  # of Okabe and Ito: told apart whatever the vision
_LINES = {"graphfuse": "-", "pyg": "--"}  # the curves may coincide
_UNITS = {"accuracy": "accuracy, %", "rocauc": "ROC-AUC, %", "mae": "mean absolute error"}


def draw(results: dict[str, list[Result]], title: str) -> Figure:
    """A figure of three panels: training loss, validation score, and peak memory of each kind of layers.

    Lines are means over the runs that reached the epoch, bands reach from the least to the greatest.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no run ended.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot: it would look for a screen

    results = {kind: runs for kind, runs in results.items() if runs}
    if not results:
        raise ValueError("a plot needs a run that ended (got none)")
    figure = Figure(figsize=(13.5, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    figure.suptitle(title)
    for kind, runs in results.items():
        _band(left, runs, "loss", kind)
        _band(middle, runs, "val", kind)
    metric = next(iter(results.values()))[0].metric
    left.set(xlabel="epoch", ylabel="loss", title="training")
    middle.set(xlabel="epoch", ylabel=_UNITS[metric], title="validation")
    middle.legend()
    peaks = [max(run.peak_mib for run in runs) for runs in results.values()]
    bars = right.bar(list(results), peaks, color=[_COLOURS[kind] for kind in results])
    right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="MiB", title="most memory in use")
    return figure


def require_matplotlib() -> None:
    """Raises ``ModuleNotFoundError``, with the remedy, if it is not installed: to know before a long run."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed; run: pip install graphfuse[bench]"
        ) from error


def _band(axes: Any, runs: list[Result], column: str, kind: str) -> None:
    k, longest = COLUMNS.index(column), max(len(run.curve) for run in runs)
    values = torch.full((len(runs), longest), math.nan, dtype=torch.float64)
    for run, row in zip(runs, values, strict=True):
        row[: len(run.curve)] = torch.tensor(run.curve, dtype=torch.float64)[:, k]
    epochs = (~values.isnan()).any(0).nonzero().view(-1)  # with a score in one of them
    values = values[:, epochs]
    low, high = values.nan_to_num(math.inf).amin(0), values.nan_to_num(-math.inf).amax(0)
    axes.fill_between((epochs + 1).numpy(), low.numpy(), high.numpy(), color=_COLOURS[kind], alpha=0.2)
    axes.plot(
        (epochs + 1).numpy(),
        values.nanmean(0).numpy(),
        color=_COLOURS[kind],
        linestyle=_LINES[kind],
        label=kind,
    )
