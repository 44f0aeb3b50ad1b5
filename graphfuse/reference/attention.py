"""Definition of sparse attention in plain PyTorch, on an edge list: any float dtype, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_attention(
    edge_index: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    edge_query: Tensor | None = None,
    edge_attr: Tensor | None = None,
    self_loops: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scaled dot-product attention in which node :math:`i` sees only its in-neighbours.

    .. math::
        o_i = \sum_{e = (j \to i)} \frac{m_e}{1 - r}\,
              \frac{\exp(\lambda q_i^\top k_j)}{\sum_{e' = (l \to i)} \exp(\lambda q_i^\top k_l)}\, v_j

    with :math:`m_e = 1`, or 0 with probability ``dropout`` = :math:`r`, for each head. With ``edge_attr``
    :math:`a` and ``edge_query`` :math:`u` the scores are :math:`\lambda (q_i^\top k_j + u_i^\top a_e)`, and
    the same weighted sum of :math:`a_e` is returned too.

    Args:
        edge_index: ``int64[2, num_edges]``, sources over receivers; a repeated edge counts as often.
        q: ``[num_dst, heads, head_dim]``.
        k: ``[num_src, heads, head_dim]``.
        v: ``[num_src, heads, head_dim]``.
        scale: The factor :math:`\lambda`; ``None`` means ``head_dim ** -0.5``.
        dropout: Probability that a weight is dropped.
        seed: ``int64[1]``, of the dropped weights.
        edge_query: ``[num_dst, heads, edge_dim]``, given with ``edge_attr``.
        edge_attr: ``[num_edges, edge_dim]``, numbers of the edges.
        self_loops: Whether each node has one loop, whatever ``edge_index`` says; without ``edge_attr``.

    Returns:
        ``[num_dst, heads, head_dim]``, and with ``edge_attr`` also ``[num_dst, heads, edge_dim]``; rows
        without in-neighbours are 0.
    """
    if self_loops:
        loops = torch.arange(q.size(0), device=q.device).to(edge_index)
        edge_index = torch.cat(
            [edge_index[:, edge_index[0] != edge_index[1]], torch.stack([loops, loops])], 1
        )
    src, dst = edge_index[0].long(), edge_index[1].long()
    scale = q.size(2) ** -0.5 if scale is None else scale
    # index_select: its derivative adds rows in float32 where that of q[dst] would round every addition
    score = (q.index_select(0, dst) * k.index_select(0, src)).sum(2)
    if edge_attr is not None:
        assert edge_query is not None
        score = score + (edge_query.index_select(0, dst) * edge_attr[:, None, :]).sum(2)
    weight = softmax(score * scale, dst, q.size(0))
    if dropout > 0:
        assert seed is not None
        keep = kept(edge_index, q.size(1), dropout, seed).to(weight.dtype)
        weight = weight * keep / (1 - dropout)
    out = v.new_zeros(q.shape).index_add(0, dst, weight[:, :, None] * v.index_select(0, src))
    if edge_attr is None:
        return out
    assert edge_query is not None
    edge_sum = torch.zeros_like(edge_query).index_add(0, dst, weight[:, :, None] * edge_attr[:, None, :])
    return out, edge_sum


def attention_weights(edge_index: Tensor, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Definition of :func:`graphfuse.ops.attention_weights`, on ``edge_index``: ``[num_edges, heads]``."""
    src, dst = edge_index[0].long(), edge_index[1].long()
    scale = q.size(2) ** -0.5 if scale is None else scale
    return softmax((q.index_select(0, dst) * k.index_select(0, src)).sum(2) * scale, dst, q.size(0))


def softmax(score: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """Of ``score``, ``[num_edges, heads]``, over the edges of each receiver in ``dst``."""
    size = (num_dst, score.size(1))
    index = dst[:, None].expand_as(score)
    top = score.new_full(size, float("-inf")).scatter_reduce(0, index, score.detach(), "amax")
    weight = (score - top[dst]).exp()
    total = weight.new_zeros(size).index_add(0, dst, weight)
    return weight / total.index_select(0, dst)


def kept(edge_index: Tensor, heads: int, dropout: float, seed: Tensor) -> Tensor:
    """Which weights dropout keeps, ``bool[num_edges, heads]``: a hash of (receiver, source, copy, head).

    Philox-4x32 of 7 rounds (Salmon et al., SC 2011), as ``tl.philox`` computes it, gives two words to each
    source and two to each receiver and head; the product of what the two ends of an edge make of each is its
    draw of 32 bits.
    """
    src, dst = edge_index[0].long(), edge_index[1].long()
    zero = torch.zeros_like(src)
    head = torch.arange(heads, device=src.device)
    a, b = _philox(seed, dst[:, None], head[None, :], zero[:, None])
    other_a, other_b = _philox(seed, src, zero, zero + 1)
    other_a = other_a ^ (copy_of(edge_index) * 0x9E3779B9) & 0xFFFFFFFF
    _, draw = _product(a ^ other_a[:, None], b ^ other_b[:, None] | 1)
    return draw >= min(round(dropout * 2**32), 2**32 - 1)


def _philox(seed: Tensor, *counters: Tensor) -> tuple[Tensor, Tensor]:
    # the first two words; the fourth counter is 0
    c0, c1, c2 = torch.broadcast_tensors(*counters)
    c3 = torch.zeros_like(c0)
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(7):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1


def copy_of(edge_index: Tensor) -> Tensor:
    """How many equal edges stand before each edge."""
    src, dst = edge_index[0].long(), edge_index[1].long()
    key = dst * (int(src.max()) + 1 if src.numel() else 1) + src
    ordered, order = torch.sort(key, stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.arange(key.numel(), device=key.device) - first
    return torch.empty_like(place).scatter_(0, order, place)


def _product(a: int | Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    # upper and lower 32 bits of a 32 x 32 bit product, in 64-bit integers that have a sign
    low, high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = high * b_low + ((low * b_low) >> 16)
    cross = low * b_high + (middle & 0xFFFF)
    return high * b_high + (middle >> 16) + (cross >> 16), (cross << 16 | (low * b_low) & 0xFFFF) & 0xFFFFFFFF
