"""What a run learns: the batches of an epoch, their loss, and the scores of the model, on one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
import torch_geometric.typing
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader, RandomNodeLoader

from graphfuse.testing import neighbor_batches
from graphfuse.train.config import TrainConfig
from graphfuse.train.datasets import Dataset

IGNORED = -100  # the target of nodes that are not trained on: no gather, and nothing that synchronises


class NodeTask:
    """Nodes of one graph are classified; scores are of all nodes, whatever a step sees.

    Args:
        config: The run.
        dataset: With ``data``.
        device: Where batches and scores lie.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        given = _prepared(config, dataset.data)
        given.target = torch.where(given.train_mask, given.y, IGNORED)
        self.graph = copy.copy(given).to(device)  # PyG's `to` is in place
        self.host = given if config.loader == "full" else _bare(given).cpu()  # which PyG's loaders cut
        self.train_nodes = given.train_mask.nonzero().view(-1).to(device)
        self.in_channels, self.out_channels = self.graph.x.size(1), dataset.num_classes
        self.edge_dim = dataset.edge_dim if config.edge_features else None
        self.masks = torch.stack([self.graph.val_mask, self.graph.test_mask])
        self.waits = dataset.metric != "accuracy"  # whether scores are computed on the host

    def batches(self) -> Iterator[Data]:
        """The batches of an epoch, drawn with the random numbers of the CPU.

        If there may be several, ``count`` of each is how many nodes its loss is the mean of.
        """
        loader, size = self.config.loader, self.config.batch_size
        if loader == "full":
            yield self.graph
        elif loader == "neighbor":
            yield from self._neighborhoods(size)
        else:
            parts = math.ceil(int(self.host.num_nodes) / size)
            for batch in RandomNodeLoader(self.host, num_parts=parts, shuffle=True):
                batch.count = int((batch.target != IGNORED).sum())  # here, where nothing waits for a GPU
                yield batch.to(self.device)

    def _neighborhoods(self, size: int) -> Iterator[Data]:
        count = self.config.num_neighbors
        batches: Iterable[Data]
        if torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE:
            seeds = self.train_nodes.cpu()
            batches = NeighborLoader(self.host, count, seeds, batch_size=size, shuffle=True)
        else:
            order = torch.randperm(self.train_nodes.numel()).to(self.device)
            seed = int(torch.randint(2**31, ()))
            batches = neighbor_batches(_bare(self.graph), count, size, self.train_nodes[order], seed)
        for batch in batches:
            batch.target[batch.batch_size :] = IGNORED  # neighbours count when they are seeds
            batch.count = batch.batch_size
            yield batch.to(self.device)

    def arguments(self, batch: Data) -> tuple[Any, ...]:
        """What the model is called with."""
        return batch.x, batch.edge_index, batch.edge_attr

    def loss(self, model: torch.nn.Module, batch: Data) -> Tensor:
        """Cross entropy of the training nodes of a batch, 0 if it has none."""
        scores = model(*self.arguments(batch)).float()
        if self.config.loader == "full":
            return F.cross_entropy(scores, batch.target, ignore_index=IGNORED)
        total = F.cross_entropy(scores, batch.target, ignore_index=IGNORED, reduction="sum")
        mean: Tensor = total / (batch.target != IGNORED).sum().clamp(min=1)
        return mean

    def scores(self, model: torch.nn.Module) -> Tensor:
        """Scores of the validation and of the test nodes; if they are accuracies nothing synchronises."""
        logits, y = model(*self.arguments(self.graph)).float(), self.graph.y
        if self.waits:
            return torch.tensor([_score(self.dataset, logits[mask], y[mask]) for mask in self.masks])
        found: Tensor = 100.0 * ((logits.argmax(1) == y) & self.masks).sum(1) / self.masks.sum(1)
        return found


