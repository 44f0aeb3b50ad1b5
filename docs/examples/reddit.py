"""Training on sampled neighbours of Reddit, after PyG's examples/reddit.py. Needs pyg-lib or torch-sparse.

PyG's script has SAGEConv, which is not fused. This one has GCNConv with the weights of GraphSAGE's other
aggregator: the mean over a node and its neighbours. Smaller graphs: what graphfuse train --list names.
"""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.utils import add_self_loops, degree
from tqdm import tqdm

from graphfuse.nn import GCNConv
from graphfuse.train.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="Reddit")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=1024)
parser.add_argument("--num_workers", type=int, default=6)
args = parser.parse_args()

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root).data
data = data.to(device, "x", "y")  # sampling reads edge_index on the CPU, training the rest on the device
kwargs = {"batch_size": args.batch_size, "num_workers": args.num_workers}
kwargs["persistent_workers"] = args.num_workers > 0
sampled = NeighborLoader(data, [25, 10], input_nodes=data.train_mask, shuffle=True, **kwargs)
bare = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)  # batches of numbers alone
whole = NeighborLoader(bare, [-1], input_nodes=None, **kwargs)


def with_means(edge_index, num_nodes: int):
    """The edges and a loop for each node, and the weights that make a sum the mean."""
    edge_index, _ = add_self_loops(edge_index, num_nodes=num_nodes)
    return edge_index, (1 / degree(edge_index[1], num_nodes))[edge_index[1]]


class GCN(torch.nn.Module):
    """Two graph convolutions."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, normalize=False)
        self.conv2 = GCNConv(hidden_channels, out_channels, normalize=False)

    def forward(self, x, edge_index):
        """Class scores of every node of a batch."""
        edge_index, weight = with_means(edge_index, x.size(0))
        x = F.dropout(self.conv1(x, edge_index, weight).relu(), p=0.5, training=self.training)
        return self.conv2(x, edge_index, weight)

    @torch.no_grad()
    def inference(self, x):
        """Class scores of every node from all of its neighbours, layer by layer."""
        for conv in (self.conv1, self.conv2):
            rows = []
            for batch in tqdm(whole, "Evaluating", disable=None):
                edge_index, weight = with_means(batch.edge_index.to(device), batch.num_nodes)
                out = conv(x[batch.n_id.to(x.device)].to(device), edge_index, weight)[: batch.batch_size]
                rows.append((out.relu() if conv is self.conv1 else out).cpu())
            x = torch.cat(rows)
        return x


model = GCN(data.num_features, args.hidden_channels, int(data.y.max()) + 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(1, args.epochs + 1):
    model.train()
    total = torch.zeros(3)  # loss, right ones, all
    for batch in tqdm(sampled, f"Epoch {epoch:02d}", disable=None):
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index.to(device))[: batch.batch_size]
        y = batch.y[: batch.batch_size]
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        right = (out.argmax(1) == y).sum()
        total += torch.tensor([loss.item() * y.numel(), right.item(), y.numel()])
    model.eval()
    right = model.inference(data.x).argmax(1) == data.y.cpu()
    train_acc, val_acc, test_acc = (
        right[mask.cpu()].float().mean().item() for mask in (data.train_mask, data.val_mask, data.test_mask)
    )
    print(f"Epoch: {epoch:02d}, Loss: {total[0] / total[2]:.4f}, Approx. Train: {total[1] / total[2]:.4f}")
    print(f"Epoch: {epoch:02d}, Train: {train_acc:.4f}, Val: {val_acc:.4f}, Test: {test_acc:.4f}")
