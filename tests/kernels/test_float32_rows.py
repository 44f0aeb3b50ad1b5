"""Row kernels of attention in float32: steps of the launch table, and when a step asks for rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphfuse.kernels import float32_rows, launch

# compiles the kernels of GATv2 that gather two rows an edge for a GPU that is not there, and prints how many
# rows each asks for in a step, and how many of them before it adds up what threads have
COMPILES = """
import sys

import triton

from graphfuse.kernels import launch
from tests.kernels import aot
from tests.kernels.compiled import dump, inner_loop

triton_compile, compiled = triton.compile, []


def keep(*given, **how):
    compiled.append(triton_compile(*given, **how))
    return compiled[-1]


triton.compile = keep
heads, dim = map(int, sys.argv[1:])
step = launch.gatv2_row(heads, dim, 4, launch.RowLoad.NORMAL, True).step
for case in aot.additive_attention("fp32", heads, dim):
    transposed = case.constants.get("TRANSPOSED") and case.constants["EDGES"] == step and case.warps == 1
    if case.kernel.__name__ == "gatv2_bwd_row_kernel" and transposed and "0.0" in case.name:
        aot.compile_case(case, "sm_90")
        loop = inner_loop(dump(compiled[-1], "-sass"))
        rows = [place for place, text in enumerate(loop) if "LDG.E.128" in text]
        first = next(place for place, text in enumerate(loop) if "SHFL" in text)
        print(len(rows), sum(place < first for place in rows))
"""


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("heads_and_dim", [(4, 32), (8, 8), (1, 64), (1, 128), (8, 64)])
@pytest.mark.parametrize("row", [launch.attention_row, launch.gat_row, launch.gatv2_row])
def test_short_rows_of_float32_take_few_edges_a_step(
    row: Any, heads_and_dim: tuple[int, int], backward: bool
) -> None:
    short, normal, long = (
        row(*heads_and_dim, 4, getattr(launch.RowLoad, load), backward)
        for load in ("SHORT", "NORMAL", "LONG")
    )
    assert short.step <= 2 and short.step <= normal.step <= long.step and short.step < long.step
    assert short.warps <= long.warps and normal.warps <= long.warps and short.stages == 1
    half = [row(*heads_and_dim, 2, getattr(launch.RowLoad, load), backward) for load in ("SHORT", "NORMAL")]
    assert half[0] == half[1]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("heads_and_dim", [(8, 8), (1, 64), (1, 128), (8, 16), (4, 32)])
@pytest.mark.parametrize("row", [launch.attention_row, launch.gat_row, launch.gatv2_row])
def test_many_rows_of_float32_have_small_programs(
    row: Any, heads_and_dim: tuple[int, int], backward: bool
) -> None:
    """A warp, which reads four to sixteen numbers a thread and step; GAT's of heads of 32 more."""
    config = row(*heads_and_dim, 4, launch.RowLoad.NORMAL, backward)
    numbers = config.step * config.rows * config.block_dim // (32 * config.warps)
    wide = row is launch.gat_row and heads_and_dim == (4, 32)
    assert 4 <= numbers <= (32 if wide else 16)
    assert config.warps == 1 + (
        row is launch.attention_row and backward and heads_and_dim in ((8, 16), (4, 32))
    )


def test_programs_of_gat_go_through_two_rows_where_that_was_faster() -> None:
    normal = launch.RowLoad.NORMAL
    for heads, dim, tilted, rows in ((8, 8, False, 2), (8, 8, True, 1), (4, 32, True, 2), (1, 64, False, 1)):
        assert float32_rows.rows_of_gat(18_333, heads, dim, tilted, normal) == rows
        assert float32_rows.rows_of_gat(13_752, heads, dim, tilted, normal) == 1
        for load in set(launch.RowLoad) - {normal}:
            assert float32_rows.rows_of_gat(10**6, heads, dim, tilted, load) == 1


@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (1, 64)])
def test_both_rows_of_an_edge_are_asked_for_before_one_is_waited_for(heads: int, dim: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILES, str(heads), str(dim)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.splitlines()) == {"2 2"}
