"""GCN on Cora after PyG's examples/gcn.py, with graphfuse's layer. Without Cora: a generated graph."""

import argparse

import torch
import torch.nn.functional as F

from graphfuse.nn import GCNConv
from graphfuse.train.datasets import DatasetError, load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="cora", help="see graphfuse train --list")
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
try:
    data = load(args.dataset, normalize_features=True)
except DatasetError as error:
    print(f"{error}\nTraining on a generated graph of Cora's size instead.")
    data = load("quickstart", normalize_features=True)
data = ToRowWindows()(data.to(device))


class GCN(torch.nn.Module):
    """Two graph convolutions."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        """Class scores of every node."""
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


model = GCN(data.num_features, args.hidden_channels, int(data.y.max()) + 1).to(device)
groups = [dict(params=model.conv1.parameters(), weight_decay=5e-4), dict(params=model.conv2.parameters())]
optimizer = torch.optim.Adam(groups, lr=args.lr)

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
