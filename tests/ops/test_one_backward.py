"""Backward of float32 rows is one kernel where a graph is small, three else: both are what is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphfuse import clear_cache, ops
from graphfuse.kernels import float32_rows
from graphfuse.kernels.run import Launch
from graphfuse.testing import GRAPHS
from tests.ops import test_additive_attention
from tests.ops.test_additive_attention import check_additive
from tests.ops.test_attention import check_attention, draw

SHAPES = [(1, 8), (3, 7), (2, 16), (4, 1), (1, 100)]
ALONE = {"attention": ["attention_bwd_alone_kernel"], "gatv2": ["gatv2_bwd_alone_kernel"]}
THREE = {
    "attention": ["_attention_delta_kernel", *["attention_bwd_row_kernel"] * 2],
    "gatv2": ["additive_delta_kernel", *["gatv2_bwd_row_kernel"] * 2],
}
KINDS = [*ALONE]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    found: list[str] = []
    launch: Callable[..., None] = Launch.__call__

    def watched(self: Launch, *arguments: Any) -> None:
        found.append(self._kernel.fn.__name__)
        count = len(found)
        launch(self, *arguments)
        del found[count:]  # on a GPU the first call of a launch may end in another of itself

    monkeypatch.setattr(Launch, "__call__", watched)
    return found


def allow(monkeypatch: pytest.MonkeyPatch, edges: int, of_a_row: int) -> None:
    """One kernel for graphs of so many edges, or rows of so many."""
    monkeypatch.setattr(float32_rows, "FEW_EDGES", edges)
    monkeypatch.setattr(float32_rows, "SHORT_ROWS", of_a_row)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, -1, 0)


def backward(
    kind: str,
    launched: list[str],
    device: torch.device,
    dtype: torch.dtype,
    graph: str = "ragged",
    edges: bool = False,
    key_scale: bool = False,
    **options: Any,
) -> list[str]:
    if kind == "gatv2":
        windows, _, given = test_additive_attention.draw(kind, graph, device, dtype, 2, 8, edges)
        out: Any = ops.gatv2_attention(**given, windows=windows, **options)
    else:
        windows, edge_index, given = draw(graph, device, dtype, 2, 8)
        if edges:
            options["edge_query"] = torch.randn(windows.shape[0], 2, 3, device=device, dtype=dtype)
            options["edge_attr"] = torch.randn(edge_index.size(1), 3, device=device, dtype=dtype)
        if key_scale:
            options["key_scale"] = torch.rand(windows.shape[1], 2, device=device)
            given["k"] = given["v"]
        out = ops.sparse_attention(**given, windows=windows, **options)
    total = sum(one.sum() for one in out) if isinstance(out, tuple) else out.sum()
    launched.clear()
    torch.autograd.grad(total, [*dict.fromkeys(given.values())])
    return [name for name in launched if "merge" not in name and "sum" not in name]


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind in KINDS for option in ("", "dropout", "self_loops")]
    + [("attention", "key_scale")],
)
def test_a_small_graph_has_one_kernel(
    kind: str, option: str, launched: list[str], device: torch.device
) -> None:
    options = {option: 0.5 if option == "dropout" else True} if option else {}
    assert backward(kind, launched, device, torch.float32, **options) == ALONE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_one_has_three(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index, size = GRAPHS["ragged"](device)
    num_edges = edge_index.size(1)
    for edges, of_a_row, wanted in (
        (num_edges - 1, 0, THREE),
        (num_edges, 0, ALONE),
        (0, -(-num_edges // max(size)) - 1, THREE),
        (0, -(-num_edges // max(size)), ALONE),
    ):
        allow(monkeypatch, edges, of_a_row)
        assert backward(kind, launched, device, torch.float32) == wanted[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_edges_have_three(kind: str, launched: list[str], device: torch.device) -> None:
    assert backward(kind, launched, device, torch.float32, edges=True) == THREE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_has_three(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.kernels.launch.attention_prefers_rows", lambda *sizes: True)
    assert backward(kind, launched, device, torch.float16) == THREE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_merged(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    clear_cache()
    assert backward(kind, launched, device, torch.float32, "hub") == ALONE[kind]
    assert "attention_bwd_merge_kernel" in launched


def check_kind(kind: str, graph: str, device: torch.device, heads: int, dim: int, **options: Any) -> None:
    if kind == "gatv2":
        check_additive(kind, graph, device, torch.float32, heads, dim, **options)
    else:
        check_attention(graph, device, torch.float32, heads, dim, **options)


@pytest.mark.parametrize("graph", GRAPHS)
def test_one_kernel_of_gatv2_matches_the_definition(graph: str, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph)
    check_kind("gatv2", graph, device, *SHAPES[turn % len(SHAPES)], self_loops=turn % 2 == 0)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_three_kernels_match_the_definition(kind: str, graph: str, device: torch.device) -> None:
    check_kind(kind, graph, device, *SHAPES[list(GRAPHS).index(graph) % len(SHAPES)])


@pytest.fixture(params=["one", "three"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "three":
        allow(monkeypatch, -1, 0)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_either_drops_the_same(kind: str, graph: str, device: torch.device) -> None:
    seed = torch.tensor([(3 << 40) + 5], device=device)
    loops = graph == "self_loops"
    check_kind(kind, graph, device, 3, 8, dropout=0.3, seed=seed, self_loops=loops)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_either_adds_slices(
    kind: str, dropout: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    clear_cache()
    seed = torch.tensor([7], device=device)
    check_kind(kind, "hub", device, 2, 12, dropout=dropout, seed=seed)


@pytest.mark.usefixtures("either")
def test_either_has_its_loops(device: torch.device) -> None:
    for kind, graph in (("gatv2", "self_loops"), ("attention", "repeated")):
        check_kind(kind, graph, device, 2, 8, self_loops=True)


def test_a_launch_serves_operands_of_one_kind(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 8)
    scale = torch.ones(windows.shape[1], 2, device=device)
    for key_scale in (None, scale, None, scale):
        key = {} if key_scale is None else {"k": given["v"], "key_scale": key_scale}
        out = ops.sparse_attention(**(given | key), windows=windows)
        torch.autograd.grad(out.sum(), (given["q"], given["v"]))
    plans = windows.walks(True, False).forward.plans
    assert len([key for key in plans if key[0] == "attention_bwd_alone"]) == 2
