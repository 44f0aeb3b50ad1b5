"""Products with matrices that are dense in some square blocks, beside cuBLAS: DSD and SDD."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import truth
from benchmarks.bench import Bench, Case, Prepared, Problem, Record, device
from benchmarks.timing import time_call
from graphfuse import RowWindows, ops
from graphfuse.kernels.device import kernel_problem

_FLOOR_SECONDS = 0.05


@dataclass(frozen=True, eq=False)
class Mask:
    """Which blocks of a square matrix of ``rows`` rows are dense; random, distinct and sorted by rows."""

    rows: int
    block: int
    block_rows: Tensor  # int64[num_blocks]
    block_cols: Tensor

    @functools.cached_property
    def windows(self) -> RowWindows:
        """Its row windows, built once."""
        return RowWindows.from_blocks(self.block_rows, self.block_cols, self.block, (self.rows, self.rows))

    @property
    def num_values(self) -> int:
        """Elements of the dense blocks."""
        return self.block_rows.numel() * self.block**2

    def in_blocks(self, x: Tensor) -> Tensor:
        """A matrix of ``rows`` rows as ``[rows / block, block, width]``."""
        return x.view(-1, self.block, x.size(1))

    def scattered(self, values: Tensor) -> Tensor:
        """The whole matrix, of values ``[num_blocks, block, block]``."""
        side = self.rows // self.block
        grid = values.new_zeros(side, side, self.block, self.block)
        grid[self.block_rows, self.block_cols] = values
        return grid.transpose(1, 2).reshape(self.rows, self.rows)

    def gathered(self, matrix: Tensor) -> Tensor:
        """The other way: the blocks of a whole matrix."""
        side = self.rows // self.block
        grid = matrix.view(side, self.block, side, self.block).transpose(1, 2)
        return grid[self.block_rows, self.block_cols]


@functools.lru_cache(maxsize=1)  # its windows take gigabytes
def _mask(rows: int, block: int, density: float, on: torch.device) -> Mask:
    side = rows // block
    places = torch.randperm(side**2, generator=torch.Generator().manual_seed(0))
    chosen = places[: round(density * side**2)].sort().values.to(on)
    return Mask(rows, block, chosen // side, chosen % side)


@dataclass(frozen=True)
class Inputs:
    """What providers are given: of ``dsd`` blocks and a dense matrix, of ``sdd`` two dense matrices."""

    mask: Mask
    kind: str
    left: Tensor  # [num_blocks, block, block] or [rows, width]
    right: Tensor  # [rows, width]


def _problem(
    rows: int, block: int, density: float, kind: str, width: int, dtype: torch.dtype, mode: str
) -> Problem:
    mask = _mask(rows, block, density, device())
    num_values = mask.num_values
    random = torch.Generator(device()).manual_seed(0)
    draw = functools.partial(torch.randn, device=device(), generator=random)
    summed = num_values // rows if kind == "dsd" else width  # products in an element of the result
    size = (mask.block_rows.numel(), block, block) if kind == "dsd" else (rows, width)
    left = (draw(size) * summed**-0.5).to(dtype)
    inputs = Inputs(mask, kind, left, draw(rows, width).to(dtype))
    exact, rounded = (_definition(inputs, precise) for precise in (torch.float64, dtype))
    expected = truth.Expected(exact, rounded, None, 2.0)
    return Problem(
        facts={
            "graph": f"{rows} x {rows}, blocks of {block}, {100 * density:g} %",
            "num_nodes": rows,
            "num_edges": num_values,
            "head_dim": width,
            "dtype": str(dtype).removeprefix("torch."),
            "mode": mode,
            "extra": {"kind": kind, "block": block, "operations": 2 * num_values * width},
        },
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([expected], results),
        floor_ms=_dense_ms(inputs),
    )


def _definition(i: Inputs, dtype: torch.dtype) -> Tensor:
    left, right = i.left.to(dtype), i.right.to(dtype)
    if i.kind == "dsd":
        return torch.mm(i.mask.scattered(left), right)
    return i.mask.gathered(torch.mm(left, right.t())).flatten()


def _dense_ms(i: Inputs) -> float:
    """A dense product of as many operations, on random numbers: what the mask would cost if it were free."""
    rows, width = i.right.shape
    per_row = i.mask.num_values // rows
    inner, columns = (per_row, width) if i.kind == "dsd" else (width, per_row)
    left, right = i.right.new_empty(rows, inner).normal_(), i.right.new_empty(inner, columns).normal_()
    torch.mm(left, right)
    return time_call(lambda: torch.mm(left, right), i.right.device, _FLOOR_SECONDS).p50_ms


def _of_one(call: Callable[[], Tensor], path: str = "-") -> Prepared:
    return Prepared(call, lambda: (call(),), path)


def _graphfuse(i: Inputs) -> Prepared:
    windows, left, right = i.mask.windows, i.left, i.right
    path = "fused" if kernel_problem(right.device, right.dtype) is None else "generic"
    if i.kind == "sdd":
        return _of_one(lambda: ops.sddmm(windows, left, right), path)
    values = left.flatten()
    return _of_one(lambda: ops.spmm(windows, right, values), path)


def _whole(i: Inputs) -> Prepared:
    """The product of whole matrices, zeros and all; of ``sdd`` its blocks are picked for the check only."""
    if i.kind == "dsd":
        matrix = i.mask.scattered(i.left)
        return _of_one(lambda: torch.mm(matrix, i.right))

    def call() -> Tensor:
        return torch.mm(i.left, i.right.t())

    def results() -> Sequence[Tensor]:
        return (i.mask.gathered(call()).flatten(),)

    return Prepared(call, results)


def _blocks(i: Inputs) -> Prepared:
    """A batch of small dense products, summed in float32."""
    mask, right = i.mask, i.mask.in_blocks(i.right)
    if i.kind == "sdd":
        left = mask.in_blocks(i.left)

        def sampled() -> Tensor:
            columns = right[mask.block_cols].transpose(1, 2)
            return torch.bmm(left[mask.block_rows], columns).flatten()

        return _of_one(sampled)

    def product() -> Tensor:
        parts = torch.bmm(i.left, right[mask.block_cols])
        total = torch.zeros(right.shape, dtype=torch.float32, device=right.device)
        total.index_add_(0, mask.block_rows, parts.float())
        return total.to(right.dtype).view(i.right.shape)

    return _of_one(product)


class Throughput(Bench):
    """A benchmark whose records say how many of a problem's operations a provider does a second."""

    def rows(self, case: Case, quick: bool = False) -> Iterator[Record]:
        """As :meth:`Bench.rows`, with ``tflops`` in ``extra``."""
        for record in super().rows(case, quick):
            if record.p50_ms is not None:
                tflops = record.extra["operations"] / record.p50_ms / 1e9
                record = dataclasses.replace(record, extra=record.extra | {"tflops": tflops})
            yield record


Throughput(
    name="blocksparse",
    sweep=[
        {
            "rows": (8192,),
            "block": (64, 128),
            "density": (0.125, 0.25, 0.5),
            "kind": ("dsd", "sdd"),
            "width": (512,),
            "dtype": (torch.float16, torch.bfloat16),
            "mode": ("fwd",),
        }
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "torch.mm": _whole, "torch.bmm": _blocks},
)
