"""Runs over seeds, and the summary of them that the command line prints."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from graphfuse.env import versions
from graphfuse.train import datasets, loop
from graphfuse.train.config import TrainConfig


def run(config: TrainConfig, seeds: int, compare: bool, root: str | None, progress: bool) -> dict[str, Any]:
    """Trains ``seeds`` times, with both kinds of layers if ``compare``, and summarises.

    Returns:
        A JSON object: the fields of :class:`graphfuse.train.loop.Result` as means, with ``pyg`` and ``ratio``
        (graphfuse over PyG) beside them when comparing.
    """
    device = loop.pick_device(config.device)
    data = datasets.load(config.dataset, root, config.normalize_features).to(device)
    kinds = ["graphfuse", "pyg"] if compare else [config.layers]
    results = {kind: list(_runs(config, kind, data, seeds, progress)) for kind in kinds}
    summary = {kind: _summarise(found) for kind, found in results.items()}
    report = {
        "dataset": config.dataset,
        "model": config.model,
        "cuda_graph": config.cuda_graph,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "seeds": [config.seed + k for k in range(seeds)],
        **summary[kinds[0]],
        "versions": versions(),
    }
    if compare:
        ours, theirs = summary["graphfuse"], summary["pyg"]
        report["pyg"] = theirs
        compared = ["epoch_ms", "test_accuracy"]
        if device.type == "cuda":  # on a CPU the peak is that of the process, both runs together
            compared.append("peak_mib")
        report["ratio"] = {key: ours[key] / theirs[key] for key in compared}
    return report


def _runs(config: TrainConfig, kind: str, data: Any, seeds: int, progress: bool) -> Iterator[loop.Result]:
    for k in range(seeds):
        each = dataclasses.replace(config, layers=kind, seed=config.seed + k)  # type: ignore[arg-type]
        yield loop.train(each, data, progress)


def _summarise(results: list[loop.Result]) -> dict[str, Any]:
    accuracy = [result.test_accuracy for result in results]
    first = results[0]
    return {
        "layers": first.layers,
        "test_accuracy": statistics.mean(accuracy),
        "test_accuracy_std": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
        "epoch_ms": statistics.median(result.epoch_ms for result in results),
        "peak_mib": max(result.peak_mib for result in results),
        "path": first.path,
        "reasons": first.reasons,
    }


def table(report: dict[str, Any]) -> str:
    """The summary for people."""
    rows = [report, report["pyg"]] if "pyg" in report else [report]
    lines = [f"{'layers':<10} {'test accuracy':>15} {'epoch ms':>10} {'peak MiB':>10}  path"]
    for row in rows:
        spread = row["test_accuracy_std"]
        accuracy = f"{row['test_accuracy']:.2f}" + ("" if spread is None else f" +- {spread:.2f}")
        costs = f"{row['epoch_ms']:>10.4f} {row['peak_mib']:>10.1f}"
        lines.append(f"{row['layers']:<10} {accuracy:>15} {costs}  {row['path']}")
    if "ratio" in report:
        ratio = report["ratio"]
        memory = f"{ratio['peak_mib']:>10.3f}" if "peak_mib" in ratio else ""
        lines.append(f"{'ratio':<10} {'':>15} {ratio['epoch_ms']:>10.3f} {memory}".rstrip())
    lines += [f"not fused: {reason}" for reason in report["reasons"]]
    return "\n".join(lines)
