"""GAT's attention over the edges of windows, one by one, as it is without gradients: hostile graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import gat_listed, launch, walk_rules
from graphfuse.nn import GATConv
from graphfuse.ops import additive
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import draw
from tests.ops.test_attention import crowd, wide

HALF = [torch.float16, torch.bfloat16]
Launched = list[Any]


# as they are before `launched` puts others in their place
LISTS, PREFERS_ROWS = walk_rules.gat_lists_edges, launch.gat_prefers_rows


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The kernel over edges wherever there is one; what it was prepared for is found here."""
    shapes: Launched = []
    prepare = gat_listed.forward_launch

    def lists(*which: Any) -> bool:
        heads, dim, trained, _, dtype = which[-5:]
        return heads % 8 == 0 and dim == 8 and not trained and dtype in HALF

    def noted(w: Any, copies: Any, shape: Any, x_stride: int) -> Any:
        shapes.append(shape)
        return prepare(w, copies, shape, x_stride)

    monkeypatch.setattr(walk_rules, "gat_lists_edges", lists)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *which: which[-1] not in HALF)
    monkeypatch.setattr(gat_listed, "forward_launch", noted)
    return shapes


def given_for(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int = 8, seed: int = 0
) -> tuple[RowWindows, Tensor, dict[str, Tensor]]:
    windows, edge_index, given = draw("gat", graph, device, dtype, heads, 8, seed=seed)
    return windows, edge_index, {name: x.detach() for name, x in given.items()}


def check_gat(graph: str, device: torch.device, dtype: torch.dtype, heads: int = 8, **options: Any) -> None:
    windows, edge_index, given = given_for(graph, device, dtype, heads)
    draws = [given_for(graph, device, dtype, heads, seed)[2] for seed in range(1, 4)]
    check(
        lambda **one: ops.gat_attention(**one, windows=windows, **options),
        lambda **one: reference.gat_attention(edge_index, **one, **options),
        given,
        *draws,
    )


def dropped(device: torch.device, **options: Any) -> dict[str, Any]:
    return {"dropout": 0.3, "seed": torch.tensor([(3 << 40) + 5], device=device), **options}


