"""Programs of one warp that share a block: however many do, what they compute has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, clear_cache, ops
from graphfuse.kernels import launch
from graphfuse.kernels.loads import Load, RowLoad
from tests.ops.test_spmm import draw

NODES = 75  # of which no number but 1 and 3, 5 and 15 leaves a block full

TABLES = (launch.attention_row, launch.gat_row, launch.gatv2_row, launch.sddmm_row)


def graph(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """Three edges a row, and a row of 73."""
    column = torch.arange(NODES).repeat(3)
    row = (column * 7 + torch.arange(3).repeat_interleave(NODES)) % NODES
    hub = torch.stack([torch.arange(70), torch.full((70,), NODES - 1)])
    return torch.cat([torch.stack([column, row]), hub], 1).to(device), (NODES, NODES)


def attention(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    shape = (NODES, 2, 8)
    given = draw(device, dtype, q=shape, k=shape, v=shape)
    out = ops.sparse_attention(**given, windows=windows, self_loops=True)
    return [out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))]


def gat(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    given = draw(device, dtype, a_src=(NODES, 2), a_dst=(NODES, 2), x=(NODES, 2, 4))
    out = ops.gat_attention(**given, windows=windows, self_loops=True)
    return [out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))]


def gat_of(heads: int, dim: int, device: torch.device, windows: RowWindows) -> list[Tensor]:
    given = draw(device, torch.float16, a_src=(NODES, heads), a_dst=(NODES, heads), x=(NODES, heads, dim))
    out = ops.gat_attention(**given, windows=windows, self_loops=True)
    return [out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))]


def gat_by_eights(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    return gat_of(8, 8, device, windows)


def gat_by_sixteens(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    return gat_of(4, 16, device, windows)


def spmm(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    x = draw(device, dtype, x=(NODES, 33))["x"]
    out = ops.spmm(windows, x)
    return [out, *torch.autograd.grad(out.square().sum(), [x])]


def gatv2(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    given = draw(device, dtype, x_src=(NODES, 2, 8), x_dst=(NODES, 2, 8), att=(2, 8))
    out = ops.gatv2_attention(**given, windows=windows, self_loops=True)
    return [out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))]


def sddmm(device: torch.device, dtype: torch.dtype, windows: RowWindows) -> list[Tensor]:
    given = draw(device, dtype, a=(NODES, 33), b=(NODES, 33))
    return [ops.sddmm(windows, given["a"], given["b"])]


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    yield
    for table in TABLES:
        table.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("op", [attention, gat, gatv2, sddmm])
def test_rows(
    op: Callable[..., list[Tensor]], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for packed in (1, 4, 8):
        monkeypatch.setattr(RowLoad, "packed", packed)
        for table in TABLES:
            table.cache_clear()
        clear_cache()
        found.append(op(device, dtype, RowWindows.from_edge_index(*graph(device))))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("op", [attention, gat_by_eights, gat_by_sixteens, spmm])
def test_windows(
    op: Callable[..., list[Tensor]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for packed in (1, 4, 8):
        monkeypatch.setattr(Load, "packed", packed)
        clear_cache()
        found.append(op(device, torch.float16, RowWindows.from_edge_index(*graph(device))))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
