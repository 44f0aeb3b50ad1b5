"""The kernels that move what an aggregation moves: that they read and write all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import floors, graphs, moves
from graphfuse import RowWindows
from graphfuse.formats.build import places_of
from graphfuse.formats.walk import Walk
from graphfuse.kernels import launch

# compiles the kernels for a GPU that is not there
COMPILES = """
from types import SimpleNamespace

import torch, triton
from triton.backends.compiler import GPUTarget

device = {"get_current_device": lambda: 0, "get_current_stream": lambda index: 0}
target = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, **device))

from benchmarks.gat_moves import _stream_kernel
from benchmarks.moves import _join_kernel, _walk_kernel

x = torch.zeros(4, 32, dtype=torch.int32)
_walk_kernel.warmup(x, None, None, x, None, x, *[x] * 3, 4, 32, 32, 0, 0, 16, 4, 2, 1, num_warps=1, grid=(1,))
_walk_kernel.warmup(*[x] * 5, None, *[x] * 3, 4, 64, 32, 8, 16, 16, 4, 2, 2, num_warps=1, grid=(1,))
_join_kernel.warmup(*[x] * 4, 4, 32, 32, 4, 2, 2, num_warps=4, grid=(1,))
_stream_kernel.warmup(*[x] * 5, 4, 64, 32, 8, 16, num_warps=4, grid=(1,))
"""


def sums_of_windows(w: Walk, x: Tensor) -> Tensor:
    """What each row's window reads, by definition."""
    of_task = torch.stack([x[w.column[begin:end]].sum(0) for _, begin, end, _ in w.tasks.tolist()]).to(
        x.dtype
    )
    of_window = x.new_zeros(-(-w.num_rows // 16), x.size(1)).index_add_(0, w.tasks[:, 0].long(), of_task)
    of_place = of_window.repeat_interleave(16, 0)
    if w.row_index is None:
        return of_place[: w.num_rows]
    out = x.new_zeros(w.num_rows, x.size(1))
    there = w.row_index < w.num_rows
    out[w.row_index[there].long()] = of_place[: w.row_index.numel()][there]
    return out


@pytest.mark.parametrize("wide", [1, 2], ids=["float32", "half"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("reorder", ["natural", "degree"])
def test_all_is_read_and_written(
    wide: int, cut: bool, reorder: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 16)
    edges = torch.rand(50, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    edge_index = edges.nonzero().t().contiguous().to(device)
    windows = RowWindows.from_edge_index(edge_index, (50, 60), reorder=reorder)
    w = windows.walk()
    assert (w.num_slots > 0) == cut and (w.row_index is None) == (reorder == "natural")
    x = torch.randint(1000, (50, 8), dtype=torch.int32, device=device)
    config = floors.Config(True, 4, 8, 1, 2)
    (found,) = moves.Moves(w, 8, wide, config)(x)
    assert torch.equal(found, sums_of_windows(w, x))
    # numbers beside it, of which each block of words reads and writes its share; and two copies
    numbers = list[Tensor]()
    room = moves.Numbers.of
    monkeypatch.setattr(moves.Numbers, "of", lambda *given: numbers.append(room(*given)) or numbers[-1])
    two = moves.Moves(w, 8, wide, config, moves.Numbers(4, torch.int16), moves.Numbers(2), copies=2)
    (beside,) = numbers
    beside.copy_(torch.randint(100, beside.shape))
    wanted = sums_of_windows(w, x + beside.view(-1, 2, 2).sum(2).repeat_interleave(4, 1).int())
    assert all(torch.equal(one, wanted) for one in two(x))
    if not cut:
        assert torch.equal(numbers[-1], wanted.view(-1, 2, 4).amax(2))


@pytest.mark.parametrize("reorder", ["natural", "degree"])
def test_each_task_reads_the_rows_of_its_window(
    reorder: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 16)
    edges = torch.rand(50, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    windows = RowWindows.from_edge_index(
        edges.nonzero().t().contiguous().to(device), (50, 60), reorder=reorder
    )
    w = windows.walk()
    x = torch.zeros(50, 8, dtype=torch.int32, device=device)
    walk = moves.Moves(w, 8, 2, floors.Config(True, 4, 8, 1, 2), own=True)
    assert walk.own is not None
    window = places_of(torch.arange(60, device=device), 60, w.row_index) // 16
    walk.own.copy_(torch.randint(1000, (60, 8)))
    greatest = walk.own.new_zeros(4, 8).scatter_reduce_(0, window[:, None].expand(-1, 8), walk.own, "amax")
    tasks = torch.bincount(w.tasks[:, 0].long())
    assert torch.equal(walk(x)[0].long(), (greatest * tasks[:, None])[window])


def test_the_fastest_is_measured_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [floors.Config(True, block, 8, 1, 1) for block in (4, 2, 1, 4)]
    asked: list[int] = []
    taken = iter((3.0, 4.0, 5.0, 4.0, 4.0, 2.0))

    def by_task(windows: Any, row_bytes: int) -> list[floors.Config] | None:
        asked.append(row_bytes)
        return None if row_bytes < 4 else configs

    monkeypatch.setattr(floors, "by_task", by_task)
    monkeypatch.setattr(
        moves, "time_call", lambda call, on, seconds: type("Time", (), {"p50_ms": next(taken)})
    )
    windows = graphs.load("tiny", device).windows
    assert moves.moves_ms(windows, 8, torch.float16) == 2.0
    assert moves.moves_ms(windows, 8, torch.bfloat16) == 2.0
    assert moves.moves_ms(windows, 1, torch.float16) is None
    assert asked == [16, 16, 2]


def test_backward_is_the_transpose_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "by_task", lambda *arguments: [floors.Config(True, 4, 8, 1, 1)])
    ran: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        moves, "Moves", lambda w, *others: lambda x: ran.append((w.num_rows, w.num_cols, x.size(0)))
    )
    monkeypatch.setattr(
        moves, "time_call", lambda call, on, seconds: call() or type("Time", (), {"p50_ms": 1.0})
    )
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 2], [1, 0, 0]], device=device), (3, 2))
    moves.moves_ms(windows, 8, torch.float16)
    assert set(ran) == {(2, 3, 3)}
    ran.clear()
    moves.moves_ms(windows, 8, torch.float16, backward=True)
    assert set(ran) == {(2, 3, 3), (3, 2, 2)}


def test_slices_are_those_of_spmm(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 16)
    monkeypatch.setattr(launch, "spmm_slices", lambda *arguments: 2)
    monkeypatch.setattr(floors, "by_task", lambda *arguments: [floors.Config(True, 4, 8, 1, 1)])
    walks: list[Walk] = []
    monkeypatch.setattr(moves, "Moves", lambda w, *others: walks.append(w) or (lambda x: x))
    edges = torch.rand(120, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    windows = RowWindows.from_edge_index(edges.nonzero().t().contiguous().to(device), (120, 60))
    assert moves.moves_ms(windows, 8, torch.float16) is not None
    (w,) = walks
    assert 0 < w.num_slots < windows.walk().num_slots


def test_all_kernels_compile(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILES], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.rglob("*.cubin"))) == 4
