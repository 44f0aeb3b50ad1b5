"""Bad input of every op and layer: an error that names the argument, before anything is launched."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

import graphfuse
from graphfuse import RowWindows, clear_cache, ops
from tests.nn._layers import CHANNELS, EDGES, NAMES, OPTIONS, pair

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphfuse"


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphfuse.kernels.run import Launch

    def launch(*arguments: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(Launch, "__call__", launch)


# Ops: four edges from four sources to three receivers, two heads of four, five columns

HEADS = (2, 4)
EDGE_LIST = torch.tensor([[0, 1, 2, 3], [1, 0, 2, 2]])
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "spmm": {"x": (4, 5), "edge_weight": (4,), "loop_weight": (3,), "row_scale": (3,), "col_scale": (4,)},
    "spmm_gemm": {"x": (4, 5), "weight": (2, 5), "bias": (2,), "edge_weight": (4,), "loop_weight": (3,)},
    "sddmm": {"a": (3, 5), "b": (4, 5)},
    "sparse_attention": {"q": (3, *HEADS), "k": (4, *HEADS), "v": (4, *HEADS)},
    "attention_weights": {"q": (3, *HEADS), "k": (4, *HEADS)},
    "gat_attention": {"a_src": (4, 2), "a_dst": (3, 2), "x": (4, *HEADS), "edge_score": (4, 2)},
    "gatv2_attention": {"x_src": (4, *HEADS), "x_dst": (3, *HEADS), "att": HEADS, "edge": (4, *HEADS)},
    "gat_attention_weights": {"a_src": (4, 2), "a_dst": (3, 2), "edge_score": (4, 2)},
    "gatv2_attention_weights": {
        "x_src": (4, *HEADS),
        "x_dst": (3, *HEADS),
        "att": HEADS,
        "edge": (4, *HEADS),
    },
    "gated_skip": {"out": (3, 4), "skip": (3, 4), "weight": (1, 12)},
}
SHAPES["spmm"]["bias"] = (5,)
SHAPES["sparse_attention"] |= {"edge_query": (3, 2, 3), "edge_attr": (4, 3)}
for name in ("gat_attention", "gat_attention_weights"):
    SHAPES[name]["loop_score"] = (3, 2)
for name in ("gatv2_attention", "gatv2_attention_weights"):
    SHAPES[name]["loop_edge"] = (3, *HEADS)

KINDS: dict[str, Callable[[Tensor], Any]] = {
    "integers": Tensor.int,
    "complex numbers": lambda x: x.to(torch.complex64),
    "booleans": Tensor.bool,
    "8 bits": lambda x: x.to(torch.float8_e4m3fn),
    "another device": lambda x: x.to("meta"),
    "one dimension more": lambda x: x[None],
    "a sparse tensor": Tensor.to_sparse,
    "a list": Tensor.tolist,
    "an array": Tensor.numpy,
    "a word": lambda x: "x",
}
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x.flatten()[0],
    "a row less": lambda x: x[:-1],
    "twice the rows": lambda x: torch.cat([x, x]),
}


def draw(op: str) -> dict[str, Any]:
    inputs: dict[str, Any] = {name: torch.randn(shape) for name, shape in SHAPES[op].items()}
    if op != "gated_skip":
        inputs["windows"] = RowWindows.from_edge_index(EDGE_LIST, (4, 3))
    if op.startswith("gat"):
        inputs["self_loops"] = op != "gated_skip"
    return {name: one for name, one in inputs.items() if op != "gated_skip" or name != "self_loops"}


def refused(op: str, inputs: dict[str, Any], name: str | None) -> str:
    with pytest.raises(ValueError) as error:
        getattr(ops, op)(**inputs)
    message = str(error.value)
    assert re.match(r"`\w+` ", message) and "(got " in message, message
    assert name is None or message.startswith(f"`{name}`"), message
    return message


@pytest.mark.parametrize("op", SHAPES)
def test_tensors_that_an_op_refuses(op: str, no_launch: None) -> None:
    good = draw(op)
    for name in SHAPES[op]:
        for kind, change in KINDS.items():
            if name == "out" and kind == "another device":
                continue  # the first argument says where the others have to be
            refused(op, good | {name: change(good[name])}, name)
        for kind, change in ROWS.items():
            sets_the_size = name in ("out", "weight") and (op == "gated_skip" or kind != "a number")
            refused(op, good | {name: change(good[name])}, None if sets_the_size else name)
        if op not in ("spmm", "spmm_gemm") or name == "weight":  # whose weights are of any float dtype
            refused(op, good | {name: good[name].double()}, None)
        if SHAPES[op][name][-1] != SHAPES[op][name][0]:
            wide = torch.cat([good[name], good[name]], -1)
            if (op, name) != ("gat_attention", "x"):  # of any width
                refused(op, good | {name: wide}, None)


@pytest.mark.parametrize("op", SHAPES)
def test_what_is_no_record(op: str, no_launch: None) -> None:
    good = draw(op)
    if "windows" in good:
        for other in (None, EDGE_LIST, "graph", 3, good["windows"].packed_windows):
            assert "must be RowWindows" in refused(op, good | {"windows": other}, "windows")
        batch = refused(op, good | {"windows": [good["windows"]]}, "windows")
        assert "window the batch as a whole" in batch
        other = RowWindows.from_edge_index(EDGE_LIST, (5, 5))
        assert "must have shape" in refused(op, good | {"windows": other}, None)


@pytest.mark.parametrize(
    "op", [op for op in SHAPES if op.startswith(("sparse", "gat")) and op != "gated_skip"]
)
def test_rates_and_seeds(op: str, no_launch: None) -> None:
    good = draw(op)
    for rate in (1.0, 1.5, -0.1, float("nan"), float("inf"), "0.5", None, torch.tensor(0.5)):
        assert "must be in [0, 1)" in refused(op, good | {"dropout": rate}, "dropout")
    seed = torch.tensor([1])
    for bad in (1, [1], seed[0], seed.int(), seed.to("meta"), torch.tensor([1, 2]), seed.to_sparse()):
        assert "must be int64[1] on cpu" in refused(op, good | {"dropout": 0.5, "seed": bad}, "seed")


@pytest.mark.parametrize("op", SHAPES)
def test_operands_that_are_missing(op: str, no_launch: None) -> None:
    good, parameters = draw(op), inspect.signature(getattr(ops, op)).parameters
    needed = [name for name in SHAPES[op] if parameters[name].default is inspect.Parameter.empty]
    assert needed
    for name in needed:
        with pytest.raises(TypeError, match=rf"`{name}` must be a tensor \(got None\)"):
            getattr(ops, op)(**good | {name: None})


@pytest.mark.parametrize("op", ["spmm", "spmm_gemm"])
def test_dtypes_of_a_result(op: str, no_launch: None) -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        message = rf"`out_dtype` must be float16, .* \(got {dtype}\); convert the result instead"
        with pytest.raises(ValueError, match=message):
            getattr(ops, op)(**draw(op), out_dtype=dtype)
    for other in ("float32", float, 0, False, [torch.float32]):
        with pytest.raises(TypeError, match=r"`out_dtype` must be a torch\.dtype or None \(got"):
            getattr(ops, op)(**draw(op), out_dtype=other)


def test_weights_of_a_dense_layer_that_do_not_fit(no_launch: None) -> None:
    good, weight = draw("spmm_gemm"), torch.randn(2, 5)
    for bad in (weight.t(), weight[0], weight[0, 0], weight[None]):
        with pytest.raises(ValueError, match=r"`weight` must have shape \[out_dim, 5\] \(got \["):
            ops.spmm_gemm(**good | {"weight": bad})


@pytest.mark.parametrize("op", ["spmm", "spmm_gemm"])
def test_activations_and_scales(op: str, no_launch: None) -> None:
    for activation in ("gelu", 3, torch.relu):
        refused(op, draw(op) | {"activation": activation}, "activation")
    for name, length in (("row_scale", 3), ("col_scale", 4)):
        scale = torch.ones(length, requires_grad=True)
        with pytest.raises(ValueError, match=f"`{name}` must not require a gradient; multiply"):
            getattr(ops, op)(**draw(op) | {name: scale})


# Graphs

INDEX = torch.tensor([[0, 1], [1, 2]])
SPARSE = torch.ones(2, 2, 2).to_sparse()
GRAPHS: list[tuple[Any, Any, type[Exception], str]] = [
    (INDEX, (float("nan"), 3), ValueError, r"`num_src` must be an integer \(got nan\)"),
    (INDEX, (3, 3.0), ValueError, r"`num_dst` must be an integer \(got 3.0\)"),
    (INDEX, (3, "3"), ValueError, r"`num_dst` must be an integer \(got '3'\)"),
    (INDEX, (-1, 3), ValueError, r"`num_src` must lie in \[0, 2147483647\] \(got -1\); split"),
    (INDEX, (3, 3, 3), ValueError, r"`size` must be \(num_src, num_dst\) \(got \(3, 3, 3\)\)"),
    (INDEX, (2, 2), IndexError, r"larger than 1 \(got 2\)"),
    (INDEX - 1, (3, 3), IndexError, r"Found negative indices in 'edge_index' \(got -1\)"),
    (INDEX - 1, None, IndexError, r"Found negative indices"),
    (INDEX.float(), None, ValueError, "to be of integer type"),
    (INDEX.bool(), None, ValueError, "to be of integer type"),
    (INDEX.to("meta"), (3, 3), ValueError, "`edge_index` must hold indices .got a tensor on meta"),
    (INDEX[0], None, ValueError, "to be two-dimensional"),
    (INDEX[None], None, ValueError, "to be two-dimensional"),
    (INDEX.new_zeros(3, 2), None, ValueError, "to have size '2'"),
    (INDEX.tolist(), None, ValueError, r"`edge_index` must be an integer tensor .* \(got list\)"),
    (SPARSE, None, ValueError, r"`edge_index` must be a sparse matrix \(got 3 dimensions\)"),
    (
        EdgeIndex(INDEX, sparse_size=(4, 4)),
        (3, 3),
        ValueError,
        r"an EdgeIndex of size \(4, 4\), wanted \(3, 3\)",
    ),
]


@pytest.mark.parametrize(("graph", "size", "error", "message"), GRAPHS, ids=lambda one: "")
def test_graphs_that_cannot_be_cut(graph: Any, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RowWindows.from_edge_index(graph, size)


# Layers


def changed(place: int, where: tuple[int, int]) -> Tensor:
    edges = EDGES.clone()
    edges[where] = place
    return edges


def calls(name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a layer may be called with by mistake; seven nodes with four columns are right."""
    x, edges = torch.randn(7, 4), EDGES
    num_edges = edges.size(1)
    for kind, change in KINDS.items():
        if kind != "8 bits":  # which PyTorch computes little with
            yield f"x: {kind}", (change(x), edges)
    yield from (("x: none", (None, edges)), ("x: too few", (x[:4], edges)), ("x: empty", (x[:0], edges)))
    if name != "AGNNConv":
        yield "x: a column more", (torch.randn(7, 5), edges)
    bad = {
        "float": edges.float(),
        "bool": edges.bool(),
        "a row": edges[0],
        "none": None,
        "a list": edges.tolist(),
    }
    bad |= {"three rows": torch.cat([edges, edges[:1]]), "flipped": edges.t().contiguous(), "3d": edges[None]}
    for place in (-1, 7):
        bad |= {f"source {place}": changed(place, (0, 3)), f"receiver {place}": changed(place, (1, 3))}
    bad["int32"] = changed(7, (1, 3)).int()
    for kind, graph in bad.items():
        yield f"edge_index: {kind}", (x, graph)
    if name == "GCNConv":
        weight = torch.rand(num_edges)
        for kind, value in {"short": weight[1:], "long": weight.repeat(2), "none": weight[:0]}.items():
            yield f"edge_weight: {kind}", (x, edges, value)
        yield "edge_weight: elsewhere", (x, edges, weight.to("meta"))
        for kind in ("integers", "booleans", "8 bits"):
            yield f"edge_weight: {kind}", (x, edges, KINDS[kind](weight))
    if name in ("GATConv", "GATv2Conv", "TransformerConv"):
        yield "x: three", ((x, x, x), edges)
        yield "x: elsewhere", ((x, x.to("meta")), edges)
        yield "x: two dtypes", ((x, x.double()), edges)


