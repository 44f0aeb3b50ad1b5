"""The kernels of sums over neighbours and of sampled products, for :mod:`tests.kernels.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from graphfuse.kernels import launch, merge_shapes, sddmm, spmm
from graphfuse.kernels.launch import Config, Load
from tests.kernels.aot_nodes import Case

SCALES = dict.fromkeys(("loop_weight_ptr", "row_scale_ptr", "col_scale_ptr"), "*fp32")


def aggregation(dtype: str, dim: int, out_dim: int | None) -> Iterator[Case]:
    size = 4 if dtype == "fp32" else 2
    pointer = f"*{dtype}"
    bare = {"x_ptr": pointer, "out_ptr": pointer}
    full = {**bare, **SCALES, "bias_ptr": pointer, "partial_ptr": "*fp32"}
    if out_dim is not None:
        bare["weight_ptr"] = pointer
        full |= {"weight_ptr": pointer, "aggregate_ptr": pointer}
    weights = {"edge_weight_ptr": pointer}
    without = {"edge_perm_ptr": None}  # no weights: no pointer

    def case(
        kernel: Any, config: Config, height: int, operands: dict[str, str], label: str, **more: Any
    ) -> Case:
        constants = {
            "X_STRIDE": dim,
            "X_DIM": dim,
            "DIM": dim,
            "OUT_DIM": out_dim or dim,
            "BLOCK_DIM": config.block_dim,
            "BLOCK_OUT": config.block_out,
            "COLUMNS": config.step,
            "EDGES": config.step,
            "SLOTS": 1,
            "ROWS": config.rows,
            "STAGES": config.stages,
            "LOOPS": int("loop_weight_ptr" in operands),
            "HEIGHT": height,
            "RELU": True,
            "ACC": tl.float32,
            "weight_stride_in": 1,
        }
        name = f"{kernel.__name__}[{dtype}-{dim}-{out_dim}-{label}]"
        constants |= {} if "edge_weight_ptr" in operands else without
        registers = config.registers if kernel is spmm._spmm_window_kernel else None
        return Case(name, kernel, operands, constants | more, config.warps, registers)

    def merge(height: int, label: str, longest: int = 128) -> Case:
        adds = merge_shapes.of_sums(height, config.block_dim, out_dim is not None, longest)
        how = {"SLOTS": adds.slots, "ROWS": adds.rows, "STAGES": adds.stages}
        warps = config._replace(warps=adds.warps)
        return case(spmm._spmm_merge_kernel, warps, height, full, label, **how)

    for load in Load:
        config = launch.spmm_window(dim, size, out_dim, load)
        yield case(spmm._spmm_window_kernel, config, 16, bare, f"{load.name}-bare")
        config = launch.spmm_window(dim, size, out_dim, load, scaled=True)
        yield case(spmm._spmm_window_kernel, config, 16, full, f"{load.name}-full")
    yield merge(16, "windows")
    shapes = {"few": (1, 1, 0), "hubs": (1, 1, 1), "many": (10**6, 10**6, 0), "long": (10**6, 10**9, 0)}
    for label, sizes in shapes.items():
        config = launch.spmm_row(dim, out_dim, *sizes)
        yield case(spmm._spmm_row_kernel, config, 1, bare, f"{label}-bare")
        yield case(spmm._spmm_row_kernel, config, 1, full | weights, f"{label}-weighted")
    yield merge(1, "rows")
    yield merge(1, "rows-few", 9)


def sampled_product(dtype: str, dim: int) -> Iterator[Case]:
    operands = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{dtype}")
    kernel, config = sddmm._sddmm_row_kernel, launch.sddmm_row(dim)
    constants = {
        "DIM": dim,
        "BLOCK_DIM": config.block_dim,
        "EDGES": config.step,
        "STAGES": config.stages,
        "PACKED": config.packed,
        "WITHOUT_LOOPS": True,
        "ACC": tl.float32,
    }
    yield Case(f"{kernel.__name__}[{dtype}-{dim}]", kernel, operands, constants, config.warps)
