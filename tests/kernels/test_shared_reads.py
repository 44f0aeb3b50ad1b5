"""How window kernels read what they know of a step: a thread finds its entries side by side."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphfuse.kernels.tiles import dealt
from tests.kernels.compiled import without_interpreter

# compiles kernels for a GPU that is not there, and prints how often each reads a number by itself
COMPILES = """
import sys

from tests.kernels import aot

for case in aot.cases():
    if case.name in sys.argv[1:]:
        print(aot.compiled(case, "sm_90").asm["ptx"].count("ld.shared.b32"))
"""


@triton.jit
def dealt_kernel(out_ptr, ROW_BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.arange(0, COLUMNS)
    tl.store(out_ptr + place, dealt(place, ROW_BYTES))


@pytest.mark.parametrize(("row_bytes", "at_a_time"), [(128, 4), (256, 2)])
def test_a_thread_gets_neighbours(row_bytes: int, at_a_time: int, device: torch.device) -> None:
    """Rows that a warp copies at a time are a share of the step apart, those of one thread are not."""
    out = torch.empty(32, dtype=torch.int32, device=device)
    dealt_kernel[(1,)](out, row_bytes, 32)
    copies = out.view(-1, at_a_time).tolist()
    share = 32 // at_a_time
    assert copies == [[share * row + copy for row in range(at_a_time)] for copy in range(share)]


@pytest.mark.parametrize(("row_bytes", "columns"), [(64, 64), (512, 32), (1024, 32), (128, 16)])
def test_other_steps_stay_in_order(row_bytes: int, columns: int, device: torch.device) -> None:
    out = torch.empty(columns, dtype=torch.int32, device=device)
    dealt_kernel[(1,)](out, row_bytes, columns)
    assert out.tolist() == list(range(columns))


def test_no_column_is_read_by_itself() -> None:
    names = [f"_spmm_window_kernel[fp16-64-None-{load}-bare]" for load in ("FEW", "LONG")]
    assert without_interpreter(COMPILES, *names).split() == ["0", "0"]
