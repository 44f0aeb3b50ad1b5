"""Rows of as many edges as are no task, and of one more: what walks rows sums up each of them once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, clear_cache, ops, reference
from graphfuse.formats import build
from graphfuse.kernels import float32_rows
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import check_additive
from tests.ops.test_attention import check_attention
from tests.ops.test_spmm import check_spmm, draw

NODES, EDGES = 75, (63, 64, 65, 70)  # of the first nodes, each with others


def hubs(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    row = torch.repeat_interleave(torch.arange(len(EDGES)), torch.tensor(EDGES))
    column = torch.cat([torch.arange(NODES - count, NODES) for count in EDGES])
    edge_index = torch.stack([torch.cat([column, row]), torch.cat([row, column])])  # both ways
    return edge_index.to(device), (NODES, NODES)


@pytest.fixture(autouse=True)
def graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPHS, "hubs", hubs)


def test_longer_ones_are_tasks(device: torch.device) -> None:
    windows = RowWindows.from_edge_index(*hubs(device))
    for walk in (windows.row_walk(), windows.transpose().row_walk()):
        length = torch.diff(walk.ptr)
        assert walk.split == build._LONG_ROW == 64 and length[:4].tolist() == list(EDGES)
        assert walk.tasks[:, [0, 3]].tolist() == [[3, -1], [2, -1]]


def test_being_one_changes_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, size = hubs(device)
    given = draw(device, torch.float32, q=(NODES, 2, 8), k=(NODES, 2, 8), v=(NODES, 2, 8))
    found = []
    for least in (64, 96):
        monkeypatch.setattr(build, "_LONG_ROW", least)
        clear_cache()
        windows = RowWindows.from_edge_index(edge_index, size)
        assert (windows.row_walk().tasks.size(0) > 0) is (least == 64)
        out = ops.sparse_attention(**given, windows=windows)
        found.append((out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["attention", "gat", "gatv2"])
def test_attention(kind: str, device: torch.device) -> None:
    if kind == "attention":
        check_attention("hubs", device, torch.float32, 2, 8)
    else:
        check_additive(kind, "hubs", device, torch.float32, 2, 8)


@pytest.mark.parametrize("split", [32, 512], ids=["cut", "whole"])
@pytest.mark.parametrize(("rows", "name"), [(2, "hubs"), (3, "hubs"), (2, "isolated"), (3, "bipartite")])
def test_programs_of_several_rows(
    rows: int, name: str, split: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", split)
    monkeypatch.setattr(float32_rows, "rows_of_gat", lambda *counts: rows)
    check_additive("gat", name, device, torch.float32, 2, 8)


def test_rows_of_a_program_change_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, size = hubs(device)
    shapes = {"a_src": (NODES, 2), "a_dst": (NODES, 2), "x": (NODES, 2, 8)}
    given = {name: one.detach() for name, one in draw(device, torch.float32, **shapes).items()}
    found = []
    for rows in (1, 2):
        monkeypatch.setattr(float32_rows, "rows_of_gat", lambda *counts, rows=rows: rows)
        windows = RowWindows.from_edge_index(edge_index.clone(), size)
        found.append(ops.gat_attention(**given, windows=windows, negative_slope=0.2))
    assert torch.equal(*found)


def test_weighted_sums(device: torch.device) -> None:
    check_spmm("hubs", device, torch.float32, 8, weighted=True, loops=False)


def test_any_number_of_slices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are loaded at a time, one more, and twice that and one more."""
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    counts = torch.tensor([128, 129, 161, 257])
    row = torch.repeat_interleave(torch.arange(4), counts)
    edge_index = torch.stack([torch.cat([torch.arange(int(count)) for count in counts]), row]).to(device)
    windows = RowWindows.from_edge_index(edge_index, (257, 4))
    assert sorted(windows.row_walk().merges[:, 2].tolist()) == [4, 5, 6, 9]
    inputs = draw(device, torch.float32, x=(257, 8), edge_weight=(row.numel(),))
    definition = functools.partial(reference.spmm, edge_index, num_dst=4)
    check(functools.partial(ops.spmm, windows), definition, inputs)


def test_products_of_edges(device: torch.device) -> None:
    edge_index, size = hubs(device)
    inputs = draw(device, torch.float32, a=(NODES, 8), b=(NODES, 8))
    windows = RowWindows.from_edge_index(edge_index, size)
    check(functools.partial(ops.sddmm, windows), functools.partial(reference.sddmm, edge_index), inputs)
