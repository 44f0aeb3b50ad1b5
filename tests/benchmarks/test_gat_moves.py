"""What GAT has to move: which launches stand for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import floors, gat_moves, moves
from benchmarks.moves import NONE, Numbers
from graphfuse import RowWindows
from graphfuse.formats.walk import Walk
from graphfuse.kernels import launch
from graphfuse.testing import GRAPHS

CONFIG = floors.Config(True, 4, 8, 1, 1)
HEADS = Numbers(4, torch.int16)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers are known, and what is timed runs once and takes a millisecond."""
    monkeypatch.setattr(floors, "by_task", lambda *arguments: [CONFIG])
    monkeypatch.setattr(
        moves, "time_call", lambda call, on, seconds: call() or type("Time", (), {"p50_ms": 1.0})
    )


@pytest.mark.parametrize("num_rows", [1, 33])
def test_the_stream_reads_three_matrices(num_rows: int, device: torch.device) -> None:
    given = [torch.randint(1000, (num_rows, 64), dtype=torch.int32, device=device) for _ in range(3)]
    stats, numbers = gat_moves.Stream(num_rows, 64, 4)(*given)
    wanted = sum(given).sum(1, keepdim=True)
    assert torch.equal(stats, wanted.int().expand(-1, 16))
    assert torch.equal(numbers, wanted.to(torch.int16).expand(-1, 4))


def test_launches_of_each_pass(measured: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ran = list[tuple[Any, ...]](), list[tuple[str, int]]()

    class Noted:
        def __init__(self, w: Walk, *others: Any, **more: Any) -> None:
            self.w = w
            made.append((w.num_rows, w.num_cols, *others, more))

        def __call__(self, x: torch.Tensor) -> None:
            ran.append(("walk", self.w.num_rows))
            assert x.shape == (self.w.num_cols, 32)

    class NotedStream(gat_moves.Stream):
        def __call__(self, *given: torch.Tensor) -> Any:
            ran.append(("stream", given[0].size(0)))
            assert len({id(one) for one in given}) == 3
            return super().__call__(*given)

    monkeypatch.setattr(gat_moves, "Moves", Noted)
    monkeypatch.setattr(gat_moves, "Stream", NotedStream)
    windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 2], [1, 0, 0]], device=device), (3, 2))
    assert gat_moves.gat_moves_ms(windows, 4, 16, torch.float16, False) == 1.0
    assert made == [(2, 3, 32, 2, CONFIG, HEADS, NONE, {"copies": 1})]
    made.clear()
    ran.clear()
    assert gat_moves.gat_moves_ms(windows, 4, 16, torch.float16, True) == 1.0
    assert made == [
        (2, 3, 32, 2, CONFIG, HEADS, Numbers(8), {"copies": 2}),
        (3, 2, 32, 2, CONFIG, Numbers(16), HEADS, {"own": True}),
    ]
    assert ran[:3] == [("walk", 2), ("stream", 2), ("walk", 3)]


@pytest.mark.parametrize("backward", [False, True])
def test_slices_are_those_of_gat(
    backward: bool, measured: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 16)
    monkeypatch.setattr(launch, "slices", lambda *arguments: 2)
    edge_index, size = GRAPHS["hub"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    walks = list[Walk]()
    made = gat_moves.Moves
    monkeypatch.setattr(
        gat_moves, "Moves", lambda w, *given, **more: walks.append(w) or made(w, *given, **more)
    )
    assert gat_moves.gat_moves_ms(windows, 8, 16, torch.float16, backward) is not None
    wanted = [windows.walk(), windows.transpose().walk()][: 1 + backward]
    assert len(walks) == len(wanted)
    for w, plain in zip(walks, wanted, strict=True):
        assert 0 < w.num_slots < plain.num_slots and w.num_rows == plain.num_rows
