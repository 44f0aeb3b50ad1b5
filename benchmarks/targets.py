"""The times that kernels and steps are meant to reach, and whether the newest records say that they do.

    python -m benchmarks.targets  # of an H200, or of the folder of results that is named

Targets were set on one NVIDIA H200. Those in floors take the newest row of a case in the benchmark's own file
or in ``floors.jsonl``; those over other providers the newest run of that file. Of two targets
there are no rows: orders of products (``gemm_orders.md``), and that no order chosen by itself is slower.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from benchmarks import page_training, peers, rows
from benchmarks.bench import Record
from benchmarks.markdown import figure, table
from benchmarks.rows import Case

_RESULTS = Path(__file__).parent / "results"
_HALF, _BOTH = ("float16", "bfloat16"), ("fwd", "fwd+bwd")
_MANY = 500_000  # edges of a large graph
_ALONE, _GROUPED = ("64", "128"), ("4x32", "8x16")
_RENUMBERED = ("ego-twitter", "computers", "cs", "blogcatalog3", "reddit")
_AXES = ("kind", "graph", "width", "dtype", "mode")
_MEMORY_MIB = 6e9 / 2**20
_SHOWN = 12  # cases that miss a target, the furthest first
_DENSE, _SPARSE = "dropout 0.5", "sparse features, dropout 0.5"

Number = Callable[[Case], float | None]
Only = dict[str, tuple[str, ...]]  # place in Case.what -> values


@dataclass(frozen=True)
class Target:
    """What one number of some cases of a benchmark is to be.

    Args:
        says: Of what, as the table has it.
        bench: Whose records; ``train``: of ``graphfuse train``.
        number: Of a case, ``None`` where it has none.
        limit: What the number is at most, or with ``at_least`` at least.
        only: ``kind``, ``graph``, ``width``, ``dtype`` or ``mode`` -> values of the cases that are meant.
        edges: The least and the first greater number of edges.
        pick: ``each`` case is to reach it, the ``best`` of them, or their geometric ``mean``.
        least: Of a case, what the number is without what is computed, ``None`` where that was not measured.
            Where this misses the limit, other tasks or slices are wanted rather than a faster kernel.
    """

    says: str
    bench: str
    number: Number
    limit: float
    only: Only
    _: KW_ONLY
    at_least: bool = False
    edges: tuple[float, float] = (0, float("inf"))
    pick: str = "each"
    least: Number | None = None


@dataclass(frozen=True)
class Found:
    """What records say of a target: its numbers, and the case of each."""

    target: Target
    numbers: Sequence[tuple[float, Case]]

    @property
    def value(self) -> float | None:
        """The number that decides."""
        values = [value for value, _ in self.numbers]
        if not values:
            return None
        if self.target.pick == "mean":
            return statistics.geometric_mean(values)
        worst = min if self.target.at_least == (self.target.pick == "each") else max
        return worst(values)

    @property
    def missed(self) -> list[tuple[float, Case]]:
        """The cases that are not there yet, the furthest first; none if the target is reached."""
        if self.value is None or self.reached(self.value):
            return []
        far = [(value, case) for value, case in self.numbers if not self.reached(value)]
        return sorted(far, key=lambda one: one[0], reverse=not self.target.at_least)

    @property
    def missed_by_moves(self) -> list[tuple[float, Case]]:
        """Of the cases that miss it those that would without what is computed: that number, and the case."""
        if self.target.least is None:
            return []
        found = [(self.target.least(case), case) for _, case in self.missed]
        return [(least, case) for least, case in found if least is not None and not self.reached(least)]

    def name(self, case: Case) -> str:
        """What tells a case from the others."""
        differ = [len({other.what[at] for _, other in self.numbers}) > 1 for at in range(len(_AXES))]
        return " ".join(itertools.compress(case.what, differ))

    def reached(self, value: float) -> bool:
        """Whether a number is what the target asks for."""
        limit = self.target.limit
        return value >= limit if self.target.at_least else value <= limit


def over_peer(*names: str) -> Number:
    """The recorded time of the fastest of other projects, those named or all but PyG, over graphfuse's."""

    def number(case: Case) -> float | None:
        ours, record = case.time_ms("graphfuse"), case.of["graphfuse"]
        recorded = record.extra.get("peers", {}) if names else rows.recorded_peers(record)
        times = [ms for name, ms in recorded.items() if not names or name in names]
        return min(times) / ours if ours and times else None

    return number


