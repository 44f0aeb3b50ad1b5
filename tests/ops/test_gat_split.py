"""GAT's backward by windows, weights by factors, and where sources are too far from their centre for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import additive_bwd, gat_bwd_windows, launch
from graphfuse.kernels.loads import Load
from graphfuse.testing import check
from tests.ops.test_additive_attention import (
    check_a_node_without_edges,
    check_additive,
    check_mixed,
    draw,
)

HALF = [torch.float16, torch.bfloat16]
# records of four heads, of two and of one
SHAPES = [(8, 16), (8, 8), (2, 8), (4, 9), (12, 13), (4, 32), (2, 20), (1, 33), (3, 64), (1, 100)]


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *which: which[-1] not in HALF)
    monkeypatch.setattr(additive_bwd, "window_load", lambda walk: Load.NORMAL)  # of graphs that are large


@pytest.mark.parametrize(("loops", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.4)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("graph", ["hub", "ragged"])
def test_shapes(
    graph: str, heads: int, dim: int, dtype: torch.dtype, loops: bool, dropout: float, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    slope = {9: 0.0, 13: 1.0, 20: 0.0, 64: 1.0}.get(dim, 0.2)
    options = {"self_loops": loops, "negative_slope": slope, "dropout": dropout}
    check_additive("gat", graph, device, dtype, heads, dim, **options, seed=seed_of(dropout, device))


@pytest.mark.parametrize("heads", [1, 3])
def test_slices_of_walks_by_weights(
    heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a slope beyond 1. The numbers behind a row's sums, one a head, are filled up to four."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    check_additive("gat", "hub", device, torch.float16, heads, 12, negative_slope=1.5)


def seed_of(dropout: float, device: torch.device) -> torch.Tensor | None:
    return torch.tensor([7], device=device) if dropout > 0 else None


@pytest.mark.parametrize(
    ("heads", "dim", "options", "wanted"),
    [
        (8, 8, {}, 4),
        (8, 16, {}, 4),
        (4, 32, {}, 2),
        (1, 64, {}, 1),
        (6, 16, {}, 0),
        (8, 7, {}, 0),
        (8, 16, {"negative_slope": -0.5}, 0),
        (8, 16, {"dropout": 0.4, "self_loops": True}, 4),
        (8, 16, {"dropout": 0.4}, 0),
    ],
    ids=str,
)
def test_which_calls_sum_factors(
    heads: int, dim: int, options: dict[str, Any], wanted: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of so many heads a program, or of none."""
    found: list[int] = []
    by_factors = additive_bwd._by_factors
    monkeypatch.setattr(
        additive_bwd, "_by_factors", lambda *given: found.append(by_factors(*given)) or found[-1]
    )
    record, _, given = draw("gat", "ragged", device, torch.float16, heads, dim)
    seed = seed_of(options.get("dropout", 0.0), device)
    ops.gat_attention(**given, windows=record, **options, seed=seed).sum().backward()
    assert set(found) == {wanted}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(4, 8), (4, 16), (2, 32), (1, 64)])
