"""Where data sets come from: PyG, OGB, files of one's own, and a generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import ZINC
from torch_geometric.utils import index_to_mask, to_undirected

from graphfuse.train import standin
from graphfuse.train.metrics import accuracy, mean_absolute_error, roc_auc

Metric = Literal["accuracy", "rocauc", "mae"]
Evaluate = Callable[[Tensor, Tensor], float]

# How many values the columns of OGB's atoms and bonds have (ogb.utils.features), and ZINC's types of both
_ATOMS, _BONDS = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)
_ZINC_ATOMS, _ZINC_BONDS = (28,), (4,)


@dataclass(frozen=True, eq=False)
class Dataset:
    """What is trained on, and how it is scored.

    Args:
        name: Of :data:`NAMES`, or any other.
        task: Whether nodes of one graph or whole graphs are predicted.
        num_features: Width of ``x``.
        num_classes: Scores of a node or graph: 1 for a number, and for a yes or no that ROC-AUC measures.
        metric: What ``evaluate`` returns.
        evaluate: Scores and targets to the metric: a share, not percent, or an error in units of the target.
            Training does not call it for an accuracy of nodes, which it counts on the device.
        data: Of nodes: the graph with ``x``, ``edge_index``, ``y``, ``train_mask``, ``val_mask`` and
            ``test_mask``.
        splits: Of graphs: ``train``, ``val`` and ``test``, lists of graphs with ``x``, ``edge_index``,
            ``edge_attr`` and ``y``.
        edge_dim: Width of ``edge_attr``; ``None`` without.
    """

    name: str
    task: Literal["node", "graph"]
    num_features: int
    num_classes: int
    metric: Metric
    evaluate: Evaluate
    data: Any = None
    splits: dict[str, list[Data]] = field(default_factory=dict, repr=False)
    edge_dim: int | None = None

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the metric is better."""
        return self.metric != "mae"


def of_nodes(name: str, data: Data, num_classes: int | None = None) -> Dataset:
    """A graph with masks whose nodes are classified, scored by accuracy.

    Args:
        name: What to call it.
        data: As in :class:`Dataset`.
        num_classes: By default one more than the largest label.
    """
    classes = int(data.y.max()) + 1 if num_classes is None else num_classes
    return Dataset(name, "node", data.num_features, classes, "accuracy", accuracy, data)


def of_graphs(name: str, splits: dict[str, list[Data]], metric: Metric, evaluate: Evaluate) -> Dataset:
    """Graphs of which one number, or a yes or no, is predicted."""
    first = splits["train"][0]
    width, edge_dim = first.x.size(1), None if first.edge_attr is None else first.edge_attr.size(1)
    return Dataset(name, "graph", width, 1, metric, evaluate, splits=splits, edge_dim=edge_dim)


def split_per_class(y: Tensor, num_train: int = 20, num_val: int = 30, seed: int = 0) -> dict[str, Tensor]:
    """Masks ``train_mask``, ``val_mask`` and ``test_mask`` of a random split, as of Shchur et al.

    Of each class ``num_train`` nodes are for training and ``num_val`` others for validation; all that are
    left are for testing. Source: Pitfalls of Graph Neural Network Evaluation (arXiv:1811.05868), section 3;
    there 100 splits are drawn, here that of ``seed``.
    """
    order = torch.randperm(y.numel(), generator=torch.Generator().manual_seed(seed))
    part = torch.full_like(y, 2)
    for label in y.unique():
        nodes = order[y[order] == label]
        part[nodes[: num_train + num_val]] = 1
        part[nodes[:num_train]] = 0
    return {f"{name}_mask": part == k for k, name in enumerate(("train", "val", "test"))}


def pyg_nodes(read: Callable[[str], Any], name: str, folder: Path) -> Dataset:
    """A graph of PyG, which ``read`` takes from its folder."""
    data = read(str(folder))[0]
    if "train_mask" not in data:
        data.update(split_per_class(data.y))
    return of_nodes(name, data)


def reddit_standin(scale: float, name: str, folder: Path) -> Dataset:
    """The graph of :mod:`graphfuse.train.standin`."""
    return of_nodes(name, standin.load(folder, scale), standin.NUM_CLASSES)


def zinc(name: str, folder: Path) -> Dataset:
    """ZINC's subset of 12,000 molecules, whose constrained solubility is predicted."""
    splits = {}
    for part in ("train", "val", "test"):
        graphs = ZINC(str(folder), subset=True, split=part)
        found = graphs._data  # of all molecules at once
        found.x = one_hot(found.x, _ZINC_ATOMS)
        found.edge_attr = one_hot(found.edge_attr.view(-1, 1), _ZINC_BONDS)
        splits[part] = list(graphs)
    return of_graphs(name, splits, "mae", mean_absolute_error)


