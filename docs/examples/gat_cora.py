"""GAT on Cora after PyG's examples/gat.py, with graphfuse's layer. Without Cora: a generated graph."""

import argparse

import torch
import torch.nn.functional as F

from graphfuse.nn import GATConv
from graphfuse.train.datasets import DatasetError, load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="cora", help="see graphfuse train --list")
parser.add_argument("--hidden_channels", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
try:
    data = load(args.dataset, normalize_features=True)
except DatasetError as error:
    print(f"{error}\nTraining on a generated graph of Cora's size instead.")
    data = load("quickstart", normalize_features=True)
data = ToRowWindows()(data.to(device))


class GAT(torch.nn.Module):
    """Two graph attention layers; the kernels add the self-loops and drop attention weights."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int) -> None:
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.6)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        """Class scores of every node."""
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(data.num_features, args.hidden_channels, int(data.y.max()) + 1, args.heads).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)

for epoch in range(1, args.epochs + 1):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)  # finds the windows that the transform built
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    val, test = (right[mask].float().mean().item() for mask in (data.val_mask, data.test_mask))
    print(f"epoch {epoch:03d}, validation {val:.4f}, test {test:.4f}")
