"""Models, with graphfuse's layers or PyG's: the same code, and for equal seeds the same first weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.utils import segment

import graphfuse.nn
from graphfuse import reference
from graphfuse.nn._dispatch import path_taken
from graphfuse.nn.models import GraphTransformer
from graphfuse.train.config import TrainConfig

_NORMS: dict[str, Any] = {
    "none": lambda channels: torch.nn.Identity(),
    "batch": torch.nn.BatchNorm1d,
    "layer": torch.nn.LayerNorm,
}


class Convolutions(torch.nn.Module):
    """Convolutions with norm, activation and dropout between.

    ``gcn`` is the network of Kipf & Welling (arXiv:1609.02907), ``gat`` and ``gatv2`` those of Veličković et
    al. (arXiv:1710.10903) and Brody et al. (arXiv:2105.14491), ``transformer`` the attention of UniMP
    (arXiv:2009.03509), gated or not, without labels as input.
    """

    def __init__(
        self, config: TrainConfig, in_channels: int, out_channels: int, edge_dim: int | None = None
    ) -> None:
        super().__init__()
        widths = [in_channels, *[config.hidden_channels] * (config.num_layers - 1), out_channels]
        self.convs = torch.nn.ModuleList(
            _convolution(config, widths[k], widths[k + 1], edge_dim, k == config.num_layers - 1)
            for k in range(config.num_layers)
        )
        self.norms = torch.nn.ModuleList(_NORMS[config.norm](width) for width in widths[1:-1])
        self.activation = getattr(F, config.activation)
        self.dropout, self.input_dropout = config.dropout, config.input_dropout

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        """Class scores, or rows to pool, of every node."""
        edges = () if edge_attr is None else (edge_attr,)
        x = _dropped(x, self.input_dropout, self.training)
        *hidden, last = self.convs
        for conv, norm in zip(hidden, self.norms, strict=True):
            x = self.activation(norm(conv(x, edge_index, *edges)))
            x = _dropped(x, self.dropout, self.training)
        rows: Tensor = last(x, edge_index, *edges)
        return rows


class AGNN(torch.nn.Module):
    """The network of Thekumparampil et al. (arXiv:1803.03735): attention over what a linear layer makes.

    As in PyG's example the first propagation keeps its temperature at 1, later ones learn theirs.
    """

    def __init__(
        self, config: TrainConfig, in_channels: int, out_channels: int, edge_dim: int | None = None
    ) -> None:
        super().__init__()
        kind = graphfuse.nn.AGNNConv if config.layers == "graphfuse" else pyg.AGNNConv
        self.lin_in = torch.nn.Linear(in_channels, config.hidden_channels)
        loops = not config.brings_loops
        self.convs = torch.nn.ModuleList(kind(k > 0, loops) for k in range(config.num_layers))
        self.lin_out = torch.nn.Linear(config.hidden_channels, out_channels)
        self.activation = getattr(F, config.activation)
        self.dropout, self.input_dropout = config.dropout, config.input_dropout

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        """Class scores, or rows to pool, of every node."""
        x = self.activation(self.lin_in(_dropped(x, self.input_dropout, self.training)))
        for conv in self.convs:
            x = conv(x, edge_index)
        rows: Tensor = self.lin_out(_dropped(x, self.dropout, self.training))
        return rows


class Pooled(torch.nn.Module):
    """A model of nodes, then the mean, sum or maximum over each graph, then a linear layer."""

    def __init__(self, body: torch.nn.Module, pooling: str, channels: int, out_channels: int) -> None:
        super().__init__()
        self.body, self.pooling = body, pooling
        self.lin_out = torch.nn.Linear(channels, out_channels)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor | None, ptr: Tensor) -> Tensor:
        """Scores of every graph; the nodes of graph i are ``ptr[i]`` to ``ptr[i + 1]``."""
        rows = self.body(x, edge_index, edge_attr)
        # by segments, not by scatter, whose sums have no fixed order on a GPU
        scores: Tensor = self.lin_out(segment(rows.float(), ptr, reduce=self.pooling))
        return scores


def build(
    config: TrainConfig,
    in_channels: int,
    out_channels: int,
    edge_dim: int | None = None,
    graphs: bool = False,
) -> torch.nn.Module:
    """The model that ``config`` names, parameters drawn from the current random state.

    Args:
        config: The run.
        in_channels: Size of each node's features.
        out_channels: Classes, or 1.
        edge_dim: Size of each edge's features; ``None`` if the model is given none.
        graphs: Whether graphs are predicted instead of nodes.
    """
    width = config.hidden_channels if graphs else out_channels
    body: torch.nn.Module
    if config.model == "graph_transformer":
        body = _graph_transformer(config, in_channels, width, edge_dim)
    elif config.model == "agnn":
        body = AGNN(config, in_channels, width)
    else:
        body = Convolutions(config, in_channels, width, edge_dim)
    return Pooled(body, config.pooling, width, out_channels) if graphs else body


def groups(model: torch.nn.Module, weight_decay: Sequence[float]) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer: all of them, or each convolution's with a penalty of its own."""
    if len(weight_decay) == 1:
        return [{"params": list(model.parameters()), "weight_decay": weight_decay[0]}]
    found: Any = getattr(model, "body", model)
    rest = [parameter for name, parameter in model.named_parameters() if ".convs." not in f".{name}"]
    by_layer = [
        {"params": list(conv.parameters()), "weight_decay": decay}
        for conv, decay in zip(found.convs, weight_decay, strict=True)
    ]
    return [*by_layer, {"params": rest, "weight_decay": 0.0}] if rest else by_layer


