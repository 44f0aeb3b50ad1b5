"""Row kernels of attention in float32: steps of the launch table, and when a step asks for rows."""

from __future__ import annotations

from typing import Any

import pytest

from graphfuse.kernels import float32_rows, launch, row_tiles
from tests.kernels.compiled import without_interpreter

# Compiles what walks many rows for a GPU that is not there, and prints of each kernel how many rows it asks
# for in a step, and how many of them before it computes with one.
COMPILES = """
import itertools
import sys

from graphfuse.kernels import launch
from tests.kernels import aot
from tests.kernels.compiled import dump, inner_loop, rows_asked_for

heads, dim = map(int, sys.argv[1:])
attention, gat, gatv2 = (
    [row(heads, dim, 4, launch.RowLoad.NORMAL, backward) for backward in (False, True)]
    for row in (launch.attention_row, launch.gat_row, launch.gatv2_row)
)
tables = {
    "attention_row_kernel": attention[0],
    "attention_bwd_row_kernel": attention[1],
    "gat_bwd_row_kernel": gat[1],
    "gatv2_bwd_row_kernel": gatv2[1],
}
seen = []
dot, additive = (make("fp32", heads, dim) for make in (aot.sparse_attention, aot.additive_attention))
for case in itertools.chain(dot, additive):
    name, constants = case.kernel.__name__, case.constants
    table = tables.get(name)
    if name == "additive_row_kernel":
        table = (gatv2 if constants["V2"] else gat)[0]
    shape = constants["EDGES"], case.warps
    if table is None or shape != (table.step, table.warps):
        continue
    constants |= {one: None for one in case.kernel.arg_names if "edge" in one or "copy" in one}
    if (name, constants) in seen:
        continue
    seen.append((name, constants))
    loop = inner_loop(dump(aot.compiled(case, "sm_90"), "-sass"))
    print(name, constants.get("V2", False), constants["DROPOUT"] > 0, *rows_asked_for(loop))
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
    assert half[0] == half[1]._replace(packed=1)


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


@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (8, 8), (8, 16), (1, 64)])
def test_rows_of_a_step_are_asked_for_before_one_is_waited_for(heads: int, dim: int) -> None:
    """As they stand in the kernels; but the assembler may put one off, to save registers.

    GATv2's forward without dropout leaves it to do so: more programs find room then, and take less time.
    """
    found = [line.split() for line in without_interpreter(COMPILES, str(heads), str(dim)).splitlines()]
    assert len({name for name, *_ in found}) == 5  # and of two both directions, or kinds
    assert {dropout for _, _, dropout, *_ in found} == {"True", "False"}
    late = [line for line in found if line[3] != line[4]]
    assert [line for line in late if line[:3] != ["additive_row_kernel", "True", "False"]] == []
    assert all(int(line[3]) > 0 for line in found)


def test_a_tie_changes_no_number() -> None:
    """Each number is itself, or bits of others that are masked by 0; and needs a load of each four."""
    for count in (8, 16):
        text, operands = row_tiles.tie(count)
        assert operands.split(",") == ["=f"] * count + ["f"] * count + ["r"] * count
        assert text.count("0x96") == count // 8 and text.count("0xF8") == count // 4
        for nth in range(count):
            own = f"${nth}, ${count + nth}"
            assert f"lop3.b32 {own}, all, ${2 * count}, 0xF8;" in text or f"mov.b32 {own};" in text
        for load in range(count, 2 * count, 4):
            assert f"${load}, " in text.split("0xF8")[0]
