"""Factors of columns in half precision: of what size they may be, and whom they reach."""

from __future__ import annotations

import pytest
import torch

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS

HALVES = [torch.float16, torch.bfloat16]
# degrees of hubs and their roots as divisors; weights that are far from 1; what float16 cannot hold
SIZES = [2.0**-22, 1e-6, 3e-3, 1.0, 200.0, 1e3, 6e4, 1e6]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", ["ragged", "hub", "repeated"])
def test_factors_of_all_sizes_keep_their_bits(
    graph: str, size: float, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(num_src, 9, device=device, generator=generator).to(dtype)
    scale = (torch.rand(num_src, device=device, generator=generator) + 0.5) * size
    row_scale = torch.full((num_dst,), 1 / size, device=device)  # what is returned is near 1
    y = ops.spmm(windows, x, col_scale=scale, row_scale=row_scale)
    exact = (x.double(), scale.double(), row_scale.double())
    wanted = reference.spmm(edge_index, exact[0], num_dst=num_dst, col_scale=exact[1], row_scale=exact[2])
    terms = reference.spmm(
        edge_index, exact[0].abs(), num_dst=num_dst, col_scale=exact[1], row_scale=exact[2]
    )
    # each factor, or product with it, is rounded once, and so is the sum
    assert ((y - wanted).abs() <= terms * (1.05 * torch.finfo(dtype).eps) + 1e-7).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e6])
def test_a_factor_reaches_its_neighbours_alone(
    bad: float, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["ragged"](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.ones(num_src, 3, device=device, dtype=dtype)
    node = int(edge_index[0, 0])
    scale = torch.ones(num_src, device=device)
    plain = ops.spmm(windows, x, col_scale=scale)
    scale[node] = bad
    y = ops.spmm(windows, x, col_scale=scale)
    its = torch.zeros(num_dst, dtype=torch.bool, device=device)
    its[edge_index[1, edge_index[0] == node]] = True
    assert its.any() and not its.all()
    assert torch.equal(y[~its], plain[~its])
    assert not torch.equal(y[its], plain[its])
    assert not (y[its] <= plain[its]).any()