def over(provider: str) -> Number:
    """The time of a provider in the same run over graphfuse's."""

    def number(case: Case) -> float | None:
        ours, theirs = case.time_ms("graphfuse"), case.time_ms(provider)
        return theirs / ours if ours and theirs else None

    return number


def milliseconds(case: Case) -> float | None:
    """Graphfuse's time."""
    return case.time_ms("graphfuse")


def over_flashsparse(precision: str) -> Number:
    """FlashSparse's recorded time of a sum over neighbours over graphfuse's."""

    def number(case: Case) -> float | None:
        ours = case.of["graphfuse"]
        times = peers.times(ours.gpu, ours.graph or "", 1, ours.head_dim or 0, "spmm")
        theirs = times.get(f"flashsparse_{precision}")
        return theirs / ours.p50_ms if theirs and ours.p50_ms else None

    return number


def memory_mib(case: Case) -> float | None:
    """All that is allocated during a step, the graph included."""
    ours = case.of["graphfuse"]
    found: float | None = ours.extra.get("total_peak_mib", ours.peak_mib)
    return found


def moves_over_floor(case: Case) -> float | None:
    """Time of reading and writing what graphfuse does over the floor, see :mod:`benchmarks.moves`."""
    ours = case.of["graphfuse"]
    moves = ours.extra.get("moves_ms")
    return moves / ours.floor_ms if moves and ours.floor_ms else None


def fewer_entries(case: Case) -> float | None:
    """Column entries of rows as numbered over those of rows that share columns."""
    extra = case.of["graphfuse"].extra
    return extra["entries_before"] / extra["entries_after"] if "entries_after" in extra else None


def targets() -> Iterator[Target]:
    """All that there are rows of."""
    yield from _attention()
    yield from _sums()
    yield from _steps()


def _attention() -> Iterator[Target]:
    floors = Case.over_floor
    fwd: Only = {"dtype": ("float16",), "mode": ("fwd",)}
    both: Only = fwd | {"mode": ("fwd+bwd",)}
    alone: Only = {"width": _ALONE}
    head = "attention, one head"
    large, small = (_MANY, float("inf")), (0, _MANY)
    yield Target(
        f"{head}, 500,000 edges and more, floors", "attention", floors, 1.2, fwd | alone, edges=large
    )
    yield Target(f"{head}, fewer edges, floors", "attention", floors, 1.35, fwd | alone, edges=small)
    yield Target(f"{head}, with backward, floors", "attention", floors, 1.3, both | alone)
    for peer, says, least in (
        ("fused3s", "Fused3S", (4.1, 2.75)),
        ("turbo_gnn", "turbo-gnn", (5.3, 3.8)),
        ("pyg", "PyG", (38, 28)),
    ):
        for width, limit in zip(_ALONE, least, strict=True):
            only = fwd | {"width": (width,)}
            yield Target(f"{head} of {width}, {says} over it", "attention", over_peer(peer), limit, only,
                         at_least=True, pick="mean")  # fmt: skip
    for width, limit in zip(_ALONE, (6, 5), strict=True):
        yield Target(f"{head} of {width}, with backward, the fastest other over it", "attention", over_peer(),
                     limit, both | {"width": (width,)}, at_least=True, pick="mean")  # fmt: skip
    several: Only = {"width": _GROUPED}
    gat: Only = {"kind": ("additive gat",), "width": (*_ALONE, *_GROUPED)}
    yield Target("attention, 4 x 32 and 8 x 16, floors", "attention", floors, 1.3, fwd | several)
    yield Target("the same, with backward", "attention", floors, 1.45, both | several)
    moved = moves_over_floor
    yield Target("GAT, floors", "additive", floors, 1.35, fwd | gat, least=moved)
    yield Target("GAT, with backward, floors", "additive", floors, 1.5, both | gat, least=moved)


