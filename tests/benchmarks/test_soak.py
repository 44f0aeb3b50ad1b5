from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sanitize, soak, soak_cases
from graphfuse import ops
from graphfuse.formats import quick
from graphfuse.kernels import launch
from graphfuse.kernels.run import Launch

CASES = {case.name: case for case in soak_cases.cases()}
FIELDS = {
    "name", "launches", "repeated", "compared", "wrong", "status", "message", "seconds",
    "gpu", "torch", "triton", "cuda", "commit", "date",
}  # fmt: skip
GATE, WINDOWS = "gated_skip/float32/7", "spmm/windows-few/float16/7"


def test_every_fused_op_has_configurations() -> None:
    # what computes weights for users is made of other ops
    public = {name for name in vars(ops) if callable(getattr(ops, name)) and not name.endswith("_weights")}
    assert set(soak_cases.OPS) == public == {case.op for case in CASES.values()}
    assert len(CASES) == len(soak_cases.cases())


def test_every_row_of_the_table_of_aggregation_is_there() -> None:
    # what each configuration forces is what its name says
    for dim in soak_cases.WIDTHS:
        for dtype in soak_cases.DTYPES:
            rows = {launch.spmm_window(dim, dtype.itemsize, None, load) for load in launch.Load}
            name = f"{str(dtype).removeprefix('torch.')}/{dim}"
            cases = [case for case in CASES.values() if case.name.startswith("spmm/windows-")]
            found = set()
            for case in cases:
                if case.name.endswith(name):
                    with case.forced():
                        load = launch.load(1, 1)
                        assert not launch.prefers_rows(1, 1, 1, 1, dim, dtype, False)
                    found.add(launch.spmm_window(dim, dtype.itemsize, None, load))
            assert found == rows
    with CASES["spmm/rows-many/float16/64"].forced():
        assert launch.spmm_row(64, None, 9, 9, 0).rows == 8
    with CASES["spmm/rows-long/float16/64"].forced():
        assert launch.spmm_row(64, None, 9, 9, 0).step == 32
    assert launch.spmm_row(64, None, 9, 9, 0).rows == 1


@pytest.mark.parametrize("nodes", [soak._FEW_NODES, soak._NODES])
def test_hubs_are_cut_in_both_directions(nodes: int, device: torch.device) -> None:
    with CASES[GATE].forced(soak._SHORT_SLICE if nodes == soak._FEW_NODES else None):
        edge_index, num_nodes, windows = soak_cases.make_graph(nodes, device)
        for walks in (windows.walks(False, False), windows.walks(True, False)):
            assert walks.forward.num_slots > 0 and walks.backward.num_slots > 0
    assert num_nodes == nodes and nodes % 16 != 0
    linked = torch.zeros(nodes, dtype=torch.bool, device=device)
    linked[edge_index.flatten()] = True
    assert 0 < linked.sum() < nodes and bool((edge_index[0] == edge_index[1]).any())
    assert edge_index.unique(dim=1).size(1) < edge_index.size(1)
    assert torch.equal(edge_index, soak_cases.random_edges(nodes, device))


@pytest.mark.parametrize(
    "name", [GATE, WINDOWS, "spmm/rows-many/bfloat16/1", "spmm_gemm/windows/float32/7x16/fused+scaled"]
)
def test_a_row_of_three_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_CHUNK", 2)
    row = soak.soak(CASES[name], 3, repeat=2, compare=3)
    assert (row["status"], row["message"], row["wrong"]) == ("ok", None, 0)
    assert (row["name"], row["launches"], row["repeated"], row["compared"]) == (name, 3, 2, 1)
    assert set(row) == FIELDS and row["seconds"] > 0
    json.dumps(row, allow_nan=False)


def test_every_launch_has_new_numbers_in_the_same_memory(device: torch.device) -> None:
    graph = soak_cases.make_graph(soak._FEW_NODES, device)
    data = soak_cases.make_problem(
        CASES["sparse_attention/windows/float16/8x8/dropout+self_loops+key_scale"], graph
    ).data
    everything = [*data.inputs.values(), *data._positive, *data._seeds]
    before = [(tensor.data_ptr(), tensor.detach().clone()) for tensor in everything]
    data.refill()
    assert len(everything) == 4
    for tensor, (address, numbers) in zip(everything, before, strict=True):
        assert tensor.data_ptr() == address and not torch.equal(tensor, numbers)


