"""GAT's attention over the edges of windows, one by one: outputs and every gradient, hostile graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import additive_bwd, gat_listed, launch, walk_rules
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import check_additive, draw
from tests.ops.test_attention import crowd, wide

HALF = [torch.float16, torch.bfloat16]
SHAPES = [(2, 8), (8, 8), (4, 16), (2, 32), (8, 16)]
Launched = list[str]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """The kernels over edges, wherever there is one; what was prepared for them is found here."""
    kernels: Launched = []

    def lists(*which: Any) -> bool:
        heads, dim, _, _, dtype = which[-5:]
        fits = heads > 1 and dim in (8, 16, 32) and heads % walk_rules.edges_together(heads, dim) == 0
        return fits and dtype in HALF

    def noted(name: str, prepare: Any) -> Any:
        def prepared(*args: Any) -> Any:
            kernels.append(name)
            return prepare(*args)

        return prepared

    monkeypatch.setattr(walk_rules, "gat_lists_edges", lists)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *which: which[-1] not in HALF)
    monkeypatch.setattr(gat_listed, "forward_launch", noted("forward", gat_listed.forward_launch))
    monkeypatch.setattr(additive_bwd, "backward_launch", noted("backward", gat_listed.backward_launch))
    yield kernels


@pytest.mark.parametrize(("turn", "graph"), list(enumerate(GRAPHS)))
def test_graphs(turn: int, graph: str, launched: Launched, device: torch.device) -> None:
    heads, dim = SHAPES[turn % 4]
    options = {"self_loops": turn % 3 != 0, "negative_slope": [0.2, 0.0, 1.0][turn % 3]}
    check_additive("gat", graph, device, HALF[turn // 2 % 2], heads, dim, **options)
    edge_index, sizes = GRAPHS[graph](device)
    assert set(launched) == ({"forward", "backward"} if edge_index.size(1) and min(sizes) else set())


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_shapes(heads: int, dim: int, launched: Launched, device: torch.device) -> None:
    options = {"dropout": 0.3, "seed": torch.tensor([9], device=device), "self_loops": True}
    check_additive("gat", "ragged", device, torch.float16, heads, dim, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("graph", ["hub", "wide", "crowd"])
def test_slices(
    graph: str, launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "wide", wide)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    assert draw("gat", graph, device, torch.float16, 2, 8)[0].walk().num_slots > 0
    check_additive("gat", graph, device, torch.float16, 2, 8)
    options = {"dropout": 0.4, "seed": torch.tensor([7], device=device), "self_loops": True}
    check_additive("gat", graph, device, torch.bfloat16, 2, 16, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_dropout(graph: str, loops: bool, launched: Launched, device: torch.device) -> None:
    options = {"dropout": 0.3, "seed": torch.tensor([(3 << 40) + 5], device=device), "self_loops": loops}
    check_additive("gat", graph, device, torch.float16, 2, 8, **options)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_far_from_what_was_guessed(
    dtype: torch.dtype, loops: bool, launched: Launched, device: torch.device
) -> None:
    """Weights that would overflow, or all be tiny, in some rows of a window and one head."""
    windows, edge_index, given = draw("gat", "ragged", device, dtype, 2, 8)
    far = {name: x.detach().clone() for name, x in given.items()}
    far["a_src"][::3, 1] *= 30
    far["a_dst"][::5, 0] = -40
    check(
        lambda **one: ops.gat_attention(**one, windows=windows, self_loops=loops),
        lambda **one: reference.gat_attention(edge_index, **one, self_loops=loops),
        {name: x.requires_grad_() for name, x in far.items()},
    )
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", ["x", "a_src", "a_dst"])
def test_bad_numbers_stay_with_neighbours(
    operand: str, bad: float, launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in windows, column by column; each row of a window sees its own neighbours alone."""
    windows, edge_index, given = draw("gat", "ragged", device, torch.float16, 2, 8)
    plain = {name: x.detach().clone() for name, x in given.items()}
    before = ops.gat_attention(**plain, windows=windows)
    plain[operand][5] = bad
    after = ops.gat_attention(**plain, windows=windows)
    assert launched == ["forward"]
    touched = edge_index[1, edge_index[0] == 5] if operand != "a_dst" else torch.tensor([5], device=device)
    others = torch.ones(windows.shape[0], dtype=torch.bool, device=device)
    others[touched] = False
    assert others.any() and touched.numel() > 0
    torch.testing.assert_close(after[others], before[others], atol=2e-2, rtol=2e-2)
    monkeypatch.setattr(walk_rules, "gat_lists_edges", lambda *which: False)
    fresh = RowWindows.from_edge_index(edge_index, windows.shape[::-1])
    want = ops.gat_attention(**plain, windows=fresh)
    torch.testing.assert_close(after[touched], want[touched], atol=2e-3, rtol=2e-3, equal_nan=True)


