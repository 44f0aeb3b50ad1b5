"""The terms of nodes in GAT's scores, and the gradient of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse.kernels import launch
from graphfuse.kernels.device import HALF
from graphfuse.ops import logits as module
from graphfuse.ops.logits import logits

SHAPES = [(5, 1, 1), (19, 3, 7), (33, 8, 8), (9, 4, 33), (3, 1, 256)]  # nodes, heads, features


def draw(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    count: int = 2,
    of_terms: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """x and the vectors; gradients of the terms."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    sizes = [shape, *[shape[1:]] * count, *[shape[:2]] * count]
    dtypes = [dtype] + [of_terms or dtype] * 2 * count
    drawn = [
        torch.randn(size, device=device, generator=generator).to(dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    return [tensor.requires_grad_() for tensor in drawn[: 1 + count]], drawn[1 + count :]


def definition(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    return tuple((x * vector).sum(-1) for vector in vectors)


def results(op: Any, given: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    terms = op(*given)
    return [*(term.detach() for term in terms), *torch.autograd.grad(terms, given, grads)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "of_terms"),
    [(dtype, dtype) for dtype in (torch.float32, *HALF)] + [(half, torch.float32) for half in HALF],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_the_sums(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    of_terms: torch.dtype,
    count: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "FEW_SLICES", 2)  # slices of several steps
    module._launchers()._plan.cache_clear()
    given, grads = draw(shape, dtype, device, count, of_terms)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    truth = results(definition, wide, [grad.double() for grad in grads])
    sizes = [tensor.detach().double().abs().requires_grad_() for tensor in given]
    terms = results(definition, sizes, [grad.double().abs() for grad in grads])  # of sums that may cancel
    theirs, ours = results(definition, given, grads), results(logits, given, grads)
    for exact, size, their, our in zip(truth, terms, theirs, ours, strict=True):
        limit = 2 * (their - exact).abs().max() + torch.finfo(our.dtype).eps * size.max()
        assert our.dtype == their.dtype and our.shape == exact.shape
        assert float((our - exact).abs().max() - limit) <= 0
    # Of one vector the gradient of x is a product, rounded once. (To bfloat16 the interpreter cuts off.)
    if count == 1 and (dtype is not torch.bfloat16 or device.type == "cuda"):
        assert torch.equal(ours[1], theirs[1])
    module._launchers()._plan.cache_clear()


def test_one_launch_each_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("logits", "logits_bwd"):
        launcher = getattr(module._launchers(), name)
        monkeypatch.setattr(
            module._launchers(), name, lambda *a, n=name, f=launcher: calls.append(n) or f(*a)
        )
    (x, left, right), grads = draw((7, 2, 6), torch.float32, device)
    found = results(logits, [x[::2].detach().requires_grad_(), left, right], [grad[::2] for grad in grads])
    wanted = results(
        definition, [x[::2].detach().requires_grad_(), left, right], [grad[::2] for grad in grads]
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert calls == ["logits", "logits_bwd"]


def test_rows_too_wide_for_a_program_and_none(device: torch.device) -> None:
    given, grads = draw((2, 65, 64), torch.float16, device)  # 128 heads of 64, in powers of two
    assert not module._fits(given[0])
    for mine, theirs in zip(results(logits, given, grads), results(definition, given, grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert logits(given[0][:0], given[1])[0].shape == (0, 65)


def test_batches_of_gradients(device: torch.device) -> None:
    given, grads = draw((5, 2, 4), torch.float32, device)
    terms = logits(*given)
    batch = [torch.stack([grad, 2 * grad]) for grad in grads]
    found = torch.autograd.grad(terms, given, batch, is_grads_batched=True, retain_graph=True)
    wanted = torch.autograd.grad(terms, given, grads)
    for batched, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(batched, torch.stack([one, 2 * one]))


def test_who_watches_sees_operations_of_pytorch(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    given, _ = draw((5, 2, 4), torch.float16, device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = logits(*(mode.from_tensor(tensor) for tensor in given))
    assert [tuple(term.shape) for term in found] == [(5, 2), (5, 2)]


def test_gradcheck(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("float64 is for the interpreter")
    given, _ = draw((4, 2, 3), torch.float64, device)
    assert torch.autograd.gradcheck(logits, given)
