"""Compiles every kernel for GPUs that are not there, and reports registers, spills and shared memory.

Run as a script, without TRITON_INTERPRET, naming targets: prints one JSON object per kernel and target. Of
``sm_90/3`` every third kernel, one of each function and, up to 49, what may spill or whose products count.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphfuse.kernels import (
    additive_rows,
    attention_bwd_rows,
    attention_bwd_windows,
    attention_rows,
    attention_windows,
    gat_bwd_windows,
    gat_windows,
    gatv2_rows,
    launch,
    orders,
)
from graphfuse.kernels.additive import gathered_together
from graphfuse.kernels.barriers import of_one_warp
from graphfuse.kernels.launch import Config, RowLoad
from tests.kernels.addresses import beyond_32_bits
from tests.kernels.aot_limits import PRODUCTS, SHARED_LIMIT, SPILLED, SPILLED_MORE
from tests.kernels.aot_listed import listed_edges
from tests.kernels.aot_nodes import (
    Case,
    building,
    columns_of,
    copied_and_summed,
    gated_skip,
    joined_slices,
    linear_map,
    normalised,
    normed_residual,
    stacked_parameters,
    terms_of_nodes,
)
from tests.kernels.aot_sums import aggregation, sampled_product
from tests.kernels.compiled import dump, usage

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BUILDING = "graphfuse.formats."  # whose kernels are launched one after the other
ALIGNED = [["tt.divisibility", 16]]  # what the JIT infers for pointers of the allocator
WALKED = ("tasks_ptr", "column_ptr", "ptr_ptr", "merges_ptr", "edge_perm_ptr")
WALKED += ("other_tasks_ptr", "other_column_ptr", "other_ptr_ptr")
FLOATS = ("softmax_ptr", "partial_ptr", "other_partial_ptr", "slots_ptr", "stats_ptr")
INDICES = dict.fromkeys(WALKED, "*i32") | {"row_mask_ptr": "*i16"}
SIDES = ("own", "own_value", "other", "other_value")
COUNTS = ("tasks", "other_tasks", "rows", "cols", "loops", "merges", "grads", "splits", "slices")
NUMBERS = dict.fromkeys(("length", "split", "other_split", "weight_stride_out", "width", "dim"), "i32")
NUMBERS |= dict.fromkeys((f"num_{name}" for name in COUNTS), "i32")
STRIDED = (*("x", "y", "a", "b", "left", "right", "grad", "out", "skip", "q", "k", "v"), *SIDES)
STRIDES = dict.fromkeys((f"{name}_stride" for name in STRIDED), "i32")
ROW_STRIDES = tuple(
    f"{name.upper()}_STRIDE" for name in ("out", "q", "k", "v", *SIDES, "x", "grad", "src", "dst")
)


def compiled(case: Case, target: str) -> Any:
    """The kernel as Triton has compiled it, which asks a driver of its target, and there is none."""
    names = case.kernel.arg_names
    types = {**INDICES, **NUMBERS, **STRIDES, **case.operands}
    given = {name for name in names if name in types and name not in case.constants}
    signature = {name: types[name] if name in given else "constexpr" for name in names}
    constants = {name: case.constants.get(name) for name in names if name not in given}
    attrs = {
        (i,): ALIGNED
        for i, name in enumerate(names)
        if name in given and (types[name][0] == "*" or name in STRIDES)
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": case.warps, "enable_fp_fusion": True}
    if case.registers is not None and TARGETS[target].backend == "cuda":
        options["maxnreg"] = case.registers
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: TARGETS[target]))
    building = case.kernel.__module__.startswith(BUILDING)
    with contextlib.nullcontext() if building else of_one_warp(case.constants.get("PACKED", 1)):
        return triton.compile(source, target=TARGETS[target], options=options)


def compile_case(case: Case, target: str) -> dict[str, Any]:
    kernel, building = compiled(case, target), case.kernel.__module__.startswith(BUILDING)
    report = {"function": case.kernel.__name__, "too_narrow": beyond_32_bits(kernel.asm["ttir"])}
    report["may_spill"] = SPILLED_MORE.get(target, {}).get(case.name.replace("[inference-", "["), SPILLED)
    report |= {"shared": kernel.metadata.shared, "limit": SHARED_LIMIT[target]}
    report |= {"block": kernel.metadata.num_warps, "packed": case.constants.get("PACKED", 1)}
    if case.constants.get("GROUP", 1) > 1 and "ptx" in kernel.asm:
        report["products"] = dump(kernel, "-sass").count("HMMA.")
    ptx, report["waits_wanted"] = kernel.asm.get("ptx", ""), target in ("sm_90", "sm_100") and not building
    report["waits_for_all"] = case.warps == 1 and not building and "bar.sync" in ptx
    report["waits"] = "griddepcontrol.wait" in ptx
    return {"kernel": case.name, "target": target, "warps": case.warps, **report, **usage(kernel, target)}


def sparse_attention(dtype: str, heads: int, dim: int, edge_dim: int = 0) -> Iterator[Case]:
    pointer = f"*{dtype}"
    floats = dict.fromkeys(FLOATS, "*fp32")
    names = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "grad_ptr", "own_ptr", "own_value_ptr", "other_ptr")
    results = ("first_ptr", "second_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "d_copy_ptr")
    operands = dict.fromkeys((*names, "other_value_ptr", *results), pointer) | floats
    edges = ("edge_query_ptr", "edge_value_ptr", "edge_attr_ptr", "edge_sum_ptr", "d_edge_query_ptr")
    operands |= dict.fromkeys((*edges, "d_edge_attr_ptr"), pointer) if edge_dim > 0 else {}
    dropout = {"seed_ptr": "*i64", "copy_ptr": "*i32", "other_copy_ptr": "*i32"}
    size = 4 if dtype == "fp32" else 2
    kernels = []
    forward, backward = (
        dict.fromkeys(launch.attention_row(heads, dim, size, load, back, edge_dim) for load in RowLoad)
        for back in (False, True)
    )
    kernels += [(attention_rows.attention_row_kernel, rows, False) for rows in forward]
    for rows in backward:
        kernels += [(attention_bwd_rows.attention_bwd_row_kernel, rows, side) for side in (False, True)]
        if dtype == "fp32" and edge_dim == 0:
            kernels += [(attention_bwd_rows.attention_bwd_alone_kernel, rows, False)]
    plain, with_loops = ((0.0, False), (0.6, False)), ((0.0, True), (0.6, True))
    for rate, loops in (*plain, *(with_loops if (heads, dim, edge_dim) == (1, 128, 0) else ())):
        windows = (
            *(
                (attention_windows.attention_window_kernel, config, False)
                for config in dict.fromkeys(
                    launch.attention_window(heads, dim, 2, rate > 0, loops, load) for load in launch.Load
                )
            ),
            *(
                (attention_bwd_windows.attention_bwd_window_kernel, config, transposed)
                for config in dict.fromkeys(
                    launch.attention_bwd_window(heads, dim, rate > 0, loops, load) for load in launch.Load
                )
                for transposed in (False, True)
            ),
        )
        for kernel, config, transposed in (*kernels, *(windows if dtype != "fp32" and edge_dim == 0 else ())):
            constants = {
                "TRANSPOSED": transposed,
                "HEADS": heads,
                "DIM": dim,
                "EDGE_DIM": edge_dim,
                "BLOCK_HEADS": config.rows,
                "GROUP": config.rows,
                "BLOCK_DIM": config.block_dim,
                "BLOCK_EDGE": config.block_out,
                "COLUMNS": config.step,
                "EDGES": config.step,
                "STAGES": config.stages,
                "PACKED": config.packed,
                "WARPS": config.warps,
                "SCALE": 0.125,
                "DROPOUT": rate,
                "LOOPS": int(loops) if "window" in kernel.__name__ else loops,
                "GUESS": config.guess,
                "ACC": tl.float32,
                "EDGE_STRIDE": edge_dim,
            }
            constants |= dict.fromkeys(ROW_STRIDES, heads * dim)
            name = f"{kernel.__name__}[{dtype}-{heads}-{dim}-{edge_dim}-{rate}-{loops}-{transposed}]"
            name += f"-{config.rows}-{config.step}" if "window" in kernel.__name__ else ""
            given = operands | dropout if rate > 0 else operands
            constants |= {} if rate > 0 else dict.fromkeys(dropout)
            constants |= {} if edge_dim > 0 else {"edge_perm_ptr": None}
            given = given | ({"key_scale_ptr": "*fp32"} if loops else {})
            exact = dtype == "fp32" and edge_dim == 0 and not transposed
            given = given | ({"own_out_ptr": pointer} if exact else {})
            constants |= {"ptr_ptr": None} if "window" in kernel.__name__ and not loops else {}
            yield Case(name, kernel, given, constants, config.warps, config.registers)


def normed_attention(dim: int) -> Iterator[Case]:
    """Attention of one head with a residual and a norm, of inference, and what joins its slices."""
    more = dict.fromkeys(("x_ptr", "offset_ptr", "weight_ptr", "bias_ptr"), "*fp16")
    of_columns = dict.fromkeys(("mean_ptr", "var_ptr"), "*fp16")
    given = [
        *(one for one in sparse_attention("fp16", 1, dim) if "attention_window_kernel" in one.name),
        *(one for one in joined_slices("fp16", 1, dim) if "_attention_merge_kernel" in one.name),
    ]
    for case in given:
        if case.constants["DROPOUT"] == 0 or "merge" in case.name:
            constants = case.constants | {"R_STRIDE": dim, "EPS": 1e-5}
            for norm, numbers in (("batch", of_columns), ("layer", {})):
                name = case.name.replace("[", f"[{norm}-", 1)
                operands = case.operands | more | numbers
                yield without_softmax(case._replace(name=name, operands=operands, constants=constants))


def attention_plus_rows() -> Iterator[Case]:
    """Forward kernels of attention that return it twice, once plus rows or not, and what joins slices."""
    both = ("x_ptr", "sum_ptr")
    for dtype, heads, dim, added in (("fp32", 8, 8, both), ("fp16", 4, 32, both), ("fp16", 1, 64, both[1:])):
        more = dict.fromkeys(added, f"*{dtype}")
        for case in (*sparse_attention(dtype, heads, dim), *joined_slices(dtype, heads, dim)):
            if "_bwd_" not in case.name and "_additive_" not in case.name:
                constants = case.constants | {"R_STRIDE": 4 * heads * dim * ("x_ptr" in more), "EPS": 0.0}
                name, operands = case.name.replace("[", "[sum-", 1), case.operands | more
                yield case._replace(name=name, operands=operands, constants=constants)


def without_softmax(case: Case) -> Case:
    """``case`` as it runs where no backward pass follows."""
    operands = {name: kind for name, kind in case.operands.items() if name != "softmax_ptr"}
    return case._replace(operands=operands, constants=case.constants | {"softmax_ptr": None})


def inference() -> Iterator[Case]:
    """Forward kernels of attention that keep no softmax."""
    given = [
        *(one for heads, dim in ((1, 64), (8, 16)) for one in sparse_attention("fp16", heads, dim)),
        *(one for one in additive_attention("fp16", 4, 32) if "untilted" in one.name),
    ]
    for case in given:
        if case.constants["DROPOUT"] == 0 and "bwd" not in case.name:
            yield without_softmax(case._replace(name=case.name.replace("[", "[inference-", 1)))
            if "gat_window_kernel" in case.name:
                constants = case.constants | {"LOOPS": 0}
                name = case.name.replace("[", "[inference-without-loops-", 1)
                yield without_softmax(case._replace(name=name, constants=constants))


def additive_attention(dtype: str, heads: int, dim: int) -> Iterator[Case]:
    pointer = f"*{dtype}"
    floats = dict.fromkeys(FLOATS, "*fp32")
    names = ("out_ptr", "tilt_ptr", "own_ptr", "other_ptr", "x_ptr", "a_src_ptr", "a_dst_ptr", "grad_ptr")
    names += ("dx_ptr", "d_a_src_ptr", "x_src_ptr", "x_dst_ptr", "att_ptr", "first_ptr", "d_att_ptr")
    names += ("d_dst_ptr", "d_src_ptr")
    operands = dict.fromkeys(names, pointer) | floats
    operands |= {"own_out_ptr": pointer} if dtype == "fp32" else {}
    edges = dict.fromkeys(("edge_ptr", "loop_edge_ptr", "d_edge_ptr", "d_loop_edge_ptr"), pointer)
    edges |= {"sum_ptr": pointer, "bias_ptr": pointer}
    dropout = {"seed_ptr": "*i64", "copy_ptr": "*i32", "other_copy_ptr": "*i32"}
    size = 4 if dtype == "fp32" else 2
    kernels = list[tuple[Any, Config, bool, dict[str, Any]]]()
    for kernel, back in (
        (additive_rows.additive_row_kernel, False),
        (additive_rows.gat_bwd_row_kernel, True),
    ):
        configs = dict.fromkeys(launch.gat_row(heads, dim, size, load, back) for load in RowLoad)
        kernels += [(kernel, config, False, {}) for config in configs]
    for rate, with_edges in ((0.0, False), (0.6, True)):
        untilted, factors = {"tilt_ptr": None}, {"SPLIT": True}
        windows = [
            (kernel, config, False, more)
            for kernel, backward, tilted, more in (
                (gat_windows.gat_window_kernel, False, True, {}),
                (gat_windows.gat_window_kernel, False, False, untilted),
                (gat_bwd_windows.gat_bwd_window_kernel, True, False, {}),
                (gat_bwd_windows.gat_bwd_window_kernel, True, True, factors),
            )
            for load in launch.Load
            for config in (launch.gat_window(heads, dim, rate > 0, backward, tilted, load),)
            if more is not factors or (heads % config.rows == 0 and load is not launch.Load.TINY)
        ]
        rows, sides = [], ({"TRANSPOSED": False}, {"TRANSPOSED": True, "own_out_ptr": None})
        for load in RowLoad:
            forward, config = (launch.gatv2_row(heads, dim, size, load, b) for b in (False, True))
            rows += [(additive_rows.additive_row_kernel, forward, True, {"tilt_ptr": None})]
            rows += [(gatv2_rows.gatv2_bwd_row_kernel, config, True, side) for side in sides]
            rows += [(gatv2_rows.gatv2_bwd_alone_kernel, config, True, {})] if dtype == "fp32" else []
        for kernel, config, v2, more in (*kernels, *rows, *(windows if dtype != "fp32" else ())):
            constants = {
                "HEADS": heads,
                "DIM": dim,
                "BLOCK_HEADS": config.rows,
                "GROUP": config.rows,
                "PAIR": gathered_together(config),
                "SPLIT": False,
                "BLOCK_DIM": config.block_dim,
                "COLUMNS": config.step,
                "ROWS": 2 if dtype == "fp32" and not v2 else 1,
                "EDGES": config.step,
                "STAGES": config.stages,
                "PACKED": config.packed,
                "WARPS": config.warps,
                "GUESS": config.guess,
                "SLOPE": 0.2,
                "DROPOUT": rate,
                "LOOPS": 1 if "window" in kernel.__name__ else True,
                "V2": v2,
                "ACC": tl.float32,
            }
            constants |= dict.fromkeys(ROW_STRIDES, heads * dim) | more
            constants |= {} if rate > 0 else dict.fromkeys(dropout)
            constants |= {} if with_edges else dict.fromkeys((*edges, "edge_perm_ptr"))
            given = operands | (edges if with_edges else {}) | (dropout if rate > 0 else {})
            given = {name: kind for name, kind in given.items() if name not in more}
            name = f"{kernel.__name__}[{dtype}-{heads}-{dim}-{rate}-{v2}-{more.get('TRANSPOSED')}]"
            name += "-factors" if "SPLIT" in more else "-untilted" if "tilt_ptr" in more and not v2 else ""
            if "window" in kernel.__name__:
                # a head alone in a program, where other launch rows have several
                name += "-apart" if heads > 1 == config.rows and dim <= 32 else ""
                name += f"-{config.step}-{config.stages}"
            yield Case(name, kernel, given, constants, config.warps, config.registers)


def terms_of_float32() -> Iterator[Case]:
    """GAT's windows where terms of scores are float32 and x is half precision, as under autocast."""
    wide = dict.fromkeys(("a_src_ptr", "a_dst_ptr", "out_ptr", "tilt_ptr"), "*fp32")
    for case in additive_attention("fp16", 4, 32):
        if "gat_window" in case.name and "tilt_ptr" in case.operands and case.constants["DROPOUT"] == 0:
            name = case.name.replace("[", "[terms-", 1)
            yield case._replace(name=name, operands=case.operands | wide)


