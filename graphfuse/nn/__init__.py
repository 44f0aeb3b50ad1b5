"""PyG's layers, fused."""

from graphfuse.nn import models as models
from graphfuse.nn.agnn_conv import AGNNConv as AGNNConv
from graphfuse.nn.gat_conv import GATConv as GATConv
from graphfuse.nn.gatv2_conv import GATv2Conv as GATv2Conv
from graphfuse.nn.gcn_conv import GCNConv as GCNConv
from graphfuse.nn.graph_transformer_layer import GraphTransformerLayer as GraphTransformerLayer
from graphfuse.nn.linear import Linear as Linear
from graphfuse.nn.transformer_conv import TransformerConv as TransformerConv
