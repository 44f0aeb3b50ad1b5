"""Pieces that kernels share: reading a task, summing over a window or a row, finishing a tile."""

import triton
import triton.language as tl

from graphfuse.kernels.device import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)
# float32 products to the last bit or so, from six in bfloat16 (its default would be TF32)
_FLOAT32 = tl.constexpr("ieee" if INTERPRETING else "bf16x6")
# The policy for what a kernel reads or writes once: it leaves L2 before what other programs will gather
# (results: read_once.md). Where all of it fits, nothing leaves.
ONCE = tl.constexpr("evict_first")


@triton.jit
def after_previous():
    # Waits until the kernel before this one is done and what it wrote is to be seen. Launch lets programs
    # start before that, so this comes first in every kernel, or last in one that ran beside another. From
    # here on programs of the next kernel may start, where there is room: all before this kernel is done.
    # (How threads of one program wait for each other is up to barriers.py.)
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def beside_previous():
    # In place of `after_previous` where nothing depends on the kernel before this one, but on those before
    # that, which are done: without it L1 may hold what they have overwritten. `after_previous` comes last
    # then, so that whoever waits for this kernel waits for both.
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def nothing():
    # An empty tuple, to which what a program holds of each of its heads is added.
    return ()


@triton.jit
def load_task(tasks_ptr, task):
    # one 16-byte record: window, first entry, end, slot
    base = tasks_ptr + task.to(tl.int64) * 4
    return tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3)


@triton.jit
def rows_at(row_index_ptr, place):
    # The rows at places of the windows, of which each has 16: num_rows or more beyond the last. Without an
    # index the rows are the places.
    if row_index_ptr is not None:
        place = tl.load(row_index_ptr + place)
    return place


@triton.jit
def head_tile(HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    # The tile [BLOCK_HEADS, BLOCK_DIM] of a program: its heads, where their features stand in a row of all
    # heads, and which of them exist.
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = (heads < HEADS)[:, None] & (offs_dim < DIM)[None, :]
    return heads, heads[:, None] * DIM + offs_dim[None, :], mask


@triton.jit
def finite(x):
    if x.dtype == tl.float64:
        return tl.max(((x * 0) != 0).to(tl.int32)) == 0
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True)) < 0x7F800000


@triton.jit
def rounded_product(a, b, live):
    # The product where live that goes into a sum as it is. The compiler would make it part of the first
    # addition: unrounded in the thread that adds, rounded in the one that it adds, and threads which should
    # all hold the sum would hold two.
    if a.dtype == tl.float32 and b.dtype == tl.float32 and tl.target_info.cuda_capability_geq(8, 0):
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        product = tl.where(live, a * b, 0.0)  # of which it may not know whether they are
    return product


@triton.jit
def sum_of_products(a, b, live, AXIS: tl.constexpr, WIDTH: tl.constexpr):
    # The sum of products where live. A thread with more than one of them adds its own before any other's,
    # which leaves nothing to be unrounded. Rows of an even WIDTH bring a thread two or more if the tile has
    # as many, which is for the launch table to see to, unless they are an odd number apart. A tile that may
    # have the layout of other loads comes with WIDTH 1.
    product = a * b
    if WIDTH % 2 == 1 or WIDTH < 8 or product.numel < 64:
        product = rounded_product(a, b, live)
    return tl.sum(product, AXIS)


@triton.constexpr_function
def loaded_width(dim, stride):
    # WIDTH for rows of so many features that are so far apart
    return dim if stride % 2 == 0 else 1


@triton.jit
def rows_and_heads(
    num_rows, STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):
    # What a program of ROWS pairs of a row and a head handles: their places, int64, among all pairs, which of
    # them exist, and where they begin in rows of DIM features a head that are STRIDE apart.
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = place // HEADS
    return place, row < num_rows, row * STRIDE + place % HEADS * DIM


@triton.jit
def load_rows(ptr, offs, live, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, READ_ONCE: tl.constexpr = False):
    # Rows of DIM features that begin at the offsets, 0 where not live.
    offs_dim = tl.arange(0, BLOCK_DIM)[None, :]
    mask = live[:, None] & (offs_dim < DIM)
    policy: tl.constexpr = ONCE if READ_ONCE else ""
    return tl.load(ptr + offs[:, None] + offs_dim, mask=mask, other=0.0, eviction_policy=policy)


