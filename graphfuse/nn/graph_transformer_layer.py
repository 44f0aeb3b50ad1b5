"""GraphTransformerLayer: attention over neighbours, then a feed-forward network, with residuals and norms."""

# no `from __future__ import annotations`: PyG's inspector reads the annotations as objects
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj, OptTensor
from torch_geometric.utils import softmax

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.nn import _dispatch
from graphfuse.nn._attention import attend, edge_reasons
from graphfuse.nn._norm import attended_norm, mapped_relu, residual_norm
from graphfuse.nn._projection import mapped, may_read, one_head, stacked
from graphfuse.ops.attention import MAX_HEAD_DIM
from graphfuse.reference.graph_transformer import check_inputs, check_options

_PROJECTIONS = ("lin_query", "lin_key", "lin_value")
_AFTER_ATTENTION = ("lin_out", "norm_1", "lin_1", "lin_2", "norm_2")


class GraphTransformerLayer(MessagePassing):
    r"""The Graph Transformer layer of Dwivedi & Bresson, fused.

    .. math::
        \hat h_i &= \mathrm{Norm}\Bigl(x_i + O\, \big\Vert_{k=1}^{H} \sum_{j \in N(i)}
            \alpha^k_{ij} V^k x_j\Bigr), \qquad
        \alpha^k_{ij} = \mathrm{softmax}_j\, (Q^k x_i)^\top (K^k x_j) / \sqrt{d} \\
        x'_i &= \mathrm{Norm}\bigl(\hat h_i + W_2\, \mathrm{ReLU}(W_1 \hat h_i)\bigr)

    Scores, softmax and the weighted sum are one kernel (:func:`graphfuse.ops.sparse_attention`); query, key
    and value are one product of stacked weights; the map of edge features is folded into query and result, so
    no projected row per edge is stored. Where fusion does not apply (see :func:`graphfuse.why_not`), the same
    layer runs PyG's path. :math:`Q`, :math:`K` and :math:`V` have no bias, as in the authors' code;
    :math:`O`, :math:`W_1` and :math:`W_2` have one. Their code clamps the scores to [-5, 5]; this layer does
    not, its softmax subtracts the row's maximum. No self-loops are added.

    Args:
        channels: Size of each input and output row, a multiple of ``heads``.
        heads: Number of heads :math:`H`, each of size :math:`d` = ``channels / heads``.
        dropout: Rate of dropout, in training, of the features that go into :math:`O` and of those that leave
            the ReLU, where the authors' code has it. Attention weights are never dropped.
        norm: ``"batch"`` (:class:`torch.nn.BatchNorm1d` over the nodes, as the authors) or ``"layer"``
            (:class:`torch.nn.LayerNorm`).
        ffn_ratio: Size of the hidden rows of the feed-forward network, in ``channels``.
        edge_dim: Size of edge features. They pass a linear map without bias and are added to keys and
            values, as in ``TransformerConv``. This stands for the paper's edge pipeline, which multiplies
            scores by edge features and updates those in each layer.

    Shapes:
        - **input:** features :math:`(|V|, H d)`, edge indices :math:`(2, |E|)` or
          :class:`graphfuse.RowWindows`, edge features :math:`(|E|, D)` if ``edge_dim`` is :math:`D`
        - **output:** features :math:`(|V|, H d)`

    Raises:
        ValueError: ``channels`` is no multiple of ``heads``, ``dropout`` or ``norm`` is not one of the above;
            in forward, ``x`` or ``edge_attr`` has another shape, or ``edge_attr`` and ``edge_dim`` are not
            both given.

    Note:
        Reference and PyG baseline: :class:`graphfuse.reference.GraphTransformerLayer`, with the same
        ``state_dict``. Source: A Generalization of Transformer Networks to Graphs, arXiv:2012.09699.
    """

    _alpha: OptTensor

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        dropout: float = 0.0,
        norm: str = "batch",
        ffn_ratio: int = 2,
        edge_dim: int | None = None,
    ) -> None:
        check_options(channels, heads, dropout, norm)
        super().__init__(aggr="add", node_dim=0)
        self.channels = channels
        self.heads = heads
        self.head_dim = channels // heads
        self.dropout = dropout
        self.norm = norm
        self.ffn_ratio = ffn_ratio
        self.edge_dim = edge_dim
        self._alpha = None

        self.lin_query = Linear(channels, channels, bias=False)
        self.lin_key = Linear(channels, channels, bias=False)
        self.lin_value = Linear(channels, channels, bias=False)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, channels, bias=False)
        self.lin_out = Linear(channels, channels)
        make_norm = torch.nn.BatchNorm1d if norm == "batch" else torch.nn.LayerNorm
        self.norm_1 = make_norm(channels)
        self.lin_1 = Linear(channels, ffn_ratio * channels)
        self.lin_2 = Linear(ffn_ratio * channels, channels)
        self.norm_2 = make_norm(channels)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, and forgets the running statistics of batch norm."""
        super().reset_parameters()
        for module in self.children():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, x: Tensor, edge_index: Adj, edge_attr: OptTensor = None) -> Tensor:
        """Runs the layer, its attention fused where that is possible."""
        check_inputs(x, edge_attr, self.channels, self.edge_dim)
        plainly = (
            self.head_dim <= MAX_HEAD_DIM
            and _dispatch.holds(self, GraphTransformerLayer, x, edge_index)
            and not self._edge_reasons(x, edge_index, edge_attr)
        )
        reasons = [] if plainly else self.why_not_fused(x, edge_index, edge_attr)
        lin_out, norm_1, lin_1, lin_2, norm_2 = (self._modules[name] for name in _AFTER_ATTENTION)
        if reasons:
            edge_index = _dispatch.fall_back(self, reasons, edge_index)
            out = self._dropped(self._attend_generic(x, edge_index, edge_attr).view(-1, self.channels))
            x = norm_1(x + lin_out(out))
            found: Tensor = norm_2(x + lin_2(self._dropped(lin_1(x).relu())))
            return found
        _dispatch.note(self, reasons)
        windows, folded = row_windows(edge_index, x.size(0), x.size(0)), None
        if self.heads == 1 and edge_attr is None and not (self.training and self.dropout):
            folded = one_head(x, *[self._modules[name] for name in (*_PROJECTIONS, "lin_out")])
        if folded is not None:
            x = attended_norm(x, *folded, windows, norm_1, lin_out._parameters["bias"])
        else:
            out = self._dropped(self._attend_fused(x, windows, edge_attr).view(-1, self.channels))
            x = residual_norm(x, mapped(out, lin_out), norm_1)
        hidden = self._dropped(mapped_relu(x, lin_1))
        return residual_norm(x, mapped(hidden, lin_2), norm_2)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: Optional[int],  # noqa: UP045
    ) -> Tensor:
        """A neighbour's value (and the edge's features), times the attention weight."""
        if edge is not None:
            key_j = key_j + edge
            value_j = value_j + edge
        scores = (query_i * key_j).sum(dim=-1) / math.sqrt(self.head_dim)
        alpha = softmax(scores, index, ptr, size_i)
        self._alpha = alpha  # PyG's AttentionExplainer looks for it
        return value_j * alpha.unsqueeze(-1)

    def why_not_fused(self, x: Any, edge_index: Any, edge_attr: Any = None) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        reasons = list(_dispatch.common_reasons(self, GraphTransformerLayer, x, edge_index))
        reasons += [] if reasons else self._edge_reasons(x, edge_index, edge_attr)
        return reasons + width_reasons(self)

    def _edge_reasons(self, x: Any, edge_index: Any, edge_attr: Any) -> list[str]:
        return edge_reasons(self.lin_edge, edge_attr, x, edge_index, self.heads, self.head_dim)

    def _attend_fused(self, x: Tensor, windows: RowWindows, edge_attr: OptTensor) -> Tensor:
        query, key, value = self._project(x)
        edge_weight = None if self.lin_edge is None else self.lin_edge.weight
        return attend(query, key, value, windows, 0.0, edge_attr, edge_weight)

    def _attend_generic(self, x: Tensor, edge_index: Any, edge_attr: OptTensor) -> Tensor:
        layers = (self.lin_query, self.lin_key, self.lin_value)
        query, key, value = (lin(x).view(-1, self.heads, self.head_dim) for lin in layers)
        edge = None
        if self.lin_edge is not None:
            edge = self.lin_edge(edge_attr).view(-1, self.heads, self.head_dim)
        # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge: OptTensor)
        out = self.propagate(edge_index, query=query, key=key, value=value, edge=edge)
        self._alpha = None
        return out

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        layers: list[Any] = [self._modules[name] for name in _PROJECTIONS]
        if not may_read(*layers):
            return [mapped(x, lin).view(-1, self.heads, self.head_dim) for lin in layers]
        return stacked(x, layers, self.head_dim)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.channels}, heads={self.heads}, norm={self.norm!r})"


def width_reasons(layer: GraphTransformerLayer) -> list[str]:
    """Why the heads of ``layer`` do not fuse, a sentence; empty if they do."""
    if layer.head_dim <= MAX_HEAD_DIM:
        return []
    return [f"channels / heads is {layer.head_dim}; the kernels take heads of at most {MAX_HEAD_DIM}"]
