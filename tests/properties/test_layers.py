"""Layers with random options on random graphs: PyG's, and what holds whatever the numbers are."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphfuse
from graphfuse.nn._dispatch import path_taken
from tests.properties import (
    DEVICE,
    Graph,
    Numbers,
    Pool,
    assert_equal,
    assert_same_numbers,
    examples,
    graphs,
    in_float64,
    permutation,
    seeds,
    walking,
    with_gradients,
)

NAMES = ("GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "TransformerConv")


class Case(NamedTuple):
    """PyG's layer with the numbers that go in; values of edges are a keyword of forward."""

    theirs: pyg.MessagePassing
    graph: Graph
    nodes: tuple[Tensor, ...]  # of one set of nodes, or of sources and receivers
    edges: dict[str, Tensor]

    def run(
        self, layer: torch.nn.Module, graph: Graph | None = None, edges: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        graph, edges = graph or self.graph, self.edges if edges is None else edges
        dtype = next(iter(layer.state_dict().values())).dtype
        tensors = {f"x{place}": one for place, one in enumerate(self.nodes)} | edges
        tensors = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
        tensors |= dict(layer.named_parameters())
        more = {"size": graph.size} if len(self.nodes) == 2 and hasattr(layer, "lin_src") else {}

        def forward(**given: Tensor) -> Tensor:
            x = tuple(given[f"x{place}"] for place in range(len(self.nodes)))
            values = {name: given[name] for name in edges}
            return layer(x if len(x) == 2 else x[0], graph.edge_index, **values, **more)

        return with_gradients(forward, tensors)


def ours_of(theirs: torch.nn.Module) -> torch.nn.Module:
    return graphfuse.convert(copy.deepcopy(theirs)).model


@st.composite
def cases(
    draw: st.DrawFn,
    names: tuple[str, ...] = NAMES,
    dtype: torch.dtype = torch.float64,
    edges: bool | None = None,
    distinct: bool = False,
) -> Case:
    """Any of PyG's five layers with any options that fuse."""
    name = draw(st.sampled_from(names))

    def flag() -> bool:
        return draw(st.booleans())

    with_edges = flag() if edges is None else edges
    pair = name not in ("GCNConv", "AGNNConv") and flag()
    graph = draw(graphs(square=not pair).filter(lambda graph: min(graph.size) > 0))
    # of a node's weighted loops the last counts, and PyTorch gives the others, which it overwrote, a gradient
    graph = graph.distinct() if distinct or (with_edges and name == "GCNConv") else graph
    width, out, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    options: dict[str, Any] = {} if name == "AGNNConv" else {"bias": flag()}
    if not pair:
        options["flow"] = draw(st.sampled_from(["source_to_target", "target_to_source"]))
    if name == "GCNConv":
        normalize = flag()
        options |= {"normalize": normalize, "improved": flag(), "add_self_loops": normalize and flag()}
    elif name == "AGNNConv":
        options |= {"requires_grad": flag(), "add_self_loops": flag()}
    else:
        options |= {"heads": heads, "concat": flag(), "edge_dim": 2 if with_edges else None}
        if name == "TransformerConv":
            options |= {"root_weight": flag(), "beta": flag()}
        else:
            options |= {"add_self_loops": flag(), "residual": flag()}
            options["negative_slope"] = draw(st.sampled_from([0.2, 0.0]))
            # PyG's sums of the features of loops fail with more receivers than sources
            names_of_sums = [] if graph.num_dst > graph.num_src else ["mean", "add"]
            options["fill_value"] = draw(st.sampled_from([0.5, *names_of_sums]))
    seed = draw(seeds)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels = {"AGNNConv": ()}.get(name, ((width, width + 1) if pair else width, out))
        theirs = getattr(pyg, name)(*channels, **options).to(dtype)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter, -1.0, 1.0)
        theirs = theirs.to(DEVICE)
    numbers = Numbers(seed, dtype, flag())
    nodes = (numbers(graph.num_src, width),)
    nodes += (numbers(graph.num_dst, width + 1),) if pair else ()
    values: dict[str, Tensor] = {}
    if with_edges and name == "GCNConv":
        values["edge_weight"] = numbers(graph.num_edges).detach().abs() + 0.1
    elif with_edges and name != "AGNNConv":
        values["edge_attr"] = numbers(graph.num_edges, 2)
    return Case(theirs, graph, nodes, values)


