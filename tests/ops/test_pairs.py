"""Arithmetic of two numbers at a time: what PyTorch makes of them one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = triton.language

pairs = pytest.importorskip("graphfuse.kernels.pairs")
bent_rows, scores_of = pairs.bent_rows, pairs.scores_of
sum_of_rows, sum_where_positive = pairs.sum_of_rows, pairs.sum_where_positive


@triton.jit
def _kernel(
    u_ptr, bent_ptr, score_ptr, sum_ptr, x_ptr, y_ptr, att_ptr, number_ptr, zero, EDGES: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    edges, heads = tl.arange(0, EDGES) + zero, tl.arange(0, HEADS)
    of_head = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    at = edges[:, None, None] * (HEADS * DIM) + of_head[None, :, :]
    number = edges[:, None] * HEADS + heads[None, :]
    att = tl.load(att_ptr + of_head)
    u = sum_of_rows(tl.load(x_ptr + at), tl.load(y_ptr + of_head)[None, :, :])
    bent = bent_rows(u, SLOPE)
    tl.store(u_ptr + at, u)
    tl.store(bent_ptr + at, bent)
    tl.store(score_ptr + number, scores_of(bent, att, at >= 0, DIM, tl.float32))
    acc = tl.full((EDGES, HEADS, DIM), 1.5, tl.float32)
    tl.store(sum_ptr + at, sum_where_positive(acc, u, tl.load(number_ptr + number)[:, :, None]))


def _run(
    x: Tensor, y: Tensor, att: Tensor, number: Tensor, slope: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, bent, score, total = (torch.empty_like(like) for like in (x, x, number, x.float()))
    given = (x, y, att, number, 0, *x.shape, slope)
    _kernel[(1,)](u, bent, score, total, *given, num_warps=1)
    return u, bent, score, total


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0, 1.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 8), (2, 4, 32), (1, 1, 2), (8, 2, 4), (2, 1, 128)], ids=str)
def test_rows_of_pairs(
    shape: tuple[int, int, int], dtype: torch.dtype, slope: float, device: torch.device
) -> None:
    random = torch.Generator().manual_seed(shape[2])
    x, y, att = (torch.randn(size, generator=random) for size in (shape, shape[1:], shape[1:]))
    x, y, att = (values.to(device, dtype) for values in (x, y, att))
    x.view(-1)[0], x.view(-1)[1] = -y.view(-1)[0], float("inf")  # u of 0 has the slope of u < 0
    number = torch.randn(shape[:2], generator=random).to(device)
    u, bent, score, total = _run(x, y, att, number, slope)
    assert torch.equal(u, x + y)
    wanted = torch.where(u > 0, u, u * torch.tensor(slope, dtype=dtype, device=device))
    assert torch.equal(bent, wanted)
    finite = torch.isfinite(bent).all(2)
    products = bent.double() * att.double()
    allowed = 3 * torch.finfo(dtype).eps * products.abs().sum(2)
    assert bool(((score.double() - products.sum(2)).abs() <= allowed)[finite].all())
    assert not bool(torch.isfinite(score[~finite]).any()) and int(finite.sum()) == finite.numel() - 1
    assert torch.equal(total, torch.where(u > 0, 1.5 + number[:, :, None], torch.tensor(1.5, device=device)))


@pytest.mark.parametrize("terms", [torch.float32, torch.bfloat16], ids=str)
def test_terms_of_another_dtype_are_not_rounded(terms: torch.dtype, device: torch.device) -> None:
    """Products of float32 are as exact as it is, under autocast as in float32."""
    random = torch.Generator().manual_seed(3)
    x, y, att = (torch.randn(size, generator=random).to(device) for size in ((2, 4, 32), (4, 32), (4, 32)))
    u, bent, score, _ = _run(x.to(terms), y.to(terms), att, torch.ones(2, 4, device=device), 0.2)
    products = bent.double() * att.double()
    error = (score.double() - products.sum(2)).abs()
    assert bool((error <= 3 * torch.finfo(torch.float32).eps * products.abs().sum(2)).all())
    assert torch.equal(u, x.to(terms) + y.to(terms))
