"""What is read of Nsight Compute's output, and which cases are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import profile

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


def test_one_case_is_wanted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "rows.jsonl")]
    assert profile.main(["additive", "--graphs", "cora", "--kernels", "k", *out]) == 2
    assert "one is wanted" in capsys.readouterr().err


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{OUTPUT}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    only = ["--only", "kind=gat", "shape=8x8", "mode=fwd"]
    arguments = ["additive", "--graphs", "cora", *only, "--kernels", "spmm_kernel", "--launches", "2"]
    out = tmp_path / "rows.jsonl"
    assert profile.main([*arguments, "--out", str(out)]) == 0
    assert out.read_text().count('"kernel": "spmm_kernel"') == 2
    program.write_text("#!/bin/sh\necho no permission\n")
    assert profile.main([*arguments, "--out", str(out)]) == 1
