"""What adds the slices of gradients of attention: of cut rows, or of cut windows."""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.formats.walk import Walk
from graphfuse.kernels import merge_shapes
from graphfuse.kernels.merge_tiles import merge_task, over_slots, rows_by_heads, slice_width
from graphfuse.kernels.run import Launch
from graphfuse.kernels.tiles import ONCE, after_previous, rows_at


# Adds the slices of a cut window (HEIGHT 16) or row (HEIGHT 1), in order.
#   grid      (num_merges * HEIGHT / ROWS, parts * ceil(HEADS / BLOCK_HEADS)): first, second and third, as far
#             as there are, are merged at a time, as the slices of a hub are many and follow one another
#   reads     partial ACC [num_slots, HEIGHT, WIDTH]: HEADS * DIM sums of first, as many of second if there is
#             one, and HEADS * EDGE_DIM of third, see `slice_width`; merges, and row_index of windows
@triton.jit(do_not_specialize=["num_rows"])
def attention_bwd_merge_kernel(
    first_ptr, second_ptr, third_ptr, partial_ptr, merges_ptr, row_index_ptr, num_rows,
    OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EDGE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_EDGE: tl.constexpr, HEIGHT: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    after_previous()
    SUMS: tl.constexpr = HEADS * (DIM if second_ptr is None else 2 * DIM)
    WIDTH: tl.constexpr = slice_width(SUMS, HEADS * EDGE_DIM)
    GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    part, group = tl.program_id(1) // GROUPS, tl.program_id(1) % GROUPS
    if part == 0:
        _merge(
            first_ptr, partial_ptr, merges_ptr, row_index_ptr, group, num_rows, OUT_STRIDE, HEADS, DIM,
            BLOCK_HEADS, BLOCK_DIM, WIDTH, HEIGHT, SLOTS, ROWS, STAGES, ACC,
        )  # fmt: skip
    elif second_ptr is not None and part == 1:
        _merge(
            second_ptr, partial_ptr + HEADS * DIM, merges_ptr, row_index_ptr, group, num_rows, OUT_STRIDE,
            HEADS, DIM, BLOCK_HEADS, BLOCK_DIM, WIDTH, HEIGHT, SLOTS, ROWS, STAGES, ACC,
        )  # fmt: skip
    elif third_ptr is not None:
        _merge(
            third_ptr, partial_ptr + SUMS, merges_ptr, row_index_ptr, group, num_rows, HEADS * EDGE_DIM,
            HEADS, EDGE_DIM, BLOCK_HEADS, BLOCK_EDGE, WIDTH, HEIGHT, SLOTS, ROWS, STAGES, ACC,
        )  # fmt: skip


@triton.jit
def _merge(
    out_ptr, partial_ptr, merges_ptr, row_index_ptr, group, num_rows, OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    window, begin, end, first = merge_task(merges_ptr, HEIGHT, ROWS)
    nth, inner, head = rows_by_heads(first, group, SLOTS, ROWS, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask_dim = (offs_dim < DIM)[None, :]
    acc = tl.zeros((SLOTS * ROWS * BLOCK_HEADS, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, SLOTS, num_stages=STAGES):
        slot = start + nth
        live = (slot < end) & (head < HEADS)
        offs = (slot.to(tl.int64) * HEIGHT + inner) * WIDTH + head * DIM
        at = partial_ptr + offs[:, None] + offs_dim[None, :]
        acc += tl.load(at, mask=live[:, None] & mask_dim, other=0.0)
    acc = over_slots(acc, SLOTS)
    _, inner, head = rows_by_heads(first, group, 1, ROWS, BLOCK_HEADS)
    rows = rows_at(row_index_ptr, window * HEIGHT + inner)
    at = out_ptr + (rows.to(tl.int64) * OUT_STRIDE + head * DIM)[:, None] + offs_dim[None, :]
    live = (rows < num_rows) & (head < HEADS)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & mask_dim, eviction_policy=ONCE)


def merge_gradients(
    w: Walk, stride: int, heads: int, dim: int, edge_dim: int, parts: int, acc: tl.dtype
) -> Launch | None:
    """Adds the slices of ``parts`` gradients, whose rows are ``stride`` apart; ``None`` if nothing is cut."""
    if w.num_slots == 0:
        return None
    blocks = merge_shapes.heads_of(heads, dim, edge_dim)
    adds = merge_shapes.of_gradients(w.height, blocks[0] * max(blocks[1:]))
    rest = (w.num_rows, stride, heads, dim, edge_dim, *blocks, w.height, *adds[:3], acc)
    programs, groups = w.merges.size(0) * w.height // adds.rows, parts * -(-heads // blocks[0])
    graph = (w.merges, w.row_index)
    return Launch(attention_bwd_merge_kernel, programs, adds.warps, graph, rest, groups=groups)