@pytest.mark.parametrize(("turn", "graph"), list(enumerate(GRAPHS)))
def test_graphs(turn: int, graph: str, launched: Launched, device: torch.device) -> None:
    options = {"self_loops": turn % 3 != 0, "negative_slope": [0.2, 0.0, 1.0][turn % 3]}
    check_gat(graph, device, HALF[turn // 2 % 2], **options)
    edge_index, sizes = GRAPHS[graph](device)
    assert len(launched) == (edge_index.size(1) > 0 and min(sizes) > 0)


@pytest.mark.parametrize("dropout", [False, True])
def test_groups_of_heads(dropout: bool, launched: Launched, device: torch.device) -> None:
    options = dropped(device, self_loops=True) if dropout else {}
    check_gat("ragged", device, torch.float16, 16, **options)
    assert [shape.heads for shape in launched] == [16]


@pytest.mark.parametrize("graph", ["hub", "wide", "crowd"])
def test_slices(
    graph: str, launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "wide", wide)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    assert given_for(graph, device, torch.float16)[0].walk().num_slots > 0
    check_gat(graph, device, torch.float16)
    check_gat(graph, device, torch.bfloat16, **dropped(device, self_loops=True))
    assert len(launched) == 2


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
def test_dropout(graph: str, loops: bool, launched: Launched, device: torch.device) -> None:
    check_gat(graph, device, torch.float16, **dropped(device, self_loops=loops))
    assert len(launched) == 1


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_far_from_what_was_guessed(
    dtype: torch.dtype, loops: bool, launched: Launched, device: torch.device
) -> None:
    """Weights that would overflow, or all be tiny, in some rows of a window and one head."""
    windows, edge_index, given = given_for("ragged", device, dtype)
    given["a_src"][::3, 1] *= 30
    given["a_dst"][::5, 0] = -40
    check(
        lambda **one: ops.gat_attention(**one, windows=windows, self_loops=loops),
        lambda **one: reference.gat_attention(edge_index, **one, self_loops=loops),
        given,
    )
    assert len(launched) == 1


@pytest.mark.parametrize("below", [14.0, 20.0])
def test_weights_that_are_all_tiny(below: float, launched: Launched, device: torch.device) -> None:
    """Of a row whose sources are far below those that the guess is made of: they would lose bits, or be 0."""
    source = torch.arange(44, device=device)
    edge_index = torch.stack([source, (source >= 40).long()])
    windows = RowWindows.from_edge_index(edge_index, (44, 2))
    generator = torch.Generator().manual_seed(0)
    given = {
        "a_src": torch.randn(44, 8, generator=generator) / 2,
        "a_dst": torch.full((2, 8), 30.0),
        "x": torch.randn(44, 8, 8, generator=generator),
    }
    given["a_src"][40:] -= below
    check(
        lambda **one: ops.gat_attention(**one, windows=windows),
        lambda **one: reference.gat_attention(edge_index, **one),
        {name: x.to(device, torch.float16) for name, x in given.items()},
    )
    assert len(launched) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", ["x", "a_src", "a_dst"])
def test_bad_numbers_stay_with_neighbours(
    operand: str, bad: float, launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in windows, column by column; each row of a window sees its own neighbours alone."""
    windows, edge_index, given = given_for("ragged", device, torch.float16)
    before = ops.gat_attention(**given, windows=windows)
    given[operand][5] = bad
    after = ops.gat_attention(**given, windows=windows)
    assert len(launched) == 1
    touched = edge_index[1, edge_index[0] == 5] if operand != "a_dst" else torch.tensor([5], device=device)
    others = torch.ones(windows.shape[0], dtype=torch.bool, device=device)
    others[touched] = False
    assert others.any() and touched.numel() > 0
    torch.testing.assert_close(after[others], before[others], atol=2e-2, rtol=2e-2)
    monkeypatch.setattr(walk_rules, "gat_lists_edges", lambda *which: False)
    fresh = RowWindows.from_edge_index(edge_index, windows.shape[::-1])
    want = ops.gat_attention(**given, windows=fresh)
    torch.testing.assert_close(after[touched], want[touched], atol=2e-3, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_of_one_edge_are_as_they_are(
    dtype: torch.dtype, launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, wherever their score is from what was guessed; in slices, too. NaN if it is no number."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    windows, edge_index, given = given_for("hub", device, dtype)
    assert windows.walk().num_slots > 0 and edge_index[0, edge_index[1] > 0].count_nonzero() == 0
    for score in (0.0, 3.0, -2.0, float("nan"), float("inf")):
        given["a_src"][0, 2] = score
        out = ops.gat_attention(**given, windows=windows)
        want = given["x"][0].expand(99, 8, 8).clone()
        if not -9 < score < 9:
            want[:, 2] = float("nan")
        assert torch.equal(out[1:].isnan(), want.isnan())
        assert torch.equal(out[1:].nan_to_num(), want.nan_to_num())
    assert len(launched) == 1


def test_products_that_overflow(launched: Launched, device: torch.device) -> None:
    """A weight beyond 1 times a row near the largest float16: the result is less than that again."""
    windows, edge_index, given = given_for("ragged", device, torch.float16)
    given["a_src"] *= 2
    given["x"] = torch.full_like(given["x"], 40000.0)
    out = ops.gat_attention(**given, windows=windows)
    want = reference.gat_attention(edge_index, **{name: x.double() for name, x in given.items()})
    torch.testing.assert_close(out.double(), want, atol=0, rtol=2e-3)
    assert want.max() > 30000 and len(launched) == 1


def test_terms_of_float32_and_rows_of_wider_matrices(launched: Launched, device: torch.device) -> None:
    """As under autocast, from a projection that made more than x; weights are rounded as x is."""
    windows, edge_index, given = given_for("ragged", device, torch.float16)
    terms = given["a_src"].float(), given["a_dst"].float()
    more = torch.randn(given["x"].size(0), 2, 8, 8, device=device).half()
    out = ops.gat_attention(*terms, more[:, 1], windows)
    want = reference.gat_attention(edge_index, *[x.double() for x in (*terms, more[:, 1])])
    assert out.dtype is torch.float32 and len(launched) == 1
    torch.testing.assert_close(out.double(), want, atol=3e-3, rtol=3e-3)


def test_rows_in_an_order_of_their_own(launched: Launched, device: torch.device) -> None:
    windows, edge_index, given = given_for("ragged", device, torch.float16)
    reordered = RowWindows.from_edge_index(edge_index, windows.shape[::-1], reorder="degree")
    assert reordered.walk().row_index is not None and windows.walk().row_index is None
    options = dropped(device, self_loops=True)
    check(
        lambda **one: ops.gat_attention(**one, windows=reordered, **options),
        lambda **one: reference.gat_attention(edge_index, **one, **options),
        given,
    )
    assert len(launched) == 1


def test_a_layer(launched: Launched, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its bias, and x and terms side by side as its projection makes them."""
    windows, edge_index, _ = given_for("symmetric", device, torch.float16)
    conv = GATConv(12, 8, heads=8, dropout=0.5).to(device).half().eval()
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(windows.shape[0], 12, device=device).half()
    with torch.no_grad():
        out = conv(x, edge_index)
        assert len(launched) == 1
        monkeypatch.setattr(walk_rules, "gat_lists_edges", lambda *which: False)
        torch.testing.assert_close(out, conv(x, edge_index.clone()), atol=4e-3, rtol=4e-3)
    assert len(launched) == 1


def test_same_bits_again(launched: Launched, device: torch.device) -> None:
    windows, _, given = given_for("hub", device, torch.float16)
    first, second = (ops.gat_attention(**given, windows=windows, self_loops=True) for _ in range(2))
    assert torch.equal(first, second) and len(launched) == 1


def test_where_it_is_not(launched: Launched, device: torch.device) -> None:
    """A slope beyond [0, 1], gradients, other heads, features of edges, float32."""
    windows, edge_index, given = given_for("ragged", device, torch.float16)
    ops.gat_attention(**given, windows=windows, negative_slope=-0.5)
    a_src, a_dst, x = (x.clone().requires_grad_() for x in given.values())
    ops.gat_attention(a_src, a_dst, x, windows).sum().backward()
    ops.gat_attention(a_src[:, :4].detach(), a_dst[:, :4].detach(), x[:, :4].detach(), windows)
    scores = torch.zeros(edge_index.size(1), 8, device=device).half()
    ops.gat_attention(**given, windows=windows, edge_score=scores)
    ops.gat_attention(**{name: x.float() for name, x in given.items()}, windows=windows)
    assert launched == []


def test_ops_and_launchers_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sizes of a record, and of what is walked of it; else the kernel would be another."""
    monkeypatch.setattr(walk_rules, "gat_lists_edges", LISTS)
    monkeypatch.setattr(launch, "gat_prefers_rows", PREFERS_ROWS)
    generator = torch.Generator().manual_seed(0)
    for num_edges, listed in ((80_000, True), (40_000, False)):
        edge_index = torch.randint(20_000, (2, num_edges), generator=generator)
        windows = RowWindows.from_edge_index(edge_index, (20_000, 20_000))
        for graph in (windows, windows.transpose()):
            for dim, dtype, trained in itertools.product(
                (8, 16), (torch.float16, torch.float32), (False, True)
            ):
                x = torch.empty(20_000, 8, dim, dtype=dtype)
                shape = gat_listed.Shape(8, dim, 0.2, 0.0, True, False, dtype)
                chosen = gat_listed.lists_edges(graph.walk(), shape, trained)
                assert chosen == (listed and dtype in HALF and (dim == 8 or trained))
                how = (0.2, 0.0, True, False, trained)
                rows = additive.choose(graph.sizes, *how, None, x, x, None)[0]
                others = dtype is torch.float32 or dim == 8  # which are rows, where it is not
                assert rows == (not chosen and others)
