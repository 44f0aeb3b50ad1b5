"""Launch configurations of small linear maps, read off sweeps on an H100 (small_maps.md of its results)."""

from __future__ import annotations

from graphfuse.kernels.launch import Config, power_of_two
from graphfuse.kernels.loads import FULL

_LINEAR_GRADS = 200  # programs of a linear map's gradient, where slices of 64 rows would be more


def linear(num_rows: int, dim: int, out_dim: int, piecemeal: bool = False) -> Config:
    """Kernel of :func:`graphfuse.kernels.linear.linear`; a step is one block of features for each warp."""
    block_out = min(power_of_two(out_dim, 16), 32)
    if dim <= 64 and not piecemeal:
        return Config(power_of_two(dim, 16), 1, 1, 1, 16 if num_rows < FULL else block_out, rows=16)
    warps = 1 if dim <= 32 else 8 if piecemeal else 4  # of rows off 4 bytes, not copied asynchronously
    return Config(min(power_of_two(dim, 16), 32), warps, 3 if out_dim <= 16 else 2, warps, block_out, rows=16)


def linear_grad(num_rows: int, left: int, right: int) -> Config:
    """Kernel of :func:`graphfuse.kernels.linear.linear_grad`, ``[left, right]``, in slices of ``rows``."""
    block, block_out = max(16, min(power_of_two(left), 64) // 2), min(power_of_two(right, 32), 64)
    tiles, rows = -(-left // block) * -(-right // block_out), 64
    while rows < 256 and -(-num_rows // rows) * tiles > _LINEAR_GRADS:
        rows *= 2
    return Config(block, 64, 1 if rows == 64 else 3, 4, block_out, rows=rows)


def linear_grad_merge(size: int) -> tuple[int, int]:
    """Of the merge of its slices, ``[size]``, what a program adds at a time: elements and slices."""
    return (32, 64) if size <= 8192 else (128, 16)
