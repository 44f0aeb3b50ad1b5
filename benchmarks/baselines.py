"""What graphfuse is measured against: PyG's message passing, and PyTorch's sparse matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax


class PygSum(MessagePassing):
    """PyG's own gather and scatter: a message an edge, in memory."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """The sum over each node's in-neighbours."""
        # propagate_type: (x: Tensor, edge_weight: OptTensor)
        out: Tensor = self.propagate(edge_index, x=x, edge_weight=edge_weight)
        return out

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        """As in PyG's GCNConv."""
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


class PygAttention(MessagePassing):
    """The message of PyG's TransformerConv, without its projections: a key and a value an edge, in memory."""

    def __init__(self, factor: Tensor | None = None) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.factor = factor  # [num_edges, heads]: of dropout, drawn beforehand

    def forward(self, query: Tensor, key: Tensor, value: Tensor, edge_index: Tensor) -> Tensor:
        """Attention of each node over its in-neighbours, ``[num_nodes, heads, head_dim]``."""
        # propagate_type: (query: Tensor, key: Tensor, value: Tensor)
        out: Tensor = self.propagate(edge_index, query=query, key=key, value=value)
        return out

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        """As in PyG's TransformerConv, without edge features."""
        alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(query_i.size(-1))
        alpha = softmax(alpha, index, ptr, size_i)
        if self.factor is not None:
            alpha = alpha * self.factor
        return value_j * alpha.view(-1, query_i.size(1), 1)


class PygAdditive(MessagePassing):
    """The steps of PyG's GATConv, GATv2Conv or AGNNConv, without projections and self-loops.

    ``factor``: what dropout multiplies the weights with, ``[num_edges, heads]``.
    """

    def __init__(self, kind: str, factor: Tensor | None = None) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.kind, self.factor = kind, factor

    def forward(self, edge_index: Tensor, **operands: Tensor) -> Tensor:
        """Attention of each node over its in-neighbours, ``[num_nodes, heads, head_dim]``."""
        source, target = edge_index
        if self.kind == "gat":
            x = operands["x"]
            score = operands["a_src"][source] + operands["a_dst"][target]
            score = F.leaky_relu(score + operands["edge_score"] if "edge_score" in operands else score, 0.2)
        elif self.kind == "gatv2":
            x = operands["x_src"]
            row = x[source] + operands["x_dst"][target]
            row = row + operands["edge"] if "edge" in operands else row
            score = (F.leaky_relu(row, 0.2) * operands["att"]).sum(2)
        else:
            x = operands["x"]
            unit = F.normalize(x, dim=2)
            score = operands["beta"] * (unit[target] * unit[source]).sum(2)
        alpha = softmax(score, target, num_nodes=x.size(0))
        if self.factor is not None:
            alpha = alpha * self.factor
        # propagate_type: (x: Tensor, alpha: Tensor)
        out: Tensor = self.propagate(edge_index, x=x, alpha=alpha)
        return out

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """As in those layers."""
        return x_j * alpha.unsqueeze(-1)


class SparseSum:
    """cuSPARSE's CSR product through ``torch.sparse``, the matrix and its transpose made beforehand.

    Row i of the matrix holds the in-neighbours of node i, the format that suits cuSPARSE best. Weights are
    constants: the product's derivative in them does not exist in half precision.
    """

    def __init__(
        self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype, edge_weight: Tensor | None = None
    ) -> None:
        source, target = edge_index
        if edge_weight is None:
            edge_weight = torch.ones(1, dtype=dtype, device=edge_index.device).expand(source.numel())
        self.matrix = _csr(target, source, num_nodes, edge_weight)
        self.transposed = _csr(source, target, num_nodes, edge_weight)
        if _same(self.matrix, self.transposed):  # a symmetric one need not be kept twice
            self.transposed = self.matrix

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over each node's in-neighbours."""
        out: Tensor = _SparseProduct.apply(self.matrix, self.transposed, x)
        return out


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transposed @ grad


def _csr(row: Tensor, column: Tensor, num_nodes: int, values: Tensor) -> Tensor:
    order = torch.argsort(row * num_nodes + column)
    bounds = torch.arange(num_nodes + 1, device=row.device)
    pointers = torch.searchsorted(row[order], bounds).to(torch.int32)
    column = column[order].to(torch.int32)
    size = (num_nodes, num_nodes)
    return torch.sparse_csr_tensor(pointers, column, values[order], size, check_invariants=False)


def _same(left: Tensor, right: Tensor) -> bool:
    parts = ("crow_indices", "col_indices", "values")
    return all(torch.equal(getattr(left, part)(), getattr(right, part)()) for part in parts)
