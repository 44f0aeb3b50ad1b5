from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention, bench, floors, graphs, peers, run, timing, transformer_step, truth
from benchmarks.bench import Prepared, Problem, Record
from graphfuse import RowWindows, reference
from graphfuse.testing import GRAPHS

H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "dropout"),
    [*itertools.product(("hub", "repeated", "isolated", "bipartite", "no_edges"), (0.0,)), ("ragged", 0.4)],
)
def test_truth_is_the_definition(name: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_PIECE", 60)  # many pieces
    seed = torch.tensor([3]) if dropout > 0 else None
    edge_index, (num_src, num_dst) = GRAPHS[name]()
    source, target = edge_index
    q, k, v, grad = (
        torch.randn(n, 3, 5, dtype=torch.float64, requires_grad=i < 3)
        for i, n in enumerate((num_dst, num_src, num_src, num_dst))
    )
    out = reference.sparse_attention(edge_index, q, k, v, dropout=dropout, seed=seed)
    wanted = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    operands = truth.Operands(q.detach(), k.detach(), v.detach(), grad, dropout, seed)
    for every in (True, False):  # all rows; a few, out of order
        some, others = (torch.arange(n) if every else torch.tensor([n - 1, 0]) for n in (num_dst, num_src))
        at = truth.edges_of(some, target, source, num_dst)
        found = truth.attention(at, operands, torch.float64)
        transposed = truth.edges_of(others, source, target, num_src)
        found += truth.attention_transposed(transposed, target, source, operands, torch.float64)
        for actual, exact, rows in zip(found, wanted, (some, some, others, others), strict=True):
            torch.testing.assert_close(actual, exact[rows], rtol=1e-12, atol=1e-12)
    (alone,) = truth.attention(at, operands._replace(grad=None), torch.float64)
    assert torch.equal(alone, found[0])


def problem(mode: str, dtype: torch.dtype = torch.float16, shape: tuple[int, int] = (4, 32)) -> Problem:
    return bench.REGISTRY["attention"].problem(graph="tiny", shape=shape, dtype=dtype, mode=mode)


def definition(inputs: attention.Inputs) -> Prepared:
    return inputs.run(lambda q, k, v: reference.sparse_attention(inputs.graph.edge_index, q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_wrong_results_are_found(dtype: torch.dtype) -> None:
    made = problem("fwd+bwd", dtype)
    results = [result.clone() for result in definition(made.inputs).results()]
    assert not made.check(results).wrong
    for place in range(4):
        damaged = [result.clone() for result in results]
        largest = damaged[place].abs().amax((1, 2)).argmax()
        damaged[place][largest] *= 0.9  # one row of one result
        assert made.check(damaged).wrong
        damaged[place] = results[place].clone()
        damaged[place][7, 2, 0] = float("nan")
        assert made.check(damaged).wrong


def test_sampled_rows_are_checked_at_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_RANDOM", 20)
    monkeypatch.setattr(truth, "_LONGEST", 3)
    made = problem("fwd+bwd")
    results = definition(made.inputs).results()
    assert not made.check(results).wrong
    source, target = made.inputs.graph.edge_index
    rows = truth.sample(target, source, 96).rows
    longest = int(torch.bincount(target).argmax())
    assert rows.numel() <= 23 and longest in rows.tolist()
    results[2][longest] = 0.0  # of dk
    assert made.check(results).wrong


def test_truth_of_a_directed_graph() -> None:
    directed = graphs.Graph("directed", torch.randint(50, (2, 150)), 50)
    inputs = attention.Inputs(directed, truth.Operands(*torch.randn(4, 50, 2, 8)))
    expected = attention._expected(directed, inputs.operands)
    assert not truth.worst(expected, definition(inputs).results()).wrong
    backwards = dataclasses.replace(directed, edge_index=directed.edge_index.flip(0))
    results = definition(dataclasses.replace(inputs, graph=backwards)).results()
    assert all(one.error(result).wrong for one, result in zip(expected, results, strict=True))


def test_wrong_provider_is_a_row_without_a_time() -> None:
    made = bench.REGISTRY["attention"]

    def scaled(inputs: attention.Inputs, place: int) -> Prepared:
        def results() -> Sequence[Tensor]:
            return [x * 1.05 if i == place else x for i, x in enumerate(definition(inputs).results())]

        return Prepared(results, results)

    providers = {"right": definition, "out": lambda i: scaled(i, 0), "dk": lambda i: scaled(i, 2)}
    with_wrong = dataclasses.replace(made, name="wrong", providers=providers)
    case = {"graph": "tiny", "shape": (1, 64), "dtype": torch.float16, "mode": "fwd+bwd"}
    rows = list(with_wrong.rows(case, quick=True))
    assert [row.status for row in rows] == ["ok", "wrong", "wrong"]
    assert [row.p50_ms is None for row in rows] == [False, True, True]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.main(["attention", "--quick", "--graphs", "tiny", "--out", str(out)]) == 0
    ours, theirs = map(json.loads, out.read_text().splitlines())
    assert (ours["provider"], ours["path"], ours["mode"]) == ("graphfuse", "fused", "fwd")
    assert (theirs["provider"], theirs["status"]) == ("pyg", "ok")
    assert (ours["heads"], ours["head_dim"], ours["dtype"]) == (1, 64, "float16")
    assert "attention  tiny   64  float16  fwd   graphfuse" in capsys.readouterr().out


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    # what is checked has run once; the interpreter takes seconds for each time more
    once = timing.Timing(1.0, 1.0, 1.0, 0.0, "none")
    monkeypatch.setattr(bench, "time_call", lambda call, device, seconds: once)


@pytest.mark.usefixtures("untimed")
def test_gradients_of_several_heads() -> None:
    made = bench.REGISTRY["attention"]
    case = {"graph": "tiny", "shape": (2, 16), "dtype": torch.float16, "mode": "fwd+bwd"}
    ours, theirs = made.rows(case, quick=True)
    assert (ours.status, ours.path, theirs.status) == ("ok", "fused", "ok")
    assert (ours.heads, ours.head_dim, ours.mode) == (2, 16, "fwd+bwd")
    assert "tiny   2x16  float16" in run.table([ours, theirs])


def test_sweep() -> None:
    cases = bench.REGISTRY["attention"].cases()
    order = [case["graph"] for case in cases]
    assert len(set(order)) == 10 and order == sorted(order, key=order.index)
    reddit = [case for case in cases if case["graph"] == "reddit"]
    assert [case["dtype"] for case in reddit[:8]] == [torch.float16] * 8
    assert {case["dtype"] for case in reddit[8:16]} == {torch.bfloat16, torch.float32}
    assert [case["dropout"] for case in reddit[16:]] == [0.3] * 8


def test_floor_adds_gathers_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 1], [0, 1, 2]]), (2, 3))  # 3 rows, 2 columns

    def gather_ms(direction: RowWindows, rows: bool, row_bytes: int) -> float:
        assert rows
        return {(False, 512): 1.0, (True, 512): 10.0, (True, 32): 100.0}[direction.transposed, row_bytes]

    monkeypatch.setattr(floors, "gather_ms", gather_ms)
    monkeypatch.setattr(floors, "copy_bytes_per_ms", lambda device: 512 / 1000)
    # k and v; q and out
    assert floors.attention_ms(windows, True, 4, 64, torch.float16, False) == 2 * 1 + 2 * 3 * 1000
    # k and v, twice; q and grad over the transpose, and a pair a head; 7 matrices of receivers, 4 of sources
    backward = 4 * 1 + 2 * 10 + 100 + (7 * 3 + 4 * 2) * 1000
    assert floors.attention_ms(windows, True, 4, 64, torch.float16, True) == backward
    monkeypatch.setattr(floors, "gather_ms", lambda *arguments: None)
    assert floors.attention_ms(windows, True, 3, 7, torch.float16, True) is None


