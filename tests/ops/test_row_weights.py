"""Kernels that walk rows weigh an edge by e to the power of its score; where it will not do, again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import OPS
from tests.ops.test_additive_attention import draw as draw_additive
from tests.ops.test_attention import draw as draw_attention

KINDS = ("attention", "gat", "gatv2")
LONELY = torch.tensor([[4, 1, 2, 3, 3, 5], [0, 1, 2, 2, 3, 3]])  # rows 0 and 1 have an edge, 1 its own loop
BEYOND = (30.0, 31.0, 40.0, 100.0, 3e4)  # e to the power of 100 is no number of float32


def drawn(kind: str, graph: str, device: torch.device) -> tuple[Any, Any, RowWindows, dict[str, Tensor]]:
    """Op and definition, of windows of one of the graphs, with operands of two heads in float32."""
    if kind == "attention":
        op, definition = ops.sparse_attention, reference.sparse_attention
        windows, edge_index, given = draw_attention(graph, device, torch.float32, 2, 8)
    else:
        op, definition = OPS[kind]
        windows, edge_index, given = draw_additive(kind, graph, device, torch.float32, 2, 8)
    return op, functools.partial(definition, edge_index), windows, given


def push(kind: str, given: dict[str, Tensor], levels: Tensor) -> dict[str, Any]:
    """Moves scores of each row and head by about the levels, and says what the op then takes."""
    with torch.no_grad():
        if kind == "gat":
            given["a_dst"] += levels
            return {"negative_slope": 1.0}
        if kind == "gatv2":  # of one number: as much again, times the slope
            given["att"][:, 0] = 1.0
            given["x_dst"][:, :, 0] += levels
            return {"negative_slope": 1.0}
        given["k"][:, :, 0] = 1.0
        given["q"][:, :, 0] = levels
        return {"scale": 1.0}


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_far_from_0(kind: str, sign: int, loops: bool, device: torch.device) -> None:
    """In one head of some rows, as far as each, while others are near it."""
    op, definition, windows, given = drawn(kind, "ragged", device)
    rows = windows.shape[0]
    levels = torch.zeros(rows, 2, device=device)
    levels[: len(BEYOND), 0] = sign * torch.tensor(BEYOND, device=device)
    levels[len(BEYOND) : 2 * len(BEYOND), 1] = sign * torch.tensor(BEYOND, device=device)
    options = push(kind, given, levels) | {"self_loops": loops}
    check(functools.partial(op, windows=windows, **options), functools.partial(definition, **options), given)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edge_alone_weighs_one(kind: str, loops: bool, device: torch.device) -> None:
    """To the last bit, whatever its score: a weight over itself, rounded, might not."""
    windows = RowWindows.from_edge_index(LONELY.to(device), (6, 6))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 8, generator=generator).to(device)
    call: dict[str, Callable[..., Tensor]] = {
        "attention": lambda scores: ops.sparse_attention(x * scores, x, x, windows, self_loops=loops),
        "gat": lambda scores: ops.gat_attention(x[..., 0] * scores, x[..., 1], x, windows, self_loops=loops),
        "gatv2": lambda scores: ops.gatv2_attention(x * scores, x, x[0], windows, self_loops=loops),
    }
    for scores in (0.1, 1.0, 10.0, 1e3):
        out = call[kind](scores)
        other = x * scores if kind == "gatv2" else x
        assert torch.equal(out[1], other[1])
        if loops:
            assert torch.equal(out[4:], other[4:])  # without an edge, but for the loop
        else:
            assert torch.equal(out[0], other[4]) and not out[4:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_slices_begin_again_each_for_itself(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they found is joined by their maxima."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    op, definition, windows, given = drawn(kind, "hub", device)
    assert windows.walks(True, False).forward.num_slots > 0
    source = {"attention": "k", "gat": "a_src", "gatv2": "x_src"}[kind]
    options = push(kind, given, torch.full((100, 2), 4.0, device=device))
    with torch.no_grad():  # of the hub's slices the first has scores beyond, and the last one of its heads
        given[source][:20] *= 15.0
        given[source][80:, 0] *= -15.0
    check(functools.partial(op, windows=windows, **options), functools.partial(definition, **options), given)


def test_the_graphs_have_what_is_asked_of_them() -> None:
    edge_index, size = GRAPHS["ragged"](torch.device("cpu"))
    assert (torch.bincount(edge_index[1], minlength=size[1])[: 2 * len(BEYOND)] > 0).all()
