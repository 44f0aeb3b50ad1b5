"""Attention's backward is one kernel where a graph is small, and three else: both are what is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphfuse import clear_cache, ops
from graphfuse.kernels import attention_bwd
from graphfuse.kernels.run import Launch
from graphfuse.testing import GRAPHS
from tests.ops.test_attention import check_attention, draw

SHAPES = [(1, 8), (3, 7), (2, 16), (4, 1), (1, 100)]
ALONE = ["attention_bwd_alone_kernel"]
THREE = ["_attention_delta_kernel", *["attention_bwd_row_kernel"] * 2]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    found: list[str] = []
    launch: Callable[..., None] = Launch.__call__

    def watched(self: Launch, *arguments: Any) -> None:
        found.append(self._kernel.fn.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", watched)
    return found


def backward(
    launched: list[str], device: torch.device, dtype: torch.dtype, graph: str = "ragged", **options: Any
) -> list[str]:
    windows, edge_index, given = draw(graph, device, dtype, 2, 8)
    if options.pop("edges", False):
        query = torch.randn(windows.shape[0], 2, 3, device=device, dtype=dtype)
        attr = torch.randn(edge_index.size(1), 3, device=device, dtype=dtype)
        options |= {"edge_query": query, "edge_attr": attr}
    if options.pop("key_scale", False):
        options["key_scale"] = torch.rand(windows.shape[1], 2, device=device)
        given["k"] = given["v"]
    out = ops.sparse_attention(**given, windows=windows, **options)
    total = sum(one.sum() for one in out) if isinstance(out, tuple) else out.sum()
    launched.clear()
    torch.autograd.grad(total, [*dict.fromkeys(given.values())])
    return [name for name in launched if "merge" not in name]


def test_a_small_graph_has_one_kernel(launched: list[str], device: torch.device) -> None:
    assert backward(launched, device, torch.float32) == ALONE
    assert backward(launched, device, torch.float32, dropout=0.5) == ALONE


@pytest.mark.parametrize(
    ("name", "value"), [("FEW_EDGES", 0), ("FULL", 33), ("FULL", 1)], ids=["edges", "as many rows", "rows"]
)
def test_a_larger_one_has_three(
    name: str, value: int, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bwd, name, value)
    assert backward(launched, device, torch.float32) == THREE


@pytest.mark.parametrize("option", ["edges", "key_scale", "self_loops"])
def test_what_one_kernel_does_not_do(option: str, launched: list[str], device: torch.device) -> None:
    assert backward(launched, device, torch.float32, **{option: True}) == THREE


def test_slices_have_three(
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backward(launched, device, torch.float32, "hub") == ALONE
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    clear_cache()
    assert backward(launched, device, torch.float32, "hub") == THREE


def test_half_precision_walks_windows(launched: list[str], device: torch.device) -> None:
    assert ALONE[0] not in backward(launched, device, torch.float16)


@pytest.mark.parametrize("graph", GRAPHS)
def test_three_kernels_match_the_definition(
    graph: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", -1)
    check_attention(graph, device, torch.float32, *SHAPES[list(GRAPHS).index(graph) % len(SHAPES)])


@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_three_kernels_drop_the_same(
    graph: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", -1)
    seed = torch.tensor([(3 << 40) + 5], device=device)
    check_attention(graph, device, torch.float32, 3, 8, dropout=0.3, seed=seed)