@triton.jit
def product_of_rows(a, b, live, DIM: tl.constexpr, ACC: tl.constexpr):
    # Sums over DIM features of rows a times rows b: one for each. Those of float32 are added as row kernels
    # add, bit for bit: copies of an edge then leave no difference.
    if b.dtype.primitive_bitwidth > 16:
        return tl.sum(a.to(ACC) * b.to(ACC), 1)
    mask = live[:, None] & (tl.arange(0, a.shape[1]) < DIM)[None, :]
    return sum_of_products(a.to(ACC), b.to(ACC), mask, 1, DIM)


@triton.jit
def store_pairs(ptr, place, live, first, second):
    # two numbers of each place, side by side in one access
    at = ptr + place[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(at, tl.join(first, second), mask=live[:, None])


@triton.jit
def store_quads(ptr, place, live, first, second, third, fourth):
    # four numbers of each place, side by side in one access
    quads = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(first.shape[0], 4)
    tl.store(ptr + place[:, None] * 4 + tl.arange(0, 4)[None, :], quads, mask=live[:, None])


@triton.jit
def quads_apart(quads):
    # the four numbers of the last axis
    even, odd = tl.split(quads.reshape(quads.shape[:-1] + (2, 2)))  # noqa: RUF005  triton unpacks no tuple
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def dot(a, b, acc, ACC: tl.constexpr):
    # a @ b + acc in the precision of the operands
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=_FLOAT32, out_dtype=ACC)
    if _INTERPRETING and a.dtype == tl.bfloat16:  # it would multiply the bit patterns
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, out_dtype=ACC)
    return tl.dot(a, b, acc, out_dtype=ACC)


@triton.jit
def as_scores(x, GROUP: tl.constexpr, ACC: tl.constexpr):
    # x, broadcast to rows of scores, as tensor cores leave those: a product of zeros is added to it. Where x
    # stands otherwise Triton would move the scores to it, and a maximum over columns takes ten times the
    # shuffles.
    ROWS: tl.constexpr = (GROUP, 16, 16) if GROUP > 1 else (16, 16)
    SHAPE: tl.constexpr = (GROUP, 16, x.shape[2]) if GROUP > 1 else (16, x.shape[1])
    zeros, others = tl.zeros(ROWS, dtype=tl.bfloat16), tl.zeros(SHAPE, dtype=tl.bfloat16)
    return dot(zeros, others, tl.broadcast_to(x.to(ACC), SHAPE), ACC)


@triton.jit
def rows_of_product(ACC: tl.constexpr):
    # 0 to 15, as tensor cores leave the rows of a product. What is made of it stays there, where Triton would
    # else make a tile in another place and move it.
    row = tl.broadcast_to(tl.arange(0, 16)[:, None], (16, 16)).to(ACC)
    return tl.max(as_scores(row, 1, ACC), 1).to(tl.int32)


