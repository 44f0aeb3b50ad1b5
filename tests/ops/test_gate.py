"""The gated skip connection against its definition, and as torch.library sees it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import ops, reference
from graphfuse.testing import assert_close, check, compare
from graphfuse.train.loop import captured
from tests.ops.test_spmm import DTYPES, draw

NAMES = ("out", "skip", "weight")


def operands(
    num_rows: int, dim: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> dict[str, Tensor]:
    given = draw(device, dtype, out=(num_rows, dim), skip=(num_rows, dim), weight=(1, 3 * dim))
    weight = (given["weight"] * (scale * dim**-0.5)).detach().requires_grad_()
    return given | {"weight": weight}


@pytest.fixture
def few_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slices of several steps, as of a large graph."""
    pytest.importorskip("triton")
    from graphfuse.kernels import columns, gate

    monkeypatch.setattr("graphfuse.kernels.launch.FEW_SLICES", 3)
    monkeypatch.setattr(columns, "MERGE_SLICES", 2)
    gate._backward_plan.cache_clear()
    yield
    gate._backward_plan.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 33, 128, 602])
@pytest.mark.parametrize("num_rows", [0, 33, 100])
def test_output_and_gradients_match_definition(
    num_rows: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(ops.gated_skip, reference.gated_skip, operands(num_rows, dim, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 33, 128, 602])
def test_single_rows(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    # of several calls with one row: the error of one row alone is a matter of luck
    def one_by_one(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(out.split(1), skip.split(1), strict=True)
        return torch.cat([ops.gated_skip(*pair, weight) for pair in pairs])

    check(one_by_one, reference.gated_skip, operands(9, dim, dtype, device))


@pytest.mark.parametrize("dim", [33, 602])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_several_steps(
    dtype: torch.dtype, dim: int, few_slices: None, device: torch.device
) -> None:
    inputs = operands(101 if dim == 33 else 11, dim, dtype, device)
    check(ops.gated_skip, reference.gated_skip, inputs)


def test_close_rows(device: torch.device) -> None:
    # the gradient of w3 is small beside those of w1 and w2: it must be a sum, not their rounded difference
    def careful(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
        apart = skip - out  # the definition's own gradient of the gate is a difference of two sums
        z = torch.nn.functional.linear(torch.cat([out, skip, -apart], -1), weight)
        return out + z.sigmoid() * apart

    inputs = operands(100, 16, torch.float32, device)
    skip = inputs["out"].detach() * (1 + 2**-20)
    *_, (name, *found) = compare(ops.gated_skip, careful, inputs | {"skip": skip.requires_grad_()})
    scale = found[-1][:, 32:].abs().max()
    assert scale < 1e-5 * found[-1].abs().max()
    assert_close(name, *((tensor[:, 32:].double() / scale).float() for tensor in found))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates(dtype: torch.dtype, device: torch.device) -> None:
    inputs = operands(40, 24, dtype, device)
    with torch.no_grad():
        inputs["weight"].fill_(0)[0, :24] = 1e3
        inputs["out"].fill_(1)[::2] = -1  # z is 24,000 and -24,000
    check(ops.gated_skip, reference.gated_skip, inputs)
    y = ops.gated_skip(**inputs)
    assert torch.equal(y[1::2], inputs["skip"][1::2])
    assert torch.equal(y[::2], inputs["out"][::2])


def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    inputs = operands(40, 24, torch.float32, device)
    wanted = ops.gated_skip(**inputs)
    with torch.no_grad():
        inputs["skip"][7, 3] = float("nan")
    y = ops.gated_skip(**inputs)
    do, ds = torch.autograd.grad(y.sum(), [inputs["out"], inputs["skip"]])
    for given in (y, do, ds):
        assert given[7].isnan().all()
        assert given[:7].isfinite().all() and given[8:].isfinite().all()
    assert torch.equal(y[8:], wanted[8:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [7, 64])
def test_strided_operands(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    given = draw(device, dtype, stacked=(33, 4 * dim), out=(dim, 33), weight=(3 * dim, 2))

    def sliced(fn: Any) -> Any:
        def run(stacked: Tensor, out: Tensor, weight: Tensor) -> Tensor:
            skip = stacked.split(dim, 1)[3]
            return fn(out.t(), skip, weight[:, :1].t() * dim**-0.5)[:, ::2]  # a gradient with gaps

        return run

    check(sliced(ops.gated_skip), sliced(reference.gated_skip), given)


@pytest.mark.parametrize("wanted", [[*c] for n in (1, 2) for c in itertools.combinations(NAMES, n)], ids=str)
def test_some_gradients(wanted: list[str], device: torch.device) -> None:
    inputs = operands(33, 9, torch.float32, device)
    for name in NAMES:
        inputs[name].requires_grad_(name in wanted)
    check(ops.gated_skip, reference.gated_skip, inputs)


def test_no_gradient(device: torch.device) -> None:
    inputs = {name: tensor.detach() for name, tensor in operands(5, 9, torch.float32, device).items()}
    assert not ops.gated_skip(**inputs).requires_grad
    inputs["skip"].requires_grad_()
    with torch.no_grad():
        assert not ops.gated_skip(**inputs).requires_grad
    (ds,) = torch.autograd.grad(ops.gated_skip(**inputs).sum(), [inputs["skip"]])  # an expanded gradient
    (exact,) = torch.autograd.grad(reference.gated_skip(**inputs).sum(), [inputs["skip"]])
    torch.testing.assert_close(ds, exact, rtol=1e-5, atol=1e-5)


def test_derivative() -> None:
    inputs = tuple(operands(9, 5, torch.float64, torch.device("cpu")).values())
    assert torch.autograd.gradcheck(ops.gated_skip, inputs)
    y = ops.gated_skip(*inputs)
    (do,) = torch.autograd.grad(y.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        do.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 9])
def test_definition_without_kernels(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.ops._check.kernel_problem", lambda device, dtype: "no kernels here")
    monkeypatch.setattr("graphfuse.ops.gate._launchers", None)
    inputs = operands(num_rows, 5, dtype, torch.device("cpu"))
    check(ops.gated_skip, reference.gated_skip, inputs)
    turned = [torch.randn(5, num_rows).t().requires_grad_() for _ in range(2)]
    weight = torch.randn(1, 15, requires_grad=True)
    torch.library.opcheck(torch.ops.graphfuse.gated_skip, (*turned, weight))


@pytest.mark.parametrize("num_rows", [0, 1, 20])
def test_opcheck(num_rows: int, device: torch.device) -> None:
    given = tuple(operands(num_rows, 5, torch.float32, device).values())
    torch.library.opcheck(torch.ops.graphfuse.gated_skip, given)
    backward = tuple(tensor.detach() for tensor in (given[0], *given))
    torch.library.opcheck(torch.ops.graphfuse.gated_skip_backward, backward)


def test_compile_and_export(device: torch.device) -> None:
    inputs = operands(20, 5, torch.float32, device)

    def loss(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
        return ops.gated_skip(out * 2, skip, weight).square().sum()

    given = list(inputs.values())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given), given)
    wanted = torch.autograd.grad(loss(*given), given)
    assert all(map(torch.equal, found, wanted))

    class Layer(torch.nn.Module):
        def forward(self, out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
            return ops.gated_skip(out, skip, weight)

    rows = torch.export.Dim("rows", min=2)
    shapes = {"out": {0: rows}, "skip": {0: rows}, "weight": None}
    program = torch.export.export(Layer(), tuple(t.detach() for t in given), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("graphfuse.gated_skip.default") == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # one gradient of the batch at a time
def test_batched_gradients(device: torch.device) -> None:
    given = tuple(operands(3, 2, torch.float32, device).values())
    batched = torch.autograd.functional.jacobian(ops.gated_skip, given, vectorize=True)
    wanted = torch.autograd.functional.jacobian(reference.gated_skip, given)
    for a, b in zip(batched, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    out, weight = torch.randn(6, 4, device=device), torch.randn(1, 12, device=device)
    with pytest.raises(ValueError, match=r"`out` must be a strided tensor \(got list\)"):
        ops.gated_skip([1.0], out, weight)
    with pytest.raises(ValueError, match=r"`out` must have shape \[num_rows, dim\] \(got \[6\]\)"):
        ops.gated_skip(out[:, 0], out, weight)
    with pytest.raises(ValueError, match=r"`skip` must have shape \[6, 4\] \(got \[5, 4\]\)"):
        ops.gated_skip(out, out[:5], weight)
    with pytest.raises(ValueError, match=r"`weight` must have shape \[1, 12\] \(got \[1, 8\]\)"):
        ops.gated_skip(out, out, weight[:, :8])
    with pytest.raises(ValueError, match=r"`skip` must have the dtype of `out`, torch\.float32"):
        ops.gated_skip(out, out.half(), weight)
    with pytest.raises(ValueError, match=r"`weight` must have the dtype of `out`, torch\.float32"):
        ops.gated_skip(out, out, weight.half())
    with pytest.raises(ValueError, match=r"`weight` must be on .* \(got meta\)"):
        ops.gated_skip(out, out, weight.to("meta"))
    with pytest.raises(ValueError, match=r"`out` must be a float tensor \(got torch\.int64\)"):
        ops.gated_skip(out.long(), out, weight)
    wide = torch.zeros(1, 4097, device=device)
    with pytest.raises(ValueError, match=r"`out` must have at most 4096 columns \(got 4097\)"):
        ops.gated_skip(wide, wide, torch.zeros(1, 3 * 4097, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 64, 602, 2048, 4096])
def test_many_rows_match_and_repeat(dim: int, dtype: torch.dtype) -> None:
    inputs = operands(min(300_000, 2**26 // dim), dim, dtype, torch.device("cuda"))
    check(ops.gated_skip, reference.gated_skip, inputs)

    def step() -> list[Tensor]:
        y = ops.gated_skip(**inputs)
        return [y, *torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y))]

    first = step()
    assert all(all(map(torch.equal, step(), first)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.usefixtures("tens_of_gib")
def test_more_than_2_31_elements() -> None:
    num_rows, dim, device = 2_200_000, 1024, torch.device("cuda")
    out = torch.empty(num_rows, dim, dtype=torch.float16, device=device).normal_().requires_grad_()
    weight = torch.randn(1, 3 * dim, dtype=torch.float16, device=device) * dim**-0.5
    y = ops.gated_skip(out, out.detach().flip(1), weight)
    (do,) = torch.autograd.grad(y, [out], y.detach())
    tail = out.detach()[-50:].clone().requires_grad_()
    wanted = ops.gated_skip(tail, tail.detach().flip(1), weight)
    assert torch.equal(y[-50:], wanted)
    assert torch.equal(do[-50:], torch.autograd.grad(wanted, [tail], wanted.detach())[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the leaves saw the warm-up's stream
def test_capture() -> None:
    inputs = operands(5000, 96, torch.bfloat16, torch.device("cuda"))

    def step() -> list[Tensor]:
        y = ops.gated_skip(**inputs)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(inputs.values()))]

    replay = captured(step)
    with torch.no_grad():
        for tensor in inputs.values():
            tensor.mul_(-0.5)
    assert all(map(torch.equal, replay(), step()))
