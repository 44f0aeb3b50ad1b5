"""What is read of Nsight Compute's output, and which cases are refused."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import profile
from benchmarks.bench import Prepared, Problem
from graphfuse import RowWindows, ops

OUTPUT = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","spmm_kernel","GPU Speed Of Light Throughput","Duration","us","1,480.5"
"0","7","spmm_kernel","Launch Statistics","Function Cache Configuration","","CachePreferNone"
"0","7","spmm_kernel","Scheduler Statistics","","","",""
"1","7","spmm_kernel","GPU Speed Of Light Throughput","Duration","us","3"
"""


def test_launches() -> None:
    first, second = profile.launches(OUTPUT)
    assert first == (
        "spmm_kernel",
        {
            "GPU Speed Of Light Throughput: Duration [us]": 1480.5,
            "Launch Statistics: Function Cache Configuration": "CachePreferNone",
        },
    )
    assert second[1] == {"GPU Speed Of Light Throughput: Duration [us]": 3.0}
    assert not list(profile.launches("==ERROR== no permission"))


def test_a_case_is_wanted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["additive", "--only", "shape=3x3", "--kernels", "k", "--out", str(tmp_path / "rows.jsonl")]
    assert profile.main(arguments) == 2
    assert "no case of additive is shape=3x3" in capsys.readouterr().err


def test_rows_are_of_their_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, out = tmp_path / "ncu", tmp_path / "rows.jsonl"
    # of the first case two launches, of the second one
    third = OUTPUT.splitlines()[-1].replace('"1"', '"2"').replace('"3"', '"4"')
    said = f"launched: 2\nlaunched: 1\n{OUTPUT}{third}\n"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    arguments = ["spmm", "--graphs", "cora", "--only", "dtype=float16", "mode=fwd"]
    arguments += ["--kernels", "spmm_kernel", "--out", str(out)]
    assert profile.main([*arguments, "--launches", "2"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"]["head_dim"] for row in rows] == ["64", "64", "128"]
    took = [row["metrics"]["GPU Speed Of Light Throughput: Duration [us]"] for row in rows]
    assert took == [1480.5, 3.0, 4.0]
    assert profile.main(arguments) == 0  # one launch of each kernel
    assert [json.loads(line)["case"]["head_dim"] for line in out.read_text().splitlines()[3:]] == [
        "64",
        "128",
    ]
    program.write_text("#!/bin/sh\necho no permission\n")
    assert profile.main(arguments) == 1


def test_launches_are_counted_by_case(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [{"graph": "cora", "shape": 1}, {"graph": "cora", "shape": 2}]
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1], [1, 0]], device=device), (2, 2))

    def provider(times: int) -> Prepared:
        def call() -> None:
            for _ in range(times):
                ops.spmm(windows, torch.ones(2, 4, device=device))

        return Prepared(call, list, "-", {})

    def problem(graph: str, shape: int) -> Problem:
        return Problem({}, shape, device, lambda results: None)

    bench = mock.Mock(problem=problem, providers={"graphfuse": provider})
    profile.call(bench, plan, ["_spmm_row_kernel", "_spmm_window_kernel"])
    assert capsys.readouterr().out == "launched: 1\nlaunched: 2\n"
