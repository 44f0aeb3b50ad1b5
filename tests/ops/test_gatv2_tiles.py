"""GATv2 over tensor cores against its definition, and that a row with a NaN is done edge by edge."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import draw

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_TILED", 0)  # graphs of the tests have short rows
    launch.gatv2_row.cache_clear()
    monkeypatch.setattr(launch, "gatv2_row", launch.gatv2_row.__wrapped__)


def compare(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, dim: int, **options: Any
) -> None:
    windows, edge_index, given = draw("gatv2", graph, device, dtype, heads, dim)
    more = range(1, 4) if device.type == "cuda" else ()
    check(
        functools.partial(ops.gatv2_attention, windows=windows, **options),
        functools.partial(reference.gatv2_attention, edge_index, **options),
        given,
        *(draw("gatv2", graph, device, dtype, heads, dim, seed=seed)[2] for seed in more),
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_graph(graph: str, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph)
    heads, dim = [(1, 8), (3, 7), (2, 16), (4, 1)][turn % 4]
    options = {"self_loops": turn % 3 != 0, "negative_slope": [0.2, 0.0, -0.5][turn % 3]}
    compare(graph, device, HALF[turn % 2], heads, dim, **options)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("heads_dim", [(8, 8), (5, 24), (1, 200), (9, 4)], ids=str)
def test_widths(heads_dim: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    compare("bipartite", device, dtype, *heads_dim)


def test_slices_and_dropout(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    options = {"dropout": 0.4, "seed": torch.tensor([7], device=device), "self_loops": True}
    compare("hub", device, torch.float16, 3, 12, **options)


def results(windows: RowWindows, given: dict[str, Tensor]) -> list[Tensor]:
    out = ops.gatv2_attention(**given, windows=windows)
    return [out, *torch.autograd.grad(out.float().square().sum(), list(given.values()))]


@pytest.mark.parametrize(
    ("name", "value"), [("x_src", float("nan")), ("x_src", float("inf")), ("x_dst", float("nan"))]
)
def test_nan_and_inf_stay_in_their_head(
    name: str, value: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where they go must not depend on whether rows go over tensor cores
    windows, _, given = draw("gatv2", "self_loops", device, torch.float16, 3, 8)
    with torch.no_grad():
        given[name][5, 1, 2] = value
    found = results(windows, given)
    monkeypatch.setattr(launch, "_TILED", 10**9)
    again = RowWindows.from_edge_index(windows.edge_index(), (windows.shape[1], windows.shape[0]))
    wanted = results(again, given)
    assert 0 < int((~found[0].isfinite()).sum()) < found[0].numel() // 2
    for left, right in zip(found[:3], wanted[:3], strict=True):  # att's gradient sums over all of them
        assert torch.equal(left.isfinite(), right.isfinite())
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert torch.equal(found[3].isfinite().all(1), wanted[3].isfinite().all(1))


@pytest.mark.parametrize("name", ["x_src", "x_dst"])
def test_a_node_without_edges_adds_nothing(name: str, device: torch.device) -> None:
    windows, edge_index, given = draw("gatv2", "isolated", device, torch.float16, 2, 8)
    end = edge_index[0 if name == "x_src" else 1]
    alone = torch.ones(given[name].size(0), dtype=torch.bool, device=device)
    alone[end] = False
    assert alone.any()
    wanted = results(windows, given)
    with torch.no_grad():
        given[name][alone, 1, 2] = float("inf")
    for mine, clean in zip(results(windows, given), wanted, strict=True):
        assert torch.equal(mine, clean)
