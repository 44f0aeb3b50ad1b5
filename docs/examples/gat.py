"""GAT on a citation graph: PyG's examples/gat.py, graphfuse's layer. No download: --dataset quickstart."""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.logging import init_wandb, log

from graphfuse.nn import GATConv
from graphfuse.train.datasets import load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="Cora")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=8)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--wandb", action="store_true", help="track the run with Weights & Biases")
args = parser.parse_args()
sizes = {"heads": args.heads, "hidden_channels": args.hidden_channels}
init_wandb(f"GAT-{args.dataset}", lr=args.lr, epochs=args.epochs, **sizes)

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root, normalize_features=True).data.to(device)
data = ToRowWindows()(data)


class GAT(torch.nn.Module):
    """Two graph attention layers; attention weights are dropped, and self-loops added, inside the kernels."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, heads: int) -> None:
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.6)
        # PubMed wants 8 heads here, and a mean of them
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        """Class scores of every node."""
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(data.num_features, args.hidden_channels, int(data.y.max()) + 1, args.heads).to(device)
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


seconds = []
best = final = 0.0
for epoch in range(1, args.epochs + 1):
    start = time.perf_counter()
    loss = train()
    seconds.append(time.perf_counter() - start)  # reading the loss has waited for the GPU
    train_acc, val_acc, test_acc = test()
    if val_acc > best:
        best, final = val_acc, test_acc
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=final)
print(f"Median time of a training step: {statistics.median(seconds):.4f} s")
