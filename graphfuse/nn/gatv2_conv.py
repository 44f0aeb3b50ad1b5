"""GATv2Conv: attention whose nonlinearity comes before the product with the attention vector."""

# no `from __future__ import annotations`: TorchScript reads the class annotations as objects
import typing
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.jit import _overload_method as overload
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.typing import Adj, NoneType, OptTensor, PairTensor, SparseTensor
from torch_geometric.utils import add_self_loops, remove_self_loops, softmax

from graphfuse import ops
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.nn import _dispatch, _whole
from graphfuse.nn._additive import (
    as_columns,
    attend_and_weigh,
    dtype_reasons,
    edge_attr_reasons,
    finished,
    loop_features,
    result_dtype,
    sparse_with_loops,
    unshared,
    with_attention,
)
from graphfuse.nn._attention import head_reasons
from graphfuse.nn._projection import cast, mapped, may_read, stacked
from graphfuse.ops.attention import MAX_HEAD_DIM


class GATv2Conv(MessagePassing):
    r"""The dynamic graph attention layer of Brody et al., fused: a drop-in for PyG's ``GATv2Conv``.

    .. math::
        x'_i = \sum_{j \in N(i) \cup \{i\}} \alpha_{ij} W_l x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\, a^\top
        \mathrm{LeakyReLU}(W_l x_j + W_r x_i + W_e e_{ij})

    Constructor, forward, parameters, ``state_dict``, initialisation and options are those of
    :class:`torch_geometric.nn.GATv2Conv`. Scores, softmax and the weighted sum are one kernel
    (:func:`graphfuse.ops.gatv2_attention`), in which self-loops are a term, not edges; the rows of
    ``heads * out_channels`` numbers that PyG's path stores for each edge are not made. Only edge features are
    mapped to such rows before. :math:`W_l` and :math:`W_r` are one product of stacked weights. Where fusion
    does not apply (see :func:`graphfuse.why_not`), the same layer runs PyG's path.

    Args:
        in_channels: Size of each input row, or a pair for sources and receivers; ``-1`` derives it from the
            first input.
        out_channels: Size of each output row of a head.
        heads: Number of heads.
        concat: Whether to concatenate the heads; else they are averaged.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout: Rate of dropout of the attention weights :math:`\alpha`, in training.
        add_self_loops: Whether every node gets one self-loop in place of those of the graph.
        edge_dim: Size of edge features :math:`e`.
        fill_value: Features of the self-loops: a number, a tensor, or ``"add"``, ``"mean"``, ``"min"``,
            ``"max"`` or ``"mul"`` over the edges of a node.
        bias: Whether the projections learn a bias, and the layer another.
        share_weights: Whether :math:`W_l = W_r`.
        residual: Whether to add a learned map of the receiver's row.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})` or a pair of those of sources and receivers, edge indices
          :math:`(2, |E|)` or :class:`graphfuse.RowWindows`, edge features :math:`(|E|, D)` *(optional)*
        - **output:** features :math:`(|V|, H F_{out})`, or :math:`(|V|, F_{out})` if not ``concat``; with
          ``return_attention_weights`` also the edge indices, self-loops last, and :math:`\alpha`,
          :math:`(|E'|, H)`

    Source: arXiv:2105.14491.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(node_dim=0, **kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.edge_dim = edge_dim
        self.fill_value = fill_value
        self.residual = residual
        self.share_weights = share_weights

        num_src, num_dst = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        width = heads * out_channels
        self.lin_l = Linear(num_src, width, bias=bias, weight_initializer="glorot")
        if share_weights:
            self.lin_r = self.lin_l
        else:
            self.lin_r = Linear(num_dst, width, bias=bias, weight_initializer="glorot")
        self.att = Parameter(torch.empty(1, heads, out_channels))
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, width, bias=False, weight_initializer="glorot")
        else:
            self.lin_edge = None

        out_width = width if concat else out_channels
        if residual:
            self.res = Linear(num_dst, out_width, bias=False, weight_initializer="glorot")
        else:
            self.register_parameter("res", None)
        if bias:
            self.bias = Parameter(torch.empty(out_width))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew."""
        super().reset_parameters()
        for lin in (self.lin_l, self.lin_r, self.lin_edge, self.res):  # as in PyG, a shared one twice
            if lin is not None:
                lin.reset_parameters()
        glorot(self.att)
        zeros(self.bias)

    if not typing.TYPE_CHECKING:  # one result type per kind of call, as PyG declares them

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

        A true ``return_attention_weights`` returns ``(out, (edge_index, alpha))``, with the self-loops that
        were added and the weights after dropout, as in PyG.
        """
        if not torch.jit.is_scripting():
            plainly = (
                edge_attr is None
                and self.out_channels <= MAX_HEAD_DIM
                and 0 <= self.dropout < 1
                and _dispatch.holds(self, GATv2Conv, x, edge_index)
                and (type(x) is Tensor or (len(x) == 2 and self.flow == "source_to_target"))
                and self.att.dtype is (x if type(x) is Tensor else x[0]).dtype
            )
            reasons = (
                [] if plainly else self.why_not_fused(x, edge_index, edge_attr, return_attention_weights)
            )
            if not reasons:
                _dispatch.note(self, reasons)
                return self._forward_fused(x, edge_index, edge_attr, return_attention_weights)
            edge_index = _dispatch.fall_back(self, reasons, edge_index)

        shape = (-1, self.heads, self.out_channels)
        res: OptTensor = None
        x_l: OptTensor = None
        x_r: OptTensor = None
        if isinstance(x, Tensor):
            assert x.dim() == 2
            if self.res is not None:
                res = self.res(x)
            x_l = self.lin_l(x).view(shape)
            x_r = x_l if self.share_weights else self.lin_r(x).view(shape)
        else:
            x_l, x_r = x[0], x[1]
            assert x_l.dim() == 2
            if x_r is not None and self.res is not None:
                res = self.res(x_r)
            x_l = self.lin_l(x_l).view(shape)
            if x_r is not None:
                x_r = self.lin_r(x_r).view(shape)
        assert x_l is not None
        assert x_r is not None

        if self.add_self_loops:
            if isinstance(edge_index, Tensor):
                num_nodes = min(x_l.size(0), x_r.size(0))
                edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
                edge_index, edge_attr = add_self_loops(
                    edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_nodes
                )
            elif isinstance(edge_index, SparseTensor):
                edge_index = sparse_with_loops(edge_index, self.edge_dim)

        # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
        alpha = self.edge_updater(edge_index, x=(x_l, x_r), edge_attr=edge_attr)

        # propagate_type: (x: PairTensor, alpha: Tensor)
        out = self.propagate(edge_index, x=(x_l, x_r), alpha=alpha)
        out = finished(self, out, res)
        return with_attention(out, edge_index, alpha) if return_attention_weights else out

    def edge_update(
        self,
        x_j: Tensor,
        x_i: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: Optional[int],  # noqa: UP045
    ) -> Tensor:
        """The attention weight of each edge and head."""
        x = x_i + x_j
        if edge_attr is not None:
            if edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            assert self.lin_edge is not None
            x = x + self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        x = F.leaky_relu(x, self.negative_slope)
        alpha = (x * self.att).sum(dim=-1)
        alpha = softmax(alpha, index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """A neighbour's row, times the attention weight."""
        return x_j * alpha.unsqueeze(-1)

    @torch.jit.unused
    def why_not_fused(
        self, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None
    ) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        reasons = list(_dispatch.common_reasons(self, GATv2Conv, x, edge_index, projects=True))
        if not reasons:
            like, other = (x, x) if isinstance(x, Tensor) else (x[0], x[-1])
            if self.flow != "source_to_target" and like.size(0) != other.size(0):
                reasons.append("sources and receivers are two sets of nodes, and flow is 'target_to_source'")
            reasons += dtype_reasons(self.att, like)
            if edge_attr is not None and self.lin_edge is None:
                reasons.append("edge_attr is given to a layer without edge_dim, which refuses it")
            elif edge_attr is not None:
                reasons += edge_attr_reasons(self, edge_attr, like, edge_index)
        return reasons + head_reasons(self)

    @torch.jit.unused
    def _forward_fused(self, x: Any, edge_index: Any, edge_attr: Any, with_weights: Any) -> Any:
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else (x[0], x[1])
        graph = row_windows(edge_index, x_src.size(0), x_dst.size(0))
        if x_src is x_dst and edge_attr is None and not with_weights:
            whole = _whole.gatv2(self, x_src, graph)
            if whole is not None:
                return whole
        res = self._modules.get("res")
        res = None if res is None else mapped(x_dst, res)
        x_l, x_r = self._project(x_src, x_dst)
        att = self.att
        edge = loop_edge = None
        if edge_attr is not None:
            edge, loop_edge = self._edges(edge_attr, graph, x_l.dtype)
        given: dict[str, Any] = {
            "x_src": x_l,
            "x_dst": x_r,
            "att": cast(att, result_dtype(x_l, att)).squeeze(0),  # rows that autocast made half stay so
            "windows": graph if self.flow == "source_to_target" else graph.transpose(),
            "negative_slope": self.negative_slope,
            "edge": edge,
            "dropout": self.dropout if self.training else 0.0,
            "self_loops": bool(self.add_self_loops),
            "loop_edge": loop_edge,
        }
        if not with_weights:
            return unshared(self, ops.gatv2_attention(**given), res)
        attend, weigh = ops.gatv2_attention, ops.gatv2_attention_weights
        out, weights = attend_and_weigh(self, attend, weigh, given, edge_index)
        return unshared(self, out, res), weights

    def _project(self, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of sources and of receivers, by heads."""
        lin_l, lin_r = self._modules["lin_l"], self._modules["lin_r"]
        shape = (-1, self.heads, self.out_channels)
        if x_src is x_dst:
            if self.share_weights:
                x_l = mapped(x_src, lin_l).view(shape)
                return x_l, x_l
            layers: list[Any] = [lin_l, lin_r]
            if may_read(*layers):
                x_l, x_r = stacked(x_src, layers, self.out_channels)
                return x_l, x_r
        # one by one and in PyG's order, as lazy modules draw their weights now
        return mapped(x_src, lin_l).view(shape), mapped(x_dst, lin_r).view(shape)

    def _edges(self, edge_attr: Tensor, graph: RowWindows, dtype: torch.dtype) -> tuple[Tensor, OptTensor]:
        """The mapped features of the edges, and those of the self-loops if they are added."""
        shape = (-1, self.heads, self.out_channels)
        edge = self.lin_edge(as_columns(edge_attr)).view(shape).to(dtype)
        if not self.add_self_loops:
            return edge, None
        loops = loop_features(graph, edge_attr, self.fill_value)
        return edge, self.lin_edge(loops).view(shape).to(dtype)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