class GraphTask:
    """Whole graphs are classified, or numbers of them predicted.

    Args:
        config: The run.
        dataset: With ``splits``.
        device: Where batches and scores lie.
    """

    waits = True

    def __init__(self, config: TrainConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        self.splits = {
            name: [_prepared(config, graph) for graph in graphs] for name, graphs in dataset.splits.items()
        }
        self.in_channels, self.out_channels = self.splits["train"][0].x.size(1), dataset.num_classes
        self.edge_dim = dataset.edge_dim if config.edge_features else None

    def batches(self, split: str = "train") -> Iterator[Data]:
        """The batches of an epoch, those of training drawn with the random numbers of the CPU.

        ``count`` of each is how many graphs its loss is the mean of.
        """
        for batch in DataLoader(self.splits[split], self.config.batch_size, shuffle=split == "train"):
            batch.count = batch.num_graphs
            yield batch.to(self.device)

    def arguments(self, batch: Data) -> tuple[Any, ...]:
        """What the model is called with."""
        return batch.x, batch.edge_index, batch.edge_attr, batch.ptr

    def loss(self, model: torch.nn.Module, batch: Data) -> Tensor:
        """Absolute error, or cross entropy: binary if there is one score for a graph."""
        scores = model(*self.arguments(batch)).float()
        if self.out_channels > 1:
            loss: Tensor = F.cross_entropy(scores, batch.y.view(-1))
            return loss
        y = batch.y.view_as(scores).float()
        if self.dataset.metric == "mae":
            return F.l1_loss(scores, y)
        return F.binary_cross_entropy_with_logits(scores, y)

    def scores(self, model: torch.nn.Module) -> Tensor:
        """Scores of the validation and of the test graphs."""
        found = []
        for split in ("val", "test"):
            parts = [(model(*self.arguments(batch)).float(), batch.y) for batch in self.batches(split)]
            logits, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            found.append(_score(self.dataset, logits, y))
        return torch.tensor(found)


Task = NodeTask | GraphTask


def of(config: TrainConfig, dataset: Dataset, device: torch.device) -> Task:
    """The task of a data set.

    Raises:
        ValueError: ``loader`` or ``edge_features`` does not fit the data set.
    """
    graphs = dataset.task == "graph"
    if graphs != (config.loader == "graphs"):
        wanted = "graphs" if graphs else "full, neighbor or random_node"
        many = "many graphs" if graphs else "one graph"
        raise ValueError(
            f"`loader` must be {wanted} as {dataset.name} is {many} (got {config.loader}); set loader=..."
        )
    if config.edge_features and dataset.edge_dim is None:
        raise ValueError(
            f"`edge_features` must be false as {dataset.name} has none (got true); set edge_features=false"
        )
    return (GraphTask if graphs else NodeTask)(config, dataset, device)


def _score(dataset: Dataset, logits: Tensor, y: Tensor) -> float:
    # in percent, but for errors, which have the unit of what is predicted
    if bool(logits.isnan().any()):  # a rank of NaN is chance, and OGB's evaluators refuse it
        return math.nan
    score: float = dataset.evaluate(logits.cpu(), y.cpu())
    return score if dataset.metric == "mae" else 100.0 * score


def _prepared(config: TrainConfig, data: Data) -> Data:
    """What the run reads of ``data``, features transformed."""
    kept = [*(["edge_attr"] if config.edge_features else []), "train_mask", "val_mask", "test_mask"]
    data = Data(
        x=data.x, edge_index=data.edge_index, y=data.y, **{key: data[key] for key in kept if key in data}
    )
    if config.normalize_features:
        data = T.NormalizeFeatures()(data)
    if config.random_walk:
        data = T.AddRandomWalkPE(config.random_walk, attr_name=None)(data)
    if config.brings_loops:
        data = T.AddSelfLoops("edge_attr", "mean")(T.RemoveSelfLoops("edge_attr")(data))
    return data


def _bare(data: Data) -> Data:
    # what a batch needs
    edges = {} if data.edge_attr is None else {"edge_attr": data.edge_attr}
    return Data(x=data.x, edge_index=data.edge_index, target=data.target, **edges)