@triton.jit
def places(COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    # The order of entries in a tile that `placed` puts in order; elements have SIZE bits.
    place = tl.arange(0, COLUMNS)
    if SIZE == 32:
        place = place // 8 * 8 + place % 2 * 4 + place % 8 // 2
    return place


@triton.jit
def placed(a):
    # Of 8 columns that tensor cores leave, a thread has two neighbours; of 8 that they take, two neighbours
    # in half precision, but in TF32 a column and the fourth from it. With columns that were dealt out so, no
    # element has to move.
    if a.dtype == tl.float32:
        a = a.reshape(16, a.shape[1] // 8, 4, 2).permute(0, 1, 3, 2).reshape(16, a.shape[1])
    return a


@triton.jit
def dot_exact(a, x, acc, ACC: tl.constexpr):
    # a is 0/1, exact in every format. float32 x is cut into two pieces of TF32, of 11 bits: the first is
    # rounded to the nearest, so that what it leaves has 12 bits and a sign, of which tensor cores drop one
    # where there are 12. So a term is off by the last bit of x at most, in one of four.
    # Tensor cores truncate what they add to their accumulator, always towards zero, which over thousands of
    # entries costs float32 several bits: they sum one step, and a plain addition adds the steps.
    if x.dtype == tl.float32:
        high = _eleven_bits(x)
        step = tl.dot(a, x - high, tl.zeros_like(acc), input_precision="tf32", out_dtype=ACC)
        acc += tl.dot(a, high, step, input_precision="tf32", out_dtype=ACC)
    else:
        acc = dot(a, x, acc, ACC)
    return acc


@triton.jit
def _eleven_bits(x):
    # float32 x, rounded. Inf stays, and with x - x no number of it or of a NaN is lost.
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def without_loop(bits, column, window):
    # row masks of a window, its rows as numbered, without the bits of self-loops
    loop = column - window * 16
    return tl.where((loop >= 0) & (loop < 16), bits & ~(1 << (loop & 15)), bits)


@triton.jit
def load_bits(row_mask_ptr, start, end, COLUMNS: tl.constexpr, SIZE: tl.constexpr = 16):
    # The row masks of one step, 0 beyond the end, in the order of `places`; loaded a step ahead, as Triton
    # pipelines no such load.
    offs = start + places(COLUMNS, SIZE)
    return tl.load(row_mask_ptr + offs, mask=offs < end, other=0)


@triton.jit
def dealt(x, ROW_BYTES: tl.constexpr):
    # What is known of the entries of a step, in an order that lets each thread of a warp, which copies 512
    # bytes at a time, find its entries side by side: two accesses to shared memory for eight. Sums over
    # neighbours in half precision take 1 % less for it (results: waits.md); other rows were not measured.
    ROWS: tl.constexpr = 512 // ROW_BYTES
    if x.shape[0] >= 32 and (ROWS == 2 or ROWS == 4):
        x = x.reshape(ROWS, x.shape[0] // ROWS).permute(1, 0).reshape(x.shape[0])
    return x


@triton.jit
def window_sum(
    x_ptr, column_ptr, row_mask_ptr, col_scale_ptr, window, begin, end, offs_dim, mask_dim,
    X_STRIDE: tl.constexpr, BLOCK_DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    WITHOUT_LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Sum over the entries [begin, end) of a window: float[16, BLOCK_DIM]. A tile of 16 rows x COLUMNS entries
    # (bits) times the gathered rows of x. WITHOUT_LOOPS: self-loops are in the masks, and do not count.
    row = tl.arange(0, 16)
    bit = 1 << rows_of_product(ACC)
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    # Factors of float16 go up to 255 here, and keep their bits down to 2^-22, as 1 / degree may be.
    RAISED: tl.constexpr = 256.0 if x_ptr.dtype.element_ty == tl.float16 else 1.0
    acc = tl.zeros((16, BLOCK_DIM), dtype=ACC)
    # This loop runs once. Without it, where a step has fewer columns than a warp has lanes, the compiler for
    # GPUs branches around each copy of columns: a tenth more instructions.
    todo = 1
    while todo > 0:
        todo = 0
        next_bits = load_bits(row_mask_ptr, begin, end, COLUMNS, SIZE).to(tl.int32)
        for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
            bits = next_bits
            next_bits = load_bits(row_mask_ptr, start + COLUMNS, end, COLUMNS, SIZE).to(tl.int32)
            # the last step re-reads the last entry: no other node's NaN can enter through a masked lane
            offs = tl.minimum(start + tl.arange(0, COLUMNS), end - 1)
            column = tl.load(column_ptr + offs)
            if WITHOUT_LOOPS:
                its_column = column
                if SIZE == 32:
                    its_column = tl.load(column_ptr + tl.minimum(start + places(COLUMNS, SIZE), end - 1))
                bits = without_loop(bits, its_column, window)
            if SIZE == 16:
                column, bits = dealt(column, BLOCK_DIM * 2), dealt(bits, BLOCK_DIM * 2)
            offs_x = column[:, None].to(tl.int64) * X_STRIDE + offs_dim[None, :]
            x = tl.load(x_ptr + offs_x, mask=mask_dim[None, :], other=0.0)
            weight = 1.0
            if col_scale_ptr is not None:
                scale = tl.load(col_scale_ptr + column).to(ACC)
                if SIZE == 16:  # in the tile, where there are fewer numbers than in x
                    weight = (scale * RAISED).to(x.dtype)[None, :]
                else:  # which would have to be cut in pieces, too
                    x = x * scale[:, None]
            valid = (bits[None, :] & bit[:, None]) != 0
            acc = dot_exact(placed(tl.where(valid, weight, 0.0).to(x.dtype)), x, acc, ACC)
    # 0 * NaN is NaN: a NaN or Inf in one node would reach all 16 rows through the dot. Then, and only then,
    # sum again entry by entry and let each row see its own neighbours alone. So, too, where a factor is too
    # large for half precision.
    if col_scale_ptr is not None:
        acc *= 1.0 / RAISED
    if not finite(acc):
        acc = tl.zeros((16, BLOCK_DIM), dtype=ACC)
        for entry in tl.range(begin, end):
            column = tl.load(column_ptr + entry)
            bits = tl.load(row_mask_ptr + entry).to(tl.int32)
            x = tl.load(x_ptr + column.to(tl.int64) * X_STRIDE + offs_dim, mask=mask_dim, other=0.0).to(ACC)
            if col_scale_ptr is not None:
                x = x * tl.load(col_scale_ptr + column).to(ACC)
            if WITHOUT_LOOPS:
                bits = without_loop(bits, column, window)
            valid = ((bits >> row) & 1) != 0
            term = tl.broadcast_to(x[None, :], (16, BLOCK_DIM))
            acc += tl.where(valid[:, None], term, 0.0)
    return acc


@triton.jit
def finish_tile(
    acc, x_ptr, loop_weight_ptr, row_scale_ptr, col_scale_ptr, weight_ptr, weight_stride_out,
    weight_stride_in, bias_ptr, aggregate_ptr, out_ptr, rows, num_rows, num_loops, offs_dim, mask_dim,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, HEIGHT: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # acc[HEIGHT, BLOCK_DIM] is the sum over the neighbours of `rows`: add the diagonal, scale the rows,
    # multiply by weight[OUT_DIM, DIM] if there is one, add the bias, apply ReLU, store.
    mask_row = rows < num_rows
    offs_row = rows.to(tl.int64)
    if loop_weight_ptr is not None:
        has_loop = rows < num_loops
        own = tl.load(loop_weight_ptr + rows, mask=has_loop, other=0.0).to(ACC)
        offs_x = offs_row[:, None] * X_STRIDE + offs_dim[None, :]
        x = tl.load(x_ptr + offs_x, mask=has_loop[:, None] & mask_dim[None, :], other=0.0).to(ACC)
        if col_scale_ptr is not None:
            own = own * tl.load(col_scale_ptr + rows, mask=has_loop, other=0.0).to(ACC)
        acc += own[:, None] * x
    if row_scale_ptr is not None:
        acc = acc * tl.load(row_scale_ptr + rows, mask=mask_row, other=0.0).to(ACC)[:, None]
    if aggregate_ptr is not None:
        mask = mask_row[:, None] & mask_dim[None, :]
        tl.store(
            aggregate_ptr + offs_row[:, None] * DIM + offs_dim[None, :],
            acc.to(aggregate_ptr.dtype.element_ty),
            mask=mask,
            eviction_policy=ONCE,
        )
    if weight_ptr is None:
        _store(acc, bias_ptr, out_ptr, offs_row, mask_row, offs_dim, mask_dim, OUT_DIM, RELU, ACC)
    else:
        for first in tl.range(0, OUT_DIM, BLOCK_OUT, num_stages=1):
            offs_out = first + tl.arange(0, BLOCK_OUT)
            mask_out = offs_out < OUT_DIM
            if HEIGHT == 1:
                offs = offs_out[:, None] * weight_stride_out + offs_dim[None, :] * weight_stride_in
                w = tl.load(weight_ptr + offs, mask=mask_out[:, None] & mask_dim[None, :], other=0.0)
                y = tl.sum(acc * w.to(ACC), 1)[None, :]
            else:
                offs = offs_out[None, :] * weight_stride_out + offs_dim[:, None] * weight_stride_in
                w = tl.load(weight_ptr + offs, mask=mask_dim[:, None] & mask_out[None, :], other=0.0)
                y = dot(acc.to(w.dtype), w, tl.zeros((HEIGHT, BLOCK_OUT), dtype=ACC), ACC)
            _store(y, bias_ptr, out_ptr, offs_row, mask_row, offs_out, mask_out, OUT_DIM, RELU, ACC)


@triton.jit
def _store(
    y, bias_ptr, out_ptr, offs_row, mask_row, offs_out, mask_out, OUT_DIM: tl.constexpr, RELU: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_out, mask=mask_out, other=0.0).to(ACC)[None, :]
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # a NaN stays, as in torch.relu
    tl.store(
        out_ptr + offs_row[:, None] * OUT_DIM + offs_out[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=mask_row[:, None] & mask_out[None, :],
        eviction_policy=ONCE,
    )
