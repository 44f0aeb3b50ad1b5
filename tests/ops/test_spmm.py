"""Aggregation against its definition: outputs and every gradient, on every hostile graph."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch, orders
from graphfuse.testing import GRAPHS, check
from tests.ops.test_attention import crowd
from tests.pairs import in_turns

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def build(graph: str, device: torch.device) -> tuple[RowWindows, Tensor, int, int]:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    return RowWindows.from_edge_index(edge_index, (num_src, num_dst)), edge_index, num_src, num_dst


def draw(device: torch.device, dtype: torch.dtype, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def scales(num_src: int, num_dst: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "row_scale": torch.linspace(0.5, 1.5, num_dst, device=device),
        "col_scale": torch.linspace(1.2, 0.4, num_src, device=device),
    }


def check_spmm(
    graph: str,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    weighted: bool,
    loops: bool,
    **options: Any,
) -> None:
    windows, edge_index, num_src, num_dst = build(graph, device)
    inputs = draw(device, dtype, x=(num_src, dim))
    if weighted:
        inputs |= draw(device, dtype, edge_weight=(windows.num_edges,))
    if loops:
        inputs |= draw(device, torch.float32, loop_weight=(num_dst,))
        options |= scales(num_src, num_dst, device)
    op = functools.partial(ops.spmm, windows, **options)
    definition = functools.partial(reference.spmm, edge_index, num_dst=num_dst, **options)
    check(op, definition, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_output_and_gradients_match_definition(
    graph: str, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    # weights and loops take turns, so that each graph and dtype sees both
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype) + (walked == "rows")
    check_spmm(graph, device, dtype, 8 + 3 * (turn % 3), weighted=turn % 2 == 0, loops=turn % 3 > 0)


CUT = ["hub", "full", "repeated", "bipartite_tall", "symmetric", "crowd"]


@pytest.mark.parametrize(("graph", "weighted"), in_turns(CUT, [False, True]))
def test_cut_windows_and_rows(
    graph: str, weighted: bool, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    for dtype, dim, loops in (
        (torch.float16, 12, True),
        (torch.float32, 12, False),
        (torch.float16, 130, False),  # several blocks of features
    ):
        check_spmm(graph, device, dtype, dim, weighted, loops)


@pytest.mark.parametrize("dim", [1, 7, 33, 100, 602])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_widths(dim: int, dtype: torch.dtype, walked: str, device: torch.device) -> None:
    check_spmm("ragged", device, dtype, dim, weighted=False, loops=True)


@pytest.mark.parametrize("load", launch.Load)
def test_every_launch_row(load: launch.Load, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load", lambda *args: load)
    monkeypatch.setattr(launch, "prefers_rows", lambda *args: False)
    for dtype, dim in itertools.product((torch.float16, torch.float32), (16, 64, 130)):
        check_spmm("symmetric", device, dtype, dim, weighted=False, loops=True)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_epilogue(activation: str | None, with_bias: bool, walked: str, device: torch.device) -> None:
    windows, edge_index, num_src, num_dst = build("isolated", device)
    inputs = draw(device, torch.float32, x=(num_src, 9), **({"bias": (9,)} if with_bias else {}))
    op = functools.partial(ops.spmm, windows, activation=activation)
    check(op, functools.partial(reference.spmm, edge_index, num_dst=num_dst, activation=activation), inputs)


GEMMS = [(16, 7), (7, 16), (33, 33), (64, 5), (5, 40)]


@pytest.mark.parametrize("order", orders.GemmOrder)
@pytest.mark.parametrize(("dim", "out_dim"), GEMMS)
def test_gemm(
    dim: int,
    out_dim: int,
    order: orders.GemmOrder,
    walked: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gemm_order(*args: Any) -> orders.GemmOrder:
        keep = args[-1]
        return orders.GemmOrder.AGGREGATE if keep and order is orders.GemmOrder.PROJECT else order

    monkeypatch.setattr(orders, "gemm_order", gemm_order)
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    turn = GEMMS.index((dim, out_dim))
    graph = ["self_loops", "hub", "bipartite", "repeated", "full"][turn]
    windows, edge_index, num_src, num_dst = build(graph, device)
    # ReLU in float32 alone: where rounding turns its sign, a gradient is off by all of itself
    dtype = torch.float32 if turn % 2 else DTYPES[(turn // 2 + (order is orders.GemmOrder.FUSED)) % 3]
    inputs = draw(device, dtype, x=(num_src, dim), weight=(out_dim, dim), bias=(out_dim,))
    if turn % 2 == 0:
        inputs |= draw(device, dtype, edge_weight=(windows.num_edges,))
    options: dict[str, Any] = {"activation": "relu" if turn % 2 else None}
    if turn % 3 > 0:
        inputs |= draw(device, torch.float32, loop_weight=(num_dst,))
        options |= scales(num_src, num_dst, device)
    op = functools.partial(ops.spmm_gemm, windows, **options)
    check(op, functools.partial(reference.spmm_gemm, edge_index, num_dst=num_dst, **options), inputs)


@pytest.mark.parametrize("order", orders.GemmOrder)
def test_autocast_rounds_no_product(
    order: orders.GemmOrder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = orders.GemmOrder.AGGREGATE if order is orders.GemmOrder.PROJECT else order
    monkeypatch.setattr(orders, "gemm_order", lambda *args: keeping if args[-1] else order)
    monkeypatch.setattr(orders, "launch_bound", lambda *args: False)  # PyTorch's products
    windows, _, num_src, _ = build("ragged", device)
    found = []
    for enabled in (False, True):
        inputs = draw(device, torch.float32, x=(num_src, 16), weight=(7, 16), bias=(7,))
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            out = ops.spmm_gemm(windows, **inputs)
            found.append([out, *torch.autograd.grad(out.sum(), list(inputs.values()))])
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))


@pytest.mark.parametrize(("dim", "out_dim"), [(5, 0), (0, 3), (0, 0)])
def test_gemm_of_nothing(dim: int, out_dim: int, device: torch.device) -> None:
    windows, edge_index, num_src, num_dst = build("ragged", device)
    inputs = draw(device, torch.float32, x=(num_src, dim), weight=(out_dim, dim), bias=(out_dim,))
    found = ops.spmm_gemm(windows, **inputs)
    wanted = reference.spmm_gemm(edge_index, **inputs, num_dst=num_dst)
    assert torch.equal(found, wanted)  # the bias
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), list(inputs.values())),
        torch.autograd.grad(wanted.sum(), list(inputs.values())),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
@pytest.mark.parametrize(("dim", "out_dim"), [(16, 7), (7, 16)])
def test_gemm_with_a_frozen_operand(frozen: str, dim: int, out_dim: int, device: torch.device) -> None:
    windows, edge_index, num_src, num_dst = build("ragged", device)
    inputs = draw(device, torch.float32, x=(num_src, dim), weight=(out_dim, dim), bias=(out_dim,))
    inputs[frozen].requires_grad_(False)
    op = functools.partial(ops.spmm_gemm, windows)
    check(op, functools.partial(reference.spmm_gemm, edge_index, num_dst=num_dst), inputs)


def test_strided_rows_columns_and_gradients(walked: str, device: torch.device) -> None:
    windows, edge_index, num_src, _ = build("ragged", device)
    wide = torch.randn(num_src, 40, device=device)
    for x in (wide[:, 8:24], wide[:, 3:20], wide.t().contiguous().t(), wide[:1].expand(num_src, 40)):
        y = ops.spmm(windows, x)
        torch.testing.assert_close(y, reference.spmm(edge_index, x), atol=1e-5, rtol=1e-5)
        leaf = x.detach().clone().requires_grad_()
        ops.spmm(windows, leaf).backward(torch.ones(1, 1, device=device).expand(y.shape))  # stride 0
        wanted = torch.ones_like(y)
        torch.testing.assert_close(
            leaf.grad, reference.spmm(edge_index.flip(0), wanted), atol=1e-5, rtol=1e-5
        )


def test_strided_vectors(walked: str, device: torch.device) -> None:
    windows, edge_index, num_src, _ = build("self_loops", device)
    x = torch.randn(num_src, 4, device=device)
    one = torch.full((1,), 0.5, device=device)
    every_other = torch.rand(2 * windows.num_edges, device=device)[::2]
    for edge_weight in (one.expand(windows.num_edges), every_other):
        options = {
            "loop_weight": one.expand(num_src),
            "row_scale": torch.rand(3 * num_src, device=device)[::3],
            "col_scale": one.expand(num_src),
            "bias": one.expand(4),
        }
        y = ops.spmm(windows, x, edge_weight, **options)
        wanted = reference.spmm(edge_index, x, edge_weight, **options)
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_weights_of_any_dtype_without_kernels(
    dtype: torch.dtype, weight: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.ops._check.runs_kernel", lambda *_: False)
    windows, edge_index, num_src, num_dst = build("bipartite", torch.device("cpu"))
    x = draw(torch.device("cpu"), dtype, x=(num_src, 5))["x"]
    edge_weight = draw(torch.device("cpu"), weight, edge_weight=(windows.num_edges,))["edge_weight"]
    out = ops.spmm(windows, x, edge_weight)
    grads = torch.autograd.grad(out.sum(), (x, edge_weight))
    assert [out.dtype, *(grad.dtype for grad in grads)] == [dtype, dtype, weight]
    exact = reference.spmm(edge_index, x.double(), edge_weight.double(), num_dst=num_dst)
    atol = 8 * torch.finfo(dtype).eps * float(exact.detach().abs().max())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=atol)


def test_first_and_second_derivatives(walked: str) -> None:
    # float64 runs in the interpreter alone; on a GPU machine this takes the definition on the CPU
    num_src, num_dst = 4, 18
    edge_index = torch.tensor([[0, 1, 2, 3, 1, 0, 1, 0], [0, 1, 2, 3, 16, 17, 16, 1]])
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    check_grad = functools.partial(torch.autograd.gradcheck, fast_mode=True)
    check_twice = functools.partial(torch.autograd.gradgradcheck, fast_mode=True)
    for dim, out_dim in ((2, 3), (3, 2)):
        inputs = draw(
            torch.device("cpu"),
            torch.float64,
            x=(num_src, dim),
            weight=(out_dim, dim),
            bias=(out_dim,),
            edge_weight=(windows.num_edges,),
            loop_weight=(num_dst,),
        )

        def run(*values: Tensor) -> Tensor:
            x, weight, bias, edge_weight, loop_weight = values
            return ops.spmm_gemm(windows, x, weight, bias, edge_weight=edge_weight, loop_weight=loop_weight)

        assert check_grad(run, tuple(inputs.values()))
        assert check_twice(run, tuple(inputs.values()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weighted", [False, True])
def test_nan_and_inf_reach_their_neighbours_alone(
    bad: float, weighted: bool, walked: str, device: torch.device, cut: bool
) -> None:
    windows, edge_index, num_src, _ = build("hub", device)
    x = torch.randn(num_src, 20, device=device)
    x[17, 3] = bad  # seen by the hub, whose window holds 15 rows that do not see it
    edge_weight = torch.rand(windows.num_edges, device=device) + 0.5 if weighted else None
    for dtype in (torch.float16, torch.float32):
        weights = None if edge_weight is None else edge_weight.to(dtype)
        y = ops.spmm(windows, x.to(dtype), weights)
        wanted = reference.spmm(edge_index, x.to(dtype), weights)
        assert not wanted[:, 3].isfinite().all()
        assert torch.equal(y.isfinite(), wanted.isfinite())
        assert torch.equal(y.isnan(), wanted.isnan())


def test_result_does_not_depend_on_the_order_of_edges(walked: str, device: torch.device) -> None:
    edge_index, size = GRAPHS["repeated"](device)
    shuffled = edge_index[:, torch.randperm(edge_index.size(1), device=device)]
    x = torch.randn(size[0], 11, device=device)
    results = [ops.spmm(RowWindows.from_edge_index(edges, size), x) for edges in (edge_index, shuffled)]
    assert torch.equal(*results)


def test_isolated_nodes_get_the_bias_and_finite_gradients(walked: str, device: torch.device) -> None:
    windows, _, num_src, _ = build("isolated", device)
    inputs = draw(device, torch.float32, x=(num_src, 5), bias=(5,))
    y = ops.spmm(windows, inputs["x"], bias=inputs["bias"])
    alone = windows.edges_per_row() == 0
    assert alone.sum() > 20
    assert torch.equal(y[alone], inputs["bias"].detach().expand(int(alone.sum()), 5))
    grad_x, grad_bias = torch.autograd.grad(y.sum(), list(inputs.values()))
    assert grad_x.isfinite().all() and grad_bias.isfinite().all()


def test_inference_keeps_nothing(device: torch.device) -> None:
    windows, _, num_src, _ = build("ragged", device)
    x = torch.randn(num_src, 4, device=device, requires_grad=True)
    with torch.no_grad():
        assert ops.spmm(windows, x).grad_fn is None
    with torch.inference_mode():
        assert ops.spmm(windows, x).is_inference()
    # linear in x alone: nothing of size N has to be kept for the backward pass
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda kept: kept):
        ops.spmm(windows, x)
    assert not kept


@pytest.mark.parametrize("scale", ["row_scale", "col_scale"])
@pytest.mark.parametrize("out_dim", [None, 2, 9])  # spmm; the output, then the input as the narrow side
def test_a_scale_that_was_written_to_gives_no_gradient(
    scale: str, out_dim: int | None, device: torch.device
) -> None:
    windows, _, num_nodes, _ = build("ragged", device)
    x = torch.randn(num_nodes, 4, device=device, requires_grad=True)
    scales = {scale: torch.rand(num_nodes, device=device)}
    weight = None if out_dim is None else torch.randn(out_dim, 4, device=device)
    y = ops.spmm(windows, x, **scales) if weight is None else ops.spmm_gemm(windows, x, weight, **scales)
    scales[scale].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("scale", ["row_scale", "col_scale"])
def test_a_scale_of_an_evaluation_serves_training(scale: str, device: torch.device) -> None:
    windows, _, num_nodes, _ = build("ragged", device)
    x = torch.randn(num_nodes, 4, device=device, requires_grad=True)
    with torch.inference_mode():
        scales = {scale: torch.rand(num_nodes, device=device)}
    grads = [
        torch.autograd.grad(ops.spmm(windows, x, **given).sum(), x)
        for given in (scales, {scale: scales[scale].clone()})
    ]
    assert torch.equal(*(grad for (grad,) in grads))


WRONG = [
    (lambda w, x: ops.spmm([w], x), r"`windows` must be RowWindows \(got list\); window the batch"),
    (lambda w, x: ops.spmm(w, x[:-1]), r"`x` must have shape \[33, dim\] \(got \[32, 4\]\)"),
    (lambda w, x: ops.spmm(w, x[0]), r"`x` must have shape \[33, dim\] \(got \[4\]\)"),
    (lambda w, x: ops.spmm(w, x.long()), r"`x` must be a float tensor \(got torch.int64\)"),
    (lambda w, x: ops.spmm(w, x.to_sparse()), r"`x` must be a strided tensor \(got torch.sparse_coo\)"),
    (lambda w, x: ops.spmm(w, x.tolist()), r"`x` must be a strided tensor \(got list\)"),
    (lambda w, x: ops.spmm(w, x, x[:, 0]), r"`edge_weight` must have shape \[\d+\] \(got \[33\]\)"),
    (lambda w, x: ops.spmm(w, x, activation="gelu"), r"`activation` must be None or 'relu' \(got 'gelu'\)"),
    (lambda w, x: ops.spmm(w, x, bias=x[0, :3]), r"`bias` must have shape \[4\] \(got \[3\]\)"),
    (
        lambda w, x: ops.spmm(w, x, loop_weight=x[:5, 0]),
        r"`loop_weight` must have shape \[33\] \(got \[5\]\)",
    ),
    (
        lambda w, x: ops.spmm(w, x, row_scale=x[:, 0].detach().requires_grad_()),
        r"`row_scale` must not require a gradient; multiply",
    ),
    (
        lambda w, x: ops.spmm_gemm(w, x, x[:2, :3]),
        r"`weight` must have shape \[out_dim, 4\] \(got \[2, 3\]\)",
    ),
    (
        lambda w, x: ops.spmm_gemm(w, x, x[:2].double()),
        r"`weight` must have the dtype of `x`, torch.float32 \(got torch.float64\); convert it",
    ),
    (lambda w, x: ops.spmm(w, x.to("meta")), r"`x` must be on .* \(got meta\); move it with .to\("),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_named(call, message: str, device: torch.device) -> None:
    windows = build("ragged", device)[0]
    with pytest.raises(ValueError, match=message):
        call(windows, torch.randn(33, 4, device=device))


@pytest.mark.gpu
def test_float64_on_a_gpu_points_elsewhere() -> None:
    windows = build("ragged", torch.device("cuda"))[0]
    with pytest.raises(ValueError, match=r"graphfuse\.reference runs everywhere"):
        ops.spmm(windows, torch.randn(33, 4, device="cuda", dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True], ids=["windows", "rows"])
@pytest.mark.usefixtures("tens_of_gib")
def test_offsets_beyond_32_bits(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "prefers_rows", lambda *args: rows)
    num_nodes, dim = 9_000_001, 256  # 2.3e9 elements
    edge_index = torch.randint(num_nodes - 1000, num_nodes, (2, 5000), device="cuda")
    windows = RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes))
    x = torch.zeros(num_nodes, dim, device="cuda", dtype=torch.float16)
    x[-1000:] = torch.randn(1000, dim, device="cuda")
    y = ops.spmm(windows, x)
    wanted = reference.spmm(edge_index - (num_nodes - 1000), x[-1000:])
    torch.testing.assert_close(y[-1000:], wanted, atol=2e-2, rtol=1e-2)
    assert not y[:-1000].any()
