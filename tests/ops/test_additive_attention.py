"""GAT's and GATv2's attention against their definitions: outputs and every gradient, hostile graphs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.nn._gat import few_edges
from tests.ops.test_attention import DTYPES, crowd, narrow, wide

OPS = {
    "gat": (ops.gat_attention, reference.gat_attention),
    "gatv2": (ops.gatv2_attention, reference.gatv2_attention),
}
# The interpreter is slow: it sees each graph in one dtype.
CASES = [
    (graph, dtype)
    for turn, graph in enumerate(GRAPHS)
    for dtype in (DTYPES if torch.cuda.is_available() else [DTYPES[turn % 3]])
]
# GATv2 has rows alone
WALKS = pytest.mark.parametrize(
    ("kind", "walked"), [("gat", "windows"), ("gat", "rows"), ("gatv2", "rows")], indirect=["walked"]
)


def draw(
    kind: str,
    graph: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    edges: bool = False,
    loops: bool = False,
    seed: int = 0,
) -> tuple[RowWindows, Tensor, dict[str, Tensor]]:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    generator = torch.Generator(device).manual_seed(seed)
    shapes: dict[str, tuple[int, ...]]
    width: tuple[int, ...]
    if kind == "gat":
        width, names = (heads,), ("edge_score", "loop_score")
        shapes = {"a_src": (num_src, heads), "a_dst": (num_dst, heads), "x": (num_src, heads, dim)}
    else:
        width, names = (heads, dim), ("edge", "loop_edge")
        shapes = {"x_src": (num_src, heads, dim), "x_dst": (num_dst, heads, dim), "att": (heads, dim)}
    if edges:
        shapes[names[0]] = (edge_index.size(1), *width)
    if edges and loops:
        shapes[names[1]] = (min(num_src, num_dst), *width)
    given = {name: torch.randn(shape, device=device, generator=generator) for name, shape in shapes.items()}
    if kind == "gatv2":
        given["att"] *= dim**-0.5  # scores of the order of 1, whatever the width
    given = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.items()}
    return RowWindows.from_edge_index(edge_index, (num_src, num_dst)), edge_index, given


def check_additive(
    kind: str,
    graph: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    edges: bool = False,
    **options: Any,
) -> None:
    loops = options.get("self_loops", False)
    windows, edge_index, given = draw(kind, graph, device, dtype, heads, dim, edges, loops)
    op, definition = OPS[kind]
    more = range(1, 4) if device.type == "cuda" else ()  # the interpreter is slow
    draws = (given, *(draw(kind, graph, device, dtype, heads, dim, edges, loops, seed)[2] for seed in more))
    check(
        functools.partial(op, windows=windows, **options),
        functools.partial(definition, edge_index, **options),
        *draws,
    )


@pytest.mark.parametrize(("graph", "dtype"), CASES, ids=str)
def test_gat(graph: str, dtype: torch.dtype, walked: str, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype)
    if walked == "windows" and dtype is torch.float32:
        dtype = torch.float16  # windows take half precision alone
    heads, dim = [(1, 8), (3, 7), (2, 16), (4, 1)][turn % 4]
    edges = walked == "rows" and turn % 2 == 0
    loops = turn % 3 != 0
    slope = [0.2, 0.0, -0.5][turn % 3]
    check_additive("gat", graph, device, dtype, heads, dim, edges, self_loops=loops, negative_slope=slope)


@pytest.mark.parametrize(("graph", "dtype"), CASES, ids=str)
def test_gatv2(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype)
    heads, dim = [(1, 8), (3, 7), (2, 16), (4, 1)][turn % 4]
    options = {"self_loops": turn % 3 != 0, "negative_slope": [0.2, 0.0, -0.5][turn % 3]}
    check_additive("gatv2", graph, device, dtype, heads, dim, turn % 2 == 0, **options)


@pytest.mark.parametrize("heads_dim", [(1, 33), (8, 8), (5, 24), (1, 256), (3, 200)], ids=str)
@WALKS
def test_widths(kind: str, heads_dim: tuple[int, int], walked: str, device: torch.device) -> None:
    check_additive(kind, "bipartite", device, narrow(walked), *heads_dim)


@pytest.mark.parametrize("heads_dim", [(3, 8), (5, 7), (2, 16)], ids=str)
def test_groups_of_heads(heads_dim: tuple[int, int], device: torch.device) -> None:
    for dropout in (0.0, 0.3):
        seed = torch.tensor([9], device=device)
        options = {"dropout": dropout, "seed": seed, "self_loops": True}
        check_additive("gat", "ragged", device, torch.float16, *heads_dim, **options)


@pytest.mark.parametrize("graph", ["hub", "wide", "crowd"])
@WALKS
def test_slices(
    kind: str, graph: str, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "wide", wide)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    windows, _, _ = draw(kind, graph, device, torch.float32, 1, 1)
    assert windows.walks(walked == "rows", False).forward.num_slots > 0
    check_additive(kind, graph, device, torch.float16, 2, 12)
    options = {"dropout": 0.4, "seed": torch.tensor([7], device=device), "self_loops": True}
    check_additive(kind, graph, device, torch.float16, 2, 12, walked == "rows", **options)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("graph", ["repeated", "self_loops", "bipartite"])
@WALKS
def test_dropout(kind: str, graph: str, loops: bool, walked: str, device: torch.device) -> None:
    options = {"dropout": 0.3, "seed": torch.tensor([(3 << 40) + 5], device=device), "self_loops": loops}
    check_additive(kind, graph, device, narrow(walked), 3, 8, walked == "rows", **options)
    check_additive(kind, graph, device, torch.bfloat16, 1, 24, **options)


@WALKS
def test_without_dropout_the_seed_says_nothing(kind: str, walked: str, device: torch.device) -> None:
    windows, _, given = draw(kind, "self_loops", device, narrow(walked), 2, 8)
    op = functools.partial(OPS[kind][0], windows=windows, **given)
    assert torch.equal(op(), op(dropout=0.0, seed=torch.tensor([3], device=device)))
    torch.manual_seed(0)
    assert not torch.equal(op(dropout=0.5), op(dropout=0.5))


def short_hub(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """The first 40 nodes of ``hub``: in both directions a row, and its window, of two slices."""
    edge_index, _ = GRAPHS["hub"](device)
    return edge_index[:, (edge_index < 40).all(0)], (40, 40)


def check_mixed(
    kind: str, graph: str, device: torch.device, dtype: torch.dtype, heads: int, dim: int, edges: bool,
    dropout: float = 0.3,
) -> None:  # fmt: skip
    """Terms of float32 beside rows of ``dtype``: errors are those of half precision."""
    windows, edge_index, given = draw(kind, graph, device, dtype, heads, dim, edges, loops=True)
    rows = ("x", "x_src", "x_dst", "edge", "loop_edge") if kind == "gatv2" else ("x",)
    terms = [name for name in given if name not in rows]
    options = {"dropout": dropout, "seed": torch.tensor([5], device=device), "self_loops": True}

    def mixed(**given: Tensor) -> Tensor:
        return OPS[kind][0](**given, windows=windows, **options)

    def in_half(**given: Tensor) -> Tensor:
        if given[terms[0]].dtype == torch.float32:
            given |= {name: given[name].to(dtype) for name in terms}
            return OPS[kind][1](edge_index, **given, **options).float()
        return OPS[kind][1](edge_index, **given, **options)

    check(mixed, in_half, given | {name: given[name].detach().float().requires_grad_() for name in terms})


@pytest.mark.parametrize(
    ("graph", "dtype"), [("ragged", torch.float16), ("short_hub", torch.bfloat16)], ids=str
)
@WALKS
def test_terms_of_float32(
    kind: str,
    graph: str,
    dtype: torch.dtype,
    walked: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside rows of half precision: results and gradients have their dtypes, errors those of half."""
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "short_hub", short_hub)
    edge_index, size = GRAPHS[graph](device)
    walks = RowWindows.from_edge_index(edge_index, size).walks(walked == "rows", False)
    assert graph == "ragged" or (walks.forward.num_slots > 0 and walks.backward.num_slots > 0)
    check_mixed(kind, graph, device, dtype, 2, 12, edges=walked == "rows")


@pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
def test_the_maximum_is_a_true_one(level: float, walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw("gat", "self_loops", device, narrow(walked), 2, 8)
    with torch.no_grad():
        given["a_dst"].fill_(level)
    options = {"negative_slope": 1.0}
    op = functools.partial(ops.gat_attention, windows=windows, **options)
    check(op, functools.partial(reference.gat_attention, edge_index, **options), given)


@WALKS
def test_rows_without_edges_are_zero_with_finite_gradients(
    kind: str, walked: str, device: torch.device
) -> None:
    windows, edge_index, given = draw(kind, "isolated", device, narrow(walked), 2, 8)
    out = OPS[kind][0](**given, windows=windows)
    empty = torch.bincount(edge_index[1], minlength=45) == 0
    assert empty.any() and not out[empty].any()
    grads = torch.autograd.grad(out.square().sum(), list(given.values()))
    assert all(grad.isfinite().all() for grad in grads)


def check_a_node_without_edges(kind: str, name: str, heads: int, device: torch.device, dim: int = 8) -> None:
    """An Inf in it is in no output, and in no gradient, its own included."""
    windows, edge_index, given = draw(kind, "isolated", device, torch.float16, heads, dim)
    spoiled = given[{"x_src": "x", "x_dst": "a_dst"}[name] if kind == "gat" else name]
    alone = torch.ones(spoiled.size(0), dtype=torch.bool, device=device)
    alone[edge_index[int(name == "x_dst")]] = False
    assert alone.any()

    def results() -> list[Tensor]:
        out = OPS[kind][0](**given, windows=windows)
        return [out, *torch.autograd.grad(out.float().square().sum(), list(given.values()))]

    wanted = results()
    with torch.no_grad():
        spoiled[alone] = float("inf")
    assert all(map(torch.equal, results(), wanted))


@pytest.mark.parametrize("name", ["x_src", "x_dst"])
@WALKS
def test_a_node_without_edges_adds_nothing(kind: str, name: str, walked: str, device: torch.device) -> None:
    check_a_node_without_edges(kind, name, 2, device)


def test_receivers_without_any_source(walked: str, device: torch.device) -> None:
    windows = RowWindows.from_edge_index(torch.empty(2, 0, dtype=torch.int64, device=device), (0, 5))
    of_src, of_dst = (torch.zeros(rows, 2, device=device, dtype=torch.float16) for rows in (0, 5))
    x = torch.zeros(0, 2, 8, device=device, dtype=torch.float16)
    assert not ops.gat_attention(of_src, of_dst, x, windows).any()


@WALKS
def test_a_node_alone_attends_to_itself(kind: str, walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw(kind, "isolated", device, narrow(walked), 2, 8)
    out = OPS[kind][0](**given, windows=windows, self_loops=True)
    alone = torch.bincount(edge_index[1][edge_index[0] != edge_index[1]], minlength=45) == 0
    x = given["x" if kind == "gat" else "x_src"]
    assert alone.any() and torch.equal(out[alone], x[alone])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@WALKS
def test_nan_and_inf_reach_their_neighbours_alone(
    kind: str, value: float, loops: bool, walked: str, device: torch.device
) -> None:
    windows, edge_index, given = draw(kind, "self_loops", device, narrow(walked), 3, 8)
    op, definition = OPS[kind]
    options = {"self_loops": loops, "dropout": 0.4 * loops, "seed": torch.tensor([5], device=device)}
    for name in given:
        if name == "att":
            continue
        with torch.no_grad():
            spoiled = {other: tensor.clone() for other, tensor in given.items()}
            spoiled[name][11, 1] = value
            out = op(**spoiled, windows=windows, **options)
            wanted = definition(edge_index, **spoiled, **options)
        reached = int((~wanted.isfinite()).sum())
        assert 0 < reached < wanted.numel() // 2
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("kind", OPS)
def test_strided_rows_and_gradients(kind: str, device: torch.device) -> None:
    edge_index, sizes = GRAPHS["ragged"](device)
    windows = RowWindows.from_edge_index(edge_index, sizes)
    whole = torch.randn(33, 3 * 16, device=device, requires_grad=True)

    def attend(function: Any, *graph: Any, **options: Any) -> Tensor:
        x, y, _ = (part.unflatten(1, (2, 8)) for part in whole.split(16, 1))
        operands = (x[:, :, 0], y[:, :, 1], x) if kind == "gat" else (x, y, y[0])
        out = function(*graph, *operands, **options)
        return torch.autograd.grad(out.sum() + out[3, 1, 2], whole)[0]

    op, definition = OPS[kind]
    torch.testing.assert_close(
        attend(op, windows=windows), attend(definition, edge_index), rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="float64 runs in the interpreter alone")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", OPS)
def test_gradcheck(kind: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dropout": dropout, "seed": torch.tensor([2]), "self_loops": True}
    for num_dst in (7, 6):
        monkeypatch.setitem(GRAPHS, "few", lambda device, n=num_dst: (few_edges(device), (7, n)))
        windows, _, given = draw(kind, "few", torch.device("cpu"), torch.float64, 2, 3, True, True)
        names, op = list(given), OPS[kind][0]

        def run(*values: Tensor, op: Any = op, windows: Any = windows, names: Any = names) -> Tensor:
            return op(**dict(zip(names, values, strict=True)), windows=windows, **options)

        assert torch.autograd.gradcheck(run, tuple(given.values()), fast_mode=True)


@WALKS
def test_gradients_of_some_operands(kind: str, walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw(kind, "ragged", device, narrow(walked), 2, 8)
    for wanted in given:
        some = {name: tensor.detach().requires_grad_(name == wanted) for name, tensor in given.items()}
        op, definition = OPS[kind]
        check(functools.partial(op, windows=windows), functools.partial(definition, edge_index), some)


def test_mistakes_are_named(device: torch.device) -> None:
    windows, _, given = draw("gat", "bipartite", device, torch.float32, 2, 4)
    attend = functools.partial(ops.gat_attention, windows=windows)
    a_src, a_dst, x = (tensor.detach() for tensor in given.values())
    with pytest.raises(ValueError, match=r"`a_src` must have shape \[50, 2\] \(got \[21, 2\]\)"):
        attend(a_dst, a_dst, x)
    with pytest.raises(ValueError, match=r"`a_dst` must have the dtype of `a_src`"):
        attend(a_src, a_dst.half(), x)
    with pytest.raises(ValueError, match=r"`edge_score` must have shape \[130, 2\] \(got \[50, 2\]\)"):
        attend(a_src, a_dst, x, edge_score=a_src)
    edge = torch.zeros(130, 2, device=device)
    with pytest.raises(ValueError, match=r"`loop_score` must be given with both"):
        attend(a_src, a_dst, x, edge_score=edge, self_loops=True)
    with pytest.raises(ValueError, match=r"`loop_score` must be given only with both"):
        attend(a_src, a_dst, x, loop_score=edge[:21])
    with pytest.raises(ValueError, match=r"`dropout` must be in \[0, 1\) \(got 1.0\)"):
        attend(a_src, a_dst, x, dropout=1.0)
    with pytest.raises(ValueError, match=r"`x` must have a head_dim of at most 256 \(got 257\)"):
        attend(a_src, a_dst, torch.zeros(50, 2, 257, device=device))
    windows, _, given = draw("gatv2", "bipartite", device, torch.float32, 2, 4)
    x_src, x_dst, att = (tensor.detach() for tensor in given.values())
    with pytest.raises(ValueError, match=r"`x_dst` must have shape \[21, 2, 4\] \(got \[50, 2, 4\]\)"):
        ops.gatv2_attention(x_src, x_src, att, windows)
    with pytest.raises(ValueError, match=r"`att` must have shape \[2, 4\] \(got \[2, 3\]\)"):
        ops.gatv2_attention(x_src, x_dst, att[:, :3], windows)


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    windows, _, given = draw(kind, "ragged", device, dtype, 2, 4)
    for name in ("a_src", "a_dst", "att"):
        if name in given:
            given[name] = given[name].detach().float().requires_grad_()
    packed = (windows.packed_rows, None, False, *windows.shape)
    own, other, x = given.values()
    own, other, x = (other, own, x) if kind == "gat" else (other, x, own)
    arguments = (*packed, 0.2, 0.0, True, kind == "gatv2", kind == "gat", own, other, x, None, None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.graphfuse.additive_attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize("kind", OPS)
def test_compile_has_no_graph_break(kind: str, device: torch.device) -> None:
    windows, _, given = draw(kind, "ragged", device, torch.float32, 2, 4)
    op = OPS[kind][0]

    def loss(*operands: Tensor) -> Tensor:
        return op(operands[0] * 2, *operands[1:], windows, self_loops=True).square().sum()

    operands = list(given.values())
    wanted = torch.autograd.grad(loss(*operands), operands)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*operands), operands)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@WALKS
def test_fifty_runs_are_bitwise_equal(kind: str, walked: str, device: torch.device) -> None:
    windows, _, given = draw(kind, "self_loops", device, torch.float16, 2, 16)
    options = {"dropout": 0.3, "seed": torch.tensor([4], device=device), "self_loops": True}

    def run() -> list[Tensor]:
        out = OPS[kind][0](**given, windows=windows, **options)
        return [out, *torch.autograd.grad(out.square().sum(), list(given.values()))]

    first = run()
    for _ in range(50 if device.type == "cuda" else 1):  # the interpreter runs one program at a time
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
