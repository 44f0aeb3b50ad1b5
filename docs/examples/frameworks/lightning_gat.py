"""GAT under PyTorch Lightning, which moves the graph at every step and its row windows with it.

Run: python docs/examples/frameworks/lightning_gat.py [--dataset cora] [--epochs 200]
Needs lightning or pytorch-lightning. Without Cora's files or network it trains on a graph that it makes.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data.lightning import LightningNodeData

from graphfuse.nn import GATConv
from graphfuse.train.datasets import DatasetError, load
from graphfuse.transforms import ToRowWindows

try:  # in PyG's order: a trainer takes the data of no other package
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="cora", help="see graphfuse train --list")
parser.add_argument("--hidden_channels", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()


class GAT(pl.LightningModule):
    """Two graph attention layers on a whole graph."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int) -> None:
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.6)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False, dropout=0.6)

    def forward(self, data):
        """Class scores of every node."""
        x = F.dropout(data.x, p=0.6, training=self.training)
        x = F.dropout(F.elu(self.conv1(x, data.row_windows)), p=0.6, training=self.training)
        return self.conv2(x, data.row_windows)

    def training_step(self, data, _):
        """Loss of the nodes that are trained on."""
        out = self(data)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    def validation_step(self, data, _):
        """Accuracy of the others."""
        accuracy = (self(data).argmax(1) == data.y)[data.val_mask].float().mean()
        self.log("validation", accuracy, batch_size=1)
        if not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch + 1:03d}, validation {accuracy:.4f}")

    def configure_optimizers(self):
        """Adam, as in the paper."""
        return torch.optim.Adam(self.parameters(), lr=args.lr, weight_decay=5e-4)


try:
    data = load(args.dataset, normalize_features=True).data
except DatasetError as error:
    print(f"{error}\nTraining on a generated graph of Cora's size instead.")
    data = load("quickstart", normalize_features=True).data
model = GAT(data.num_features, args.hidden_channels, int(data.y.max()) + 1, args.heads)
trainer = pl.Trainer(
    devices=1, max_epochs=args.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(model, LightningNodeData(ToRowWindows()(data), loader="full"))
