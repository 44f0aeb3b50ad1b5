"""Every form of a graph that PyG takes, through every layer: PyG's numbers, and fused or with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

import graphfuse.nn
from graphfuse import RowWindows
from graphfuse.nn._dispatch import path_taken

WIDTH, EDGE_DIM = 4, 3
LAYERS: dict[str, tuple[Any, ...]] = {
    "GCNConv": (WIDTH, 3),
    "GATConv": (WIDTH, 3, 2),
    "GATv2Conv": (WIDTH, 3, 2),
    "AGNNConv": (),
    "TransformerConv": (WIDTH, 3, 2),
}
# Eight nodes, in no order; one edge is repeated, two are self-loops, and node 7 has no edge.
EDGES = torch.tensor([[3, 0, 6, 6, 2, 1, 4, 0, 5, 3, 2, 6], [1, 5, 0, 0, 2, 4, 0, 1, 6, 3, 5, 4]])
NUM_NODES = 8
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "coo": to_torch_coo_tensor,
    "csr": to_torch_csr_tensor,
    "csc": to_torch_csc_tensor,
}


def pair(name: str, device: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Our layer and PyG's, with equal parameters, none of them 0; AGNNConv takes no arguments."""
    arguments = () if name == "AGNNConv" else arguments or LAYERS[name]
    ours, theirs = (
        getattr(package, name)(*arguments, **options).to(device) for package in (graphfuse.nn, pyg)
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    return [ours, theirs]


def results(layer: Any, x: Any, graph: Any, **values: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of features, of values of the edges, and of parameters."""
    features = [x] if isinstance(x, Tensor) else list(x)
    wanted = [one.requires_grad_() for one in [*features, *values.values()]] + list(layer.parameters())
    out = layer(x, graph, **values)
    loss = (out * torch.linspace(-1, 2, out.numel(), device=out.device).view_as(out)).sum()
    return out.detach(), *torch.autograd.grad(loss, wanted, materialize_grads=True)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Up to the rounding of sums in another order; terms may cancel, so the largest number is the measure."""
    for one, other in zip(found, wanted, strict=True):
        largest = max([1.0, *other.detach().abs().flatten().tolist()])
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * largest)


def same(
    layers: list[Any], x: Any, graph: Any, given: Any = None, backward: bool = False, **values: Tensor
) -> None:
    """Our layer runs fused on ``graph`` and agrees with PyG's on it, or on what it is ``given`` instead."""
    run = results if backward else lambda layer, *inputs, **values: (layer(*inputs, **values),)
    ours, theirs = layers
    found = run(ours, x, graph, **values)
    assert path_taken(ours) == []
    close(found, run(theirs, x, graph if given is None else given, **values))


@pytest.mark.parametrize("name", LAYERS)
def test_int32(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # without loops PyG's scatter takes no int32, if rows are 16 wide
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    options |= {"normalize": False} if name == "GCNConv" else {}
    layers = pair(name, device, 16, 16, **options)
    x, edge_index = torch.randn(NUM_NODES, 16, device=device), EDGES.to(device)
    same(layers, x, edge_index.int(), given=edge_index)
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    torch.testing.assert_close(layers[0](x, edge_index.int()), layers[1](x, edge_index))
    assert path_taken(layers[0]) == ["GRAPHFUSE_DISABLE=1 is set"]


@pytest.mark.parametrize(
    ("name", "sort"),
    [
        ("GCNConv", "col"),
        ("GATConv", "row"),
        ("GATv2Conv", "col"),
        ("AGNNConv", "not sorted"),
        ("TransformerConv", "not sorted"),
        ("TransformerConv", "row"),
        ("TransformerConv", "col"),
    ],
)
def test_edge_index_class(name: str, sort: str, device: torch.device) -> None:
    x, graph = torch.randn(NUM_NODES, WIDTH, device=device), EdgeIndex(EDGES.to(device))
    if sort != "not sorted":
        graph = graph.sort_by(sort).values
        graph.sparse_resize_(NUM_NODES, NUM_NODES)
        graph.fill_cache_()
    same(pair(name, device), x, graph)


@pytest.mark.parametrize(
    ("name", "form"),
    [("GCNConv", "int32"), ("GCNConv", "col"), ("GATConv", "strided"), ("TransformerConv", "row")],
)
def test_values_of_edges_stay_with_their_edges(name: str, form: str, device: torch.device) -> None:
    x, edge_index = torch.randn(NUM_NODES, WIDTH, device=device), EDGES.to(device)
    if name == "GCNConv":  # a node's loops must not repeat, as of several PyG's gradient reaches all
        layers, values = pair(name, device), {"edge_weight": torch.rand(EDGES.size(1), device=device)}
    else:
        layers = pair(name, device, edge_dim=EDGE_DIM)
        values = {"edge_attr": torch.randn(EDGES.size(1), EDGE_DIM, device=device)}
    graph: Tensor = edge_index.int()
    if form == "strided":
        graph = edge_index.t().contiguous().t()
        assert not graph.is_contiguous()
    elif form != "int32":
        graph, order = EdgeIndex(edge_index, sparse_size=(NUM_NODES, NUM_NODES)).sort_by(form)
        values = {key: value[order] for key, value in values.items()}
        edge_index = graph.as_tensor()
    same(layers, x, graph, given=edge_index, backward=True, **values)


@pytest.mark.parametrize(
    ("name", "form"), [("GATConv", "EdgeIndex"), ("GATv2Conv", "int32"), ("TransformerConv", "EdgeIndex")]
)
def test_two_sets_of_nodes(name: str, form: str, device: torch.device) -> None:
    edge_index = EDGES.to(device)
    edge_index = edge_index[:, edge_index[1] < 5]
    x = torch.randn(NUM_NODES, WIDTH, device=device), torch.randn(5, WIDTH, device=device)
    graph = edge_index.int()
    if form == "EdgeIndex":
        graph = EdgeIndex(edge_index, sparse_size=(NUM_NODES, 5)).sort_by("col").values
    same(pair(name, device), x, graph, given=edge_index, backward=True)


def simple(device: Any) -> Tensor:
    """No edge twice: a sparse matrix would add them up."""
    return torch.unique(EDGES, dim=1).to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_matrices_take_pygs_path(name: str, layout: str, device: torch.device) -> None:
    x = torch.randn(NUM_NODES, WIDTH, device=device)
    adj_t = LAYOUTS[layout](simple(device).flip(0), size=NUM_NODES)
    layers = pair(name, device)
    reason = f"the graph is a torch.sparse_{layout} tensor; pass an edge_index tensor or RowWindows"
    assert graphfuse.why_not(layers[0], x, adj_t) == [reason]
    if layout == "csc":  # which PyG refuses, GCNConv in other words
        with pytest.raises((NotImplementedError, ValueError)) as wanted:
            layers[1](x, adj_t)
        with pytest.raises(type(wanted.value), match=f"^{re.escape(str(wanted.value))}$"):
            layers[0](x, adj_t)
    else:
        close(*(results(layer, x, adj_t) for layer in layers))
    assert path_taken(layers[0]) == [reason]


@pytest.mark.parametrize(("name", "layout"), [*zip(LAYERS, [*LAYOUTS, *LAYOUTS], strict=False)])
def test_the_record_of_a_sparse_matrix_fuses(name: str, layout: str, device: torch.device) -> None:
    x, edge_index = torch.randn(NUM_NODES, WIDTH, device=device), simple(device)
    windows = RowWindows.from_edge_index(LAYOUTS[layout](edge_index.flip(0), size=NUM_NODES))
    same(pair(name, device), x, windows, given=edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_sparse_tensor_if_installed(name: str, device: torch.device) -> None:
    torch_sparse = pytest.importorskip("torch_sparse", reason="SparseTensor is of torch-sparse")
    x, edge_index = torch.randn(NUM_NODES, WIDTH, device=device), simple(device)
    adj_t = torch_sparse.SparseTensor.from_edge_index(edge_index.flip(0), sparse_sizes=(NUM_NODES,) * 2)
    layers = pair(name, device)
    close(*(results(layer, x, adj_t) for layer in layers))
    reason = "the graph is a SparseTensor; pass an edge_index tensor or RowWindows"
    assert path_taken(layers[0]) == [reason]
    same(pair(name, device), x, RowWindows.from_edge_index(adj_t), given=edge_index)


@pytest.mark.parametrize("written", ["the wrapper", "what it wraps", "what it was made of", "a row of it"])
def test_an_edited_edge_index_is_cut_anew(written: str, device: torch.device) -> None:
    # a wrapper counts the writes made through it, and what it wraps only those made below
    x, made_of = torch.randn(NUM_NODES, WIDTH, device=device), EDGES.to(device).clone()
    graph = EdgeIndex(made_of, sparse_size=(NUM_NODES, NUM_NODES))
    layers = pair("TransformerConv", device)
    before = layers[0](x, graph)
    target: Any = {"the wrapper": graph, "what it wraps": graph.as_tensor(), "what it was made of": made_of}
    if written == "a row of it":
        graph[1][:5] = 7
    else:
        target[written][1, :5] = 7
    assert made_of[1, :5].eq(7).all()
    assert not torch.equal(layers[0](x, graph), before)
    same(layers, x, graph, given=made_of)


def test_a_compiled_layer_sees_an_edited_edge_index(device: torch.device) -> None:
    x = torch.randn(NUM_NODES, WIDTH, device=device)
    graph = EdgeIndex(EDGES.to(device).clone(), sparse_size=(NUM_NODES, NUM_NODES))
    ours, theirs = pair("GCNConv", device)
    compiled = torch.compile(ours, backend="eager")
    compiled(x, graph)
    graph[1, :5] = 7
    close((compiled(x, graph),), (theirs(x, graph),))
