"""A small linear map and its gradients: several slices of rows, several tiles, ragged edges, any strides."""

from __future__ import annotations

import pytest
import torch

from graphfuse import RowWindows, ops
from graphfuse.testing import assert_close

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 7, 70), (50, 70, 130), (16, 16, 33)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(
    dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool, biased: bool, device: torch.device
) -> None:
    pytest.importorskip("triton")
    from graphfuse.kernels.linear import linear

    num_rows, out_dim, dim = shape
    x = torch.randn(num_rows, dim + 3, device=device).to(dtype)[:, :dim]
    weight = torch.randn((dim, out_dim) if transposed else (out_dim, dim), device=device).to(dtype)
    weight = weight.t() if transposed else weight
    bias = torch.randn(out_dim, device=device).to(dtype) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = linear({}, x, weight, bias)
    assert_close("y", y, torch.nn.functional.linear(x, weight, bias), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (600, 7, 70), (300, 70, 5), (257, 16, 33)], ids=str)
@pytest.mark.parametrize("num_grads", [None, "left", 40, 700])
@pytest.mark.parametrize("long", [False, True], ids=["a step a slice", "four"])
def test_equals_the_product(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    num_grads: int | str | None,
    long: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from graphfuse.kernels import linear_shapes
    from graphfuse.kernels.linear import linear_grad

    if long:
        monkeypatch.setattr(linear_shapes, "_LINEAR_GRADS", 0)
    assert linear_shapes.linear_grad(*shape).rows == (256 if long else 64)

    num_rows, out_dim, dim = shape
    left = torch.randn(num_rows, out_dim + 3, device=device).to(dtype)[:, :out_dim]
    right = torch.randn(num_rows, dim, device=device).to(dtype)
    grad = left if num_grads == "left" else None
    if isinstance(num_grads, int):
        grad = torch.randn(num_grads, out_dim, device=device).to(dtype)
    weight, bias = linear_grad({}, left, right, grad, torch.float32)
    assert_close("dweight", weight, torch.mm(left.t(), right), torch.mm(left.t().double(), right.double()))
    assert (bias is None) == (grad is None)
    if grad is not None:
        torch.testing.assert_close(bias, grad.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_other_numbers_of_rows_are_not_prepared_anew(with_bias: bool, device: torch.device) -> None:
    """As batches of a loader have them; each has launches of its own, which share what is compiled."""
    pytest.importorskip("triton")
    from graphfuse.kernels import linear as kernels

    compiled = []
    for num_rows in (3, 70, 200):
        x, weight = torch.randn(num_rows, 24, device=device), torch.randn(5, 24, device=device)
        grad, plans = torch.randn(num_rows, 5, device=device), {}
        torch.testing.assert_close(kernels.linear(plans, x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)
        found = kernels.linear_grad(plans, grad, x, grad if with_bias else None, torch.float32)
        torch.testing.assert_close(found[0], grad.t() @ x, rtol=1e-5, atol=1e-5)
        if with_bias:
            torch.testing.assert_close(found[1], grad.sum(0), rtol=1e-5, atol=1e-5)
        forward, gradient = plans.values()
        launches = (forward, gradient.main, gradient.merge)
        compiled.append([one._compiled for one in launches])
        assert forward._rest[0] == gradient.main._rest[0] == num_rows
    assert all(one is first for others in compiled for one, first in zip(others, compiled[0], strict=True))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("widths", [(20, 5), (5, 20)], ids=str)
def test_the_op_takes_either_way(
    small: bool, widths: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def decide(*shape: int) -> bool:
        taken.append(shape)
        return small

    monkeypatch.setattr("graphfuse.kernels.orders.launch_bound", decide)
    edge_index = torch.randint(30, (2, 90), device=device)
    windows = RowWindows.from_edge_index(edge_index, (30, 30))
    x = torch.randn(30, widths[0], device=device, requires_grad=True)
    weight = torch.randn(widths[1], widths[0], device=device, requires_grad=True)
    bias = torch.randn(widths[1], device=device, requires_grad=True)
    out = ops.spmm_gemm(windows, x, weight, bias)
    cotangent = torch.randn_like(out)
    given = torch.autograd.grad(out, [x, weight, bias], cotangent)
    adjacency = torch.zeros(30, 30, dtype=torch.float64, device=device)
    adjacency.index_put_((edge_index[1], edge_index[0]), torch.ones(90, device=device).double(), True)
    g = cotangent.double()
    wanted = (adjacency.t() @ g @ weight.double(), g.t() @ adjacency @ x.double(), g.sum(0))
    for one, exact in zip(given, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)
    assert taken
