"""Runs over seeds, the lines that they leave in a file, and the summary that the command line prints."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import statistics
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

import graphfuse
from graphfuse.env import versions
from graphfuse.train import datasets, loop
from graphfuse.train.checkpoint import Checkpoints
from graphfuse.train.config import TrainConfig
from graphfuse.train.loop import Log, Result

Outcome = Result | str  # or why there is none
_SCORES = ("test_accuracy", "val_accuracy")  # NaN, of a run that diverged, and null in a file


def run(
    config: TrainConfig,
    seeds: int,
    compare: bool,
    root: str | None,
    progress: bool,
    results: Path | None = None,
    checkpoints: Checkpoints | None = None,
    log: Log | None = None,
    go_on: bool = False,
) -> tuple[dict[str, Any], dict[str, list[Result]]]:
    """Trains ``seeds`` times, with both kinds of layers in turn if ``compare``, and summarises.

    A run that is out of GPU memory is an outcome: its kind of layers is not tried again.

    Args:
        config: The first run.
        seeds: How often, with seeds counted up.
        compare: Whether PyG's layers train too.
        root: Folder of data sets.
        progress: Whether to draw progress bars.
        results: JSON lines are added here: one for each run when it ends, and the summary.
        checkpoints: Of the only run.
        log: See :func:`graphfuse.train.loop.train`.
        go_on: Whether runs that ``results`` has, of the same settings, device and versions, count as trained.

    Returns:
        A JSON object: the fields of :class:`graphfuse.train.loop.Result` over the seeds, with ``pyg``,
        ``ratio`` (graphfuse over PyG) and ``p_value`` beside them when comparing; and the results of each
        kind.
    """
    device = loop.pick_device(config.device)
    dataset = datasets.load(config.dataset, root)
    kinds = ["graphfuse", "pyg"] if compare else [config.layers]
    found: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    kept = _kept(results, facts) if go_on and results is not None else []
    commits: list[str | None] = []
    for k in range(seeds):
        for kind in kinds:
            if any(isinstance(outcome, str) for outcome in found[kind]):
                continue
            each = dataclasses.replace(config, layers=kind, seed=config.seed + k)  # type: ignore[arg-type]
            line = next((line for line in kept if line["config"] == dataclasses.asdict(each)), None)
            if line is not None:
                found[kind].append(_outcome(line))
                commits.append(line["commit"])
                continue
            # nothing of the other kind, row windows above all, may count as this one's memory
            graphfuse.clear_cache()
            outcome = _attempt(each, dataset, progress, checkpoints, log)
            found[kind].append(outcome)
            _add_line(results, {"record": "run", **_line(each, outcome), **facts})
    summary = {kind: _summarise(kind, outcomes) for kind, outcomes in found.items()}
    report = {
        "record": "summary",
        "dataset": config.dataset,
        "model": config.model,
        "cuda_graph": config.cuda_graph,
        "config": dataclasses.asdict(config),
        "seeds": [config.seed + k for k in range(seeds)],
        **summary[kinds[0]],
        **facts,
    }
    if commits:
        report |= {"kept": len(commits), "commits": sorted({str(one) for one in (*commits, facts["commit"])})}
    if compare:
        report |= _comparison(summary, found, device.type == "cuda")
    _add_line(results, report)
    return report, {kind: _results(outcomes) for kind, outcomes in found.items()}


def table(report: dict[str, Any]) -> str:
    """The summary for people."""
    rows = [report, report["pyg"]] if "pyg" in report else [report]
    what = {"mae": "test error", "rocauc": "test ROC-AUC"}.get(report.get("metric", ""), "test accuracy")
    head = f"{what:>17} {'epoch ms':>10} {'training s':>10} {'to target s':>11} {'peak MiB':>10}"
    lines = [f"{'layers':<10} {head}  path"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['layers']:<10} {row['error']}")
            continue
        costs = f"{row['epoch_ms']:>10.4f} {row['train_s']:>10.3f} {_time_to_target(row):>11}"
        lines.append(
            f"{row['layers']:<10} {_spread(row):>17} {costs} {row['peak_mib']:>10.1f}  {row['path']}"
        )
    if "ratio" in report:
        ratio = report["ratio"]
        memory = f"{ratio['peak_mib']:>10.3f}" if "peak_mib" in ratio else ""
        costs = f"{ratio['epoch_ms']:>10.3f} {ratio['train_s']:>10.3f} {'':>11}"
        lines.append(f"{'ratio':<10} {'':>17} {costs} {memory}".rstrip())
    for row in rows:
        if "setup_ms" in row:
            costs = ", ".join(f"{name} {value:.1f}" for name, value in row["setup_ms"].items())
            lines.append(f"set-up of the first run, {row['layers']}, ms: {costs}")
        for name, value in row.get("setup_mib", {}).items():
            lines.append(f"most memory during {name}, {row['layers']}, MiB: {value:.1f}")
    if "test" in report:
        lines.append(f"same accuracy? {report['test']}")
    return "\n".join([*lines, *(f"not fused: {reason}" for reason in report.get("reasons", ()))])


def to_json(report: dict[str, Any]) -> str:
    """A line of JSON, which has no NaN and no infinity: they are null."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [known(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(report), allow_nan=False)


