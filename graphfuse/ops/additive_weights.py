"""The weights of additive attention, edge by edge, for those who ask: attention itself stores none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.lasting import savable
from graphfuse.ops._check_additive import check_gat, check_gatv2
from graphfuse.ops._library import once_differentiable
from graphfuse.reference.additive import with_loops
from graphfuse.reference.attention import kept


def gat_attention_weights(
    a_src: Tensor,
    a_dst: Tensor,
    windows: RowWindows,
    negative_slope: float = 0.2,
    edge_score: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    self_loops: bool = False,
    loop_score: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""What :func:`gat_attention` weighs each edge with, after dropout.

    .. math::
        \alpha_e = \frac{m_e}{1 - r}\, \frac{e^{s_e}}{\sum_{e' = (l \to i)} e^{s_{e'}}}, \qquad
        s_e = \mathrm{LeakyReLU}(a^{src}_j + a^{dst}_i + b_e), \qquad e = (j \to i)

    Args:
        a_src: As of :func:`gat_attention`, like all that follow.
        a_dst: ``[num_dst, heads]``.
        windows: The graph.
        negative_slope: Slope of the LeakyReLU below 0.
        edge_score: :math:`b`, ``[num_edges, heads]``.
        dropout: Rate :math:`r`.
        seed: ``int64[1]``; that of the attention whose weights these are.
        self_loops: Whether each of the first ``min(num_dst, num_src)`` nodes has one loop instead of those
            in the graph.
        loop_score: :math:`b` of those loops.

    Returns:
        ``(edge_index, alpha)``: ``int64[2, num_weights]``, the edges in the order that the windows were built
        from, with ``self_loops`` less the loops among them and then a loop for each node; and
        ``[num_weights, heads]`` in the dtype of ``a_src``, computed in float32.

    Raises:
        ValueError: a shape, dtype, device or rate differs from the above; the message names the argument.

    Note:
        Plain PyTorch, with some tensors of the size of the result; waits for the GPU. Bitwise reproducible,
        forward and backward, and differentiable once. Reference:
        :func:`graphfuse.reference.gat_attention_weights`.
    """
    seed = check_gat(a_src, a_dst, None, windows, dropout, seed, self_loops, edge_score, loop_score)
    listed, edge_score = with_loops(windows.edge_index(), edge_score, a_src, a_dst, self_loops, loop_score)
    edges = _Edges.of(listed, windows)
    score = edges.pairs(a_src.to(_wide(a_src)), a_dst.to(_wide(a_dst)))
    if edge_score is not None:
        score = score + edge_score.to(score.dtype)
    return edges.weights(F.leaky_relu(score, negative_slope), dropout, seed, a_src.dtype)


def gatv2_attention_weights(
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    windows: RowWindows,
    negative_slope: float = 0.2,
    edge: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    self_loops: bool = False,
    loop_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""What :func:`gatv2_attention` weighs each edge with, after dropout.

    Arguments are those of :func:`gatv2_attention`, results those of :func:`gat_attention_weights`, with
    :math:`s_e = a^\top \mathrm{LeakyReLU}(x_j + y_i + b_e)`, in the dtype of ``att``.

    Raises:
        ValueError: a shape, dtype, device or rate differs from those; the message names the argument.

    Note:
        As :func:`gat_attention_weights`, but with tensors of ``num_edges * heads * head_dim`` numbers.
        Reference: :func:`graphfuse.reference.gatv2_attention_weights`.
    """
    seed = check_gatv2(x_src, x_dst, att, windows, dropout, seed, self_loops, edge, loop_edge)
    listed, edge = with_loops(windows.edge_index(), edge, x_src, x_dst, self_loops, loop_edge)
    edges = _Edges.of(listed, windows)
    hidden = edges.pairs(x_src.to(_wide(x_src)), x_dst.to(_wide(x_dst)))
    if edge is not None:
        hidden = hidden + edge.to(hidden.dtype)
    score = (F.leaky_relu(hidden, negative_slope) * att.to(hidden.dtype)).sum(2)
    return edges.weights(score, dropout, seed, att.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Segments(NamedTuple):
    """Edges by the node at one end."""

    node: Tensor  # int64[num_edges]
    order: Tensor  # int64[num_edges]: the edges of node 0, of node 1, ...
    ptr: Tensor  # int64[num_nodes + 1]: where they start

    @classmethod
    def of(cls, node: Tensor, num_nodes: int) -> _Segments:
        ordered, order = torch.sort(node, stable=True)
        bounds = torch.arange(num_nodes + 1, device=node.device)
        return cls(node, order, torch.searchsorted(ordered, bounds))

    def sums(self, x: Tensor) -> Tensor:
        """Sums of rows of ``x``, one for each edge, in a fixed order: a scatter would not promise one."""
        return torch.segment_reduce(x.index_select(0, self.order), "sum", offsets=self.ptr, axis=0, initial=0)


class _Edges(NamedTuple):
    """An edge list from both ends. Made anew in each call: with the record it would be 40 bytes an edge."""

    edge_index: Tensor
    src: _Segments
    dst: _Segments

    @classmethod
    def of(cls, edge_index: Tensor, windows: RowWindows) -> _Edges:
        num_dst, num_src = windows.shape
        src, dst = edge_index.unbind()
        return cls(edge_index, _Segments.of(src, num_src), _Segments.of(dst, num_dst))

    def pairs(self, of_src: Tensor, of_dst: Tensor) -> Tensor:
        found: Tensor = _Gather.apply(of_src, self.src) + _Gather.apply(of_dst, self.dst)
        return found

    def weights(
        self, score: Tensor, dropout: float, seed: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        alpha: Tensor = _Softmax.apply(score, self.dst)
        if seed is not None:
            keep = kept(self.edge_index, score.size(1), dropout, seed)
            alpha = alpha * keep / (1 - dropout)
        return self.edge_index, alpha.to(dtype)


class _Gather(torch.autograd.Function):
    """Rows of the nodes at one end of the edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: _Segments) -> Tensor:
        ctx.ends = ends
        return x.index_select(0, ends.node)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ends.sums(grad), None


class _Softmax(torch.autograd.Function):
    """Over the edges of each receiver."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, receivers: _Segments) -> Tensor:
        top = torch.segment_reduce(
            score.index_select(0, receivers.order), "max", offsets=receivers.ptr, axis=0
        )
        weight = (score - top.index_select(0, receivers.node)).exp()
        weight = weight / receivers.sums(weight).index_select(0, receivers.node)
        ctx.receivers = receivers
        # its ends are the caller's, who may write to them before backward
        ctx.save_for_backward(weight, savable(receivers.node))
        return weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight, node = ctx.saved_tensors
        mean = ctx.receivers.sums(weight * grad)
        return weight * (grad - mean.index_select(0, node)), None
