"""What the documentation says is so: its examples run, its lists are complete, its commands are the ones."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphfuse.testing

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphfuse"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize("script", sorted((ROOT / "docs/examples").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_run(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")  # the interpreter would take minutes on 2,708 nodes
    monkeypatch.setattr(sys, "argv", [str(script), "--dataset", "quickstart", "--epochs", "2"])
    runpy.run_path(str(script), run_name="__main__")
    assert "epoch 002" in capsys.readouterr().out
    assert len(script.read_text().splitlines()) < 60


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


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target
