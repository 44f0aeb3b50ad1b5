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


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", -1)
    monkeypatch.setattr(attention_bwd, "SHORT_ROWS", 0)


@pytest.mark.parametrize("option", ["", "dropout", "key_scale", "self_loops"])
def test_a_small_graph_has_one_kernel(option: str, launched: list[str], device: torch.device) -> None:
    options = {option: 0.5 if option == "dropout" else True} if option else {}
    assert backward(launched, device, torch.float32, **options) == ALONE


def test_a_larger_one_has_three(
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (num_src, num_dst), edge_index = GRAPHS["ragged"](device)[1], GRAPHS["ragged"](device)[0]
    num_edges = edge_index.size(1)
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", num_edges - 1)
    monkeypatch.setattr(attention_bwd, "SHORT_ROWS", 0)
    assert backward(launched, device, torch.float32) == THREE
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", num_edges)
    assert backward(launched, device, torch.float32) == ALONE
    monkeypatch.setattr(attention_bwd, "FEW_EDGES", 0)
    monkeypatch.setattr(attention_bwd, "SHORT_ROWS", -(-num_edges // max(num_src, num_dst)))
    assert backward(launched, device, torch.float32) == ALONE


def test_features_of_edges_have_three(launched: list[str], device: torch.device) -> None:
    assert backward(launched, device, torch.float32, edges=True) == THREE


def test_half_precision_walks_windows(launched: list[str], device: torch.device) -> None:
    assert ALONE[0] not in backward(launched, device, torch.float16)


def test_slices(launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    clear_cache()
    assert backward(launched, device, torch.float32, "hub") == ALONE
    assert launched == [*ALONE, *["attention_bwd_merge_kernel"] * (len(launched) - 1)] and len(launched) > 1


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("graph", GRAPHS)
def test_three_kernels_match_the_definition(graph: str, device: torch.device) -> None:
    check_attention(graph, device, torch.float32, *SHAPES[list(GRAPHS).index(graph) % len(SHAPES)])


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_three_kernels_drop_the_same(graph: str, device: torch.device) -> None:
    seed = torch.tensor([(3 << 40) + 5], device=device)
    check_attention(graph, device, torch.float32, 3, 8, dropout=0.3, seed=seed)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_three_kernels_add_slices(
    dropout: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    clear_cache()
    check_attention(
        "hub", device, torch.float32, 2, 12, dropout=dropout, seed=torch.tensor([7], device=device)
    )
