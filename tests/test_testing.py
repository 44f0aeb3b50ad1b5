"""The comparison that everything else is held to: what it lets pass and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from graphfuse.testing import agree, check, compare


def double(x: Tensor) -> Tensor:
    return x + x


def times(factor: float) -> Callable[..., Tensor]:
    return lambda x: (2 * factor) * x


def numbers(count: int = 3) -> dict[str, Tensor]:
    return {"x": torch.rand(count, requires_grad=True)}


def test_a_kernel_that_is_off_fails() -> None:
    check(times(1.0), double, numbers())
    with pytest.raises(AssertionError, match="out: error"):
        check(times(1 + 1e-5), double, numbers())
    with pytest.raises(AssertionError, match="dx: error nan"):
        check(lambda x: double(x) + 0 * (x - x).sqrt(), double, numbers())


def test_a_wrong_shape_fails_although_the_numbers_are_right() -> None:
    with pytest.raises(AssertionError, match=r"shape \[1, 3\], wanted \[3\]"):
        check(lambda x: double(x)[None], double, {"x": torch.rand(3)})


def rounding(errors: list[tuple[float, float]]) -> Callable[[], Iterator[tuple[str, Tensor, Tensor, Tensor]]]:
    """Draws of one number each, which ours and theirs round by so much."""
    left = iter(errors)

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        ours, theirs = next(left)
        yield "out", torch.tensor([ours]), torch.tensor([theirs]), torch.zeros(1, dtype=torch.float64)

    return draw


def test_a_lucky_number_of_the_definition_is_looked_at_again() -> None:
    agree(rounding([(1e-3, 1e-7)] + [(5e-4, 8e-4)] * 12))
    with pytest.raises(AssertionError, match=r"1\.00e-03 > 4\.00e-04"):
        agree(rounding([(1e-3, 1e-7)] + [(9e-4, 2e-4)] * 12))
    agree(rounding([(1e-3, 1e-7), (0.0, 6e-4)]), draws=2)  # together they pass: nothing more is drawn


def test_further_draws_are_near_the_given_ones() -> None:
    seen = []

    def op(x: Tensor) -> Tensor:
        seen.append(x.detach())
        return x * (1 + 1e-4)

    given = {"x": torch.tensor([0.0, 1.0, -4.0], requires_grad=True)}
    with pytest.raises(AssertionError):
        check(op, lambda x: x * 1.0, given)
    assert len(seen) == 13 and torch.equal(seen[0], given["x"].detach())
    for near in seen[1:]:
        assert near[0] == 0 and 1 <= near[1] <= 1.0625 and -4.25 <= near[2] <= -4
        assert not torch.equal(near, seen[0])


def test_every_draw_has_a_cotangent_of_its_own() -> None:
    """Else the gradient of a plain sum is the same number in all of them, and luck does not even out."""
    first, second = (
        dict((name, exact) for name, *_, exact in compare(double, double, numbers())) for _ in "ab"
    )
    assert not torch.equal(first["dx"], second["dx"])
