"""The sweep of the launch table: what it changes, for which calls, and what it says of the results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench, cases, floors, graphs, tune
from graphfuse.formats import walk
from graphfuse.kernels import attention, launch
from tests import stub_kernel

CASE = ("--graphs", "tiny", "--only", "shape=4x32", "dtype=bfloat16", "mode=fwd")


def sweep(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = tmp_path / "tune.jsonl"
    code = tune.main([*arguments, "--out", str(out)])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_every_combination_is_timed_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = sweep(tmp_path, "attention", "attention_window", *CASE, "--vary", "step=16,32", "stages=1")
    wanted = [{}, {"step": 16, "stages": 1}, {"step": 32, "stages": 1}]
    assert code == 0 and {row["status"] for row in rows} == {"ok"}
    assert all(row["p50_ms"] > 0 and row["function"] == "attention_window" for row in rows)
    assert [row["change"] for row in rows] == wanted
    assert "as it is" in capsys.readouterr().out


def test_no_floor_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def problem(**case: Any) -> Any:
        asked.append(floors.gather_ms(graphs.load("tiny", bench.device()).windows, False, 64))
        return found(**case)

    found, watched = bench.REGISTRY["attention"].problem, copy.copy(bench.REGISTRY["attention"])
    object.__setattr__(watched, "problem", problem)
    monkeypatch.setitem(bench.REGISTRY, "attention", watched)
    monkeypatch.setattr(floors, "_time", lambda *gather: 1.0)
    code, rows = sweep(tmp_path, "attention", "attention_window", *CASE, "--vary", "step=16")
    assert code == 0 and asked == [None] and not any("floor_ms" in row for row in rows)
    assert floors.gather_ms(graphs.load("tiny", bench.device()).windows, False, 64) == 1.0


@pytest.mark.parametrize("interpreting", [True, False])
def test_what_is_launched_while_it_is_prepared(
    interpreting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA graph's launches are; and the record is wherever the benchmark has it."""
    watched, launched = copy.copy(bench.REGISTRY["attention"]), []
    own, problem = watched.providers["graphfuse"], watched.problem

    def prepared(hidden: list[Any]) -> bench.Prepared:
        found = own(hidden[0])
        results = found.results()
        launched.append(launch.attention_window(4, 32, 2, False, False, launch.Load.FEWEST).step)
        return found._replace(call=lambda: None, results=lambda: results)

    def hidden(**case: Any) -> bench.Problem:
        made = problem(**case)
        return dataclasses.replace(made, inputs=[made.inputs])

    object.__setattr__(watched, "providers", {"graphfuse": prepared})
    object.__setattr__(watched, "problem", hidden)
    monkeypatch.setitem(bench.REGISTRY, "attention", watched)
    monkeypatch.setattr(tune, "INTERPRETING", interpreting)
    monkeypatch.setattr(tune, "_compile", lambda calls: [call() for call in calls])
    code, rows = sweep(tmp_path, "attention", "attention_window", *CASE, "--vary", "step=16,32")
    assert code == 0 and [row["status"] for row in rows] == ["ok"] * 3
    assert launched[-2:] == [16, 32] and len(launched) == (3 if interpreting else 6)


def test_what_is_compiled_beforehand_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[dict[str, Any]] = []
    launched = stub_kernel.launch(monkeypatch, met.append, registers=128)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    tune._compile([lambda: 1 / 0, lambda: launched((), (), True, 0)])  # what fails is for the sweep to say
    launched((), (), True, 0)
    assert len(met) == 2 and met[0] == met[1] and met[0]["launch_pdl"]


def test_a_change_reaches_its_calls_alone() -> None:
    call = (8, 8, 2, launch.RowLoad.NORMAL)
    table = launch.gat_row(*call, False)
    with tune.changed("gat_row", cases.pairs(["backward=True"]), {"warps": 7}):
        assert launch.gat_row(*call, False) == table
        assert launch.gat_row(*call, True).warps == 7
    assert launch.gat_row(*call, True).warps != 7