@in_float64
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_pygs(name: str) -> None:
    @examples(8)
    @given(case=cases((name,)), rows=st.booleans())
    def check(case: Case, rows: bool) -> None:
        ours = ours_of(case.theirs)
        with walking(rows):
            assert_same_numbers(case.run(ours), case.run(case.theirs))
        assert path_taken(ours) == [], path_taken(ours)

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rounding_of_all_examples_together(dtype: torch.dtype) -> None:
    pools = {name: Pool() for name in NAMES}

    @examples(30)
    @given(case=cases(dtype=dtype))
    def check(case: Case) -> None:
        ours, exact = ours_of(case.theirs), copy.deepcopy(case.theirs).double()
        found = [case.run(layer) for layer in (ours, case.theirs, exact)]
        assert path_taken(ours) == [], path_taken(ours)
        pools[type(case.theirs).__name__].add(*found)

    check()
    for pool in pools.values():
        pool.check()


def test_another_order_of_edges_gives_the_same_bits() -> None:
    def check(case: Case, seed: int, rows: bool) -> None:
        ours, order = ours_of(case.theirs), permutation(case.graph.num_edges, seed)
        # PyTorch rounds a row of a product by its place among the others: here nothing has to be rounded
        maps = [weight for name, weight in ours.named_parameters() if "lin_edge" in name]
        for exact in [*maps, case.edges["edge_attr"]] if maps else []:
            exact.detach().mul_(8).round_().div_(8)
        moved = {name: tensor.detach()[order] for name, tensor in case.edges.items()}
        with walking(rows):
            here, there = case.run(ours), case.run(ours, case.graph.in_order(order), moved)
        assert path_taken(ours) == [], path_taken(ours)
        for name in case.edges:
            there[f"d{name}"] = torch.empty_like(there[f"d{name}"]).index_copy_(0, order, there[f"d{name}"])
        # gradients of the map of their features are products, or sums over all edges in their order
        of_map = {name for name in here if "lin_edge" in name or name in ("datt_edge", "dedge_attr")}
        assert_equal(*({name: one[name] for name in one if name not in of_map} for one in (here, there)))

    for distinct in (True, False):
        drawn = cases(dtype=torch.float32, edges=None if distinct else False, distinct=distinct)
        examples(8)(given(case=drawn, seed=seeds, rows=st.booleans())(check))()


@in_float64
@examples(12)
@given(case=cases(), seed=seeds)
def test_nodes_may_be_renamed(case: Case, seed: int) -> None:
    ours, graph = ours_of(case.theirs), case.graph
    to_src = permutation(graph.num_src, seed)
    # loops tie a receiver to the source of its number
    to_dst = to_src if len(case.nodes) == 1 else torch.arange(graph.num_dst)
    if len(case.nodes) == 2:
        to_src = torch.arange(graph.num_src)
        shared = min(graph.size)
        to_src[:shared] = to_dst[:shared] = permutation(shared, seed)
    edge_index = torch.stack([to_src[graph.edge_index[0]], to_dst[graph.edge_index[1]]])
    nodes = tuple(
        torch.empty_like(one).index_copy_(0, to, one.detach())
        for one, to in zip(case.nodes, (to_src, to_dst), strict=False)
    )
    renamed = case._replace(graph=graph._replace(edge_index=edge_index), nodes=nodes)
    out, moved = case.run(ours)["out0"], renamed.run(ours)["out0"]
    assert_same_numbers({"out": torch.empty_like(out).index_copy_(0, to_dst, out)}, {"out": moved})


class Net(torch.nn.Module):
    """Layers under names of their own, one of them twice."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([*layers, layers[0]])
        self.norm = torch.nn.LayerNorm(3)


def state_of(model: torch.nn.Module) -> list[Any]:
    kept = []
    for name, module in model.named_modules(remove_duplicate=False):
        kept.append((name, type(module), id(module), sorted(module.__dict__)))
    return kept


@in_float64
@examples(15)
@given(drawn=st.lists(cases(), min_size=1, max_size=2), data=st.data())
def test_convert_and_back_changes_nothing(drawn: list[Case], data: st.DataObject) -> None:
    model = Net([case.theirs for case in drawn])
    before, state = state_of(model), {key: one.clone() for key, one in model.state_dict().items()}
    outs = [case.run(case.theirs) for case in drawn]
    chosen = data.draw(st.sets(st.sampled_from([f"layers.{place}" for place in range(len(drawn))])))
    converted, report = graphfuse.convert(model, lambda module, name: name in chosen)
    assert converted is model and set(report.swapped) == chosen
    for place, case in enumerate(drawn):
        swapped = type(case.theirs).__module__.startswith("graphfuse.nn")
        assert swapped == (f"layers.{place}" in chosen)
    assert_equal(dict(model.state_dict()), state)
    for case, out in zip(drawn, outs, strict=True):  # which leaves notes on the layers
        assert_same_numbers(case.run(case.theirs), out)
    assert graphfuse.revert(model) is model
    assert state_of(model) == before
    assert_equal(dict(model.state_dict()), state)
    for case, out in zip(drawn, outs, strict=True):
        assert_equal(case.run(case.theirs), out)
