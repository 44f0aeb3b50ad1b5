"""Windows of rows in another order: ops return what they would of rows as numbered, but for rounding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch, orders
from graphfuse.testing import GRAPHS, Graph, check
from tests.ops import test_additive_attention as additive
from tests.ops.test_attention import DTYPES, check_scaled_keys, draw

METHODS = ("degree", "bisection")
HALF = (torch.float16, torch.bfloat16)


def late_hub(device: Any = "cpu") -> Graph:
    """The last node hears and tells all; some have loops, one of them two, and an edge is repeated."""
    node = torch.arange(53)
    spokes = torch.stack([node, torch.full_like(node, 53)])
    more = torch.tensor([[53, 5, 7, 7, 9, 40, 53], [53, 5, 8, 8, 9, 40, 53]])
    return torch.cat([spokes, spokes.flip(0), more], 1).to(device), (54, 54)


def lopsided(device: Any = "cpu") -> Graph:
    """Receivers are numbered by their edges, sources are not: one direction alone is in another order."""
    count = torch.arange(40, 0, -1) // 2
    receiver = torch.repeat_interleave(torch.arange(40), count)
    source = torch.cat([torch.arange(39, 39 - int(n), -1) for n in count])
    return torch.stack([source, receiver]).to(device), (40, 40)


GRAPHS_HERE = GRAPHS | {"late_hub": late_hub, "lopsided": lopsided}
NAMES = tuple(GRAPHS_HERE)
NATURAL = ("no_nodes", "no_edges", "one_node", "one_loop", "hub", "full")  # no method moves a row
MOVED = tuple(name for name in NAMES if name not in NATURAL)


@pytest.fixture(autouse=True)
def windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window kernels wherever they take the dtype, slices of 32 entries, and two graphs more."""
    for name, make in GRAPHS_HERE.items():
        monkeypatch.setitem(GRAPHS, name, make)
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setattr(launch, "prefers_rows", lambda *sizes: False)
    for prefers in ("attention_prefers_rows", "gat_prefers_rows"):
        monkeypatch.setattr(launch, prefers, lambda *sizes: sizes[-1] not in HALF)


def ordered(windows: RowWindows, method: str) -> RowWindows:
    return RowWindows.from_edge_index(windows.edge_index(), windows.shape[::-1], reorder=method)


def build(graph: str, method: str, device: torch.device) -> tuple[RowWindows, Tensor, int, int]:
    edge_index, size = GRAPHS[graph](device)
    return RowWindows.from_edge_index(edge_index, size, reorder=method), edge_index, *size


def turn_of(graph: str, dtype: torch.dtype) -> tuple[int, str]:
    """A number to choose by, and an order of the rows."""
    turn = NAMES.index(graph) + DTYPES.index(dtype)
    return turn, METHODS[turn % 2]


def drops(device: torch.device) -> dict[str, Any]:
    return {"dropout": 0.3, "seed": torch.tensor([(3 << 40) + 5], device=device)}


def test_the_orders_are_others(device: torch.device) -> None:
    """Else nothing here would test anything."""

    def directions(graph: str, method: str) -> tuple[bool, bool]:
        windows = build(graph, method, device)[0]
        return windows.walk().row_index is not None, windows.transpose().walk().row_index is not None

    for graph in ("isolated", "self_loops", "repeated", "ragged", "symmetric", "bipartite", "bipartite_tall"):
        assert all(directions(graph, method)[0] for method in METHODS), graph
    for graph in NATURAL:
        assert all(directions(graph, method) == (False, False) for method in METHODS), graph
    assert directions("late_hub", "degree") == (True, True)
    assert directions("lopsided", "degree") == (False, True)
    assert build("late_hub", "degree", device)[0].walk().num_slots > 0


@pytest.mark.parametrize("graph", NAMES)
def test_spmm(graph: str, device: torch.device) -> None:
    for dtype in DTYPES:
        turn, method = turn_of(graph, dtype)
        windows, edge_index, num_src, num_dst = build(graph, method, device)
        inputs = {"x": torch.randn(num_src, 8 + 3 * (turn % 3), device=device).to(dtype).requires_grad_()}
        options: dict[str, Tensor] = {}
        if turn % 3 > 0:  # each order both ways
            inputs["loop_weight"] = torch.randn(num_dst, device=device).requires_grad_()
            options["row_scale"] = torch.linspace(0.5, 1.5, num_dst, device=device)
            options["col_scale"] = torch.linspace(1.2, 0.4, num_src, device=device)
        op = functools.partial(ops.spmm, windows, **options)
        check(op, functools.partial(reference.spmm, edge_index, num_dst=num_dst, **options), inputs)


@pytest.mark.parametrize("graph", ["late_hub", "bipartite", "self_loops"])
def test_gemm(graph: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "gemm_order", lambda *sizes: orders.GemmOrder.FUSED)
    for dtype, dim, out_dim in ((torch.float16, 16, 7), (torch.float32, 5, 40)):
        windows, edge_index, num_src, num_dst = build(graph, "degree", device)
        shapes = {"x": (num_src, dim), "weight": (out_dim, dim), "bias": (out_dim,)}
        inputs = {
            name: torch.randn(shape, device=device).to(dtype).requires_grad_()
            for name, shape in shapes.items()
        }
        definition = functools.partial(reference.spmm_gemm, edge_index, num_dst=num_dst)
        check(functools.partial(ops.spmm_gemm, windows), definition, inputs)


