"""TransformerConv: dot-product attention over neighbours, and a skip connection."""

# no `from __future__ import annotations`: TorchScript reads the class annotations as objects
import math
import typing
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit import _overload_method as overload
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj, NoneType, OptTensor, PairTensor, SparseTensor
from torch_geometric.utils import softmax

from graphfuse import ops
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.nn import _dispatch, _whole
from graphfuse.nn._attention import attend, edge_reasons, head_reasons
from graphfuse.nn._projection import mapped, may_read, stacked
from graphfuse.ops.attention import MAX_HEAD_DIM
from graphfuse.ops.gate import MAX_DIM as MAX_GATE_DIM


class TransformerConv(MessagePassing):
    r"""The graph transformer layer of Shi et al., fused: a drop-in for PyG's ``TransformerConv``.

    .. math::
        x'_i = W_1 x_i + \sum_{j \in N(i)} \alpha_{ij} W_2 x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\, (W_3 x_i)^\top (W_4 x_j) / \sqrt{d}

    Constructor, forward, parameters, ``state_dict``, initialisation and options are those of
    :class:`torch_geometric.nn.TransformerConv`. Scores, softmax and the weighted sum are one kernel
    (:func:`graphfuse.ops.sparse_attention`); query, key, value and skip are one product of stacked weights.
    The map :math:`W_5` of edge features is folded into query and result, so no projected row per edge is
    stored; the gate is :func:`graphfuse.ops.gated_skip`. Where fusion does not apply (see
    :func:`graphfuse.why_not`), the same layer runs PyG's path.

    Args:
        in_channels: Size of each input row, or a pair for sources and receivers; ``-1`` derives it from the
            first input.
        out_channels: Size :math:`d` of each output row of a head.
        heads: Number of heads.
        concat: Whether to concatenate the heads; else they are averaged.
        beta: Whether a learned gate :math:`\beta_i` weighs the skip connection against the sum,
            :math:`x'_i = \beta_i W_1 x_i + (1 - \beta_i) m_i`.
        dropout: Rate of dropout of the attention weights :math:`\alpha`, in training.
        edge_dim: Size of edge features :math:`a`; :math:`W_5 a_{ij}` is added to the key and the value of an
            edge.
        bias: Whether the projections learn a bias.
        root_weight: Whether to add the skip connection :math:`W_1 x_i`.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})` or a pair of those of sources and receivers, edge indices
          :math:`(2, |E|)` or :class:`graphfuse.RowWindows`, edge features :math:`(|E|, D)` *(optional)*
        - **output:** features :math:`(|V|, H d)`, or :math:`(|V|, d)` if not ``concat``; with
          ``return_attention_weights`` also the edge indices and :math:`\alpha`, :math:`(|E|, H)`

    Source: arXiv:2009.03509.
    """

    _alpha: OptTensor

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(node_dim=0, **kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.beta = beta and root_weight
        self.root_weight = root_weight
        self.concat = concat
        self.dropout = dropout
        self.edge_dim = edge_dim
        self._alpha = None

        num_src, num_dst = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        width = heads * out_channels
        self.lin_key = Linear(num_src, width, bias=bias)
        self.lin_query = Linear(num_dst, width, bias=bias)
        self.lin_value = Linear(num_src, width, bias=bias)
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, width, bias=False)
        else:
            self.lin_edge = self.register_parameter("lin_edge", None)
        skip_width = width if concat else out_channels
        self.lin_skip = Linear(num_dst, skip_width, bias=bias)
        if self.beta:
            self.lin_beta = Linear(3 * skip_width, 1, bias=False)
        else:
            self.lin_beta = self.register_parameter("lin_beta", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        super().reset_parameters()
        self.lin_key.reset_parameters()
        self.lin_query.reset_parameters()
        self.lin_value.reset_parameters()
        if self.edge_dim:
            self.lin_edge.reset_parameters()
        self.lin_skip.reset_parameters()
        if self.beta:
            self.lin_beta.reset_parameters()

    if not typing.TYPE_CHECKING:  # for TorchScript, which needs one result type per call

        @overload
        def forward(  # noqa: D102
            self,
            x: Union[Tensor, PairTensor],  # noqa: UP007
            edge_index: Adj,
            edge_attr: OptTensor = None,
            return_attention_weights: NoneType = None,
        ) -> Tensor:
            pass

        @overload
        def forward(  # noqa: D102, F811
            self,
            x: Union[Tensor, PairTensor],  # noqa: UP007
            edge_index: Tensor,
            edge_attr: OptTensor = None,
            return_attention_weights: bool = None,  # noqa: RUF013
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            pass

        @overload
        def forward(  # noqa: D102, F811
            self,
            x: Union[Tensor, PairTensor],  # noqa: UP007
            edge_index: SparseTensor,
            edge_attr: OptTensor = None,
            return_attention_weights: bool = None,  # noqa: RUF013
        ) -> tuple[Tensor, SparseTensor]:
            pass

    def forward(
        self,
        x: Union[Tensor, PairTensor],  # noqa: UP007
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: Optional[bool] = None,  # noqa: UP045
    ) -> Union[Tensor, tuple[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, SparseTensor]]:  # noqa: UP007
        """Runs the layer, fused where that is possible.

        Any ``return_attention_weights``, ``False`` too, returns ``(out, (edge_index, alpha))``, as in PyG.
        """
        if not torch.jit.is_scripting():
            plainly = (
                (return_attention_weights is None or self.lin_edge is None)
                and self.out_channels <= MAX_HEAD_DIM
                and 0 <= self.dropout < 1
                and _dispatch.holds(self, TransformerConv, x, edge_index)
                and not self._edge_reasons(x, edge_index, edge_attr)
            )
            reasons = (
                [] if plainly else self.why_not_fused(x, edge_index, edge_attr, return_attention_weights)
            )
            if not reasons:
                _dispatch.note(self, reasons)
                return self._forward_fused(x, edge_index, edge_attr, return_attention_weights)
            edge_index = _dispatch.fall_back(self, reasons, edge_index)

        if isinstance(x, Tensor):
            x = (x, x)

        query = self.lin_query(x[1]).view(-1, self.heads, self.out_channels)
        key = self.lin_key(x[0]).view(-1, self.heads, self.out_channels)
        value = self.lin_value(x[0]).view(-1, self.heads, self.out_channels)

        # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)
        out = self.propagate(edge_index, query=query, key=key, value=value, edge_attr=edge_attr)

        alpha = self._alpha
        self._alpha = None

        out = self._merge_heads(out)
        if self.root_weight:
            out = self._add_skip(out, self.lin_skip(x[1]))

        if isinstance(return_attention_weights, bool):
            assert alpha is not None
            if isinstance(edge_index, Tensor):
                return out, (edge_index, alpha)
            else:
                return out, edge_index.set_value(alpha, layout="coo")
        else:
            return out

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: Optional[int],  # noqa: UP045
    ) -> Tensor:
        """A neighbour's value (and the edge's features), times the attention weight."""
        if self.lin_edge is not None:
            assert edge_attr is not None
            edge_attr = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            key_j = key_j + edge_attr

        alpha = (query_i * key_j).sum(dim=-1) / math.sqrt(self.out_channels)
        alpha = softmax(alpha, index, ptr, size_i)
        self._alpha = alpha
        alpha = F.dropout(alpha, p=self.dropout, training=self.training)

        out = value_j
        if edge_attr is not None:
            out = out + edge_attr
        return out * alpha.view(-1, self.heads, 1)

    def _merge_heads(self, out: Tensor) -> Tensor:
        return out.view(-1, self.heads * self.out_channels) if self.concat else out.mean(dim=1)

    def _add_skip(self, out: Tensor, skip: Tensor) -> Tensor:
        if self.lin_beta is not None:
            beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1))
            beta = beta.sigmoid()
            return beta * skip + (1 - beta) * out
        return out + skip

    @torch.jit.unused
    def why_not_fused(
        self, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None
    ) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        reasons = list(_dispatch.common_reasons(self, TransformerConv, x, edge_index, projects=True))
        reasons += [] if reasons else self._edge_reasons(x, edge_index, edge_attr)
        if isinstance(return_attention_weights, bool) and self.lin_edge is not None:
            reasons.append("return_attention_weights is set in a layer with edge features, which fold")
        return reasons + head_reasons(self)

    @torch.jit.unused
    def _edge_reasons(self, x: Any, edge_index: Any, edge_attr: Any) -> list[str]:
        lin_edge = self._modules.get("lin_edge")
        return edge_reasons(lin_edge, edge_attr, x, edge_index, self.heads, self.out_channels)

    @torch.jit.unused
    def _forward_fused(self, x: Any, edge_index: Any, edge_attr: Any, with_weights: Any) -> Any:
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else (x[0], x[1])
        windows = self._windows(edge_index, x_src.size(0), x_dst.size(0))
        if x_src is x_dst and edge_attr is None and with_weights is None:
            whole = _whole.transformer(self, x_src, windows)
            if whole is not None:
                return whole
        query, key, value, *skip = self._project(x_src, x_dst)
        lin_edge = self._modules.get("lin_edge")
        edge_weight = None if lin_edge is None else lin_edge.weight
        dropout = self.dropout if self.training else 0.0
        out = attend(query, key, value, windows, dropout, edge_attr, edge_weight)
        if out.is_cuda and torch.is_autocast_enabled("cuda"):
            out = out.float()  # PyG's softmax is float32 under CUDA's autocast, and with it the result
        out = self._merge_heads(out)
        if skip:
            out = self._add_skip_fused(out, *skip)
        elif self.concat and out.requires_grad:
            out = out.clone()  # the op keeps its result for backward, where a change in place is an error
        if not isinstance(with_weights, bool):
            return out
        if query.is_cuda and torch.is_autocast_enabled("cuda"):
            query, key = query.float(), key.float()  # as above
        alpha = ops.attention_weights(query, key, windows)
        return out, (edge_index.edge_index() if isinstance(edge_index, RowWindows) else edge_index, alpha)

    @torch.jit.unused
    def _add_skip_fused(self, out: Tensor, skip: Tensor) -> Tensor:
        lin = self._modules.get("lin_beta")
        if lin is None:
            return out + skip
        if not may_read(lin) or torch.is_autocast_enabled(out.device.type):
            return self._add_skip(out, skip)
        weight, bias = lin._parameters["weight"], lin._parameters.get("bias")
        fits = out.dtype is skip.dtype is weight.dtype and bias is None and out.size(1) <= MAX_GATE_DIM
        return ops.gated_skip(out, skip, weight) if fits else self._add_skip(out, skip)

    def _windows(self, edge_index: Any, num_src: int, num_dst: int) -> RowWindows:
        if self.flow == "source_to_target":
            return row_windows(edge_index, num_src, num_dst)
        return row_windows(edge_index, num_dst, num_src).transpose()

    def _project(self, x_src: Tensor, x_dst: Tensor) -> Sequence[Tensor]:
        """Query, key and value by heads, and the skip connection if there is one."""
        names = ("lin_query", "lin_key", "lin_value", "lin_skip")
        layers: list[Any] = [self._modules[name] for name in names[: 4 if self.root_weight else 3]]
        if not may_read(*layers):
            # one by one and in PyG's order, as lazy modules draw their weights now
            pairs = zip(layers, (x_dst, x_src, x_src, x_dst), strict=False)
            query, key, value, *skip = [mapped(x, lin) for lin, x in pairs]
            shape = (-1, self.heads, self.out_channels)
            return [query.view(shape), key.view(shape), value.view(shape), *skip]
        if x_src is x_dst:
            query, key, value, *skip = stacked(x_src, layers, self.out_channels)
        else:
            query, *skip = stacked(x_dst, layers[::3], self.out_channels)
            key, value = stacked(x_src, layers[1:3], self.out_channels)
        return [query, key, value, *[rows.flatten(1) for rows in skip]]

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
