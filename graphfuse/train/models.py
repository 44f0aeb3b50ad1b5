"""Models, with graphfuse's layers or PyG's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from graphfuse.nn._dispatch import path_taken
from graphfuse.train.config import TrainConfig


class GCN(torch.nn.Module):
    """The network of Kipf & Welling (arXiv:1609.02907): graph convolutions with ReLU and dropout between."""

    def __init__(self, config: TrainConfig, in_channels: int, out_channels: int) -> None:
        super().__init__()
        conv = graphfuse.nn.GCNConv if config.layers == "graphfuse" else pyg.GCNConv
        widths = [in_channels, *[config.hidden_channels] * (config.num_layers - 1), out_channels]
        self.convs = torch.nn.ModuleList(
            conv(widths[i], widths[i + 1], cached=True) for i in range(config.num_layers)
        )
        self.dropout, self.input_dropout = config.dropout, config.input_dropout

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Class scores of every node."""
        if self.input_dropout > 0:
            x = F.dropout(x, self.input_dropout, self.training)
        *hidden, last = self.convs
        for conv in hidden:
            x = F.dropout(conv(x, edge_index).relu(), self.dropout, self.training)
        scores: Tensor = last(x, edge_index)
        return scores


def build(config: TrainConfig, in_channels: int, out_channels: int) -> GCN:
    """The model that ``config`` names, parameters drawn from the current random state."""
    return GCN(config, in_channels, out_channels)


def path(model: torch.nn.Module) -> tuple[str, list[str]]:
    """What ran in the last forward: ``"fused"``, ``"generic"`` or ``"pyg"``, and why it was not fused."""
    taken = [found for module in model.modules() if (found := path_taken(module)) is not None]
    if not taken:
        return "pyg", []
    reasons = sorted({reason for found in taken for reason in found})
    return ("generic" if reasons else "fused"), reasons
