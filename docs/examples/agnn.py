"""AGNN on a citation graph: PyG's examples/agnn.py, graphfuse's layer. No download: --dataset quickstart."""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.logging import log

from graphfuse.nn import AGNNConv
from graphfuse.train.datasets import load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="Cora")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root, normalize_features=True).data.to(device)
data = ToRowWindows()(data)


class AGNN(torch.nn.Module):
    """A linear layer, two attentions over what it makes, and a linear layer."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin1 = torch.nn.Linear(in_channels, hidden_channels)
        self.prop1 = AGNNConv(requires_grad=False)
        self.prop2 = AGNNConv(requires_grad=True)
        self.lin2 = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        """Class scores of every node."""
        x = F.dropout(x, training=self.training)
        x = self.lin1(x).relu()
        x = self.prop1(x, edge_index)
        x = self.prop2(x, edge_index)
        x = F.dropout(x, training=self.training)
        return self.lin2(x)


model = AGNN(data.num_features, args.hidden_channels, int(data.y.max()) + 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def train() -> float:
    """One step on all training nodes; its loss."""
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)  # finds the windows that the transform built
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test() -> list[float]:
    """Accuracy on the nodes of each split."""
    model.eval()
    right = model(data.x, data.edge_index).argmax(1) == data.y
    return [right[mask].float().mean().item() for mask in (data.train_mask, data.val_mask, data.test_mask)]


best = final = 0.0
for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, test_acc = test()
    if val_acc > best:
        best, final = val_acc, test_acc
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=final)