def _sums() -> Iterator[Target]:
    cusparse, floors = over("torch.sparse"), Case.over_floor
    half: Only = {"dtype": _HALF, "mode": _BOTH}
    full: Only = half | {"dtype": ("float32",)}
    yield Target("spmm, half precision, floors", "spmm", floors, 1.15, half | {"width": _ALONE},
                 least=moves_over_floor)  # fmt: skip
    for width, limit in zip(_ALONE, (2.5, 1.65), strict=True):
        yield Target(f"spmm of {width}, half precision, cuSPARSE over it", "spmm", cusparse, limit,
                     half | {"width": (width,)}, at_least=True)  # fmt: skip
    yield Target("spmm, float32, floors", "spmm", floors, 1.25, full | {"width": _ALONE},
                 least=moves_over_floor)  # fmt: skip
    yield Target(
        "spmm of 64, float32, cuSPARSE over it",
        "spmm",
        cusparse,
        1.4,
        full | {"width": ("64",)},
        at_least=True,
    )
    for dtype, precision in (("float16", "fp16"), ("float32", "tf32")):
        yield Target(f"spmm, {dtype}, FlashSparse in {precision} over it", "spmm",
                     over_flashsparse(precision), 1.0, {"dtype": (dtype,), "mode": ("fwd",)},
                     at_least=True)  # fmt: skip
    for graph, width, limit in (
        ("cora", "1433->16", 0.025), ("pubmed", "64->64", 0.016), ("github", "64->64", 0.05),
        ("ego-twitter", "128->128", 0.13),
    ):  # fmt: skip
        only: Only = {"graph": (graph,), "width": (width,), "dtype": ("float16",)}
        yield Target(f"relu(A X W + b) on {graph}, {width}, ms", "spmm_gemm", milliseconds, limit, only)
    shuffled: Only = {"graph": _RENUMBERED, "mode": ("build, shuffled ids",)}
    yield Target("reordering, column entries before over after", "reorder", fewer_entries, 1.5, shuffled,
                 at_least=True, pick="mean")  # fmt: skip


def _steps() -> Iterator[Target]:
    for kind, captured, eager in (
        ("gcn", 0.11, 1 / 0.8), ("gat", 0.16, 2), ("agnn", 0.16, 2), ("transformer", 0.20, 2),
    ):  # fmt: skip
        only: Only = {"kind": (f"captured_steps {kind}",), "graph": ("cora",), "dtype": ("float32",)}
        modes = tuple(f"step, captured, {features}" for features in (_DENSE, _SPARSE))
        yield Target(f"step of {kind} on Cora, captured, dense or sparse features, ms", "captured_steps",
                     milliseconds, captured, only | {"mode": modes}, pick="best")  # fmt: skip
        for says, features in (("dense", _DENSE), ("sparse", _SPARSE)):
            yield Target(f"the same, eager, {says} features, PyG over it", "captured_steps", Case.speedup,
                         eager, only | {"mode": (f"step, {features}",)}, at_least=True)  # fmt: skip
    for kind, limit in (("gcn", 0.9), ("gat", 1.5), ("agnn", 1.6), ("transformer", 1.8)):
        only = {"kind": (f"epochs {kind}",), "graph": ("ego-twitter",)}
        yield Target(f"epoch of {kind} on ego-twitter, bfloat16, ms", "epochs", milliseconds, limit,
                     only | {"dtype": ("bfloat16",)})  # fmt: skip
        yield Target("the same, float32, compiled PyG over it", "epochs", over("pyg compiled"), 1.6,
                     only | {"dtype": ("float32",)}, at_least=True)  # fmt: skip
    for kind, dtype, limit in (
        ("gcn", "bf16", 9), ("gcn", "fp32", 18), ("gat", "bf16", 25), ("agnn", "bf16", 25),
        ("transformer", "bf16", 40),
    ):  # fmt: skip
        # GAT and AGNN as their own benchmark has them, the others as they are trained
        trained = kind in ("gcn", "transformer")
        says = f"epoch of {kind} on the stand-in of Reddit, {dtype}"
        if trained:
            only = {"kind": (kind,), "graph": ("reddit-standin",), "dtype": (dtype,)}
        else:
            only = {"kind": (f"attention_steps {kind}",), "dtype": ("bfloat16",)}
        bench = "train" if trained else "attention_steps"
        yield Target(f"{says}, ms", bench, milliseconds, limit, only)
        yield Target("the same, MiB", bench, memory_mib, _MEMORY_MIB, only)
    for says, kinds, limit in (
        ("cut in the call", ("built", "refilled"), 1.5), ("given", ("given", "captured"), 5),
    ):  # fmt: skip
        for dtype in ("float32", "bfloat16"):
            only = {"kind": tuple(f"molecules windows {kind}" for kind in kinds), "dtype": (dtype,)}
            yield Target(f"TransformerConv on 1,024 molecules, windows {says}, {dtype}, PyG over it",
                         "molecules", Case.speedup, limit, only, at_least=True, pick="best")  # fmt: skip
    for provider, says, limit in (("pyg", "PyG", 5), ("pyg compiled", "compiled PyG", 2)):
        yield Target(f"ten Graph Transformer layers, {says} over them", "graph_transformer", over(provider),
                     limit, {"dtype": ("float16",)}, at_least=True)  # fmt: skip