def reordered() -> Iterator[Case]:
    """Window kernels, and those that add slices, of windows whose rows stand in an order of their own."""
    given = (
        *(case for case in aggregation("fp16", 64, None) if "[fp16-64-None-NORMAL" in case.name),
        *(case for case in aggregation("fp32", 64, 64) if case.name.endswith("-windows]")),
        *(case for case in sparse_attention("fp16", 1, 64) if case.constants["DROPOUT"] == 0),
        *additive_attention("fp16", 1, 64),
        *(case for case in joined_slices("fp16", 1, 64) if case.constants["HEIGHT"] == 16),
    )
    for case in given:
        if "row_index_ptr" in case.kernel.arg_names:
            name = case.name.replace("[", "[reordered-", 1)
            yield case._replace(name=name, operands=case.operands | {"row_index_ptr": "*i32"})


def cases() -> Iterator[Case]:
    """Every kernel at its smallest and largest launch row; bfloat16 compiles to the code of float16."""
    found = set()
    for case in _given():
        taken = case.kernel.arg_names  # what it takes of what there is
        operands, constants = (
            tuple((name, str(given[name])) for name in taken if name in given)
            for given in (case.operands, case.constants)
        )
        same = (case.kernel, operands, constants, case.warps, case.registers)
        if same not in found:  # several loads share a configuration
            found.add(same)
            yield case