class Fault:
    """An op that goes wrong in one of its calls."""

    def __init__(self, op: Callable[..., torch.Tensor], call: int, factor: float) -> None:
        self.op, self.call, self.factor, self.calls = op, call, factor, 0

    def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        out = self.op(*arguments, **options)
        if self.calls != self.call:
            return out
        wrong = torch.ones_like(out)
        wrong[-1, -1] = self.factor  # of one number, in every gradient that passes it too
        return out * wrong


@pytest.mark.parametrize(
    ("call", "factor", "compare", "message"),
    [
        (6, float("nan"), 9, "1 not finite"),  # of the first launch come a repeat and three more to compare
        (6, float("inf"), 9, "1 not finite"),
        (2, 1.0001, 9, "1 different bits"),
        (1, 1.01, 1, "1 different bits, 1 missed; out: error"),
    ],
    ids=["nan", "inf", "bits", "error"],
)
def test_a_wrong_result_is_found(
    call: int, factor: float, compare: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "gated_skip", Fault(ops.gated_skip, call, factor))
    row = soak.soak(CASES[GATE], 3, repeat=9, compare=compare)
    assert row["status"] == "wrong" and row["wrong"] == len(message.split(";")[0].split(","))
    assert row["message"].startswith(message)


def test_memory_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_skip = ops.gated_skip

    def add_what_is_there(**given: torch.Tensor) -> torch.Tensor:
        out = gated_skip(**given)
        scratch = out.new_empty(1)
        return out + torch.where(scratch.isnan(), scratch, 0.0)

    torch.use_deterministic_algorithms(False)  # as users have it
    assert soak.soak(CASES[GATE], 1)["status"] == "ok"
    monkeypatch.setattr(ops, "gated_skip", add_what_is_there)
    row = soak.soak(CASES[GATE], 2, repeat=1, compare=9)
    assert row["status"] == "wrong" and row["wrong"] > 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "soak.jsonl"
    assert soak.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(CASES)
    assert soak.main(["gated_skip/*/1", "--launches", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == [
        f"gated_skip/{kind}/1" for kind in ("float16", "bfloat16", "float32")
    ]
    assert "3 configurations, 6 launches, 3 repeated, 3 compared; 0 of" in capsys.readouterr().out
    monkeypatch.setattr(ops, "gated_skip", Fault(ops.gated_skip, 1, 2.0))
    assert soak.main([GATE, "--launches", "1", "--out", str(out)]) == 1
    assert f"wrong: {GATE}: 1 different bits" in capsys.readouterr().out
    monkeypatch.setattr(ops, "gated_skip", None)
    assert soak.main([GATE, "--launches", "1", "--out", str(out)]) == 1
    assert f"error: {GATE}: TypeError" in capsys.readouterr().out
    assert soak.main(["gated_skip", "--seconds", "0", "--out", str(out)]) == 0
    assert "not run: 18 configurations" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        soak.main(["gated_skip", "none"])
    assert "no configuration is called none; --list" in capsys.readouterr().err


def test_time_cuts_a_configuration_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_CHUNK", 1)
    assert soak.soak(CASES[GATE], 9, end=0.0)["launches"] == 1


def test_jobs_share_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            commands.append(command)

        def wait(self) -> int:
            return len(commands) - 2

    monkeypatch.setattr("subprocess.Popen", Process)
    assert soak.main(["sddmm", "--jobs", "2", "--seconds", "9"]) == 0
    assert soak.main(["sddmm", "--jobs", "3"]) == 1
    assert [command[-1] for command in commands] == [
        f"--share={share}" for share in ("0/2", "1/2", "0/3", "1/3", "2/3")
    ]
    assert commands[0][1:-1] == ["-m", "benchmarks.soak", "sddmm", "--launches=2000", "--seconds=9.0"]


def test_the_suite_launches_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        # of the kernels of ops only the launches count: running them all takes the interpreter a minute
        monkeypatch.setattr(Launch, "__call__", lambda *_: None)
        build_structures = sanitize.build_structures

        def build_quickly(on: torch.device) -> None:
            monkeypatch.setattr(quick, "suits", lambda *_: True)
            build_structures(on)

        monkeypatch.setattr(sanitize, "build_structures", build_quickly)
    assert sanitize.run_suite(*([] if torch.cuda.is_available() else [43])) == 0
    said = json.loads(capsys.readouterr().out.removeprefix("suite: "))
    assert said["missing"] == [] and set(said["kernels"]) == sanitize.all_kernels()
    assert {"attention_window_kernel", "_spmm_merge_kernel", "lay_kernel"} < set(said["kernels"])


def test_a_kernel_that_is_not_launched_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "suite", lambda: [CASES["gated_skip/float16/1"]])
    monkeypatch.setattr(sanitize, "build_structures", lambda on: None)
    assert sanitize.run_suite(20) == 1
    missing = json.loads(capsys.readouterr().out.removeprefix("suite: "))["missing"]
    assert "_sddmm_row_kernel" in missing and "_gate_kernel" not in missing


SAID = 'suite: {"kernels": {"a_kernel": 2, "b_kernel": 1}, "missing": []}'
RACES = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)"


