"""The ops as torch.library sees them: schema, fake kernels, autograd, export, compile, dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphfuse import RowWindows, ops, reference
from graphfuse.formats.walk import walks
from graphfuse.testing import GRAPHS
from tests.ops.test_spmm import build, draw


def arguments(graph: str, device: torch.device, with_weight: bool) -> tuple[Any, ...]:
    windows, _, num_src, num_dst = build(graph, device)
    given = draw(device, torch.float32, x=(num_src, 4), weight=(3, 4), bias=(3 if with_weight else 4,))
    weight = given["weight"] if with_weight else None
    packed = (windows.packed_windows, None, False, num_dst, num_src)
    return *packed, None, None, False, False, torch.float32, given["x"], None, None, weight, given["bias"]


@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("graph", ["no_edges", "one_edge", "bipartite_tall"])
def test_opcheck_spmm(graph: str, with_weight: bool, device: torch.device) -> None:
    torch.library.opcheck(torch.ops.graphfuse.spmm, arguments(graph, device, with_weight))


def test_opcheck_sddmm(device: torch.device) -> None:
    windows, _, num_src, num_dst = build("bipartite_tall", device)
    given = draw(device, torch.float32, a=(num_dst, 3), b=(num_src, 3))
    packed = (windows.packed_rows, windows.packed_row_edges, False, num_dst, num_src)
    torch.library.opcheck(torch.ops.graphfuse.sddmm, (*packed, windows.num_edges, *given.values(), True))


def test_the_registered_op_gives_the_same_bits_as_the_direct_call(device: torch.device) -> None:
    windows, _, num_src, _ = build("ragged", device)
    given = draw(device, torch.float32, x=(num_src, 4), bias=(4,))

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def run() -> list[Tensor]:
        y = ops.spmm(windows, given["x"], bias=given["bias"])
        return [y, *torch.autograd.grad(y.square().sum(), list(given.values()))]

    direct = run()
    with Watch() as watch:
        registered = run()
    assert watch.seen.count("graphfuse.spmm.default") == 2  # forward and backward
    assert all(map(torch.equal, direct[:2], registered[:2]))
    torch.testing.assert_close(direct[2], registered[2])  # summed up by PyTorch, as somebody watches


def test_a_registered_op_finds_what_was_prepared(device: torch.device) -> None:
    windows, _, _, _ = build("bipartite_tall", device)
    for packed, rows in ((windows.packed_windows, False), (windows.packed_rows, True)):
        direct = windows.walks(rows, with_edges=False)
        assert walks(packed, None, False).forward is direct.forward
        assert walks(packed, None, True).forward is windows.transpose().walks(rows, True).forward


def test_compile_has_no_graph_break(device: torch.device) -> None:
    windows, _, num_src, _ = build("ragged", device)
    edges = windows.num_edges  # which are weighted in a walk of rows, built on first use
    given = draw(device, torch.float32, x=(num_src, 4), weight=(3, 4), edge_weight=(edges,))

    def loss(x: Tensor, weight: Tensor, edge_weight: Tensor) -> Tensor:
        return (
            ops.spmm_gemm(windows, x * 2, weight, edge_weight=edge_weight, activation="relu").square().sum()
        )

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"would be built during tracing by torch\.compile"):
        compiled(*given.values())
    wanted = torch.autograd.grad(loss(*given.values()), list(given.values()))
    torch.compiler.reset()
    found = torch.autograd.grad(compiled(*given.values()), list(given.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # eager sums the weight's gradient in slices


def test_export_gives_one_node(device: torch.device) -> None:
    windows, _, num_src, _ = build("ragged", device)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.spmm(windows, x)

    x = torch.ones(num_src, 2, device=device)
    Layer()(x)  # builds what this width needs
    program = torch.export.export(Layer(), (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("graphfuse.spmm.default") == 1


def test_vmap_and_jacobian_say_what_is_missing_or_work(device: torch.device) -> None:
    edge_index, size = GRAPHS["one_edge"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    x = torch.randn(3, 2, device=device)
    jacobian = torch.autograd.functional.jacobian(lambda x: ops.spmm(windows, x), x)
    wanted = torch.autograd.functional.jacobian(lambda x: reference.spmm(edge_index, x), x)
    torch.testing.assert_close(jacobian, wanted)


CALLS: dict[str, Callable[[RowWindows, Tensor], Tensor]] = {
    "spmm": lambda windows, x: ops.spmm(windows, x.flatten(1)),
    "attention": lambda windows, x: ops.sparse_attention(
        x, x, x, windows, dropout=0.5, seed=SEED.to(x.device)
    ),
    "gat": lambda windows, x: ops.gat_attention(x[:, :, 0], x[:, :, 1], x, windows, self_loops=True),
    "gatv2": lambda windows, x: ops.gatv2_attention(x, x, x[0], windows),
}
SEED = torch.tensor([7])


@pytest.mark.parametrize("op", CALLS)
def test_without_gradients_the_bits_are_the_same(op: str, device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["self_loops"](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.randn(num_src, 2, 4, device=device, requires_grad=True)
    wanted = CALLS[op](windows, x)
    with torch.no_grad():
        found = CALLS[op](windows, x)
    assert wanted.requires_grad and not found.requires_grad
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_dual_tensor_is_refused(op: str, grad: bool, device: torch.device) -> None:
    """Without gradients too, where the call would be simpler and the tangent lost."""
    edge_index, (num_src, num_dst) = GRAPHS["self_loops"](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    x = torch.randn(num_src, 2, 4, device=device)
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            CALLS[op](windows, dual)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # one gradient of the batch at a time
def test_batched_gradients(device: torch.device) -> None:
    edge_index, size = GRAPHS["one_edge"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    x, weight = torch.randn(3, 2, device=device), torch.randn(2, 2, device=device)
    edge_weight = torch.ones(1, device=device)

    def ours(x: Tensor, weight: Tensor, edge_weight: Tensor) -> Tensor:
        summed = ops.spmm_gemm(windows, x, weight) + ops.spmm(windows, x, edge_weight)
        heads = x[:, None, :]
        return summed + ops.sparse_attention(heads, heads, heads, windows)[:, 0]

    def definition(x: Tensor, weight: Tensor, edge_weight: Tensor) -> Tensor:
        summed = reference.spmm_gemm(edge_index, x, weight) + reference.spmm(edge_index, x, edge_weight)
        heads = x[:, None, :]
        return summed + reference.sparse_attention(edge_index, heads, heads, heads)[:, 0]

    given = (x, weight, edge_weight)
    batched = torch.autograd.functional.jacobian(ours, given, vectorize=True)
    wanted = torch.autograd.functional.jacobian(definition, given)
    for a, b in zip(batched, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
