"""Rows divided by their lengths: what AGNN's queries and keys are made of, and the gradient of that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.ops import unit_rows as module
from graphfuse.ops.unit_rows import unit_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(
    rows: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(dim)
    x, *grads = (torch.randn(rows, dim, device=device, generator=generator).to(dtype) for _ in range(3))
    return x.requires_grad_(), torch.tensor([1.7], device=device, dtype=dtype, requires_grad=True), *grads


def results(x: Tensor, factor: Tensor, d_scaled: Tensor, d_unit: Tensor, exact: bool) -> list[Tensor]:
    if exact:
        unit = F.normalize(x, dim=1)
        scaled = unit * factor
    else:
        scaled, unit, _ = unit_rows(x, factor)
    return [scaled.detach(), *torch.autograd.grad((scaled, unit), (x, factor), (d_scaled, d_unit))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(5, 1), (19, 7), (33, 33), (9, 128), (3, 256)])
def test_the_kernels_are_fs_normalize(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    given = draw(rows, dim, dtype, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in given[:2]]
    truth = results(*wide, *(grad.double() for grad in given[2:]), exact=True)
    theirs, ours = results(*given, exact=True), results(*given, exact=False)
    terms = float((truth[0] * given[2]).abs().sum())  # of the gradient of the factor, which may cancel
    for exact, their, our in zip(truth, theirs, ours, strict=True):
        scale = terms if exact.numel() == 1 else float(exact.abs().max())
        limit = 2 * float((their - exact).abs().max()) + scale * torch.finfo(dtype).eps
        assert our.dtype == dtype and float((our - exact).abs().max()) <= limit
    inverse = unit_rows(given[0], given[1])[2]
    torch.testing.assert_close(
        inverse.double(), 1 / wide[0].detach().norm(dim=1, keepdim=True), rtol=1e-6, atol=0
    )
    assert inverse.dtype == torch.float32 and not inverse.requires_grad


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=str
)  # PyTorch's 0 / 0 of float16 is NaN
def test_rows_of_zeros(dtype: torch.dtype, device: torch.device) -> None:
    given = draw(6, 16, dtype, device)
    with torch.no_grad():
        given[0][2] = 0
    wide = [tensor.detach().double().requires_grad_() for tensor in given[:2]]
    truth = results(*wide, *(grad.double() for grad in given[2:]), exact=True)
    theirs, ours = results(*given, exact=True), results(*given, exact=False)
    zero = torch.arange(6, device=device) == 2  # by itself: its gradient is 1e12 times the others'
    for exact, their, our in zip(truth, theirs, ours, strict=True):
        assert bool(our.isfinite().all())
        for rows in (zero, ~zero) if exact.size(0) == 6 else (slice(None),):
            limit = 2 * float((their - exact)[rows].abs().max())
            limit += float(exact[rows].abs().max()) * torch.finfo(dtype).eps
            assert float((our - exact)[rows].abs().max()) <= limit
    assert bool(unit_rows(*given[:2])[2].isfinite().all())


def test_rows_of_zeros_in_float16(device: torch.device) -> None:
    x = torch.zeros(3, 8, device=device, dtype=torch.float16, requires_grad=True)
    scaled, unit, inverse = unit_rows(x, torch.ones(1, device=device))
    (dx,) = torch.autograd.grad((scaled, unit), x, (torch.full_like(scaled, 2.0**-20), torch.zeros_like(x)))
    assert not scaled.any() and bool(inverse.isfinite().all())
    assert torch.equal(dx, torch.full_like(dx, 16.0))


def test_rows_of_one_number_have_no_gradient(device: torch.device) -> None:
    x, factor, d_scaled, d_unit = draw(40, 1, torch.float32, device)
    scaled, unit, _ = unit_rows(x, factor)
    dx, _ = torch.autograd.grad((scaled, unit), (x, factor), (d_scaled, d_unit))
    assert torch.equal(scaled, x.sign() * factor) and not dx.any()


def test_one_launch_each_way_and_no_second_matrix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("unit_rows", "unit_rows_bwd"):
        launcher = getattr(module._launchers(), name)
        monkeypatch.setattr(
            module._launchers(), name, lambda *a, n=name, f=launcher: calls.append(n) or f(*a)
        )
    x, factor, d_scaled, d_unit = draw(6, 16, torch.float32, device)
    scaled, unit, _ = unit_rows(x[:, ::2], factor.detach())  # strided
    assert unit.shape == scaled.shape and unit.untyped_storage().nbytes() == 4
    torch.autograd.grad((scaled, unit), x, (d_scaled[:, ::2], d_unit[:, :8]))
    assert calls == ["unit_rows", "unit_rows_bwd"]


@pytest.mark.parametrize("used", [0, 1], ids=["queries", "keys"])
def test_one_result_may_be_all_that_is_used(used: int, device: torch.device) -> None:
    x, factor, *grads = draw(6, 16, torch.float32, device)
    (found,) = torch.autograd.grad(unit_rows(x, factor)[used], x, grads[used])
    zeros = torch.zeros_like(x)
    given = (grads[0], zeros) if used == 0 else (zeros, grads[1])
    assert torch.equal(found, results(x, factor, *given, exact=False)[1])


def test_backward_fills_nothing_with_zeros(device: torch.device) -> None:
    """The lengths have no gradient, which PyTorch would make one of for each backward pass."""
    x, factor, *grads = draw(6, 16, torch.float32, device)
    scaled, unit, _ = unit_rows(x, factor)
    with torch.profiler.profile(acc_events=True) as profile:
        torch.autograd.backward((scaled, unit), grads)
    assert not {"aten::zeros", "aten::zero_", "aten::zeros_like"} & {one.name for one in profile.events()}


def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    x, factor, *_ = draw(6, 16, torch.float32, device)
    with torch.no_grad():
        x[3, 5] = float("nan")
    scaled, _, inverse = unit_rows(x, factor)
    rows = torch.arange(6, device=device) == 3
    assert torch.equal(scaled.isnan().all(1), rows) and torch.equal(inverse[:, 0].isnan(), rows)


def test_batches_of_gradients(device: torch.device) -> None:
    x, factor, d_scaled, d_unit = draw(5, 8, torch.float32, device)
    scaled, unit, _ = unit_rows(x, factor)
    batch = (torch.stack([d_scaled, 2 * d_scaled]), torch.stack([d_unit, d_unit]))
    found = torch.autograd.grad((scaled, unit), (x, factor), batch, is_grads_batched=True, retain_graph=True)
    for turn in range(2):
        wanted = torch.autograd.grad(
            (scaled, unit), (x, factor), (batch[0][turn], batch[1][turn]), retain_graph=True
        )
        for batched, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(batched[turn], one, rtol=1e-5, atol=1e-6)


def test_who_watches_sees_operations_of_pytorch(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, factor, *_ = draw(5, 8, torch.float16, device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = unit_rows(mode.from_tensor(x), mode.from_tensor(factor))
    assert [tuple(tensor.shape) for tensor in found] == [(5, 8), (5, 8), (5, 1)]


def test_gradcheck(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("float64 is for the interpreter")
    x, factor, *_ = draw(4, 5, torch.float64, device)
    both = lambda x, factor: unit_rows(x, factor)[0]  # noqa: E731
    assert torch.autograd.gradcheck(both, (x, factor))