def molhiv_random(name: str, folder: Path) -> Dataset:
    """The molecules of a file ``molhiv.npz``, split at random: four fifths, a tenth and a tenth.

    The file has ``x`` and ``edge_attr`` (OGB's integers), ``edge_index`` (numbered in each molecule),
    ``node_ptr`` and ``edge_ptr`` (where each molecule starts, and the end) and ``y``.
    """
    with np.load(folder / "molhiv.npz") as file:  # runs no code: it refuses pickles
        keys = ("x", "edge_attr", "edge_index", "node_ptr", "edge_ptr", "y")
        found = {key: torch.from_numpy(file[key]) for key in keys}
    num_nodes, num_edges = (torch.diff(found[key]).tolist() for key in ("node_ptr", "edge_ptr"))
    columns = zip(
        one_hot(found["x"], _ATOMS).split(num_nodes),
        found["edge_index"].long().split(num_edges, dim=1),
        one_hot(found["edge_attr"], _BONDS).split(num_edges),
        found["y"].float().view(-1, 1).split(1),
        strict=True,
    )
    graphs = [Data(x, edge_index, edge_attr, y) for x, edge_index, edge_attr, y in columns]
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0)).tolist()
    cut = len(graphs) * 8 // 10, len(graphs) * 9 // 10
    parts = {"train": order[: cut[0]], "val": order[cut[0] : cut[1]], "test": order[cut[1] :]}
    splits = {part: [graphs[k] for k in chosen] for part, chosen in parts.items()}
    return of_graphs(name, splits, "rocauc", roc_auc)


def one_hot(columns: Tensor, sizes: Sequence[int]) -> Tensor:
    """``float32[rows, sum(sizes)]`` of integers ``[rows, len(sizes)]``; column c has ``sizes[c]`` values.

    A linear layer on it adds up an embedding of each column, as OGB's ``AtomEncoder`` does.
    """
    size = torch.tensor(sizes)
    if bool(((columns < 0) | (columns >= size)).any()):
        raise ValueError(
            f"`columns` must be at least 0 and below {list(sizes)} (got {columns.amax(0).tolist()})"
        )
    ones = torch.zeros(columns.size(0), sum(sizes))
    return ones.scatter_(1, columns.long() + (size.cumsum(0) - size), 1.0)


def ogb_nodes(name: str, folder: Path) -> Dataset:
    """A graph of OGB, symmetric as in OGB's examples, scored by OGB."""
    from ogb.nodeproppred import Evaluator, PygNodePropPredDataset

    graphs, split = _read_ogb(PygNodePropPredDataset, name, folder)
    edge_index = graphs[0].edge_index
    if graphs.meta_info["add_inverse_edge"] != "True":  # else OGB has done so
        edge_index = to_undirected(edge_index)
    data = Data(x=graphs[0].x, edge_index=edge_index, y=graphs[0].y.view(-1))
    for part, nodes in split.items():
        data[f"{part}_mask"] = index_to_mask(nodes, data.num_nodes)
    evaluator = Evaluator(name)

    def evaluate(logits: Tensor, y: Tensor) -> float:
        given = {"y_true": y.view(-1, 1), "y_pred": logits.argmax(1, keepdim=True)}
        return float(evaluator.eval(given)["acc"])

    return Dataset(name, "node", data.num_features, graphs.num_classes, "accuracy", evaluate, data)


def ogb_graphs(name: str, folder: Path) -> Dataset:
    """Molecules of OGB, scored by OGB."""
    from ogb.graphproppred import Evaluator, PygGraphPropPredDataset

    graphs, split = _read_ogb(PygGraphPropPredDataset, name, folder)
    found = graphs._data  # of all molecules at once
    found.x, found.edge_attr = one_hot(found.x, _ATOMS), one_hot(found.edge_attr, _BONDS)
    found.y = found.y.float()
    splits = {part: list(graphs[chosen]) for part, chosen in split.items()}
    evaluator = Evaluator(name)

    def evaluate(logits: Tensor, y: Tensor) -> float:
        given = {"y_true": y.view(-1, 1), "y_pred": logits.view(-1, 1)}
        return float(evaluator.eval(given)["rocauc"])

    return of_graphs(name, splits, "rocauc", evaluate)


def _read_ogb(kind: Any, name: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A data set of OGB, and which of it is in which part."""
    known = torch.serialization.get_safe_globals()  # what PyG registered, which must stay so afterwards
    needed = [each for each in (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage) if each not in known]
    try:
        # ogb 1.3.6 asks torch.load for whole objects, and torch.load refuses all but these (ogb issue 497)
        with torch.serialization.safe_globals(needed):
            found = kind(name, str(folder))
            split = found.get_idx_split()
    except BaseException:
        for left in ("raw", "processed", "."):  # empty folders of a failed download, which OGB takes for data
            with suppress(OSError):
                (folder / name.replace("-", "_") / left).rmdir()
        raise
    chosen = {"val" if part == "valid" else part: torch.as_tensor(rows) for part, rows in split.items()}
    return found, chosen