def test_floor_of_additive_attention_gathers_the_numbers_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """GAT's, as kernels have no other way to them."""
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 1], [0, 1, 2]]), (2, 3))  # 3 rows, 2 columns
    ms = {(False, 512): 1.0, (True, 512): 10.0, (False, 8): 100.0, (False, 2): None}
    ms |= {(True, 64): 1000.0, (True, 8): 2000.0}

    def gather_ms(direction: RowWindows, rows: bool, row_bytes: int) -> float | None:
        time_ms = ms[direction.transposed, row_bytes]
        return time_ms if time_ms is None else time_ms + rows  # windows are faster

    monkeypatch.setattr(floors, "gather_ms", gather_ms)
    monkeypatch.setattr(floors, "copy_bytes_per_ms", lambda device: float("inf"))
    half = torch.float16
    assert floors.additive_ms(windows, "gat", 4, 64, half, False) == 1 + 100
    assert floors.additive_ms(windows, "gat", 4, 64, half, True) == 1 + 100 + 10 + 1000
    assert floors.additive_ms(windows, "gat", 1, 256, half, False) == 1  # half a word is left out
    assert floors.additive_ms(windows, "gatv2", 4, 64, half, False) == 1
    assert floors.additive_ms(windows, "agnn", 1, 256, half, False) == 1  # the rows tell their lengths
    assert floors.additive_ms(windows, "agnn", 1, 256, half, True) == 2 * 1 + 2 * 10 + 2000


