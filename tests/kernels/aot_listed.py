"""Kernels over the edges of windows, for :mod:`tests.kernels.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from graphfuse.kernels import additive_delta, gat_listed, launch
from graphfuse.kernels.gat_bwd_edges import gat_bwd_edge_kernel
from graphfuse.kernels.gat_edges import gat_edge_kernel
from tests.kernels.aot_nodes import Case

_STRUCTURE = (
    "edge_ptr",
    "edge_tasks_ptr",
    "packed_ptr",
    "edge_row_ptr",
    "edge_copy_ptr",
    "ptr_ptr",
    "only_ptr",
)
_STRUCTURE += ("tasks_ptr", "row_index_ptr", "column_ptr", "copy_ptr")


def listed_edges(heads: int, dim: int) -> Iterator[Case]:
    half = ("out_ptr", "tilt_ptr", "sum_ptr", "bias_ptr", "a_src_ptr", "a_dst_ptr", "x_ptr", "grad_ptr")
    operands = dict.fromkeys((*half, "dx_ptr", "d_a_src_ptr", "d_a_dst_ptr"), "*fp16")
    operands |= dict.fromkeys(("softmax_ptr", "partial_ptr", "slots_ptr", "stats_ptr"), "*fp32")
    operands |= dict.fromkeys(_STRUCTURE, "*i32") | {"row_mask_ptr": "*i16", "seed_ptr": "*i64"}
    rates = ((0.0, 0), (0.0, 2), (0.6, 2))
    for kernel, tilted, rate, loops in (
        *((gat_edge_kernel, tilted, *rate) for tilted in (False, True) for rate in rates),
        *((gat_bwd_edge_kernel, False, *rate) for rate in rates),
    ):
        constants: dict[str, Any] = {"HEADS": heads, "DIM": dim, "EDGES": gat_listed.EDGES}
        constants |= {
            "GROUP": gat_listed.FEATURES // dim,
            "STAGES": gat_listed.STAGES,
            "SLOPE": 0.2,
            "DROPOUT": rate,
            "LOOPS": loops,
        }
        constants |= {"X_STRIDE": heads * dim, "GRAD_STRIDE": heads * dim, "ACC": tl.float32}
        missing = [] if rate > 0 else ["edge_copy_ptr", "copy_ptr", "seed_ptr"]
        missing += ["only_ptr"] if loops else ["edge_ptr", "ptr_ptr", "bias_ptr", "sum_ptr"]
        missing += [] if tilted else ["tilt_ptr"]
        given = {name: kind for name, kind in operands.items() if name not in missing}
        name = f"{kernel.__name__}[fp16-{heads}-{dim}-{rate}-{loops}]" + ("-tilted" if tilted else "")
        yield Case(name, kernel, given, constants | dict.fromkeys(missing), 1)
    table, kernel = launch.whole_rows(dim), additive_delta.additive_delta_kernel
    constants = {"HEADS": heads, "DIM": dim, "BLOCK_DIM": table.block_dim, "ROWS": table.rows}
    constants |= {"GRAD_STRIDE": heads * dim, "X_STRIDE": heads * dim, "SLOPE": 0.2, "DROPOUT": 0.6}
    constants |= {"LISTED": True, "RECORDS": 0, "ACC": tl.float32, "seed_ptr": None}
    operands.pop("seed_ptr")
    yield Case(f"{kernel.__name__}[listed-fp16-{heads}-{dim}]", kernel, operands, constants, table.warps)
