"""Compiles kernels for GPUs that are not there and reports registers, spills and shared memory.

Run as a script (without TRITON_INTERPRET): prints one JSON object per kernel, configuration and target.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ALIGNED = [["tt.divisibility", 16]]


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: str,
    warps: int,
    aligned: bool = True,
) -> dict[str, Any]:
    """Compiles ``kernel``: arguments in ``types`` are run-time ones, all others are constants (default None)."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constexprs = {name: constants.get(name) for name in names if name not in types}
    # what the JIT infers: pointers from the allocator are aligned, and so are strides of 16 elements
    attrs = {
        (i,): ALIGNED
        for i, name in enumerate(names)
        if aligned and (signature[name].startswith("*") or name.endswith("stride"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    report = {"shared": compiled.metadata.shared, **usage(compiled, target)}
    return report | {"fits": report["shared"] <= SHARED_LIMIT[target]}


def usage(compiled: Any, target: str) -> dict[str, int]:
    """Registers and spilled bytes a thread."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        spilled = [int(n) for n in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s+(\d+)", text)]
        return {"registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]), "spilled": sum(spilled)}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", text)[1]) + int(re.search(r"LOCAL:(\d+)", text)[1]),
    }


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """Every kernel at its smallest and largest launch row: (name, kernel, run-time types, constants, warps)."""
    import triton.language as tl

    from graphfuse.kernels import launch, sddmm, spmm

    found = []
    structure = {
        "tasks_ptr": "*i32",
        "column_ptr": "*i32",
        "row_mask_ptr": "*i16",
        "ptr_ptr": "*i32",
        "merges_ptr": "*i32",
    }
    numbers = dict.fromkeys(("num_tasks", "num_rows", "num_loops", "num_merges", "split"), "i32")
    edges = {"edge_ptr": "*i32", "edge_perm_ptr": "*i32"}
    strides = dict.fromkeys(("x_stride", "weight_stride_out", "a_stride", "b_stride"), "i32")
    for dtype, size in (("fp16", 2), ("bf16", 2), ("fp32", 4)):
        tensors = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
        scales = {
            "loop_weight_ptr": "*fp32",
            "row_scale_ptr": "*fp32",
            "col_scale_ptr": "*fp32",
            "bias_ptr": f"*{dtype}",
        }
        for dim, out_dim in ((16, 16), (64, None), (128, 128), (256, 256), (1433, None)):
            fused = {"weight_ptr": f"*{dtype}", "aggregate_ptr": f"*{dtype}"} if out_dim else {}
            for weighted, cut in ((False, False), (False, True), (True, True)):
                given = {
                    **tensors,
                    **({"partial_ptr": "*fp32"} if cut else {}),
                    **scales,
                    **fused,
                    **({"edge_weight_ptr": f"*{dtype}", **edges} if weighted else {}),
                }
                for kernel, config, step, height in (
                    (spmm._spmm_window_kernel, launch.spmm_window(dim, size, out_dim, load), "COLUMNS", 16),
                    (spmm._spmm_row_kernel, launch.spmm_row(dim, size, out_dim, 10**6), "EDGES", 1),
                    (spmm._spmm_merge_kernel, launch.spmm_window(dim, size, out_dim, load), None, 16),
                    (spmm._spmm_merge_kernel, launch.spmm_row(dim, size, out_dim, 10**6), None, 1),
                ):
                    merge = step is None
                    if (merge and (weighted or not cut)) or (weighted and height == 16 and size == 4):
                        continue  # never launched
                    types = {**structure, **numbers, **strides, **given}
                    types = {name: types[name] for name in kernel.arg_names if name in types}
                    constants = {
                        "DIM": dim, "OUT_DIM": out_dim or dim, "BLOCK_DIM": config.block_dim,
                        "BLOCK_OUT": config.block_out, "COLUMNS": config.step, "EDGES": config.step, "ROWS": config.rows,
                        "STAGES": config.stages, "HEIGHT": height, "RELU": True, "ACC": tl.float32,
                        "weight_stride_in": 1,
                    }  # fmt: skip
                    name = f"{kernel.__name__}[{dtype},{dim}->{out_dim},height={height},weighted={weighted},cut={cut}]"
                    found.append(
                        (name, kernel, types, constants, config.merge_warps if merge else config.warps)
                    )
        for dim in (7, 128, 1433):
            for kernel, height in ((sddmm._sddmm_window_kernel, 16), (sddmm._sddmm_row_kernel, 1)):
                if height == 16 and size == 4:
                    continue
                config = launch.sddmm_window(dim) if height == 16 else launch.sddmm_row(dim)
                types = {
                    **structure,
                    **numbers,
                    **strides,
                    **edges,
                    **dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{dtype}"),
                }
                types = {name: types[name] for name in kernel.arg_names if name in types}
                constants = {
                    "DIM": dim, "BLOCK_DIM": config.block_dim, "COLUMNS": config.step, "EDGES": config.step,
                    "STAGES": config.stages, "WITHOUT_LOOPS": True, "ACC": tl.float32,
                }  # fmt: skip
                found.append((f"{kernel.__name__}[{dtype},{dim}]", kernel, types, constants, config.warps))
    return found


if __name__ == "__main__":
    targets = sys.argv[1:] or list(TARGETS)
    for name, kernel, types, constants, warps in cases():
        for target in targets:
            report = compile_kernel(kernel, types, constants, target, warps)
            print(json.dumps({"kernel": name, "target": target, "warps": warps, **report}), flush=True)
