"""The sampled product against its definition."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.ops.test_spmm import DTYPES, build, draw
from tests.pairs import with_dtypes


@pytest.mark.parametrize(("graph", "dtype"), with_dtypes(GRAPHS, DTYPES), ids=str)
def test_output_and_gradients_match_definition(
    graph: str, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    windows, edge_index, num_src, num_dst = build(graph, device)
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype)
    inputs = draw(device, dtype, a=(num_dst, 9), b=(num_src, 9))
    op = functools.partial(ops.sddmm, windows, without_loops=turn % 2 == 0)
    check(op, functools.partial(reference.sddmm, edge_index, without_loops=turn % 2 == 0), inputs)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*itertools.product((1, 7, 130), (torch.float16, torch.float32)), (602, torch.float32)],
    ids=str,
)
def test_widths(
    dim: int, dtype: torch.dtype, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    windows, edge_index, num_src, num_dst = build("hub", device)
    inputs = draw(device, dtype, a=(num_dst, dim), b=(num_src, dim))
    check(functools.partial(ops.sddmm, windows), functools.partial(reference.sddmm, edge_index), inputs)


def test_derivatives(walked: str) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 1, 0, 5], [0, 1, 2, 16, 16, 17, 5]])
    windows = RowWindows.from_edge_index(edge_index, (18, 18))
    inputs = tuple(draw(torch.device("cpu"), torch.float64, a=(18, 2), b=(18, 2)).values())
    op = functools.partial(ops.sddmm, windows, without_loops=True)
    assert torch.autograd.gradcheck(op, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, inputs, fast_mode=True)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    windows = build("bipartite", device)[0]
    a, b = torch.randn(21, 4, device=device), torch.randn(50, 4, device=device)
    with pytest.raises(ValueError, match=r"`a` must have shape \[21, dim\] \(got \[50, 4\]\)"):
        ops.sddmm(windows, b, a)
    with pytest.raises(ValueError, match=r"`b` must have shape \[50, 4\] \(got \[50, 3\]\)"):
        ops.sddmm(windows, a, b[:, :3])
    with pytest.raises(ValueError, match=r"`b` must have the dtype of `a`"):
        ops.sddmm(windows, a, b.half())
