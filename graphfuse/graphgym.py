"""The fused layers under names of PyG's GraphGym; importing this module registers them.

``gnn.layer_type: fusedgcnconv`` in a configuration then stands for :class:`graphfuse.nn.GCNConv`, likewise
``fusedgatconv``, ``fusedgatv2conv``, ``fusedagnnconv`` and ``fusedtransformerconv``.

Raises:
    ImportError: GraphGym cannot be imported, or lacks yacs, without which it only warns and fails later.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from graphfuse import nn

try:
    importlib.import_module("yacs")
    from torch_geometric.graphgym.models.layer import LayerConfig
    from torch_geometric.graphgym.register import register_layer
except ImportError as error:
    raise ImportError(
        f"graphfuse.graphgym registers layers with PyG's GraphGym, which cannot be used here ({error}); "
        "pip install yacs pytorch-lightning"
    ) from error


class GraphGymLayer(torch.nn.Module):
    """A fused convolution as GraphGym calls it: of a batch it changes ``x``.

    Parameters are named as in GraphGym's own layers, so that a checkpoint of ``gcnconv`` or ``gatconv`` loads
    into the fused layer of that name.

    Args:
        conv: A class of :mod:`graphfuse.nn`.
        layer_config: Widths and bias. AGNNConv has no bias, and one width.
        **kwargs: Arguments of ``conv``. Heads must be averaged (``concat=False``): GraphGym counts on
            ``dim_out`` columns.

    Raises:
        ValueError: The layer is AGNNConv and ``dim_in`` differs from ``dim_out``.
    """

    def __init__(self, conv: Any, layer_config: LayerConfig, **kwargs: Any) -> None:
        super().__init__()
        dim_in, dim_out = layer_config.dim_in, layer_config.dim_out
        if conv is not nn.AGNNConv:
            self.model = conv(dim_in, dim_out, bias=layer_config.has_bias, **kwargs)
            return
        if dim_in != dim_out:
            raise ValueError(
                f"`dim_in` must equal `dim_out` in 'fusedagnnconv', which keeps the width of its rows "
                f"(got {dim_in} and {dim_out}); set gnn.layers_pre_mp to 1 or more"
            )
        self.model = conv(**kwargs)

    def forward(self, batch: Any) -> Any:
        """Runs the layer, fused where that is possible; its graph is ``batch.edge_index``."""
        batch.x = self.model(batch.x, batch.edge_index)
        return batch


for _conv in (nn.GCNConv, nn.GATConv, nn.GATv2Conv, nn.AGNNConv, nn.TransformerConv):
    register_layer(f"fused{_conv.__name__.lower()}", functools.partial(GraphGymLayer, _conv))
