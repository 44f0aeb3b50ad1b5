"""The least and the most: no nodes, one edge, 2^31 edges, wide rows, millions of programs, a star."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import k_hop_subgraph

from graphfuse import RowWindows, ops, reference
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, assert_close, check
from tests.reliability import EDGE_DIM, LAYERS, ON_GPU, PLAIN, WIDTH, larger_on_gpu, random_edges

SMALLEST = ("no_nodes", "one_node", "one_loop", "one_edge")
WIDTHS = (1, 7, 128, 602, 1433) if ON_GPU else (1, 33, 1433)  # of each, kernels are compiled
# AGNNConv takes up to 256 columns, and a head has as many at most: 1433 is prime
WIDE_CASES = [
    (name, width)
    for name in PLAIN
    for width in WIDTHS
    if (name != "AGNNConv" or width <= 256) and (name != "GraphTransformerLayer" or width < 1433)
]


def run(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, **values: Tensor) -> list[Tensor]:
    """Output, and gradients of all inputs and parameters, in the dtype of the layer."""
    dtype = next(layer.parameters()).dtype
    inputs = {name: one.detach().to(dtype).requires_grad_() for name, one in {"x": x, **values}.items()}
    out = layer(inputs["x"], edge_index, **{name: inputs[name] for name in values})
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view_as(out)
    leaves = [*inputs.values(), *layer.parameters()]
    grads = torch.autograd.grad(out, leaves, cotangent.to(dtype), materialize_grads=True)
    return [out.detach(), *grads]


def compare(name: str, x: Tensor, edge_index: Tensor, **changed: Any) -> None:
    """Our layer and its definition on the CPU, in float64; in the interpreter ours is in float64 too."""
    dtype = torch.float32 if ON_GPU else torch.float64
    theirs = LAYERS[name].definition(**changed).double().eval()
    ours = LAYERS[name].make(**changed).to(x.device, dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    values = LAYERS[name].values(edge_index.size(1), x.device, dtype)
    found = run(ours, x, edge_index, **values)
    wanted = run(theirs, x.cpu(), edge_index.cpu(), **{key: one.cpu() for key, one in values.items()})
    assert path_taken(ours) == [], path_taken(ours)
    tolerance = 1e-3 if ON_GPU else 1e-6
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("graph", SMALLEST)
@pytest.mark.parametrize("name", LAYERS)
def test_none_and_one(name: str, graph: str, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS[graph](device)
    compare(name, torch.randn(num_nodes, WIDTH, device=device), edge_index)


@pytest.mark.parametrize(("name", "width"), WIDE_CASES)
def test_widths_of_the_input(name: str, width: int, device: torch.device) -> None:
    num_nodes = 300 if ON_GPU else 5
    edge_index = random_edges(num_nodes, 4 * num_nodes, device)[:, : 4 * num_nodes]
    changed: dict[str, Any] = {"width": width}
    if name == "GraphTransformerLayer":
        changed |= {"heads": 14 if width == 602 else 1}
    compare(name, torch.randn(num_nodes, width, device=device), edge_index, **changed)


@larger_on_gpu
@pytest.mark.parametrize("name", LAYERS)
def test_two_to_the_31_edges_are_refused(name: str, device: torch.device) -> None:
    """By every layer, before anything is computed: they lie in two numbers of memory."""
    edge_index = torch.zeros(2, 1, dtype=torch.int64, device=device).expand(2, 2**31)
    layer, x = LAYERS[name].make().to(device), torch.randn(3, WIDTH, device=device)
    shape = (2**31,) if LAYERS[name].edges == "edge_weight" else (2**31, EDGE_DIM)
    given = {} if LAYERS[name].edges is None else {LAYERS[name].edges: x.new_zeros(1).expand(shape)}
    with pytest.raises(ValueError, match=r"`num_edges` must lie in \[0, 2147483647\].*split the graph"):
        layer(x, edge_index, **given)
    edges = random_edges(3, 4, device)
    assert layer(x, edges, **LAYERS[name].values(edges.size(1), device, x.dtype)).size(0) == 3


def check_last_edges(device: torch.device, heads: int, before: int, num_nodes: int) -> None:
    """Numbers of the last edges, which join nodes of their own, are read; their gradients are written."""
    last = 20
    own = random_edges(last, 100, device)
    few = own.size(1)
    edges = torch.cat([torch.randint(num_nodes, (2, before), device=device), own + num_nodes], 1)
    windows = RowWindows.from_edge_index(edges, (num_nodes + last, num_nodes + last))
    given = {name: torch.randn(last, heads, device=device) for name in ("a_src", "a_dst")}
    given |= {"x": torch.randn(last, heads, 1, device=device), "edge": torch.randn(few, heads, device=device)}
    given = {name: value.half().requires_grad_() for name, value in given.items()}

    def attend(a_src: Tensor, a_dst: Tensor, x: Tensor, edge: Tensor) -> Tensor:
        a_src, a_dst = (F.pad(one, (0, 0, num_nodes, 0)) for one in (a_src, a_dst))
        x, edge = F.pad(x, (0, 0, 0, 0, num_nodes, 0)), F.pad(edge, (0, 0, before, 0))
        out = ops.gat_attention(a_src, a_dst, x, windows, edge_score=edge)
        assert not out[:num_nodes].any()
        return out[num_nodes:]

    def alone(a_src: Tensor, a_dst: Tensor, x: Tensor, edge: Tensor) -> Tensor:
        return reference.gat_attention(own, a_src, a_dst, x, edge_score=edge)

    check(attend, alone, given)


def test_numbers_of_the_last_edges(device: torch.device) -> None:
    check_last_edges(device, 16, 40, 30)


@pytest.mark.gpu
@pytest.mark.usefixtures("tens_of_gib")
def test_numbers_of_edges_beyond_32_bits() -> None:
    """num_edges * heads > 2^31."""
    check_last_edges(torch.device("cuda"), 16, 2**27, 1_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
@pytest.mark.usefixtures("tens_of_gib")
def test_three_million_nodes_with_eight_heads(name: str, dtype: torch.dtype) -> None:
    """Millions of programs in the one dimension of a grid that has no limit of 65,535."""
    num_nodes, device = 3_000_000, torch.device("cuda")
    ours = LAYERS[name].make(64, 8, heads=8).to(device, dtype).eval()
    theirs = LAYERS[name].definition(64, 8, heads=8).to(device, dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    edge_index = torch.randint(num_nodes, (2, 6_000_000), device=device)
    x = torch.randn(num_nodes, 64, device=device).to(dtype).requires_grad_()
    out = ours(x, edge_index)
    assert path_taken(ours) == []
    out.float().square().sum().backward()
    assert bool(out.isfinite().all()) and x.grad is not None and bool(x.grad.isfinite().all())
    rows = torch.cat(
        [torch.arange(64, device=device), torch.arange(num_nodes - 64, num_nodes, device=device)]
    )
    nodes, edges, place, _ = k_hop_subgraph(
        rows, 1, edge_index, relabel_nodes=True, num_nodes=num_nodes, directed=True
    )
    with torch.no_grad():
        rounded = theirs(x[nodes], edges)[place]
        exact = theirs.double()(x[nodes].double(), edges)[place]
    assert_close("out", out[rows].detach(), rounded, exact, factor=4.0)  # of few rows, rounding is luck


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [pytest.param("spmm", marks=pytest.mark.alone), "sparse_attention", "gat_attention", "gatv2_attention"],
)
def test_a_star_costs_three_times_a_ring_at_most(name: str) -> None:
    """A million edges, all of one node, against one edge for every node; forward and backward together."""
    torch.use_deterministic_algorithms(False)  # which fills what is allocated
    num_nodes, device = 1_000_001, torch.device("cuda")
    leaves = torch.arange(1, num_nodes, device=device)
    star = torch.stack([leaves, torch.zeros_like(leaves)])
    ring = torch.stack([leaves - 1, leaves])
    times = {}
    for what, edge_index in (("ring", ring), ("star", star), ("star of senders", star.flip(0))):
        windows = RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes))
        times[what] = milliseconds(call(name, windows, device))
    assert times["star"] <= 3 * times["ring"] and times["star of senders"] <= 3 * times["ring"], times


def call(name: str, windows: RowWindows, device: torch.device) -> Callable[[], object]:
    """Forward and backward of an op in float16, 64 columns wide."""
    num_nodes = windows.shape[0]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).half().requires_grad_()

    heads = (num_nodes, 8, 8)
    op: Callable[..., Tensor] = getattr(ops, name)
    if name == "spmm":
        given, op = [draw(num_nodes, 64)], functools.partial(ops.spmm, windows)
    elif name == "sparse_attention":
        given = [draw(*heads) for _ in range(3)]
    elif name == "gat_attention":
        given = [draw(num_nodes, 8), draw(num_nodes, 8), draw(*heads)]
    else:
        given = [draw(*heads), draw(*heads), draw(8, 8)]
    cotangent = torch.ones(heads, device=device, dtype=torch.float16)
    if name == "spmm":
        return lambda: torch.autograd.grad(op(*given), given, cotangent.view(num_nodes, -1))
    return lambda: torch.autograd.grad(op(*given, windows=windows), given, cotangent)


def milliseconds(call: Callable[[], object]) -> float:
    """The quickest of 20 calls, as other processes may share the GPU."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
