"""Pieces of kernels that walk rows: which row a program walks, what is on its way to the next step, sums."""

import triton
import triton.language as tl

from graphfuse.kernels.tiles import load_task


@triton.jit
def row_task(ptr_ptr, tasks_ptr, pid, num_tasks, num_rows, split, PACKED: tl.constexpr):
    # What a program that walks rows does: first long rows and slices of longer ones, then one row a program.
    # Row, first edge, end, slot or -1, and whether this is a row that was listed, or its slices were, or, of
    # PACKED programs of a block, one beyond the last.
    listed = False
    slot = -1
    if pid < num_tasks:
        row, begin, end, slot = load_task(tasks_ptr, pid)
    else:
        row = pid - num_tasks
        if PACKED > 1:
            begin = tl.load(ptr_ptr + row, mask=row < num_rows, other=0)
            end = tl.load(ptr_ptr + row + 1, mask=row < num_rows, other=0)
            listed = (row >= num_rows) | (end - begin > split)
        else:
            begin = tl.load(ptr_ptr + row)
            end = tl.load(ptr_ptr + row + 1)
            listed = end - begin > split
    return row, begin, end, slot, listed


@triton.jit
def direction(pid, num_tasks, num_other_tasks, num_rows):
    # What a program does where those of both directions share a launch: whether its row is a source, and
    # which of the programs that walk that direction it is. Long rows of either begin first.
    tasks = num_tasks + num_other_tasks
    long = pid < tasks
    begin_sources = num_tasks if long else tasks + num_rows
    sources = pid >= begin_sources
    nth = pid - begin_sources if sources else pid
    if not long:
        nth = nth + num_other_tasks if sources else nth - num_other_tasks
    return sources, nth


@triton.jit
def rows_of_program(num_tasks, ROWS: tl.constexpr):
    # how many rows a program goes through: one that is a task or a slice, or ROWS others
    count = ROWS
    if ROWS > 1:
        if tl.program_id(0) < num_tasks:
            count = 1
    return count


@triton.jit
def row_of_program(ptr_ptr, tasks_ptr, i, num_tasks, num_rows, split, ROWS: tl.constexpr):
    # The i-th row of a program: row, first edge, end, slot or -1, and whether it is there: beyond the last
    # row is none, and one that was listed, or whose slices were, is another program's. Then it has no edges,
    # and what comes of it is not for the program to store.
    pid = tl.program_id(0)
    slot = -1
    if pid < num_tasks:
        row, begin, end, slot = load_task(tasks_ptr, pid)
        exists = True
    else:
        row = (pid - num_tasks) * ROWS + i
        exists = row < num_rows
        row = tl.minimum(row, num_rows - 1)
        begin = tl.load(ptr_ptr + row)
        end = tl.load(ptr_ptr + row + 1)
        exists = exists & (end - begin <= split)
        end = tl.where(exists, end, begin)
    return row, begin, end, slot, exists


@triton.jit
def first_columns(column_ptr, begin, end, EDGES: tl.constexpr, STAGES: tl.constexpr):
    # The columns, or other numbers, of the first edges from `begin` on, for a step to come. With a pipeline
    # that step loads them itself.
    ahead = begin + tl.arange(0, EDGES)
    if STAGES == 1:
        ahead = tl.load(column_ptr + ahead, mask=ahead < end, other=0)
    return ahead


@triton.jit
def columns_of_step(column_ptr, offs, end, ahead, EDGES: tl.constexpr, STAGES: tl.constexpr):
    # The columns of the edges `offs` of a row, and what to hand to the next step: without a pipeline its
    # columns, on their way, as it would wait for memory twice else.
    if STAGES == 1:
        return ahead, tl.load(column_ptr + offs + EDGES, mask=offs < end - EDGES, other=0)
    return tl.load(column_ptr + offs, mask=offs < end, other=0), ahead


