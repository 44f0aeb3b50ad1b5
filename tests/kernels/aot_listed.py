"""Kernels over the edges of windows, for :mod:`tests.kernels.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from graphfuse.kernels import additive_bwd, gat_bwd_edges, gat_edges, launch
from graphfuse.kernels.gat_listed import config_of
from tests.kernels.aot_nodes import Case

_STRUCTURE = ("edge_ptr", "edge_tasks_ptr", "packed_ptr", "edge_row_ptr", "edge_copy_ptr", "ptr_ptr")
_STRUCTURE += ("tasks_ptr", "row_index_ptr", "column_ptr", "copy_ptr")


def listed_edges(heads: int, dim: int) -> Iterator[Case]:
    half = ("out_ptr", "tilt_ptr", "sum_ptr", "bias_ptr", "a_src_ptr", "a_dst_ptr", "x_ptr", "grad_ptr")
    operands = dict.fromkeys((*half, "dx_ptr", "d_a_src_ptr", "d_a_dst_ptr"), "*fp16")
    operands |= dict.fromkeys(("softmax_ptr", "partial_ptr", "slots_ptr", "stats_ptr"), "*fp32")
    operands |= dict.fromkeys(_STRUCTURE, "*i32") | {"row_mask_ptr": "*i16", "seed_ptr": "*i64"}
    forward, backward = gat_edges.gat_edge_kernel, gat_bwd_edges.gat_bwd_edge_kernel
    for kernel, tilted, rate, loops in (
        *((forward, tilted, rate, loops) for tilted in (False, True) for rate, loops in ((0.0, 0), (0.6, 2))),
        *((backward, False, rate, loops) for rate, loops in ((0.0, 0), (0.6, 2))),
    ):
        config = config_of(heads, dim, tilted, kernel is backward)
        constants: dict[str, Any] = {"HEADS": heads, "DIM": dim, "GROUP": config.group, "EDGES": config.step}
        constants |= {"STAGES": config.stages, "SLOPE": 0.2, "DROPOUT": rate, "LOOPS": loops}
        constants |= {"X_STRIDE": heads * dim, "GRAD_STRIDE": heads * dim, "ACC": tl.float32}
        missing = () if rate > 0 else ("edge_copy_ptr", "copy_ptr", "seed_ptr", "bias_ptr", "sum_ptr")
        missing += () if loops else ("edge_ptr", "ptr_ptr")
        missing += () if tilted else ("tilt_ptr",)
        given = {name: kind for name, kind in operands.items() if name not in missing}
        name = f"{kernel.__name__}[fp16-{heads}-{dim}-{rate}]" + ("-tilted" if tilted else "")
        given_constants = constants | dict.fromkeys(missing)
        yield Case(name, kernel, given, given_constants, 1, config.registers)
    table, kernel = launch.whole_rows(dim), additive_bwd._additive_delta_kernel
    constants = {"HEADS": heads, "DIM": dim, "BLOCK_DIM": table.block_dim, "ROWS": table.rows}
    constants |= {
        "GRAD_STRIDE": heads * dim,
        "SLOPE": 0.2,
        "LISTED": True,
        "ACC": tl.float32,
        "seed_ptr": None,
    }
    operands.pop("seed_ptr")
    yield Case(f"{kernel.__name__}[listed-fp16-{heads}-{dim}]", kernel, operands, constants, table.warps)
