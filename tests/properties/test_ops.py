"""Ops on random graphs: their definitions, and what holds whatever the numbers are.

The kernels compute float64 in the interpreter, so that an error of structure is no question of rounding; how
they round is asked of all examples together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from tests.properties import (
    HALF,
    PATHS,
    Graph,
    Numbers,
    Pool,
    assert_equal,
    assert_same_numbers,
    examples,
    generator_of,
    graphs,
    in_float64,
    on,
    permutation,
    seeds,
    walking,
    with_gradients,
)

COUNTS = {"kernels": 12, "definitions": 60}  # a kernel takes tens of milliseconds in the interpreter
OPS = ("spmm", "spmm_gemm", "sddmm", "sparse_attention", "gat_attention", "gatv2_attention")
both_paths = pytest.mark.parametrize("path", PATHS)


class Case(NamedTuple):
    """A call of an op: what is differentiated, and what says which numbers stand for what."""

    name: str
    graph: Graph
    inputs: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, graph: Graph | None = None, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        graph = self.graph if graph is None else graph
        windows = RowWindows.from_edge_index(graph.edge_index, graph.size)
        op = functools.partial(getattr(ops, self.name), windows=windows, **self.options)
        return with_gradients(op, self.inputs if inputs is None else inputs)

    def define(self, double: bool = False) -> dict[str, Tensor]:
        options = self.options | ({"num_dst": self.graph.num_dst} if self.name.startswith("spmm") else {})
        definition = functools.partial(getattr(reference, self.name), self.graph.edge_index, **options)
        inputs = self.inputs
        if double:
            inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
        return with_gradients(definition, inputs)


def of_edges(name: str) -> bool:
    return name in ("edge", "edge_weight", "edge_attr", "edge_score")


@st.composite
def cases(
    draw: st.DrawFn,
    names: tuple[str, ...] = OPS,
    dtype: torch.dtype = torch.float64,
    edges: bool | None = None,
    distinct: bool = False,
) -> Case:
    """Any op with any of its options; ``edges`` says whether edges bring numbers."""
    name, graph = draw(st.sampled_from(names)), draw(graphs())
    # GAT's windows read the numbers of source 0, so there has to be one
    assume(graph.num_src > 0 or name != "gat_attention" or dtype not in HALF)
    graph = graph.distinct() if distinct else graph
    numbers = Numbers(draw(seeds), dtype, draw(st.booleans()))
    flag = functools.partial(draw, st.booleans())
    with_edges = flag() if edges is None else edges
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_src, num_dst, num_edges = graph.num_src, graph.num_dst, graph.num_edges
    inputs: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    if name.startswith("spmm"):
        out_dim = draw(st.integers(1, 9)) if name == "spmm_gemm" else dim
        inputs["x"] = numbers(num_src, dim)
        if name == "spmm_gemm":
            inputs["weight"] = numbers(out_dim, dim)
        inputs |= {"edge_weight": numbers(num_edges)} if with_edges else {}
        inputs |= {"loop_weight": numbers(num_dst)} if flag() else {}
        inputs |= {"bias": numbers(out_dim)} if flag() else {}
        options["activation"] = draw(st.sampled_from([None, "relu"]))
        if flag():
            options |= {"row_scale": numbers(num_dst).detach(), "col_scale": numbers(num_src).detach()}
    elif name == "sddmm":
        inputs |= {"a": numbers(num_dst, dim), "b": numbers(num_src, dim)}
        options["without_loops"] = flag()
    elif name == "sparse_attention":
        inputs |= {"q": numbers(num_dst, heads, dim)}
        inputs |= {key: numbers(num_src, heads, dim) for key in "kv"}
        # the interpreter, not a GPU, gets the negative of a bfloat16 wrong
        options["scale"] = draw(st.sampled_from([None, 0.5 if dtype == torch.bfloat16 else -1.5]))
        if with_edges:
            width = draw(st.integers(1, 3))
            inputs |= {"edge_query": numbers(num_dst, heads, width), "edge_attr": numbers(num_edges, width)}
        elif num_dst == num_src:
            options["self_loops"] = flag()
    else:
        v2, loops = name == "gatv2_attention", flag()
        if v2:
            inputs |= {"x_src": numbers(num_src, heads, dim), "x_dst": numbers(num_dst, heads, dim)}
            inputs["att"] = numbers(heads, dim)
        else:
            inputs |= {"a_src": numbers(num_src, heads), "a_dst": numbers(num_dst, heads)}
            inputs["x"] = numbers(num_src, heads, dim)
        options |= {"self_loops": loops, "negative_slope": draw(st.sampled_from([0.2, 0.0, 1.5]))}
        width = (heads, dim) if v2 else (heads,)
        if with_edges:
            inputs["edge" if v2 else "edge_score"] = numbers(num_edges, *width)
            if loops:
                inputs["loop_edge" if v2 else "loop_score"] = numbers(min(num_dst, num_src), *width)
    return Case(name, graph, inputs, options)


def run_examples(path: str, check: Callable[..., None], count: float = 1.0, **strategies: Any) -> None:
    """``check`` on as many examples as ``path`` has time for."""
    examples(max(2, int(count * COUNTS[path])))(given(**strategies)(check))()


@in_float64
@pytest.mark.parametrize("name", OPS)
@both_paths
def test_an_op_is_its_definition(path: str, name: str) -> None:
    def check(case: Case, rows: bool, slices: bool) -> None:
        with on(path, slices), walking(rows):
            assert_same_numbers(case.run(), case.define())

    flags = {"rows": st.booleans(), "slices": st.booleans()}
    run_examples(path, check, 0.7, case=cases((name,)), **flags)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rounding_of_all_examples_together(dtype: torch.dtype) -> None:
    pools = {name: Pool() for name in OPS}

    def check(case: Case, rows: bool) -> None:
        with walking(rows):
            pools[case.name].add(case.run(), case.define(), case.define(double=True))

    run_examples("kernels", check, 1.5, case=cases(dtype=dtype), rows=st.booleans())
    for pool in pools.values():
        pool.check()


@both_paths
def test_another_order_of_edges_gives_the_same_bits(path: str) -> None:
    # numbers of edges move with them; which copy of an edge has which is a matter of order, so each is once
    def check(case: Case, seed: int, rows: bool) -> None:
        order = permutation(case.graph.num_edges, seed)
        moved = {
            name: tensor.detach()[order].requires_grad_() if of_edges(name) else tensor
            for name, tensor in case.inputs.items()
        }
        with on(path), walking(rows):
            ours, theirs = case.run(), case.run(case.graph.in_order(order), moved)
        theirs = {
            name: torch.empty_like(one).index_copy_(0, order, one) if of_edges(name[1:]) else one
            for name, one in theirs.items()
        }
        assert_equal(ours, theirs)

    names = tuple(name for name in OPS if name != "sddmm")  # whose cotangents are of edges
    for dtype in (torch.float32, torch.bfloat16):
        for distinct in (True, False):
            drawn = cases(names, dtype, None if distinct else False, distinct)
            run_examples(path, check, 0.3, case=drawn, seed=seeds, rows=st.booleans())


@in_float64
@both_paths
def test_nodes_may_be_renamed(path: str) -> None:
    def check(case: Case, seed: int) -> None:
        graph = case.graph
        tied = {"self_loops", "without_loops"} & {name for name, on in case.options.items() if on is True}
        tied |= {"loop_weight"} & case.inputs.keys()
        assume(graph.num_dst == graph.num_src or not tied)  # a loop has two ends of one number
        to_src = permutation(graph.num_src, seed)
        square = graph.num_dst == graph.num_src
        to_dst = to_src if square else permutation(graph.num_dst, seed + 1)
        renamed = graph._replace(
            edge_index=torch.stack([to_src[graph.edge_index[0]], to_dst[graph.edge_index[1]]])
        )

        def moves(name: str) -> Tensor | None:
            if name in ("q", "a", "a_dst", "x_dst", "edge_query", "loop_weight", "row_scale", "out0", "out1"):
                return None if name == "out0" and case.name == "sddmm" else to_dst
            if name in ("x", "k", "v", "b", "a_src", "x_src", "loop_score", "loop_edge", "col_scale"):
                return to_src
            return None

        def move(tensors: dict[str, Tensor], skip: int = 0) -> dict[str, Tensor]:
            found = {}
            for name, tensor in tensors.items():
                to = moves(name if name.startswith("out") else name[skip:])
                found[name] = tensor if to is None else torch.empty_like(tensor).index_copy_(0, to, tensor)
            return found

        options = {
            name: move({name: value})[name] if isinstance(value, Tensor) else value
            for name, value in case.options.items()
        }
        inputs = {name: tensor.detach() for name, tensor in case.inputs.items()}
        moved = {name: tensor.requires_grad_() for name, tensor in move(inputs).items()}
        windows = [RowWindows.from_edge_index(one.edge_index, one.size) for one in (graph, renamed)]
        op = getattr(ops, case.name)

        def weighed(
            windows: RowWindows, weights: list[Tensor], given: dict[str, Any], **tensors: Tensor
        ) -> Any:
            results = op(windows=windows, **given, **tensors)
            results = results if isinstance(results, tuple) else (results,)
            total = sum((one * weight).sum() for one, weight in zip(results, weights, strict=True))
            grads = torch.autograd.grad(total, list(tensors.values()), materialize_grads=True)
            found = {f"out{place}": one.detach() for place, one in enumerate(results)}
            return found | {f"d{name}": grad for name, grad in zip(tensors, grads, strict=True)}

        with on(path):
            shapes = [r.shape for key, r in case.run().items() if key.startswith("out")]
            weights = [torch.randn(s, dtype=torch.float64, generator=generator_of(seed)) for s in shapes]
            carried = move({f"out{place}": weight for place, weight in enumerate(weights)})
            ours = weighed(windows[0], weights, case.options, **case.inputs)
            theirs = weighed(windows[1], list(carried.values()), options, **moved)
        assert_same_numbers(move(ours, skip=1), theirs)

    run_examples(path, check, 1.5, case=cases(), seed=seeds)


@in_float64
@both_paths
def test_spmm_is_linear_and_its_transpose_its_adjoint(path: str) -> None:
    def check(graph: Graph, dim: int, seed: int, weighted: bool) -> None:
        numbers = Numbers(seed)
        x, other, y = numbers(graph.num_src, dim), numbers(graph.num_src, dim), numbers(graph.num_dst, dim)
        windows = RowWindows.from_edge_index(graph.edge_index, graph.size)
        weight = numbers(graph.num_edges).detach() if weighted else None
        apply = functools.partial(ops.spmm, windows, edge_weight=weight)
        with on(path), torch.no_grad():
            sum_of, of_sum = 2 * apply(x) - 3 * apply(other), apply(2 * x - 3 * other)
            assert_same_numbers({"sum": of_sum}, {"sum": sum_of})
            back = apply(y, transpose=True)
            assert_same_numbers({"adjoint": (apply(x) * y).sum()}, {"adjoint": (x * back).sum()})
        with on(path):
            (grad,) = torch.autograd.grad(apply(x), x, y.detach())
        assert_equal({"grad": grad}, {"grad": back})  # the same walk
        if weight is None:
            assert_same_numbers({"dense": apply(x.detach())}, {"dense": graph.dense().double() @ x.detach()})

    drawn = {"graph": graphs(), "dim": st.integers(1, 9), "seed": seeds, "weighted": st.booleans()}
    run_examples(path, check, **drawn)


@in_float64
@pytest.mark.parametrize("name", ["attention_weights", "gat_attention_weights", "gatv2_attention_weights"])
@both_paths
def test_weights_of_a_receiver_sum_to_one(path: str, name: str) -> None:
    attention = {"attention_weights": "sparse_attention"}.get(name, name.removesuffix("_weights"))

    def check(case: Case, size: float) -> None:
        windows = RowWindows.from_edge_index(case.graph.edge_index, case.graph.size)
        options = dict(case.options)
        inputs = {key: tensor.detach() * size for key, tensor in case.inputs.items()}
        values = inputs.get("v", inputs.get("x", inputs.get("x_src")))
        inputs = {key: one for key, one in inputs.items() if name != "attention_weights" or key in "qk"}
        with on(path):
            if name == "attention_weights":
                edges, alpha = (
                    case.graph.edge_index,
                    ops.attention_weights(**inputs, windows=windows, **options),
                )
            else:
                mine = {key: one for key, one in inputs.items() if name.startswith("gatv2") or key != "x"}
                edges, alpha = getattr(ops, name)(**mine, windows=windows, **options)
            inputs |= {"v": values} if name == "attention_weights" else {}
            out = getattr(ops, attention)(**inputs, windows=windows, **options)
        assert alpha.shape == (edges.size(1), values.size(1)) and bool((alpha >= 0).all())
        rows = alpha.new_zeros(case.graph.num_dst, alpha.size(1)).index_add_(0, edges[1], alpha)
        wanted = torch.zeros_like(rows).index_fill_(0, edges[1], 1.0)
        assert_same_numbers({"sums": rows}, {"sums": wanted})
        message = alpha[:, :, None] * values[edges[0]]
        assert_same_numbers({"out": out}, {"out": torch.zeros_like(out).index_add_(0, edges[1], message)})

    drawn = cases((attention,), edges=False if attention == "sparse_attention" else None)
    if name == "attention_weights":
        drawn = drawn.filter(lambda case: not case.options.pop("self_loops", False))
    run_examples(path, check, 0.5, case=drawn, size=st.sampled_from([1.0, 30.0]))