def test_floor_of_additive_attention_reads_numbers_of_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 1], [0, 1, 2]]), (2, 3))
    monkeypatch.setattr(floors, "gather_ms", lambda *arguments: 0.0)
    monkeypatch.setattr(floors, "copy_bytes_per_ms", lambda device: 1.0)
    for kind, backward, walks in (
        ("gat", False, 1),
        ("gat", True, 3),
        ("gatv2", False, 1),
        ("gatv2", True, 4),
    ):
        with_edges, without = (
            floors.additive_ms(windows, kind, 4, 64, torch.float16, backward, size) for size in (10, 0)
        )
        assert with_edges is not None and without is not None
        assert with_edges - without == walks * 3 * 10  # three edges


def test_floor_of_a_symmetric_graph_gathers_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1], [1, 0]]))
    asked = []
    monkeypatch.setattr(floors, "gather_ms", lambda direction, *rest: asked.append(direction) or 1.0)
    monkeypatch.setattr(floors, "copy_bytes_per_ms", lambda device: float("inf"))
    assert floors.attention_ms(windows, False, 1, 64, torch.float16, True) == 7.0
    assert all(direction is windows for direction in asked)


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_gathers_are_measured_once(two: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = graphs.load("tiny", device).windows
    measured: list[tuple[int, bool]] = []

    def time(w: Any, x: Tensor, config: Any, seconds: float, y: Tensor | None = None) -> float:
        measured.append((x.size(1), y is not None))
        return float(len(measured))

    monkeypatch.setattr(floors, "_time", time)
    found = (floors.gather_kv_ms if two else floors.gather_ms)(windows, False, 8)
    count = len(measured)
    configs = len(floors.configs(windows.walk(), 2))
    assert found == configs + (3 if two else 1)  # the fastest two once more, four with both matrices
    assert measured == [(2, False)] * (configs + 2) + [(2, True)] * (4 if two else 0)
    assert (floors.gather_kv_ms if two else floors.gather_ms)(windows, False, 8) == found
    assert len(measured) == count
    assert floors.gather_ms(windows, False, 2) is None and floors.gather_kv_ms(windows, False, 24) is None
    by_task = floors.gather_by_task_ms(windows, 8)
    assert by_task == count + 1 and len(measured) == count + 2  # of those by task the fastest two
    assert floors.gather_by_task_ms(windows, 8) == by_task and len(measured) == count + 2
    assert floors.gather_by_task_ms(windows, 2) is None


def test_gather_by_task_takes_no_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, tasks = (floors.Config(by_task, 4, 32, 1, 1) for by_task in (False, True))
    monkeypatch.setattr(floors, "_gathers", lambda *arguments: (1.0, [pieces, tasks]))
    monkeypatch.setattr(floors, "_time", lambda w, x, config, seconds: 2.0 if config is tasks else 1.0)
    assert floors.gather_by_task_ms(graphs.load("tiny", device).windows, 16) == 2.0


def test_peers() -> None:
    assert peers.times(H200, "reddit", 1, 64, "fwd")["fused3s"] == 7.4334
    assert peers.times(H200, "reddit", 1, 64, "fwd+bwd") == {"turbo_gnn": 56.6427, "anemoi": 811.619}
    assert peers.times(H200, "reddit", 4, 32, "fwd") == {"turbo_gnn": 41.7228, "anemoi": 22.2296}
    assert peers.times(H200, "reddit", 8, 16, "fwd") == peers.times(H200, "products", 1, 64, "fwd") == {}
    assert peers.times("cpu", "reddit", 1, 64, "fwd") == {}
    sums = {"flashsparse_fp16": 2.3472, "flashsparse_tf32": 3.7588}
    assert peers.times(H200, "reddit", 1, 64, "spmm") == sums and not peers.times(
        H200, "reddit", 4, 32, "spmm"
    )
    assert peers.gather_ms(H200, "github", 1, 128) == 0.0286
    assert peers.gather_ms(H200, "dblp-2010", 1, 64) == 0.0252
    assert peers.gather_ms("cpu", "github", 1, 128) is None
    recorded = json.loads((Path(peers.__file__).parent / "h200.json").read_text())
    assert {"gpu", "unit", "dtype", "torch", "triton", "date", "notes"} < set(recorded)
    assert set(recorded["graphs"]) <= set(graphs.NAMES)
    for shapes in recorded["graphs"].values():
        times = [ms for modes in shapes.values() for mode in modes.values() for ms in mode.values()]
        assert times and all(isinstance(ms, float) and ms > 0 for ms in times)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_record_holds_peers_of_its_gpu_and_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "times", lambda gpu, graph, heads, dim, mode: {"one": 2.0, "pyg": 1.0})
    monkeypatch.setattr(peers, "gather_ms", lambda *case: 0.5)
    extra = problem("fwd", dtype).facts["extra"]
    wanted = {"peers": {"one": 2.0, "pyg": 1.0}, "recorded_gather_ms": 0.5}
    assert {key: value for key, value in extra.items() if key in wanted} == (
        wanted if dtype is torch.float16 else {}
    )


