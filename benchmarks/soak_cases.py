"""Every fused op in every row of its launch table: what the soak and the sanitizer launch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.soak_data import Data
from graphfuse import RowWindows, ops, reference
from graphfuse.formats import build
from graphfuse.kernels import launch, orders
from graphfuse.kernels.device import HALF
from graphfuse.kernels.launch import Load, RowLoad
from graphfuse.kernels.orders import GemmOrder

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = (1, 7, 33, 64, 128, 602)
GATES = (1, 7, 64, 602, 2048, 4096)
SHAPES = ((1, 64), (1, 128), (4, 32), (8, 16), (8, 8), (3, 100))
EDGE_SHAPES = ((1, 64, 16), (4, 32, 3))
GEMMS = {  # dim and out_dim, by the order of the products that may be taken for them
    GemmOrder.FUSED: ((7, 16), (64, 64), (33, 128)),
    GemmOrder.PROJECT: ((64, 16), (602, 41)),
    GemmOrder.AGGREGATE: ((33, 128), (16, 602)),
}
_MANY = 10**6  # rows of a graph that fills the GPU
_DROPOUT = 0.3


@dataclass(frozen=True)
class Case:
    """One configuration.

    Args:
        op: Of :mod:`graphfuse.ops`.
        walk: ``windows`` or ``rows``, with the row of the launch table where there are several.
        dtype: Of the features.
        shape: Width; width and output width; heads and width; heads, width and numbers of an edge.
        options: Words that ask for an operand or an option, as in the name.
        patches: What is put in place of attributes of the tables of launches and orders, to get this row.
    """

    op: str
    walk: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: tuple[str, ...] = ()
    patches: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The same on every machine."""
        dtype = str(self.dtype).removeprefix("torch.")
        words = (self.op, self.walk, dtype, "x".join(map(str, self.shape)), "+".join(self.options))
        return "/".join(word for word in words if word)

    @contextlib.contextmanager
    def forced(self, slice_length: int | None = None) -> Iterator[None]:
        """While it lasts, calls of the op take this row of the launch table.

        Args:
            slice_length: Windows and rows with more entries are cut; ``None`` leaves that as it is.
        """
        with contextlib.ExitStack() as stack:
            for attribute, value in self.patches:
                table = launch if hasattr(launch, attribute) else orders
                stack.enter_context(mock.patch.object(table, attribute, value))
            if slice_length is not None:
                stack.enter_context(mock.patch.object(build, "_MIN_SLICE", slice_length))
            yield


class Graph(NamedTuple):
    """The edges, and their windows."""

    edge_index: Tensor
    num_nodes: int
    windows: RowWindows


