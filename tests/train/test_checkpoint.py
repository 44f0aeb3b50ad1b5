"""A run that was stopped goes on to the same weights, and from no file that is not its own."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from graphfuse import RowWindows
from graphfuse.formats import save_windows
from graphfuse.train import checkpoint, loop
from graphfuse.train.checkpoint import Checkpoints
from graphfuse.train.config import TrainConfig
from graphfuse.train.datasets import Dataset
from tests.train._runs import batched, molecules, nodes, settings


class Killed(BaseException):
    """What no handler of errors catches, as a signal."""


def stop_at(epoch: int) -> Any:
    def log(run: TrainConfig, now: int, row: dict[str, float]) -> None:
        if now == epoch:
            raise Killed

    return log


def check_same(one: Path, other: Path) -> None:
    """All tensors but the times, and all numbers, are the same, bit for bit."""
    found, wanted = load_file(other), load_file(one)
    times, wanted_times = found.pop("history"), wanted.pop("history")
    assert found.keys() == wanted.keys() and any(name.endswith("exp_avg_sq") for name in found)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
    assert torch.equal(times[:, :3].nan_to_num(-1.0), wanted_times[:, :3].nan_to_num(-1.0))
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        assert first.metadata()["numbers"] == second.metadata()["numbers"]


def check_resume(run: TrainConfig, dataset: Dataset, tmp_path: Path, killed: int, every: int) -> loop.Result:
    """Trains at once, and again with a kill and another process's random numbers between."""
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    at_once = loop.train(run, dataset, False, Checkpoints(whole))
    with pytest.raises(Killed):
        loop.train(run, dataset, False, Checkpoints(stopped, every), stop_at(killed))
    assert len(load_file(stopped)["history"]) == (killed - 1) // every * every
    torch.manual_seed(99)
    resumed = loop.train(run, dataset, False, Checkpoints(stopped, every, stopped))
    check_same(whole, stopped)
    for name in ("test_accuracy", "val_accuracy", "best_epoch", "epochs"):
        assert getattr(resumed, name) == getattr(at_once, name)
    assert resumed.train_s >= max(row[-1] for row in resumed.curve) > 0
    return at_once


