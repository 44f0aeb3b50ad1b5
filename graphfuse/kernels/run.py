"""Launching a kernel, quickly once it is compiled."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.device import INTERPRETING

_RUNNERS: dict[tuple[Any, ...], Any] = {}


def run(
    kernel: Any,
    programs: int,
    warps: int,
    tensors: tuple[Tensor | None, ...],
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:
    """Launches ``kernel`` with ``programs`` programs on the device of ``tensors[0]``.

    Triton's own call binds and specialises every argument anew, which for twenty arguments costs more host
    time than the rest of a launch. What it would find is the key here.

    Args:
        kernel: A ``triton.jit`` function whose parameters are the following, in this order.
        programs: Size of the one-dimensional grid.
        warps: Warps of a program.
        tensors: Pointers; ``None`` for an operand that is not there.
        counts: Integers that the kernel is not specialised on (``do_not_specialize``), below 2^31.
        strides: Integers that it is specialised on.
        constants: Its ``constexpr`` parameters.
    """
    index = tensors[0].get_device()  # type: ignore[union-attr]
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return run(kernel, programs, warps, tensors, counts, strides, constants)
    addresses = 0
    dtypes: list[torch.dtype | None] = []
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
        else:
            dtypes.append(tensor.dtype)
            addresses |= tensor.data_ptr()
    traits = [(stride == 1, stride & 15 == 0, stride >> 31) for stride in strides]
    key = (kernel, index, programs, warps, constants, *dtypes, *traits)
    runner = _RUNNERS.get(key)
    if runner is not None and addresses & 15 == 0:
        runner(*tensors, *counts, *strides, *constants)
        return None
    compiled = kernel[(programs,)](*tensors, *counts, *strides, *constants, num_warps=warps)
    if addresses & 15 == 0 and not INTERPRETING:
        if len(_RUNNERS) >= 4096:  # mini-batches of ever new sizes
            _RUNNERS.clear()
        _RUNNERS[key] = compiled[(programs, 1, 1)]
    return None


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What sums over ``dtype`` are kept in: float32, or float64 for float64 (interpreter only)."""
    return tl.float64 if dtype == torch.float64 else tl.float32
