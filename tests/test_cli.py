"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import graphfuse.env
from graphfuse.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["graphfuse"] == graphfuse.__version__
    wanted = {"GCNConv": [], "TransformerConv": [], "GraphTransformerLayer": []}
    assert found["layers"] == wanted  # with a GPU, or the interpreter
    assert found["kernel_cache"]["path"]
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "GCNConv          fused" in text and "torch_geometric" in text


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    assert "all well" in capsys.readouterr().out

    def broken(*args: object) -> None:
        raise AssertionError("wrong number")

    monkeypatch.setattr(graphfuse.env, "_check_spmm", broken)
    assert main(["doctor"]) == 1
    assert "FAIL" in (text := capsys.readouterr().out) and "wrong number" in text


def test_train_ends_with_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter would take minutes on 2,708 nodes
    status = main(["train", str(CONFIGS / "quickstart.yaml"), "epochs=3", "--json", "--layers", "graphfuse"])
    assert status == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["path"] == "generic" and found["seeds"] == [0]
    for key in ("test_accuracy", "test_accuracy_std", "epoch_ms", "peak_mib", "reasons", "versions"):
        assert key in found


def test_print_config_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(CONFIGS / "cora_gcn.yaml"), "lr=0.5", "--print-config"]) == 0
    assert "lr: 0.5" in capsys.readouterr().out
    assert main(["train", "--list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["quickstart", "cora"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a configuration file"),
        (["train", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "dataset=nope"], "unknown data set 'nope'; there are"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "foo=1"], "--foo"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "--seeds", "0"], "--seeds must be at least 1"),
        (["paint"], "invalid choice"),
    ],
)
def test_mistakes_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "graphfuse", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == graphfuse.__version__
