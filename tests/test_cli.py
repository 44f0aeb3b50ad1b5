"""The command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.utils import from_scipy_sparse_matrix

import graphfuse.env
from graphfuse import RowWindows, clear_cache
from graphfuse.cli import main
from graphfuse.formats import load_windows
from graphfuse.formats.cache import row_windows
from graphfuse.train import datasets

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
LAYERS = {"GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "TransformerConv", "GraphTransformerLayer"}
EDGES = [[0, 1, 2, 2], [1, 2, 0, 0]]  # one of them twice


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_CHECK", "1")
    monkeypatch.setenv("TRITON_OTHER", "yes")
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {"graphfuse", "python", "torch", "torch_geometric", "numpy", "triton", "cuda", "driver"}
    assert set(found["versions"]) == names
    assert found["versions"]["graphfuse"] == graphfuse.__version__
    assert found["layers"] == {name: [] for name in LAYERS}  # with a GPU, or the interpreter
    assert found["kernel_cache"]["path"]
    assert found["environment"]["GRAPHFUSE_CHECK"] == "1" and found["environment"]["GRAPHFUSE_STRICT"] is None
    assert found["environment"]["TRITON_OTHER"] == "yes"
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +fused$", text, re.MULTILINE) for name in LAYERS)
    assert re.search(r"^  GRAPHFUSE_CHECK +1$", text, re.MULTILINE) and "torch_geometric" in text
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    assert main(["env"]) == 0
    assert capsys.readouterr().out.count("GRAPHFUSE_DISABLE=1 is set") == len(LAYERS)


def test_env_knows_every_layer_variable_and_extra() -> None:
    kinds = {name for name, kind in vars(graphfuse.nn).items() if hasattr(kind, "why_not_fused")}
    assert kinds == LAYERS == set(graphfuse.env._LAYERS)
    page = (ROOT / "docs/environment.md").read_text()
    assert set(graphfuse.env.VARIABLES) == set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    text = (ROOT / "pyproject.toml").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("train = ", "bench = ", "scatter = "))]
    extras = set(re.findall(r'"(\w+)>=', " ".join(lines)))
    assert len(extras) > 4 and extras <= set(graphfuse.env.OPTIONAL)


def test_module_runs_without_gpu_home_or_triton() -> None:
    code = """
import runpy, sys
sys.modules["triton"], sys.argv = None, ["graphfuse", "env"]
runpy.run_module("graphfuse", run_name="__main__")  # as `python -m graphfuse`
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HOME": "/dev/null"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "GPUs:\n  none" in done.stdout
    assert "/dev/null/.triton/cache (NOT writable)" in done.stdout
    assert done.stdout.count("the tensors are on the CPU") == len(LAYERS)


def test_a_kernel_cache_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # as in a folder that another user keeps to themselves, which is none to root
    path = tmp_path / ("long" * 100)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    assert graphfuse.env.kernel_cache() == {"path": str(path), "writable": False}


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "all well" in text and "hint" not in text
    for name in LAYERS:
        assert re.search(rf"^ok   {name} equals .* forward and backward \(kernels\)$", text, re.MULTILINE)
    assert torch.equal(torch.get_rng_state(), state)


