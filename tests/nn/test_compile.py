"""Layers under torch.compile and torch.export: no graph break, fused, and right for every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from graphfuse import RowWindows, nn, ops
from tests.nn._gat import few_edges

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice
WIDTH = 8
LAYERS: dict[str, tuple[Any, tuple[str, ...]]] = {  # a layer, and which fused ops it runs
    "gcn": (lambda: nn.GCNConv(WIDTH, 4), ("spmm",)),
    "gcn_weighted": (lambda: nn.GCNConv(WIDTH, 4), ("spmm", "spmm")),
    "gat": (lambda: nn.GATConv(WIDTH, 4, heads=2), ("additive_attention",)),
    "gatv2": (lambda: nn.GATv2Conv(WIDTH, 4, heads=2), ("additive_attention",)),
    "gat_edges": (
        lambda: nn.GATConv(WIDTH, 4, edge_dim=3, add_self_loops=False),
        ("additive_attention",),
    ),
    "agnn": (lambda: nn.AGNNConv(), ("attention",)),
    "transformer": (lambda: nn.TransformerConv(WIDTH, 4, heads=2, beta=True), ("attention", "gated_skip")),
    "transformer_edges": (lambda: nn.TransformerConv(WIDTH, 4, edge_dim=3), ("attention",)),
    "block": (lambda: nn.GraphTransformerLayer(WIDTH, heads=2, norm="layer"), ("attention",)),
}
NAMES = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def start(name: str, device: torch.device) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    edge_index = few_edges(device)
    x = torch.randn(7, WIDTH, device=device)
    of_edges: dict[str, tuple[int, ...]] = {
        "weighted": (edge_index.size(1),),
        "edges": (edge_index.size(1), 3),
    }
    given = tuple(torch.rand(of_edges[kind], device=device) for kind in name.split("_")[1:])
    return LAYERS[name][0]().to(device), (x, edge_index, *given)


def results(layer: Any, arguments: tuple[Any, ...], parameters: Any) -> list[Tensor]:
    x = arguments[0].clone().requires_grad_()
    out = layer(x, *arguments[1:])
    return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters])]


def fused_ops(graph: torch.fx.Graph) -> tuple[str, ...]:
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    names = [target.split(".")[1] for target in targets if target.startswith("graphfuse.")]
    return tuple(name for name in names if name != "of_rows")


@pytest.mark.parametrize("dynamic", [False, True])
@NAMES
def test_no_break_and_the_fused_op_forward_and_backward(
    name: str, dynamic: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, arguments = start(name, device)
    seen: list[tuple[str, ...]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(fused_ops(module.graph))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")  # PyG's path would raise
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    parameters = list(layer.parameters())
    found, wanted = (results(one, arguments, parameters) for one in (compiled, layer))
    assert set(seen) == {LAYERS[name][1]}
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_inductor(device: torch.device) -> None:
    for name in ("gcn", "gat"):
        layer, arguments = start(name, device)
        compiled = torch.compile(layer, fullgraph=True)
        parameters = list(layer.parameters())
        found, wanted = (results(one, arguments, parameters) for one in (compiled, layer))
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@NAMES
def test_twenty_batches_compile_at_most_three_times(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, (x, edge_index, *given) = start(name, device)
    if device.type == "cpu":  # the interpreter has nothing to add: the ops run their definitions
        monkeypatch.setattr("graphfuse.ops._check.runs_kernel", lambda *_: False)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer.eval(), fullgraph=True, backend=counter)
    for batch in range(20):
        nodes = torch.arange(x.size(0) + batch, device=device)
        arguments = [
            torch.randn(len(nodes), WIDTH, device=device),
            torch.cat([edge_index, torch.stack([nodes, nodes.flip(0)])], 1),
            *(torch.cat([value, torch.rand(len(nodes), *value.shape[1:], device=device)]) for value in given),
        ]
        out = compiled(*arguments)
        if batch in (1, 19):
            torch.testing.assert_close(out, layer(*arguments))
    assert counter.frame_count <= 3  # one with fixed sizes, at most two more


def test_other_edges_of_the_same_shape(device: torch.device) -> None:
    """A compiled call never finds the record of edges that were there before."""
    layer, (x, edge_index) = start("gat", device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x, edge_index)
    other = (edge_index + 1) % 7
    torch.testing.assert_close(compiled(x, other), layer(x, other))
    edge_index.copy_(other)
    torch.testing.assert_close(compiled(x, edge_index), layer(x, other))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@NAMES
def test_inductors_cuda_graphs_replay_no_old_edges(name: str) -> None:
    """They would keep the record of the edges that they were made with: the ops are left out of them."""
    layer, (x, edge_index, *given) = start(name, torch.device("cuda"))
    compiled = torch.compile(layer.eval(), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for shift in range(5):
            other = (edge_index + shift) % 7
            found, wanted = (one(x, other, *given) for one in (compiled, layer))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gcn", "gat", "transformer"])
def test_a_record_in_place_of_the_edges(name: str, device: torch.device) -> None:
    layer, (x, edge_index) = start(name, device)
    windows = RowWindows.from_edge_index(edge_index, (7, 7))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = layer(x, windows)  # which also builds what this layer needs of it
    torch.testing.assert_close(compiled(x, windows), wanted)


@pytest.mark.parametrize("name", ["gcn", "gat", "transformer"])
def test_a_record_of_an_evaluation_is_trained_on(name: str, device: torch.device) -> None:
    layer, (x, edge_index) = start(name, device)
    parameters = list(layer.parameters())
    wanted = results(layer, (x, edge_index.clone()), parameters)
    with torch.inference_mode():
        windows = RowWindows.from_edge_index(edge_index, (7, 7))
        layer(x, windows)
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(results(run, (x, windows), parameters), wanted)


def test_two_sets_of_nodes_and_the_other_flow(device: torch.device) -> None:
    edge_index = few_edges(device)
    x = torch.randn(7, 4, device=device)
    pair = (x, torch.randn(6, 5, device=device))
    layer = nn.GATConv((4, 5), 3, heads=2).to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(pair, edge_index), layer(pair, edge_index))
    for cls in (nn.GCNConv, nn.TransformerConv):
        turned = cls(4, 3, flow="target_to_source").to(device)
        compiled = torch.compile(turned, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, edge_index), turned(x, edge_index))


def test_returned_weights(device: torch.device) -> None:
    layer, (x, edge_index) = start("transformer", device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, (_, alpha) = compiled(x, edge_index, return_attention_weights=True)
    wanted, (_, other) = layer(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close((out, alpha), (wanted, other))


def test_dropout_is_drawn_anew_in_each_call(device: torch.device) -> None:
    layer = nn.GATConv(WIDTH, 4, heads=2, dropout=0.5).to(device)
    _, arguments = start("gat", device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    first, second = compiled(*arguments), compiled(*arguments)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    found = compiled(*arguments)
    torch.manual_seed(3)
    torch.testing.assert_close(found, layer(*arguments))


def test_what_a_trace_leaves_behind(device: torch.device) -> None:
    """Neither a note on the layer nor, with ``cached=True``, a graph: eager calls go on as before."""
    layer, arguments = nn.GCNConv(WIDTH, 4, cached=True).to(device), start("gcn", device)[1]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = compiled(*arguments)
    assert "_not_fused" not in layer.__dict__ and layer._cached_edge_index is None
    torch.testing.assert_close(found, layer(*arguments))
    assert layer._cached_edge_index is not None
    torch.testing.assert_close(compiled(*arguments), found)


def test_reasons_hold_in_a_trace_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, arguments = start("gat", device)
    layer.explain = False
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    layer.add_self_loops = False  # PyG's own breaks the graph
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))
    assert fused_ops(counter.graphs[0].graph) == ()


@NAMES
def test_export_gives_one_node_for_each_op(name: str, device: torch.device) -> None:
    layer, arguments = start(name, device)
    program = torch.export.export(layer.eval(), arguments)
    assert fused_ops(program.graph) == LAYERS[name][1]
    torch.testing.assert_close(program.module()(*arguments), layer(*arguments))


def test_export_with_dynamic_shapes(device: torch.device) -> None:
    layer, (x, edge_index) = start("gat", device)
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    for strict in (False, True):
        shapes = ({0: nodes}, {1: edges})
        program = torch.export.export(layer, (x, edge_index), dynamic_shapes=shapes, strict=strict)
        more, other = torch.randn(9, WIDTH, device=device), torch.randint(9, (2, 30), device=device)
        torch.testing.assert_close(program.module()(more, other), layer(more, other))


@pytest.mark.parametrize(
    ("name", "products", "width"), [("gcn", 1, 4), ("agnn", 2, 8), ("gat", 1, 8), ("gatv2", 2, 8)]
)
def test_operations_are_counted(name: str, products: int, width: int, device: torch.device) -> None:
    """Two for each channel of each edge and self-loop, product by product; projections are PyTorch's."""
    layer, arguments = start(name, device)
    with FlopCounterMode(display=False) as counter:
        out = layer(*arguments)
        forward = counter.get_flop_counts()["Global"][getattr(torch.ops.graphfuse, LAYERS[name][1][0])]
        out.sum().backward()
    pairs = arguments[1].size(1) + 7
    assert forward == 2 * products * pairs * width
    counts = counter.get_flop_counts()["Global"]
    assert sum(count for op, count in counts.items() if str(op).startswith("graphfuse")) > forward


def test_operations_of_spmm_gemm_are_counted(device: torch.device) -> None:
    """Those of the dense product, whose narrower side is gathered, as well."""
    _, (x, edge_index) = start("gcn", device)
    windows = RowWindows.from_edge_index(edge_index, (7, 7))
    with FlopCounterMode(display=False) as counter:
        ops.spmm_gemm(windows, x, torch.randn(4, WIDTH, device=device))
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.graphfuse.spmm: 2 * 4 * (edge_index.size(1) + 7 * WIDTH)}
