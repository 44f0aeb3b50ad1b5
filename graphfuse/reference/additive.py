"""Definition of additive attention, GAT's and GATv2's, in plain PyTorch, on an edge list: any float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.reference.attention import kept, softmax


def gat_attention(
    edge_index: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    x: Tensor,
    negative_slope: float = 0.2,
    edge_score: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    self_loops: bool = False,
    loop_score: Tensor | None = None,
) -> Tensor:
    r"""Attention whose scores are a number of the source plus one of the receiver.

    .. math::
        o_i = \sum_{e = (j \to i)} \frac{m_e}{1 - r}\,
              \frac{\exp s_e}{\sum_{e' = (l \to i)} \exp s_{e'}}\, x_j, \qquad
        s_e = \mathrm{LeakyReLU}(a^{src}_j + a^{dst}_i + b_e)

    with :math:`m_e = 1`, or 0 with probability ``dropout`` = :math:`r`, for each head.

    Args:
        edge_index: ``int64[2, num_edges]``, sources over receivers; a repeated edge counts as often.
        a_src: ``[num_src, heads]``.
        a_dst: ``[num_dst, heads]``.
        x: ``[num_src, heads, head_dim]``.
        negative_slope: Slope of the LeakyReLU below 0.
        edge_score: :math:`b`, ``[num_edges, heads]``.
        dropout: Probability that a weight is dropped.
        seed: ``int64[1]``, of the dropped weights.
        self_loops: Whether each of the first ``min(num_dst, num_src)`` nodes has one loop, whatever
            ``edge_index`` says.
        loop_score: :math:`b` of those loops, ``[num_loops, heads]``.

    Returns:
        ``[num_dst, heads, head_dim]``; rows without in-neighbours are 0.
    """
    return _sums(
        x,
        a_dst.size(0),
        *gat_attention_weights(
            edge_index, a_src, a_dst, negative_slope, edge_score, dropout, seed, self_loops, loop_score
        ),
    )


def gat_attention_weights(
    edge_index: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    negative_slope: float = 0.2,
    edge_score: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    self_loops: bool = False,
    loop_score: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`gat_attention` after dropout: edges, loops last, and ``[num_weights, heads]``."""
    edge_index, edge_score = with_loops(edge_index, edge_score, a_src, a_dst, self_loops, loop_score)
    # index_select: its derivative adds rows in float32 where that of a_src[src] would round every addition
    score = a_src.index_select(0, edge_index[0]) + a_dst.index_select(0, edge_index[1])
    if edge_score is not None:
        score = score + edge_score
    return _weights(edge_index, F.leaky_relu(score, negative_slope), a_dst.size(0), dropout, seed)


def gatv2_attention(
    edge_index: Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    edge: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    self_loops: bool = False,
    loop_edge: Tensor | None = None,
) -> Tensor:
    r"""Attention whose scores are :math:`s_e = a^\top \mathrm{LeakyReLU}(x_j + y_i + b_e)` for each head.

    Args:
        edge_index: ``int64[2, num_edges]``, sources over receivers; a repeated edge counts as often.
        x_src: :math:`x`, ``[num_src, heads, head_dim]``, of which the weighted sum is taken too.
        x_dst: :math:`y`, ``[num_dst, heads, head_dim]``.
        att: :math:`a`, ``[heads, head_dim]``.
        negative_slope: Slope of the LeakyReLU below 0.
        edge: :math:`b`, ``[num_edges, heads, head_dim]``.
        dropout: Probability that a weight is dropped.
        seed: ``int64[1]``, of the dropped weights.
        self_loops: Whether each of the first ``min(num_dst, num_src)`` nodes has one loop, whatever
            ``edge_index`` says.
        loop_edge: :math:`b` of those loops, ``[num_loops, heads, head_dim]``.

    Returns:
        ``[num_dst, heads, head_dim]``; rows without in-neighbours are 0.
    """
    return _sums(
        x_src,
        x_dst.size(0),
        *gatv2_attention_weights(
            edge_index, x_src, x_dst, att, negative_slope, edge, dropout, seed, self_loops, loop_edge
        ),
    )


def gatv2_attention_weights(
    edge_index: Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    edge: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    self_loops: bool = False,
    loop_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights of :func:`gatv2_attention` after dropout: edges, loops last, ``[num_weights, heads]``."""
    edge_index, edge = with_loops(edge_index, edge, x_src, x_dst, self_loops, loop_edge)
    hidden = x_src.index_select(0, edge_index[0]) + x_dst.index_select(0, edge_index[1])
    if edge is not None:
        hidden = hidden + edge
    score = (F.leaky_relu(hidden, negative_slope) * att).sum(2)
    return _weights(edge_index, score, x_dst.size(0), dropout, seed)


def with_loops(
    edge_index: Tensor,
    edge: Tensor | None,
    src: Tensor,
    dst: Tensor,
    self_loops: bool,
    of_loops: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Edges and their numbers; with ``self_loops`` less the loops among them, and then one for each node."""
    edge_index = edge_index.long()
    if not self_loops:
        return edge_index, edge
    loops = torch.arange(min(src.size(0), dst.size(0)), device=src.device)
    others = (edge_index[0] != edge_index[1]).nonzero().view(-1)
    edge_index = torch.cat([edge_index.index_select(1, others), torch.stack([loops, loops])], 1)
    if edge is not None:
        assert of_loops is not None
        edge = torch.cat([edge.index_select(0, others), of_loops])
    return edge_index, edge


def _weights(
    edge_index: Tensor, score: Tensor, num_dst: int, dropout: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    weight = softmax(score, edge_index[1], num_dst)
    if dropout > 0:
        assert seed is not None
        weight = weight * kept(edge_index, score.size(1), dropout, seed).to(weight.dtype) / (1 - dropout)
    return edge_index, weight


def _sums(x: Tensor, num_dst: int, edge_index: Tensor, weight: Tensor) -> Tensor:
    messages = weight[:, :, None] * x.index_select(0, edge_index[0])
    return messages.new_zeros(num_dst, *x.shape[1:]).index_add(0, edge_index[1], messages)
