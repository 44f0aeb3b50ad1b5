"""The kernel over the edges of windows, for :mod:`tests.kernels.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from graphfuse.kernels import gat_listed
from graphfuse.kernels.gat_edges import gat_edge_kernel
from tests.kernels.aot_nodes import Case

_STRUCTURE = ("edge_ptr", "edge_tasks_ptr", "packed_ptr", "edge_row_ptr", "edge_copy_ptr", "ptr_ptr")
_STRUCTURE += ("tasks_ptr", "row_index_ptr", "column_ptr", "copy_ptr")


def listed_edges(heads: int, dim: int) -> Iterator[Case]:
    half = ("out_ptr", "sum_ptr", "bias_ptr", "a_src_ptr", "a_dst_ptr", "x_ptr")
    operands = dict.fromkeys(half, "*fp16") | dict.fromkeys(_STRUCTURE, "*i32")
    operands |= dict.fromkeys(("softmax_ptr", "partial_ptr", "slots_ptr"), "*fp32")
    operands |= {"row_mask_ptr": "*i16", "seed_ptr": "*i64"}
    for rate, loops in ((0.0, 0), (0.0, 2), (0.6, 2)):
        constants: dict[str, Any] = {"HEADS": heads, "DIM": dim, "GROUP": gat_listed.GROUP}
        constants |= {"EDGES": gat_listed.EDGES, "STAGES": gat_listed.STAGES, "X_STRIDE": heads * dim}
        constants |= {"SLOPE": 0.2, "DROPOUT": rate, "LOOPS": loops, "ACC": tl.float32}
        missing = ["tilt_ptr"]
        missing += [] if rate > 0 else ["edge_copy_ptr", "copy_ptr", "seed_ptr", "softmax_ptr"]
        missing += [] if loops else ["edge_ptr", "ptr_ptr", "bias_ptr", "sum_ptr"]
        given = {name: kind for name, kind in operands.items() if name not in missing}
        name = f"{gat_edge_kernel.__name__}[fp16-{heads}-{dim}-{rate}-{loops}]"
        yield Case(name, gat_edge_kernel, given, constants | dict.fromkeys(missing), 1)
