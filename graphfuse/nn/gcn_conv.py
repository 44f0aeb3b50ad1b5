"""GCNConv: symmetric normalisation around a sum over neighbours."""

# no `from __future__ import annotations`: TorchScript reads the class annotations as objects
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import zeros
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, SparseTensor
from torch_geometric.utils import spmm as torch_spmm

from graphfuse import ops
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.formats.lasting import lasting
from graphfuse.kernels.device import kernel_problem
from graphfuse.nn import _dispatch
from graphfuse.nn._projection import mapped, may_read
from graphfuse.ops import _check
from graphfuse.ops._aggregate import Operands, aggregate
from graphfuse.ops.gcn_layer import gcn_layer


class GCNConv(MessagePassing):
    r"""The graph convolution of Kipf & Welling, fused: a drop-in for PyG's ``GCNConv``.

    .. math::
        X' = \hat D^{-1/2} \hat A \hat D^{-1/2} X \Theta + b, \qquad \hat A = A + I

    Constructor, forward, parameters, ``state_dict``, initialisation and options are those of
    :class:`torch_geometric.nn.GCNConv`. The normalisation is a row scale and a column scale around a binary
    matrix, kept with the graph; self-loops are a term of the kernel, not edges. Where fusion does not apply
    (see :func:`graphfuse.why_not`), the same layer runs PyG's path.

    Args:
        in_channels: Size of each input row; ``-1`` derives it from the first input.
        out_channels: Size of each output row.
        improved: Whether added self-loops weigh 2; as in PyG, of effect only with edge weights.
        cached: Whether to keep the first normalised graph and ignore later ones.
        add_self_loops: Whether to add missing self-loops; ``None`` means as ``normalize``.
        normalize: Whether to normalise; else edges count as given.
        bias: Whether to learn :math:`b`.
        **kwargs: Arguments of :class:`torch_geometric.nn.MessagePassing`.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})`, edge indices :math:`(2, |E|)` or
          :class:`graphfuse.RowWindows`, edge weights :math:`(|E|)` *(optional)*
        - **output:** features :math:`(|V|, F_{out})`

    Source: arXiv:1609.02907.
    """

    _cached_edge_index: Optional[OptPairTensor]  # noqa: UP045
    _cached_adj_t: Optional[SparseTensor]  # noqa: UP045

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("aggr", "add")
        super().__init__(**kwargs)
        if add_self_loops is None:
            add_self_loops = normalize
        if add_self_loops and not normalize:
            raise ValueError(
                f"'{self.__class__.__name__}' does not support adding self-loops to the graph when no "
                f"on-the-fly normalization is applied"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.improved = improved
        self.cached = cached
        self.add_self_loops = add_self_loops
        self.normalize = normalize
        self._cached_edge_index = None
        self._cached_adj_t = None
        self._cached_windows: tuple[Any, RowWindows] | None = None
        self.lin = Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        if bias:
            self.bias = Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew and forgets the cached graph."""
        super().reset_parameters()
        self.lin.reset_parameters()
        zeros(self.bias)
        self._cached_edge_index = None
        self._cached_adj_t = None
        self._cached_windows = None

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor = None) -> Tensor:
        """Runs the layer, fused where that is possible."""
        if isinstance(x, (tuple, list)):
            raise ValueError(
                f"'{self.__class__.__name__}' received a tuple of node features as input while this layer "
                f"does not support bipartite message passing. Please try other layers such as 'SAGEConv' or "
                f"'GraphConv' instead"
            )
        if not torch.jit.is_scripting():
            cached = self._cached_edge_index
            plainly = edge_weight is None and _dispatch.holds(self, GCNConv, x, edge_index)
            plainly = plainly and (cached is None or cached[1].dtype is x.dtype)
            reasons = [] if plainly else self.why_not_fused(x, edge_index, edge_weight)
            if not reasons:
                _dispatch.note(self, reasons)
                return self._forward_fused(x, edge_index, edge_weight)
            edge_index = _dispatch.fall_back(self, reasons, edge_index)

        if self.normalize:
            if isinstance(edge_index, Tensor):
                cache = self._cached_edge_index
                if cache is None:
                    edge_index, edge_weight = gcn_norm(
                        edge_index,
                        edge_weight,
                        x.size(self.node_dim),
                        self.improved,
                        self.add_self_loops,
                        self.flow,
                        x.dtype,
                    )
                    if self.cached:
                        self._cached_edge_index = (edge_index, edge_weight)
                else:
                    edge_index, edge_weight = cache[0], cache[1]
            elif isinstance(edge_index, SparseTensor):
                cache = self._cached_adj_t
                if cache is None:
                    edge_index = gcn_norm(
                        edge_index,
                        edge_weight,
                        x.size(self.node_dim),
                        self.improved,
                        self.add_self_loops,
                        self.flow,
                        x.dtype,
                    )
                    if self.cached:
                        self._cached_adj_t = edge_index
                else:
                    edge_index = cache

        x = self.lin(x)

        # propagate_type: (x: Tensor, edge_weight: OptTensor)
        out = self.propagate(edge_index, x=x, edge_weight=edge_weight)

        if self.bias is not None:
            out = out + self.bias

        return out

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:
        """A neighbour's row, times the edge's weight if there is one."""
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, adj_t: Adj, x: Tensor) -> Tensor:
        """PyG's product with a sparse adjacency."""
        return torch_spmm(adj_t, x, reduce=self.aggr)

    @torch.jit.unused
    def why_not_fused(self, x: Any, edge_index: Any, edge_weight: Any = None) -> list[str]:
        """Why forward would run PyG's path for these arguments, a sentence per reason; empty if fused."""
        reasons = list(_dispatch.common_reasons(self, GCNConv, x, edge_index, projects=True))
        if edge_weight is not None and (not isinstance(edge_weight, Tensor) or edge_weight.dim() != 1):
            reasons.append("edge_weight is not a one-dimensional tensor")
        cached = self._cached_edge_index if self.normalize else None
        weight = edge_weight if cached is None else cached[1]
        if isinstance(weight, Tensor) and weight.dtype is torch.float64:
            problem = kernel_problem(weight.device, weight.dtype)
            reasons += [] if problem is None or problem in reasons else [problem]
        if self._cached_adj_t is not None:
            reasons.append("the layer has cached a SparseTensor")
        return reasons

    @torch.jit.unused
    def _forward_fused(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        scale = loop_weight = None
        if self.normalize and self._cached_edge_index is not None:
            edges, edge_weight = self._cached_edge_index
            kept = self._cached_windows
            fits = edge_weight.dtype is x.dtype
            if fits and kept is not None and kept[0] is edges and kept[1].shape[0] == x.size(0):
                windows, edge_weight = kept[1], None
                scale, loop_weight = _scales(windows, self.add_self_loops)
            else:
                # cached by PyG's path, by PyG's own layer, in another dtype, for fewer nodes, or with
                # weights: a graph with loops and weights
                windows = self._windows(edges, x.size(0))
        else:
            windows = self._windows(edge_index, x.size(0))
            if edge_weight is not None:
                _check_weights(edge_weight, windows, x, self.normalize)
            if self.normalize:
                if self.cached and not torch.compiler.is_compiling():
                    self._cache(windows, x, edge_index, edge_weight)
                    return self._forward_fused(x, edge_index, edge_weight)
                if edge_weight is not None:
                    return self._forward_weighted(windows, x, edge_weight)
                scale, loop_weight = _scales(windows, self.add_self_loops)
        weight = self._plain_weight(x)
        bias: OptTensor = self.bias
        if weight is not None and edge_weight is None:
            whole = gcn_layer(x, weight, bias, windows, scale, loop_weight)
            if whole is not None:
                return whole
        if weight is not None and _keeps_dtype(x, edge_weight) and _keeps_dtype(x, bias):
            _check.matrix("x", x, windows.shape[1], windows.device, weight.size(1))
            operands = Operands(x, edge_weight, loop_weight, weight, bias)
            return aggregate(windows, operands, scale, scale, False, None)
        # the dtype that PyG's messages and bias would be summed in, under autocast too
        x, dtype = mapped(x, self._modules["lin"]), x.dtype
        dtype = x.dtype if scale is None else torch.promote_types(dtype, x.dtype)
        # a bias that no kernel takes is added to what one returns
        late = bias if bias is not None and kernel_problem(x.device, bias.dtype) is not None else None
        bias = None if late is not None else bias
        for other in (edge_weight, bias):
            dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
        _check.matrix("lin(x)", x, windows.shape[1], windows.device)
        operands = Operands(x, edge_weight, loop_weight, None, bias)
        out = aggregate(windows, operands, scale, scale, False, dtype)
        return out if late is None else out + late

    def _forward_weighted(self, windows: RowWindows, x: Tensor, edge_weight: Tensor) -> Tensor:
        # with weights the degrees are part of the gradient, so they are computed inside autograd
        loop_weight = _loop_weights(windows, edge_weight, self.improved) if self.add_self_loops else None
        ones = edge_weight.new_ones(x.size(0), 1)
        degree = ops.spmm(windows, ones, edge_weight, loop_weight=loop_weight)
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        x = mapped(x, self._modules["lin"])
        out = ops.spmm(windows, x * scale, edge_weight, loop_weight=loop_weight) * scale
        return out if self.bias is None else out + self.bias

    def _plain_weight(self, x: Tensor) -> Tensor | None:
        # None: a projection that is more than a weight, autocast, and sparse features come first
        lin = self._modules["lin"]
        if not may_read(lin) or lin._parameters["bias"] is not None:
            return None
        weight: Tensor = lin._parameters["weight"]
        plain = weight.dtype is x.dtype and x.layout is torch.strided
        return weight if plain and not torch.is_autocast_enabled(x.device.type) else None

    def _windows(self, edge_index: Any, num_nodes: int) -> RowWindows:
        windows = row_windows(edge_index, num_nodes, num_nodes)
        return windows if self.flow == "source_to_target" else windows.transpose()

    def _cache(self, windows: RowWindows, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> None:
        # What PyG would cache, for whoever reads it. Without weights the record serves as well, and faster.
        edges = edge_index.edge_index() if isinstance(edge_index, RowWindows) else edge_index
        options = (self.improved, self.add_self_loops, self.flow, x.dtype)
        trained = edge_weight is not None and edge_weight.requires_grad
        normalise = gcn_norm if trained else lasting(gcn_norm)
        self._cached_edge_index = normalise(edges.long(), edge_weight, x.size(0), *options)
        self._cached_windows = None if edge_weight is not None else (self._cached_edge_index[0], windows)


def _check_weights(edge_weight: Tensor, windows: RowWindows, x: Tensor, normalize: bool) -> None:
    # integers may weigh edges as they are, as in PyG; a degree to the power of -1/2 is none
    dtype = edge_weight.dtype
    as_given = not (normalize or dtype.is_floating_point or dtype.is_complex)
    if dtype not in _check.FLOATS and not as_given:
        remedy = "pass its absolute value" if dtype.is_complex else f"convert it with .to({x.dtype})"
        raise ValueError(f"`edge_weight` must be a float tensor (got {dtype}); {remedy}")
    _check.vector("edge_weight", edge_weight, windows.num_edges, windows.device, any_dtype=True)


def _keeps_dtype(x: Tensor, other: OptTensor) -> bool:
    """Whether what is made of both has the dtype of ``x``."""
    return other is None or other.dtype is x.dtype or torch.promote_types(x.dtype, other.dtype) is x.dtype


def _scales(windows: RowWindows, add_self_loops: bool) -> tuple[Tensor, Tensor | None]:
    """D^-1/2 and the diagonal of the unweighted graph, float32, kept with the record."""

    def compute() -> tuple[Tensor, Tensor | None]:
        degree = windows.edges_per_row()
        loop_weight = None
        if add_self_loops:
            # every loop counts 1, given or added, `improved` or not: without weights PyG fills none in
            loop_weight = torch.ones_like(degree, dtype=torch.float32)
            degree = degree - windows.loops_per_row() + loop_weight
        scale = degree.double().pow_(-0.5)
        if not add_self_loops:  # else no degree is 0
            scale = scale.masked_fill_(degree == 0, 0.0)
        return scale.float(), loop_weight

    found: tuple[Tensor, Tensor | None] = windows.memo(("gcn", add_self_loops), compute)
    return found


def _loop_weights(windows: RowWindows, edge_weight: Tensor, improved: bool) -> Tensor:
    """The diagonal of a weighted graph: the weight of a node's last self-loop, else the fill value."""

    def find() -> tuple[Tensor, Tensor]:
        last = windows.last_loop()
        return last.clamp(min=0), last >= 0

    place, is_given = windows.memo("last_loops", find)
    given = edge_weight.index_select(0, place) if edge_weight.numel() > 0 else None
    fill = edge_weight.new_full((), 2.0 if improved else 1.0)
    return fill.expand(place.numel()) if given is None else torch.where(is_given, given, fill)
