"""Benchmark results as tables: a line for each benchmark, all cases, and what went wrong."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import rows
from benchmarks.markdown import figure, table
from benchmarks.rows import Case

# in the order of the page; benchmarks/README.md says what a call of each is
SAYS = {
    "spmm": "A sum over neighbours.",
    "spmm_weighted": "A sum over neighbours with a weight for each edge.",
    "spmm_normalized": "A sum over neighbours with a factor for each end of an edge, as in GCNConv.",
    "spmm_gemm": "A sum over neighbours, followed by a dense layer.",
    "attention": "Sparse attention on given q, k and v.",
    "additive": "The attention of GAT, GATv2 and AGNN on given rows.",
    "ablation": "Times with one decision undone, or with rows in another order, over that as shipped.",
    "ablation_projection": "TransformerConv with four products in place of a stacked one, over the shipped.",
    "blocksparse": "Products with a matrix that is dense in some blocks. "
    "The floor is a dense product of cuBLAS with as many operations.",
    "captured_steps": "A training step of two layers of each kind, eager and as a CUDA graph.",
    "cora_step": "A training step of the two-layer GCN, eager and as a CUDA graph.",
    "attention_steps": "A training step of two layers of attention on a graph of Reddit's size.",
    "gcn_step": "A training step of two layers of GCNConv on a graph of Reddit's size.",
    "epochs": "A training step of two layers of each kind, full batch: an epoch.",
    "graph_transformer": "Inference of ten layers of GraphTransformerLayer.",
    "molecules": "Forward and backward of TransformerConv over a batch of small graphs.",
    "transformer_step": "A training step of TransformerConv on a graph of Reddit's size.",
    "blocks": "A mini-batch: cutting it into windows, and a step that begins with that.",
    "host_time": "The host's time for a layer's forward. The others are the same launches, written by hand.",
    "row_windows": "Building both directions of the windows, once for each graph.",
    "transformer_build": "The build that `transformer_step` takes as given.",
    "reorder": "Building row windows of rows that share columns; the other has rows as numbered.",
    "reordered": "Sums and attention on windows of rows that share columns; the other has rows as numbered.",
}
ABLATIONS = ("ablation", "ablation_projection")
OTHER_FLOORS = ("blocksparse",)  # the floor is no gather
_MESSAGE = 75  # characters


def load(folder: Path) -> dict[str, list[Case]]:
    """Benchmark -> its cases, of those that a folder has a file of."""
    found = {name: rows.newest(rows.records(folder / f"{name}.jsonl")) for name in SAYS}
    return {name: cases for name, cases in found.items() if cases}


def summary(benches: Mapping[str, Sequence[Case]]) -> str:
    """A row for each benchmark: least, median and greatest ratio over its cases."""
    lines = []
    for name, cases in benches.items():
        failed = sum(record.status != "ok" for case in cases for record in case.of.values())
        others = [other[1] for other in map(Case.fastest_other, cases) if other is not None]
        lines.append(
            (
                f"`{name}`", str(len(cases)), _range([case.over_floor() for case in cases]),
                _range([case.speedup() for case in cases]), _range(others), str(failed),
            )
        )  # fmt: skip
    head = ("benchmark", "cases", "graphfuse / floor", "PyG / graphfuse", "fastest other / graphfuse")
    return table((*head, "no result"), lines)


def _range(values: Sequence[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return f"{figure(min(known))}, {figure(statistics.median(known))}, {figure(max(known))}"


def cases(found: Sequence[Case]) -> str:
    """A row for each case."""
    head = ("kind", "graph", "width", "dtype", "mode", "graphfuse, ms", "/ floor", "PyG, ms", "PyG /")
    lines = []
    for case in found:
        other = case.fastest_other()
        last = max(case.of.values(), key=lambda record: record.date or "")
        lines.append(
            (
                *case.what, _time(case, "graphfuse"), figure(case.over_floor()), _time(case, "pyg"),
                figure(case.speedup()), None if other is None else f"{figure(other[1])} ({other[0]})",
                last.commit, (last.date or "")[:10],
            )
        )  # fmt: skip
    return table((*head, "fastest other /", "commit", "date"), lines)


def decisions(found: Sequence[Case]) -> str:
    """A row for each case of an ablation: times without a decision over that with all of them."""
    variants = list(dict.fromkeys(name for case in found for name in case.of if name != "graphfuse"))
    lines = []
    for case in found:
        ours = case.of["graphfuse"].p50_ms if "graphfuse" in case.of else None
        times = [case.of[name].p50_ms if name in case.of else None for name in variants]
        ratios = [figure(time / ours) if time and ours else None for time in times]
        lines.append((*case.what, figure(ours), *ratios))
    return table(("kind", "graph", "width", "dtype", "mode", "graphfuse, ms", *variants), lines)


def _time(case: Case, provider: str) -> str | None:
    if provider not in case.of:
        return None
    record = case.of[provider]
    return figure(record.p50_ms) if record.status == "ok" else record.status


def failures(benches: Mapping[str, Sequence[Case]]) -> str:
    """A row for each provider that has no result of a case."""
    lines = []
    for case in (case for found in benches.values() for case in found):
        for provider, record in case.of.items():
            if record.status != "ok":
                date = (record.date or "")[:10]
                says = _code(record.message or record.status)
                lines.append((*case.what, provider, record.status, record.commit, date, says))
    head = ("benchmark", "graph", "width", "dtype", "mode", "provider", "status", "commit", "date", "message")
    return table(head, lines)


def _code(message: str) -> str:
    short = message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]}..."
    return "`" + short.replace("`", "'") + "`"
