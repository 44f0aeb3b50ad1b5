"""Whole models: PyG's GCN and GAT, and the Graph Transformer, of graphfuse's layers."""

# no `from __future__ import annotations`: TorchScript reads the class annotations as objects
from typing import Any, Final

import torch
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import Adj, OptTensor

from graphfuse.nn.gat_conv import GATConv
from graphfuse.nn.gatv2_conv import GATv2Conv
from graphfuse.nn.gcn_conv import GCNConv
from graphfuse.nn.graph_transformer_layer import GraphTransformerLayer


class GCN(BasicGNN):
    r"""The network of Kipf & Welling: a drop-in for PyG's ``GCN``, of fused layers.

    Constructor, forward, ``state_dict`` and initialisation are those of :class:`torch_geometric.nn.GCN`; each
    convolution is a :class:`graphfuse.nn.GCNConv`. All of them read one record of the graph.

    Args:
        in_channels: Size of each input row; ``-1`` derives it from the first input.
        hidden_channels: Size of the rows between layers.
        num_layers: Number of convolutions.
        out_channels: Size of each output row; ``None`` means ``hidden_channels``.
        dropout: Rate of dropout, in training, of the rows between layers.
        act: Activation between layers, by name or as a module; ``None`` for none.
        act_first: Whether the activation comes before the norm.
        act_kwargs: Arguments of the activation.
        norm: Norm between layers, by name or as a module; ``None`` for none.
        norm_kwargs: Arguments of the norm.
        jk: How the rows of all layers are joined, ``"last"``, ``"cat"``, ``"max"`` or ``"lstm"``, before a
            linear map to the output; ``None`` makes the last convolution's rows the output.
        **kwargs: Arguments of :class:`graphfuse.nn.GCNConv`.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})`, edge indices :math:`(2, |E|)` or
          :class:`graphfuse.RowWindows`, edge weights :math:`(|E|)` *(optional)*
        - **output:** features :math:`(|V|, F_{out})`

    Note:
        ``num_sampled_nodes_per_hop`` trims edge indices from layer to layer; RowWindows cannot be trimmed.

    Source: arXiv:1609.02907.
    """

    supports_edge_weight: Final[bool] = True
    supports_edge_attr: Final[bool] = False
    supports_norm_batch: Final[bool]  # type: ignore[misc]  # BasicGNN's constructor sets it

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> GCNConv:
        """A convolution of the model."""
        return GCNConv(in_channels, out_channels, **kwargs)


class GAT(BasicGNN):
    r"""The network of Veličković et al. or of Brody et al.: a drop-in for PyG's ``GAT``, of fused layers.

    Constructor, forward, ``state_dict`` and initialisation are those of :class:`torch_geometric.nn.GAT`; each
    convolution is a :class:`graphfuse.nn.GATConv`, or with ``v2`` a :class:`graphfuse.nn.GATv2Conv`. All of
    them read one record of the graph.

    Args:
        in_channels: Size of each input row, or a pair for sources and receivers; ``-1`` derives it from the
            first input.
        hidden_channels: Size of the rows between layers, of all heads together unless ``concat=False``.
        num_layers: Number of convolutions.
        out_channels: Size of each output row; ``None`` means ``hidden_channels``. A last convolution of this
            size averages its heads.
        v2: Whether attention is that of Brody et al.
        dropout: Rate of dropout, in training, of the rows between layers and of the attention weights.
        act: Activation between layers, by name or as a module; ``None`` for none.
        act_first: Whether the activation comes before the norm.
        act_kwargs: Arguments of the activation.
        norm: Norm between layers, by name or as a module; ``None`` for none.
        norm_kwargs: Arguments of the norm.
        jk: How the rows of all layers are joined, ``"last"``, ``"cat"``, ``"max"`` or ``"lstm"``, before a
            linear map to the output; ``None`` makes the last convolution's rows the output.
        **kwargs: Arguments of the convolution, such as ``heads``, ``concat`` and ``edge_dim``.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})`, edge indices :math:`(2, |E|)` or
          :class:`graphfuse.RowWindows`, edge features :math:`(|E|, D)` *(optional)*
        - **output:** features :math:`(|V|, F_{out})`

    Raises:
        ValueError: Heads are concatenated and a size is no multiple of ``heads``.

    Note:
        ``num_sampled_nodes_per_hop`` trims edge indices from layer to layer; RowWindows cannot be trimmed.

    Source: arXiv:1710.10903 and arXiv:2105.14491.
    """

    supports_edge_weight: Final[bool] = False
    supports_edge_attr: Final[bool] = True
    supports_norm_batch: Final[bool]  # type: ignore[misc]  # BasicGNN's constructor sets it

    def init_conv(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        v2: bool = False,
        heads: int = 1,
        concat: bool = True,
        **kwargs: Any,
    ) -> GATConv | GATv2Conv:
        """A convolution of the model; the one to ``out_channels`` averages its heads."""
        concat = concat and not getattr(self, "_is_conv_to_out", False)  # BasicGNN sets it before that one
        if concat and out_channels % heads != 0:
            raise ValueError(
                f"Ensure that the number of output channels of 'GATConv' (got '{out_channels}') is divisible "
                f"by the number of heads (got '{heads}')"
            )
        width = out_channels // heads if concat else out_channels
        conv = GATv2Conv if v2 else GATConv
        return conv(in_channels, width, heads=heads, concat=concat, dropout=self.dropout.p, **kwargs)