@pytest.mark.parametrize("graph", ["isolated", "repeated", "bipartite"])
def test_dropout(graph: str, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of copies of an edge each is drawn; rows of one edge, a loop, have terms that cancel."""
    options = {"self_loops": True, "dropout": 0.4, "seed": seed_of(0.4, device)}
    check_additive("gat", graph, device, dtype, heads, dim, **options)


def test_a_loop_that_is_all_of_its_row_has_no_slope(device: torch.device) -> None:
    """Its weight is 1 whatever its score is, though delta is made of a rounded result."""
    edges = torch.tensor([[0], [1]], device=device)
    x = torch.randn(40, 4, 16, device=device).half().requires_grad_()
    terms = torch.randn(40, 4, device=device).half().requires_grad_()
    windows = RowWindows.from_edge_index(edges, (40, 40))
    options = {"dropout": 0.4, "seed": seed_of(0.4, device), "self_loops": True}
    out = ops.gat_attention(terms, terms.detach(), x, windows, **options)
    (found,) = torch.autograd.grad(out, terms, torch.randn_like(out))
    assert found[:2].any() and not found[2:].any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(8, 16), (4, 32), (1, 33)])
def test_terms_of_float32(
    heads: int, dim: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows of half precision, as autocast has them."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    check_mixed("gat", "hub", device, dtype, heads, dim, edges=False, dropout=0.0)


@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (2, 32), (1, 64)])
def test_terms_of_float32_are_not_rounded(heads: int, dim: int, device: torch.device) -> None:
    """Scores above 0 by less than half precision knows have the slope of others above 0."""
    record, edge_index, given = draw("gat", "ragged", device, torch.float16, heads, dim)
    given["a_src"] = torch.full_like(given["a_src"], -1.0, dtype=torch.float32)
    given["a_dst"] = torch.full_like(given["a_dst"], 1.0 + 1e-6, dtype=torch.float32)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    ops.gat_attention(**given, windows=record).square().sum().backward()
    reference.gat_attention(edge_index, **exact).square().sum().backward()
    ours, theirs = given["a_src"].grad, exact["a_src"].grad
    assert ours is not None and theirs is not None
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("name", ["x_src", "x_dst"])
def test_a_node_without_edges_adds_nothing(name: str, device: torch.device) -> None:
    check_a_node_without_edges("gat", name, 4, device, 16)


@pytest.mark.parametrize(("far", "dropout"), [(5.0, 0.0), (8.0, 0.0), (60.0, 0.0), (60.0, 0.4)])
@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (4, 32), (1, 64), (4, 8)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sources_far_from_each_other(
    dtype: torch.dtype, heads: int, dim: int, far: float, dropout: float, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One of a window's: the others' weights are as exact as they were, by either walk."""
    walks = check_moved(dtype, heads, dim, device, monkeypatch, one=far, dropout=dropout)
    if device.type == "cpu":
        assert bool(walks) == (far > 6)


def test_one_far_source_keeps_no_other_window_from_factors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is one of those that the centre is made of."""
    walks = check_moved(torch.float16, 4, 16, device, monkeypatch, one=60.0, at=0)
    if device.type == "cpu":
        assert len(walks) == 4  # of its own window each head


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sources_far_from_zero(
    dtype: torch.dtype, dropout: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and receivers the other way: what counts is how far they are from each other."""
    assert not check_moved(dtype, 4, 16, device, monkeypatch, all_of_them=20.0, dropout=dropout)


def check_moved(
    dtype: torch.dtype, heads: int, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch,
    one: float = 0.0, at: int = 5, all_of_them: float = 0.0, dropout: float = 0.0,
) -> list[Any]:  # fmt: skip
    """Compares gradients with the definition's; returns what the interpreter walked score by score."""
    walks: list[Any] = []
    if device.type == "cpu":  # Triton compiles no function but its own
        monkeypatch.setattr(gat_bwd_windows, "walk_scores", noted(gat_bwd_windows.walk_scores, walks))
    record, edge_index, given = draw("gat", "ragged", device, dtype, heads, dim)
    with torch.no_grad():
        given["a_src"].mul_(0.1).add_(all_of_them)
        given["a_dst"].sub_(all_of_them)
        given["a_src"][at] += one
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    options = {"dropout": dropout, "seed": seed_of(dropout, device), "self_loops": dropout > 0}
    check(
        lambda **given: ops.gat_attention(**given, windows=record, **options),
        lambda **given: reference.gat_attention(edge_index, **given, **options),
        given,
    )
    return walks


@pytest.mark.parametrize("first", [torch.float16, torch.float32], ids=str)
def test_terms_that_change_their_dtype(first: torch.dtype, device: torch.device) -> None:
    """What a record of the graph keeps of one call is not taken for another's."""
    record, _, given = draw("gat", "ragged", device, torch.float16, 4, 16)

    def gradients(dtype: torch.dtype, windows: RowWindows) -> list[torch.Tensor]:
        terms = {name: given[name].detach().to(dtype).requires_grad_() for name in ("a_src", "a_dst")}
        x = given["x"].detach().requires_grad_()
        ops.gat_attention(**terms, x=x, windows=windows).float().square().sum().backward()
        return [leaf.grad for leaf in (x, *terms.values()) if leaf.grad is not None]

    second = torch.float32 if first is torch.float16 else torch.float16
    gradients(first, record)
    again = RowWindows.from_edge_index(record.to_edge_index(), record.shape)
    for ours, alone in zip(gradients(second, record), gradients(second, again), strict=True):
        assert torch.equal(ours, alone)


def noted(function: Any, walks: list[Any]) -> Any:
    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(function, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            walks.append(args)
            return function(*args, **options)

    return Noted()
