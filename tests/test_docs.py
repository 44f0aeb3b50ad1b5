"""What the documentation says is so: its examples run, its lists are complete, its commands are the ones."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import graphfuse.testing

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphfuse"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    "pip install -c constraints.txt -e . && graphfuse train configs/quickstart.yaml",
    'pip install -c constraints.txt -e ".[test]" && pytest',
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_examples_run_and_print_what_is_shown(page: Path) -> None:
    # blocks of a page share one namespace; a `text` block right after a `python` block is its output
    text, namespace = page.read_text(), {"__name__": "documentation"}
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=False):
        if fence[1] != "python":
            continue
        lines_before = text[: fence.start(2)].count("\n")
        code = compile("\n" * lines_before + fence[2], str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        adjoins = following is not None and not text[fence.end() : following.start()].strip()
        if following is not None and adjoins and following[1] == "text":
            assert printed.getvalue() == following[2]


def test_docstring_examples_print_what_is_shown() -> None:
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for example in finder.find(module, globs={**vars(module), "torch": torch}):
                runner.run(example)
    failed, run = runner.summarize()
    assert run > 0 and not failed


class WholeGraph:
    """In the place of NeighborLoader, which needs pyg-lib: every batch is the graph, its own nodes first."""

    def __init__(
        self, data: Data, num_neighbors: list[int], batch_size: int, input_nodes: Any = None, **_: Any
    ) -> None:
        every = torch.arange(data.num_nodes)
        self.data, self.nodes = data, (every if input_nodes is None else every[input_nodes]).split(batch_size)

    def __iter__(self) -> Iterator[Data]:
        for nodes in self.nodes:
            others = torch.ones(self.data.num_nodes, dtype=torch.bool).index_fill_(0, nodes, False)
            n_id = torch.cat([nodes, others.nonzero().view(-1)])
            edge_index = n_id.argsort()[self.data.edge_index]
            batch = Data(edge_index=edge_index, n_id=n_id, batch_size=nodes.numel(), num_nodes=n_id.numel())
            for key in {"x", "y"} & set(self.data.keys()):
                batch[key] = self.data[key][n_id.to(self.data[key].device)]
            yield batch

    def __len__(self) -> int:
        return len(self.nodes)


def tiny_graph() -> Data:
    """A ring with chords, three classes; every node in one split."""
    nodes = torch.arange(12)
    chords = torch.stack([nodes, (5 * nodes + 2) % 12])
    data = Data(x=torch.rand(12, 5), y=nodes % 3, edge_index=torch.cat([nodes.expand(2, -1), chords], 1))
    data.edge_index[1, :12] = nodes.roll(1)
    for k, name in enumerate(("train", "val", "test")):
        data[f"{name}_mask"] = nodes // 4 == k
    return data


SCRIPTS = {
    "gcn": ["--hidden_channels", "4"],
    "gat": ["--hidden_channels", "2", "--heads", "2"],
    "agnn": ["--hidden_channels", "4"],
    "unimp_arxiv": ["--hidden_channels", "4", "--label_rate", "0.5"],
    "reddit": ["--hidden_channels", "4", "--num_workers", "0"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_as_with_the_layers_of_pyg(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / f"docs/examples/{script}.py"
    text, printed = path.read_text(), []
    monkeypatch.setattr("graphfuse.train.datasets.planted_partition", tiny_graph)
    monkeypatch.setattr("torch_geometric.loader.NeighborLoader", WholeGraph)
    monkeypatch.setattr(
        sys, "argv", [str(path), "--dataset", "Quickstart", "--epochs", "1", *SCRIPTS[script]]
    )
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")  # fused, or an error
    for layers in ("graphfuse", "torch_geometric"):
        torch.manual_seed(0)
        exec(
            compile(text.replace("from graphfuse.nn ", f"from {layers}.nn "), path, "exec"),
            {"__name__": script},
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if "Epoch: " in line]
        printed.append([float(number) for number in re.findall(r"-?\d+\.\d+", " ".join(lines))])
    assert len(printed[0]) >= 4
    if script != "gat":  # whose layers drop weights, each with its own random numbers
        assert printed[0] == pytest.approx(printed[1], abs=2e-4)


OTHERS = sorted({path.stem for path in (ROOT / "docs/examples").glob("*.py")} - SCRIPTS.keys())


@pytest.mark.parametrize("script", OTHERS)
def test_other_scripts_run(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / f"docs/examples/{script}.py")
    monkeypatch.setattr("graphfuse.train.datasets.planted_partition", tiny_graph)
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # what the layers do is tested elsewhere
    monkeypatch.setattr(sys, "argv", [path, "--dataset", "quickstart", "--epochs", "2"])
    runpy.run_path(path, run_name="__main__")
    assert "002" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_little_in_a_script_is_of_graphfuse(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / f"docs/examples/{script}.py"
    text = path.read_text()
    tree = ast.parse(text)
    ours = {
        name.name: node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    ours = {name: node.lineno for name, node in ours.items() if "graphfuse" in str(node.module)}
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ours}
    layers = {name for name in ours if name.endswith("Conv")}
    around = lines | {ours[name] for name in ours.keys() - layers}
    around -= {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in layers}
    assert len(layers) == 1 and 0 < len(around) <= 5
    assert len(text.splitlines()) <= 110
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    assert "--root" in capsys.readouterr().out


def test_readme_has_two_commands_and_ci_runs_them() -> None:
    blocks = [fence[2] for fence in FENCE.finditer((ROOT / "README.md").read_text()) if fence[1] == "bash"]
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if "-c constraints.txt" in line] == COMMANDS
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK)
    subprocess.run(["bash", "-n", ci], check=True)
    found = subprocess.run(["grep", "^pip install -c ", ROOT / "README.md"], capture_output=True, text=True)
    assert found.stdout.splitlines() == COMMANDS  # as .ci/run looks for them
    assert "grep '^pip install -c ' README.md" in ci.read_text()


def _sentence(node: ast.expr | None) -> str | None:
    """A regular expression for a string or f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_sentence(part) or ".+" for part in node.values)
    return None


