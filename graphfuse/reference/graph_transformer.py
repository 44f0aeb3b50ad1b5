"""The Graph Transformer layer in plain PyG: definition and baseline of the fused one."""

# no `from __future__ import annotations`: PyG's inspector reads the annotations as objects
import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj, OptTensor
from torch_geometric.utils import softmax


class GraphTransformerLayer(MessagePassing):  # type: ignore[misc]  # PyG is untyped
    """:class:`graphfuse.nn.GraphTransformerLayer` around PyG's ``propagate``, nothing fused.

    Same arguments, parameters, initialisation and random draws: ``state_dict`` goes both ways, and the same
    seed gives the same weights and the same dropout. Any float dtype, any device.
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
        """Attention, residual, norm, feed-forward, residual, norm."""
        check_inputs(x, edge_attr, self.channels, self.edge_dim)
        query = self.lin_query(x).view(-1, self.heads, self.head_dim)
        key = self.lin_key(x).view(-1, self.heads, self.head_dim)
        value = self.lin_value(x).view(-1, self.heads, self.head_dim)
        edge = None
        if self.lin_edge is not None:
            edge = self.lin_edge(edge_attr).view(-1, self.heads, self.head_dim)

        # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge: OptTensor)
        out = self.propagate(edge_index, query=query, key=key, value=value, edge=edge)
        self._alpha = None

        out = F.dropout(out.view(-1, self.channels), self.dropout, self.training)
        x = self.norm_1(x + self.lin_out(out))
        hidden = F.dropout(self.lin_1(x).relu(), self.dropout, self.training)
        return self.norm_2(x + self.lin_2(hidden))  # type: ignore[no-any-return]

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
        alpha: Tensor = softmax(scores, index, ptr, size_i)
        self._alpha = alpha  # PyG's AttentionExplainer looks for it
        return value_j * alpha.unsqueeze(-1)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.channels}, heads={self.heads}, norm={self.norm!r})"


def check_options(channels: int, heads: int, dropout: float, norm: str) -> None:
    """Refuses what the constructor of the layer and of its definition cannot take."""
    if heads < 1 or channels < 1 or channels % heads:
        raise ValueError(
            f"`channels` must be a positive multiple of `heads` (got channels={channels}, heads={heads}); "
            "each head takes channels / heads of them"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"`dropout` must be in [0, 1] (got {dropout}); it is the rate that is dropped")
    if norm not in ("batch", "layer"):
        raise ValueError(f"`norm` must be 'batch' or 'layer' (got {norm!r}); the authors use 'batch'")


def check_inputs(x: Any, edge_attr: Any, channels: int, edge_dim: int | None) -> None:
    """Refuses what forward would fail on later, or compute something else from."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.size(1) != channels:
        raise ValueError(
            f"`x` must be a tensor [num_nodes, {channels}] (got {_describe(x)}); sources and receivers are "
            "the same nodes, and the residual keeps their width"
        )
    if edge_dim is None and edge_attr is not None:
        raise ValueError(
            f"`edge_attr` must be None (got {_describe(edge_attr)}), as the layer was built without "
            "edge_dim; build it with edge_dim, or leave edge_attr out"
        )
    if edge_dim is not None and (
        not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2 or edge_attr.size(1) != edge_dim
    ):
        raise ValueError(
            f"`edge_attr` must be a tensor [num_edges, {edge_dim}] (got {_describe(edge_attr)}), as the "
            f"layer was built with edge_dim={edge_dim}; pass it, or build the layer without edge_dim"
        )


def _describe(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