def test_merges_and_lengths_of_slices_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    cut: list[tuple[float, int]] = []
    again = walk.longer_slices

    def longer_slices(w: walk.Walk, times: float) -> walk.Walk:
        cut.append((times, again(w, times).num_slots))
        return again(w, times)

    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 16)
    monkeypatch.setattr(attention, "longer_slices", longer_slices)
    graphs.load.cache_clear()  # its windows were cut by another rule, as are those to come
    request.addfinalizer(graphs.load.cache_clear)
    code, rows = sweep(tmp_path, "attention", "slices", *CASE, "--vary", "times=1,2.5")
    assert code == 0 and [row["change"] for row in rows] == [{}, {"times": 1}, {"times": 2.5}]
    assert {row["status"] for row in rows} == {"ok"}
    found = dict(cut)
    assert found[1] > found[2.5] >= 0
    one_head = ("--graphs", "tiny", "--only", "shape=1x64", "dtype=float16", "mode=fwd")  # slices as they are
    code, rows = sweep(tmp_path, "attention", "of_softmax", *one_head, "--vary", "slots=1,2", "rows=4")
    assert code == 0 and {row["status"] for row in rows} == {"ok"}
    wanted = [{}, {"slots": 1, "rows": 4}, {"slots": 2, "rows": 4}]
    assert [row["change"] for row in rows if row["function"] == "of_softmax"][:3] == wanted


def test_a_sweep_that_is_cut_short_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, met = tune._measure, []

    def once(*given: Any) -> dict[str, Any]:
        met.append(given)
        if len(met) > 1:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(tune, "_measure", once)
    out = tmp_path / "tune.jsonl"
    sweep_of_two = ["attention", "attention_window", *CASE, "--vary", "step=16,32", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        tune.main(sweep_of_two)
    assert [json.loads(line)["change"] for line in out.read_text().splitlines()] == [{}]


def test_wrong_results_and_errors_are_said(tmp_path: Path) -> None:
    half = ("attention", "attention_window", *CASE, "--vary", "block_dim=16")  # of 32 features
    code, rows = sweep(tmp_path, *half)
    assert code == 1 and [row["status"] for row in rows] == ["ok", "wrong"]
    none = ("attention", "attention_window", *CASE, "--vary", "step=0")
    code, rows = sweep(tmp_path, *none)
    assert code == 0 and [row["status"] for row in rows[-2:]] == ["ok", "error"]
    code, rows = sweep(tmp_path, "attention", "slices", *CASE, "--vary", "times=0.5")
    assert code == 0 and [row["status"] for row in rows[-2:]] == ["ok", "error"]
    assert "not shorter (got times=0.5)" in rows[-1]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("attention", "prefers_rows", "--vary", "step=1"),
            "the launch table has no function prefers_rows",
        ),
        (
            ("attention", "attention_row", "--vary", "steps=1"),
            "there is no steps in what is returned; it has block_dim,",
        ),
        (("attention", "of_softmax", "--vary", "step=1"), "it has slots, rows, stages, warps"),
        (("attention", "slices", "--vary", "step=1"), "it has times"),
        (("attention", "attention_row", "--vary", "step"), "write NAME=VALUE"),
        (
            ("attention", "attention_row", "--vary", "step=1", "--calls", "head=1"),
            "attention_row has no parameter head; it has heads, dim, size, load, backward, edge_dim",
        ),
    ],
)
def test_what_makes_no_sweep(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune.main(arguments)
    assert message in capsys.readouterr().err
    assert tune.main(["attention", "attention_row", "--vary", "step=1", "--only", "mode=sideways"]) == 2


@pytest.mark.parametrize("value", ["True", "70"])
def test_calls_that_nobody_makes(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["attention", "attention_window", *CASE, "--vary", "step=16", "--calls", f"heads={value}"]
    assert tune.main(sweep) == 2
    wanted = f"tiny 4x32 bfloat16 fwd makes no call of attention_window with heads={value.lower()}"
    assert wanted in capsys.readouterr().err