@pytest.mark.parametrize(
    ("lines", "status", "row"),
    [
        ([SAID, "========= ERROR SUMMARY: 0 errors"], 0, {"status": "ok", "errors": 0, "launches": 3}),
        ([SAID, "========= ERROR SUMMARY: 1 error"], 9, {"status": "wrong", "errors": 1}),
        ([SAID, RACES], 9, {"status": "wrong", "errors": 2, "warnings": 1}),
        (
            [SAID],
            0,
            {"status": "error", "errors": None, "message": "the sanitizer printed no summary; exit status 0"},
        ),
        (
            ["========= ERROR SUMMARY: 0 errors"],
            1,
            {"status": "error", "message": "the suite did not finish; exit status 1"},
        ),
        (
            [SAID.replace("[]", '["c_kernel"]'), "========= ERROR SUMMARY: 0 errors"],
            1,
            {"status": "error", "message": "not launched: c_kernel"},
        ),
    ],
    ids=["clean", "error", "races", "silent", "unfinished", "missing"],
)
def test_rows_of_the_sanitizer(
    lines: list[str], status: int, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, out = tmp_path / "compute-sanitizer", tmp_path / "rows.jsonl"
    printed = "\n".join(["========= COMPUTE-SANITIZER", *lines])
    environment = '__import__("os").environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")'
    program.write_text(
        f"#!{sys.executable}\nimport sys\nprint({printed!r})\n"
        f"print(sys.argv[2], {environment})\nsys.exit({status})\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(sanitize, "compile_suite", lambda processes: None)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    tools = ["memcheck", "racecheck"]
    assert sanitize.main(["--tool", *tools, "--out", str(out)]) == int(row["status"] != "ok")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [found["tool"] for found in rows] == tools
    for found in rows:
        assert row.items() <= found.items()
        assert {"kernels", "seconds", "gpu", "commit", "date"} <= set(found)
    assert sanitize.sanitize(str(program), "initcheck")[1].splitlines()[-1] == "initcheck 1"
    assert sanitize.sanitize(str(program), "synccheck")[1].splitlines()[-1] == "synccheck None"


def test_without_a_sanitizer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert sanitize.main([]) == 2
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err


@pytest.mark.parametrize("shares", [1, 3, 9])
def test_shares_of_the_suite_are_all_of_it(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    parts = [functools.partial(ran.append, part) for part in range(7)]
    monkeypatch.setattr(sanitize, "_parts", lambda num_nodes, on: parts)
    monkeypatch.setattr(sanitize, "all_kernels", set)
    for share in range(shares):
        assert sanitize.main(["--suite", "--share", str(share), str(shares)]) == 0
    assert sorted(ran) == list(range(7))


def test_a_share_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match=r"shares \[0, 1\] of the suite in 2 fail"):
        sanitize.compile_suite(2)