@dataclass
class Problem:
    """An op and its definition, called with ``data.inputs`` as keywords."""

    data: Data
    op: Callable[..., Tensor]
    definition: Callable[..., Tensor]

    def launch(self) -> list[Tensor]:
        """The output and the gradients of all inputs, of the op."""
        return self._results(self.op, None)

    def define(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The same of the definition, in the dtypes of the inputs or in ``dtype``."""
        return self._results(self.definition, dtype)

    def _results(self, fn: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        inputs = self.data.inputs
        if dtype is not None:
            inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
        out = fn(**inputs)
        cotangent = self.data.cotangent(out.shape).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), cotangent)]

    @property
    def names(self) -> list[str]:
        """Of the results, as the rule of comparison wants them: gradients start with ``d``."""
        return ["out", *("d" + name for name in self.data.inputs)]


def random_edges(num_nodes: int, device: torch.device) -> Tensor:
    """Edges with a hub in both directions, isolated nodes, loops and repeated edges, in random order."""
    generator = torch.Generator().manual_seed(0)
    linked = num_nodes - num_nodes // 10  # the others are isolated
    count = (8 if num_nodes > 1000 else 2) * num_nodes
    pairs = torch.randint(linked, (2, count), generator=generator)
    spokes = torch.randperm(linked, generator=generator)[: 4 * linked // 5]
    hub = torch.full_like(spokes, 5)
    loops = torch.arange(0, linked, 9)
    into, out_of = torch.stack([spokes, hub]), torch.stack([hub, spokes])
    repeated = pairs[:, ::7]
    edges = torch.cat([pairs, repeated, repeated, into, out_of, torch.stack([loops, loops])], 1)
    names = torch.randperm(num_nodes, generator=generator)  # so that isolated nodes lie everywhere
    return names[edges[:, torch.randperm(edges.size(1), generator=generator)]].to(device)


def make_graph(num_nodes: int, device: torch.device) -> Graph:
    """A new record each time: what was prepared for a launch is kept with it."""
    edge_index = random_edges(num_nodes, device)
    return Graph(edge_index, num_nodes, RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes)))


def make_problem(case: Case, graph: Graph) -> Problem:
    """Operands, op and definition of ``case``."""
    data = Data(graph.edge_index.device, case.dtype)
    options = _OPERANDS[case.op](case, graph, data)
    structures: tuple[dict[str, Any], ...] = ({}, {})
    if case.op != "gated_skip":
        structures = ({"windows": graph.windows}, {"edge_index": graph.edge_index})
    scale = data.positive(graph.num_nodes, case.shape[0]) if "key_scale" in case.options else None

    def with_keys(given: dict[str, Any]) -> dict[str, Any]:
        return given if scale is None else {**given, "k": (given["v"] * scale[:, :, None]).to(given["v"])}

    # looked up at each call, so that a test may put something else there
    def op(**given: Any) -> Tensor:
        promise = {} if scale is None else {"key_scale": scale}
        return _joined(getattr(ops, case.op)(**structures[0], **with_keys(given), **options, **promise))

    def definition(**given: Any) -> Tensor:
        return _joined(getattr(reference, case.op)(**structures[1], **with_keys(given), **options))

    data.refill()
    return Problem(data, op, definition)


def _joined(found: Tensor | Sequence[Tensor]) -> Tensor:
    # the output and, of attention over edges with numbers, the sums of those
    return found if isinstance(found, Tensor) else torch.cat([part.flatten(1) for part in found], 1)


def _for_spmm(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    num_nodes, dim = graph.num_nodes, case.shape[0]
    data.add("x", num_nodes, dim)
    if case.op == "spmm_gemm":
        data.add("weight", case.shape[1], dim, scale=dim**-0.5)
    if "edge_weight" in case.options:
        data.add("edge_weight", graph.windows.num_edges)
    if "scaled" not in case.options:
        return {}
    data.add("loop_weight", num_nodes, dtype=torch.float32)
    data.add("bias", case.shape[-1])
    return {name: data.positive(num_nodes) for name in ("row_scale", "col_scale")}


def _for_sddmm(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    for name in "ab":
        data.add(name, graph.num_nodes, *case.shape)
    return {"without_loops": "without_loops" in case.options}


def _for_attention(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    (num_nodes, num_edges), (heads, dim, *edge_dim) = (graph.num_nodes, graph.windows.num_edges), case.shape
    for name in ("q", "v") if "key_scale" in case.options else ("q", "k", "v"):
        data.add(name, num_nodes, heads, dim)
    if edge_dim:
        data.add("edge_query", num_nodes, heads, *edge_dim)
        data.add("edge_attr", num_edges, *edge_dim)
    return _attention_options(case, data)


def _for_gat(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    heads = case.shape[0]
    for name in ("a_src", "a_dst"):
        data.add(name, graph.num_nodes, heads)
    data.add("x", graph.num_nodes, *case.shape)
    return _numbers_of_edges(case, graph, data, ("edge_score", "loop_score"), (heads,))


def _for_gatv2(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    for name in ("x_src", "x_dst"):
        data.add(name, graph.num_nodes, *case.shape)
    data.add("att", *case.shape, scale=case.shape[1] ** -0.5)  # scores of the order of 1
    return _numbers_of_edges(case, graph, data, ("edge", "loop_edge"), case.shape)


def _numbers_of_edges(
    case: Case, graph: Graph, data: Data, names: tuple[str, str], width: tuple[int, ...]
) -> dict[str, Any]:
    if "edges" in case.options:
        data.add(names[0], graph.windows.num_edges, *width)
        if "self_loops" in case.options:
            data.add(names[1], graph.num_nodes, *width)
    return _attention_options(case, data)


def _attention_options(case: Case, data: Data) -> dict[str, Any]:
    options: dict[str, Any] = {"self_loops": True} if "self_loops" in case.options else {}
    return options | ({"dropout": _DROPOUT, "seed": data.seed()} if "dropout" in case.options else {})


def _for_gate(case: Case, graph: Graph, data: Data) -> dict[str, Any]:
    for name in ("out", "skip"):
        data.add(name, graph.num_nodes, *case.shape)
    data.add("weight", 1, 3 * case.shape[0], scale=case.shape[0] ** -0.5)
    return {}


# what adds the operands, and returns the options, that an op and its definition have in common
_OPERANDS: dict[str, Callable[[Case, Graph, Data], dict[str, Any]]] = {
    "spmm": _for_spmm,
    "spmm_gemm": _for_spmm,
    "sddmm": _for_sddmm,
    "sparse_attention": _for_attention,
    "gat_attention": _for_gat,
    "gatv2_attention": _for_gatv2,
    "gated_skip": _for_gate,
}
OPS = tuple(_OPERANDS)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


_SPMM_ROW = launch.spmm_row
_TO_ROWS, _TO_WINDOWS = (("prefers_rows", _always(rows)) for rows in (True, False))
_LOADS = {load: (_TO_WINDOWS, ("load", _always(load))) for load in Load}
_ROWS = {"rows": (_TO_ROWS,)} | {
    name: (
        _TO_ROWS,
        ("spmm_row", lambda dim, out_dim, *_, edges=edges: _SPMM_ROW(dim, out_dim, _MANY, edges, 0)),
    )
    for name, edges in {"rows-many": _MANY, "rows-long": 999 * _MANY}.items()
}
_ORDERS = {
    order: (
        "gemm_order",
        # the last argument: A X is wanted too, which the projection would not give
        lambda *sizes, order=order: (
            GemmOrder.AGGREGATE if sizes[-1] and order is GemmOrder.PROJECT else order
        ),
    )
    for order in GemmOrder
}
_ROW_LOADS = {load.name.lower(): ("row_load", _always(load)) for load in RowLoad}


def _of_spmm() -> Iterator[Case]:
    for dtype, dim in itertools.product(DTYPES, WIDTHS):
        known = set()
        for load in Load:
            config = launch.spmm_window(dim, dtype.itemsize, None, load)
            if config not in known:  # several loads share a row of the table
                known.add(config)
                yield Case("spmm", f"windows-{load.name.lower()}", dtype, (dim,), (), _LOADS[load])
        for walk, patches in _ROWS.items():
            for options in ((), ("edge_weight",)):
                yield Case("spmm", walk, dtype, (dim,), options, patches)
    for dtype in DTYPES:
        for load in (Load.FEW, Load.TINY):
            yield Case("spmm", f"windows-{load.name.lower()}", dtype, (64,), ("scaled",), _LOADS[load])
        yield Case("spmm", "rows", dtype, (33,), ("edge_weight", "scaled"), _ROWS["rows"])


def _of_spmm_gemm() -> Iterator[Case]:
    # without ReLU: where rounding turns a sign, a gradient is off by all of itself
    for order, dtype in itertools.product(GemmOrder, DTYPES):
        for shape in GEMMS[order]:
            if order is GemmOrder.FUSED and not orders.can_fuse(*shape, dtype.itemsize):
                continue
            walks = {"windows": _LOADS[Load.FEW], **_ROWS} if order is GemmOrder.FUSED else _ROWS
            for walk, patches in walks.items():
                for options in ((), ("scaled",)) if walk == "windows" else ((),):
                    words = (order.name.lower(), *options)
                    yield Case("spmm_gemm", walk, dtype, shape, words, (*patches, _ORDERS[order]))


def _walks(prefers: str, dtype: torch.dtype) -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    if dtype in HALF:  # windows take no other
        yield "windows", ((prefers, _always(False)),)
    yield "rows", ((prefers, _always(True)),)


def _of_sparse_attention() -> Iterator[Case]:
    switches = [(), ("self_loops",), ("self_loops", "key_scale")]
    every = [(*dropout, *options) for dropout in ((), ("dropout",)) for options in switches]
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        # bfloat16 is the code of float16 but for conversions
        some = (every[0], every[-1]) if dtype is torch.bfloat16 else every
        for (walk, patches), options in itertools.product(_walks("attention_prefers_rows", dtype), some):
            yield Case("sparse_attention", walk, dtype, shape, options, patches)
    for shape, load in itertools.product(SHAPES, ("short", "normal")):  # small graphs have few rows
        yield Case("sparse_attention", f"rows-{load}", torch.float32, shape, every[-1], (_ROW_LOADS[load],))
    for of_edges, dtype in itertools.product(EDGE_SHAPES, DTYPES):
        yield Case("sparse_attention", "rows", dtype, of_edges, ("edges",))
        yield Case("sparse_attention", "rows", dtype, of_edges, ("edges", "dropout"))


def _of_gat() -> Iterator[Case]:
    every: tuple[tuple[str, ...], ...] = ((), ("dropout",), ("dropout", "self_loops"))
    with_edges = (("edges",), ("dropout", "self_loops", "edges"))
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        for walk, patches in _walks("gat_prefers_rows", dtype):
            for options in (*every, *(with_edges if walk == "rows" else ())):
                yield Case("gat_attention", walk, dtype, shape, options, patches)
        for options in (*every, *with_edges):
            yield Case("gatv2_attention", "rows", dtype, shape, options)
    for shape in SHAPES:
        for op, load in itertools.product(("gat_attention", "gatv2_attention"), ("short", "normal")):
            yield Case(op, f"rows-{load}", torch.float32, shape, every[-1], (_ROW_LOADS[load],))
        rows = {launch.gatv2_row(*shape, 2, n, True) for n in (RowLoad.NORMAL, RowLoad.LONG)}
        if len(rows) == 2:
            for dtype in HALF:
                yield Case("gatv2_attention", "rows-long", dtype, shape, every[-1], (_ROW_LOADS["long"],))


def _of_others() -> Iterator[Case]:
    for dtype in DTYPES:
        for dim in WIDTHS:
            yield Case("sddmm", "rows", dtype, (dim,), ("without_loops",) if dim == 33 else ())
        for dim in GATES:
            yield Case("gated_skip", "", dtype, (dim,))


def cases() -> list[Case]:
    """All configurations, by op."""
    makers = (_of_spmm, _of_spmm_gemm, _of_sparse_attention, _of_gat, _of_others)
    found = list(itertools.chain.from_iterable(make() for make in makers))
    return sorted(found, key=lambda case: OPS.index(case.op))


SUITE = (  # few that launch every kernel, and its variants that read other memory
    *("spmm/windows-few/float16/33", "spmm/windows-few/float32/33", "spmm/windows-few/float16/64/scaled"),
    *("spmm/rows/float16/33/edge_weight+scaled", "spmm/rows-many/float32/7"),
    *("spmm_gemm/windows/float16/33x128/fused+scaled", "spmm_gemm/windows/float32/7x16/fused+scaled"),
    *("spmm_gemm/rows/float32/33x128/fused", "spmm_gemm/rows/float16/64x16/project"),
    *("spmm_gemm/rows/float32/33x128/aggregate", "sddmm/rows/float16/33/without_loops"),
    *("sddmm/rows/float32/7", "sparse_attention/windows/float16/3x100"),
    "sparse_attention/windows/float16/8x8/dropout+self_loops+key_scale",
    "sparse_attention/windows/float16/1x64/dropout+self_loops",
    "sparse_attention/rows/float32/3x100/dropout+self_loops",
    "sparse_attention/rows/float16/8x8/self_loops+key_scale",
    "sparse_attention/rows-short/float32/4x32/dropout+self_loops+key_scale",
    "sparse_attention/rows/float16/4x32x3/edges+dropout",
    *("gat_attention/windows/float16/3x100", "gat_attention/windows/float16/8x8/dropout+self_loops"),
    *("gat_attention/rows/float32/3x100/dropout+self_loops+edges", "gat_attention/rows/float16/8x8/dropout"),
    *("gatv2_attention/rows/float32/3x100/dropout+self_loops+edges", "gatv2_attention/rows/float16/8x8"),
    "gat_attention/rows-short/float32/8x8/dropout+self_loops",
    "gatv2_attention/rows-short/float32/8x8/dropout+self_loops",
    *("gatv2_attention/rows-long/float16/1x64/dropout+self_loops", "gated_skip/float16/7"),
    *("gated_skip/float32/602", "gated_skip/float16/4096"),
)


def suite() -> list[Case]:
    """The configurations of :data:`SUITE`."""
    known = {case.name: case for case in cases()}
    return [known[name] for name in SUITE]
