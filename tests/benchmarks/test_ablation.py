"""Decisions undone one at a time, and providers that a run has to ask for."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch import Tensor

from benchmarks import ablation, additive, attention, bench, compiled, flex, graphs, run, spmm, timing
from benchmarks.bench import Problem
from graphfuse import reference
from graphfuse.formats import build
from graphfuse.kernels import launch
from graphfuse.ops import _aggregate

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # inductor's, on a GPU
]
CASE: dict[str, Any] = {"graph": "tiny", "dtype": torch.float16, "mode": "fwd"}
RULES = ("prefers_rows", "attention_prefers_rows")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    # what is checked has run; the interpreter takes seconds for each time more
    measured = timing.Timing(2.0, 2.0, 2.0, 0.0, "none")
    monkeypatch.setattr(bench, "time_call", lambda call, device, seconds: measured)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> graphs.Graph:
    """A graph whose first nodes have most edges, and of whose windows some are cut."""
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    tiny = graphs.load("tiny", bench.device())
    spokes = torch.arange(20, 90, device=bench.device())
    hub = torch.full_like(spokes, 95)
    edges = torch.cat([tiny.edge_index, torch.stack([spokes, hub]), torch.stack([hub, spokes])], 1)
    star = graphs.Graph("tiny", torch.unique(edges, dim=1), 96)
    monkeypatch.setattr(graphs, "load", lambda name, device: star)
    return star


@pytest.mark.parametrize(("kind", "mode"), [("sparse_attention", "fwd+bwd"), ("spmm", "fwd")])
def test_every_variant_is_right_and_undoes_one_decision(kind: str, mode: str, hub: graphs.Graph) -> None:
    made = bench.REGISTRY["ablation"]
    shape = (2, 16) if kind == "sparse_attention" else (1, 16)
    rows = {row.provider: row for row in made.rows(CASE | {"kind": kind, "shape": shape, "mode": mode})}
    assert list(rows) == [
        "graphfuse", "not cut", "not sorted", "long rows in order", "other walk", "reordered"
    ]  # fmt: skip
    assert {(row.status, row.path) for row in rows.values()} == {("ok", "fused")}, rows
    found = {name: row.extra for name, row in rows.items()}
    walk, other = ("windows", "rows") if kind == "sparse_attention" else ("rows", "windows")
    assert {name: of["walk"] for name, of in found.items() if of["walk"] != walk} == {"other walk": other}
    assert {name for name, of in found.items() if of["slices"] == 0} == {"not cut"}
    entries = {of["entries"] for name, of in found.items() if name != "reordered"}
    assert entries == {found["reordered"]["entries_before"]} == {hub.windows.num_entries}
    assert not {"peers", "recorded_gather_ms"} & found["graphfuse"].keys()


def test_windows_do_not_add_up_attention_in_float32(hub: graphs.Graph) -> None:
    made = bench.REGISTRY["ablation"]
    case = CASE | {"kind": "sparse_attention", "shape": (2, 16), "dtype": torch.float32}
    status = {row.provider: row.status for row in made.rows(case)}
    assert status.pop("other walk") == "unsupported" and set(status.values()) == {"ok"}, status


def test_tasks_are_the_same_but_in_order_or_whole(hub: graphs.Graph) -> None:
    shipped = hub.windows.walk()
    built = {}
    for name in ("not cut", "not sorted"):
        with ablation.VARIANTS[name].forced():
            built[name] = dataclasses.replace(hub).windows.walk()
    assert build.cut_tasks is ablation._CUT and build._MIN_SLICE == 32
    length = shipped.tasks[:, 2] - shipped.tasks[:, 1]
    assert (length.diff() <= 0).all() and shipped.num_slots > 0
    tasks = built["not sorted"].tasks.tolist()
    assert tasks == sorted(shipped.tasks.tolist(), key=lambda task: task[:2]) != shipped.tasks.tolist()
    assert torch.equal(built["not sorted"].merges, shipped.merges)
    whole = built["not cut"]
    assert (whole.num_slots, whole.merges.numel(), len(whole.tasks)) == (0, 0, 6)
    assert torch.equal(whole.column, shipped.column)


def test_long_rows_are_first_or_where_they_stand() -> None:
    edges = torch.stack([torch.arange(70), torch.full((70,), 95)]).to(bench.device())
    star = graphs.Graph("tiny", edges, 96)
    assert star.windows.row_walk().tasks.tolist() == [[95, 0, 70, -1]]
    with ablation.VARIANTS["long rows in order"].forced():
        rows = dataclasses.replace(star).windows.row_walk()
    assert rows.tasks.numel() == 0 and rows.split > 70


def test_a_variant_lasts_as_long_as_its_call() -> None:
    seen = []

    def call() -> None:
        seen.append([getattr(launch, rule)(*sizes) for rule, sizes in zip(RULES, given, strict=True)])

    sizes = (10**6, 10**6, 10**7, 10**7)
    given = ((*sizes, 64, torch.float16, False), (*sizes, 1, 64, False, torch.float16))
    call()
    ablation.VARIANTS["other walk"].around(bench.Prepared(call, call)).call()  # type: ignore[arg-type]
    call()
    assert seen == [[False, False], [True, True], [False, False]]


@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_projections(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "_IN", 24)
    counted: list[int] = []
    for module in (ablation.F, _aggregate):  # a layer as one Function has the latter
        monkeypatch.setattr(module, "linear", _counting(module.linear, counted))
    made = bench.REGISTRY["ablation_projection"]
    problem = made.problem(**CASE | {"mode": mode}, shape=(2, 16))
    products = []
    for name in ("graphfuse", "four products"):
        counted.clear()
        prepared = made.providers[name](problem.inputs)
        results = prepared.results()
        products.append(len(counted))
        assert prepared.path == "fused" and not problem.check(results).wrong
        for place in range(len(results)):
            damaged = [result.detach().clone() for result in results]
            damaged[place][5] *= 0.9
            assert problem.check(damaged).wrong
    assert len(results) == (2 if mode == "fwd+bwd" else 1)
    assert products == [1 if mode == "fwd" else 2, 4]  # backward's of the features comes by the same way


def _counting(linear: Any, counted: list[int]) -> Any:
    def count(*given: Any) -> Tensor:
        counted.append(1)
        out: Tensor = linear(*given)
        return out

    return count


def test_sweeps() -> None:
    cases = bench.REGISTRY["ablation"].cases()
    half = [case for case in cases if case["dtype"] is torch.float16]
    assert len(half) == 18 and {case["graph"] for case in half} == set(ablation._GRAPHS)
    assert {(case["kind"], case["shape"]) for case in half} == {
        ("sparse_attention", (1, 64)), ("sparse_attention", (4, 32)), ("spmm", (1, 64))
    }  # fmt: skip
    assert len(cases) == 18 + 4  # and where rows are walked
    assert len(bench.REGISTRY["ablation_projection"].cases()) == 12


def problem_of(op: str, **given: Any) -> Problem:
    return bench.REGISTRY[op].problem(**CASE | given)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Dynamo's part of compiling alone; returns its counters."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: original(module, backend="eager"))
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("attention", {"shape": (2, 16), "mode": "fwd+bwd"}),
        ("attention", {"shape": (2, 16), "dropout": 0.3}),
        ("additive", {"kind": "gat", "shape": (2, 8)}),
        ("additive", {"kind": "gat", "shape": (2, 8), "dropout": 0.6, "mode": "fwd+bwd"}),
        ("additive", {"kind": "gat", "shape": (2, 8), "terms": torch.float32, "mode": "fwd+bwd"}),
        ("additive", {"kind": "gat", "shape": (2, 8), "edges": True, "mode": "fwd+bwd"}),
        ("additive", {"kind": "gatv2", "shape": (2, 8), "mode": "fwd+bwd"}),
        ("additive", {"kind": "gatv2", "shape": (2, 8), "edges": True, "mode": "fwd+bwd"}),
        ("additive", {"kind": "agnn", "shape": (1, 8)}),
        ("spmm", {"head_dim": 16, "mode": "fwd+bwd"}),
        ("spmm_weighted", {"head_dim": 16}),
        ("spmm_normalized", {"head_dim": 16, "mode": "fwd+bwd"}),
        ("spmm_gemm", {"shape": (24, 16)}),
    ],
    ids=lambda of: of if isinstance(of, str) else "-".join(map(str, of.values())),
)
def test_pyg_compiled_is_right(op: str, given: dict[str, Any], traced: Any) -> None:
    problem = problem_of(op, **given)
    prepared = compiled.ALSO["pyg compiled"][op](problem.inputs)
    assert not problem.check(prepared.results()).wrong
    assert traced["unique_graphs"] == 1 and prepared.path == "-"


def test_flex_attention_is_right() -> None:
    problem = problem_of("attention", shape=(2, 16), mode="fwd")
    prepared = compiled.ALSO["flex_attention"]["attention"](problem.inputs)
    assert not problem.check(prepared.results()).wrong
    assert prepared.extra == {"blocks": 1, "blocks in all": 1}


def test_blocks_are_those_that_hold_an_edge() -> None:
    sources, targets = torch.tensor([[0, 299, 130, 131], [0, 5, 140, 299]])
    mask = flex.block_mask(graphs.Graph("g", torch.stack([sources, targets]), 300))
    # receivers in rows: 5 hears 299, and 299 hears 131
    assert mask.to_dense()[0, 0].tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    pairs = [(0, 0), (5, 299), (299, 5), (140, 130), (130, 140)]
    at = [mask.mask_mod(0, 0, *map(torch.tensor, pair)).item() for pair in pairs]  # type: ignore[arg-type]
    assert at == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("edges", "num_nodes", "dropout", "says"),
    [
        ([[0, 1], [1, 0]], 20_001, 0.0, "20,001 nodes, more than 20,000"),
        ([[0, 0], [1, 1]], 2, 0.0, "a repeated edge"),
        ([[0, 1], [1, 0]], 2, 0.3, "no dropout"),
        ([[0, 1], [1, 0]], 20_000, 0.0, None),
    ],
)
def test_what_a_mask_cannot_hold(
    edges: list[list[int]], num_nodes: int, dropout: float, says: str | None
) -> None:
    reason = flex.unsupported(graphs.Graph("g", torch.tensor(edges), num_nodes), dropout)
    assert reason is None if says is None else says in str(reason)


def test_a_run_asks_for_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "MOST_NODES", 95)
    out = tmp_path / "rows.jsonl"
    given = ["spmm_gemm", "attention", "--quick", "--graphs", "tiny", "--out", str(out)]
    providers = {"pyg": bench.REGISTRY["attention"].providers["pyg"]}
    for name in ("attention", "spmm_gemm"):
        made = bench.REGISTRY.pop(name)
        dataclasses.replace(made, sweep=made.sweep[:1], providers=providers if name == "attention" else {})
    assert run.main([*given, "--also", "flex_attention"]) == 0
    (theirs, none) = map(json.loads, out.read_text().splitlines())
    assert (theirs["op"], theirs["provider"], theirs["status"]) == ("attention", "pyg", "ok")
    assert (none["provider"], none["status"], none["p50_ms"]) == ("flex_attention", "unsupported", None)
    assert none["message"].startswith("the mask is a byte for each pair of nodes, and the graph has 96")
    with pytest.raises(SystemExit):
        run.main(["spmm", "--also", "flax"])


def test_a_run_of_some_cases_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    given = ["attention", "--graphs", "tiny", "--only", "shape=8x16", "dtype=float16", "mode=fwd"]
    assert run.main([*given, "--list"]) == 0
    cases = capsys.readouterr().out.splitlines()
    assert cases and all("shape=(8, 16)" in case and "mode=fwd" in case for case in cases)
    assert run.main([*given, "--alone", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(cases) and {row["provider"] for row in rows} == {"graphfuse"}
    assert run.main([*given, "--alone", "--budget", "0"]) == 0
    assert f"out of budget, not run: {len(cases)} rows of attention tiny" in capsys.readouterr().out


def test_extended_has_what_was_asked_for() -> None:
    made = bench.REGISTRY["attention"]
    assert compiled.extended(made, ()) is made
    assert compiled.extended(bench.REGISTRY["spmm"], ["turbo_gnn"]) is bench.REGISTRY["spmm"]
    more = compiled.extended(made, ["turbo_gnn", "pyg compiled"])
    assert list(more.providers) == ["graphfuse", "pyg", "turbo_gnn", "pyg compiled"]
    assert bench.REGISTRY["attention"] is made and more.name == made.name


@pytest.fixture
def turbo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definitions of what turbo_gnn says of itself, under its name."""
    module = types.ModuleType("turbo_gnn")

    class Adjacency:
        @staticmethod
        def from_edge_list(edge_index: Tensor, num_nodes: int, index_dtype: torch.dtype) -> Tensor:
            return edge_index

    def graph_transformer_aggr(
        graph: Tensor, x: Tensor, Q: Tensor, K: Tensor, V: Tensor, scale: float
    ) -> Any:
        return reference.sparse_attention(graph, K, Q, V, scale)

    def gatv2_aggr(
        graph: Tensor, x: Tensor, x_neighbors: Tensor, attention_weights: Tensor, negative_slope: float
    ) -> Any:
        out = reference.gatv2_attention(graph, x_neighbors, x, attention_weights, negative_slope)
        return out.flatten(1)  # type: ignore[union-attr]

    vars(module).update(AdjacencyForwardBackwardWithNodeBuckets=Adjacency)
    vars(module).update(graph_transformer_aggr=graph_transformer_aggr, gatv2_aggr=gatv2_aggr)
    monkeypatch.setitem(sys.modules, "turbo_gnn", module)


@pytest.mark.usefixtures("turbo")
def test_turbo_gnn_is_given_receivers_as_keys() -> None:
    for op, given in (("attention", {"shape": (2, 16)}), ("additive", {"kind": "gatv2", "shape": (2, 8)})):
        problem = problem_of(op, **given, mode="fwd+bwd")
        results = compiled.ALSO["turbo_gnn"][op](problem.inputs).results()
        assert not problem.check(results).wrong
    for op, given in (
        ("attention", {"shape": (2, 16), "dropout": 0.3}),
        ("additive", {"kind": "gat", "shape": (2, 8)}),
    ):
        with pytest.raises(compiled.Unsupported, match="turbo_gnn has no"):
            compiled.ALSO["turbo_gnn"][op](problem_of(op, **given).inputs)


def test_pyg_says_that_torch_scatter_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", False)
    assert spmm.scatter_installed() == {}
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 2.1")
    wanted = {"torch_scatter": "torch_scatter 2.1"}
    assert spmm.scatter_installed() == wanted
    for made, given in ((attention, {"shape": (1, 16)}), (additive, {"kind": "gat", "shape": (1, 16)})):
        problem = problem_of(made.__name__.rpartition(".")[2], **given)
        assert made._pyg(problem.inputs).extra == wanted
