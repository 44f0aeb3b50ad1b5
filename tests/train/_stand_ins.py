"""Files of tiny graphs, laid out as those of the data sets that they stand in for."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import torch

ATOMS, BONDS = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)


def reddit(root: Path, num_nodes: int = 30) -> None:
    import scipy.sparse as sp

    rng, raw = np.random.default_rng(0), root / "reddit" / "raw"
    raw.mkdir(parents=True)
    feature, label = rng.random((num_nodes, 6)), np.arange(num_nodes) % 3
    node_types = np.arange(num_nodes) % 10 // 4 + 1  # 1, 2, 3: training, validation, testing
    np.savez(raw / "reddit_data.npz", feature=feature, label=label, node_types=node_types)
    sp.save_npz(raw / "reddit_graph.npz", sp.random(num_nodes, num_nodes, 0.1, "coo", rng=rng))


def amazon_computers(root: Path, num_nodes: int = 180) -> None:
    import scipy.sparse as sp

    rng, raw = np.random.default_rng(0), root / "amazon" / "Computers" / "raw"
    raw.mkdir(parents=True)
    found = {"labels": np.arange(num_nodes) % 3}
    for name, columns in (("adj", num_nodes), ("attr", 5)):
        matrix = sp.random(num_nodes, columns, 0.05, "csr", rng=rng)
        for part in ("data", "indices", "indptr", "shape"):
            found[f"{name}_{part}"] = np.asarray(getattr(matrix, part))
    np.savez(raw / "amazon_electronics_computers.npz", **found)


def zinc(root: Path, num_graphs: int = 3) -> None:
    raw = root / "zinc" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "val", "test"):
        molecules = []
        for k in range(num_graphs):
            bonds = torch.zeros(4, 4, dtype=torch.long)
            bonds[0, 1:] = bonds[1:, 0] = torch.tensor([1, 2, 3])
            energy = torch.tensor([0.5 * k])
            atoms = torch.tensor([0, 5, 27, k])
            molecules.append({"atom_type": atoms, "bond_type": bonds, "logP_SA_cycle_normalized": energy})
        with (raw / f"{part}.pickle").open("wb") as file:
            pickle.dump(molecules, file)
        (raw / f"{part}.index").write_text(",".join(map(str, range(num_graphs - 1))) + "\n")


def molecules(num_graphs: int = 40) -> dict[str, np.ndarray]:
    """Chains of 3 to 6 atoms, as OGB describes them; a fourth have the label 1."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 7, num_graphs)
    chains = [np.stack([np.arange(size - 1), np.arange(1, size)]) for size in sizes]
    edges = np.concatenate([np.concatenate([chain, chain[::-1]], 1) for chain in chains], 1)
    return {
        "x": rng.integers(0, ATOMS, (sizes.sum(), len(ATOMS))),
        "edge_index": edges,
        "edge_attr": rng.integers(0, BONDS, (edges.shape[1], len(BONDS))),
        "y": (np.arange(num_graphs) % 4 == 0).astype(np.int64),
        "node_ptr": np.concatenate([[0], sizes.cumsum()]),
        "edge_ptr": np.concatenate([[0], (2 * (sizes - 1)).cumsum()]),
    }


def molhiv_random(root: Path) -> None:
    (root / "batched").mkdir(parents=True)
    np.savez(root / "batched" / "molhiv.npz", **molecules(), source=np.array("a test"))


def ogbn_arxiv(root: Path, num_nodes: int = 50) -> None:
    rng, folder = np.random.default_rng(0), root / "ogb" / "ogbn_arxiv"
    edges = np.stack([np.arange(1, num_nodes), np.arange(num_nodes - 1)])  # i + 1 cites i
    _write(folder / "raw", "edge", edges.T)
    _write(folder / "raw", "node-feat", rng.random((num_nodes, 8)))
    _write(folder / "raw", "node-label", np.arange(num_nodes)[:, None] % 40)
    _write(folder / "raw", "node_year", np.full((num_nodes, 1), 2017))
    _write(folder / "raw", "num-node-list", np.array([[num_nodes]]))
    _write(folder / "raw", "num-edge-list", np.array([[num_nodes - 1]]))
    _split(folder, "time", num_nodes)


def ogbg_molhiv(root: Path) -> None:
    folder, found = root / "ogb" / "ogbg_molhiv", molecules()
    edge_counts = np.diff(found["edge_ptr"]) // 2
    starts = np.repeat(found["edge_ptr"][:-1], edge_counts)  # the first half: OGB adds the other direction
    rows = starts + np.concatenate([np.arange(count) for count in edge_counts])
    _write(folder / "raw", "edge", found["edge_index"][:, rows].T)
    _write(folder / "raw", "edge-feat", found["edge_attr"][rows])
    _write(folder / "raw", "node-feat", found["x"])
    _write(folder / "raw", "graph-label", found["y"][:, None])
    _write(folder / "raw", "num-node-list", np.diff(found["node_ptr"])[:, None])
    _write(folder / "raw", "num-edge-list", edge_counts[:, None])
    _split(folder, "scaffold", len(found["y"]))


def _write(folder: Path, name: str, rows: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows.tolist())


def _split(folder: Path, name: str, count: int) -> None:
    for part, rows in zip(("train", "valid", "test"), np.split(np.arange(count), [20, 30]), strict=True):
        _write(folder / "split" / name, part, rows[:, None])
    (folder / "RELEASE_v1.txt").touch()
