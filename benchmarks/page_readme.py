"""The figures of the README: a few of those on the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import page_kernels, page_training
from benchmarks.markdown import figure, table
from benchmarks.page_training import Training
from benchmarks.rows import PROJECTS, Case

_WIDTH, _MODE, _DTYPES = "64", "fwd+bwd", ("float16", "float32")
_CUSPARSE = "torch.sparse"

_ATTENTION = ("64", "4x32")  # one head, and four
_PASSES = ("fwd", "fwd+bwd")
_COMPILED = "pyg compiled"

_DATASET = "cora"

_SUM = f"""\
The sum over neighbours (`spmm`, {_WIDTH} features, forward and backward): time over the *gather floor*, a
kernel that only reads the rows and writes the result, measured in the same run; and PyG's message passing
and `torch.sparse` (cuSPARSE) over graphfuse. `reddit` and `products` are generated stand-ins of those sizes.
"""
_ATTENTIONS = """\
Attention over the neighbours (`sparse_attention`, float16), forward and with backward: milliseconds, time
over the gather floor, and over graphfuse that of PyG and of the fastest other project. Others were built
and timed once, on the same kind of GPU (`benchmarks/peers`), DF-GNN in float32. `oom`: out of memory.
"""
_STEPS = """\
A training step of two layers with the whole graph, graphfuse's as a CUDA graph: milliseconds, and over
graphfuse that of PyG, eager and under `torch.compile`.
"""
_TRAINING = """\
Training on Cora with either kind of layers. Accuracy in percent, mean and standard deviation over seeds;
median time of an epoch; its ratio:
"""
_BUILDING = """\
Building the row windows of both directions, once for each graph:
"""


def text(folder: Path, plots: Sequence[str]) -> str:
    """What the results in a folder say, as paragraphs and tables; what has no rows is left out.

    Args:
        folder: Of a GPU's results.
        plots: Paragraphs that show plots, for the end.
    """
    benches = page_kernels.load(folder)
    parts = [
        (_SUM, _sums(benches.get("spmm", ()))),
        (_ATTENTIONS, _attentions(benches.get("attention", ()))),
        (_STEPS, _steps(benches.get("epochs", ()))),
        (_TRAINING, _trainings(page_training.load(folder))),
        (_BUILDING, _builds(benches.get("row_windows", ()))),
    ]
    return "\n".join([*(f"{says}\n{body}\n" for says, body in parts if body), *plots])


def _sums(cases: Sequence[Case]) -> str:
    by_graph: dict[str, dict[str, Case]] = {}
    for case in cases:
        _, graph, width, dtype, mode = case.what
        if (width, mode) == (_WIDTH, _MODE) and dtype in _DTYPES:
            by_graph.setdefault(graph, {})[dtype] = case
    head = ["graph"]
    for dtype in _DTYPES:
        head += [f"{dtype}: over floor", "PyG / ours", "cuSPARSE / ours"]
    lines = []
    for graph, of_dtype in by_graph.items():
        ratios = [ratio for dtype in _DTYPES for ratio in _ratios(of_dtype.get(dtype))]
        lines.append((graph, *ratios, _commits(of_dtype.values())))
    return table((*head, "commit"), lines)


def _ratios(case: Case | None) -> tuple[str | None, ...]:
    if case is None:
        return None, None, None
    ours, cusparse = case.time_ms("graphfuse"), case.time_ms(_CUSPARSE)
    over_cusparse = cusparse / ours if ours and cusparse else None
    return figure(case.over_floor()), figure(case.speedup()), figure(over_cusparse)


def _attentions(cases: Sequence[Case]) -> str:
    found = {case.what[1:]: case for case in cases}
    edges = {case.what[1]: max(record.num_edges or 0 for record in case.of.values()) for case in cases}
    graphs = sorted(edges, key=edges.__getitem__)
    lines = []
    for graph, width in ((graph, width) for graph in graphs for width in _ATTENTION):
        passes = [found.get((graph, width, "float16", mode)) for mode in _PASSES]
        known = [case for case in passes if case is not None]
        if known:
            numbers = [number for case in passes for number in _attention(case)]
            lines.append((graph, width if "x" in width else f"1x{width}", *numbers, _commits(known)))
    head = [name for mode in ("ms", "with backward, ms") for name in (mode, "/ floor", "PyG /", "others /")]
    return table(("graph", "heads", *head, "commit"), lines)


def _attention(case: Case | None) -> tuple[str | None, ...]:
    if case is None:
        return (None,) * 4
    name, ratio = case.fastest_other() or ("", None)
    name = name.removesuffix(", recorded")
    shown = None if ratio is None else f"{figure(ratio)} ({PROJECTS.get(name, name)})"
    pyg = case.of.get("pyg")
    theirs = figure(case.speedup()) if pyg is None or pyg.status == "ok" else pyg.status
    return figure(case.time_ms("graphfuse")), figure(case.over_floor()), theirs, shown


def _steps(cases: Sequence[Case]) -> str:
    lines = []
    for case in cases:
        kind, graph, width, dtype, _ = case.what
        ours, compiled = case.time_ms("graphfuse"), case.time_ms(_COMPILED)
        ratio = compiled / ours if ours and compiled else None
        shown = (figure(ours), figure(case.speedup()), figure(ratio), _commits([case]))
        lines.append((kind.removeprefix("epochs "), graph, width, dtype, *shown))
    head = (
        "layers",
        "graph",
        "width",
        "dtype",
        "graphfuse, ms",
        "PyG / ours",
        "compiled PyG / ours",
        "commit",
    )
    return table(head, lines)


def _trainings(trainings: Sequence[Training]) -> str:
    head = (
        "configuration",
        "steps",
        "seeds",
        "graphfuse",
        "PyG",
        "graphfuse, ms",
        "PyG, ms",
        "ratio",
        "commit",
    )
    lines = []
    for one in trainings:
        if one.summary["dataset"] != _DATASET:
            continue
        ours, theirs = (one.value(kind, "epoch_ms") for kind in page_training.KINDS)
        scores = [page_training.score(one, kind) for kind in page_training.KINDS]
        ratio = ours / theirs if ours and theirs else None
        shown = (*scores, figure(ours), figure(theirs), figure(ratio), one.summary["commit"])
        lines.append((one.name, one.mode, str(len(one.summary["seeds"])), *shown))
    return table(head, lines)


def _builds(cases: Sequence[Case]) -> str:
    lines = []
    for case in cases:
        record = case.of["graphfuse"]
        edges = None if record.num_edges is None else f"{record.num_edges:,}"
        lines.append((case.what[1], edges, figure(record.p50_ms), record.commit))
    return table(("graph", "edges", "ms", "commit"), lines)


def _commits(cases: Iterable[Case]) -> str:
    return ", ".join(sorted({record.commit or "-" for case in cases for record in case.of.values()}))
