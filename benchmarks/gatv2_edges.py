"""A sketch: GATv2's forward over the edges of windows, scores and sums on tensor cores, beside the op.

    python -m benchmarks.gatv2_edges ego-twitter reddit-4m github

Not a kernel of the package: exponentials of scores as they are, no bias, no dropout, no loops; slices of cut
windows are computed and stored nowhere, so rows of uncut windows alone are compared.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import graphs
from benchmarks.bench import device
from benchmarks.timing import time_call
from graphfuse import RowWindows, ops
from graphfuse.formats.listed import listed
from graphfuse.kernels.barriers import of_one_warp
from graphfuse.kernels.device import INTERPRETING
from graphfuse.kernels.edge_tiles import as_many_columns, ones_of_rows, spread, weighted
from graphfuse.kernels.tiles import dot, load_task, rows_at

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.jit
def pair_sum(x, y):
    if _INTERPRETING:
        return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    return tl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2
    )


@triton.jit
def pair_leaky(u, SLOPE: tl.constexpr):
    if _INTERPRETING:
        return tl.maximum(u.to(tl.float32), u.to(tl.float32) * SLOPE).to(u.dtype)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mul.rn.f16x2 m, $1, $2; max.NaN.f16x2 $0, $1, m; }", "=r,r,r",
        [u, tl.full(u.shape, SLOPE, u.dtype)], dtype=u.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def gatv2_edge_kernel(
    out_ptr, tasks_ptr, packed_ptr, edge_row_ptr, row_index_ptr, x_ptr, y_ptr, att_ptr, num_rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, GATHERED: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    # GATHERED: a receiver's row is asked for with each edge; else it comes of a product with the window's 16
    window, begin, end, slot = load_task(tasks_ptr, tl.program_id(0))
    WIDTH: tl.constexpr = GROUP * DIM
    offs_dim = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    at_rows = rows.to(tl.int64)[:, None] * (HEADS * DIM) + offs_dim[None, :]
    mask = (rows < num_rows)[:, None]
    own = tl.load(y_ptr + at_rows, mask=mask, other=0.0)
    HALF: tl.constexpr = own.dtype
    heads = tl.arange(0, 8) // (8 // GROUP)  # of a product's columns, each as often as makes eight
    att = tl.load(att_ptr + offs_dim)
    att = tl.where((tl.arange(0, WIDTH) // DIM)[:, None] == heads[None, :], att[:, None], 0.0).to(HALF)
    acc, total = tl.zeros((16, WIDTH), dtype=tl.float32), tl.zeros((16, 8), dtype=tl.float32)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        column = packed >> 5
        x = tl.load(x_ptr + column.to(tl.int64)[:, None] * (HEADS * DIM) + offs_dim[None, :])
        ones = ones_of_rows(tl.where(offs < end, packed & 15, 16), HALF)
        if GATHERED:
            row = tl.load(edge_row_ptr + at)
            y = tl.load(y_ptr + row.to(tl.int64)[:, None] * (HEADS * DIM) + offs_dim[None, :])
        else:
            y = tl.dot(tl.trans(ones), own, out_dtype=HALF)  # exact
        bent = pair_leaky(pair_sum(x, y), SLOPE)
        score = dot(bent, att, tl.zeros((EDGES, 8), dtype=tl.float32), tl.float32)
        p = tl.exp2(score * 1.4426950408889634).to(HALF)
        total = dot(ones, p, total, tl.float32)
        acc = dot(ones, weighted(x, as_many_columns(p, GROUP), DIM), acc, tl.float32)
    total = as_many_columns(total, GROUP)
    if slot < 0:
        norm = spread(tl.where(total > 0, 1.0 / total, 0.0), DIM)
        tl.store(out_ptr + at_rows, (acc * norm).to(HALF), mask=mask)


def sketched(
    windows: RowWindows,
    x: Tensor,
    y: Tensor,
    att: Tensor,
    group: int,
    edges: int,
    stages: int,
    gathered: bool,
) -> Tensor:
    """``out`` of rows of uncut windows; the others have what their memory held."""
    w = windows.walks(False, False).forward
    found, (_, heads, dim) = listed(w, None), x.shape
    out = torch.zeros_like(y)
    grid = (found.tasks.size(0), heads // group)
    given = (out, found.tasks, found.packed, found.row, w.row_index, x, y, att, w.num_rows)
    with of_one_warp():
        gatv2_edge_kernel[grid](*given, heads, dim, group, edges, stages, gathered, 0.2, num_warps=1)
    return out


def main() -> None:
    """Prints times of the op and of the sketch, ms, and how far they are from each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graphs", nargs="+")
    on = device()
    for name in parser.parse_args().graphs:
        windows = graphs.load(name, on).windows
        w = windows.walks(False, False).forward
        cut = torch.unique(w.tasks[w.tasks[:, 3] >= 0, 0])
        places = (cut[:, None] * 16 + torch.arange(16, device=on)).flatten()
        whole = torch.ones(w.num_rows, dtype=torch.bool, device=on)
        rows = places if w.row_index is None else w.row_index[places[places < w.row_index.numel()]].long()
        whole[rows[rows < w.num_rows]] = False
        for heads, dim in ((8, 8), (4, 32)):
            x, y = torch.randn(2, w.num_rows, heads, dim, device=on).half()
            att = (torch.randn(heads, dim, device=on) / dim**0.5).half()

            def op(x: Tensor = x, y: Tensor = y, att: Tensor = att) -> Tensor:
                return ops.gatv2_attention(x, y, att, windows)

            wanted = op()
            print(name, f"{heads}x{dim} op {time_call(op, on, 0.05).p50_ms:.4f}", flush=True)
            launches = itertools.product((8,) if dim == 8 else (4, 2), (32, 16), (2, 3, 5), (False, True))
            for launched in launches:

                def sketch(
                    launched: Any = launched, x: Tensor = x, y: Tensor = y, att: Tensor = att
                ) -> Tensor:
                    return sketched(windows, x, y, att, *launched)

                far = (sketch() - wanted)[whole].abs().max().item()
                ms = time_call(sketch, on, 0.03).p50_ms
                print(f"   heads, edges, stages, gathered {launched}: {ms:.4f}, off by {far:.2g}", flush=True)


if __name__ == "__main__":
    main()
