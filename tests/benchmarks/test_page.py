"""The page of results: it is what the committed files give, and it says what small files hold."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchmarks import page, page_plots
from benchmarks.bench import Record, to_json
from graphfuse.train import config as config_of_file
from graphfuse.train import datasets, report
from tests.train._runs import nodes, settings

ROOT = Path(__file__).parents[2]
CORA = ROOT / "configs" / "cora_gcn.yaml"
KINDS = ("accuracy", "epoch-time", "memory", "time-to-accuracy", "floor", "speedup")
README = f"before\n{page._MARKS[0]}\nold\n{page._MARKS[1]}\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of results, with one empty GPU."""
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    return tmp_path / "results"


def written(results: Path) -> str:
    """The page of a folder."""
    readme = results.parent / "README.md"
    readme.write_text(README)
    page.write(results, results.parent / "docs", readme)
    return (results.parent / "docs" / "results.md").read_text()


def add(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def measured(provider: str = "graphfuse", p50_ms: float | None = 2.0, **given: Any) -> dict[str, Any]:
    fields = {"graph": "g", "head_dim": 64, "dtype": "float16", "mode": "fwd", "gpu": "GPU 1"}
    fields |= {"commit": "c1", "date": "2026-01-01T00:00:00+00:00"}
    return to_json(Record(given.pop("op", "spmm"), provider, p50_ms=p50_ms, **fields | given))


def trained(cuda_graph: bool = False, commit: str = "c1", **given: Any) -> dict[str, Any]:
    """A summary of ``graphfuse train --compare``, as :mod:`graphfuse.train.report` leaves it."""
    facts = {"device": "GPU 1", "commit": commit, "date": f"2026-01-01T00:00:0{commit[1]}+00:00"}
    config = dataclasses.asdict(config_of_file.load(CORA)[0])
    config |= {"cuda_graph": cuda_graph, "target": 80.0}
    ours = {
        "layers": "graphfuse", "metric": "accuracy", "test_accuracy": 81.5, "test_accuracy_std": 0.5,
        "epoch_ms": 1.25, "eval_ms": 0.75, "train_s": 0.4, "time_to_accuracy_s": 0.125, "reached": 4,
        "setup_ms": {"windows": 1.5, "warmup": 20.0}, "peak_mib": 33.0, "path": "fused", "reasons": [],
    }  # fmt: skip
    theirs = ours | {"layers": "pyg", "test_accuracy": 80.5, "path": "pyg", "setup_ms": {"warmup": 7.25}}
    theirs["test_accuracy_std"] = 0.75
    shared = {"record": "summary", "dataset": "cora", "config": config, "seeds": [0, 1, 2, 3, 4]}
    return {**shared, **ours, **facts, "pyg": theirs, **given}


def lines_with(text: str, *parts: str) -> list[str]:
    return [
        line for line in text.splitlines() if line.startswith("|") and all(part in line for part in parts)
    ]


def test_the_committed_page_is_of_the_committed_files(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    page.write(ROOT / "benchmarks" / "results", tmp_path, readme)
    again = "is not what the result files give; run: python -m benchmarks.page"
    assert (tmp_path / "results.md").read_text() == (ROOT / "docs/results.md").read_text(), again
    assert readme.read_text() == (ROOT / "README.md").read_text(), again
    plots, committed = (
        {path.name: path for path in (at / "results").iterdir()} for at in (tmp_path, ROOT / "docs")
    )
    assert plots.keys() == committed.keys()
    for name, path in plots.items():
        assert page_plots.data_of(path) == page_plots.data_of(committed[name]), f"{name} {again}"


def test_every_result_file_has_a_place() -> None:
    names = {path.stem for path in (ROOT / "benchmarks/results").glob("*/*.jsonl")}
    apart = {"profile_attention", "profile", "timeline", "tune", "floors"}  # see benchmarks/README.md
    assert {name for name in names - apart if not name.startswith("train_")} <= page.page_kernels.SAYS.keys()


def test_no_files_give_no_tables(results: Path) -> None:
    text = written(results)
    assert "|" not in text and "##" not in text and not list((results.parent / "docs/results").iterdir())
    assert (results.parent / "README.md").read_text() == README.replace("old\n", "\n\n")


def test_what_is_written_repeats(results: Path) -> None:
    add(results / "gpu/spmm.jsonl", measured(floor_ms=1.0), measured("pyg", 5.0))
    add(results / "gpu/train_cora_gcn.jsonl", *trained_with_runs())
    first = written(results)
    plots = {path.name: path.read_bytes() for path in (results.parent / "docs/results").iterdir()}
    (results.parent / "docs/results/gone.svg").touch()
    assert written(results) == first
    assert {path.name: path.read_bytes() for path in (results.parent / "docs/results").iterdir()} == plots
    assert set(plots) == set(re.findall(r"\(results/(\S+)\)", first))
    assert set(plots) == {f"gpu-{kind}.svg" for kind in KINDS}


def test_the_newest_commit_of_a_case_is_shown(results: Path) -> None:
    later = {"commit": "c2", "date": "2026-02-01T00:00:00+00:00"}
    path = results / "gpu/spmm.jsonl"
    # dates count, not the order in the file; of two rows of a provider at one commit the later
    add(path, measured(p50_ms=4.0, **later | {"date": "2026-02-01T00:00:01+00:00"}))
    add(path, measured(p50_ms=3.0, **later), measured("pyg", 6.0, **later))
    add(path, measured(p50_ms=1.5), measured("pyg", 9.0), measured("torch.sparse", 1.0))
    (line,) = lines_with(written(results), "spmm | g |")
    assert line == "| spmm | g | 64 | float16 | fwd | 4.00 | - | 6.00 | 1.50 | - | c2 | 2026-02-01 |"


def test_ratios_to_floor_pyg_and_the_fastest_other(results: Path) -> None:
    peers = {"extra": {"peers": {"far": 9.0, "near": 3.0, "pyg": 0.1}}}
    add(results / "gpu/spmm.jsonl", measured(floor_ms=1.6, **peers), measured("pyg", 5.0, **peers))
    add(results / "gpu/spmm.jsonl", measured("torch.sparse", 7.0, **peers))
    add(results / "gpu/spmm.jsonl", measured(dtype="float32"), measured("torch.sparse", 1.0, dtype="float32"))
    text = written(results)
    (line,) = lines_with(text, "| float16 |")
    assert "| 2.00 | 1.25 | 5.00 | 2.50 | 1.50 (near, recorded) |" in line
    (line,) = lines_with(text, "| float32 |")
    assert "| 2.00 | - | - | - | 0.500 (torch.sparse) |" in line
    (line,) = lines_with(text, "`spmm`")
    assert line == "| `spmm` | 2 | 1.25, 1.25, 1.25 | 2.50, 2.50, 2.50 | 0.500, 1.00, 1.50 | 0 |"
    found = page_plots.data_of(results.parent / "docs/results/gpu-floor.svg")
    assert found == {"spmm": {"fwd": [1.25]}}


@pytest.mark.parametrize(
    "facets",
    [{"kind": "gat"}, {"captured": True}, {"dropout": 0.3}, {"grad": True}, {"in_dim": 7}, {"ids": "a"}],
    ids=str,
)
def test_cases_that_differ_are_kept_apart(facets: dict[str, Any], results: Path) -> None:
    add(results / "gpu/spmm.jsonl", measured(), measured(extra=facets), measured("pyg", 5.0, extra=facets))
    first, second = lines_with(written(results), "| g |")
    assert "| 2.00 | - | - | - |" in first and "| 2.00 | - | 5.00 | 2.50 |" in second


def test_failures_are_rows(results: Path) -> None:
    full = {"status": "oom", "message": "CUDA out of memory. `x` | " + 80 * "y"}
    add(results / "gpu/spmm.jsonl", measured(), measured("pyg", None, **full))
    add(results / "gpu/spmm.jsonl", measured("torch.sparse", None, status="wrong"))
    text = written(results)
    (line,) = lines_with(text, "| 2.00 |")
    assert "| 2.00 | - | oom | - | - |" in line
    oom, wrong = lines_with(text.split("#### No result")[1], "| g |")
    assert "| pyg | oom | c1 | 2026-01-01 | `CUDA out of memory. 'x' \\| yyy" in oom and "yyy...`" in oom
    assert "| torch.sparse | wrong | c1 | 2026-01-01 | `wrong` |" in wrong
    assert lines_with(text, "`spmm`")[0].endswith("| 2 |")


def test_memory_of_a_process_is_not_drawn(results: Path) -> None:
    add(results / "cpu/train_cora_gcn.jsonl", trained(device="cpu"))
    written(results)
    plots = {path.name for path in (results.parent / "docs/results").iterdir()}
    assert plots == {"cpu-epoch-time.svg", "cpu-time-to-accuracy.svg"}


def test_two_gpus_have_their_own_rows(results: Path) -> None:
    add(results / "gpu/spmm.jsonl", measured())
    add(results / "cpu/spmm.jsonl", measured(p50_ms=70.0, gpu="cpu"), measured("pyg", 140.0, gpu="cpu"))
    add(results / "other/train_cora_gcn.jsonl", trained(device="GPU 2"))
    text = written(results)
    one, two, cpu = re.split(r"^## ", text, flags=re.MULTILINE)[1:]  # a CPU comes last
    assert [part.splitlines()[0] for part in (one, two, cpu)] == ["GPU 1", "GPU 2", "cpu"]
    assert lines_with(one, "| 2.00 | - | - | - |") and not lines_with(one, "140")
    assert lines_with(cpu, "| 70.0 | - | 140 | 2.00 |") and "Training on" not in cpu
    plots = {path.name for path in (results.parent / "docs/results").iterdir()}
    assert plots == {"cpu-speedup.svg", *(f"other-{kind}.svg" for kind in KINDS[1:4])}
    assert all("GPU 2, c1" in line for line in lines_with(two, "cora_gcn"))


def test_targets_are_those_of_one_gpu(results: Path) -> None:
    add(results / "gpu/spmm.jsonl", measured(floor_ms=1.0))
    assert "#### Targets" not in written(results)
    add(results / "nvidia-h200/spmm.jsonl", measured(floor_ms=1.0))
    _, of_gpu = written(results).split("#### Targets")
    assert "| spmm, half precision, floors | at most 1.15 | 1 | 2.00 | missed |" in of_gpu


def test_a_training_has_accuracy_times_and_start_up(results: Path) -> None:
    add(results / "gpu/train_cora_gcn.jsonl", trained(), trained(cuda_graph=True))
    text = written(results)
    where = "GPU 1, c1, 2026-01-01 | `graphfuse train configs/cora_gcn.yaml target=80.0 --seeds 5 --compare"
    eager, captured = lines_with(text, "| accuracy |")
    p_value = stats.ttest_ind_from_stats(81.5, 0.5, 5, 80.5, 0.75, 5, equal_var=False).pvalue
    shown = f"| accuracy | 81.50 ± 0.50 | 80.50 ± 0.75 | 5 | +1.00 | {p_value:.3g} |"
    assert eager == f"| cora_gcn | eager, target=80.0 {shown} {where}` |"
    assert captured == f"| cora_gcn | CUDA graph, target=80.0 {shown} {where} --cuda-graph` |"
    costs = "| 1.25 | 0.750 | 0.400 | 0.125 (4 of 5 reached 80) | 33.0 |"
    assert (
        len(lines_with(text, "| graphfuse | fused ", costs))
        == len(lines_with(text, "| PyG | pyg ", costs))
        == 2
    )
    assert len(lines_with(text, "| graphfuse | 1.50 | 20.0 | - | - |", where)) == 2
    assert len(lines_with(text, "| PyG | - | 7.25 | - | - |", where)) == 2
    assert not (results.parent / "docs/results/gpu-accuracy.svg").exists()  # no lines of single runs


def test_the_newest_training_of_a_mode_is_shown(results: Path) -> None:
    path = results / "gpu/train_cora_gcn.jsonl"
    add(path, trained(commit="c3"), trained(commit="c2", cuda_graph=True), trained(commit="c1", epoch_ms=9.0))
    assert re.findall(r"GPU 1, (c\d)", "\n".join(lines_with(written(results), "| accuracy |"))) == [
        "c3",
        "c2",
    ]


def test_a_training_that_did_not_fit_is_a_row(results: Path) -> None:
    full = {"layers": "pyg", "error": "out of memory"}
    add(results / "gpu/train_cora_gcn.jsonl", trained(pyg=full, p_value=None))
    text = written(results)
    assert lines_with(text, "| 81.50 ± 0.50 | out of memory | 5 | - | - |")
    assert lines_with(text, "| PyG | out of memory | - | - | - | - | - |")
    assert page_plots.data_of(results.parent / "docs/results/gpu-memory.svg") == {
        "cora_gcn, eager, target=80.0": {"graphfuse": [33.0]}
    }


def test_first_results_had_fewer_fields(results: Path) -> None:
    kept = {"layers", "test_accuracy", "test_accuracy_std", "epoch_ms", "peak_mib", "path"}
    whole = trained()
    old = {key: whole[key] for key in kept | {"dataset", "device", "seeds", "commit"}}
    old |= {"config": "configs/cora_gcn.yaml", "cuda_graph": True, "date": "2026-01-01"}
    old |= {"pyg": {key: whole["pyg"][key] for key in kept}}
    add(results / "gpu/train_cora_gcn.jsonl", old)
    text = written(results)
    assert lines_with(text, "| cora_gcn | CUDA graph |", "--seeds 5 --compare --cuda-graph`")
    assert lines_with(text, "| graphfuse | fused | 1.25 | - | - | - | 33.0 |")


def trained_with_runs() -> list[dict[str, Any]]:
    """The lines of a whole call: single runs, of which another call left some too, and the summary."""
    summary = trained()
    lines = []
    for kind, seed, score in (
        ("graphfuse", 0, 81.0),
        ("pyg", 0, 80.0),
        ("graphfuse", 1, 82.0),
        ("pyg", 1, 81.0),
    ):
        config = summary["config"] | {"layers": kind, "seed": seed}
        facts = {key: summary[key] for key in ("commit", "date", "device")}
        run = {
            "record": "run",
            "layers": kind,
            "seed": seed,
            "test_accuracy": score,
            "config": config,
            **facts,
        }
        lines += [run, run | {"date": "2025-12-31T00:00:00+00:00", "test_accuracy": 10.0}]
    return [*lines, summary]


def test_seeds_are_drawn_with_their_own_call(results: Path) -> None:
    add(results / "gpu/train_cora_gcn.jsonl", *trained_with_runs())
    written(results)
    found = page_plots.data_of(results.parent / "docs/results/gpu-accuracy.svg")
    assert found == {"cora_gcn, eager, target=80.0": {"graphfuse": [81.0, 82.0], "pyg": [80.0, 81.0]}}


def test_lines_of_a_real_training(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter is slow
    monkeypatch.setattr(datasets, "load", lambda *_: nodes())
    path = results / "gpu/train_small_gcn.jsonl"
    found, runs = report.run(
        settings(lr=0.1, epochs=4, target=20.0, device="cpu"), 4, True, None, False, results=path
    )
    text = written(results)
    p_value = re.findall(r"\| ([^|]*) \| cpu, ", lines_with(text, "| accuracy |")[0])[0]
    expected = found["p_value"]
    assert p_value == ("-" if expected is None else f"{expected:.3g}")
    assert len(lines_with(text, "4 of 4 reached 20")) == 2
    data = page_plots.data_of(results.parent / "docs/results/gpu-accuracy.svg")
    scores = {kind: [run.test_accuracy for run in of_kind] for kind, of_kind in runs.items()}
    assert data == page_plots.rounded({"small_gcn, eager": scores})
    assert all(math.isfinite(score) for of_kind in scores.values() for score in of_kind)


def test_the_readme_is_changed_between_its_marks_alone(results: Path) -> None:
    h200 = results / "nvidia-h200"
    fields = {"mode": "fwd+bwd", "floor_ms": 1.0}
    add(h200 / "spmm.jsonl", measured(**fields), measured("pyg", 5.0, **fields))
    add(h200 / "spmm.jsonl", measured("torch.sparse", 3.0, **fields), measured(dtype="float64", **fields))
    add(h200 / "spmm.jsonl", measured(head_dim=128, p50_ms=8.0, **fields), measured(p50_ms=9.0))
    add(h200 / "train_cora_gcn.jsonl", trained())
    add(h200 / "row_windows.jsonl", measured(num_edges=1234567) | {"op": "row_windows"})
    written(results)
    text = (results.parent / "README.md").read_text()
    assert text.startswith(f"before\n{page._MARKS[0]}\n") and text.endswith(f"\n{page._MARKS[1]}\nafter\n")
    assert lines_with(text, "| g |") == [
        "| g | 2.00 | 2.50 | 1.50 | - | - | - | c1 |", "| g | 1,234,567 | 2.00 | c1 |"
    ]  # fmt: skip
    assert lines_with(text, "| cora_gcn |", "| 5 | 81.50 ± 0.50 | 80.50 ± 0.75 | 1.25 | 1.25 | 1.00 | c1 |")
    once = text
    page.write(results, results.parent / "docs", results.parent / "README.md")
    assert (results.parent / "README.md").read_text() == once


def test_the_readme_shows_attention_and_steps(results: Path) -> None:
    """The smallest graph first, one head and four; a provider without a time by what became of it."""
    h200 = results / "nvidia-h200"
    one = {"op": "attention", "floor_ms": 1.0, "extra": {"peers": {"fused3s": 6.0, "pyg": 0.1}}}
    four = {"op": "attention", "heads": 4, "head_dim": 32, "mode": "fwd+bwd", "graph": "large"}
    add(h200 / "attention.jsonl", measured(**four, num_edges=9), measured("pyg", None, **four, status="oom"))
    add(h200 / "attention.jsonl", measured(**one, num_edges=5), measured("pyg", 5.0, **one))
    add(h200 / "attention.jsonl", measured(**one | {"head_dim": 128}), measured(**one | {"dtype": "float32"}))
    step = {"op": "epochs", "mode": "step", "head_dim": 16, "heads": 8, "extra": {"kind": "gat"}}
    add(h200 / "epochs.jsonl", measured(**step), measured("pyg", 9.0, **step))
    add(h200 / "epochs.jsonl", measured("pyg compiled", 3.0, **step))
    written(results)
    text = (results.parent / "README.md").read_text()
    assert [line for line in lines_with(text, "x") if "heads" not in line] == [
        "| g | 1x64 | 2.00 | 2.00 | 2.50 | 3.00 (Fused3S) | - | - | - | - | c1 |",
        "| large | 4x32 | - | - | - | - | 2.00 | - | oom | - | c1 |",
        "| gat | g | 8x16 | float16 | 2.00 | 4.50 | 1.50 | c1 |",
    ]
    plots = re.findall(r"!\[(.+)\]\(docs/results/nvidia-h200-(\w+)\.svg\)", text)
    assert [name for _, name in plots] == ["floor", "speedup"]


def test_a_floor_that_is_no_gather_is_in_no_plot(results: Path) -> None:
    add(results / "gpu/spmm.jsonl", measured(floor_ms=1.6))
    add(results / "gpu/blocksparse.jsonl", measured(op="blocksparse", floor_ms=0.02))
    assert "blocksparse" in written(results)
    found = page_plots.data_of(results.parent / "docs/results/gpu-floor.svg")
    assert found == {"spmm": {"fwd": [1.25]}}


def test_ablations_tell_what_each_decision_buys(results: Path) -> None:
    """What was not measured is not there."""
    add(results / "gpu" / "ablation.jsonl", *(
        measured(provider, p50_ms, op="ablation", head_dim=width)
        for provider, p50_ms, width in
        (("graphfuse", 2.0, 64), ("not cut", 3.0, 64), ("graphfuse", 1.0, 128), ("not sorted", 1.5, 128))
    ))  # fmt: skip
    lines = lines_with(written(results).split("#### ablation")[1].split("<details>")[0], "float16")
    assert [line.split("|")[-4:-1] for line in lines] == [
        [" 2.00 ", " 1.50 ", " - "],
        [" 1.00 ", " - ", " 1.50 "],
    ]
