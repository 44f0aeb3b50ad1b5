"""Cases for :mod:`tests.kernels.aot` of the kernels that see no edges, and of those that build a record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl

from graphfuse.formats import lay_kernels, listed_kernels, quick_kernels
from graphfuse.kernels import (
    additive,
    additive_delta,
    attention,
    attention_bwd,
    attention_bwd_merge,
    columns,
    gate,
    gathered,
    launch,
    linear,
    linear_shapes,
    logits,
    merge_shapes,
    residual_norm,
    stacked,
    unit_rows,
)

MANY_ROWS = 1 << 20  # with which kernels that walk rows once have their larger tile


class Case(NamedTuple):
    name: str
    kernel: Any
    operands: dict[str, Any]  # pointers that are given, and their types; the others are None
    constants: dict[str, Any]
    warps: int
    registers: int | None = None


def linear_map(dtype: str, left: int, right: int) -> Iterator[Case]:
    pointer, config = f"*{dtype}", linear_shapes.linear(4096, right, left, dtype == "fp16" and right % 2 == 1)
    operands = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), pointer)
    constants = {
        "DIM": right,
        "OUT_DIM": left,
        "ROWS": config.rows,
        "PARTS": config.step,
        "BLOCK_DIM": config.block_dim,
        "BLOCK_OUT": config.block_out,
        "STAGES": config.stages,
        "ACC": tl.float32,
        "weight_stride_in": 1,
    }
    name = f"[{dtype}-{left}-{right}]"
    yield Case(
        linear._linear_kernel.__name__ + name, linear._linear_kernel, operands, constants, config.warps
    )
    config = linear_shapes.linear_grad(4096, left, right)
    shape = {"LEFT": left, "RIGHT": right, "ACC": tl.float32}
    operands = dict.fromkeys(("left_ptr", "right_ptr", "grad_ptr"), pointer) | {"partial_ptr": "*fp32"}
    constants = {
        "BLOCK_LEFT": config.block_dim,
        "BLOCK_RIGHT": config.block_out,
        "ROWS": config.step,
        "STAGES": config.stages,
        "SUMMED": False,
    }
    kernel, merge = linear._linear_grad_kernel, linear._linear_grad_merge_kernel
    yield Case(kernel.__name__ + name, kernel, operands, shape | constants, config.warps)
    del operands["grad_ptr"]
    yield Case(
        f"{kernel.__name__}{name}-summed",
        kernel,
        operands,
        shape | constants | {"SUMMED": True},
        config.warps,
    )
    operands = {"weight_ptr": pointer, "bias_ptr": pointer, "partial_ptr": "*fp32"}
    constants = dict(
        zip(("BLOCK", "SPLITS"), linear_shapes.linear_grad_merge(left * (right + 1)), strict=True)
    )
    yield Case(merge.__name__ + name, merge, operands, shape | constants, 4)


def normalised(dtype: str, dim: int) -> Iterator[Case]:
    names = ("scaled_ptr", "x_ptr", "factor_ptr", "dx_ptr", "d_scaled_ptr", "d_unit_ptr", "more_ptr")
    operands = dict.fromkeys(names, f"*{dtype}") | {"inverse_ptr": "*fp32", "partial_ptr": "*fp32"}
    constants = {"DIM": dim, "LEAST": 1e-12, "ACC": tl.float32}
    constants |= dict.fromkeys(("X_STRIDE", "SCALED_STRIDE", "UNIT_STRIDE"), dim)
    for kernel, config in (
        (unit_rows._unit_rows_kernel, launch.rows_at_once(dim, MANY_ROWS)),
        (unit_rows._unit_rows_bwd_kernel, launch.whole_rows(dim)),
    ):
        tile, name = {"BLOCK_DIM": config.block_dim, "ROWS": config.rows}, f"[{dtype}-{dim}]"
        yield Case(kernel.__name__ + name, kernel, operands, constants | tile, config.warps)


def terms_of_nodes(dtype: str, heads: int, dim: int) -> Iterator[Case]:
    blocks = launch.power_of_two(heads), launch.power_of_two(dim)
    width, name = blocks[0] * blocks[1], f"[{dtype}-{heads}-{dim}]"
    names = (
        "of_left_ptr",
        "of_right_ptr",
        "x_ptr",
        "left_ptr",
        "right_ptr",
        "dx_ptr",
        "d_left_ptr",
        "d_right_ptr",
        "more_ptr",
    )
    operands = dict.fromkeys(names, f"*{dtype}") | {"partial_ptr": "*fp32"}
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "BLOCK_HEADS": blocks[0],
        "BLOCK_DIM": blocks[1],
        "ACC": tl.float32,
    }
    for kernel, config in (
        (logits._logits_kernel, launch.rows_at_once(width, MANY_ROWS)),
        (logits._logits_bwd_kernel, launch.whole_rows(width)),
    ):
        tile = {"ROWS": config.rows, "X_STRIDE": heads * dim}
        yield Case(kernel.__name__ + name, kernel, operands, constants | tile, config.warps)


def copied_and_summed(dtype: str, heads: int, dim: int) -> Iterator[Case]:
    pointer, config, wide = f"*{dtype}", launch.whole_rows(dim), "*fp32"
    shape = {"HEADS": heads, "DIM": dim, "BLOCK_DIM": config.block_dim, "ACC": tl.float32}
    strides = {"X_STRIDE": heads * dim, "GRAD_STRIDE": heads * dim, "WIDTH": -(-dim // 8) * 8}
    strides["COPY_STRIDE"] = 4 * heads * dim
    edges = {"EDGE_DIM": 0, "BLOCK_EDGE": 1, "SLOPE": 0.2}
    names = ("out_ptr", "x_ptr", "grad_ptr", "copy_ptr", "tilt_ptr", "a_dst_ptr", "a_src_ptr", "d_a_dst_ptr")
    operands = dict.fromkeys(names, pointer)
    operands |= dict.fromkeys(("scale_ptr", "stats_ptr", "softmax_ptr"), wide)
    operands |= {"seed_ptr": "*i64"} if dtype == "fp16" else {}
    for kernel, found in (
        (gathered._gathered_kernel, launch.rows_at_once(dim, MANY_ROWS)),
        (additive_delta.additive_delta_kernel, config),
        (attention_bwd._attention_delta_kernel, launch.attention_delta(dim) if dtype == "fp32" else config),
    ):
        name, constants = f"{kernel.__name__}[{dtype}-{heads}-{dim}]", shape | strides | edges
        constants |= {"LISTED": False, "RECORDS": 0, "DROPOUT": 0.0, "ROWS": found.rows}
        yield Case(name, kernel, operands, constants, found.warps)
        group = launch.gat_window(heads, dim, False, True, False, launch.Load.NORMAL).rows
        if kernel is additive_delta.additive_delta_kernel and dtype != "fp32" and heads % group == 0:
            unseeded = {key: value for key, value in operands.items() if key != "seed_ptr"}
            yield Case(f"{name}-records", kernel, unseeded, constants | {"RECORDS": group}, found.warps)


def gated_skip(dtype: str, dim: int) -> Iterator[Case]:
    config, name = launch.whole_rows(dim), f"[{dtype}-{dim}]"
    tensors = ("y_ptr", "do_ptr", "ds_ptr", "grad_ptr", "out_ptr", "skip_ptr", "weight_ptr")
    operands = dict.fromkeys((*tensors, "dw_ptr"), f"*{dtype}") | {"partial_ptr": "*fp32"}
    constants = {"DIM": dim, "BLOCK_DIM": config.block_dim, "ROWS": config.rows, "ACC": tl.float32}
    for kernel in (gate._gate_kernel, gate._gate_bwd_kernel):
        yield Case(kernel.__name__ + name, kernel, operands, constants, config.warps)


def stacked_parameters(dtype: str) -> Iterator[Case]:
    kernel, order = stacked._stacked_kernel, ("first", "second", "third", "fourth")
    for maps, turned in ((1, True), (2, False), (4, True)):
        tensors = ("weight_ptr", "bias_ptr", *(f"{nth}_ptr" for nth in order[:maps]))
        operands = dict.fromkeys((*tensors, *(f"{nth}_bias_ptr" for nth in order[:maps])), f"*{dtype}")
        missing = [f"{nth}{kind}_ptr" for nth in order[maps:] for kind in ("", "_bias")]
        constants = dict.fromkeys(missing) | {"MAPS": maps, "TURNED": turned, "BLOCK": stacked._BLOCK}
        yield Case(f"{kernel.__name__}[{dtype}-{maps}-{turned}]", kernel, operands, constants, 4)


def columns_of(dtype: str, dim: int) -> Iterator[Case]:
    width, name = min(dim, columns.MAX_BLOCK), f"[{dtype}-{dim}]"
    operands = dict.fromkeys(("y_ptr", "x_ptr", "bias_ptr"), f"*{dtype}") | {"partial_ptr": "*fp32"}
    for kernel, config in (
        (columns._bias_kernel, launch.rows_at_once(width, MANY_ROWS)),
        (columns._column_sum_kernel, launch.whole_rows(width)),
    ):
        constants = {"DIM": dim, "BLOCK_DIM": config.block_dim, "ROWS": config.rows, "ACC": tl.float32}
        yield Case(kernel.__name__ + name, kernel, operands, constants, config.warps)
    at_once = columns._sum_plan(0, (torch.float32,), columns.AT_ONCE, dim, dim).main
    constants = dict(zip(("DIM", "BLOCK_DIM", "ROWS", "ACC"), at_once._rest[3:], strict=True))
    kernel, warps = at_once._kernel, at_once._options["num_warps"]
    yield Case(f"{kernel.__name__}{name}-at-once", kernel, operands, constants, warps)
    for num_slices in (20, columns.MERGE_SLICES):
        merge = columns.slices_merge(num_slices, dim, tl.float32)
        operands = {"out_ptr": f"*{dtype}", "partial_ptr": "*fp32"}
        constants = dict(zip(("WIDTH", "BLOCK", "SLICES", "ACC"), merge._rest[1:], strict=True))
        name = f"[{dtype}-{dim}-{num_slices}]"
        kernel, warps = merge._kernel, merge._options["num_warps"]
        yield Case(kernel.__name__ + name, kernel, operands, constants, warps)


def normed_residual(dtype: str, dim: int) -> Iterator[Case]:
    kernel, config = residual_norm._residual_norm_kernel, launch.whole_rows(dim)
    operands = dict.fromkeys(("out_ptr", "x_ptr", "y_ptr", "weight_ptr", "bias_ptr"), f"*{dtype}")
    constants = {
        "DIM": dim,
        "BLOCK_DIM": config.block_dim,
        "ROWS": config.rows,
        "EPS": 1e-5,
        "ACC": tl.float32,
    }
    for norm, more in (
        ("layer", {}),
        ("batch", dict.fromkeys(("mean_ptr", "var_ptr", "offset_ptr"), f"*{dtype}")),
    ):
        name = f"{kernel.__name__}[{dtype}-{dim}-{norm}]"
        yield Case(name, kernel, operands | more, constants, config.warps)


def joined_slices(dtype: str, heads: int, dim: int, edge_dim: int = 0) -> Iterator[Case]:
    """The merges of attention's slices, and those of GAT and GATv2 where edges have no features."""
    pointer = f"*{dtype}"
    operands = dict.fromkeys(("out_ptr", "softmax_ptr", "first_ptr", "second_ptr"), pointer)
    operands |= dict.fromkeys(("edge_sum_ptr", "third_ptr"), pointer) if edge_dim > 0 else {}
    operands |= {**dict.fromkeys(("partial_ptr", "slots_ptr"), "*fp32"), "merges_ptr": "*i32"}
    constants = {
        "OUT_STRIDE": heads * dim,
        "HEADS": heads,
        "DIM": dim,
        "EDGE_DIM": edge_dim,
        "DROPOUT": 0.5,
        "ACC": tl.float32,
    }
    backward = attention_bwd_merge.attention_bwd_merge_kernel
    kernels: list[tuple[Any, dict[str, str], str]] = [(attention._attention_merge_kernel, {}, "")]
    kernels += [(backward, {}, "")]
    if edge_dim == 0:
        of_bias, of_tilt = {"sum_ptr": pointer, "bias_ptr": pointer}, {"tilt_ptr": pointer}
        kernels += [(additive._additive_merge_kernel, of_bias, "")]
        kernels += [(additive._additive_merge_kernel, of_tilt, "-tilted")]
        kernels += [(backward, {"third_ptr": pointer}, "-gat")]
    for kernel, more, label in kernels:
        given, shape = operands | more, constants
        if label == "-gat":
            given, shape = {k: v for k, v in given.items() if k != "second_ptr"}, shape | {"EDGE_DIM": 1}
        tilted = "tilt_ptr" in more
        merge = merge_shapes.heads_of(heads, dim, shape["EDGE_DIM"], tilted)
        blocks = dict(zip(("BLOCK_HEADS", "BLOCK_DIM", "BLOCK_EDGE"), merge, strict=True))
        width = blocks["BLOCK_HEADS"] * blocks["BLOCK_DIM"]
        for height in (1, 16):
            adds = merge_shapes.of_gradients(height, width)
            if kernel is not backward:
                adds = merge_shapes.of_softmax(height, width * (1 + tilted), tilted)
            how = {"HEIGHT": height, "SLOTS": adds.slots, "ROWS": adds.rows, "STAGES": adds.stages}
            name = f"{kernel.__name__}[{dtype}-{heads}-{dim}-{edge_dim}-{height}{label}]"
            yield Case(name, kernel, given, shape | blocks | how, adds.warps)


