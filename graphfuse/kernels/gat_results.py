"""What GAT's window kernel stores of its heads, two of which may share tiles."""

import triton
import triton.language as tl

from graphfuse.kernels.additive_tiles import store_features
from graphfuse.kernels.attention_tiles import LOG2_E, store_softmax
from graphfuse.kernels.tiles import rows_at


@triton.jit
def tile_of(x, WIDTH: tl.constexpr):
    # a number of each row, or each feature, as a tile [16, WIDTH]
    return x if len(x.shape) == 2 else tl.broadcast_to(x[:, None], (16, WIDTH))


@triton.jit
def each_its_own(parts, FIRST: tl.constexpr, PAIR: tl.constexpr, WIDTH: tl.constexpr):
    # Of what there is of each head of a pair, sums [16, WIDTH] or numbers [16], a tile in which the features
    # of a head have its own. The compiler knows which register holds what: what nobody reads then is not even
    # computed.
    tile = tile_of(parts[FIRST], WIDTH)
    for place in tl.static_range(1, PAIR):
        mine = tl.arange(0, WIDTH) >= place * (WIDTH // PAIR)
        tile = tl.where(mine[None, :], tile_of(parts[FIRST + place], WIDTH), tile)
    return tile


@triton.jit
def store_softmaxes(
    softmax_ptr, slots_ptr, row_index_ptr, window, slot, num_rows, head, states, HEADS: tl.constexpr,
    GROUP: tl.constexpr, TILTED: tl.constexpr,
):  # fmt: skip
    # What softmaxes of GROUP heads are known by; of a slice to its slot, with the sums of the tilt's weights.
    rows = rows_at(row_index_ptr, window * 16 + tl.arange(0, 16))
    whole = True
    if slots_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            offs_slot = (slot.to(tl.int64) * 16 + tl.arange(0, 16)) * HEADS + head
            for g in tl.static_range(GROUP):
                at = slots_ptr + (offs_slot + g) * 3
                tl.store(at, states[g][0] / LOG2_E, mask=head + g < HEADS)
                tl.store(at + 1, states[g][1], mask=head + g < HEADS)
                if TILTED:
                    tl.store(at + 2, states[g][2], mask=head + g < HEADS)
    if whole:
        place = rows.to(tl.int64) * HEADS + head
        for g in tl.static_range(GROUP):
            mask = (rows < num_rows) & (head + g < HEADS)
            store_softmax(softmax_ptr, place + g, mask, states[g][0] / LOG2_E, states[g][1])


@triton.jit
def store_sums(
    out_ptr, tilt_ptr, sum_ptr, partial_ptr, bias_ptr, slot, num_rows, rows, offs_dim, own, norm, bent,
    straight, acc, tilt, HEADS: tl.constexpr, DIM: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    # The features `own` of the rows of a window; of a slice, as they are, to its slot.
    whole = True
    if partial_ptr is not None:
        whole = slot < 0
        if slot >= 0:
            PARTS: tl.constexpr = 1 if tilt_ptr is None else 2
            offs_slot = (slot.to(tl.int64) * 16 + tl.arange(0, 16)) * (PARTS * HEADS * DIM)
            at = partial_ptr + offs_slot[:, None] + offs_dim[None, :]
            tl.store(at, acc, mask=own[None, :])
            if tilt_ptr is not None:
                tl.store(at + HEADS * DIM, tilt, mask=own[None, :])
    if whole:
        at = (rows.to(tl.int64) * (HEADS * DIM))[:, None] + offs_dim[None, :]
        store_features(
            out_ptr, tilt_ptr, sum_ptr, bias_ptr, at, own[None, :] & (rows < num_rows)[:, None],
            offs_dim[None, :], norm, bent, straight, acc, tilt, DROPOUT,
        )  # fmt: skip
