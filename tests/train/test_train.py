"""Configurations, data sets and the loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from graphfuse.train import config, datasets, loop, report
from graphfuse.train.config import TrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configurations_are_flat_and_complete(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    assert set(written) == {field.name for field in dataclasses.fields(TrainConfig)}
    settings, text = config.load(path)
    assert dataclasses.asdict(settings) == written
    assert yaml.safe_load(text) == written


def test_overrides() -> None:
    settings, text = config.load(CONFIGS[0], ["lr=0.5", "weight_decay=[0.1,0.2]", "cuda_graph=true"])
    assert (settings.lr, settings.weight_decay, settings.cuda_graph) == (0.5, [0.1, 0.2], True)
    assert "lr: 0.5" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hidden=3", "--hidden"),
        ("lr=fast", "lr"),
        ("layers=dgl", "layers"),
        ("lr", "key=value"),
        ("num_layers=3", "one value for each of the 3 layers"),
        ("epochs=0", "`epochs` must be at least 1"),
    ],
)
def test_wrong_settings_exit_with_2(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        config.load(CONFIGS[0], [override])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_key_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(CONFIGS[0].read_text() + "learning_rate: 0.1\n")
    with pytest.raises(SystemExit) as exit_:
        config.load(path)
    assert exit_.value.code == 2
    assert "learning_rate" in capsys.readouterr().err


def test_generated_data_is_the_same_everywhere_and_learnable() -> None:
    data, again = datasets.load("quickstart"), datasets.load("quickstart")
    assert torch.equal(data.edge_index, again.edge_index) and torch.equal(data.x, again.x)
    assert data.num_nodes == 2708 and data.x.size(1) == 1433 and int(data.y.max()) == 6
    assert int(data.edge_index.sum()) == 28694782  # of torch's CPU generator, seed 0
    assert [int(data[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [140, 500, 1000]
    assert not (data.train_mask & (data.val_mask | data.test_mask)).any()
    normalized = datasets.load("quickstart", normalize_features=True)
    torch.testing.assert_close(normalized.x.sum(1), torch.ones(2708))


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHFUSE_DATA", str(tmp_path / "a"))
    assert datasets.data_root() == tmp_path / "a"
    assert datasets.data_root(str(tmp_path / "b")) == tmp_path / "b"
    monkeypatch.delenv("GRAPHFUSE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.data_root() == tmp_path / "graphfuse" / "data"


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(root: str) -> None:
        raise OSError("no network")

    monkeypatch.setitem(datasets._DATASETS, "cora", ("planetoid", offline))
    with pytest.raises(datasets.DatasetError, match=r"not in .*planetoid.*--data-root or GRAPHFUSE_DATA"):
        datasets.load("cora", str(tmp_path))
    with pytest.raises(datasets.DatasetError, match="unknown data set 'nope'; there are quickstart, cora"):
        datasets.load("nope")


def small() -> tuple[TrainConfig, object]:
    data = datasets.planted_partition(num_nodes=80, num_classes=3, num_words=30)
    data.val_mask = ~data.train_mask
    data.test_mask = ~data.train_mask
    return TrainConfig("quickstart", hidden_channels=8, epochs=12, input_dropout=0.0), data


def test_fused_training_follows_pygs(device: torch.device) -> None:
    settings, data = small()
    settings = dataclasses.replace(settings, dropout=0.0, epochs=6)
    data = data.to(device)
    ours = loop.train(settings, data, progress=False)
    theirs = loop.train(dataclasses.replace(settings, layers="pyg"), data, progress=False)
    assert (ours.path, ours.reasons) == ("fused", [])
    assert (theirs.path, theirs.reasons) == ("pyg", [])
    assert ours.val_accuracy == pytest.approx(theirs.val_accuracy, abs=2.0)
    assert ours.epoch_ms > 0 and ours.peak_mib > 0


def test_runs_repeat(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, data = small()
    monkeypatch.setattr(datasets, "load", lambda *args: data)
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    settings = dataclasses.replace(settings, device=str(device))
    first, second = (report.run(settings, 2, True, None, progress=False) for _ in range(2))
    assert first["test_accuracy"] == second["test_accuracy"]
    assert first["test_accuracy"] == pytest.approx(first["pyg"]["test_accuracy"], abs=1e-9)
    assert first["path"] == "generic" and first["reasons"] == ["GRAPHFUSE_DISABLE=1 is set"]
    text = report.table(first)
    for part in ("graphfuse", "pyg", "ratio", "generic", "not fused: GRAPHFUSE_DISABLE=1 is set"):
        assert part in text


def test_capture_is_refused_on_a_cpu() -> None:
    settings, data = small()
    with pytest.raises(ValueError, match=r"`cuda_graph` must be false on a CPU"):
        loop.train(dataclasses.replace(settings, cuda_graph=True), data, progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_capturing_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match="capturing a CUDA graph needs a GPU"):
        loop.captured(lambda: None)


@pytest.mark.gpu
def test_a_capture_returns_what_its_step_returns() -> None:
    count = torch.zeros(1, device="cuda")
    replay = loop.captured(lambda: count.add_(1).clone(), warmup=2)
    assert [replay().item() for _ in range(3)] == [3.0, 4.0, 5.0]  # the capture itself computes nothing
    assert replay() is replay()


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["graphfuse", "pyg"])
def test_captured_training_learns_as_well(layers: str) -> None:
    settings, _ = config.load(CONFIGS[-1], ["epochs=60", f"layers={layers}"])
    data = datasets.load("quickstart", normalize_features=True).to("cuda")
    eager = loop.train(settings, data, progress=False)
    captured = loop.train(dataclasses.replace(settings, cuda_graph=True), data, progress=False)
    assert captured.test_accuracy == pytest.approx(eager.test_accuracy, abs=4.0)
    assert captured.epoch_ms < eager.epoch_ms


@pytest.mark.data
def test_cora_beside_pyg(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [] if torch.cuda.is_available() else ["epochs=60"]
    if shorter:  # the interpreter would take hours on 2,708 nodes
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    settings, _ = config.load(CONFIGS[0].with_name("cora_gcn.yaml"), shorter)
    found = report.run(settings, 2, True, str(data_root), progress=False)
    assert found["test_accuracy"] > 78.0
    assert abs(found["test_accuracy"] - found["pyg"]["test_accuracy"]) <= 1.5  # of two runs; 20 seeds: 0.5