def _given() -> Iterator[Case]:
    yield from building()
    for dtype, size in (("fp16", 2), ("fp32", 4)):
        widths = [(1, None), (64, None), (1433, None), (16, 16), (64, 64), orders.MAX_FUSED[size]]
        for dim, out_dim in widths:
            yield from aggregation(dtype, dim, out_dim)
        for dim in (7, 1433):
            yield from sampled_product(dtype, dim)
        for heads, dim in ((1, 64), (1, 128), (1, 256), (4, 32), (8, 16), (3, 100)):
            yield from sparse_attention(dtype, heads, dim)
        for heads, dim in ((1, 64), (1, 128), (4, 32), (8, 8), (8, 16), (3, 100)):
            yield from additive_attention(dtype, heads, dim)
        for heads, dim, edge_dim in ((1, 64, 0), (3, 100, 0), (8, 128, 128)):
            yield from joined_slices(dtype, heads, dim, edge_dim)
        for heads, dim, edge_dim in ((1, 64, 16), (4, 32, 3), (8, 128, 128)):
            yield from sparse_attention(dtype, heads, dim, edge_dim)
        for left, right in ((1, 1), (7, 16), (64, 1433)):
            yield from linear_map(dtype, left, right)
        yield from stacked_parameters(dtype)
        for dim in (1, 64, 602, 2048, 4096):
            yield from gated_skip(dtype, dim)
            yield from columns_of(dtype, dim)
            yield from normed_residual(dtype, dim)
        for dim in (1, 128, 256):
            yield from normalised(dtype, dim)
        for heads, dim in ((1, 7), (8, 8), (16, 256)):
            yield from terms_of_nodes(dtype, heads, dim)
            yield from copied_and_summed(dtype, heads, dim)
    for dim in (64, 256):
        yield from normed_attention(dim)
    yield from attention_plus_rows()
    yield from inference()
    yield from terms_of_float32()
    yield from reordered()
    for dim in (8, 16):
        yield from listed_edges(8, dim)


if __name__ == "__main__":
    for given in sys.argv[1:] or TARGETS:
        target, _, every = given.partition("/")
        named, functions, step = {*SPILLED_MORE.get(target, ()), *PRODUCTS}, set(), int(every or 1)
        watched = named.copy() if step < 50 else set()
        for turn, case in enumerate(cases()):
            function = case.kernel.__name__
            named.discard(case.name)
            if turn % step == 0 or case.name in watched or function not in functions:
                print(json.dumps(compile_case(case, target)), flush=True)
                functions.add(function)
        if named:
            sys.exit(f"no such kernel: {named}")