def _kept(results: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of runs on this device and with these versions; none that is cut off or of another origin."""
    wanted = {"record": "run", "device": facts["device"], "versions": facts["versions"]}
    found = []
    for text in results.read_text().splitlines() if results.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and wanted.items() <= line.items():
                found.append(line)
    return found


def _outcome(line: dict[str, Any]) -> Outcome:
    """What left this line, but for the curve, which no line has."""
    if "error" in line:
        return str(line["error"])
    names = [field.name for field in dataclasses.fields(Result) if field.name != "curve"]
    # lines of before 2026-11-23 have no setup_mib
    values = {name: line[name] for name in names if name in line or name != "setup_mib"}
    unknown = {name: math.nan for name in _SCORES if values[name] is None}
    return Result(**values | unknown, curve=[])


def _attempt(
    config: TrainConfig, dataset: Any, progress: bool, checkpoints: Checkpoints | None, log: Log | None
) -> Outcome:
    try:
        return loop.train(config, dataset, progress, checkpoints, log)
    except torch.OutOfMemoryError:
        pass  # the frames of the error hold what the run allocated
    torch.cuda.empty_cache()
    return "out of memory"


def _results(outcomes: list[Outcome]) -> list[Result]:
    return [outcome for outcome in outcomes if isinstance(outcome, Result)]


def _line(config: TrainConfig, outcome: Outcome) -> dict[str, Any]:
    given = {"dataset": config.dataset, "model": config.model, "config": dataclasses.asdict(config)}
    if isinstance(outcome, str):
        return {**given, "layers": config.layers, "seed": config.seed, "error": outcome}
    values = dataclasses.asdict(outcome)
    del values["curve"]
    return {**given, **values}


def _summarise(kind: str, outcomes: list[Outcome]) -> dict[str, Any]:
    results = _results(outcomes)
    if len(results) < len(outcomes):
        return {"layers": kind, "error": next(outcome for outcome in outcomes if isinstance(outcome, str))}
    accuracy = [result.test_accuracy for result in results]
    first = results[0]
    reached = [result.time_to_accuracy_s for result in results if result.time_to_accuracy_s is not None]
    return {
        "layers": kind,
        "metric": first.metric,
        "test_accuracy": statistics.mean(accuracy),
        "test_accuracy_std": _deviation(accuracy),
        "epoch_ms": statistics.median(result.epoch_ms for result in results),
        "eval_ms": statistics.median(result.eval_ms for result in results),
        "train_s": statistics.median(result.train_s for result in results),
        "time_to_accuracy_s": statistics.median(reached) if reached else None,
        "reached": len(reached),
        "setup_ms": first.setup_ms,
        "setup_mib": first.setup_mib,
        "peak_mib": max(result.peak_mib for result in results),
        "path": first.path,
        "reasons": first.reasons,
    }


def _deviation(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    # `statistics` fails on NaN, the score of a run that diverged
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _comparison(
    summary: dict[str, dict[str, Any]], found: dict[str, list[Outcome]], on_gpu: bool
) -> dict[str, Any]:
    ours, theirs = summary["graphfuse"], summary["pyg"]
    if "error" in ours or "error" in theirs:
        return {"pyg": theirs, "p_value": None, "test": "not known: one of them has no accuracy"}
    compared = ["epoch_ms", "train_s", "test_accuracy"]
    if on_gpu:  # on a CPU the peak is that of the process, both runs together
        compared.append("peak_mib")
    ratio = {key: ours[key] / theirs[key] if theirs[key] else None for key in compared}
    p_value, says = _welch(*([one.test_accuracy for one in _results(found[kind])] for kind in found))
    return {"pyg": theirs, "ratio": ratio, "p_value": p_value, "test": says}


def _welch(ours: list[float], theirs: list[float]) -> tuple[float | None, str]:
    """Two-sided p-value of equal means, variances apart, and the sentence about it."""
    if len(ours) < 2:
        return None, "a test needs two seeds or more: --seeds 20"
    if not all(map(math.isfinite, (*ours, *theirs))):
        return None, "not known: a run diverged"
    try:
        from scipy import stats
    except ModuleNotFoundError:
        return None, "a test needs scipy, which is not installed; run: pip install graphfuse[train]"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of equal numbers
        p_value = float(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)
    if math.isnan(p_value):
        return None, "a test needs runs that differ"
    return p_value, f"p = {p_value:.3g} (Welch's t-test, two-sided, {len(ours)} seeds each)"


def _spread(row: dict[str, Any]) -> str:
    spread = row["test_accuracy_std"]
    digits = 4 if row["metric"] == "mae" else 2
    return f"{row['test_accuracy']:.{digits}f}" + ("" if spread is None else f" +- {spread:.{digits}f}")


def _time_to_target(row: dict[str, Any]) -> str:
    return "-" if row["time_to_accuracy_s"] is None else f"{row['time_to_accuracy_s']:.3f}"


def _add_line(path: Path | None, record: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if file.tell() > 0:  # a process that was killed may have left half a line
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(to_json(record).encode() + b"\n")


def _commit() -> str | None:
    """``GRAPHFUSE_COMMIT``, or what git says of the sources that run; ``+`` marks local changes."""
    named = os.environ.get("GRAPHFUSE_COMMIT")
    if named:
        return named
    package = Path(__file__).parents[1]
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        tracked = ["git", "ls-files", "--error-unmatch", "__init__.py"]  # else it is somebody else's commit
        subprocess.run(tracked, cwd=package, capture_output=True, check=True)
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None
