"""PyG's GAT, converted and trained. No download: the default data set is a small generated graph."""

import argparse

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.logging import log
from torch_geometric.nn import GAT

import graphfuse
from graphfuse.train.datasets import load

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="quickstart", help="see graphfuse train --list")
parser.add_argument("--root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
parser.add_argument("--hidden_channels", type=int, default=64, help="of all 8 heads together")
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=50)
args = parser.parse_args()

device = torch_geometric.device("auto")
data = load(args.dataset.lower(), args.root, normalize_features=True).data.to(device)
num_classes = int(data.y.max()) + 1
model = GAT(data.num_features, args.hidden_channels, 2, num_classes, dropout=0.6, act="elu", heads=8)
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)

model, report = graphfuse.convert(model)  # the optimizer holds the same parameters still
print(report)
graphfuse.warmup(model, data)  # row windows and kernels; nothing is trained by it

best = final = 0.0
for epoch in range(1, args.epochs + 1):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()

    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    val, test = (right[mask].float().mean().item() for mask in (data.val_mask, data.test_mask))
    if val > best:
        best, final = val, test
    log(Epoch=epoch, Loss=loss.item(), Val=val, Test=final)

for reason in graphfuse.why_not(model.convs[0], data.x, data.edge_index):
    print(f"not fused: {reason}")