def test_doctor_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: object) -> None:
        raise AssertionError("wrong number")

    monkeypatch.setattr(graphfuse.env, "_check_spmm", broken)
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # layers on PyG's path, for speed
    # a gradient that is a thousandth off, in one layer
    forward = graphfuse.nn.AGNNConv.forward
    monkeypatch.setattr(
        graphfuse.nn.AGNNConv,
        "forward",
        lambda layer, x, edge_index: forward(layer, x + 0.001 * (x - x.detach()), edge_index),
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert text.count("FAIL aggregation") == 6 and "AssertionError: wrong number" in text
    assert text.count("FAIL ") == 7 and "7 failed" in text
    assert (
        "FAIL AGNNConv equals PyG's, forward and backward (PyG path): AssertionError: gradient of x" in text
    )
    assert "ok   GATConv equals PyG's" in text
    assert f"hint the kernel cache {tmp_path}/file/cache cannot be written to" in text


def test_doctor_checks_the_path_that_strict_forbids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    assert main(["doctor"]) == 0
    assert "(PyG path)" in capsys.readouterr().out and os.environ["GRAPHFUSE_STRICT"] == "1"


def test_doctor_notices_a_layer_that_does_not_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    with pytest.raises(RuntimeError, match="it was to run fused, but GRAPHFUSE_DISABLE=1 is set"):
        graphfuse.env._check_layer("GCNConv", torch.device("cpu"), True)


def test_train_ends_with_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter would take minutes on 2,708 nodes
    status = main(["train", str(CONFIGS / "quickstart.yaml"), "epochs=3", "--json", "--layers", "graphfuse"])
    assert status == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["path"] == "generic" and found["seeds"] == [0]
    for key in ("test_accuracy", "test_accuracy_std", "epoch_ms", "peak_mib", "reasons", "versions"):
        assert key in found


def test_an_interrupt_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphfuse.train.command.run", interrupted)
    assert main(["train", str(CONFIGS / "quickstart.yaml")]) == 130
    assert capsys.readouterr().err == "\ngraphfuse train: interrupted\n"


def test_print_config_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(CONFIGS / "cora_gcn.yaml"), "lr=0.5", "--print-config"]) == 0
    assert "lr: 0.5" in capsys.readouterr().out
    assert main(["train", "--list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["quickstart", "cora"]


@pytest.mark.parametrize("place", range(4))
def test_options_stand_anywhere(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", str(CONFIGS / "cora_gcn.yaml"), "lr=0.5", "epochs=7"]
    assert main([*given[: place + 1], "--seeds", "2", "--print-config", *given[place + 1 :]]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {"lr: 0.5", "epochs: 7"} <= set(printed)


def test_prepare_saves_what_layers_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["prepare", "quickstart", "--data-root", str(tmp_path), "--edge-order", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    data = datasets.load("quickstart").data
    size = (data.num_nodes, data.num_nodes)
    windows = RowWindows.from_edge_index(data.edge_index, size)
    statistics = windows.statistics()
    _ = windows.packed_rows, windows.packed_window_edges, windows.packed_row_edges
    path = tmp_path / "row_windows" / "quickstart.safetensors"
    assert found.pop("seconds") > 0
    assert found == {
        "graph": "quickstart",
        "num_dst": data.num_nodes,
        "num_src": data.num_nodes,
        "num_edges": data.num_edges,
        "windows": int(statistics["windows"]),
        "blocks_per_window": round(statistics["blocks_per_window"], 2),
        "nbytes": windows.nbytes,
        "file": str(path),
    }
    clear_cache()
    monkeypatch.setattr(
        "graphfuse.formats.row_windows.build_structure", lambda *arguments: pytest.fail("windows were built")
    )
    loaded = load_windows(path, edge_index=data.edge_index).validate()
    assert loaded.nbytes == windows.nbytes
    assert row_windows(data.edge_index, *size) is loaded


def test_prepare_reorders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["prepare", "quickstart", "--data-root", str(tmp_path)]
    assert main([*given, "--reorder", "bisection"]) == 0
    data = datasets.load("quickstart").data
    loaded = load_windows(tmp_path / "row_windows" / "quickstart.safetensors", edge_index=data.edge_index)
    natural = RowWindows.from_edge_index(data.edge_index, (data.num_nodes, data.num_nodes))
    assert loaded.walk().row_index is not None and loaded.num_entries < natural.num_entries
    with pytest.raises(SystemExit):
        main([*given, "--reorder", "best"])
    assert "invalid choice: 'best'" in capsys.readouterr().err


def test_prepare_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from scipy.sparse import csr_array, save_npz

    matrix = csr_array(np.array([[0, 3, 0, 1], [0, 0, 2, 0], [5, 0, 0, 0]]))
    save_npz(tmp_path / "scipy.npz", matrix)
    np.savez(tmp_path / "plain.npz", indptr=matrix.indptr, indices=matrix.indices, num_nodes=4)
    np.savez(tmp_path / "edges.npz", edge_index=np.array(EDGES, dtype=np.uint8))
    np.savez(tmp_path / "sized.npz", edge_index=np.array(EDGES, dtype=np.int32), num_nodes=20)
    np.savez(tmp_path / "shaped.npz", edge_index=np.array(EDGES), shape=np.array([20, 9]))
    names = ("scipy", "plain", "edges", "sized", "shaped")
    out = tmp_path / "new" / "folder"
    first, *others = (str(tmp_path / f"{name}.npz") for name in names)
    assert main(["prepare", first, "--out", str(out), *others]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("scipy: 4 x 3 nodes, 4 edges, 1 windows, 1.0 blocks per window, ")
    assert lines[3].startswith("sized: 20 nodes, 4 edges, 2 windows, 0.5 blocks per window, ")
    assert lines[3].endswith(f"s: {out}/sized.safetensors")
    loaded = {name: load_windows(out / f"{name}.safetensors") for name in names}
    edge_index, _ = from_scipy_sparse_matrix(matrix)
    shapes = {"scipy": (4, 3), "plain": (4, 3), "edges": (3, 3), "sized": (20, 20), "shaped": (9, 20)}
    for name, windows in loaded.items():
        assert windows.shape == shapes[name]
        wanted = edge_index if name in ("scipy", "plain") else torch.tensor(EDGES)
        assert torch.equal(windows.edge_index(), wanted)


def test_prepare_reads_an_empty_matrix(tmp_path: Path) -> None:
    from scipy.sparse import csr_array, save_npz

    save_npz(tmp_path / "empty.npz", csr_array((0, 5)))
    assert main(["prepare", str(tmp_path / "empty.npz"), "--out", str(tmp_path)]) == 0
    assert load_windows(tmp_path / "empty.safetensors").shape == (5, 0)


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "graph.npz", edge_index=np.array(EDGES))
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "graph.npz", "--out", "."]) == 0
    capsys.readouterr()
    assert main(["plot", "graph.npz"]) == 0
    assert capsys.readouterr().out == "graph.png\n"
    assert Path("graph.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "graph.safetensors", "--out", "other.svg"]) == 0
    assert "graph: 3 x 3, 4 edges, 1 windows" in Path("other.svg").read_text()
    for graph in ("graph.npz", "graph.safetensors"):
        assert main(["plot", graph, "--reorder", "degree", "--out", "both.svg"]) == 0
        says = "4 edges, 1 windows; above as numbered, 4 column entries, below reordered, 4"
        assert says in Path("both.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "graph.npz"]) == 2
    assert "pip install graphfuse[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "name a configuration file"),
        (["train", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
        (["train", "{folder}/good.npz"], "cannot read {folder}/good.npz ('utf-8' codec can't decode"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "dataset=nope"], "unknown data set 'nope'; there are"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "dataset=croa"], "did you mean 'cora'?"),
        (
            ["train", str(CONFIGS / "cora_gcn.yaml"), "foo=1"],
            "unknown setting 'foo'; there are dataset, model,",
        ),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "weight_decy=1"], "did you mean 'weight_decay'?"),
        (["train", "{folder}/typo.yaml"], "unknown setting 'dropuot'; there are"),
        (["train", str(CONFIGS / "cora_gcn.yaml"), "--seeds", "0"], "--seeds must be at least 1"),
        (["paint"], "unknown command 'paint'; there are env, doctor, prepare, plot, train, bench, tune"),
        (["--verbose", "trainn"], "did you mean 'train'?"),
        ([], "required: command"),
        (["env", "--jsn"], "unrecognized arguments: --jsn"),
        (["env", "--json", "cora"], "unrecognized arguments: cora"),
        (["train", "a.yaml", "--sedes", "2", "lr=1"], "unrecognized arguments: --sedes"),
        (["prepare"], "required: GRAPH"),
        (["prepare", "pubmd"], "did you mean 'pubmed'? (or name a file, see --help)"),
        (["plot", "nope"], "unknown data set 'nope'; there are quickstart, cora"),
        (["plot", "quickstart", "--out", "a.pdf"], "a plot must end in .png or .svg (got 'a.pdf')"),
        (["plot", "nowhere.safetensors"], "No such file or directory: nowhere.safetensors"),
        (["plot", "{folder}/text.npz"], "text.npz (it is no archive); wanted"),
        (
            ["plot", "{folder}/cut.npz"],
            "cut.npz (it is no archive); wanted an .npz file with edge_index",
        ),
        (["prepare", "{folder}/other.npz"], "CSR as scipy saves it, a row per source) (got a, b)"),
        (["prepare", "{folder}/falling.npz"], "must rise from 0 to the 2 entries of `indices`"),
        (["prepare", "{folder}/flat.npz"], "`indptr` in {folder}/flat.npz must have one dimension (got 0)"),
        (["prepare", "{folder}/deep.npz"], "`indices` in {folder}/deep.npz must have one dimension (got 2)"),
        (["prepare", "{folder}/vector.npz"], "must be two integers, rows and columns (got int64[1]); save"),
        (["prepare", "{folder}/taller.npz"], "must have the 2 rows of `indptr` (got 9)"),
        (["prepare", "{folder}/counts.npz"], "must be an integer (got int64[2]); save the file without it"),
        (["plot", "{folder}/share.npz"], "must be an integer (got float64[]); save the file without it"),
        (["plot", "{folder}/formats.npz"], "CSR as scipy saves it, a row per source) (got indptr, indices, "),
        (["prepare", "{folder}/beyond.npz"], "beyond.npz holds no graph: Found indices in 'edge_index' that"),
        (["prepare", "{folder}/good.npz", "--out", "{folder}/text.npz"], "name another folder with --out"),
        (
            ["prepare", "{folder}/good.npz", "elsewhere/good.npz", "--out", "{folder}"],
            "/good.safetensors; rename or leave out one",
        ),
        (["prepare", "cora", "--data-root", "{folder}/text.npz"], "--data-root or GRAPHFUSE_DATA"),
        (["prepare", "cora", "--data-root", "~nobody-here/data"], "where ~nobody-here/data is (Could not"),
        (["plot", "cora", "--data-root", "~nobody-here/data"], "name a folder with --data-root or GRAPHFUSE"),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.npz").write_text("no array")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and so on")
    np.savez(tmp_path / "other.npz", a=np.zeros(1), b=np.zeros(1))
    np.savez(tmp_path / "pickled.npz", edge_index=np.array([{}, {}]))
    np.savez(tmp_path / "falling.npz", indptr=np.array([0, 2, 1]), indices=np.array([0, 1]))
    csr = {"indptr": np.array([0, 1, 2]), "indices": np.array([0, 1])}
    np.savez(tmp_path / "flat.npz", indptr=np.array(0), indices=csr["indices"])
    np.savez(tmp_path / "deep.npz", indptr=csr["indptr"], indices=np.zeros((2, 1), dtype=np.int64))
    np.savez(tmp_path / "vector.npz", **csr, shape=np.array([2]))  # as scipy saves a vector
    np.savez(tmp_path / "taller.npz", **csr, shape=np.array([9, 9]))
    np.savez(tmp_path / "counts.npz", edge_index=np.array(EDGES), num_nodes=np.array([3, 3]))
    np.savez(tmp_path / "share.npz", edge_index=np.array(EDGES), num_nodes=3.5)
    np.savez(tmp_path / "formats.npz", **csr, format=np.array(["csr", "csc"]))
    np.savez(tmp_path / "beyond.npz", edge_index=np.array(EDGES), num_nodes=2)
    np.savez(tmp_path / "good.npz", edge_index=np.array(EDGES))
    (tmp_path / "typo.yaml").write_text((CONFIGS / "cora_gcn.yaml").read_text() + "dropuot: 0.5\n")
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message.replace("{folder}", str(tmp_path)) in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == graphfuse.__version__


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"^example: graphfuse {command}\b", text, re.MULTILINE)
    return set(re.findall(r"--[a-z-]+", text)) - {"--help"}


def test_the_documented_commands_and_options_are_the_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = set(re.findall(r"^ {4}([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    assert {"env", "doctor", "prepare", "plot", "train", "bench", "tune"} <= commands
    page = (ROOT / "docs/command-line.md").read_text()
    sections = dict(re.findall(r"^## graphfuse ([a-z]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(sections) == commands
    options = {command: options_of(command, capsys) for command in commands}
    for command, section in sections.items():
        written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section))
        assert options[command] <= written, command
        assert written <= {"--help"}.union(*options.values()), command
    used = set(re.findall(r"^(?:\$ )?graphfuse ([a-z]+)", page, re.MULTILINE))
    assert used == commands
