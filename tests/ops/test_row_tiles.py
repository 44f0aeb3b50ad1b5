"""Kernels that walk the rows of a matrix once: a large one's tile gives what a small one's does."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Launched = Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]
LAUNCHES: dict[str, Launched] = {
    "columns": lambda x, of_row: (_kernels("columns").add_bias(x.flatten(1), x[0].flatten()),),
    "logits": lambda x, of_row: _kernels("logits").logits(x, x[:1].contiguous(), x[1:2].contiguous()),
    "unit_rows": lambda x, of_row: _kernels("unit_rows").unit_rows(x.flatten(1), of_row[:1], 1e-12),
    "gathered": lambda x, of_row: (_kernels("gathered").gathered({}, x, x.size(2) + 3, of_row),),
}


def _kernels(name: str):
    return importlib.import_module(f"graphfuse.kernels.{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 1), (131, 3, 7), (1100, 1, 2), (33, 2, 64)], ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_tile_of_a_large_matrix(
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from graphfuse.kernels import launch

    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator).to(device, dtype)
    of_row = torch.randn(shape[0], generator=generator).to(device, dtype)
    tiles, found = [], []
    for many in (1 << 62, 0):
        monkeypatch.setattr(launch, "_MANY_ELEMENTS", many)
        for kernels in ("columns", "logits", "unit_rows"):
            for plan in ("_bias_plan", "_plan"):
                if hasattr(_kernels(kernels), plan):
                    getattr(_kernels(kernels), plan).cache_clear()
        tiles.append(launch.rows_at_once(shape[2], shape[0]).rows)
        found.append(LAUNCHES[name](x, of_row))
    assert tiles[1] == 2 * tiles[0]
    for small, large in zip(*found, strict=True):
        assert bool(torch.isfinite(small).all())
        torch.testing.assert_close(large, small)
