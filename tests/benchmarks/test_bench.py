from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench, cora_step, floors, graphs, run, synth, timing
from benchmarks.bench import Bench, Prepared, Problem
from benchmarks.truth import Error
from graphfuse.train.datasets import planted_partition

FIELDS = {
    "op", "provider", "graph", "num_nodes", "num_edges", "heads", "head_dim", "dtype", "mode",
    "p20_ms", "p50_ms", "p80_ms", "timer", "floor_ms", "peak_mib", "gb_per_s", "max_error", "limit", "path",
    "status", "message", "extra", "gpu", "torch", "triton", "cuda", "commit", "date",
}  # fmt: skip


def problem(mode: str, scale: float = 1.0) -> Problem:
    def check(results: Sequence[torch.Tensor]) -> Error:
        return Error((results[0] - scale).abs().max().item(), 0.5)

    facts = {"graph": "none", "mode": mode}
    return Problem(facts, scale, torch.device("cpu"), check, floor_ms=1.0, bytes_moved=1000)


def prepare(scale: float, value: float) -> Prepared:
    def call() -> Sequence[torch.Tensor]:
        return (torch.full((3,), scale * value),)

    return Prepared(call, call)


def fail(scale: float, error: Exception) -> Prepared:
    raise error


def a_bench(**changed: Any) -> Bench:
    options: dict[str, Any] = {
        "name": "op",
        "sweep": [{"mode": ("fwd", "fwd+bwd"), "scale": (1.0, 2.0)}],
        "problem": problem,
        "providers": {"right": functools.partial(prepare, value=1.0)},
    }
    return Bench(**options | changed)


def test_name_is_registered_once() -> None:
    made = a_bench()
    assert bench.REGISTRY["op"] is made
    with pytest.raises(ValueError, match="already a benchmark called 'op'"):
        a_bench()


def test_cases_are_products_of_axes() -> None:
    made = a_bench(sweep=[{"graph": ("a", "b"), "dim": (1, 2)}, {"graph": ("c",), "dim": (1,)}])

    def cases(**options: Any) -> list[tuple[Any, ...]]:
        return [tuple(case.values()) for case in made.cases(**options)]

    assert cases() == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]
    assert cases(quick=True) == [("a", 1), ("b", 1), ("c", 1)]
    assert cases(graphs=["z"]) == [("z", 1), ("z", 2)]


def test_cases_of_one_graph_run_together() -> None:
    made = a_bench(sweep=[{"graph": ("a", "b"), "dim": (1, 2)}, {"graph": ("a",), "dim": (2, 3)}])
    assert [tuple(case.values()) for case in made.cases()] == [
        ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2),
    ]  # fmt: skip
    assert [case["graph"] for case in made.cases(["y", "z"])] == ["y"] * 3 + ["z"] * 3
    assert made.cases(["y"], quick=True) == [{"graph": "y", "dim": 1}]


@pytest.mark.parametrize("take_turns", [False, True])
def test_every_outcome_is_a_row(take_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_COMMIT", "c0ffee")
    bench.machine.cache_clear()
    providers = {
        "right": functools.partial(prepare, value=1.0),
        "wrong": functools.partial(prepare, value=2.0),
        "nan": functools.partial(prepare, value=float("nan")),
        "raises": functools.partial(fail, error=RuntimeError("no such kernel\nand a long story")),
        "full": functools.partial(fail, error=torch.OutOfMemoryError("CUDA out of memory")),
    }
    made = a_bench(providers=providers, take_turns=take_turns)
    rows = {row.provider: row for row in made.rows(made.cases()[0], quick=True)}
    bench.machine.cache_clear()
    assert {name: row.status for name, row in rows.items()} == {
        "right": "ok", "wrong": "wrong", "nan": "wrong", "raises": "error", "full": "oom",
    }  # fmt: skip
    for row in rows.values():
        record = bench.to_json(row)
        assert set(record) == FIELDS
        json.dumps(record, allow_nan=False)
        assert record["mode"] == "fwd" and record["commit"] == "c0ffee"
        assert (record["p50_ms"] is not None) == (row.status == "ok")
    right = rows["right"]
    assert right.p20_ms <= right.p50_ms <= right.p80_ms
    assert (right.max_error, right.limit, right.floor_ms) == (0.0, 0.5, 1.0)
    assert right.gb_per_s == pytest.approx(1e-3 / right.p50_ms)
    assert rows["wrong"].max_error == 1.0
    assert rows["raises"].message == "RuntimeError: no such kernel"


def test_problem_that_cannot_be_made_is_a_row_for_each_provider() -> None:
    made = a_bench(problem=fail_problem, sweep=[{"graph": ("gone",), "mode": ("fwd",)}])
    (row,) = made.rows(made.cases()[0])
    assert (row.graph, row.status, row.message) == ("gone", "error", "OSError: no file")


def fail_problem(**case: Any) -> Problem:
    raise OSError("no file")


def test_record_of_a_problem_that_cannot_be_made_names_its_shape() -> None:
    made = a_bench(problem=fail_problem, sweep=[{"graph": ("gone",), "shape": ((4, 32),)}])
    (row,) = made.rows(made.cases()[0])
    assert row.extra == {"shape": [4, 32]}


@pytest.mark.parametrize("take_turns", [False, True])
def test_provider_adds_to_its_record(take_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_QUICK_ROUNDS", (1, 1))

    def with_extra(scale: float, peak: int | None) -> Prepared:
        return prepare(scale, 1.0)._replace(extra={} if peak is None else {"peak": peak})

    def described(**case: Any) -> Problem:
        made = problem("fwd")
        return dataclasses.replace(made, facts=made.facts | {"extra": {"stand_in": True}})

    providers = {name: functools.partial(with_extra, peak=peak) for name, peak in (("one", 7), ("two", None))}
    made = a_bench(providers=providers, problem=described, take_turns=take_turns)
    one, two = (row.extra for row in made.rows(made.cases()[0], quick=True))
    assert one["peak"] == 7 and "peak" not in two
    assert one["stand_in"] and two["stand_in"]
    assert ("time over one" in one and "time over one" in two) == take_turns


def test_nothing_of_a_failed_provider_is_kept_while_the_next_problem_is_made() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def fill(scale: float) -> Prepared:
        tensor = torch.ones(3)
        cycle: list[Any] = [tensor]
        cycle.append(cycle)  # only the garbage collector frees it
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def next_problem(**case: Any) -> Problem:
        assert not any(ref() is not None for ref in kept)
        return problem("fwd")

    made = a_bench(providers={"full": fill}, problem=next_problem)
    gc.disable()
    try:
        rows = [row for case in made.cases()[:2] for row in made.rows(case)]
    finally:
        gc.enable()
    assert len(kept) == 2 and {row.status for row in rows} == {"oom"}


def test_quantiles() -> None:
    assert timing.quantiles([3.0]) == (3.0, 3.0, 3.0)
    assert timing.quantiles([float(i) for i in range(11)]) == (2.0, 5.0, 8.0)


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (lambda: synth.uniform_graph(96, 400), "640426c94165dd95"),
        (lambda: synth.community_graph("reddit", scale=0.01), "b00d74b3f62d108f"),
        (lambda: synth.community_graph("ogbn-products", scale=0.0005), "0f8fbbe368d14fdb"),
    ],
    ids=["uniform", "reddit", "products"],
)
def test_generated_graphs_are_always_the_same(make: Any, digest: str) -> None:
    indptr, indices = make()
    assert hashlib.sha256(indptr.tobytes() + indices.tobytes()).hexdigest()[:16] == digest


