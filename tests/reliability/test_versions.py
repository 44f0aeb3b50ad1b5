"""Versions of what graphfuse stands on: a warning outside the tested ones; what PyG 2.7 does otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg

import graphfuse
from graphfuse import env

ROOT = Path(__file__).parents[2]
OLD = tuple(map(int, torch_geometric.__version__.split(".")[:2])) < (2, 8)


@pytest.mark.parametrize(
    ("name", "version", "tested"),
    [
        ("torch", "2.10.1+cu128", "2.11 to 2.13"),
        ("torch", "3.0.0", "2.11 to 2.13"),
        ("torch_geometric", "2.6.1", "2.7 to 2.8"),
        ("torch_geometric", "2.9.0.dev20261101", "2.7 to 2.8"),
        ("triton", "3.10.0", "3.6 to 3.9"),
    ],
)
def test_other_versions_are_named(
    name: str, version: str, tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = {"torch": "2.12.0a0+git1234", "torch_geometric": "2.8.1", "triton": None}
    monkeypatch.setattr(env, "_version", fitting.get)
    assert list(env.untested()) == []
    monkeypatch.setattr(env, "_version", (fitting | {name: version}).get)
    (sentence,) = env.untested()
    assert sentence.startswith(f"graphfuse is tested with {name} {tested} (found {version});")
    assert sentence in env.hints()


def test_importing_warns_once() -> None:
    code = """
import importlib.metadata, warnings
real = importlib.metadata.version
importlib.metadata.version = lambda name: "9.8.7" if name == "triton" else real(name)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import graphfuse
    import graphfuse.nn
    import graphfuse as again
print(*[f"{one.category.__name__} {one.filename}: {one.message}" for one in caught if "tested" in str(one)],
      sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert line.startswith("UserWarning <string>: graphfuse is tested with triton 3.6 to 3.9 (found 9.8.7);")


def test_what_is_required_is_tested() -> None:
    """The table's packages are those that pyproject.toml requires, and PyG's bound is the tested one."""
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', text))
    first, _ = env.TESTED["torch_geometric"]
    assert bounds["torch_geometric"] == ".".join(map(str, first))
    assert env.TESTED.keys() - {"triton"} <= bounds.keys()


def weights_although_false(layer: torch.nn.Module) -> bool:
    """Whether ``return_attention_weights=False`` returns weights."""
    return returns_weights(layer, False)


def weights_for_one(layer: torch.nn.Module) -> bool:
    """Whether ``return_attention_weights=1`` returns weights."""
    return returns_weights(layer, 1)


def returns_weights(layer: torch.nn.Module, asked: int) -> bool:
    found = layer(torch.ones(2, 4), torch.tensor([[0, 1], [1, 0]]), return_attention_weights=asked)
    return isinstance(found, tuple)


def scripts(layer: torch.nn.Module) -> bool:
    """Whether TorchScript takes the layer."""
    try:
        torch.jit.script(layer)
    except RuntimeError:
        return False
    return True


# What our layers and PyG's do, by its version: question, layer, PyG 2.7, PyG 2.8 and later, ours with either
DIFFERENCES: list[tuple[Callable[[torch.nn.Module], bool], str, bool, bool, bool]] = [
    (weights_although_false, "GATConv", True, False, False),
    (weights_although_false, "GATv2Conv", True, False, False),
    (weights_although_false, "TransformerConv", True, True, True),
    (weights_for_one, "GATConv", False, True, True),
    (weights_for_one, "GATv2Conv", False, True, True),
    (weights_for_one, "TransformerConv", False, False, False),
    (scripts, "GATConv", True, False, False),
    (scripts, "GATv2Conv", True, False, False),
    (scripts, "TransformerConv", True, True, True),
    (scripts, "GCNConv", True, True, True),
    (scripts, "AGNNConv", True, True, True),
]


@pytest.mark.parametrize(
    ("ask", "name", "before", "since", "ours"), DIFFERENCES, ids=lambda one: getattr(one, "__name__", None)
)
def test_differences_of_pyg_2_7(
    ask: Callable[[torch.nn.Module], bool], name: str, before: bool, since: bool, ours: bool
) -> None:
    """All that is known; numbers, parameters and signatures are the same, as the tests of layers see."""
    channels = () if name == "AGNNConv" else (4, 2)
    assert ask(getattr(pyg, name)(*channels)) is (before if OLD else since)
    assert ask(getattr(graphfuse.nn, name)(*channels)) is ours
