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


def test_steps_of_loads_differ() -> None:
    """Or the test above would run one kernel twice."""
    tables = (
        lambda load: launch.attention_row(8, 8, 4, load),
        lambda load: launch.gat_row(8, 8, 4, load, True),
        lambda load: launch.gatv2_row(8, 8, 4, load, True),
    )
    for row in tables:
        assert len({row(load).step for load in launch.RowLoad}) >= 3
