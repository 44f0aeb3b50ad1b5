"""The benchmarks' graphs by name: real ones from the data folder, generated ones from a cache folder.

``python -m benchmarks.graphs reddit yelp`` generates ahead of time, one process a graph.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import synth
from graphfuse import RowWindows
from graphfuse.train import datasets

_PYG = {  # names here and in graphfuse.train.datasets
    "cora": "cora",
    "pubmed": "pubmed",
    "github": "github",
    "computers": "amazon-computers",
    "cs": "coauthor-cs",
}
_CSR = ("ego-twitter", "dblp-2010", "blogcatalog3")
_GENERATED: dict[str, Callable[[], tuple[synth.Array, synth.Array]]] = {
    "reddit": functools.partial(synth.community_graph, "reddit"),
    "reddit-4m": functools.partial(synth.community_graph, "reddit", scale=0.04),  # 4 % of nodes and edges
    "products": functools.partial(synth.community_graph, "ogbn-products"),
    "uniform-1m-12m": functools.partial(synth.uniform_graph, 1_000_000, 12_099_910),
    "uniform-2.4m-124m": functools.partial(synth.uniform_graph, 2_449_029, 123_698_729),
    "tiny": functools.partial(synth.uniform_graph, 96, 400),  # for tests
}
_IN_SWEEPS = tuple(_GENERATED)
_OTHER = ("blog", "ogbn-arxiv", "igb-small", "yelp", "amazonproducts")  # in no sweep: for --graphs
_GENERATED |= {name: functools.partial(synth.community_graph, name) for name in _OTHER}
_GENERATED["rmat"] = functools.partial(synth.rmat_graph, 262_144, 8_388_608)
# size and degrees of the kind, not a data set's edges
STAND_INS = ("reddit", "reddit-4m", "products", *_OTHER, "rmat")

NAMES = (*_PYG, *_CSR, *_GENERATED)
_SHUFFLED = ":shuffled"


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph on the device that benchmarks run on."""

    name: str
    edge_index: Tensor  # int64[2, num_edges], sources over receivers, sorted by source
    num_nodes: int

    @property
    def num_edges(self) -> int:
        """Directed edges."""
        return self.edge_index.size(1)

    @functools.cached_property
    def windows(self) -> RowWindows:
        """Its row windows, built once."""
        return RowWindows.from_edge_index(self.edge_index, (self.num_nodes, self.num_nodes))

    def facts(self, dtype: torch.dtype) -> dict[str, Any]:
        """Fields of a record of a benchmark on this graph with features of ``dtype``."""
        return {
            "graph": self.name,
            "num_nodes": self.num_nodes,
            "num_edges": self.num_edges,
            "dtype": str(dtype).removeprefix("torch."),
            "extra": {"stand_in": True} if self.name.removesuffix(_SHUFFLED) in STAND_INS else {},
        }


@functools.lru_cache(maxsize=1)  # one at a time: the largest takes gigabytes
def load(name: str, device: torch.device) -> Graph:
    """The graph called ``name``, always the same edges in the same order.

    ``NAME:shuffled`` is that graph with ids dealt at random, the same ones each time.

    Raises:
        ValueError: there is no such graph.
        OSError: its file is not in the data folder (see ``GRAPHFUSE_DATA``).
        graphfuse.train.datasets.DatasetError: likewise, and it could not be downloaded.
    """
    if name.endswith(_SHUFFLED):
        published = load(name.removesuffix(_SHUFFLED), device)
        ids = torch.randperm(published.num_nodes, generator=torch.Generator().manual_seed(1)).to(device)
        moved = ids[published.edge_index]
        return Graph(name, moved[:, moved[0].argsort(stable=True)], published.num_nodes)
    if name in _PYG:
        data = datasets.load(_PYG[name]).data
        return Graph(name, data.edge_index.to(device), int(data.num_nodes))
    if name in _CSR:
        path = datasets.data_root() / "csr" / f"{name}.npz"
    elif name in _GENERATED:
        path = generate(name)
    else:
        raise ValueError(f"there is no graph called {name!r}; there are {', '.join(NAMES)}")
    with np.load(path) as arrays:
        indptr = torch.from_numpy(arrays["indptr"]).to(device, torch.int64)
        indices = torch.from_numpy(arrays["indices"]).to(device)
    num_nodes = indptr.numel() - 1
    source = torch.repeat_interleave(torch.diff(indptr), output_size=indices.numel())
    return Graph(name, torch.stack([source, indices.long()]), num_nodes)


def generate(name: str) -> Path:
    """The file of a generated graph, which is made if it is not there yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(cache).expanduser() / "graphfuse" / "graphs" / f"{name}.npz"
    if not path.exists():
        indptr, indices = _GENERATED[name]()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, indptr=indptr, indices=indices)
        partial.rename(path)  # whole or not at all, whoever else makes it now
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Generates the named graphs, or those of the sweeps, side by side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description=__doc__)
    texts = [", ".join(names) for names in (_GENERATED, _IN_SWEEPS)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {texts[0]}; default {texts[1]}")
    names = parser.parse_args(arguments).names or list(_IN_SWEEPS)
    unknown = sorted(set(names) - set(_GENERATED))
    if unknown:
        parser.error(f"not generated: {', '.join(unknown)}")
    processes = multiprocessing.get_context("spawn")  # forking is not safe with torch's threads
    with ProcessPoolExecutor(len(names), processes) as pool:
        for path in pool.map(generate, names):
            print(path)


if __name__ == "__main__":
    main()
