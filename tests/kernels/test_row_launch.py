"""Where GAT walks rows of small graphs, and how rows of GATv2 are launched, in half precision."""

from __future__ import annotations

import pytest
import torch

from graphfuse.kernels import launch
from graphfuse.kernels.device import HALF


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dim", [8, 16])
def test_gat_walks_windows_of_small_sparse_graphs(dim: int, dropout: bool, dtype: torch.dtype) -> None:
    def by_rows(rows: int, cols: int, edges: int, heads: int = 6, dtype: torch.dtype = dtype) -> bool:
        return launch.gat_prefers_rows(rows, cols, edges, edges, heads, dim, True, dropout, dtype, dtype)

    assert not by_rows(4223, 4223, 8 * 4223) and by_rows(4223, 4223, 8 * 4223 + 1)
    assert by_rows(4224, 4223, 8 * 4223) and by_rows(4223, 4224, 8 * 4223)
    assert by_rows(2708, 2708, 10_556, dtype=torch.float32)
    assert by_rows(2708, 2708, 10_556, heads=1) == (dim == 8)  # 16 features together
    for heads, narrow, rows in ((8, 4, False), (8, 7, False), (2, 7, True), (1, 15, True)):
        which = (2708, 2708, 10_556, 9_591, heads, narrow, True, dropout, dtype, dtype)
        assert launch.gat_prefers_rows(*which) == rows


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gat_trains_by_rows_where_terms_are_of_another_dtype(dtype: torch.dtype) -> None:
    """Backward sums no factors of heads that are a sector then."""
    which = (10_000, 10_000, 12_000, 10_000, 8, 16, True, False)
    assert launch.gat_prefers_rows(*which, torch.float32, dtype)
    assert not launch.gat_prefers_rows(*which, dtype, dtype)


@pytest.mark.parametrize("backward", [False, True])
def test_gatv2_in_half_precision_has_no_pipeline_where_rows_are_many(backward: bool) -> None:
    shapes = [(1, 64), (1, 128), (8, 16), (8, 64), (4, 32), (8, 8)]
    for shape in shapes:
        config = {load: launch.gatv2_row(*shape, 2, load, backward) for load in launch.RowLoad}
        attention = launch.attention_row(*shape, 2, launch.RowLoad.NORMAL, backward)
        assert config[launch.RowLoad.SHORT] == config[launch.RowLoad.NORMAL] == attention._replace(stages=1)
        few = config[launch.RowLoad.FEW]  # forward reads twice as much ahead
        wide = shape in ((8, 16), (8, 64), (4, 32)) and not backward
        assert few == attention._replace(step=(1 + wide) * attention.step) and few.stages == 3
