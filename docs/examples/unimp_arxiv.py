"""UniMP on ogbn-arxiv: PyG's examples/unimp_arxiv.py with graphfuse's layer. Needs ``pip install ogb``.

A step is given some labels of the training nodes as input and predicts the others. Without a download, and
without ogb: --dataset quickstart.
"""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.transforms as T
from torch_geometric.logging import log
from torch_geometric.nn import MaskLabel

from graphfuse.nn import TransformerConv
from graphfuse.train.datasets import load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="ogbn-arxiv")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--label_rate", type=float, default=0.95, help="share of training labels to predict")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root).data
data = T.ToUndirected()(data.to(device))
data = ToRowWindows()(data)


class UniMP(torch.nn.Module):
    """Embedded labels are added to the features; then one attention over the neighbours."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int) -> None:
        super().__init__()
        self.label = MaskLabel(out_channels, in_channels)
        self.conv = TransformerConv(in_channels, hidden_channels // heads, heads)
        self.lin = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x, y, edge_index, given):
        """Class scores of every node, from the labels of those that ``given`` marks."""
        return self.lin(self.conv(self.label(x, y, given), edge_index))


model = UniMP(data.num_features, args.hidden_channels, int(data.y.max()) + 1, args.heads).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)


def train() -> tuple[float, float]:
    """One step; its loss, and its accuracy on the labels that it was not given."""
    model.train()
    optimizer.zero_grad()
    given = MaskLabel.ratio_mask(data.train_mask, 1 - args.label_rate)
    asked = data.train_mask & ~given
    out = model(data.x, data.y, data.edge_index, given)[asked]
    loss = F.cross_entropy(out, data.y[asked])
    loss.backward()
    optimizer.step()
    return loss.item(), (out.argmax(1) == data.y[asked]).float().mean().item()


@torch.no_grad()
def test(given, asked) -> float:
    """Accuracy on the nodes that ``asked`` marks, from the labels of those that ``given`` marks."""
    model.eval()
    right = model(data.x, data.y, data.edge_index, given).argmax(1) == data.y
    return right[asked].float().mean().item()


for epoch in range(1, args.epochs + 1):
    loss, train_acc = train()
    val_acc = test(data.train_mask, data.val_mask)
    test_acc = test(data.train_mask | data.val_mask, data.test_mask)
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
