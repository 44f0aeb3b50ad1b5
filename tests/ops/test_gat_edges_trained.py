"""GAT's attention over the edges of windows, forward with the tilt and backward: every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphfuse import ops
from graphfuse.kernels import additive_bwd, gat_listed, launch, walk_rules
from graphfuse.testing import GRAPHS
from tests.ops.test_additive_attention import check_a_node_without_edges, check_additive, draw
from tests.ops.test_attention import crowd, wide

HALF = [torch.float16, torch.bfloat16]
SHAPES = [(8, 8), (8, 16), (16, 8), (4, 16)]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    kinds: list[str] = []

    def noted(name: str, prepare: Any) -> Any:
        def prepared(*args: Any) -> Any:
            kinds.append(name)
            return prepare(*args)

        return prepared

    monkeypatch.setattr(walk_rules, "gat_lists_edges", lambda *which: which[-1] in HALF)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *which: which[-1] not in HALF)
    monkeypatch.setattr(gat_listed, "forward_launch", noted("forward", gat_listed.forward_launch))
    monkeypatch.setattr(additive_bwd, "backward_launch", noted("backward", gat_listed.backward_launch))
    return kinds


@pytest.mark.parametrize(("turn", "graph"), list(enumerate(GRAPHS)))
def test_graphs(turn: int, graph: str, launched: list[str], device: torch.device) -> None:
    options = {"self_loops": turn % 3 != 0, "negative_slope": [0.2, 0.0, 1.0][turn % 3]}
    check_additive("gat", graph, device, HALF[turn // 2 % 2], *SHAPES[turn % 2], **options)
    edge_index, sizes = GRAPHS[graph](device)
    assert set(launched) == ({"forward", "backward"} if edge_index.size(1) and min(sizes) else set())


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_shapes(heads: int, dim: int, launched: list[str], device: torch.device) -> None:
    options = {"dropout": 0.3, "seed": torch.tensor([9], device=device), "self_loops": True}
    check_additive("gat", "ragged", device, torch.float16, heads, dim, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("graph", ["hub", "wide", "crowd"])
def test_slices(
    graph: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "wide", wide)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    check_additive("gat", graph, device, torch.float16, 8, 8)
    options = {"dropout": 0.4, "seed": torch.tensor([7], device=device), "self_loops": True}
    check_additive("gat", graph, device, torch.bfloat16, 8, 16, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_dropout(graph: str, loops: bool, launched: list[str], device: torch.device) -> None:
    options = {"dropout": 0.3, "seed": torch.tensor([(3 << 40) + 5], device=device), "self_loops": loops}
    check_additive("gat", graph, device, torch.float16, 8, 8, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_one_direction_alone(
    side: str, dropout: float, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between sets of nodes of which one is large: the other direction walks windows."""
    _, (num_src, num_dst) = GRAPHS["bipartite"](device)
    num_rows = num_dst if side == "forward" else num_src
    monkeypatch.setattr(walk_rules, "gat_lists_edges", lambda *which: which[0] == num_rows)
    seed = torch.tensor([9], device=device) if dropout > 0 else None
    check_additive("gat", "bipartite", device, torch.float16, 8, 8, dropout=dropout, seed=seed)
    assert set(launched) == {side}


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_of_receivers_of_one_edge(
    dtype: torch.dtype,
    dropout: float,
    heads: int,
    launched: list[str],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which have no gradient, as the weight of an only edge is 1: two sums cancel, in slices too.

    With dropout its result is x, scaled and rounded, or 0.
    """
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    for seed in range(3):
        windows, _, given = draw("gat", "hub", device, dtype, heads, 64 // heads, seed=seed)
        given = {name: x.detach().requires_grad_() for name, x in given.items()}
        draws = torch.tensor([seed], device=device) if dropout > 0 else None
        out = ops.gat_attention(**given, windows=windows, dropout=dropout, seed=draws)
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(out.shape, generator=generator).to(device, dtype)
        d_src, _ = torch.autograd.grad(out, [given["a_src"], given["x"]], grad)
        # 99 terms of some 3 that are taken apart in two pieces
        assert d_src[0].abs().max() < 300 * torch.finfo(dtype).eps ** 2 and d_src[1:].abs().max() > 1e-3
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("name", ["x_src", "x_dst"])
def test_a_node_without_edges_adds_nothing(name: str, launched: list[str], device: torch.device) -> None:
    check_a_node_without_edges("gat", name, 8, device)
    assert set(launched) == {"forward", "backward"}