def test_products_that_overflow(launched: Launched, device: torch.device) -> None:
    """A weight beyond 1 times a row near the largest float16: the result is less than that again."""
    windows, edge_index, given = draw("gat", "ragged", device, torch.float16, 2, 8)
    given = {name: x.detach() for name, x in given.items()}
    given["a_src"] *= 2
    given["x"] = torch.full_like(given["x"], 40000.0)
    out = ops.gat_attention(**given, windows=windows)
    want = reference.gat_attention(edge_index, **{name: x.double() for name, x in given.items()})
    torch.testing.assert_close(out.double(), want, atol=0, rtol=2e-3)
    assert want.max() > 30000 and launched == ["forward"]


def test_terms_of_float32_and_rows_of_wider_matrices(launched: Launched, device: torch.device) -> None:
    """As under autocast, from a projection that made more than x; weights are rounded as x is."""
    windows, edge_index, drawn = draw("gat", "ragged", device, torch.float16, 4, 16)
    terms = [drawn[name].detach().float().requires_grad_() for name in ("a_src", "a_dst")]
    more = torch.randn(drawn["x"].size(0), 2, 4, 16, device=device, dtype=torch.float16).requires_grad_()
    out = ops.gat_attention(*terms, more[:, 1], windows)
    exact = [x.detach().double().requires_grad_() for x in (*terms, more)]
    want = reference.gat_attention(edge_index, *exact[:2], exact[2][:, 1])
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)
    grad = torch.randn_like(want)
    found = torch.autograd.grad(out, (*terms, more), grad.float())
    for one, other in zip(found, torch.autograd.grad(want, exact, grad), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-2, rtol=1e-2)
    assert set(launched) == {"forward", "backward"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_inference_gives_the_numbers_of_training(
    dropout: float, launched: Launched, device: torch.device
) -> None:
    windows, _, given = draw("gat", "hub", device, torch.float16, 8, 8)
    options = {"dropout": dropout, "seed": torch.tensor([3], device=device), "self_loops": True}
    trained = ops.gat_attention(**given, windows=windows, **options)
    with torch.no_grad():
        assert torch.equal(ops.gat_attention(**given, windows=windows, **options), trained)
    again = ops.gat_attention(**given, windows=windows, **options)
    assert torch.equal(again, trained) and set(launched) == {"forward"}


def test_where_they_are_not(launched: Launched, device: torch.device) -> None:
    """A slope beyond [0, 1], edges that change, float32, one head, features of edges."""
    check_additive("gat", "ragged", device, torch.float16, 2, 8, negative_slope=-0.5)
    check_additive("gat", "ragged", device, torch.float32, 2, 8)
    check_additive("gat", "ragged", device, torch.float16, 1, 8)
    check_additive("gat", "ragged", device, torch.float16, 2, 8, edges=True)
    assert launched == []


def test_rows_in_an_order_of_their_own(launched: Launched, device: torch.device) -> None:
    windows, edge_index, given = draw("gat", "ragged", device, torch.float16, 2, 8)
    reordered = RowWindows.from_edge_index(edge_index, windows.shape[::-1], reorder="degree")
    assert reordered.walk().row_index is not None and windows.walk().row_index is None
    options = {"dropout": 0.3, "seed": torch.tensor([4], device=device), "self_loops": True}
    check(
        lambda **one: ops.gat_attention(**one, windows=reordered, **options),
        lambda **one: reference.gat_attention(edge_index, **one, **options),
        given,
    )
    assert launched == ["forward", "backward"]