@triton.jit
def begin_row(
    ptr_ptr, column_ptr, row, begin, end, num_loops, LOOPS: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Where to begin a row, and what `first_columns` of that are. With LOOPS the loop stands in no list: it is
    # an edge one place before the others, in the row's first slice.
    first = begin
    if LOOPS:
        first -= ((begin == tl.load(ptr_ptr + row)) & (row < num_loops)).to(tl.int32)
        ahead = first + tl.arange(0, EDGES)
        if STAGES == 1:
            column = tl.load(column_ptr + ahead, mask=(ahead >= begin) & (ahead < end), other=0)
            ahead = tl.where(ahead < begin, row, column)
    else:
        ahead = first_columns(column_ptr, begin, end, EDGES, STAGES)
    return first, ahead


@triton.jit
def step_of_row(
    column_ptr, offs, row, begin, end, ahead, LOOPS: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    # As `columns_of_step`; and which of the places `offs` has an edge: other loops than that of `begin_row`
    # are none.
    live = offs < end
    if LOOPS and STAGES > 1:
        column = tl.load(column_ptr + offs, mask=live & (offs >= begin), other=0)
        column = tl.where(offs < begin, row, column)
    else:
        column, ahead = columns_of_step(column_ptr, offs, end, ahead, EDGES, STAGES)
    if LOOPS:
        live = live & ((column != row) | (offs < begin))
    return column, ahead, live


@triton.jit
def addresses(ptr, node, offs_head, STRIDE: tl.constexpr):
    # Of the features `offs_head` of rows. These are added first, once for all steps: two matrices of one
    # stride would else share the sum with the row, to which each step adds two pointers of 64 bits.
    return (ptr + offs_head[None, :, :]) + node * STRIDE


@triton.jit
def row_sum(
    x_ptr, column_ptr, edge_perm_ptr, edge_weight_ptr, col_scale_ptr, row, begin, end, limit, columns, places,
    offs_dim, mask_dim, X_STRIDE: tl.constexpr, BLOCK_DIM: tl.constexpr, EDGES: tl.constexpr,
    STAGES: tl.constexpr, WITHOUT_LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Sum over the edges [begin, end) of one row, float[1, BLOCK_DIM], by plain adds; and the columns and
    # places of the first edges of the next row, which begins where this one ends, on their way as those of
    # this row were when it began. The program's last row ends at `limit`.
    acc = tl.zeros((EDGES, BLOCK_DIM), dtype=ACC)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        live = offs < end
        following = tl.minimum(start + EDGES, end)  # of this row, or the first of the next
        column = columns if STAGES == 1 else tl.load(column_ptr + offs, mask=live, other=0)
        columns = first_columns(column_ptr, following, limit, EDGES, STAGES)
        if WITHOUT_LOOPS:
            live = live & (column != row)
        offs_x = column[:, None].to(tl.int64) * X_STRIDE + offs_dim[None, :]
        x = tl.load(x_ptr + offs_x, mask=live[:, None] & mask_dim[None, :], other=0.0).to(ACC)
        if col_scale_ptr is not None:
            x = x * tl.load(col_scale_ptr + column, mask=live, other=0.0).to(ACC)[:, None]
        if edge_weight_ptr is not None:
            place = places if STAGES == 1 else tl.load(edge_perm_ptr + offs, mask=live, other=0)
            places = first_columns(edge_perm_ptr, following, limit, EDGES, STAGES)
            x = x * tl.load(edge_weight_ptr + place, mask=live, other=0.0).to(ACC)[:, None]
        acc += x
    return tl.sum(acc, 0)[None, :], columns, places


@triton.jit
def together(a, b, zero):
    # a, which is not to be had before b has been loaded as well. So the compiler asks memory for both before
    # it computes with one, where it would put the second off to save registers, and wait twice. `zero` is 0,
    # which the compiler must not know. Of four numbers, which one load brings, the first is enough.
    if a.dtype == tl.float32 and b.dtype == tl.float32 and tl.target_info.cuda_capability_geq(8, 0):
        a = tl.inline_asm_elementwise(
            "lop3.b32 $0, $4, $8, $12, 0xF8; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=f,=f,=f,=f,f,f,f,f,f,f,f,f,r,r,r,r", [a, b, zero], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16 and tl.target_info.cuda_capability_geq(8, 0):
        a = tl.inline_asm_elementwise(
            "lop3.b32 $0, $4, $8, $12, 0xF8; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, zero], dtype=a.dtype, is_pure=True, pack=8,
        )  # fmt: skip
    return a


@triton.constexpr_function
def tie(count):
    # Assembly, and its operands, for `count` numbers of a thread, four of which one load brings: the first of
    # each four is not to be had before those of all.
    of = [f"${count + nth}" for nth in range(count)]
    pairs = zip(of[::8], of[4::8], strict=True)
    lines = [f"lop3.b32 all, all, {a}, {b}, 0x96;" for a, b in pairs]
    for nth, one in enumerate(of):
        tied = f"lop3.b32 ${nth}, {one}, all, ${2 * count}, 0xF8;"
        lines.append(f"mov.b32 ${nth}, {one};" if nth % 4 else tied)
    operands = ["=f"] * count + ["f"] * count + ["r"] * count
    return " ".join(["{ .reg .b32 all; mov.b32 all, 0;", *lines, "}"]), ",".join(operands)


@triton.jit
def all_together(x, zero):
    # As `together`, of the rows of one tile: what one thread has loaded of them is to be had at once.
    if x.dtype == tl.float32 and tl.target_info.cuda_capability_geq(8, 0):
        COUNT: tl.constexpr = x.numel // tl.extra.cuda.num_threads()
        if COUNT % 8 == 0:
            TIE: tl.constexpr = tie(COUNT)
            x = tl.inline_asm_elementwise(TIE[0], TIE[1], [x, zero], tl.float32, True, COUNT)
    return x
