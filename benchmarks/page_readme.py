"""The figures of the README: a few of those on the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import page_kernels, page_training
from benchmarks.markdown import figure, table
from benchmarks.page_training import Training
from benchmarks.rows import Case

_WIDTH, _MODE, _DTYPES = "64", "fwd+bwd", ("float16", "float32")
_CUSPARSE = "torch.sparse"

_DATASET = "cora"

_SUM = f"""\
The sum over neighbours (`spmm`, {_WIDTH} features, forward and backward): time over the *gather floor*, a
kernel that only reads the rows and writes the result, measured in the same run; and PyG's message passing
and `torch.sparse` (cuSPARSE) over graphfuse. `reddit` and `products` are generated stand-ins of those sizes.
"""
_TRAINING = """\
Training on Cora with either kind of layers. Accuracy in percent, mean and standard deviation over seeds;
median time of an epoch; its ratio:
"""
_BUILDING = """\
Building the row windows of both directions, once for each graph:
"""


def text(folder: Path) -> str:
    """What the results in a folder say, as paragraphs and tables; what has no rows is left out."""
    benches = page_kernels.load(folder)
    parts = [
        (_SUM, _sums(benches.get("spmm", ()))),
        (_TRAINING, _trainings(page_training.load(folder))),
        (_BUILDING, _builds(benches.get("row_windows", ()))),
    ]
    return "\n".join(f"{says}\n{body}\n" for says, body in parts if body)


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
