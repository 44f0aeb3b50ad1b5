"""How slices of cut windows and rows lie in memory, and how what adds them is launched."""

from __future__ import annotations

import pytest

from graphfuse.kernels import merge_shapes
from graphfuse.kernels.merge_tiles import slice_width
from tests.kernels.compiled import without_interpreter

# compiles merges for a GPU that is not there, and prints how many loads of 16 bytes each has
COMPILES = """
import re
import sys

from tests.kernels import aot, aot_nodes

for dim in (64, 128):
    for case in aot_nodes.joined_slices("fp16", 1, dim):
        if case.name == f"attention_bwd_merge_kernel[fp16-1-{dim}-0-16-gat]":
            ptx = aot.compiled(case, "sm_90").asm["ptx"]
            print(len(re.findall(r"ld\\.global\\.v4\\.", ptx)))
"""


@pytest.mark.parametrize(
    ("sums", "numbers", "width"),
    [(128, 0, 128), (128, 1, 132), (256, 8, 264), (36, 3, 40), (7, 1, 11), (14, 0, 14)],
)
def test_numbers_behind_sums_are_filled_up(sums: int, numbers: int, width: int) -> None:
    """So that rows start on 16 bytes wherever one of sums alone would; nothing is filled up without any."""
    assert slice_width(sums, numbers) == width


def test_gradients_of_one_head_are_read_by_16_bytes() -> None:
    """A row of 128 sums and one number had 4 bytes a load: this merge took 23 us of 104."""
    wide = [int(line) for line in without_interpreter(COMPILES).split()]
    assert len(wide) == 2 and min(wide) >= 4, wide


def test_merges_of_rows_take_an_eighth_of_the_longest_at_a_time() -> None:
    found = [merge_shapes.of_sums(1, 64, longest=slices) for slices in (2, 33, 65, 1000)]
    assert [(one.slots, one.rows, one.warps) for one in found] == [
        (4, 1, 1),
        (8, 1, 1),
        (16, 1, 4),
        (16, 1, 4),
    ]
    assert merge_shapes.of_sums(1, 1024).slots == 2


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512, 1024])
def test_merges_of_windows_divide_them_and_fit_into_registers(width: int) -> None:
    found = [
        merge_shapes.of_sums(16, width),
        merge_shapes.of_softmax(16, width),
        merge_shapes.of_softmax(16, width, tilted=True),
        merge_shapes.of_gradients(16, width),
    ]
    for one in found:
        assert 16 % one.rows == 0
        assert one.slots * one.rows * width <= 64 * 32 * one.warps
        assert one.stages * one.rows * width <= 8192 or one.stages == 1


@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_a_product_has_all_rows_of_a_window(width: int) -> None:
    one = merge_shapes.of_sums(16, width, whole=True)
    assert one.rows == 16 and one.slots == 1
