r"""The loop of GAT's window kernel, forward, over the edges of a window: a weight for each edge and head.

:mod:`graphfuse.kernels.gat_steps` makes 16 weights of each column entry and head, one for each row of its
window, of which all but the few that are edges are masked. Here an edge has one, and what tensor cores take
of it is a column in which it stands in the row of the edge. A column that several rows of a window share is
gathered for each of them.
"""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import exponent
from graphfuse.kernels.attention_tiles import eight_times
from graphfuse.kernels.dropout import kept, key_of, of_copy
from graphfuse.kernels.gat_tiles import at_most, one_of_eight
from graphfuse.kernels.tiles import dot, nothing, rows_of_product


@triton.jit
def edges_of_step(packed_ptr, row_ptr, start, end, EDGES: tl.constexpr):
    # Columns and rows of the edges of a step, some edge's beyond the end; for what is loaded ahead of it.
    offs = tl.minimum(start + tl.arange(0, EDGES), end - 1)
    some = offs >= 0
    column = tl.load(packed_ptr + offs, mask=some, other=0) >> 4
    return column, tl.load(row_ptr + offs, mask=some, other=0)


@triton.jit
def of_heads(x_ptr, node, heads, HEADS: tl.constexpr):
    # x[node, heads], [EDGES, heads]
    return tl.load(x_ptr + node.to(tl.int64)[:, None] * HEADS + heads[None, :])


@triton.jit
def of_eight(x):
    # the columns of x [EDGES, 8]: a thread has all eight of an edge
    even, odd = tl.split(x.reshape(x.shape[0], 4, 2))
    first, second = tl.split(even.reshape(x.shape[0], 2, 2))
    third, fourth = tl.split(odd.reshape(x.shape[0], 2, 2))
    zero, four = tl.split(first)
    two, six = tl.split(second)
    one, five = tl.split(third)
    three, seven = tl.split(fourth)
    return zero, one, two, three, four, five, six, seven


@triton.jit
def rows_of_edges(place, HALF: tl.constexpr):
    # What a weight of an edge is at most in each row, [16, EDGES], as tensor cores take their left operand:
    # infinite in its own, 0 elsewhere.
    inner = rows_of_product(tl.float32)
    return tl.where(place[None, :] == inner[:, None], float("inf"), 0.0).to(HALF)


@triton.jit
def in_rows(weight, most):
    # weights [EDGES], none below 0, as a left operand
    return at_most(tl.broadcast_to(weight[None, :], most.shape), most)


@triton.jit
def attend_edges(
    packed_ptr, edge_row_ptr, copy_ptr, a_src_ptr, a_dst_ptr, x_ptr, seed_ptr, begin, end, head, means,
    states, TILTED: tl.constexpr, X_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    EDGES: tl.constexpr, STAGES: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    LOOPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    # Goes on with the sums of eight heads, (top, total, high, acc, tilt), over the edges [begin, end) of a
    # window, as `attend` does with FIXED maxima. Returns the states, and the rows of all edges as bits.
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    heads, offs_dim = head + tl.arange(0, 8), head * DIM + tl.arange(0, 8 * DIM)
    ones = tl.full((EDGES, 8), 1.0, dtype=tl.float32).to(HALF)
    mean = tl.zeros((8,), dtype=ACC)
    running = nothing()
    for g in tl.static_range(8):
        mean = tl.where(tl.arange(0, 8) == g, means[g], mean)
        its_total, its_high = eight_times(states[g][1]), eight_times(states[g][2])
        running += ((its_total, its_high, states[g][3], states[g][4]),)
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin, end, EDGES)
    other, own = of_heads(a_src_ptr, column, heads, HEADS), of_heads(a_dst_ptr, row, heads, HEADS)
    column, row = edges_of_step(packed_ptr, edge_row_ptr, begin + EDGES, end, EDGES)
    seen = tl.zeros((EDGES,), dtype=tl.int32)
    for start in tl.range(begin, end, EDGES, num_stages=STAGES):
        offs = start + tl.arange(0, EDGES)
        at = tl.minimum(offs, end - 1)
        packed = tl.load(packed_ptr + at)
        its_column = packed >> 4
        x = tl.load(x_ptr + its_column.to(tl.int64)[:, None] * X_STRIDE + offs_dim[None, :])
        # a step ahead, in registers: Triton would pipeline them through shared memory, and make each weight
        # in all the threads that read it
        next_other = of_heads(a_src_ptr, column, heads, HEADS)
        next_own = of_heads(a_dst_ptr, row, heads, HEADS)
        column, row = edges_of_step(packed_ptr, edge_row_ptr, start + 2 * EDGES, end, EDGES)
        live = offs < end
        if LOOPS or DROPOUT > 0:
            its_row = tl.load(edge_row_ptr + at)
        if LOOPS:  # each node brings one of its own
            live = live & (its_column != its_row)
        place = tl.where(live, packed & 15, 16)
        seen |= tl.where(live, 1 << place, 0)
        d = own.to(ACC)
        u = d + other.to(ACC)
        p = tl.exp2(exponent(u, SLOPE) - exponent(d + mean[None, :], SLOPE)).to(HALF)
        weights = of_eight(p)
        if TILTED:
            bent = tl.where(u > 0, p, 0.0)
            bends = of_eight(bent)
        if DROPOUT > 0:
            other_key = key_of(seed_ptr, its_column[:, None], 0, True)
            if copy_ptr is not None:
                other_key = of_copy(other_key, tl.load(copy_ptr + at)[:, None])
            own_key = key_of(seed_ptr, its_row[:, None], heads[None, :], False)
            factor = kept(own_key, other_key, DROPOUT, 1.0).to(HALF)
            left = of_eight(p * factor)
            if TILTED:
                bent_left = of_eight(bent * factor)
        most = rows_of_edges(place, HALF)
        new_running = nothing()
        for g in tl.static_range(8):
            total, high, acc, tilt = running[g]
            weight = in_rows(weights[g], most)
            total = dot(weight, ones, total, ACC)  # of what rows are multiplied with: it adds up to 1
            if DROPOUT > 0:
                weight = in_rows(left[g], most)
            acc = dot(weight, x, acc, ACC)
            if TILTED:
                weight = in_rows(bends[g], most)
                high = dot(weight, ones, high, ACC)
                if DROPOUT > 0:
                    weight = in_rows(bent_left[g], most)
                tilt = dot(weight, x, tilt, ACC)
            new_running += ((total, high, acc, tilt),)
        other, own, running = next_other, next_own, new_running
    new_states = nothing()
    for g in tl.static_range(8):
        its_total, its_high, acc, tilt = running[g]
        its_total, its_high = one_of_eight(its_total), one_of_eight(its_high)
        top = tl.where(its_total == 0, float("-inf"), states[g][0])  # NaN is not 0
        new_states += ((top, its_total, its_high, acc, tilt),)
    return new_states, seen
