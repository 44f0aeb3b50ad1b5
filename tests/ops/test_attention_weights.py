"""Attention weights against their definition, and against the attention that they are the weights of."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.ops.test_attention import DTYPES
from tests.ops.test_attention import draw as draw_attention
from tests.pairs import in_turns


def draw(*arguments: Any) -> tuple[RowWindows, Tensor, dict[str, Tensor]]:
    """As of attention, but no values."""
    windows, edge_index, given = draw_attention(*arguments)
    del given["v"]
    return windows, edge_index, given


@pytest.mark.parametrize(("graph", "dtype"), in_turns(GRAPHS, DTYPES), ids=str)
def test_weights_and_gradients_match_definition(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    heads, dim = [(1, 8), (3, 7), (2, 16), (4, 1)][(list(GRAPHS).index(graph) + DTYPES.index(dtype)) % 4]
    windows, edge_index, given = draw(graph, device, dtype, heads, dim)
    check(
        functools.partial(ops.attention_weights, windows=windows, scale=0.4),
        functools.partial(reference.attention_weights, edge_index, scale=0.4),
        given,
    )


def test_they_are_the_weights_of_attention(device: torch.device) -> None:
    windows, (source, receiver), given = draw("repeated", device, torch.float32, 2, 8)
    v = torch.randn(20, 2, 8, device=device)
    weights = ops.attention_weights(**given, windows=windows)
    summed = torch.zeros_like(v).index_add(0, receiver, weights[:, :, None] * v[source])
    torch.testing.assert_close(summed, ops.sparse_attention(**given, v=v, windows=windows))
    backwards = ops.attention_weights(given["k"], given["q"], windows.transpose())
    wanted = reference.attention_weights(torch.stack([receiver, source]), given["k"], given["q"])
    torch.testing.assert_close(backwards, wanted)


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_the_maximum_is_a_true_one(level: float, device: torch.device) -> None:
    windows, edge_index, given = draw("self_loops", device, torch.float32, 1, 4)
    q, k = torch.full_like(given["q"], level / 4), torch.ones_like(given["k"])
    degree = torch.bincount(edge_index[1], minlength=37)[edge_index[1]]
    torch.testing.assert_close(ops.attention_weights(q, k, windows, 1.0), 1 / degree[:, None].float())


def test_derivatives() -> None:
    windows, _, given = draw("isolated", torch.device("cpu"), torch.float64, 2, 3)
    op = functools.partial(ops.attention_weights, windows=windows)
    assert torch.autograd.gradcheck(op, tuple(given.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(op, tuple(given.values()), fast_mode=True)


def test_bitwise_repeatable(device: torch.device) -> None:
    windows, _, given = draw("hub", device, torch.float16, 2, 16)
    found = []
    for _ in range(5 if device.type == "cuda" else 2):  # nothing races in the interpreter
        weights = ops.attention_weights(**given, windows=windows)
        found.append([weights, *torch.autograd.grad(weights.square().sum(), list(given.values()))])
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    windows, _, given = draw("bipartite", device, torch.float32, 2, 4)
    with pytest.raises(ValueError, match=r"`q` must have shape \[21, heads, head_dim\]"):
        ops.attention_weights(given["k"], given["q"], windows)
    with pytest.raises(ValueError, match=r"`k` must have the dtype of `q`"):
        ops.attention_weights(given["q"], given["k"].half(), windows)