def test_generated_graph_is_simple_symmetric_and_cached(device: torch.device) -> None:
    graph = graphs.load("tiny", device)
    source, target = graph.edge_index
    key = source * graph.num_nodes + target
    assert graph.num_edges == 400 and bool((key.diff() > 0).all()) and not bool((source == target).any())
    assert graph.windows.symmetric
    path = graphs.generate("tiny")
    written = path.stat().st_mtime_ns
    assert graphs.generate("tiny").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="no graph called 'huge'; there are cora"):
        graphs.load("huge", device)


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize(("words", "blocks"), [(64, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("rows", [False, True], ids=["windows", "rows"])
def test_gather_reads_each_column_entry_once(
    rows: bool, words: int, blocks: int, two: bool, device: torch.device
) -> None:
    windows = graphs.load("tiny", device).windows
    w = windows.row_walk() if rows else windows.walk()
    x = torch.randint(1000, (w.num_cols, words), dtype=torch.int32, device=device)
    y = torch.randint(1000, x.shape, dtype=torch.int32, device=device) if two else None
    gathered = (x if y is None else x + y)[w.column.long()]
    ways = {(config.by_task, config.block): config for config in floors.configs(w, words)}
    assert len(ways) == blocks * (1 if rows else 2)
    for config in ways.values():
        found = floors.gather(w, x, config, y)
        assert torch.equal(found.sum(0), gathered.sum(0))
        if config.by_task:
            of_task = [gathered[begin:end].sum(0) for _, begin, end, _ in w.tasks.tolist()]
            assert torch.equal(found.long(), torch.stack(of_task))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    out = tmp_path / "rows.jsonl"
    status = run.main(["spmm", "row_windows", "--quick", "--graphs", "tiny", "--out", str(out)])
    found = {(row["op"], row["provider"]): row for row in map(json.loads, out.read_text().splitlines())}
    assert found["spmm", "graphfuse"]["status"] == "ok"
    assert found["spmm", "graphfuse"]["path"] == "fused"
    assert found["spmm", "pyg"]["status"] == "ok"
    # without a GPU there is no sparse product in half precision, and that is a row
    assert found["spmm", "torch.sparse"]["status"] == ("ok" if device.type == "cuda" else "error")
    assert status == int(device.type != "cuda")
    assert found["row_windows", "graphfuse"]["max_error"] == 0.0
    assert found["row_windows", "graphfuse"]["extra"]["windows"] == 6
    assert "spmm         tiny   64  float16  fwd    graphfuse" in capsys.readouterr().out


def test_command_line_stops_when_out_of_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.main(["spmm", "--quick", "--graphs", "tiny", "--budget", "0", "--out", str(out)]) == 0
    assert not out.exists()
    assert "out of budget, not run: 3 rows of spmm tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["none"])


def test_cora_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small = planted_partition(num_nodes=32, num_classes=2, num_words=24)
    monkeypatch.setattr(cora_step, "_data", lambda dataset: (small, "planted partition"))
    monkeypatch.setattr(bench, "_QUICK_ROUNDS", (1, 1))
    made = bench.REGISTRY["cora_step"]
    eager, captured = made.cases()
    ours, theirs = made.rows(eager, quick=True)
    assert (ours.status, ours.path, ours.graph) == ("ok", "fused", "planted partition")
    assert theirs.status == "ok"
    assert theirs.extra["time over graphfuse"]["p50"] > 0
    if bench.device().type != "cuda":
        assert {row.message for row in made.rows(captured)} == {"ValueError: a CUDA graph needs a GPU"}
