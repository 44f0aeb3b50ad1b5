"""A bias of all rows, and the sums of columns, which are its gradient."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear

import graphfuse.nn
from graphfuse.kernels.device import HALF
from graphfuse.nn._projection import mapped, stacked
from graphfuse.ops import columns as module
from graphfuse.ops.columns import add_bias, column_sums
from graphfuse.testing import GRAPHS
from tests.pairs import with_dtypes

DTYPES = (torch.float32, *HALF)
SHAPES = [(1, 1), (5, 7), (100, 33), (37, 602), (19, 1433), (3, 1030)]


@pytest.fixture(autouse=True)
def of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "LARGE", 0)


@pytest.fixture(params=["at once", "one step", "several"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No slices, many, or few of several steps, that the merge adds two at a time, as of a large matrix."""
    kernels = module._launchers()
    if request.param != "at once":
        monkeypatch.setattr(kernels, "AT_ONCE", 0)
    if request.param == "several":
        monkeypatch.setattr("graphfuse.kernels.launch.FEW_SLICES", 3)
        monkeypatch.setattr(kernels, "MERGE_SLICES", 2)
    kernels._sum_plan.cache_clear()
    yield
    kernels._sum_plan.cache_clear()


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the launchers that are called from now on."""
    calls: list[str] = []

    def noted(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return launch(*arguments)

        return call

    importlib.import_module("graphfuse.kernels.additive_bwd")  # keeps the launcher itself, not what notes it
    kernels = module._launchers()
    for name in ("add_bias", "column_sums"):
        monkeypatch.setattr(kernels, name, noted(name, getattr(kernels, name)))
    return calls


def matrix(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows that are strided."""
    return torch.randn(shape[0], shape[1] + 3, device=device).to(dtype)[:, 2:-1]


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(SHAPES, DTYPES), ids=str)
def test_sums_are_the_sums(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = matrix(shape, dtype, device)
    with torch.no_grad():
        found = column_sums(x, torch.float32)
    exact, sizes = x.double().sum(0), x.double().abs().sum(0)
    assert found.dtype == torch.float32 and found.shape == exact.shape
    steps = (found.double() - exact).abs() / torch.finfo(torch.float32).eps / sizes
    assert float(steps.max()) <= 4
    with torch.no_grad():
        assert column_sums(x, dtype).dtype == dtype
        transposed = x.t().contiguous().t()
        assert torch.equal(column_sums(transposed, torch.float32), found)
        assert torch.equal(
            column_sums(x[:1].expand(x.shape), dtype), column_sums(x[:1].repeat(shape[0], 1), dtype)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_is_added_as_pytorch_adds_it(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = launches(monkeypatch)
    x = matrix(shape, dtype, device).requires_grad_()
    bias = torch.randn(shape[1], device=device).to(dtype).requires_grad_()
    y = add_bias(x, bias)
    # to bfloat16 the interpreter cuts off
    if dtype is not torch.bfloat16 or device.type == "cuda":
        assert torch.equal(y, x + bias)
    torch.testing.assert_close(y, x + bias)
    grad = torch.randn_like(y)
    dx, d_bias = torch.autograd.grad(y, [x, bias], grad)
    assert torch.equal(dx, grad) and d_bias.dtype == dtype
    torch.testing.assert_close(
        d_bias, grad.double().sum(0).to(dtype), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-4
    )
    assert calls == ["add_bias", "column_sums"]
    assert torch.autograd.grad(add_bias(x, bias.detach()), x, grad)[0] is not None
    assert calls == ["add_bias", "column_sums", "add_bias"]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_projections_leave_the_gradient_of_a_bias_to_the_kernel(
    together: bool, autocast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [Linear(9, 12).to(device), Linear(9, 8).to(device)]
    for lin in layers:
        torch.nn.init.normal_(lin.bias)
    x = torch.randn(40, 9, device=device, requires_grad=True)
    parameters = [parameter for lin in layers for parameter in lin.parameters()]
    cotangents = [torch.randn(40, size, device=device) for size in (12, 8)]

    def results() -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            rows = stacked(x, layers, 4) if together else [mapped(x, lin) for lin in layers]
        rows = [part.flatten(1) for part in rows]
        grads = [grad.to(part.dtype) for grad, part in zip(cotangents, rows, strict=True)]
        return [*(part.detach() for part in rows), *torch.autograd.grad(rows, [x, *parameters], grads)]

    calls = launches(monkeypatch)
    ours = results()
    for bias in (ours[4], ours[6]):  # sums in float32 are not rounded on their way to float32 parameters
        assert not torch.equal(bias, bias.bfloat16().float())
    assert calls == ["column_sums"] * (1 if together else 2)
    monkeypatch.setattr(module, "LARGE", 1 << 23)
    theirs = results()
    assert calls == ["column_sums"] * (1 if together else 2)
    close = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        torch.testing.assert_close(our, their, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_layer_leaves_the_gradient_of_its_bias_to_the_kernel(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lin = graphfuse.nn.Linear(9, 7).to(device, dtype)
    x = torch.randn(40, 9, device=device).to(dtype).requires_grad_()
    grad = torch.randn(40, 7, device=device).to(dtype)

    def results() -> list[Tensor]:
        out = lin(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *lin.parameters()], grad)]

    calls = launches(monkeypatch)
    ours = results()
    assert calls == ["column_sums"]
    with torch.no_grad():
        assert torch.equal(lin(x), ours[0])
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    theirs = results()
    assert calls == ["column_sums"]
    monkeypatch.delenv("GRAPHFUSE_DISABLE")
    monkeypatch.setattr(module, "LARGE", 40 * 7 + 1)
    torch.testing.assert_close(results(), theirs, rtol=0, atol=0)
    assert calls == ["column_sums"]
    for our, their in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(our, their)
    eps = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours[3], grad.double().sum(0).to(dtype), rtol=eps, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"concat": False}, {"residual": True}], ids=str)
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_layers_add_their_bias_with_the_kernel(
    name: str, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index, (num_nodes, _) = GRAPHS["hub"](device)
    layer = getattr(graphfuse.nn, name)(5, 3, heads=2, **options).to(device)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(num_nodes, 5, device=device)

    def results() -> list[Tensor]:
        out = layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]

    calls = launches(monkeypatch)
    ours = results()
    # GATv2's projections of sources and receivers have biases too
    wanted = ["add_bias"] + ["column_sums"] * (1 if name == "GATConv" else 2)
    assert calls == wanted
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    torch.testing.assert_close(ours, results(), rtol=1e-5, atol=1e-4)
    assert calls == wanted


def test_what_the_kernels_do_not_take_is_pytorchs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = launches(monkeypatch)
    x, bias = torch.randn(6, 4, device=device), torch.randn(4, device=device)
    assert torch.equal(add_bias(x.half(), bias), x.half() + bias)  # a dtype wider than that of x
    pull = torch.func.vmap(lambda one: add_bias(x, one))
    assert torch.equal(pull(torch.stack([bias, 2 * bias]))[1], x + 2 * bias)
    with torch.enable_grad():
        assert torch.equal(column_sums(x, torch.float32), x.sum(0))  # which can be differentiated again
    monkeypatch.setattr(module, "LARGE", 25)
    assert torch.equal(add_bias(x, bias), x + bias)
    assert calls == []


def test_gradients_of_gradients_in_batches(device: torch.device) -> None:
    x, bias = torch.randn(3, 2, device=device), torch.randn(2, device=device)

    def f(bias: Tensor) -> Tensor:
        return add_bias(x, bias).square()

    found = torch.autograd.functional.jacobian(f, bias, vectorize=True)
    assert torch.equal(found, torch.autograd.functional.jacobian(lambda b: (x + b).square(), bias))


def test_the_result_may_be_changed_in_place(device: torch.device) -> None:
    lin = Linear(3, 4).to(device)
    x = torch.randn(5, 3, device=device)
    rows = mapped(x, lin)
    rows.mul_(2.0)
    (found,) = torch.autograd.grad(rows.sum(), [lin.bias])
    assert torch.equal(found, torch.full_like(found, 10.0))
    assert torch.equal(rows, 2 * F.linear(x, lin.weight, lin.bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(81_306, 128), (1_000_003, 7), (9_001, 602), (2_100_000, 16)], ids=str)
def test_large_matrices(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1 << 20)
    calls = launches(monkeypatch)
    x = matrix(shape, dtype, torch.device("cuda")).requires_grad_()
    bias = torch.randn(shape[1], device="cuda").to(dtype).requires_grad_()
    y = add_bias(x, bias)
    assert torch.equal(y, x + bias)
    grad = torch.randn_like(y)
    exact, sizes = grad.double().sum(0), grad.double().abs().sum(0)
    found = [torch.autograd.grad(y, [x, bias], grad, retain_graph=True)[1] for _ in range(20)]
    assert calls == ["add_bias"] + ["column_sums"] * 20
    assert all(torch.equal(one, found[0]) for one in found)
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(torch.float32).eps * sizes
    assert bool(((found[0] - exact).abs() <= rounding).all())


@pytest.mark.gpu
def test_sums_of_more_than_2_31_elements(tens_of_gib: None) -> None:
    x = torch.zeros(2_200_000, 1024, dtype=torch.float16, device="cuda")
    x[-3:] = 2.0
    with torch.no_grad():
        assert torch.equal(column_sums(x, torch.float32), torch.full((1024,), 6.0, device="cuda"))
        assert torch.equal(add_bias(x, x[-1])[-2:], x[-2:] + x[-1])
