from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

from benchmarks import bench, blocks
from benchmarks.bench import Bench
from graphfuse import RowWindows

NARROW = {"gcn": ("GCNConv", 6, None), "gat": ("GATConv", 3, 2), "transformer": ("TransformerConv", 3, 2)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(blocks, "_IN", 5)
    monkeypatch.setattr(blocks, "_NETS", NARROW)
    monkeypatch.setattr(bench, "_QUICK_ROUNDS", (1, 2))
    return bench.REGISTRY["blocks"]


def case(kind: str, mode: str) -> dict[str, object]:
    return {"graph": "tiny", "edges": 60, "kind": kind, "dtype": torch.float32, "mode": mode}


def test_cases_are_three_sizes_of_three_networks(made: Bench) -> None:
    assert len(made.cases()) == 18
    (quick,) = made.cases(["tiny"], quick=True)
    assert (quick["graph"], quick["edges"], quick["mode"]) == ("tiny", 10_000, "step")


@pytest.mark.parametrize("kind", ["gcn", "transformer"])
def test_a_step_begins_with_cutting_its_block(
    kind: str, made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, built = RowWindows.from_edge_index, []
    monkeypatch.setattr(RowWindows, "from_edge_index", lambda *given: built.append(1) or build(*given))
    ours, theirs = made.rows(case(kind, "step"), quick=True)
    assert (ours.status, ours.path, theirs.status, theirs.path) == ("ok", "fused", "ok", "-")
    calls = 1 + 1 + 2 + (1 if bench.device().type == "cuda" else 0)  # checked, first, timed, for memory
    assert len(built) == calls
    assert 0 < ours.num_edges <= 60 and ours.graph == "tiny, 60 edges"
    assert ours.extra["kind"] == kind and ours.extra["seeds"] == 1
    assert theirs.extra["time over graphfuse"]["p50"] > 0


def test_build_holds_what_a_step_needs(made: Bench) -> None:
    for row in made.rows(case("gat", "build"), quick=True):
        assert (row.status, row.max_error, row.mode) == ("ok", 0.0, "build")
        assert row.extra.get("parts", ["windows", "rows"]) == ["windows", "rows"]


def test_wrong_results_are_found(made: Bench) -> None:
    step = made.problem(**case("gcn", "step"))
    results = blocks._results(step.inputs, step.inputs.net(pyg))
    assert not step.check(results).wrong
    for place in range(2):
        damaged = [result.clone() for result in results]
        damaged[place].view(-1)[0] += 0.01
        assert step.check(damaged).wrong
    build = made.problem(**case("gcn", "build"))
    edges = build.inputs.batch.edge_index
    other = edges.clone()
    other[0, 0] = (other[0, 0] + 1) % build.inputs.batch.num_nodes
    assert not build.check((edges, edges.flip(1))).wrong
    assert build.check((edges, edges[:, 1:])).wrong and build.check((other, edges)).wrong