def outcome(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> Exception | Tensor:
    try:
        return layer(*arguments)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_raises_where_pygs_does(name: str, no_launch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [re.compile(pattern, re.DOTALL) for pattern in messages()]
    ours, theirs = pair(name)
    for what, arguments in calls(name):
        clear_cache()
        wanted = outcome(theirs, arguments)
        if isinstance(wanted, Tensor):
            continue  # PyG takes it, and tests of the layers compare the results
        found = outcome(ours, arguments)
        assert isinstance(found, Exception), f"{what}: PyG raises {wanted!r}"
        as_pyg = type(found) is type(wanted) and str(found) == str(wanted)
        one_of_ours = isinstance(found, (ValueError, IndexError)) and any(
            p.fullmatch(str(found)) for p in known
        )
        on_two_devices = "meta" in str(found) and "meta" in str(wanted)  # which of the two is named is chance
        assert as_pyg or one_of_ours or on_two_devices, f"{what}: {found!r}, not {wanted!r}"


@pytest.mark.parametrize("cached", [False, True])
def test_edge_weights_that_are_no_floats(cached: bool, device: torch.device, no_launch: None) -> None:
    x, edges, ones = (one.to(device) for one in (torch.randn(7, 4), EDGES, torch.ones(EDGES.size(1))))
    layer = graphfuse.nn.GCNConv(4, 4, cached=cached).to(device)
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        message = (
            rf"`edge_weight` must be a float tensor \(got {dtype}\); convert it with \.to\(torch\.float32"
        )
        with pytest.raises(ValueError, match=message):
            layer(x, edges, ones.to(dtype))
    for one in (layer, graphfuse.nn.GCNConv(4, 4, normalize=False).to(device)):
        with pytest.raises(ValueError, match=r"`edge_weight` .* \(got torch\.complex64\); pass its absolute"):
            one(x, edges, ones.to(torch.complex64))
    assert layer._cached_edge_index is None


def test_edge_weights_that_count_as_given(device: torch.device, no_launch: None) -> None:
    # nothing but the kernel reads them, which would go beyond their end
    layer, edges = graphfuse.nn.GCNConv(4, 4, normalize=False).to(device), EDGES.to(device)
    x, weight = torch.randn(7, 4, device=device), torch.ones(edges.size(1), device=device)
    for bad in (weight[1:], weight.repeat(2), weight.int()[:3]):
        with pytest.raises(ValueError, match=rf"`edge_weight` must have shape \[11\] \(got \[{len(bad)}\]\)"):
            layer(x, edges, bad)
    with pytest.raises(ValueError, match=f"`edge_weight` must be on {device}"):
        layer(x, edges, weight.to("meta"))


def test_integers_weigh_edges_as_given(device: torch.device) -> None:
    ours, theirs = pair("GCNConv", device, normalize=False)
    x, edges, count = torch.randn(7, 4, device=device), EDGES.to(device), torch.arange(11, device=device)
    for weight in (count, count % 2 == 0):
        torch.testing.assert_close(ours(x, edges, weight), theirs(x, edges, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_works_after_an_error(name: str, device: torch.device) -> None:
    ours, theirs = pair(name, device)
    x, edges = torch.randn(7, 4, device=device), EDGES.to(device, copy=True)
    ours(x, edges)
    edges[0, 0] = 7
    for _ in range(2):  # nothing of the bad graph is kept
        with pytest.raises(IndexError, match="larger than 6"):
            ours(x, edges)
    edges[0, 0] = 2
    torch.testing.assert_close(ours(x, edges), theirs(x, edges), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_other_sizes(name: str, device: torch.device, no_launch: None) -> None:
    layer, edges = getattr(graphfuse.nn, name)(*CHANNELS[name], **OPTIONS[name]).to(device), EDGES.to(device)
    record = RowWindows.from_edge_index(edges, (9, 9))
    with pytest.raises(ValueError, match=r"row windows of shape \(7, 7\) \(got \(9, 9\)\); build them"):
        layer(torch.randn(7, 4, device=device), record)
    with pytest.raises(ValueError, match=r"a list of RowWindows.*window the batch as a whole"):
        layer(torch.randn(9, 4, device=device), [record])
    elsewhere = RowWindows.from_edge_index(edges, (7, 7))
    with pytest.raises(ValueError, match=r"must be on \S+ \(got meta\)|the kernels run on CUDA devices"):
        ops.spmm(elsewhere, torch.randn(7, 4, device="meta"))


# The page

FOLDERS = ("formats", "ops", "nn", "transforms", "reference")
SOURCES = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py"))]
SOURCES += [PACKAGE / name for name in ("convert.py", "warmup.py")]
INNER = ("walk.py",)  # what no caller of a public function can bring about


def pattern_of(node: ast.expr) -> str | None:
    """A regular expression for a string or f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern_of(part) or ".*" for part in node.values)
    return None


def messages() -> dict[str, str]:
    """Regular expressions of all messages that the package raises -> the error's type."""
    found = {}
    for path in SOURCES:
        if path.name in INNER:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                pattern = pattern_of(call.args[0])
                if pattern is not None:
                    found[pattern] = call.func.id
    return found


def listed() -> list[tuple[str, str]]:
    """Type and example of each row of the page."""
    page = (ROOT / "docs/bad-input.md").read_text()
    return re.findall(r"^\| `(\w+)` \| `` (.*?) `` \| .+ \|$", page, re.MULTILINE)


def test_the_page_lists_every_message() -> None:
    rows, patterns = listed(), messages()
    assert len(patterns) > 50
    missing = [
        pattern
        for pattern, kind in patterns.items()
        if not any(kind == name and re.fullmatch(pattern, example) for name, example in rows)
    ]
    assert not missing, "docs/bad-input.md lacks these messages"
    stale = [
        example
        for name, example in rows
        if not any(kind == name and re.fullmatch(pattern, example) for pattern, kind in patterns.items())
    ]
    assert not stale, "docs/bad-input.md lists messages that no code gives"