@pytest.mark.parametrize(
    "given",
    [
        {"model": "gcn"},
        {"model": "agnn", "eval_every": 2},
        {"model": "transformer", "schedule": "cosine", "min_lr": 1e-4, "attention_dropout": 0.3},
        {"model": "gat", "schedule": "plateau", "lr_patience": 1, "attention_dropout": 0.3},
        {"model": "graph_transformer", "dtype": "fp16", "clip_norm": 0.1},
        {"model": "gcn", "loader": "neighbor", "batch_size": 4, "num_neighbors": [3, 2]},
        {"model": "gatv2", "loader": "random_node", "batch_size": 12, "dtype": "bf16"},
    ],
    ids=lambda given: "-".join(str(value) for value in given.values() if isinstance(value, str)),
)
def test_a_killed_run_goes_on(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    check_resume(settings(**given, epochs=10), nodes(), tmp_path, killed=8, every=3)


def test_batches_of_graphs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run = batched("transformer", epochs=6, edge_features=True)
    check_resume(run, molecules(), tmp_path, killed=4, every=1)


def test_a_run_that_is_over_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run, dataset = settings(epochs=2), nodes()
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    loop.train(run, dataset, False, Checkpoints(first))
    loop.train(run, dataset, False, Checkpoints(second, resume=first))
    check_same(first, second)


def test_patience_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run = settings(epochs=40, patience=6, schedule="plateau", lr_patience=2)
    whole = check_resume(run, nodes(), tmp_path, killed=5, every=2)
    assert whole.epochs < 40
    before = (tmp_path / "stopped.safetensors").read_bytes()
    over = loop.train(run, nodes(), False, Checkpoints(resume=tmp_path / "stopped.safetensors"))
    assert over.epochs == whole.epochs and over.val_accuracy == whole.val_accuracy  # nothing was left to do
    assert (tmp_path / "stopped.safetensors").read_bytes() == before


def test_fused_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.warmup", lambda *_: None)  # the interpreter is slow
    monkeypatch.setattr(loop.tasks.NodeTask, "scores", lambda *_: torch.ones(2))
    run = settings(epochs=2, num_layers=1, attention_dropout=0.5, model="gat", weight_decay=[0.0])
    check_resume(run, nodes(15), tmp_path, killed=2, every=1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("model", ["gcn", "gat", "agnn", "transformer", "graph_transformer"])
def test_runs_on_a_gpu_go_on(model: str, captured: bool, tmp_path: Path) -> None:
    given = {"attention_dropout": 0.5} if model in ("gat", "transformer") else {}
    run = settings(model, epochs=10, cuda_graph=captured, schedule="cosine", **given)
    check_resume(run, nodes(), tmp_path, killed=8, every=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given", [{}, {"dtype": "bf16"}, {"dtype": "fp16", "schedule": "plateau", "clip_norm": 1.0}]
)
def test_batches_on_a_gpu_go_on(given: dict[str, Any], tmp_path: Path) -> None:
    run = batched("transformer", epochs=6, edge_features=True, **given)
    check_resume(run, molecules(), tmp_path, killed=5, every=2)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    path = tmp_path / "run.safetensors"
    loop.train(settings(), nodes(), False, Checkpoints(path))
    return path


def refused(path: Path, message: str, run: TrainConfig | None = None) -> None:
    with pytest.raises(ValueError, match=message) as error:
        loop.train(run or settings(), nodes(), False, Checkpoints(resume=path))
    assert str(path) in str(error.value) and "wanted" in str(error.value) and "(got" in str(error.value)


def test_a_death_while_saving_leaves_the_last_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def dies(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(before[:100])
        raise Killed

    monkeypatch.setattr("safetensors.torch.save_file", dies)
    with pytest.raises(Killed):
        loop.train(settings(), nodes(), False, Checkpoints(saved))
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    refused(saved, "no checkpoint that this run can go on from: wanted a complete safetensors file")


def test_a_flipped_bit_is_refused(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-9] ^= 4
    saved.write_bytes(content)
    refused(saved, "it is damaged.*name a file that `graphfuse train --checkpoint` wrote")


def test_a_changed_header_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    assert content.count(b'\\"epochs\\": 2') == 1
    saved.write_bytes(content.replace(b'\\"epochs\\": 2', b'\\"epochs\\": 9'))
    refused(saved, "it is damaged", settings(epochs=9))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(__file__).with_name("executed"),))


def test_foreign_files_are_refused_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_windows(path, RowWindows.from_edge_index(nodes().data.edge_index))
    refused(path, "wanted a file of the format graphfuse.checkpoint, schema 1 .got graphfuse.row_windows")
    save_file({"x": torch.ones(2)}, path)
    refused(path, "got None, schema None")
    torch.save({"model": Bomb()}, path)
    refused(path, "wanted a complete safetensors file")
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "wanted a complete safetensors file")
    assert not Path(__file__).with_name("executed").exists()
    with pytest.raises(FileNotFoundError):
        loop.train(settings(), nodes(), False, Checkpoints(resume=tmp_path / "nowhere"))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        checkpoint.read(tmp_path, settings(), "cpu")


def test_another_run_is_refused(saved: Path) -> None:
    refused(
        saved, r"wanted lr=0.5, seed=3 \(got lr=0.01, seed=0\); give the settings", settings(lr=0.5, seed=3)
    )
    here, elsewhere = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    found, numbers = checkpoint.read(saved, settings(), here)
    message = rf"another device: wanted {elsewhere} \(got {here}\); go on where it ran"
    with pytest.raises(ValueError, match=message):
        checkpoint.read(saved, settings(), elsewhere)
    same = dataclasses.replace(settings(), device="cuda:0" if here == "cuda" else here)  # what auto was
    loop.train(same, nodes(), False, Checkpoints(resume=saved))
    assert numbers["lr"] == [0.01, 0.01] and len(found["history"]) == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.convs.0.lin.weight", None, r"wanted model.convs.0.lin.weight float32\[8, 6\] \(got none\)"),
        ("model.convs.0.lin.weight", torch.ones(8, 7), r"float32\[8, 6\] \(got float32\[8, 7\]\)"),
        ("optimizer.0.exp_avg", None, r"wanted optimizer.0.exp_avg float32\[8\] \(got none\)"),
        ("optimizer.1.step", torch.ones(1), r"wanted optimizer.1.step float32\[\]"),
        ("rng.cpu", torch.ones(3, dtype=torch.uint8), r"wanted rng.cpu uint8"),
        ("stranger", torch.ones(3), r"wanted stranger not \(got float32\[3\]\)"),
        ("history", torch.ones(2, 5, dtype=torch.float64), r"wanted history float64\[epochs, 6\]"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the files are of CPUs")
def test_tensors_of_another_model_are_refused(
    saved: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    tensors, numbers = checkpoint.read(saved, settings(), "cpu")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    checkpoint.save(saved, settings(), "cpu", tensors, numbers)
    refused(saved, message)
