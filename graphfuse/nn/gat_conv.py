"""GATConv: attention from one number of the source and one of the receiver."""

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
from torch_geometric.typing import (
    Adj,
    NoneType,
    OptPairTensor,
    OptTensor,
    Size,
    SparseTensor,
)
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
    summed_at_receivers,
    unshared,
    with_attention,
)
from graphfuse.nn._attention import head_reasons
from graphfuse.nn._projection import cast, folded_reasons, mapped
from graphfuse.ops.attention import MAX_HEAD_DIM
from graphfuse.ops.logits import logits


class GATConv(MessagePassing):
    r"""The graph attention layer of Veličković et al., fused: a drop-in for PyG's ``GATConv``.

    .. math::
        x'_i = \sum_{j \in N(i) \cup \{i\}} \alpha_{ij} W_s x_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\, \mathrm{LeakyReLU}
        \big(a_s^\top W_s x_j + a_t^\top W_t x_i + a_e^\top W_e e_{ij}\big)

    Constructor, forward, parameters, ``state_dict``, initialisation and options are those of
    :class:`torch_geometric.nn.GATConv`. Scores, softmax and the weighted sum are one kernel
    (:func:`graphfuse.ops.gat_attention`), in which self-loops are a term, not edges. :math:`W_e` is folded
    into :math:`a_e`, so that an edge costs one number for each head. Where fusion does not apply (see
    :func:`graphfuse.why_not`), the same layer runs PyG's path.

    Args:
        in_channels: Size of each input row, with :math:`W_s = W_t`; a pair for sources and receivers gives
            each a map of its own. ``-1`` derives a size from the first input.
        out_channels: Size of each output row of a head.
        heads: Number of heads.
        concat: Whether to concatenate the heads; else they are averaged.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout: Rate of dropout of the attention weights :math:`\alpha`, in training.
        add_self_loops: Whether every node gets one self-loop in place of those of the graph.
        edge_dim: Size of edge features :math:`e`.
        fill_value: Features of the self-loops: a number, a tensor, or ``"add"``, ``"mean"``, ``"min"``,
            ``"max"`` or ``"mul"`` over the edges of a node.
        bias: Whether to learn a bias.
        residual: Whether to add a learned map of the receiver's row.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})` or a pair of those of sources and receivers, the latter
          possibly None, edge indices :math:`(2, |E|)` or :class:`graphfuse.RowWindows`, edge features
          :math:`(|E|, D)` *(optional)*
        - **output:** features :math:`(|V|, H F_{out})`, or :math:`(|V|, F_{out})` if not ``concat``; with
          ``return_attention_weights`` also the edge indices, self-loops last, and :math:`\alpha`,
          :math:`(|E'|, H)`

    Source: arXiv:1710.10903.
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
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
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

        width = heads * out_channels
        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, int):
            self.lin = Linear(in_channels, width, bias=False, weight_initializer="glorot")
        else:
            self.lin_src = Linear(in_channels[0], width, False, weight_initializer="glorot")
            self.lin_dst = Linear(in_channels[1], width, False, weight_initializer="glorot")

        self.att_src = Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = Parameter(torch.empty(1, heads, out_channels))
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, width, bias=False, weight_initializer="glorot")
            self.att_edge = Parameter(torch.empty(1, heads, out_channels))
        else:
            self.lin_edge = None
            self.register_parameter("att_edge", None)

        out_width = width if concat else out_channels
        if residual:
            num_dst = in_channels if isinstance(in_channels, int) else in_channels[1]
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
        for lin in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if lin is not None:
                lin.reset_parameters()
        glorot(self.att_src)
        glorot(self.att_dst)
        glorot(self.att_edge)
        zeros(self.bias)

    if not typing.TYPE_CHECKING:  # one result type per kind of call, as PyG declares them

        @overload
        def forward(  # noqa: D102
            self,
            x: Union[Tensor, OptPairTensor],  # noqa: UP007
            edge_index: Adj,
            edge_attr: OptTensor = None,
            size: Size = None,
            return_attention_weights: NoneType = None,
        ) -> Tensor:
            pass

        @overload
        def forward(  # noqa: D102, F811
            self,
            x: Union[Tensor, OptPairTensor],  # noqa: UP007
            edge_index: Tensor,
            edge_attr: OptTensor = None,
            size: Size = None,
            return_attention_weights: bool = None,  # noqa: RUF013
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            pass

        @overload
        def forward(  # noqa: D102, F811
            self,
            x: Union[Tensor, OptPairTensor],  # noqa: UP007
            edge_index: SparseTensor,
            edge_attr: OptTensor = None,
            size: Size = None,
            return_attention_weights: bool = None,  # noqa: RUF013
        ) -> tuple[Tensor, SparseTensor]:
            pass

    def forward(
        self,
        x: Union[Tensor, OptPairTensor],  # noqa: UP007
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: Optional[bool] = None,  # noqa: UP045
    ) -> Union[Tensor, tuple[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, SparseTensor]]:  # noqa: UP007
        """Runs the layer, fused where that is possible.

        A true ``return_attention_weights`` returns ``(out, (edge_index, alpha))``, with the self-loops that
        were added and the weights after dropout, as in PyG.
        """
        if not torch.jit.is_scripting():
            plainly = (
                (edge_attr is None or self.lin_edge is None)
                and size is None
                and self.out_channels <= MAX_HEAD_DIM
                and 0 <= self.dropout < 1
                and _dispatch.holds(self, GATConv, x, edge_index)
                and (type(x) is Tensor or (len(x) == 2 and self.flow == "source_to_target"))
                and self.att_src.dtype is (x if type(x) is Tensor else x[0]).dtype
            )
            reasons = (
                []
                if plainly
                else self.why_not_fused(x, edge_index, edge_attr, size, return_attention_weights)
            )
            if not reasons:
                _dispatch.note(self, reasons)
                return self._forward_fused(x, edge_index, edge_attr, size, return_attention_weights)
            edge_index = _dispatch.fall_back(self, reasons, edge_index)

        shape = (-1, self.heads, self.out_channels)
        res: OptTensor = None
        lin_src: Any = self.lin_src if self.lin is None else self.lin
        lin_dst: Any = self.lin_dst if self.lin is None else self.lin
        if isinstance(x, Tensor):
            assert x.dim() == 2, "Static graphs not supported in 'GATConv'"
            if self.res is not None:
                res = self.res(x)
            x_src = lin_src(x).view(shape)
            x_dst = x_src if lin_dst is lin_src else lin_dst(x).view(shape)
        else:
            x_src, x_dst = x
            assert x_src.dim() == 2, "Static graphs not supported in 'GATConv'"
            if x_dst is not None and self.res is not None:
                res = self.res(x_dst)
            x_src = lin_src(x_src).view(shape)
            if x_dst is not None:
                x_dst = lin_dst(x_dst).view(shape)

        alpha_src = (x_src * self.att_src).sum(dim=-1)
        alpha_dst = None if x_dst is None else (x_dst * self.att_dst).sum(dim=-1)

        if self.add_self_loops:
            if isinstance(edge_index, Tensor):
                num_nodes = x_src.size(0) if x_dst is None else min(x_src.size(0), x_dst.size(0))
                num_nodes = min(size) if size is not None else num_nodes
                edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
                edge_index, edge_attr = add_self_loops(
                    edge_index, edge_attr, fill_value=self.fill_value, num_nodes=num_nodes
                )
            elif isinstance(edge_index, SparseTensor):
                edge_index = sparse_with_loops(edge_index, self.edge_dim)

        # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor)
        alpha = self.edge_updater(edge_index, alpha=(alpha_src, alpha_dst), edge_attr=edge_attr, size=size)

        # propagate_type: (x: OptPairTensor, alpha: Tensor)
        out = self.propagate(edge_index, x=(x_src, x_dst), alpha=alpha, size=size)
        out = finished(self, out, res)
        return with_attention(out, edge_index, alpha) if return_attention_weights else out

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: Optional[int],  # noqa: UP045
    ) -> Tensor:
        """The attention weight of each edge and head."""
        alpha = alpha_j if alpha_i is None else alpha_j + alpha_i
        if index.numel() == 0:
            return alpha
        if edge_attr is not None and self.lin_edge is not None:
            if edge_attr.dim() == 1:
                edge_attr = edge_attr.view(-1, 1)
            edge = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            alpha = alpha + (edge * self.att_edge).sum(dim=-1)
        alpha = F.leaky_relu(alpha, self.negative_slope)
        alpha = softmax(alpha, index, ptr, dim_size)
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        """A neighbour's row, times the attention weight."""
        return alpha.unsqueeze(-1) * x_j

    @torch.jit.unused
    def why_not_fused(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Any = None,
        size: Any = None,
        return_attention_weights: Any = None,
    ) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        one_sided = isinstance(x, (tuple, list)) and len(x) == 2 and x[1] is None
        features = (x[0],) if one_sided else x
        reasons = list(_dispatch.common_reasons(self, GATConv, features, edge_index, projects=True))
        if not reasons:
            like = x if isinstance(x, Tensor) else x[0]
            num_src = like.size(0)
            num_dst = num_src if isinstance(x, Tensor) else None if one_sided else x[-1].size(0)
            if num_dst is None and size is None:
                reasons.append("the receivers have no features; `size` would tell how many there are")
            elif size is not None and not _fits(size, num_src, num_dst):
                reasons.append(f"size is {size!r}, which is not that of the features")
            elif self.flow != "source_to_target" and num_src != (size[1] if num_dst is None else num_dst):
                reasons.append("sources and receivers are two sets of nodes, and flow is 'target_to_source'")
            reasons += dtype_reasons(self.att_src, like)
            if self.lin_edge is not None and edge_attr is not None:
                reasons += folded_reasons() or edge_attr_reasons(self, edge_attr, like, edge_index)
        return reasons + head_reasons(self)

    @torch.jit.unused
    def _forward_fused(self, x: Any, edge_index: Any, edge_attr: Any, size: Any, with_weights: Any) -> Any:
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        num_dst = size[1] if x_dst is None else x_dst.size(0)
        graph = row_windows(edge_index, x_src.size(0), num_dst)
        res = self._modules.get("res")
        if x_src is x_dst and edge_attr is None and not with_weights:
            whole = _whole.gat(self, x_src, graph)
            if whole is not None:
                return whole
        res = None if x_dst is None or res is None else mapped(x_dst, res)
        x_src, a_src, a_dst = self._project(x_src, x_dst)
        if a_dst is None:
            a_dst = a_src.new_zeros(num_dst, self.heads)
        edge_score = loop_score = None
        if edge_attr is not None and self.lin_edge is not None:
            edge_score, loop_score = self._edge_scores(edge_attr, graph, a_src.dtype)
        given: dict[str, Any] = {
            "a_src": a_src,
            "a_dst": a_dst,
            "x": x_src,
            "windows": graph if self.flow == "source_to_target" else graph.transpose(),
            "negative_slope": self.negative_slope,
            "edge_score": edge_score,
            "dropout": self.dropout if self.training else 0.0,
            "self_loops": bool(self.add_self_loops),
            "loop_score": loop_score,
        }
        if not with_weights:
            return unshared(self, ops.gat_attention(**given), res)
        out, weights = attend_and_weigh(self, ops.gat_attention, ops.gat_attention_weights, given, edge_index)
        return unshared(self, out, res), weights

    def _project(self, x_src: Tensor, x_dst: OptTensor) -> tuple[Tensor, Tensor, OptTensor]:
        """The rows of the sources, and the terms of sources and receivers in the scores."""
        lin: Any = self._modules.get("lin")
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if lin is None else (lin, lin)
        shape = (-1, self.heads, self.out_channels)
        one = x_dst is x_src and lin_dst is lin_src
        x_src = mapped(x_src, lin_src).view(shape)
        x_dst = None if x_dst is None or one else mapped(x_dst, lin_dst).view(shape)
        att_src: Tensor = self.att_src
        att_dst: Tensor = self.att_dst
        dtype = result_dtype(x_src, att_src)  # of the scores; rows that autocast made half stay so
        att_src, att_dst = (cast(att, dtype).view(shape[1:]) for att in (att_src, att_dst))
        if one:
            a_src, a_both = logits(x_src, att_src, att_dst)
            return x_src, a_src, a_both
        a_dst = None if x_dst is None else logits(x_dst, att_dst)[0]
        return x_src, logits(x_src, att_src)[0], a_dst

    def _edge_scores(
        self, edge_attr: Tensor, graph: RowWindows, dtype: torch.dtype
    ) -> tuple[Tensor, OptTensor]:
        """The term of the edges in the scores, and that of the self-loops if they are added."""
        edge_attr = edge_attr.to(dtype)
        with torch.autocast(edge_attr.device.type, enabled=False):  # PyG sums these products in float32
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1).to(dtype)
            weight = torch.einsum("hcd,hc->dh", weight, self.att_edge[0].to(dtype))
            score = as_columns(edge_attr) @ weight
            if not self.add_self_loops:
                return score, None
            if isinstance(self.fill_value, str) and self.heads < weight.size(0):
                return score, summed_at_receivers(graph, score, self.fill_value)  # linear, and narrower
            return score, loop_features(graph, edge_attr, self.fill_value) @ weight

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def _fits(size: Any, num_src: int, num_dst: int | None) -> bool:
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        return False
    return size[0] == num_src and isinstance(size[1], int) and num_dst in (None, size[1])