class GraphTransformer(torch.nn.Module):
    r"""The Graph Transformer of Dwivedi & Bresson: fused blocks between two linear maps.

    Each block is a :class:`graphfuse.nn.GraphTransformerLayer`, which keeps the width of its rows and has its
    own norms, activation, dropout and residuals, so that nothing stands between blocks. Arguments that
    PyG's models have as well are called as there. Positional encodings, if any, are for the caller to add
    or concatenate to the features.

    Args:
        in_channels: Size of each input row; ``-1`` derives it from the first input.
        hidden_channels: Size of the rows of the blocks, a multiple of ``heads``.
        num_layers: Number of blocks.
        out_channels: Size of each output row, to which a linear map leads; ``None`` returns the rows of the
            last block.
        dropout: Rate of dropout of the blocks, in training.
        heads: Number of heads of a block.
        norm: Norms of the blocks, ``"batch"`` or ``"layer"``.
        ffn_ratio: Size of the hidden rows of a block's feed-forward network, in ``hidden_channels``.
        edge_dim: Size of edge features, of which every block learns a map of its own.

    Shapes:
        - **input:** features :math:`(|V|, F_{in})`, edge indices :math:`(2, |E|)` or
          :class:`graphfuse.RowWindows`, edge features :math:`(|E|, D)` if ``edge_dim`` is :math:`D`
        - **output:** features :math:`(|V|, F_{out})`

    Raises:
        ValueError: What :class:`graphfuse.nn.GraphTransformerLayer` refuses.

    Source: arXiv:2012.09699.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        *,
        heads: int = 1,
        norm: str = "batch",
        ffn_ratio: int = 2,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.lin_in = Linear(in_channels, hidden_channels)
        self.layers = torch.nn.ModuleList(
            GraphTransformerLayer(
                hidden_channels, heads, dropout=dropout, norm=norm, ffn_ratio=ffn_ratio, edge_dim=edge_dim
            )
            for _ in range(num_layers)
        )
        self.lin_out = None if out_channels is None else Linear(hidden_channels, out_channels)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, and forgets the running statistics of batch norms."""
        modules: list[Any] = [self.lin_in, *self.layers, self.lin_out]
        for module in modules:
            if module is not None:
                module.reset_parameters()

    def forward(self, x: Tensor, edge_index: Adj, edge_attr: OptTensor = None) -> Tensor:
        """Runs the model, each block fused where that is possible."""
        x = self.lin_in(x)
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr)
        return x if self.lin_out is None else self.lin_out(x)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"num_layers={self.num_layers})"
        )
