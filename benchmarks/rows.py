"""Records read back from files, and what tells one case of a benchmark from another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Record

# as people write the names of providers
PROJECTS = {
    "anemoi": "anemoi",
    "dfgnn_fp32": "DF-GNN",
    "flashsparse": "FlashSparse",
    "fused3s": "Fused3S",
    "pyg": "PyG",
    "torch.sparse": "cuSPARSE",
    "turbo_gnn": "turbo-gnn",
}
_FIELDS = {field.name for field in dataclasses.fields(Record)}


@dataclass(frozen=True)
class Case:
    """What the providers of one case did in the newest run of it: its description, and a record of each."""

    what: tuple[str, ...]
    of: Mapping[str, Record]

    def time_ms(self, provider: str) -> float | None:
        """Its median time, if it has one."""
        return self.of[provider].p50_ms if provider in self.of else None

    def over_floor(self) -> float | None:
        """Time of graphfuse over the floor."""
        ours = self.time_ms("graphfuse")
        floor = self.of["graphfuse"].floor_ms if ours else None
        return ours / floor if ours and floor else None

    def speedup(self) -> float | None:
        """Time of PyG over that of graphfuse."""
        ours, theirs = self.time_ms("graphfuse"), self.time_ms("pyg")
        return theirs / ours if ours and theirs else None

    def fastest_other(self) -> tuple[str, float] | None:
        """Who else is fastest, PyG left out, and its time over that of graphfuse."""
        ours = self.time_ms("graphfuse")
        if not ours:
            return None
        times = {f"{peer}, recorded": ms for peer, ms in recorded_peers(self.of["graphfuse"]).items()}
        times |= {provider: record.p50_ms for provider, record in self.of.items() if record.p50_ms}
        others = {name: ms / ours for name, ms in times.items() if name not in ("graphfuse", "pyg")}
        return min(others.items(), key=lambda item: item[1], default=None)


def read(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def records(path: Path) -> list[Record]:
    """The records of a file."""
    return [
        Record(**{key: value for key, value in row.items() if key in _FIELDS})
        for row in read(path)
        if "provider" in row
    ]


def describe(record: Record) -> tuple[str, str, str, str, str]:
    """Benchmark, graph, width, dtype and mode: the same for records of one case, and for no others."""
    extra = record.extra
    mode = [record.mode or "-"]
    mode += ["captured"] if extra.get("captured") else []
    mode += ["sparse features"] if extra.get("features") == "sparse" else []
    mode += [f"{extra['ids']} ids"] if "ids" in extra else []
    mode += ["grad"] if extra.get("grad") else []
    mode += [f"dropout {extra['dropout']:g}"] if extra.get("dropout") else []
    mode += [f"terms {extra['terms']}"] if "terms" in extra else []
    mode += ["edges"] if extra.get("edges") else []
    op = f"{record.op} {extra['kind']}" if "kind" in extra else record.op
    return op, record.graph or "-", _width(record), record.dtype or "-", ", ".join(mode)


def newest(found: Iterable[Record]) -> list[Case]:
    """The cases of records, in the order of their first; each at the commit that was measured last."""
    by_case: dict[tuple[str, ...], list[Record]] = {}
    for record in found:
        by_case.setdefault(describe(record), []).append(record)
    cases = []
    for what, of_case in by_case.items():
        in_time = sorted(of_case, key=lambda record: record.date or "")
        commit = in_time[-1].commit
        cases.append(Case(what, {record.provider: record for record in in_time if record.commit == commit}))
    return cases


def recorded_peers(record: Record) -> dict[str, float]:
    """Times of other projects that a file keeps for the case, without PyG's."""
    times: dict[str, float] = record.extra.get("peers", {})
    return {peer: time_ms for peer, time_ms in times.items() if peer != "pyg"}


def _width(record: Record) -> str:
    if record.head_dim is None:
        return "-"
    in_dim = record.extra.get("in_dim")
    before = "" if in_dim is None else f"{in_dim}->"
    heads = f"{record.heads}x" if record.heads is not None and record.heads > 1 else ""
    return f"{before}{heads}{record.head_dim}"
