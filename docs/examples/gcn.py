"""GCN on a citation graph: PyG's examples/gcn.py, graphfuse's layer. No download: --dataset quickstart."""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.logging import init_wandb, log
from torch_geometric.transforms import GDC

from graphfuse.nn import GCNConv
from graphfuse.train.datasets import load
from graphfuse.transforms import ToRowWindows

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="Cora")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--use_gdc", action="store_true", help="diffuse the graph first (GDC)")
parser.add_argument("--wandb", action="store_true", help="track the run with Weights & Biases")
args = parser.parse_args()
init_wandb(f"GCN-{args.dataset}", lr=args.lr, epochs=args.epochs, hidden_channels=args.hidden_channels)

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root, normalize_features=True).data.to(device)
if args.use_gdc:
    sparsify = {"method": "topk", "k": 128, "dim": 0}
    data = GDC(1, "sym", "col", {"method": "ppr", "alpha": 0.05}, sparsify, exact=True)(data)
data = ToRowWindows()(data)  # after every transform that changes edges


class GCN(torch.nn.Module):
    """Two graph convolutions."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, normalize=not args.use_gdc)
        self.conv2 = GCNConv(hidden_channels, out_channels, normalize=not args.use_gdc)

    def forward(self, x, edge_index, edge_weight=None):
        """Class scores of every node."""
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


model = GCN(data.num_features, args.hidden_channels, int(data.y.max()) + 1).to(device)
decayed = {"params": model.conv1.parameters(), "weight_decay": 5e-4}  # the first convolution alone
optimizer = torch.optim.Adam([decayed, {"params": model.conv2.parameters()}], lr=args.lr)


def train() -> float:
    """One step on all training nodes; its loss."""
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index, data.edge_attr)  # finds the windows that the transform built
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test() -> list[float]:
    """Accuracy on the nodes of each split."""
    model.eval()
    right = model(data.x, data.edge_index, data.edge_attr).argmax(1) == data.y
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
