"""Row kernels with the steps of large graphs: small ones have few rows, or short ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphfuse.kernels import launch
from tests.ops.test_additive_attention import check_additive
from tests.ops.test_attention import check_attention

OPS = ("attention", "gat", "gatv2")


def take(table: str, load: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Has ``table`` of the launch table say ``load`` of any walk; returns what it is asked, as it comes."""
    asked = list[tuple[int, ...]]()

    def always(*sizes: int) -> Any:
        asked.append(sizes)
        return load

    monkeypatch.setattr(launch, table, always)
    return asked


@pytest.mark.parametrize("load", [launch.RowLoad.NORMAL, launch.RowLoad.LONG], ids=lambda load: load.name)
@pytest.mark.parametrize("shape", [(1, 16), (8, 8)], ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_float32(
    kind: str,
    shape: tuple[int, int],
    load: launch.RowLoad,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = take("row_load", load, monkeypatch)
    options: dict[str, Any] = {"dropout": 0.3, "seed": torch.tensor([5], device=device), "self_loops": True}
    if kind == "attention":
        check_attention("self_loops", device, torch.float32, *shape, **options)
    else:
        check_additive(kind, "self_loops", device, torch.float32, *shape, **options)
    assert asked


@pytest.mark.parametrize("shape", [(4, 32), (1, 128), (2, 128), (8, 8)], ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_sums_of_few_edges_a_step_are_as_exact(
    kind: str, shape: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 99 edges, one after the other or two."""
    asked = take("row_load", launch.RowLoad.NORMAL, monkeypatch)
    if kind == "attention":
        check_attention("hub", device, torch.float32, *shape)
    else:
        check_additive(kind, "hub", device, torch.float32, *shape)
    assert asked


def test_steps_of_loads_differ() -> None:
    """Or the first test would run one kernel twice."""
    for row in (launch.attention_row, launch.gat_row, launch.gatv2_row):
        normal, long = (row(8, 8, 4, load, True) for load in (launch.RowLoad.NORMAL, launch.RowLoad.LONG))
        assert (normal.step, normal.warps) != (long.step, long.warps)
