"""Data sets by name: from a folder of the user's, or PyG's or OGB's download, or generated."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Coauthor, GitHub, Planetoid, Reddit

from graphfuse.train import sources
from graphfuse.train.sources import Dataset as Dataset
from graphfuse.train.sources import of_nodes as of_nodes

GENERATED = "quickstart"


class DatasetError(Exception):
    """A data set is unknown, or neither on disk nor to be had."""


@dataclass(frozen=True)
class _Source:
    """Where a data set is.

    Args:
        family: Its folder under the data root.
        load: Reads it from that folder, downloads it into it or generates it there.
        files: What has to be in that folder where there is no download.
        instead: What else can be done.
    """

    family: str
    load: Callable[[str, Path], Dataset]
    files: str = ""
    instead: str = ""


def _planetoid(name: str) -> _Source:
    files = f"{name}/raw/ind.{name.lower()}.* (x, tx, allx, y, ty, ally, graph, test.index)"
    return _Source("planetoid", partial(sources.pyg_nodes, lambda root: Planetoid(root, name)), files)


def _amazon(name: str) -> _Source:
    files = f"{name}/raw/amazon_electronics_{name.lower()}.npz"
    return _Source("amazon", partial(sources.pyg_nodes, lambda root: Amazon(root, name)), files)


def _coauthor(name: str) -> _Source:
    files = f"{name}/raw/ms_academic_{name.lower()[:3]}.npz"
    return _Source("coauthor", partial(sources.pyg_nodes, lambda root: Coauthor(root, name)), files)


def _ogb(name: str, load: Callable[[str, Path], Dataset], archive: str) -> _Source:
    files = f"what {archive}.zip of OGB holds, as {name.replace('-', '_')}/raw, .../split, .../RELEASE_v1.txt"
    return _Source("ogb", load, files)


_DATASETS = {
    "cora": _planetoid("Cora"),
    "citeseer": _planetoid("CiteSeer"),
    "pubmed": _planetoid("PubMed"),
    "coauthor-cs": _coauthor("CS"),
    "coauthor-physics": _coauthor("Physics"),
    "amazon-computers": _amazon("Computers"),
    "amazon-photo": _amazon("Photo"),
    "github": _Source("musae-github", partial(sources.pyg_nodes, GitHub), "raw/github.npz"),
    "reddit": _Source(
        "reddit",
        partial(sources.pyg_nodes, Reddit),
        "raw/reddit_data.npz and raw/reddit_graph.npz",
        "; or train on a generated graph like it, with dataset=reddit-standin",
    ),
    "reddit-standin": _Source("reddit-standin", partial(sources.reddit_standin, 1.0)),
    "reddit-standin-small": _Source("reddit-standin", partial(sources.reddit_standin, 0.01)),
    "ogbn-arxiv": _ogb("ogbn-arxiv", sources.ogb_nodes, "arxiv"),
    "ogbn-products": _ogb("ogbn-products", sources.ogb_nodes, "products"),
    "ogbg-molhiv": _ogb("ogbg-molhiv", sources.ogb_graphs, "hiv"),
    "molhiv-random": _Source("batched", sources.molhiv_random, "molhiv.npz"),
    "zinc": _Source("zinc", sources.zinc, "raw/{train,val,test}.{pickle,index}"),
}

NAMES = (GENERATED, *_DATASETS)

_FAILURES = (  # OGB asks before large downloads: nobody was there (EOFError), or said no (SystemExit)
    OSError, RuntimeError, ValueError, KeyError, EOFError, SystemExit, zipfile.BadZipFile,
    pickle.UnpicklingError,
)  # fmt: skip


def data_root(given: str | None = None) -> Path:
    """The folder of data sets: ``given``, else ``GRAPHFUSE_DATA``, else a cache folder.

    Raises:
        DatasetError: it lies in a home folder, and nobody knows where that is.
    """
    named = given or os.environ.get("GRAPHFUSE_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(named) if named else Path(cache) / "graphfuse" / "data"
    try:
        return folder.expanduser()
    except RuntimeError as error:  # no such user, or one without a home, as in a container
        raise DatasetError(
            f"cannot tell where {folder} is ({error}); name a folder with --data-root or GRAPHFUSE_DATA"
        ) from error


def load(name: str, root: str | None = None, normalize_features: bool = False) -> Dataset:
    """The data set called ``name``, on the CPU.

    Graphs without a published split get a fixed random one
    (:func:`graphfuse.train.sources.split_per_class`).

    Args:
        name: Of :data:`NAMES`.
        root: See :func:`data_root`.
        normalize_features: Whether the features of each node are scaled to sum to one.

    Raises:
        DatasetError: the name is unknown; the data is not in the folder and cannot be downloaded there or
            written to it; or it needs a package that is not installed.
    """
    if name not in NAMES:
        raise DatasetError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")
    dataset = of_nodes(name, planted_partition()) if name == GENERATED else _read(name, data_root(root))
    if normalize_features:
        for data in [dataset.data] if dataset.task == "node" else chain(*dataset.splits.values()):
            data.x = T.NormalizeFeatures()(data).x
    return dataset


def _read(name: str, root: Path) -> Dataset:
    source = _DATASETS[name]
    folder = root / source.family
    elsewhere = "name another folder with --data-root or GRAPHFUSE_DATA"
    try:
        return source.load(name, folder)
    except ModuleNotFoundError as error:
        raise DatasetError(f"data set {name!r} needs {error.name}: pip install graphfuse[train]") from error
    except _FAILURES as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        if not source.files:
            raise DatasetError(f"cannot write {name} to {folder} ({said}); {elsewhere}") from error
        raise DatasetError(
            f"data set {name!r} is not in {folder}, or damaged there, and could not be downloaded ({said}); "
            f"put {source.files} there, or {elsewhere}{source.instead}"
        ) from error


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