def _reasons() -> Iterator[str]:
    """Every reason not to fuse, as a regular expression: yielded, appended or returned in the code."""
    for path in sorted((PACKAGE / "nn").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr | None] = []
            if isinstance(node, ast.Yield):
                given = [node.value]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "reasons.append":
                given = list(node.args)
            elif isinstance(node, (ast.Return, ast.AugAssign)) and isinstance(node.value, ast.List):
                given = list(node.value.elts)
            yield from filter(None, map(_sentence, given))
    for node in ast.walk(ast.parse((PACKAGE / "kernels/device.py").read_text())):
        if isinstance(node, ast.Return):
            yield from filter(None, [_sentence(node.value)])


def test_every_reason_is_explained() -> None:
    page = (ROOT / "docs/why-not-fused.md").read_text()
    explained = re.findall(r"^### (.*)$", page, re.MULTILINE)
    reasons = list(_reasons())
    assert len(reasons) > 20
    missing = [reason for reason in reasons if not any(re.fullmatch(reason, title) for title in explained)]
    assert not missing, "docs/why-not-fused.md lacks these reasons"
    stale = [title for title in explained if not any(re.fullmatch(reason, title) for reason in reasons)]
    assert not stale, "docs/why-not-fused.md explains reasons that no code gives"


def test_every_environment_variable_is_listed() -> None:
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    read = set(re.findall(r"GRAPHFUSE_[A-Z]+", source))
    read |= set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', source))
    page = (ROOT / "docs/environment.md").read_text()
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert {"GRAPHFUSE_STRICT", "TRITON_INTERPRET"} <= read
    assert read <= listed
    assert {name for name in listed if name.startswith("GRAPHFUSE_")} <= read


def test_every_public_name_has_a_place_in_the_api() -> None:
    page = (ROOT / "docs/api.md").read_text()
    for module in (graphfuse.nn, graphfuse.ops, graphfuse.reference, graphfuse.transforms, graphfuse.testing):
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "").startswith(module.__name__)
            if own and callable(value) and not name.startswith("_"):
                assert f" {module.__name__}.{name}\n" in page


def test_the_drawing_is_of_the_record() -> None:
    first = next(
        fence for fence in FENCE.finditer((ROOT / "docs/format.md").read_text()) if fence[1] == "python"
    )
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(first[2], namespace)
    walk = namespace["windows"].walk()
    window = torch.repeat_interleave(walk.ptr.diff()).tolist()
    masks = enumerate(walk.row_mask.tolist())
    wanted = {(e, 16 * window[e] + r) for e, mask in masks for r in range(16) if mask >> r & 1}
    drawing = (ROOT / "docs/row-windows.svg").read_text()

    def drawn(*names: str) -> set[tuple[int, ...]]:
        pattern = " ".join(f'data-{name}="(\\d+)"' for name in names)
        return {tuple(map(int, found)) for found in re.findall(pattern, drawing)}

    assert drawn("entry", "row") == wanted
    assert drawn("column", "row") == set(zip(*namespace["edge_index"].tolist(), strict=True))


HEADINGS = (
    "What it computes",
    "Bytes moved",
    "Saved for backward",
    "Error",
    "When it applies",
    "Reference and source",
)


def test_every_op_has_a_page() -> None:
    listed = dict(
        re.findall(r"^\| \[`(\w+)`\]\((\S+\.md)\) \|", (ROOT / "docs/ops.md").read_text(), re.MULTILINE)
    )
    assert listed.keys() == {
        name for name, value in vars(graphfuse.ops).items() if callable(value) and not name.startswith("_")
    }
    for op, page in listed.items():
        text = (ROOT / "docs" / page).read_text()
        assert [text.count(f"\n## {heading}\n") for heading in HEADINGS] == [1] * len(HEADINGS), page
        assert f"{{func}}`graphfuse.ops.{op}`" in text and f"{{func}}`graphfuse.reference.{op}`" in text, op


def test_figures_of_memory_are_recorded() -> None:
    lines = "\n".join(
        path.read_text() for path in sorted((ROOT / "benchmarks/results/nvidia-h200").glob("*.jsonl"))
    )
    records = [json.loads(line) for line in lines.splitlines() if line]
    bytes_of = [record.get("peak_mib") for record in records]
    bytes_of += [record.get("extra", {}).get("total_peak_mib") for record in records]
    bytes_of += [record.get("extra", {}).get("nbytes", 0) / 2**20 for record in records]
    known = {f"{figure:,.0f}" for figure in bytes_of if figure}
    tables = (ROOT / "docs/memory.md").read_text().split("## Measured")[1]
    figures = re.findall(r"(?<=\| )[\d,]+(?= \|)", tables)
    assert len(figures) > 15
    assert set(figures) <= known


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target
