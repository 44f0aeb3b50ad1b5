"""Data sets by name: from a folder of the user's, or PyG's download, or generated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Coauthor, GitHub, Planetoid

GENERATED = "quickstart"


class DatasetError(Exception):
    """A data set is unknown, or neither on disk nor to be had."""


# Name -> family (the folder under the data root) and loader.
_DATASETS: dict[str, tuple[str, Callable[[str], Data]]] = {
    "cora": ("planetoid", lambda root: Planetoid(root, "Cora")[0]),
    "citeseer": ("planetoid", lambda root: Planetoid(root, "CiteSeer")[0]),
    "pubmed": ("planetoid", lambda root: Planetoid(root, "PubMed")[0]),
    "computers": ("amazon", lambda root: Amazon(root, "Computers")[0]),
    "photo": ("amazon", lambda root: Amazon(root, "Photo")[0]),
    "cs": ("coauthor", lambda root: Coauthor(root, "CS")[0]),
    "physics": ("coauthor", lambda root: Coauthor(root, "Physics")[0]),
    "github": ("musae-github", lambda root: GitHub(root)[0]),
}

NAMES = (GENERATED, *_DATASETS)


def data_root(given: str | None = None) -> Path:
    """The folder of data sets: ``given``, else ``GRAPHFUSE_DATA``, else a cache folder."""
    named = given or os.environ.get("GRAPHFUSE_DATA")
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "graphfuse" / "data"


def load(name: str, root: str | None = None, normalize_features: bool = False) -> Data:
    """One graph with ``x``, ``edge_index``, ``y`` and ``train_mask``, ``val_mask``, ``test_mask``.

    Graphs without a published split get a fixed random one: 20 training nodes a class, 500 for validation,
    all others for testing.

    Raises:
        DatasetError: the name is unknown, or the data is not in the folder and cannot be downloaded.
    """
    if name not in NAMES:
        raise DatasetError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")
    if name == GENERATED:
        data = planted_partition()
    else:
        family, loader = _DATASETS[name]
        folder = data_root(root) / family
        try:
            data = loader(str(folder))
        except (OSError, RuntimeError) as error:
            raise DatasetError(
                f"data set {name!r} is not in {folder} and could not be downloaded there ({error}); put its "
                "raw files there, or name another folder with --data-root or GRAPHFUSE_DATA"
            ) from error
    if "train_mask" not in data:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        split = T.RandomNodeSplit("test_rest", num_splits=1, num_train_per_class=20, num_val=500)
        data = split(data)
        torch.set_rng_state(state)
    return T.NormalizeFeatures()(data) if normalize_features else data


def planted_partition(
    num_nodes: int = 2708, num_classes: int = 7, num_words: int = 1433, degree: float = 3.9, seed: int = 0
) -> Data:
    """A generated graph of Cora's size whose labels can be learnt, the same on every machine.

    Classes are drawn at random. A node's edges go to its own class with probability 0.8. Its features are
    binary words: 18 on average, a tenth of them from the 40 words of its class, the others from all words.

    Args:
        num_nodes: Nodes.
        num_classes: Classes.
        num_words: Width of the features.
        degree: Mean degree, both directions of an edge counted at one end each.
        seed: Of the generator.
    """
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=rng)
    num_edges = int(num_nodes * degree / 2)
    src = torch.randint(num_nodes, (num_edges,), generator=rng)
    # a partner of the same class: any node of a shuffled class list; else anybody
    order = torch.argsort(y, stable=True)
    count = torch.bincount(y, minlength=num_classes)
    first = count.cumsum(0) - count
    offset = (torch.rand(num_edges, generator=rng) * count[y[src]]).long()
    same = order[first[y[src]] + offset]
    anybody = torch.randint(num_nodes, (num_edges,), generator=rng)
    dst = torch.where(torch.rand(num_edges, generator=rng) < 0.8, same, anybody)
    kept = src != dst
    edges = torch.stack([src[kept], dst[kept]])
    edge_index = torch.unique(torch.cat([edges, edges.flip(0)], 1), dim=1)

    word_of_class = torch.randint(num_words, (num_classes, 40), generator=rng)
    words = torch.randint(num_words, (num_nodes, 18), generator=rng)
    own = word_of_class[y].gather(1, torch.randint(40, (num_nodes, 18), generator=rng))
    words = torch.where(torch.rand(num_nodes, 18, generator=rng) < 0.1, own, words)
    x = torch.zeros(num_nodes, num_words).scatter_(1, words, 1.0)

    data = Data(x=x, edge_index=edge_index, y=y)
    shuffled = torch.randperm(num_nodes, generator=rng)
    train = torch.cat([shuffled[y[shuffled] == c][:20] for c in range(num_classes)])
    rest = shuffled[~torch.isin(shuffled, train)]
    for name, nodes in (("train", train), ("val", rest[:500]), ("test", rest[500:1500])):
        data[f"{name}_mask"] = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
    return data
