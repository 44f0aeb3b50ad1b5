"""What each decision buys: the ops as shipped, and with one decision undone at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import graphfuse.nn
from benchmarks import attention, floors, graphs, spmm, truth
from benchmarks.bench import REGISTRY, Bench, Prepared, Problem, Unsupported, device
from benchmarks.graphs import Graph
from graphfuse import RowWindows, ops
from graphfuse.formats import build, quick
from graphfuse.kernels import launch
from graphfuse.kernels.device import HALF, kernel_problem
from graphfuse.nn import _whole, transformer_conv

_GRAPHS = ("reddit", "ego-twitter", "uniform-2.4m-124m")
_MODES = ("fwd", "fwd+bwd")
_IN = 128  # features before the projections
_NEVER_CUT = 1 << 26  # entries, a multiple of the step of slices; the quick build has 16 times that in int32

Inputs = attention.Inputs | spmm.Inputs
Patch = tuple[Any, str, Any]  # a module, the attribute, and what is put in its place


@dataclass(frozen=True)
class Variant:
    """A decision undone: what is replaced while the record is built, and during every call."""

    patches: tuple[Patch, ...] = ()

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        """While it lasts, the decision is undone."""
        with contextlib.ExitStack() as stack:
            for module, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(module, attribute, value))
            yield

    def around(self, prepared: Prepared) -> Prepared:
        """The same calls, with the decision undone. What is built on first use is built like that, too."""
        return prepared._replace(call=self._within(prepared.call), results=self._within(prepared.results))

    def _within(self, call: Callable[[], Any]) -> Callable[[], Any]:
        if not self.patches:
            return call

        def forced() -> Any:
            with self.forced():
                return call()

        return forced


def _other(attribute: str) -> Patch:
    """The rule of that name in the launch table, turned round."""
    rule = getattr(launch, attribute)
    return launch, attribute, lambda *sizes: not rule(*sizes)


def _in_order(ptr: Tensor, split: int, least: int = 0) -> tuple[Tensor, Tensor, int]:
    """Tasks by window and first entry, where a build sorts them by their length."""
    tasks, merges, num_slots = _CUT(ptr, split, least)
    tasks = tasks[torch.sort(tasks[:, 1], stable=True).indices]
    return tasks[torch.sort(tasks[:, 0], stable=True).indices], merges, num_slots


_CUT = build.cut_tasks
VARIANTS = {
    "not cut": Variant(((build, "_MIN_SLICE", _NEVER_CUT),)),
    # the build of small graphs on a GPU sorts in kernels of its own
    "not sorted": Variant(((build, "cut_tasks", _in_order), (quick, "suits", lambda *graph: False))),
    "long rows in order": Variant(((build, "_LONG_ROW", _NEVER_CUT),)),  # where rows are walked
    "other walk": Variant((_other("prefers_rows"), _other("attention_prefers_rows"))),
}


def _problem(graph: str, kind: str, shape: tuple[int, int], dtype: torch.dtype, mode: str) -> Problem:
    case = {"graph": graph, "dtype": dtype, "mode": mode}
    if kind == "spmm":
        made = REGISTRY["spmm"].problem(**case, head_dim=shape[1])
    else:
        made = REGISTRY["attention"].problem(**case, shape=shape)
    # times of peers are for the table of attention
    extra = {key: value for key, value in made.facts["extra"].items() if key not in OF_PEERS}
    return dataclasses.replace(made, facts=made.facts | {"extra": extra | {"kind": kind}})


OF_PEERS = ("peers", "recorded_gather_ms")


def run_op(i: Inputs, windows: RowWindows) -> Prepared:
    """The op over ``windows``; ``extra`` says what is walked."""
    if isinstance(i, spmm.Inputs):
        x = i.x
        rows = launch.prefers_rows(*windows.sizes, x.size(1), x.dtype, False)
        prepared = i.run(lambda x: ops.spmm(windows, x), _path(x))
    else:
        x = i.operands.q
        _, heads, dim = x.shape
        rows = launch.attention_prefers_rows(*windows.sizes, heads, dim, False, x.dtype)
        prepared = i.run(lambda q, k, v: ops.sparse_attention(q, k, v, windows), _path(x))
    walk = windows.row_walk() if rows else windows.walk()
    length = walk.tasks[:, 2] - walk.tasks[:, 1]
    found = {
        "walk": "rows" if rows else "windows",
        "entries": windows.num_entries,
        "tasks": length.numel(),  # of rows those that are long, or their slices
        "longest": int(length.max()) if length.numel() > 0 else 0,
        "slices": walk.num_slots,
    }
    return prepared._replace(extra=found)


def _path(x: Tensor) -> str:
    return "fused" if kernel_problem(x.device, x.dtype) is None else "generic"


def _graphfuse(i: Inputs) -> Prepared:
    return run_op(i, i.graph.windows)


def _variant(name: str, i: Inputs) -> Prepared:
    if name == "other walk" and isinstance(i, attention.Inputs) and i.operands.q.dtype not in HALF:
        raise Unsupported("windows add up scores and gradients of attention in half precision alone")
    variant = VARIANTS[name]
    with variant.forced():
        size = (i.graph.num_nodes, i.graph.num_nodes)
        return variant.around(run_op(i, RowWindows.from_edge_index(i.graph.edge_index, size)))


@functools.lru_cache(maxsize=1)  # finding an order takes longer than all that is timed
def _ordered(graph: Graph) -> RowWindows:
    size = (graph.num_nodes, graph.num_nodes)
    return RowWindows.from_edge_index(graph.edge_index, size, reorder="auto")


def reordered(i: Inputs) -> Prepared:
    """The op over windows of rows that share columns, and the floor of these."""
    windows = _ordered(i.graph)
    prepared = run_op(i, windows)
    extra = {**prepared.extra, "entries_before": i.graph.windows.num_entries}
    return prepared._replace(extra=extra, floor_ms=_floor_ms(i, windows, extra["walk"] == "rows"))


def _floor_ms(i: Inputs, windows: RowWindows, rows: bool) -> float | None:
    if device().type != "cuda":
        return None
    if isinstance(i, spmm.Inputs):
        return floors.spmm_ms(windows, rows, i.x.size(1), i.x.dtype, i.cotangent is not None)
    q, grad = i.operands.q, i.operands.grad
    return floors.attention_ms(windows, rows, q.size(1), q.size(2), q.dtype, grad is not None)


Bench(
    name="ablation",
    sweep=[
        {"graph": _GRAPHS, "kind": (kind,), "shape": shapes, "dtype": (torch.float16,), "mode": _MODES}
        for kind, shapes in (("sparse_attention", ((1, 64), (4, 32))), ("spmm", ((1, 64),)))
    ]
    + [
        {
            "graph": ("pubmed", "github"),
            "kind": ("sparse_attention",),
            "shape": ((8, 8),),
            "dtype": (torch.float32,),
            "mode": _MODES,
        }
    ],
    problem=_problem,
    providers={
        "graphfuse": _graphfuse,
        **{name: functools.partial(_variant, name) for name in VARIANTS},
        "reordered": reordered,
    },
)


@dataclass(frozen=True)
class LayerInputs:
    """What providers of a TransformerConv are given."""

    graph: Graph
    x: Tensor
    grad: Tensor | None  # of the output; None: forward only
    shape: tuple[int, int]

    def layer(self) -> Any:
        """The layer, with the same start for all."""
        torch.manual_seed(0)
        heads, dim = self.shape
        conv = graphfuse.nn.TransformerConv(_IN, dim, heads=heads)
        return conv.to(self.x.device, self.x.dtype)


def _layer_problem(graph: str, shape: tuple[int, int], dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    x, grad = (
        torch.randn(loaded.num_nodes, width, device=device(), generator=random).to(dtype)
        for width in (_IN, shape[0] * shape[1])
    )
    inputs = LayerInputs(loaded, x, grad if mode == "fwd+bwd" else None, shape)
    facts = loaded.facts(dtype) | {"heads": shape[0], "head_dim": shape[1], "mode": mode}
    facts["extra"] |= {"in_dim": _IN}
    expected = _expected(inputs)
    return Problem(facts, inputs, device(), lambda results: truth.worst(expected, results))


@torch.no_grad()
def _expected(i: LayerInputs) -> list[truth.Expected]:
    """A sample of the output and, with its gradient, of that in x."""
    source, target = i.graph.edge_index
    at = truth.sample(target, source, i.graph.num_nodes)
    both = [_by_definition(i, at, dtype) for dtype in (torch.float64, i.x.dtype)]
    return [
        truth.Expected(exact, rounded, at.rows, factor)
        for exact, rounded, factor in zip(*both, (2.0, 3.0), strict=False)
    ]


def _by_definition(i: LayerInputs, at: truth.Rows, dtype: torch.dtype) -> list[Tensor]:
    conv = i.layer().to(dtype)
    x = i.x.to(dtype)
    maps = (conv.lin_query, conv.lin_key, conv.lin_value)
    q, k, v = (F.linear(x, lin.weight, lin.bias).unflatten(1, i.shape) for lin in maps)
    grad = None if i.grad is None else i.grad.to(dtype).unflatten(1, i.shape)
    operands = truth.Operands(q, k, v, grad)
    found = truth.attention(at, operands, dtype)
    out = found[0].flatten(1) + conv.lin_skip(x[at.rows])
    if grad is None:
        return [out]
    source, target = i.graph.edge_index
    transposed = truth.edges_of(at.rows, source, target, i.graph.num_nodes)
    found += truth.attention_transposed(transposed, target, source, operands, dtype)
    dx = grad[at.rows].flatten(1) @ conv.lin_skip.weight
    for lin, of_rows in zip(maps, found[1:], strict=True):
        dx += of_rows.flatten(1) @ lin.weight
    return [out, dx]


def _layer(variant: Variant, i: LayerInputs) -> Prepared:
    conv, windows = i.layer(), i.graph.windows
    x = i.x.detach().requires_grad_(i.grad is not None)
    wanted = [x, *conv.parameters()]

    def call() -> Sequence[Tensor]:
        if i.grad is None:
            with torch.no_grad():
                return (conv(x, windows),)
        out = conv(x, windows)
        of_x, *_ = torch.autograd.grad(out, wanted, i.grad)  # the tests check those of the parameters
        return out.detach(), of_x

    return variant.around(Prepared(call, call, _path(x)))


def _one_by_one(x: Tensor, layers: list[Any], head_dim: int) -> Sequence[Tensor]:
    rows = (F.linear(x, lin.weight, lin.bias) for lin in layers)
    return [projected.view(x.size(0), -1, head_dim) for projected in rows]


# a layer that is one node of autograd's graph would not ask for its projections
_FOUR_PRODUCTS = ((transformer_conv, "stacked", _one_by_one), (_whole, "transformer", lambda *_: None))

Bench(
    name="ablation_projection",
    sweep=[
        {"graph": _GRAPHS, "shape": ((1, 64), (4, 32)), "dtype": (torch.float16,), "mode": _MODES},
    ],
    problem=_layer_problem,
    providers={
        "graphfuse": functools.partial(_layer, Variant()),
        "four products": functools.partial(_layer, Variant(_FOUR_PRODUCTS)),
    },
)
