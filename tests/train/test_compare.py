"""Runs over seeds, with both kinds of layers: the lines they leave, the table, plots and trackers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from graphfuse.cli import main
from graphfuse.train import curves, datasets, loop, report
from graphfuse.train.config import TrainConfig
from graphfuse.train.trackers import tracking
from tests.train._runs import molecules, nodes, settings

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter is slow
    monkeypatch.setattr(datasets, "load", lambda *_: nodes())


def compare(seeds: int = 3, **given: Any) -> tuple[dict[str, Any], dict[str, list[loop.Result]]]:
    return report.run(settings(**given), seeds, True, None, progress=False)


def test_both_train_and_leave_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    found, runs = report.run(settings(seed=4), 2, True, None, False, results=path)
    *lines, summary = map(json.loads, path.read_text().splitlines())
    assert summary == json.loads(json.dumps(found))
    assert [(line["layers"], line["seed"]) for line in lines] == [
        ("graphfuse", 4), ("pyg", 4), ("graphfuse", 5), ("pyg", 5),
    ]  # fmt: skip
    for line in lines:
        assert line["record"] == "run" and line["config"]["layers"] == line["layers"]
        assert TrainConfig(**line["config"]).seed == line["seed"]
        result = runs[line["layers"]][line["seed"] - 4]
        assert line["test_accuracy"] == result.test_accuracy and line["epoch_ms"] == result.epoch_ms
        for key in ("train_s", "time_to_accuracy_s", "setup_ms", "peak_mib", "versions", "commit", "date"):
            assert key in line
        assert "curve" not in line
    for key in ("dataset", "model", "cuda_graph", "device", "seeds", "path", "reasons", "pyg", "ratio"):
        assert key in summary


def test_what_a_file_of_results_has_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    whole, _ = report.run(settings(), 3, True, None, False, results=path)
    lines = path.read_text().splitlines()
    first, other = json.loads(lines[0]), json.loads(lines[4]) | {"device": "another"}
    del first["setup_mib"]  # which lines of before 2026-11-23 have not
    foreign = ["1", "[]", "{}", '{"record": "run"}']  # a file may hold what others wrote
    path.write_text("\n".join([*foreign, json.dumps(first), *lines[1:4], json.dumps(other), lines[5][:40]]))
    trained = []
    train = loop.train
    monkeypatch.setattr(loop, "train", lambda *given: trained.append(given[0]) or train(*given))
    monkeypatch.setenv("GRAPHFUSE_COMMIT", "later")
    again, _ = report.run(settings(), 3, True, None, False, results=path, go_on=True)
    assert [(config.layers, config.seed) for config in trained] == [("graphfuse", 2), ("pyg", 2)]
    assert again["seeds"] == [0, 1, 2] and again["test_accuracy"] == whole["test_accuracy"]
    assert again["pyg"]["test_accuracy"] == whole["pyg"]["test_accuracy"]
    assert (again["kept"], again["commits"]) == (4, sorted([str(whole["commit"]), "later"]))
    report.run(settings(lr=0.5), 1, False, None, False, results=path, go_on=True)
    assert trained[2:] == [settings(lr=0.5)]  # of other settings the file has none


def test_the_summary_is_of_the_runs() -> None:
    found, runs = compare(lr=0.1, epochs=4, target=20.0)
    ours, theirs = ([run.test_accuracy for run in runs[kind]] for kind in ("graphfuse", "pyg"))
    mean = sum(ours) / 3
    assert found["test_accuracy"] == pytest.approx(mean)
    assert found["test_accuracy_std"] == pytest.approx((sum((one - mean) ** 2 for one in ours) / 2) ** 0.5)
    assert (found["p_value"], found["test"]) == report._welch(ours, theirs)
    assert found["ratio"]["epoch_ms"] == found["epoch_ms"] / found["pyg"]["epoch_ms"]
    assert found["reached"] == 3 and found["time_to_accuracy_s"] > 0


def test_the_p_value_is_welchs() -> None:
    ours, theirs = [81.0, 82.5, 80.0, 83.0], [70.0, 71.0, 70.5, 70.7]
    p_value, says = report._welch(ours, theirs)
    assert p_value == stats.ttest_ind(ours, theirs, equal_var=False).pvalue < 0.01
    assert says == f"p = {p_value:.3g} (Welch's t-test, two-sided, 4 seeds each)"
    assert report._welch([80.0], [80.0]) == (None, "a test needs two seeds or more: --seeds 20")
    assert report._welch([80.0] * 3, [80.0] * 3) == (None, "a test needs runs that differ")


def test_the_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_COMMIT", "c0ffee")
    assert compare(1)[0]["commit"] == "c0ffee"
    monkeypatch.setenv("GRAPHFUSE_COMMIT", "")
    assert report._commit() != ""


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    found, _ = compare(2)
    assert found["p_value"] is None
    assert "needs scipy, which is not installed; run: pip install graphfuse[train]" in report.table(found)


def test_the_table() -> None:
    found, _ = compare(2, target=101.0)
    lines = report.table(found).splitlines()
    assert lines[0].split() == [
        "layers", "test", "accuracy", "epoch", "ms", "training", "s", "to", "target", "s", "peak", "MiB",
        "path",
    ]  # fmt: skip
    assert lines[1].startswith("graphfuse ") and " +- " in lines[1] and lines[1].endswith("generic")
    assert lines[2].startswith("pyg ") and lines[2].split()[6] == "-"  # the target was not reached
    assert lines[3].startswith("ratio ")
    assert lines[4].startswith("set-up of the first run, graphfuse, ms: windows ") and "warmup" in lines[4]
    assert lines[-2].startswith("same accuracy? ")
    assert lines[-1] == "not fused: GRAPHFUSE_DISABLE=1 is set"


def test_errors_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", lambda *_: molecules("mae"))
    run = settings(loader="graphs", batch_size=3, weight_decay=[0.0])
    found, _ = report.run(run, 1, False, None, False)
    assert "test error" in report.table(found) and f"{found['test_accuracy']:.4f}" in report.table(found)


def test_runs_that_diverge_are_null_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = dataclasses.replace(molecules("mae"), evaluate=lambda *_: math.nan)
    monkeypatch.setattr(datasets, "load", lambda *_: dataset)
    path = tmp_path / "results.jsonl"
    given = ["loader=graphs", "batch_size=3", "epochs=1", "weight_decay=[0]", "--seeds", "2", "--json"]
    given += ["--compare", "--results", str(path)]

    def no_number(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    for more in ([], ["--continue"]):
        assert main(["train", QUICKSTART, *given, *more]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[1].split()[1:4] == ["nan", "+-", "nan"]
        assert "same accuracy? not known: a run diverged" in printed
        lines = [json.loads(line, parse_constant=no_number) for line in path.read_text().splitlines()]
        assert json.loads(printed[-1], parse_constant=no_number) == lines[-1]
        assert lines[-1]["test_accuracy"] is lines[-1]["test_accuracy_std"] is None
    assert [line["record"] for line in lines] == ["run"] * 4 + ["summary"] * 2 and lines[-1]["kept"] == 4
    for line in lines[:4]:
        assert (line["test_accuracy"], line["val_accuracy"], line["best_epoch"]) == (None, None, 0)
        assert line["eval_ms"] > 0


def test_out_of_memory_is_an_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train, tried = loop.train, []

    def fails(config: TrainConfig, *arguments: Any) -> loop.Result:
        tried.append(config.layers)
        if config.layers == "pyg":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(config, *arguments)

    monkeypatch.setattr(loop, "train", fails)
    path = tmp_path / "results.jsonl"
    found, runs = report.run(settings(), 2, True, None, False, results=path)
    assert tried == ["graphfuse", "pyg", "graphfuse"]
    assert found["pyg"] == {"layers": "pyg", "error": "out of memory"} and found["p_value"] is None
    assert [line.get("error") for line in map(json.loads, path.read_text().splitlines())] == [
        None, "out of memory", None, None,
    ]  # fmt: skip
    assert "pyg        out of memory" in report.table(found)
    assert len(curves.draw(runs, "title").axes) == 3


def test_the_plot_is_of_the_curves() -> None:
    _, runs = compare(2, epochs=5, eval_every=2)
    left, middle, right = curves.draw(runs, "title").axes
    for axes, column, epochs in ((left, 0, [1, 2, 3, 4, 5]), (middle, 1, [2, 4, 5])):
        line = axes.lines[0]
        wanted = [sum(run.curve[k - 1][column] for run in runs["graphfuse"]) / 2 for k in epochs]
        assert line.get_xdata().tolist() == epochs and line.get_ydata().tolist() == pytest.approx(wanted)
    assert [bar.get_height() for bar in right.patches] == [
        max(run.peak_mib for run in runs[kind]) for kind in ("graphfuse", "pyg")
    ]
    with pytest.raises(ValueError, match="needs a run that ended"):
        curves.draw({"pyg": []}, "title")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", QUICKSTART, "epochs=3", "hidden_channels=4"]
    assert main([*command, "--compare", "--seeds", "2", "--plot", "curves.png", "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["ratio"].keys() >= {"epoch_ms", "train_s", "test_accuracy"}
    assert {"results: runs/quickstart.jsonl", "plot: curves.png"} <= set(printed)
    assert len(Path("runs/quickstart.jsonl").read_text().splitlines()) == 5
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    saved = ["--checkpoint", "run.safetensors"]
    assert main([*command, *saved, "--checkpoint-every", "2", "--results", "one.jsonl"]) == 0
    assert main([*command, "--resume", "run.safetensors", "--results", "one.jsonl"]) == 0
    first, _, second, _ = map(json.loads, Path("one.jsonl").read_text().splitlines())
    assert first["test_accuracy"] == second["test_accuracy"] and second["epochs"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1 (got 0)"),
        (["--continue"], "--continue needs the lines of earlier runs: give --results FILE too"),
        (["--continue", "--results", "a", "--plot", "a.png"], "which the lines that --continue reads lack"),
        (["--continue", "--results", "a", "--checkpoint", "b"], "which the lines that --continue reads lack"),
        (["--checkpoint-every", "2"], "--checkpoint-every N needs --checkpoint FILE and N > 0 (got 2)"),
        (["--checkpoint", "a", "--checkpoint-every", "-1"], "needs --checkpoint FILE and N > 0 (got -1)"),
        (["--checkpoint", "a", "--compare"], "are for one run: leave out --seeds and --compare"),
        (["--resume", "a", "--seeds", "2"], "are for one run"),
        (["--resume", "nowhere"], "nowhere"),
        (["--resume", QUICKSTART], "is no checkpoint that this run can go on from"),
        (["--plot", "a.pdf"], "a plot must end in .png or .svg"),
        (
            ["device=gpu"],
            "auto, cpu or a GPU that is here, such as cuda:0 (got gpu: Expected",
        ),
        (["device=meta"], "auto, cpu or a GPU that is here, such as cuda:0 (got meta: of no use here); set"),
        (
            ["device=cuda:99"],
            "`device` must be auto, cpu or a GPU that is here, such as cuda:0 (got cuda:99",
        ),
        (["device=cpu", "--cuda-graph"], "`cuda_graph` must be false on a CPU"),
        (["loader=graphs", "batch_size=2"], "`loader` must be full, neighbor or random_node"),
    ],
)
def test_mistakes_exit_with_2(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", QUICKSTART, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_layer_that_must_fuse_and_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    assert main(["train", QUICKSTART]) == 2
    told = "graphfuse train: error: GCNConv is not fused: GRAPHFUSE_DISABLE=1 is set (GRAPHFUSE_STRICT=1"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--checkpoint", "nowhere/a"],
            "--checkpoint must lie in a folder that is there (got nowhere/a)",
        ),
        (["--plot", "nowhere/a.png"], "--plot must lie in a folder that is there (got nowhere/a.png); make"),
        (["--checkpoint", "folder"], "--checkpoint must be a file that can be written to (got folder); name"),
        (
            ["--results", "folder"],
            "--results must be a file that can be written to (got folder); name another",
        ),
        (
            ["--results", "closed"],
            "--results must be a file that can be written to (got closed); name another",
        ),
        (["--results", "file/a"], "--results must lie in a folder that is there (got file/a); make it first"),
        (["--checkpoint", "a", "--results", "./a"], "--checkpoint and --results must be two files (got ./a"),
        (["--plot", "a.png", "--results", "a.png"], "--plot and --results must be two files (got a.png for"),
        (["--resume", "file", "--results", "file"], "--resume and --results must be two files (got file for"),
    ],
)
def test_files_that_cannot_be_written_are_known_before_a_run(
    option: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    Path("closed").touch()
    access = os.access  # which lets root write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "closed" and access(path, mode))
    monkeypatch.setattr(loop, "train", lambda *_: pytest.fail("it trained first"))
    assert main(["train", QUICKSTART, *option]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "option", "message"),
    [
        ("matplotlib.figure", ["--plot", "a.png"], "plots need matplotlib"),
        ("wandb", ["--wandb"], "--wandb needs wandb, which is not installed; run: pip install wandb"),
        ("torch.utils.tensorboard", ["--tensorboard", "a"], "--tensorboard needs tensorboard"),
    ],
)
def test_what_is_not_installed(
    module: str,
    option: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["graphfuse", *option])  # PyG's helper looks there
    monkeypatch.setattr(loop, "train", lambda *_: pytest.fail("it trained first"))
    assert main(["train", QUICKSTART, *option]) == 2
    assert message in capsys.readouterr().err


def test_trackers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written: dict[str, list[tuple[float, int]]] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == "folder"

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.setdefault(name, []).append((value, epoch))

        def close(self) -> None:
            written["closed"] = []

    board = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run = settings(epochs=3, seed=2)
    with tracking(run, wandb=True, tensorboard="folder") as log:  # without --wandb in argv PyG only prints
        result = loop.train(run, nodes(), False, None, log)
    assert written["graphfuse/2/val"] == [(row[1], k + 1) for k, row in enumerate(result.curve)]
    assert written["graphfuse/2/loss"] == [(row[0], k + 1) for k, row in enumerate(result.curve)]
    assert "closed" in written
    assert capsys.readouterr().out.count("Layers: graphfuse, Seed: 002, Epoch: 00") == 3
    with tracking(run, wandb=False, tensorboard=None) as log:
        assert log is None
