"""Commands that run programs of the repository."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from graphfuse import checkout
from graphfuse.cli import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        (["bench"], []),
        (["bench", "spmm", "--graphs", "cora", "--quick"], ["spmm", "--graphs", "cora", "--quick"]),
        (["bench", "--only", "mode=fwd", "--list"], ["--only", "mode=fwd", "--list"]),
        (
            ["tune", "spmm", "spmm_window", "--vary", "stages=3"],
            ["spmm", "spmm_window", "--vary", "stages=3"],
        ),
    ],
)
def test_benchmarks_of_the_checkout(
    arguments: list[str], passed_on: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = importlib.import_module("benchmarks.run" if arguments[0] == "bench" else "benchmarks.tune")
    given: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        given.append(arguments)
        return 1

    monkeypatch.setattr(program, "main", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != ROOT])
    assert main(arguments) == 1 and given == [passed_on]


def test_a_checkout_is_found_from_elsewhere(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from graphfuse import cli
sys.path = [path for path in sys.path if path != {str(ROOT)!r}]  # as where the command is installed
sys.exit(cli.main(["bench", "spmm", "--graphs", "cora", "--quick", "--list"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["spmm", "graph=cora"]), done.stderr


def test_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert main(["bench", "spmm"]) == 2
    assert f"not of the package (looked in {tmp_path}); clone it" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "benchmarks.run", None)
    assert main(["bench", "spmm"]) == 2
    assert "which is not installed; run: pip install graphfuse[bench]" in capsys.readouterr().err
