from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import ablation, bench, graphs, timing
from graphfuse.formats import reorder


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timing.Timing(2.0, 2.0, 2.0, 0.0, "none")
    monkeypatch.setattr(bench, "time_call", lambda call, device, seconds: measured)
    ablation._ordered.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> graphs.Graph:
    """Pairs of nodes far apart that hear the same sources: an order saves half of the entries."""
    monkeypatch.setattr(reorder, "_SMALLEST", 1)
    node = torch.arange(96).repeat_interleave(8)
    source = (node % 6) * 16 + torch.arange(8).repeat(96)
    made = graphs.Graph("tiny", torch.stack([source, node]).to(bench.device()), 96)
    load = graphs.load
    monkeypatch.setattr(graphs, "load", lambda name, device: made if name == "tiny" else load(name, device))
    return made


def test_shuffled_graphs_are_renumbered() -> None:
    published, shuffled = (graphs.load(name, bench.device()) for name in ("tiny", "tiny:shuffled"))
    assert (shuffled.name, shuffled.num_nodes) == ("tiny:shuffled", 96)
    degrees = [torch.bincount(g.edge_index[1], minlength=96) for g in (published, shuffled)]
    assert torch.equal(degrees[0].sort().values, degrees[1].sort().values)
    assert not torch.equal(*degrees)
    assert (shuffled.edge_index[0].diff() >= 0).all()
    again = graphs.Graph("reddit:shuffled", shuffled.edge_index, 96)
    assert again.facts(torch.float16)["extra"] == {"stand_in": True}
    assert shuffled.facts(torch.float16)["extra"] == {}


def test_record_has_entries_before_and_after(small: graphs.Graph) -> None:
    made = bench.REGISTRY["reorder"]
    rows = {row.provider: row for row in made.rows({"graph": "tiny", "ids": "published"}, quick=True)}
    ours, natural = rows["graphfuse"], rows["natural"]
    assert {(row.status, row.max_error, row.mode) for row in rows.values()} == {("ok", 0.0, "build")}
    assert ours.extra["entries_before"] == natural.extra["entries_after"] == small.windows.num_entries
    assert 1.5 * ours.extra["entries_after"] < ours.extra["entries_before"]
    assert ours.extra["nbytes"] > 0 and ours.extra["ids"] == "published"
    problem = made.problem(graph="tiny", ids="published")
    assert problem.facts["extra"]["entries_published"] == small.windows.num_entries


def test_wrong_records_are_found(small: graphs.Graph) -> None:
    made = bench.REGISTRY["reorder"]
    problem = made.problem(graph="tiny", ids="published")
    forward, backward, entries = made.providers["graphfuse"](problem.inputs).results()
    assert not problem.check((forward, backward, entries)).wrong
    assert problem.check((forward, backward, torch.tensor(small.windows.num_entries + 1))).wrong
    assert problem.check((forward[:, 1:], backward, entries)).wrong
    damaged = backward.clone()
    damaged[0, 3] = (damaged[0, 3] + 1) % 96
    assert problem.check((forward, damaged, entries)).wrong


@pytest.mark.parametrize("kind", ["spmm", "sparse_attention"])
def test_ops_on_either_record(
    kind: str, small: graphs.Graph, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "_floor_ms", lambda i, windows, rows: float(windows.num_entries))
    case: dict[str, Any] = {"graph": "tiny", "ids": "published", "kind": kind}
    case |= {"dtype": torch.float16, "mode": "fwd"}
    rows = {row.provider: row for row in bench.REGISTRY["reordered"].rows(case)}
    assert list(rows) == ["graphfuse", "natural"]
    assert {(row.status, row.path) for row in rows.values()} == {("ok", "fused")}, rows
    ours, natural = rows["graphfuse"], rows["natural"]
    assert ours.extra["entries_before"] == natural.extra["entries"] == small.windows.num_entries
    assert 1.5 * ours.extra["entries"] < natural.extra["entries"]
    assert (ours.extra["kind"], ours.extra["ids"], ours.graph) == (kind, "published", "tiny")
    assert not {"peers", "recorded_gather_ms"} & ours.extra.keys()
    # the floor is that of the record that was walked
    assert ours.floor_ms == ours.extra["entries"]
    assert (natural.floor_ms is None) == (device.type == "cpu")


def test_a_wrong_result_is_found(small: graphs.Graph) -> None:
    made = bench.REGISTRY["reordered"]
    case: dict[str, Any] = {"graph": "tiny", "ids": "published", "dtype": torch.float16, "mode": "fwd"}
    for kind in ("spmm", "sparse_attention"):
        problem = made.problem(**case, kind=kind)
        (out,) = made.providers["graphfuse"](problem.inputs).results()
        assert not problem.check([out]).wrong
        order = ablation._ordered(problem.inputs.graph).walk().row_index
        assert order is not None and problem.check([out[order[:96]]]).wrong


def test_cases_are_shuffled_and_published_ids() -> None:
    for name in ("reorder", "reordered"):
        cases = bench.REGISTRY[name].cases()
        assert {case["ids"] for case in cases} == {"shuffled", "published"}
        assert {"cs", "computers", "blogcatalog3", "ego-twitter", "reddit"} <= {c["graph"] for c in cases}
