"""PyG's layers, fused."""

from graphfuse.nn.gcn_conv import GCNConv as GCNConv
