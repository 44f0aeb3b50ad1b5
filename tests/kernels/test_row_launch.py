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
def test_gatv2_in_half_precision_takes_wide_steps_where_rows_are_long_or_few(backward: bool) -> None:
    load = launch.RowLoad
    long = {(1, 32): 2, (1, 64): 2, (1, 128): 2, (8, 16): 4, (2, 64): 4, (4, 32): 4}  # steps of attention's
    few = {
        (1, 64): (4, 1),
        (1, 128): (4, 3),
        (8, 16): (4, 3),
        (2, 64): (4, 3),
        (4, 32): (4, 3),
        (8, 8): (4, 1),
    }
    if backward:
        few = {shape: (2 if shape in ((1, 64), (8, 16), (8, 8)) else 4, 1) for shape in few}
    for shape in [(1, 16), (1, 32), (8, 64), (8, 8), *few]:
        config = {rows: launch.gatv2_row(*shape, 2, rows, backward) for rows in load}
        attention = launch.attention_row(*shape, 2, load.NORMAL, backward)
        assert config[load.SHORT] == attention._replace(stages=1)
        assert config[load.NORMAL] == attention._replace(stages=1, packed=4)
        step, warps = long.get(shape, 1), attention.warps
        if backward:
            step, warps = (2, 2) if shape[1] >= 32 and shape in long else (1, attention.warps)
        assert config[load.LONG] == attention._replace(step=step * attention.step, stages=1, warps=warps)
        step, stages = few.get(shape, (2 if shape == (8, 64) and not backward else 1, 3))
        warps = (1 if backward and shape[0] == 1 else 2) if shape in few else attention.warps
        assert config[load.FEW] == attention._replace(step=step * attention.step, stages=stages, warps=warps)


@pytest.mark.parametrize("backward", [False, True])
def test_gat_in_half_precision_has_a_pipeline_where_rows_are_few_and_wide(backward: bool) -> None:
    for shape in [(1, 64), (4, 32), (8, 16), (8, 8)]:
        for load in launch.RowLoad:
            config = launch.gat_row(*shape, 2, load, backward)
            assert config.stages == (3 if load is launch.RowLoad.FEW and shape[1] >= 32 else 1)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_with_numbers_of_edges_has_a_pipeline(heads: int, dtype: torch.dtype) -> None:
    """In half precision only where rows are few or short, or in backward of one head."""
    load = launch.RowLoad
    for rows in load:
        for backward in (False, True):
            config = launch.attention_row(heads, 32, dtype.itemsize, rows, backward, 16)
            none = dtype in HALF and rows in (load.NORMAL, load.LONG) and (heads > 1 or not backward)
            assert config.stages == (1 if none else 2)