@pytest.mark.parametrize("graph", MOVED)
def test_attention(graph: str, device: torch.device) -> None:
    for dtype in DTYPES if graph == "repeated" else HALF[NAMES.index(graph) // 2 % 2 :][:1]:
        turn, method = turn_of(graph, dtype)
        heads, dim = [(1, 8), (3, 7), (2, 16), (1, 33)][turn % 4]
        windows, edge_index, given = draw(graph, device, dtype, heads, dim)
        options: dict[str, Any] = {"self_loops": windows.shape[0] == windows.shape[1] and turn % 3 > 0}
        options |= drops(device) if turn % 4 > 1 else {}
        op = functools.partial(ops.sparse_attention, windows=ordered(windows, method), **options)
        check(op, functools.partial(reference.sparse_attention, edge_index, **options), given)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", ["late_hub", "repeated"])
def test_scaled_keys_that_are_the_values(graph: str, loops: bool, device: torch.device) -> None:
    heads = 2 if loops else 1
    check_scaled_keys(graph, device, torch.float16, heads, 8, reorder="degree", self_loops=loops)


@pytest.mark.parametrize("graph", MOVED)
def test_gat(graph: str, device: torch.device) -> None:
    for dtype in DTYPES if graph == "repeated" else HALF[NAMES.index(graph) // 2 % 2 :][:1]:
        turn, method = turn_of(graph, dtype)
        heads, dim = [(2, 16), (1, 8), (3, 7), (1, 33)][turn % 4]
        windows, edge_index, given = additive.draw("gat", graph, device, dtype, heads, dim)
        options: dict[str, Any] = {"self_loops": turn % 3 > 0, "negative_slope": 0.2}
        options |= drops(device) if turn % 4 > 1 else {}
        op = functools.partial(ops.gat_attention, windows=ordered(windows, method), **options)
        check(op, functools.partial(reference.gat_attention, edge_index, **options), given)


def test_what_walks_rows(device: torch.device) -> None:
    """Rows one by one, and values of edges, are found through windows: they do not show their order."""
    for graph, method in (("repeated", "degree"), ("bipartite", "bisection")):
        windows, _, num_src, num_dst = build(graph, method, device)
        natural = build(graph, "natural", device)[0]
        a, b = torch.randn(num_dst, 7, device=device), torch.randn(num_src, 7, device=device)
        weight = torch.randn(windows.num_edges, device=device)
        q, k = a[:, None], b[:, None]
        for view, other, x in ((windows, natural, b), (windows.transpose(), natural.transpose(), a)):
            assert torch.equal(ops.spmm(view, x, edge_weight=weight), ops.spmm(other, x, edge_weight=weight))
        assert torch.equal(ops.sddmm(windows, a, b), ops.sddmm(natural, a, b))
        weights = [ops.attention_weights(q, k, one) for one in (windows, natural)]
        assert torch.equal(*weights)
        out = [ops.sparse_attention(q, k, k, one) for one in (windows, natural)]
        assert torch.equal(*out)


def test_dropout_drops_what_it_did(device: torch.device) -> None:
    """With the unit matrix as values an output is the weights themselves, 0 where one is dropped."""
    natural, windows = (build("repeated", one, device)[0] for one in ("natural", "degree"))
    n = windows.shape[0]
    values = torch.eye(n, device=device).half()[:, None].expand(-1, 2, -1).contiguous()
    q, k = torch.zeros(2, n, 2, n, device=device).half()
    a_src, a_dst = torch.zeros(2, n, 2, device=device).half()
    for loops, view, other in (
        (False, windows, natural),
        (True, windows.transpose(), natural.transpose()),
    ):
        options = drops(device) | {"self_loops": loops}
        found = [ops.sparse_attention(q, k, values, one, **options) for one in (view, other)]
        found += [ops.gat_attention(a_src, a_dst, values, one, **options) for one in (view, other)]
        # all scores are 0: a weight is how many copies of its edge are left, over those of the row, and exact
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
        dropped = (found[0] == 0) & (ops.sparse_attention(q, k, values, view, self_loops=loops) > 0)
        assert bool(dropped.any())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize(("graph", "loops"), [("ragged", False), ("late_hub", True)])
def test_nan_reaches_its_receivers_alone(graph: str, loops: bool, device: torch.device) -> None:
    windows, edge_index, num_nodes, _ = build(graph, "degree", device)
    node, options = 5, {"self_loops": loops}
    reached = torch.zeros(num_nodes, dtype=torch.bool, device=device)
    reached[edge_index[1][edge_index[0] == node]] = True
    reached[node] |= loops
    assert 0 < int(reached.sum()) < num_nodes
    x = torch.randn(num_nodes, 2, 8, device=device).half()
    clean = x.clone()
    x[node] = float("nan")
    weight = torch.ones(num_nodes, device=device) if loops else None
    scores = torch.randn(2, num_nodes, 2, device=device).half()

    def results(x: Tensor) -> list[Tensor]:
        of_keys = ops.sparse_attention(clean, x, clean, windows, **options)
        of_values = ops.sparse_attention(clean, clean, x, windows, **options)
        of_gat = ops.gat_attention(*scores, x, windows, **options)
        return [ops.spmm(windows, x.flatten(1), loop_weight=weight), of_keys, of_values, of_gat]

    for found, wanted in zip(results(x), results(clean), strict=True):
        assert torch.equal(found.isnan().flatten(1).any(1), reached)
        torch.testing.assert_close(found[~reached], wanted[~reached], rtol=2e-3, atol=2e-3)


def test_registered_ops_and_compile(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float16, 2, 8)
    windows = ordered(windows, "degree")
    x = given["v"].detach().flatten(1)
    packed = (windows.packed_windows, None, False, *windows.shape)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*packed, None, None, False, False, torch.float16, x, None, None, None, None)
    torch.library.opcheck(torch.ops.graphfuse.spmm.default, arguments, test_utils=checks)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.sparse_attention(q * 2, k, v, windows).float().square().sum()

    wanted = torch.autograd.grad(loss(**given), list(given.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(**given), list(given.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
