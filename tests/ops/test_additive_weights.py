"""Weights of GAT's and GATv2's attention against their definition and the attention they belong to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.nn._gat import few_edges
from tests.ops.test_additive_attention import DTYPES, draw

OPS: dict[str, tuple[Any, Any]] = {
    "gat": (ops.gat_attention_weights, reference.gat_attention_weights),
    "gatv2": (ops.gatv2_attention_weights, reference.gatv2_attention_weights),
}
KINDS = pytest.mark.parametrize("kind", OPS)


def weights_of(fn: Any, *arguments: Any, **options: Any) -> Tensor:
    alpha: Tensor = fn(*arguments, **options)[1]
    return alpha


@pytest.mark.parametrize("graph", GRAPHS)
@KINDS
def test_weights_and_gradients_match_definition(kind: str, graph: str, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph)
    loops, edges = turn % 3 != 0, turn % 2 == 0
    options = {
        "self_loops": loops,
        "dropout": 0.3 * (turn % 4 == 1),
        "seed": torch.tensor([5], device=device),
    }
    windows, edge_index, given = draw(kind, graph, device, DTYPES[turn % 3], 2, 8, edges, loops)
    given.pop("x", None)
    op, definition = OPS[kind]
    check(
        functools.partial(weights_of, op, windows=windows, **options),
        functools.partial(weights_of, definition, edge_index, **options),
        given,
    )
    (found, _), (wanted, _) = (
        op(**given, windows=windows, **options),
        definition(edge_index, **given, **options),
    )
    assert torch.equal(found, wanted)


@KINDS
def test_they_are_the_weights_of_attention(kind: str, device: torch.device) -> None:
    windows, _, given = draw(kind, "repeated", device, torch.float32, 2, 8)
    options = {"self_loops": True, "dropout": 0.4, "seed": torch.tensor([7], device=device)}
    attend = {"gat": ops.gat_attention, "gatv2": ops.gatv2_attention}[kind]
    out = attend(**given, windows=windows, **options)
    x = given.pop("x") if kind == "gat" else given["x_src"]
    (source, receiver), alpha = OPS[kind][0](**given, windows=windows, **options)
    summed = torch.zeros_like(x).index_add(0, receiver, alpha[:, :, None] * x[source])
    torch.testing.assert_close(summed, out)


@KINDS
def test_derivatives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPHS, "few", lambda device: (few_edges(device), (7, 6)))
    windows, _, given = draw(kind, "few", torch.device("cpu"), torch.float64, 2, 3, True, True)
    given.pop("x", None)
    options = {"dropout": 0.3, "seed": torch.tensor([2]), "self_loops": True}

    def run(*values: Tensor) -> Tensor:
        return weights_of(OPS[kind][0], **dict(zip(given, values, strict=True)), windows=windows, **options)

    assert torch.autograd.gradcheck(run, tuple(given.values()))


@KINDS
def test_bitwise_repeatable(kind: str, device: torch.device) -> None:
    windows, _, given = draw(kind, "hub", device, torch.float32, 2, 8)
    given.pop("x", None)

    def run() -> list[Tensor]:
        alpha = weights_of(OPS[kind][0], **given, windows=windows)
        return [alpha, *torch.autograd.grad(alpha.square().sum(), list(given.values()))]

    first = run()
    for _ in range(20):
        assert all(map(torch.equal, first, run()))


@pytest.mark.parametrize("loops", [False, True])
@KINDS
def test_edges_that_were_written_to_give_no_gradient(kind: str, loops: bool, device: torch.device) -> None:
    windows, edge_index, given = draw(kind, "self_loops", device, torch.float32, 2, 4)
    given.pop("x", None)
    returned, alpha = OPS[kind][0](**given, windows=windows, self_loops=loops)
    (returned if loops else edge_index).fill_(3)  # without loops they are the caller's own
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        alpha.square().sum().backward()


@KINDS
def test_edges_made_in_inference_mode_serve_training(kind: str, device: torch.device) -> None:
    windows, edge_index, given = draw(kind, "ragged", device, torch.float32, 2, 4)
    given.pop("x", None)
    with torch.inference_mode():
        copied = edge_index.clone()
    gradients = []
    for view in (windows, RowWindows.from_edge_index(copied, windows.shape[::-1])):
        alpha = weights_of(OPS[kind][0], **given, windows=view)
        gradients.append(torch.autograd.grad(alpha.square().sum(), list(given.values())))
    assert all(map(torch.equal, *gradients))


def test_mistakes_are_named(device: torch.device) -> None:
    windows, _, given = draw("gat", "bipartite", device, torch.float32, 2, 4)
    a_src, a_dst, _ = given.values()
    with pytest.raises(ValueError, match=r"`a_dst` must have shape \[21, 2\] \(got \[50, 2\]\)"):
        ops.gat_attention_weights(a_src, a_src, windows)
    with pytest.raises(ValueError, match="`a_dst` must have the dtype of `a_src`"):
        ops.gat_attention_weights(a_src, a_dst.half(), windows)
