"""Which weights dropout keeps: a hash of (seed, receiver, source, copy of a repeated edge, head).

Each end of an edge has a key, an odd word of 32 bits; the product of the two is the draw. So a kernel hashes
once for a row and a column what their edges share, and what is left for an edge is one multiplication, which
forward and backward make alike, whichever end they hold. Products with random odd numbers are the universal
hash of Dietzfelbinger et al. (J. Algorithms 25, 1997); keys are made by the mixer "lowbias32" of C. Wellons.
Definition: :func:`graphfuse.reference.attention.kept`.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def threshold(dropout):
    # draws of 32 bits below this are dropped
    return min(round(dropout * 2**32), 2**32 - 1)


@triton.jit
def mixed(x):
    # each bit of the result depends on all bits of x
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def key_of(seed_ptr, node, head, SOURCE: tl.constexpr):
    # What a node, as a source or as a receiver and head, has to say about dropout: an odd word.
    seed = tl.load(seed_ptr)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    start = mixed(mixed(low ^ 0x243F6A88 if SOURCE else low) + high)
    place = node.to(tl.uint32) * 0x9E3779B1 + start
    if not SOURCE:
        place += head.to(tl.uint32) * 0x85EBCA77
    return mixed(place) | 1


@triton.jit
def of_copy(key, copy):
    # the key of one end of an edge, no matter which, where a repeated edge has many
    return key * (copy.to(tl.uint32) * 0x3C6EF372 + 1)


@triton.jit
def kept(own, other, DROPOUT: tl.constexpr, VALUE: tl.constexpr):
    # VALUE where dropout keeps the weight between nodes with these keys, else 0
    return tl.where(own * other >= threshold(DROPOUT), VALUE, 0.0)
