"""Operands whose numbers change before every launch while their memory stays where it is."""

from __future__ import annotations

import torch
from torch import Tensor


class Data:
    """Tensors that are filled with new random numbers, on their device, from one seeded generator.

    Args:
        device: Where they are.
        dtype: Of the inputs that name none.

    Attributes:
        inputs: What an op and its definition are called with; gradients of all are wanted.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.inputs: dict[str, Tensor] = {}
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self._normal: list[tuple[Tensor, float]] = []
        self._positive: list[Tensor] = []
        self._seeds: list[Tensor] = []
        self._cotangent: Tensor | None = None

    def add(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Adds an input, normally distributed with ``scale`` as its deviation."""
        self.inputs[name] = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self._normal.append((self.inputs[name].requires_grad_(), scale))

    def positive(self, *shape: int) -> Tensor:
        """Factors between 1/2 and 3/2 in float32, constant for autograd."""
        self._positive.append(torch.empty(shape, device=self._device))
        return self._positive[-1]

    def seed(self) -> Tensor:
        """A seed of dropout."""
        self._seeds.append(torch.zeros(1, dtype=torch.int64, device=self._device))
        return self._seeds[-1]

    def cotangent(self, shape: torch.Size) -> Tensor:
        """The gradient of the output, which has that shape."""
        if self._cotangent is None:
            self._cotangent = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._normal.append((self._cotangent, 1.0))
            self._cotangent.normal_(generator=self._generator)
        return self._cotangent

    @torch.no_grad()
    def refill(self) -> None:
        """New numbers in all of them, without waiting for the GPU."""
        for tensor, scale in self._normal:
            tensor.normal_(0.0, scale, generator=self._generator)
        for tensor in self._positive:
            tensor.uniform_(0.5, 1.5, generator=self._generator)
        for tensor in self._seeds:
            tensor.random_(generator=self._generator)