def test_table_shows_the_best_peer() -> None:
    named = Record("attention", "graphfuse", "g", heads=1, head_dim=64, dtype="float16", mode="fwd")
    extra = {"peers": {"one": 4.0, "two": 3.0, "pyg": 1.0}}
    ours = dataclasses.replace(named, p50_ms=2.0, floor_ms=1.6, extra=extra)
    theirs = dataclasses.replace(named, provider="pyg", p50_ms=5.0, extra=extra)
    header, first, second = run.table([ours, theirs]).splitlines()
    assert re.split(r" {2,}", header)[-5:] == ["p50 ms", "/ floor", "PyG /", "peer /", "status"]
    assert first.split()[-5:] == ["2.0000", "1.25", "2.50", "1.50", "ok"]
    assert second.split()[-5:] == ["5.0000", "-", "-", "-", "ok"]


@pytest.mark.usefixtures("untimed")
def test_transformer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_IN", 24), ("_HEADS", 2), ("_HIDDEN", 16), ("_CLASSES", 5), ("_WARM_UP", 0)):
        monkeypatch.setattr(transformer_step, name, value)
    made = bench.REGISTRY["transformer_step"]
    (case,) = made.cases(["tiny"])
    ours, theirs = made.rows(case, quick=True)
    assert (ours.status, ours.path, ours.mode) == ("ok", "fused", "step")
    assert theirs.status == "ok"
    assert (ours.heads, ours.head_dim, ours.dtype) == (2, 16, "bfloat16")
    if bench.device().type == "cuda":
        assert ours.extra["total_peak_mib"] > ours.peak_mib


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transformer_step_of_a_wrong_network_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench.REGISTRY["transformer_step"]
    case = {"graph": "tiny", "dtype": dtype, "mode": "step"}
    right = made.problem(**case)
    inputs = right.inputs
    monkeypatch.setattr(transformer_step, "_WARM_UP", 0)
    assert not right.check(made.providers["pyg"](inputs).results()).wrong
    swapped = dataclasses.replace(inputs.graph, edge_index=inputs.graph.edge_index[:, 1:])  # an edge is lost
    results = made.providers["pyg"](dataclasses.replace(inputs, graph=swapped)).results()
    assert right.check(results).wrong


def test_transformer_step_without_a_finite_loss_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.REGISTRY["transformer_step"]
    (case,) = made.cases(["tiny"])
    inputs = made.problem(**case).inputs
    inputs.x[3] = float("inf")
    with pytest.raises(ArithmeticError, match="the loss is nan after 2 steps"):
        made.providers["pyg"](inputs)


def test_transformer_build() -> None:
    made = bench.REGISTRY["transformer_build"]
    (case,) = made.cases(["tiny"])
    (row,) = made.rows(case, quick=True)
    assert (row.status, row.mode, row.extra["windows"]) == ("ok", "build", 6)
    if bench.device().type == "cuda":
        assert row.extra["total_peak_mib"] > row.peak_mib
