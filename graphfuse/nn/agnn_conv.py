"""AGNNConv: attention by the cosine of the features themselves."""

# no `from __future__ import annotations`: TorchScript reads the class annotations as objects
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import Adj, OptTensor, SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from graphfuse import ops
from graphfuse.formats.cache import row_windows
from graphfuse.nn import _dispatch
from graphfuse.nn._projection import cast
from graphfuse.ops.agnn_layer import agnn_layer
from graphfuse.ops.attention import MAX_HEAD_DIM
from graphfuse.ops.unit_rows import unit_rows


class AGNNConv(MessagePassing):
    r"""Attentional propagation after Thekumparampil et al., fused: a drop-in for PyG's ``AGNNConv``.

    .. math::
        x'_i = \sum_{j \in N(i) \cup \{i\}} \alpha_{ij} x_j, \qquad
        \alpha_{ij} = \frac{\exp(\beta \cos(x_i, x_j))}
        {\sum_{l \in N(i) \cup \{i\}} \exp(\beta \cos(x_i, x_l))}

    Constructor, forward, parameters, ``state_dict`` and initialisation are those of
    :class:`torch_geometric.nn.AGNNConv`. Self-loops are a term of the kernel, not edges. Where fusion does
    not apply (see :func:`graphfuse.why_not`), the same layer runs PyG's path.

    Args:
        requires_grad: Whether :math:`\beta` is trained; else it is a buffer of value 1.
        add_self_loops: Whether every node gets one self-loop in place of those of the graph.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** features :math:`(|V|, F)`, edge indices :math:`(2, |E|)` or :class:`graphfuse.RowWindows`
        - **output:** features :math:`(|V|, F)`

    Source: arXiv:1803.03735.
    """

    def __init__(self, requires_grad: bool = True, add_self_loops: bool = True, **kwargs: Any) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(**kwargs)
        self.requires_grad = requires_grad
        self.add_self_loops = add_self_loops
        if requires_grad:
            self.beta = Parameter(torch.empty(1))
        else:
            self.register_buffer("beta", torch.ones(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Sets a trained :math:`\beta` to 1."""
        super().reset_parameters()
        if self.requires_grad:
            self.beta.data.fill_(1)

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        """Runs the layer, fused where that is possible."""
        if not torch.jit.is_scripting():
            plainly = (
                type(x) is Tensor
                and _dispatch.holds(self, AGNNConv, x, edge_index)
                and 0 < x.size(1) <= MAX_HEAD_DIM
                and self.beta.dtype is x.dtype
            )
            reasons = [] if plainly else self.why_not_fused(x, edge_index)
            if not reasons:
                _dispatch.note(self, reasons)
                return self._forward_fused(x, edge_index)
            edge_index = _dispatch.fall_back(self, reasons, edge_index)

        if self.add_self_loops:
            if isinstance(edge_index, Tensor):
                edge_index, _ = remove_self_loops(edge_index)
                edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(self.node_dim))
            elif isinstance(edge_index, SparseTensor):
                edge_index = torch_sparse.set_diag(edge_index)

        x_norm = F.normalize(x, p=2.0, dim=-1)

        # propagate_type: (x: Tensor, x_norm: Tensor)
        return self.propagate(edge_index, x=x, x_norm=x_norm)

    def message(
        self,
        x_j: Tensor,
        x_norm_i: Tensor,
        x_norm_j: Tensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: Optional[int],  # noqa: UP045
    ) -> Tensor:
        """A neighbour's features, times the attention weight."""
        alpha = self.beta * (x_norm_i * x_norm_j).sum(dim=-1)
        alpha = softmax(alpha, index, ptr, size_i)
        return x_j * alpha.view(-1, 1)

    @torch.jit.unused
    def why_not_fused(self, x: Any, edge_index: Any) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        reasons = list(_dispatch.common_reasons(self, AGNNConv, x, edge_index))
        if not reasons and not isinstance(x, Tensor):
            reasons.append("the features are a pair; AGNNConv takes one set of nodes")
        if not reasons and x.size(1) == 0:
            reasons.append("the features have no columns")
        if not reasons and x.size(1) > MAX_HEAD_DIM:
            reasons.append(f"the features are {x.size(1)} wide; the kernels take at most {MAX_HEAD_DIM}")
        if not reasons and torch.promote_types(x.dtype, self.beta.dtype) not in (x.dtype, torch.float32):
            reasons.append(f"beta is {self.beta.dtype} and the features are {x.dtype}")
        return reasons

    @torch.jit.unused
    def _forward_fused(self, x: Tensor, edge_index: Any) -> Tensor:
        windows = row_windows(edge_index, x.size(0), x.size(0))
        if self.flow == "target_to_source":
            windows = windows.transpose()
        beta: Tensor = self.beta
        whole = agnn_layer(x, beta, windows, bool(self.add_self_loops))
        if whole is not None:
            return whole
        x = cast(x, torch.promote_types(x.dtype, beta.dtype))
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.float()  # as PyG's norm under CUDA's autocast, and with it the result
        query, key, inverse = unit_rows(x, beta)
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), x.unsqueeze(1)
        # the rows of x serve as keys and as values, and are read once
        loops = self.add_self_loops
        out = ops.sparse_attention(query, key, value, windows, 1.0, self_loops=loops, key_scale=inverse)
        out = out.view(x.shape)
        # the op keeps its result for backward, where an activation in place would be an error
        return out.clone() if out.requires_grad else out
