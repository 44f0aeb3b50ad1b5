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

    Each source, and each receiver and head, has a key, an odd word of 32 bits; the product of those at the
    two ends of an edge is its draw, times a constant of each copy but the first. Source: Dietzfelbinger et
    al., A Reliable Randomized Algorithm for the Closest-Pair Problem, J. Algorithms 25, 1997; bits are mixed
    by C. Wellons' "lowbias32".
    """
    src, dst = edge_index[0].long(), edge_index[1].long()
    low, high = seed & _WORD, (seed >> 32) & _WORD
    place = dst[:, None] * 0x9E3779B1 + torch.arange(heads, device=src.device) * 0x85EBCA77
    own = _mixed(place + _mixed(_mixed(low) + high)) | 1
    other = _mixed(src * 0x9E3779B1 + _mixed(_mixed(low ^ 0x243F6A88) + high)) | 1
    other = other * (copy_of(edge_index) * 0x3C6EF372 + 1) & _WORD
    draw = own * other[:, None] & _WORD
    return draw >= min(round(dropout * 2**32), 2**32 - 1)


_WORD = 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    # of the low 32 bits; products wrap around in the high ones
    x = x & _WORD
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16


def copy_of(edge_index: Tensor) -> Tensor:
    """How many equal edges stand before each edge."""
    src, dst = edge_index[0].long(), edge_index[1].long()
    key = dst * (int(src.max()) + 1 if src.numel() else 1) + src
    ordered, order = torch.sort(key, stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.arange(key.numel(), device=key.device) - first
    return torch.empty_like(place).scatter_(0, order, place)
