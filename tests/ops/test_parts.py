"""Windows of `spmm` that several warps walk side by side, each a part of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphfuse.kernels import launch
from tests.ops.test_spmm import DTYPES, check_spmm


@pytest.fixture(params=[2, 4])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[launch.Config]:
    """How each kernel that walks windows was launched."""
    own: Callable[..., launch.Config] = launch.spmm_window
    found: list[launch.Config] = []

    def several(*arguments: object) -> launch.Config:
        found.append(own(*arguments)._replace(parts=request.param))
        return found[-1]

    monkeypatch.setattr(launch, "spmm_window", several)
    monkeypatch.setattr(launch, "prefers_rows", lambda *arguments: False)
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 96)
    return found


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("graph", "dim"), [("hub", 64), ("repeated", 33), ("isolated", 128), ("ragged", 7)])
def test_sums_of_parts(
    graph: str, dim: int, dtype: torch.dtype, loops: bool, parts: list[launch.Config], device: torch.device
) -> None:
    check_spmm(graph, device, dtype, dim, False, loops)
    assert parts
