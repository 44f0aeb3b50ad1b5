"""Small data sets and settings that training tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data

from graphfuse.train import datasets
from graphfuse.train.config import TrainConfig
from graphfuse.train.datasets import Dataset
from graphfuse.train.metrics import mean_absolute_error, roc_auc

# what each model needs beside the defaults of TrainConfig
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {},
    "gat": {"heads": 2, "activation": "elu"},
    "gatv2": {"heads": 2, "norm": "layer"},
    "agnn": {"weight_decay": [5e-4]},
    "transformer": {"heads": 2, "out_heads": 2, "gate": True, "norm": "batch"},
    "graph_transformer": {"heads": 2, "norm": "batch", "input_dropout": 0.0, "weight_decay": [0.0]},
}


def settings(model: str = "gcn", **given: Any) -> TrainConfig:
    """A short run of a narrow model on the CPU or the first GPU."""
    return TrainConfig(
        **{"dataset": "small", "model": model, "hidden_channels": 8, "epochs": 2, **MODELS[model], **given}
    )


def nodes(num_nodes: int = 30) -> Dataset:
    """Nodes of three classes, which their features tell; a third each to train, validate and test on."""
    data = datasets.planted_partition(num_nodes=num_nodes, num_classes=3, num_words=6)
    data.x = torch.rand(num_nodes, 6, generator=torch.Generator().manual_seed(0))
    data.x[:, :3] += torch.nn.functional.one_hot(data.y, 3)
    data.train_mask = torch.arange(num_nodes) % 3 == 0
    data.val_mask, data.test_mask = torch.arange(num_nodes) % 3 == 1, torch.arange(num_nodes) % 3 == 2
    return datasets.of_nodes("small", data)


def molecules(metric: str = "rocauc", count: int = 14) -> Dataset:
    """Random graphs of 4 to 7 nodes with edge features, whose first feature decides the target."""
    random = torch.Generator().manual_seed(0)
    graphs = []
    for k in range(count):
        size = 4 + k % 4
        x = torch.randn(size, 5, generator=random)
        edge_index = torch.randint(size, (2, 9), generator=random)
        value = x[:, 0].mean().view(1, 1)
        y = value if metric == "mae" else (value > 0).float()
        graphs.append(Data(x=x, edge_index=edge_index, edge_attr=torch.rand(9, 3, generator=random), y=y))
    splits = {"train": graphs[: count - 8], "val": graphs[count - 8 : count - 4], "test": graphs[count - 4 :]}
    evaluate = mean_absolute_error if metric == "mae" else roc_auc
    return Dataset("molecules", "graph", 5, 1, metric, evaluate, splits=splits, edge_dim=3)  # type: ignore[arg-type]


def batched(model: str = "gcn", **given: Any) -> TrainConfig:
    """Settings for :func:`molecules`."""
    options = {"loader": "graphs", "batch_size": 3, "normalize_features": False, "weight_decay": [0.0]}
    return settings(model, **{**options, **given})
