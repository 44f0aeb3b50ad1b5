"""Two trees timed in turns: what each is asked, and what is said of them. The trees are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against

CASES = ("spmm", "--graphs", "cora", "--only", "head_dim=64", "dtype=float16")
# what a worker asks of a tree
PARTS = {
    "__init__": "",
    "run": "",
    "floors": "import contextlib\nunmeasured = contextlib.nullcontext",
    "bench": """
from types import SimpleNamespace as Some
import os, sys

def problem(mode, **case):
    print("not an answer")
    open("prepared", "a").write("1")
    open("cache", "w").write(os.environ.get("TRITON_CACHE_DIR", ""))
    if mode == "fwd+bwd":
        {at_backward}
    return Some(inputs=None, device="cpu", check=lambda results: Some(wrong={wrong}, value=0.25))

def machine():
    return {{"commit": {name!r}}}

provider = lambda inputs: Some(call=None, results=lambda: None)
REGISTRY = {{"spmm": Some(problem=problem, providers={{"graphfuse": provider}})}}
""",
    "cases": """
as_text = str

def add_arguments(parser):
    parser.add_argument("bench")
    parser.add_argument("--graphs", nargs="+")
    parser.add_argument("--only", nargs="+")

def chosen(given):
    assert (given.graphs, given.only) == (["cora"], ["head_dim=64", "dtype=float16"])
    return [{{"graph": "cora", "head_dim": 64, "dtype": "float16", "mode": m}} for m in ("fwd", "fwd+bwd")]
""",
    "timing": """
from types import SimpleNamespace as Some
import itertools

turns = itertools.count()
release = lambda: None
time_call = lambda call, device, seconds: Some(p50_ms={ms} * (1 + seconds * next(turns)))
""",
}


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes stand-ins of this tree and of another."""

    def make(**others: Any) -> Path:
        for name in ("here", "there"):
            given = {"name": name, "ms": 2.0, "wrong": False, "at_backward": "pass"}
            given |= others if name == "here" else {"ms": 4.0}
            (tmp_path / name / "benchmarks").mkdir(parents=True)
            for part, text in PARTS.items():
                path = tmp_path / name / "benchmarks" / f"{part}.py"
                path.write_text(text if part == "floors" else text.format(**given))
        monkeypatch.setattr(against, "HERE", tmp_path / "here")
        return tmp_path / "there"

    return make


def compared(tree: Path, *others: str) -> tuple[int, list[dict[str, Any]]]:
    out = tree.parent / "out.jsonl"
    code = against.main([str(tree), *CASES, "--out", str(out), *others])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def test_turns(trees: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = compared(trees(), "--rounds", "4", "--seconds", "0.5")
    assert code == 0 and [row["case"] for row in rows] == ["cora 64 float16 fwd", "cora 64 float16 fwd+bwd"]
    first = rows[0]
    assert (first["here"], first["there"]) == ({"commit": "here"}, {"commit": "there"})
    # each turn takes half as long again: both were asked equally often
    assert (first["here_ms"], first["there_ms"]) == (2.0 * 1.75, 4.0 * 1.75)
    assert (first["ratio_p20"], first["ratio"], first["ratio_p80"]) == (0.5, 0.5, 0.5)
    captured = capsys.readouterr()
    assert "| cora 64 float16 fwd | 3.5000 | 7.0000 | 0.500 | 0.500 to 0.500 |" in captured.out
    assert "not an answer" not in captured.out


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"wrong": True}, "its result is off by 0.25"),
        ({"at_backward": "raise MemoryError('no room')"}, "MemoryError: no room"),
        ({"at_backward": "sys.exit(3)"}, "the process ended with status 3"),
    ],
)
def test_what_goes_wrong_is_said(
    fault: dict[str, Any], says: str, trees: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = compared(trees(**fault))
    assert code == 1 and rows[-1]["failed"] == {"here": says} and "ratio" not in rows[-1]
    assert f"here: {says}" in capsys.readouterr().out
    assert ("ratio" in rows[0]) == ("wrong" not in fault)  # the other case is not lost


def test_a_run_that_is_cut_short_keeps_its_rows(trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, met = against._compare, []

    def once(workers: Any, name: str, given: Any) -> dict[str, Any]:
        met.append(name)
        if len(met) > 1:
            raise KeyboardInterrupt
        return compare(workers, name, given)

    monkeypatch.setattr(against, "_compare", once)
    tree = trees()
    with pytest.raises(KeyboardInterrupt):
        compared(tree)
    rows = [json.loads(line) for line in (tree.parent / "out.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["cora 64 float16 fwd"]


def test_what_a_tree_compiles_is_its_own(trees: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tree = trees()
    assert compared(tree)[0] == 0
    assert Path((tree.parent / "here" / "cache").read_text()) == tmp_path
    there = Path((tree / "cache").read_text())
    assert there.parent == tmp_path and there.name.startswith("there-")


def test_compiled_before_anything_is_timed(trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = trees()
    monkeypatch.setattr(against, "INTERPRETING", False)
    assert compared(tree)[0] == 0
    for place in (tree, tree.parent / "here"):
        assert (place / "prepared").read_text() == "1111"  # each case once before it is timed


def test_what_is_no_tree(tmp_path: Path, trees: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        against.main([str(tmp_path), *CASES])
    assert "is no checkout of graphfuse: it has no benchmarks/run.py" in capsys.readouterr().err
    tree = trees()
    assert against.main([str(tree), "spmm", "--only", "mode=sideways"]) == 2
    with pytest.raises(SystemExit, match="2"):
        against.main([str(tree), *CASES, "--rounds", "0"])
    assert "--rounds is at least 1 (got 0)" in capsys.readouterr().err
