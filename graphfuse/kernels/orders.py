"""The order of the products of A X W^T, and whose kernels take them: functions of the sizes alone.

The rules were read off sweeps (gemm_orders.md and linear_maps.md of the H200's results, small_maps.md of the
H100's).
"""

from __future__ import annotations

import enum
import functools

# What a memory system of 4 TB/s moves in the 3 us that one more captured kernel costs.
_LAUNCH_BYTES = 12_000_000

# What a number of W costs that a row reads and multiplies, in numbers that are moved to and from memory
# (results/nvidia-h200/gemm_by_rows.md).
_ROW_PRODUCT = 0.2

# The widest rows of x, and of the result, that the fused SpMM-GEMM takes, by the size of an element. Half
# precision keeps wider rows on chip without spilling. In float32 its product takes six of half precision.
MAX_FUSED = {2: (256, 256), 4: (64, 128), 8: (64, 64)}


class GemmOrder(enum.Enum):
    """How A X W^T is computed."""

    FUSED = "(A X) W^T in one kernel, A X on chip"
    PROJECT = "A (X W^T), a dense product first"
    AGGREGATE = "(A X) W^T, a dense product afterwards"


def can_fuse(dim: int, out_dim: int, size: int) -> bool:
    """Whether one kernel may compute A X W^T, ``dim`` to ``out_dim`` features."""
    return dim <= MAX_FUSED[size][0] and out_dim <= MAX_FUSED[size][1]


def launch_bound(num_rows: int, dim: int, out_dim: int) -> bool:
    """Whether a linear map over ``num_rows`` takes longer to launch than to run, so that own kernels pay."""
    return 0 < num_rows <= 16384 and 0 < num_rows * dim * out_dim <= 1 << 27


def is_narrow(num_rows: int, dim: int, out_dim: int) -> bool:
    """Whether one does so that has few columns on a side, where libraries are slower on the GPU as well."""
    few = out_dim <= 16 or (out_dim <= 64 and dim <= (64 if num_rows <= 8192 else 32))
    return few and launch_bound(num_rows, dim, out_dim)


@functools.cache
def gemm_order(
    num_entries: int, num_rows: int, dim: int, out_dim: int, size: int, passes: int, by_rows: bool, keep: bool
) -> GemmOrder:
    """Order of A X W^T by an estimate of bytes moved.

    Apart, X W^T or A X passes through memory once more and there is a second launch, but rows of the narrower
    width are gathered. In one kernel rows of more than 64 features are gathered a quarter slower, and where
    rows are walked each reads all of W, which stays in a cache, and multiplies without tensor cores.

    Args:
        num_entries: Rows of X that are gathered.
        num_rows: Rows of X.
        dim: Columns of X.
        out_dim: Rows of W.
        size: Bytes of an element.
        passes: Over the result of a product afterwards, for bias and ReLU.
        by_rows: Whether rows are walked, not windows of 16.
        keep: Whether A X is wanted too, which rules out :attr:`GemmOrder.PROJECT`.
    """
    if dim == 0 or out_dim == 0:
        return GemmOrder.AGGREGATE  # no kernel knows how to do nothing
    apart = GemmOrder.PROJECT if dim >= out_dim and not keep else GemmOrder.AGGREGATE
    gathered, passed = (out_dim, 0) if apart is GemmOrder.PROJECT else (dim, 2 * passes * out_dim)
    fused = num_entries * dim * (1.25 if dim > 64 else 1.0)
    if by_rows:
        fused += num_rows * dim * out_dim * _ROW_PRODUCT
    saved = (num_entries + 2 * num_rows) * gathered + num_rows * passed - fused
    return GemmOrder.FUSED if can_fuse(dim, out_dim, size) and saved * size >= -_LAUNCH_BYTES else apart