def building() -> Iterator[Case]:
    longs = ("table_ptr", "edge_ptr", "key_ptr", "mixed_ptr", "count_ptr", "loops_ptr")
    shorts = ("mask_ptr", "back_mask_ptr", "masks_ptr")
    pointers = dict.fromkeys(longs, "*i64") | dict.fromkeys(shorts, "*i16")
    constants = {name: getattr(quick_kernels, name) for name in ("BLOCK", "KEYS", "SPAN")}
    constants |= {"COLUMNS": lay_kernels.COLUMNS, "ROWS": lay_kernels.ROWS, "COUNTED": True, "RANKED": True}
    orders = ("order_ptr", "mixed_order_ptr", "window_edges_ptr", "row_edges_ptr")
    graph = ("windows_ptr", "masks_ptr", "rows_ptr")
    without = {
        "keys_kernel": ((), orders[:1]),
        "sort_kernel": ((), orders[:2]),
        "sums_kernel": ((), ("key_ptr", "RANKED")),
        "lay_kernel": (graph, (orders[0], *orders[2:])),
    }
    for name, kernel in (vars(quick_kernels) | vars(lay_kernels) | vars(listed_kernels)).items():
        for absent in without.get(name, ((),)) if name.endswith("_kernel") else ():
            args = kernel.arg_names
            given: dict[str, Any] = {
                arg: pointers.get(arg, "*i32" if arg.endswith("_ptr") else "i32") for arg in args
            }
            if name == "lay_kernel":  # headers of windows and rows, or of the order of their edges
                first, second = (4, 2) if "windows_ptr" in absent else (10, 8)
                given |= {"first": ("i32",) * (12 + 2 * first), "second": ("i32",) * (12 + 2 * second)}
            if name == "list_kernel":
                given["header"] = ("i32",) * (12 + 2 * 8)
            warps = 1 if "COLUMNS" in args else 4
            own = dict.fromkeys(absent) | ({"SPAN": quick_kernels.RUN} if "RANKED" in absent else {})
            yield Case(f"{name}{absent}", kernel, given, constants | own, warps)
