"""Keys that are promised to be short: the windows' kernel then looks for no maximum, and gives the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check


def draw(graph: str, device: torch.device, heads: int, dim: int, length: float) -> dict[str, Tensor]:
    # unit keys; queries of a length, every fifth much longer
    _, (num_src, num_dst) = GRAPHS[graph](device)
    generator = torch.Generator(device).manual_seed(1)
    shapes = {"q": num_dst, "k": num_src, "v": num_src}
    given = {
        name: torch.randn(rows, heads, dim, device=device, generator=generator)
        for name, rows in shapes.items()
    }
    unit = {name: torch.nn.functional.normalize(given[name], dim=2) for name in ("q", "k")}
    far = torch.where(torch.arange(num_dst, device=device) % 5 == 0, 10.0, 1.0)[:, None, None]
    return given | {"q": unit["q"] * length * (far if length > 2 else 1.0), "k": unit["k"]}


def halves(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("length", [0.5, 3.5], ids=["near", "some_far"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_it_changes_no_result(
    graph: str, length: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)  # hubs are cut
    turn = list(GRAPHS).index(graph) % 3
    dtype = (torch.float16, torch.bfloat16)[turn % 2]
    heads, dim, dropout = ((1, 16, 0.0), (3, 7, 0.0), (2, 8, 0.4))[turn]
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    given = halves(draw(graph, device, heads, dim, length), dtype)
    options: dict[str, Any] = {"scale": 1.0, "dropout": dropout, "seed": torch.tensor([3], device=device)}
    options["self_loops"] = num_src == num_dst and turn != 1
    op = functools.partial(ops.sparse_attention, windows=windows, key_norm=1.0, **options)
    check(op, functools.partial(reference.sparse_attention, edge_index, **options), given)


def attend(windows: RowWindows, given: dict[str, Tensor], key_norm: float) -> tuple[Tensor, Tensor]:
    graph = (windows.packed_windows, None, False, *windows.shape)
    operands = (*given.values(), None, None, None, None)
    out, softmax, _ = torch.ops.graphfuse.attention(*graph, 1.0, 0.0, False, key_norm, *operands)
    return out, softmax


def test_only_where_scores_are_near_the_bound(device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["ragged"](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    given = {name: x.half() for name, x in draw("ragged", device, 1, 16, 1.0).items()}
    given["q"][16:32] *= 30  # the second window
    _, searched = attend(windows, given, 0.0)
    _, bounded = attend(windows, given, 1.0)
    filled = torch.bincount(edge_index[1], minlength=num_dst) > 0
    bound = given["q"].float().norm(dim=2)
    far = torch.zeros_like(filled)
    far[16:32] = True
    torch.testing.assert_close(bounded[filled & ~far, :, 0], bound[filled & ~far])
    assert (bound - searched[..., 0])[filled & ~far].min() > 1e-3  # which is no maximum
    assert torch.equal(bounded[far], searched[far])
    assert torch.equal(bounded[~filled], searched[~filled])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_reach_their_neighbours_alone(value: float, device: torch.device) -> None:
    edge_index, size = GRAPHS["self_loops"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    given = {name: x.half() for name, x in draw("self_loops", device, 2, 8, 1.0).items()}
    for name in "qkv":
        spoiled = {other: x.clone() for other, x in given.items()}
        spoiled[name][11, 1, 2] = value
        out = ops.sparse_attention(**spoiled, windows=windows, scale=1.0, key_norm=1.0)
        wanted = reference.sparse_attention(edge_index, **spoiled, scale=1.0)
        assert isinstance(wanted, Tensor) and 0 < int((~wanted.isfinite()).sum()) < wanted.numel() // 2
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("key_norm", [-1.0, float("nan"), float("inf")])
def test_a_length_that_is_none_is_refused(key_norm: float, device: torch.device) -> None:
    edge_index, size = GRAPHS["ragged"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    given = draw("ragged", device, 1, 4, 1.0)
    with pytest.raises(ValueError, match="`key_norm` must be 0 or a positive length"):
        ops.sparse_attention(**given, windows=windows, key_norm=key_norm)
