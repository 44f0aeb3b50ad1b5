"""Programs that share a block: those beyond the last do nothing, and the others what they do alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, clear_cache, ops
from graphfuse.kernels import launch, run
from graphfuse.kernels.device import INTERPRETING
from tests.ops.test_spmm import draw

NODES = 74  # and a task, so that the last block is not full


def graph(device: torch.device) -> RowWindows:
    """Three edges a row, and one of 73, which is a task."""
    column = torch.arange(NODES).repeat(3)
    row = (column * 7 + torch.arange(3).repeat_interleave(NODES)) % NODES
    hub = torch.stack([torch.arange(70), torch.full((70,), NODES - 1)])
    edge_index = torch.cat([torch.stack([column, row]), hub], 1).to(device)
    return RowWindows.from_edge_index(edge_index, (NODES, NODES))


def trained(op: Callable[..., Tensor], given: dict[str, Tensor], windows: RowWindows) -> list[Tensor]:
    out = op(**given, windows=windows, self_loops=True)
    return [out, *torch.autograd.grad(out.square().sum(), tuple(given.values()))]


def attention(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shape = (NODES, 2, 8)
    return trained(ops.sparse_attention, draw(device, dtype, q=shape, k=shape, v=shape), graph(device))


def gat(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    given = draw(device, dtype, a_src=(NODES, 2), a_dst=(NODES, 2), x=(NODES, 2, 8))
    return trained(ops.gat_attention, given, graph(device))


def gatv2(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    given = draw(device, dtype, x_src=(NODES, 2, 8), x_dst=(NODES, 2, 8), att=(2, 8))
    return trained(ops.gatv2_attention, given, graph(device))


def sddmm(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    given = draw(device, dtype, a=(NODES, 33), b=(NODES, 33))
    return [ops.sddmm(graph(device), given["a"], given["b"])]


CASES = [(op, torch.float32) for op in (attention, gat, gatv2, sddmm)] + [(gatv2, torch.float16)]


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("alone", [True, False])  # backward of float32 in one kernel
@pytest.mark.parametrize("rows", [1, 2])  # of a program of GAT
def test_as_many_rows_of_a_block(
    op: Callable[..., list[Tensor]],
    dtype: torch.dtype,
    alone: bool,
    rows: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphfuse.kernels.float32_rows.one_backward", lambda *counts: alone)
    monkeypatch.setattr("graphfuse.kernels.float32_rows.rows_of_gat", lambda *counts: rows)
    clear_cache()
    expected = op(device, dtype)
    launched = pack(monkeypatch, 4)
    clear_cache()
    assert all(map(torch.equal, op(device, dtype), expected))
    assert any(launched)


def pack(monkeypatch: pytest.MonkeyPatch, packed: int) -> list[int]:
    """Has row kernels packed, and says of their launches how many programs of the last block are beyond."""
    for name in ("attention_row", "gat_row", "gatv2_row", "sddmm_row"):
        table = getattr(launch, name)
        changed = lambda *call, table=table: table(*call)._replace(packed=packed)  # noqa: E731
        monkeypatch.setattr(launch, name, changed)
    found: list[int] = []
    prepare = run.Launch.__init__

    def watched(self: run.Launch, kernel: Any, programs: int, *others: Any, **given: Any) -> None:
        prepare(self, kernel, programs, *others, **given)
        if self._packed > 1:
            blocks = -(-programs // packed)
            found.append(blocks * packed - programs)
            if INTERPRETING:  # which has no blocks
                self._grid = (blocks * packed, self._grid[1])

    monkeypatch.setattr(run.Launch, "__init__", watched)
    return found
