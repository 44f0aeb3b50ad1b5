"""What the launch table chooses."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels import launch
from graphfuse.kernels.device import HALF

FEW, MANY = (1000, 1000, 2000, 1000), (1000, 1000, 4000, 1000)  # rows, columns, edges, column entries


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gat_trains_by_rows_where_heads_are_a_sector(dtype: torch.dtype) -> None:
    def by_rows(sizes: tuple[int, int, int, int], heads: int, dim: int, trained: bool) -> bool:
        return launch.gat_prefers_rows(*sizes, heads, dim, trained, dtype)

    assert by_rows(FEW, 8, 16, True) and not by_rows(FEW, 8, 16, False)
    assert not by_rows(MANY, 8, 16, True)  # windows have less to skip
    assert not by_rows(FEW, 1, 16, True) and not by_rows(FEW, 4, 32, True)
    assert by_rows(MANY, 8, 8, True) and not by_rows(MANY, 8, 8, False)  # two heads of 16 bytes are a sector
    assert by_rows((1000, 1000, 1500, 1000), 8, 8, False)
    assert by_rows(MANY, 1, 8, False) and by_rows(MANY, 8, 4, False)
    for trained in (False, True):
        assert launch.gat_prefers_rows(*MANY, 4, 32, trained, torch.float32)