def path(model: torch.nn.Module) -> tuple[str, list[str]]:
    """What ran in the last forward: ``"fused"``, ``"generic"`` or ``"pyg"``, and why it was not fused."""
    taken = [found for module in model.modules() if (found := path_taken(module)) is not None]
    if not taken:
        return "pyg", []
    reasons = sorted({reason for found in taken for reason in found})
    return ("generic" if reasons else "fused"), reasons


def _convolution(config: TrainConfig, width: int, to: int, edge_dim: int | None, last: bool) -> Any:
    kinds: Any = graphfuse.nn if config.layers == "graphfuse" else pyg
    if config.model == "gcn":
        # graphfuse's layers keep what they need with the windows, and if cached PyG's edges and weights too
        return kinds.GCNConv(width, to, cached=config.loader == "full" and kinds is pyg)
    heads = config.out_heads if last else config.heads
    options: dict[str, Any] = {"heads": heads, "concat": not last, "dropout": config.attention_dropout}
    options["edge_dim"] = edge_dim
    each = to if last else to // heads
    if config.model == "transformer":
        return kinds.TransformerConv(width, each, beta=config.gate, **options)
    options["add_self_loops"] = not config.brings_loops
    return (kinds.GATConv if config.model == "gat" else kinds.GATv2Conv)(width, each, **options)


def _graph_transformer(config: TrainConfig, width: int, to: int, edge_dim: int | None) -> torch.nn.Module:
    model = GraphTransformer(
        width, config.hidden_channels, config.num_layers, to, config.dropout, heads=config.heads,
        norm=config.norm, edge_dim=edge_dim,
    )  # fmt: skip
    if config.layers == "pyg":  # PyG has no such layer: the definition, which runs on its `propagate`
        layers: Any = model.layers
        for k, layer in enumerate(layers):
            with torch.random.fork_rng(devices=[]):
                plain = reference.GraphTransformerLayer(
                    layer.channels, layer.heads, dropout=layer.dropout, norm=layer.norm, edge_dim=edge_dim
                )
            plain.load_state_dict(layer.state_dict())
            layers[k] = plain
    return model


def _dropped(x: Tensor, rate: float, training: bool) -> Tensor:
    return F.dropout(x, rate, training) if rate > 0 else x
