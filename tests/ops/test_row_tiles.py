"""Kernels that walk the rows of a matrix once: a large one's tile gives what a small one's does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

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


def _kernels(name: str) -> ModuleType:
    pytest.importorskip("triton")
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
    launch = _kernels("launch")
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


def test_slices_of_rows_are_few_enough_to_be_merged() -> None:
    """Each is whole steps: at most 264 slices of few rows, and 1,056 of any."""
    launch = _kernels("launch")
    for num_rows, rows, wanted in ((19_717, 16, 247), (81_306, 8, 598), (232_965, 8, 1041), (100, 8, 13)):
        length, num_slices = launch.row_slices(num_rows, rows)
        assert num_slices == wanted and length % rows == 0
        assert (num_slices - 1) * length < num_rows <= num_slices * length
    assert launch.row_slices(19_717, 16, 2) == (48, 411)


def test_programs_take_twice_the_rows_of_a_large_matrix() -> None:
    launch = _kernels("launch")
    few, many = launch.rows_at_once(128, 8191), launch.rows_at_once(128, 8192)
    assert few == launch.whole_rows(128) and (few.rows, few.warps) == (8, 4)
    assert (many.rows, many.warps) == (16, 8)
