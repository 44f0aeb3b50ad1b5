"""What launches of aggregation share out: rows among programs, and slices among blocks of features."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch, spmm
from graphfuse.ops import _aggregate
from graphfuse.testing import GRAPHS, check
from tests.ops.test_spmm import build, check_spmm, draw


def many_rows(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """Rows of 0 to 9 edges, among them one of 30, two of 70, and two of none at both ends."""
    random = torch.Generator().manual_seed(0)
    degree = torch.randint(10, (37,), generator=random)
    degree[[0, 1, 35, 36]], degree[8], degree[[13, 14]] = 0, 30, 70
    dst = torch.repeat_interleave(torch.arange(37), degree)
    edges = torch.stack([torch.randint(37, dst.shape, generator=random), dst])
    return edges[:, torch.randperm(dst.numel(), generator=random)].to(device), (37, 37)


@pytest.mark.parametrize("split", [32, 512], ids=["rows_of_70_are_cut", "rows_of_70_are_tasks"])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_a_program(
    weighted: bool, stages: int, rows: int, split: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the edges of a row are on their way before the row begins, or is known to be another program's
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", split)
    monkeypatch.setattr(launch, "prefers_rows", lambda *args: True)
    config = launch.Config(16, 4, stages, 1, rows=rows)
    monkeypatch.setattr(launch, "spmm_row", lambda *args: config)
    monkeypatch.setitem(GRAPHS, "many_rows", many_rows)
    listed = build("many_rows", device)[0].row_walk()
    assert listed.tasks.size(0) > 0 and (listed.num_slots > 0) == (split == 32)
    for dtype in (torch.float16, torch.float32):
        check_spmm("many_rows", device, dtype, 12, weighted, loops=False)
    check_spmm("many_rows", device, torch.float32, 12, weighted, loops=True)


@pytest.mark.parametrize(
    ("out_dim", "in_dim", "rows"),
    [
        (None, 64, True),
        (128, 500, True),
        (200, 128, True),
        (64, 64, True),
        (64, 128, True),
        (128, 64, False),  # a product in the kernel of the windows, gemm_by_rows.md
        (16, 500, False),
    ],
)
def test_float32_walks_rows_where_no_product_widens_them_in_the_kernel(
    out_dim: int | None, in_dim: int, rows: bool
) -> None:
    sizes = (37_700, 37_700, 578_006, 546_439)  # of github
    x = torch.empty(1, in_dim)
    weight = None if out_dim is None else torch.empty(out_dim, in_dim)
    assert _aggregate.choose(sizes, x, None, None, weight, None) == (rows, False)
    half = x.half(), None if weight is None else weight.half()
    assert _aggregate.choose(sizes, half[0], None, None, half[1], None) == (False, False)
    assert _aggregate.choose(sizes, x, x, None, weight, None) == (True, True)  # with weights of edges


@pytest.mark.parametrize(("dim", "times"), [(130, 1.5), (64, 1)])
def test_slices_of_wide_rows_are_longer_where_windows_are_few(
    dim: int, times: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setattr(launch, "load", lambda *args: launch.Load.FEW)
    monkeypatch.setattr(launch, "prefers_rows", lambda *args: False)
    edge_index = torch.ones(70, 70).nonzero().t().contiguous().to(device)  # windows of 70 entries
    windows = RowWindows.from_edge_index(edge_index, (70, 70))
    w = windows.walk()
    inputs = draw(device, torch.float16, x=(70, dim))
    definition = functools.partial(reference.spmm, edge_index, num_dst=70)
    check(functools.partial(ops.spmm, windows), definition, inputs)
    longer = [w.plans[key] for key in w.plans if key[0] == "longer_slices"]
    assert [(one.split, one.num_slots) for one in longer] == ([(48, 10)] if times > 1 else [])
    assert (w.split, w.num_slots) == (32, 15)


@pytest.mark.parametrize("hub", [0, 60, 400, 900])
def test_few_rows_have_a_program_each_if_none_is_long(hub: int, device: torch.device) -> None:
    """Not one for each 64 features; and a merge of few slices is small."""
    src, dst = torch.randint(700, (2000,)), torch.arange(700).repeat_interleave(3)[:2000]
    hubs = torch.arange(hub) % 700, torch.full((hub,), 5)
    edge_index = torch.stack([torch.cat([src, hubs[0]]), torch.cat([dst, hubs[1]])])
    graph = RowWindows.from_edge_index(edge_index.to(device), (700, 700)).walks(True, True)
    w, x = graph.forward, torch.empty(700, 256, device=device)
    weights = torch.empty(edge_index.size(1), device=device)
    scales = spmm.Scales(weights, None, None, None)
    plan = spmm.plan_of(w, graph.edges, x, 256, scales, None, None, False, False, x.dtype)
    assert (w.tasks.size(0) > 0, w.num_slots > 0) == (hub >= 400, hub == 900)
    assert plan.main._grid == (w.tasks.size(0) + 700, 1 if hub < 400 else 4)
    assert (plan.merge is None) == (hub < 900)
    if plan.merge is not None:
        assert plan.merge._rest[-5:-2] == (4, 1, 1) and plan.merge._options["num_warps"] == 1
