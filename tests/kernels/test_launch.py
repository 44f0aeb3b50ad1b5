"""What the launch table chooses."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphfuse.kernels import launch, linear_shapes, orders, walk_rules
from graphfuse.kernels.device import HALF

# rows, columns, edges, column entries
FEW, SOME, MANY = ((10_000, 10_000, num_edges, 10_000) for num_edges in (12_000, 20_000, 40_000))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gat_trains_by_rows_where_heads_are_a_sector(dtype: torch.dtype) -> None:
    def by_rows(
        sizes: tuple[int, int, int, int], heads: int, dim: int, trained: bool, dropout: bool = False
    ) -> bool:
        return launch.gat_prefers_rows(*sizes, heads, dim, trained, dropout, dtype, dtype)

    assert by_rows(FEW, 6, 16, True) and not by_rows(FEW, 6, 16, False)
    assert by_rows(FEW, 8, 16, True, True) and not by_rows(FEW, 8, 16, True)  # factors of fours are summed
    assert not by_rows(SOME, 6, 16, True) and not by_rows(MANY, 6, 16, True)  # windows have less to skip
    assert by_rows((10_000, 10_000, 15_000, 10_000), 8, 16, True, True)  # with dropout also to draw for
    assert not by_rows((10_000, 10_000, 15_001, 10_000), 8, 16, True, True)
    assert not by_rows(FEW, 1, 16, True, True) and not by_rows(FEW, 4, 32, True, True)
    for trained in (False, True):  # two heads of 16 bytes are a sector
        assert not by_rows(MANY, 8, 8, trained) and by_rows((10_000, 10_000, 15_000, 10_000), 8, 8, trained)
    # windows of just below 64 entries and of 64, on average
    short, long = (10_000, 10_000, 79_998, 39_999), (10_000, 10_000, 80_000, 40_000)
    assert not by_rows(short, 8, 8, True, True) and by_rows(long, 8, 8, True, True)
    assert not by_rows(long, 8, 8, False, True)
    large = 375_001  # whose x of 32 numbers does not stay in the L2 cache
    for num_cols, trained_by_rows in ((large - 1, True), (large, False)):
        sizes = (num_cols, num_cols, 11 * num_cols, 10 * num_cols)
        assert by_rows(sizes, 2, 16, True) == trained_by_rows and by_rows(sizes, 2, 16, True, True)
    assert by_rows(MANY, 1, 8, False) and by_rows(MANY, 8, 4, False)
    for trained in (False, True):
        assert launch.gat_prefers_rows(*MANY, 4, 32, trained, False, *[torch.float32] * 2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gat_lists_edges_where_windows_share_few_columns(dtype: torch.dtype) -> None:
    def lists(
        num_edges: int, num_entries: int, heads: int = 8, dim: int = 8, trained: bool = False,
        dropout: bool = False, nodes: int = 20_000,
    ) -> bool:  # fmt: skip
        sizes = (nodes, nodes, num_edges, num_entries)
        return walk_rules.gat_lists_edges(*sizes, heads, dim, trained, dropout, dtype)

    assert lists(100_000, 80_000) and not lists(100_001, 80_000)  # five edges of four columns
    assert lists(100_000, 80_000, heads=16) and lists(1 << 16, 1 << 16) and not lists((1 << 16) - 1, 1 << 16)
    for trained in (False, True):
        for heads, dim in ((1, 8), (4, 8), (12, 8), (4, 16), (8, 7), (8, 4), (4, 32)):
            assert not lists(100_000, 100_000, heads, dim, trained)
    assert lists(120_000, 120_000, nodes=40_000) and not lists(119_999, 119_999, nodes=40_000)  # three a row
    # windows of 320 columns, of heads of 16 with gradients of 160
    for trained in (False, True):
        assert lists(400_000, 400_000, trained=trained) and not lists(400_001, 400_001, trained=trained)
    assert not lists(100_000, 100_000, 8, 16)
    assert lists(200_000, 200_000, 8, 16, True) and not lists(200_001, 200_001, 8, 16, True)
    assert lists(100_000, 80_000, 8, 16, True) and not lists(100_001, 80_000, 8, 16, True)
    assert lists(200_000, 80_000, trained=True) and not lists(200_000, 80_001, trained=True)
    assert lists(200_000, 80_000, dropout=True) and not lists(200_000, 80_001, dropout=True)  # a step or two
    large = 781_250  # of 100 MB
    assert lists(10 * large, 10 * large, nodes=large) and not lists(10 * large, 10 * large, nodes=large + 1)
    sizes = (20_000, 20_000, 100_000, 100_000, 8, 8, False, False)
    assert not walk_rules.gat_lists_edges(*sizes, torch.float32)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_on_large_graphs_that_share_nothing(dtype: torch.dtype) -> None:
    def by_rows(num_cols: int, heads: int, dim: int, dropout: bool, edges: int = 15) -> bool:
        sizes = (num_cols, num_cols, edges * num_cols, 10 * num_cols)
        return launch.attention_prefers_rows(*sizes, heads, dim, dropout, dtype)

    large, small = 93_751, 93_750  # k and v of 128 numbers a node
    for heads, dim in ((4, 32), (8, 16)):
        assert by_rows(large, heads, dim, True) and not by_rows(large, heads, dim, False)
        assert not by_rows(small, heads, dim, True) and not by_rows(large, heads, dim, True, edges=16)
        sizes = (large, large, 15 * large, 10 * large, heads, dim)
        assert not launch.gat_prefers_rows(*sizes, False, True, dtype, dtype)
        assert not launch.gat_prefers_rows(*sizes, False, False, dtype, dtype)
        assert launch.attention_prefers_rows(*sizes, False, torch.float32)
        # without dropout, if next to no column is shared
        for num_edges, rows in ((10_030 * large, True), (10_031 * large, False)):
            sizes = (large, large, num_edges, 10_000 * large, heads, dim)
            assert launch.gat_prefers_rows(*sizes, False, False, dtype, dtype) == rows
            assert launch.attention_prefers_rows(*sizes, False, dtype) == rows
    assert by_rows(large, 16, 8, False) and not by_rows(small, 16, 8, False)
    assert not by_rows(10 * large, 1, 32, True) and not by_rows(large, 2, 64, True)


# Column entries and rows of ego-twitter, and with bias and ReLU what was fastest there
# (results/nvidia-h200/gemm_orders.md); without, two passes less afterwards.
@pytest.mark.parametrize(
    ("size", "dim", "out_dim", "passes", "keep", "order"),
    [
        (2, 64, 64, 2, False, "FUSED"),
        (2, 64, 128, 2, True, "FUSED"),
        (2, 128, 128, 2, False, "PROJECT"),
        (2, 128, 128, 2, True, "FUSED"),
        (2, 128, 128, 0, True, "AGGREGATE"),
        (4, 64, 64, 2, False, "FUSED"),
        (4, 64, 128, 2, False, "FUSED"),
        (4, 128, 128, 2, False, "PROJECT"),
        (4, 128, 128, 2, True, "AGGREGATE"),
        (4, 0, 64, 0, False, "AGGREGATE"),
    ],
)
def test_products_are_ordered_as_was_fastest(
    size: int, dim: int, out_dim: int, passes: int, keep: bool, order: str
) -> None:
    assert orders.gemm_order(1_341_115, 81_306, dim, out_dim, size, passes, False, keep).name == order


@pytest.mark.parametrize("load", [load for load in launch.Load if load is not launch.Load.TINY], ids=str)
@pytest.mark.parametrize("dropout", [False, True], ids=["all", "drops"])
def test_rows_that_start_anywhere_are_told_no_bound(load: launch.Load, dropout: bool) -> None:
    """Each piece of theirs has an address: with the registers of other rows a step would spill."""
    for heads, dim in ((1, 41), (4, 25), (1, 100), (3, 100)):
        rows = [launch.gat_window(heads, dim, dropout, False, tilted, load) for tilted in (False, True)]
        rows += [launch.attention_window(heads, dim, 2, dropout, scaled, load) for scaled in (False, True)]
        rows += [launch.attention_bwd_window(heads, dim, dropout, False, load)]
        rows += [launch.gat_window(heads, dim, dropout, True, True, load)]
        assert {(row.registers, row.warps) for row in rows} <= {(None, 1), (None, 2)}
        backward = launch.gat_window(heads, dim, dropout, True, False, load)
        assert backward.registers == (None if dropout or load.few else 168)
    aligned = launch.attention_window(1, 48, 2, dropout, False, launch.Load.NORMAL)
    assert aligned.registers == (144 if dropout else 168)
    for dim, size, most in ((100, 2, None), (20, 2, None), (41, 2, 255), (602, 4, 255)):
        row = launch.spmm_window(dim, size, None, load)
        assert (row.registers, row.warps) == (most, 1)


def test_tiny_windows_of_64_features_have_wider_steps_with_factors() -> None:
    """Steps of 16 would load each column twice (results/nvidia-h200/factors.md): on dblp-2010."""
    for dim in (33, 40, 64):
        plain, scaled = (launch.spmm_window(dim, 2, None, launch.Load.TINY, f) for f in (False, True))
        assert (plain.step, scaled.step) == (16, 32)
        assert (scaled.registers == 96) == (dim % 8 == 0)
    assert launch.spmm_window(64, 4, None, launch.Load.TINY, True).step == 16


def test_products_stay_out_of_row_kernels_of_many_rows() -> None:
    """Each row reads all of W (results/nvidia-h200/gemm_by_rows.md): on github, and on Cora."""
    for dim, out_dim, keep, order in (
        (64, 64, False, "PROJECT"),
        (64, 64, True, "AGGREGATE"),
        (64, 128, False, "AGGREGATE"),
    ):
        windows, rows = [
            orders.gemm_order(546_439, 37_700, dim, out_dim, 4, 0, by_rows, keep).name
            for by_rows in (False, True)
        ]
        assert (windows, rows) == ("FUSED", order)
    assert orders.gemm_order(9_583, 2_708, 16, 7, 4, 0, True, False).name == "FUSED"


def test_no_launch_fuses_what_does_not_fit() -> None:
    for size, (widest, widest_out) in orders.MAX_FUSED.items():
        assert orders.can_fuse(widest, widest_out, size)
        for dim, out_dim in ((widest + 1, widest_out), (widest, widest_out + 1)):
            order = orders.gemm_order(1000, 1000, dim, out_dim, size, 0, False, False)
            assert not orders.can_fuse(dim, out_dim, size) and order is not orders.GemmOrder.FUSED


def test_rows_ask_for_what_those_of_the_transpose_do() -> None:
    for sizes, load in (
        ((1000, 1000, 3000), launch.RowLoad.SHORT),
        ((1000, 1000, 3001), launch.RowLoad.FEW),
        ((5000, 5000, 15001), launch.RowLoad.NORMAL),
        ((1000, 2000, 3000), launch.RowLoad.SHORT),
        ((500, 2000, 3000), launch.RowLoad.FEW),
        ((500, 4224, 3000), launch.RowLoad.NORMAL),
        ((10, 10, 2560), launch.RowLoad.LONG),
        ((10, 11, 2560), launch.RowLoad.FEW),
        ((10, 10, 0), launch.RowLoad.SHORT),
    ):
        rows, cols, edges = sizes
        assert launch.row_load(rows, cols, edges) is launch.row_load(cols, rows, edges) is load


def test_what_tasks_ask_of_the_gpu() -> None:
    for sizes, load in (
        ((0, 0), launch.Load.FEWEST),
        ((527, 527 * 96 - 1), launch.Load.FEWEST),
        ((527, 527 * 96), launch.Load.FEW),
        ((528, 528 * 96 - 1), launch.Load.SHORT),
        ((2111, 2111 * 96), launch.Load.FEW),
        ((2112, 2112 * 96), launch.Load.SOME),
        ((4223, 4223 * 96 - 1), launch.Load.SHORT),
        ((4223, 4223 * 96), launch.Load.SOME),
        ((4224, 4224 * 64 - 1), launch.Load.TINY),
        ((4224, 4224 * 64), launch.Load.NORMAL),
        ((4224, 4224 * 1024), launch.Load.LONG),
    ):
        assert launch.load(*sizes) is load
        assert load.few == (sizes[0] < 4224)
        assert load.roomy == (load.few and load is not launch.Load.SOME)


@pytest.mark.parametrize("short", [launch.Load.SHORT, launch.Load.FEWEST], ids=str)
def test_few_short_tasks_share_out_the_features_of_a_row(short: launch.Load) -> None:
    some, normal = launch.Load.SOME, launch.Load.NORMAL
    for dim, size in ((64, 4), (64, 2), (128, 4), (128, 2)):
        assert (
            launch.spmm_window(dim, size, None, short).block_dim
            < launch.spmm_window(dim, size, None, normal).block_dim
        )
        assert launch.spmm_window(dim, size, 64, short) == launch.spmm_window(dim, size, 64, some)


def test_the_fewest_tasks_have_a_program_for_each_head() -> None:
    short, fewest = launch.Load.SHORT, launch.Load.FEWEST
    for heads, dim in ((4, 32), (8, 16), (2, 24)):
        for flags in itertools.product((False, True), repeat=3):  # dropout, backward, tilted
            assert launch.gat_window(heads, dim, *flags, fewest).rows == 1
            assert launch.gat_window(heads, dim, *flags, short).rows > 1
        for dropout in (False, True):
            assert launch.attention_window(heads, dim, 2, dropout, False, fewest).rows == 1
            assert launch.attention_window(heads, dim, 2, dropout, False, short).rows > 1
    assert launch.gat_window(8, 8, False, False, False, fewest).rows > 1  # heads of half a sector


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (1, 128), (4, 32)])
def test_backward_of_gat_has_all_registers_where_programs_are_few(heads: int, dim: int) -> None:
    def most(
        load: launch.Load, dropout: bool = False, back: bool = True, factors: bool = False
    ) -> int | None:
        return launch.gat_window(heads, dim, dropout, back, factors, load).registers

    assert most(launch.Load.FEW) is None and most(launch.Load.SHORT) is None
    assert most(launch.Load.SOME) == 168 and most(launch.Load.NORMAL) is not None
    assert most(launch.Load.FEW, dropout=True) == (None if heads > 1 else 168)
    assert most(launch.Load.FEW, back=False) is not None
    for load in (launch.Load.SOME, launch.Load.NORMAL):  # sums of factors of one head are worth them
        assert most(load, factors=True) == (168 if heads > 1 else None)


def test_steps_of_a_head_of_64_are_asked_for_early_in_training_and_where_programs_are_few() -> None:
    for load in launch.Load:
        inference, trained = (
            launch.gat_window(1, 64, False, False, tilted, load) for tilted in (False, True)
        )
        assert (inference.stages, trained.stages) == (5 if load.roomy else 3, 5)
        assert inference.registers == (168 if load.few else 128)
        assert trained.registers == (128 if load is launch.Load.TINY else None)
        assert launch.gat_window(1, 64, True, False, True, load).stages == 3  # dropout draws meanwhile


# of tiny windows, many others, fewer than the GPU holds, and fewer than half of that
LOADS = (launch.Load.TINY, launch.Load.NORMAL, launch.Load.SOME, launch.Load.FEW)


@pytest.mark.parametrize(
    ("heads", "dim", "tilted", "expected"),
    [
        (4, 32, False, (128, 128, 128, 144)),
        (4, 32, True, (168, 168, 168, 168)),
        (8, 16, False, (128, None, None, 168)),
        (8, 16, True, (None, None, None, None)),
        (1, 128, False, (128, 168, 192, 192)),
    ],
)
def test_registers_of_gat_forward(
    heads: int, dim: int, tilted: bool, expected: tuple[int | None, ...]
) -> None:
    found = [launch.gat_window(heads, dim, False, False, tilted, load) for load in LOADS]
    assert tuple(one.registers for one in found) == expected
    assert all(one.guess for one in found)


def test_narrow_heads_have_more_steps_on_their_way_where_programs_are_few() -> None:
    def stages(load: launch.Load, dim: int = 16, tilted: bool = False) -> int:
        return launch.gat_window(8, dim, False, False, tilted, load).stages

    assert tuple(map(stages, LOADS)) == (3, 2, 2, 5) and stages(launch.Load.LONG) == 3
    assert {stages(load, dim=8) for load in LOADS} == {3}
    assert {stages(load, tilted=True) for load in LOADS} == {5}


@pytest.mark.parametrize(
    ("tasks", "slots", "entries", "times"),
    [
        (1000, 501, 400_000, 2),
        (1000, 500, 400_000, 1),  # as long as the GPU is not full of windows, most have to be slices
        (5000, 0, 1_000_000, 1),
        (5000, 1, 1_000_000, 1.5),
        (5000, 1666, 1_000_000, 1.5),
        (5000, 1667, 1_000_000, 2),
        (5000, 2501, 1_000_000, 2),
        (5000, 1667, 5_120_000, 1),  # long ones
        (5000, 3, 100_000, 1),  # of a step or two
    ],
)
def test_slices_are_longer_where_groups_of_heads_bring_programs(
    tasks: int, slots: int, entries: int, times: float
) -> None:
    assert launch.slices(2, 32, tasks, slots, entries) == times
    alone = 1.25 if 2 * slots > tasks else 1
    assert launch.slices(1, 128, tasks, slots, entries) == alone
    assert launch.slices(1, 64, tasks, slots, entries) == 1


def test_slices_are_longer_where_blocks_of_features_bring_programs() -> None:
    few = launch.Load.FEW
    assert launch.spmm_slices(2, 2, 1000, 501, few) == 1.5
    assert launch.spmm_slices(2, 2, 1000, 500, few) == 1
    assert launch.spmm_slices(1, 2, 1000, 501, few) == 1
    assert launch.spmm_slices(2, 4, 1000, 501, few) == 1  # float32, which gains nothing
    for load in set(launch.Load) - {few}:  # short ones, or more than half of what the GPU holds
        assert launch.spmm_slices(2, 2, 1000, 501, load) == 1
    for dim in (128, 256):
        blocks = {load: launch.spmm_window(dim, 2, None, load).block_dim for load in launch.Load}
        assert blocks[launch.Load.FEW] == blocks[launch.Load.SOME] == 64
        assert blocks[launch.Load.NORMAL] == blocks[launch.Load.LONG] == 128


@pytest.mark.parametrize(
    ("rows", "edges", "entries", "dim", "walked"),
    [
        (2708, 10_556, 9_583, 16, True),  # Cora
        (2708, 10_556, 9_583, 64, False),
        (19_717, 88_648, 87_569, 64, False),  # PubMed, whose rows are short
        (18_333, 163_788, 162_406, 128, True),  # Coauthor CS
        (13_752, 491_722, 457_021, 128, True),  # Amazon Computers
        (10_312, 667_966, 493_929, 64, True),  # blogcatalog3
        (10_312, 667_966, 493_929, 128, False),
        (37_700, 578_006, 546_439, 128, True),  # github
        (81_306, 2_684_592, 1_341_115, 64, False),  # ego-twitter, whose windows share columns
        (262_144, 8_388_608, 6_812_816, 128, True),  # rmat
        (1_000_000, 12_099_910, 12_000_000, 128, False),  # uniform-1m-12m, which no cache holds
    ],
)
def test_aggregation_in_float32_walks_rows_where_that_was_faster(
    rows: int, edges: int, entries: int, dim: int, walked: bool
) -> None:
    sizes = (rows, rows, edges, entries)
    assert launch.prefers_rows(*sizes, dim, torch.float32, False) == walked
    small = rows < 4224 and dim == 16
    assert launch.prefers_rows(*sizes, dim, torch.float32, True) == small  # with a product in the kernel
    assert launch.prefers_rows(*sizes, dim, torch.float16, False) == small


def test_rows_of_aggregation_fill_the_gpu() -> None:
    def shape(rows: int, degree: int, dim: int = 64, long: int = 0) -> tuple[int, int]:
        config = launch.spmm_row(dim, None, rows, degree * rows, long)
        return config.step, config.rows

    assert shape(2000, 4) == shape(2000, 18, 256, 1) == shape(2000, 60, 256) == (32, 1)
    assert shape(2000, 18, 128) == shape(700, 34, 256) == (8, 1)  # none is long
    assert shape(700, 18, 128) == (32, 1)  # nor are there many programs to start
    assert shape(8000, 36) == (8, 1)
    assert shape(13_752, 36) == (8, 2)
    assert shape(18_333, 9) == shape(81_306, 33) == (8, 4)
    assert shape(326_186, 5) == (8, 8)  # rows of a step
    assert shape(326_186, 17) == (8, 4)
    assert shape(9_319, 492) == shape(232_965, 492) == (32, 1)  # rows of many steps
    assert shape(232_965, 127) == (8, 4)
    assert shape(232_965, 492, 128) == (16, 1)


def test_small_maps_are_taken_by_kernels() -> None:
    """Up to where PyTorch's were slower; each number of a row is in one step of one warp."""
    assert (
        orders.is_narrow(2708, 64, 64) and orders.is_narrow(8192, 64, 28) and orders.is_narrow(16384, 32, 64)
    )
    assert orders.is_narrow(2708, 1433, 16) and not orders.is_narrow(16384, 64, 28)
    assert not orders.is_narrow(2708, 65, 17) and not orders.is_narrow(2708, 64, 65)
    for num_rows, block_out in ((2708, 16), (8192, 32)):
        config = linear_shapes.linear(num_rows, 64, 28)
        assert (config.block_dim, config.step, config.warps, config.stages) == (64, 1, 1, 1)
        assert config.block_out == block_out
    assert linear_shapes.linear(2708, 65, 28).warps == 4
    assert linear_shapes.linear(2708, 41, 28, piecemeal=True).warps == 8
    assert (
        linear_shapes.linear_grad(2708, 28, 64).stages == 1 < linear_shapes.linear_grad(16384, 28, 64).stages
    )


def test_what_backward_knows_of_rows_has_four_numbers_a_thread() -> None:
    for dim, rows, warps in ((7, 16, 1), (8, 16, 1), (64, 2, 1), (128, 1, 1), (300, 1, 4)):
        config = launch.attention_delta(dim)
        assert (config.rows, config.warps) == (rows, warps)
        assert config.rows * config.block_dim == 128 * warps
