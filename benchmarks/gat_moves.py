"""What GAT's attention over windows has to move, and nothing else, see :mod:`benchmarks.moves`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import floors
from benchmarks.moves import NONE, Moves, Numbers, fastest, matrix
from graphfuse import RowWindows
from graphfuse.formats.walk import Walk
from graphfuse.kernels import attention, launch
from graphfuse.kernels.run import Launch, aligned
from graphfuse.kernels.tiles import after_previous


# What backward has to know of each receiver, of the output, the tilt and the gradient.
#   grid      (ceil(num_rows / ROWS),)
#   reads     out, tilt, grad [num_rows, WORDS]
#   writes    stats [num_rows, STATS], numbers [num_rows, NUMBERS]
@triton.jit(do_not_specialize=["num_rows"])
def _stream_kernel(
    out_ptr, tilt_ptr, grad_ptr, stats_ptr, numbers_ptr, num_rows, WORDS: tl.constexpr,
    STATS: tl.constexpr, NUMBERS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    after_previous()
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask, at = rows < num_rows, rows * WORDS + tl.arange(0, WORDS)[None, :]
    total = tl.load(out_ptr + at, mask=mask, other=0) + tl.load(tilt_ptr + at, mask=mask, other=0)
    total = tl.sum(total + tl.load(grad_ptr + at, mask=mask, other=0), 1)[:, None]
    at_stats = stats_ptr + rows * STATS + tl.arange(0, STATS)[None, :]
    tl.store(at_stats, tl.broadcast_to(total, (ROWS, STATS)), mask=mask)
    at_numbers = numbers_ptr + rows * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    numbers = tl.broadcast_to(total, (ROWS, NUMBERS)).to(numbers_ptr.dtype.element_ty)
    tl.store(at_numbers, numbers, mask=mask)


class Stream:
    """The launch between forward and backward.

    Args:
        num_rows: Receivers.
        words: Of 4 bytes, in a row of each matrix.
        heads: With 16 bytes of what backward gathers, and a number of half precision.
    """

    def __init__(self, num_rows: int, words: int, heads: int) -> None:
        self._shape, rows = (num_rows, heads), max(1, 1024 // words)
        rest = (num_rows, words, 4 * heads, heads, rows)
        self._launch = Launch(_stream_kernel, -(-num_rows // rows), 4, (), rest)

    def __call__(self, out: Tensor, tilt: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of three rows ``int32[num_rows, words]``, four times for each head, and once."""
        num_rows, heads = self._shape
        stats, numbers = out.new_empty(num_rows, 4 * heads), out.new_empty(num_rows, heads, dtype=torch.int16)
        given = (out, tilt, grad, stats, numbers)
        self._launch(given, (), aligned(*given), out.get_device())
        return stats, numbers


def gat_moves_ms(
    windows: RowWindows, heads: int, dim: int, dtype: torch.dtype, backward: bool
) -> float | None:
    """As :func:`.moves.moves_ms`, of GAT's attention in half precision, without loops and dropout.

    Forward gathers a number of each head beside a row. With ``backward`` it writes the tilt and the softmax,
    too; a launch reads output, tilt and gradient; and over the transpose rows of the gradient are gathered,
    with 16 bytes of each head, while rows of x are read, and written as gradients are. Of cut windows the
    numbers of a row are left out.
    """
    words = heads * dim * dtype.itemsize // 4
    numbers = Numbers(heads, torch.int16)

    def walk(direction: RowWindows, of_backward: bool, tilted: bool) -> Walk:
        w = direction.walk()
        config = launch.gat_window(heads, dim, False, of_backward, tilted, attention.window_load(w))
        return attention.over_windows(w, config, heads)

    def calls(config: floors.Config) -> list[Callable[[], object]]:
        w = walk(windows, False, backward)
        softmax = Numbers(2 * heads) if backward else NONE
        forward = Moves(w, words, 2, config, numbers, softmax, copies=1 + backward)
        passes: list[Callable[[], object]] = [functools.partial(forward, matrix(w, w.num_cols, words))]
        if backward:
            back = walk(windows.transpose(), True, False)
            of_sources = Moves(back, words, 2, config, Numbers(4 * heads), numbers, own=True)
            rows = [matrix(w, w.num_rows, words) for _ in range(3)]
            passes += [functools.partial(Stream(w.num_rows, words, heads), *rows)]
            passes += [functools.partial(of_sources, rows[2])]
        return passes

    return fastest(windows, ("gat_moves_ms", heads, dim, backward), words * 4, calls)