def of_folder(folder: Path) -> list[Found]:
    """All targets, with what the records of a GPU's folder say."""
    floors = rows.records(folder / "floors.jsonl")
    known: dict[tuple[str, bool], list[Case]] = {("train", False): list(_trained(folder))}
    found = []
    for target in targets():
        key = target.bench, target.number is Case.over_floor
        if key not in known:
            own = rows.records(folder / f"{target.bench}.jsonl")
            more = [record for record in floors if record.op == target.bench] if key[1] else []
            ours = [record for record in (*own, *more) if not key[1] or record.provider == "graphfuse"]
            known[key] = rows.newest(ours)
        numbers = [(target.number(case), case) for case in known[key] if _fits(target, case)]
        found.append(Found(target, [(value, case) for value, case in numbers if value is not None]))
    return found


def _trained(folder: Path) -> Iterator[Case]:
    for training in page_training.load(folder):
        ms, summary = training.value("graphfuse", "epoch_ms"), training.summary
        if ms is not None:
            model, dtype = (str(training.setting(name)) for name in ("model", "dtype"))
            what = (model, summary["dataset"], "-", dtype, training.mode)
            facts = {name: summary[name] for name in ("commit", "date")}
            needs = training.value("graphfuse", "peak_mib")
            yield Case(what, {"graphfuse": Record("train", "graphfuse", p50_ms=ms, peak_mib=needs, **facts)})


def _fits(target: Target, case: Case) -> bool:
    described = dict(zip(_AXES, case.what, strict=True))
    known = case.of.get("graphfuse")
    low, high = target.edges
    within = known is not None and (low <= (known.num_edges or 0) < high)
    return within and all(described[axis] in values for axis, values in target.only.items())


def as_table(found: Sequence[Found]) -> str:
    """A row for each target that has records."""
    lines = []
    for one in found:
        if one.value is None:
            continue
        target = one.target
        limit = f"{'at least' if target.at_least else 'at most'} {figure(target.limit)}"
        verdict = "reached" if one.reached(one.value) else "missed"
        # a mean is missed by all of its cases together
        shown = [[] if target.pick == "mean" else one.missed, one.missed_by_moves]
        decided = {"each": "", "best": "the best: ", "mean": "mean: "}[target.pick] + str(figure(one.value))
        since = min(record.date or "" for _, case in one.numbers for record in case.of.values())[:10]
        cases = [_listed(one, found) for found in shown]
        lines.append((target.says, limit, str(len(one.numbers)), decided, verdict, *cases, since))
    head = (
        "target",
        "limit",
        "cases",
        "is",
        "",
        "which miss it",
        "moves alone miss it for",
        "measured since",
    )
    return table(head, lines)


def _listed(one: Found, cases: Sequence[tuple[float, Case]]) -> str:
    texts = [f"{one.name(case)} {figure(value)}".lstrip() for value, case in cases[:_SHOWN]]
    texts += [f"and {len(cases) - _SHOWN} more"] if len(cases) > _SHOWN else []
    return ", ".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a target is missed, 2 if the folder has no records of any."""
    parser = argparse.ArgumentParser("python -m benchmarks.targets", description=__doc__, allow_abbrev=False)
    parser.add_argument("gpu", nargs="?", default="nvidia-h200", help="a folder of benchmarks/results")
    found = [one for one in of_folder(_RESULTS / parser.parse_args(arguments).gpu) if one.numbers]
    if not found:
        print("no records of a target there", file=sys.stderr)
        return 2
    print(as_table(found))
    missed = [one for one in found if one.missed]
    print(f"\n{len(found) - len(missed)} of {len(found)} targets are reached")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
