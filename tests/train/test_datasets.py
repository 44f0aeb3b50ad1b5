"""Data sets by name: what they hold, how they are scored, and what is said when they cannot be had."""

from __future__ import annotations

import builtins
import pickle
import sys
import urllib.error
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.utils import is_undirected

from graphfuse.train import datasets, metrics, sources, standin
from graphfuse.train.datasets import DatasetError
from tests.train import _stand_ins

DOCS = Path(__file__).parents[2] / "docs"


def offline(*_: Any, **__: Any) -> None:
    raise urllib.error.URLError("no network")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_geometric.datasets.planetoid.fs.cp", offline)
    for module in ("amazon", "coauthor", "github", "reddit", "zinc"):
        monkeypatch.setattr(f"torch_geometric.datasets.{module}.download_url", offline)


def test_generated_data_is_the_same_everywhere_and_learnable() -> None:
    dataset = datasets.load("quickstart")
    data, again = dataset.data, datasets.load("quickstart").data
    assert torch.equal(data.edge_index, again.edge_index) and torch.equal(data.x, again.x)
    assert data.num_nodes == 2708 and data.x.size(1) == 1433 and int(data.y.max()) == 6
    assert int(data.edge_index.sum()) == 28694782  # of torch's CPU generator, seed 0
    assert [int(data[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [140, 500, 1000]
    assert not (data.train_mask & (data.val_mask | data.test_mask)).any()
    normalized = datasets.load("quickstart", normalize_features=True).data
    torch.testing.assert_close(normalized.x.sum(1), torch.ones(2708))
    assert (dataset.task, dataset.num_features, dataset.num_classes, dataset.edge_dim) == (
        "node",
        1433,
        7,
        None,
    )
    assert dataset.metric == "accuracy" and dataset.higher_is_better


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHFUSE_DATA", str(tmp_path / "a"))
    assert datasets.data_root() == tmp_path / "a"
    assert datasets.data_root(str(tmp_path / "b")) == tmp_path / "b"
    monkeypatch.delenv("GRAPHFUSE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.data_root() == tmp_path / "graphfuse" / "data"


def test_every_data_set_is_documented() -> None:
    page = (DOCS / "datasets.md").read_text()
    assert [name for name in datasets.NAMES if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "cora",
            r"not in .*planetoid,.* put Cora/raw/ind\.cora\.\* .* there, or name another .*GRAPHFUSE_DATA$",
        ),
        ("coauthor-physics", r"coauthor,.* put Physics/raw/ms_academic_phy\.npz there"),
        ("amazon-photo", r"amazon,.* put Photo/raw/amazon_electronics_photo\.npz there"),
        ("github", r"musae-github,.* put raw/github\.npz there"),
        ("reddit", r"raw/reddit_data\.npz and raw/reddit_graph\.npz there, .*dataset=reddit-standin$"),
        ("zinc", r"zinc,.* put raw/\{train,val,test\}\.\{pickle,index\} there"),
        ("molhiv-random", r"batched,.* put molhiv\.npz there"),
    ],
)
def test_a_failed_download_says_what_to_put_where(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=said):
        datasets.load(name, str(tmp_path))
    with pytest.raises(DatasetError, match=said):  # nor does what the failure left pass for data
        datasets.load(name, str(tmp_path))


def test_reddit_is_never_replaced_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "load", lambda *_: pytest.fail("the stand-in"))

    def a_page_instead(url: str, folder: str) -> str:
        path = Path(folder) / "reddit.zip"
        path.write_text("<html>gone</html>")
        return str(path)

    monkeypatch.setattr("torch_geometric.datasets.reddit.download_url", a_page_instead)
    with pytest.raises(DatasetError, match=r"BadZipFile: .*dataset=reddit-standin$") as error:
        datasets.load("reddit", str(tmp_path))
    assert isinstance(error.value.__cause__, zipfile.BadZipFile)


def test_unknown_names_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match="unknown data set 'nope'; there are quickstart, cora"):
        datasets.load("nope")
    found = builtins.__import__

    def without_ogb(name: str, *given: Any, **named: Any) -> ModuleType:
        if name.split(".")[0] == "ogb":
            raise ModuleNotFoundError("No module named 'ogb'", name="ogb")
        return found(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without_ogb)
    for name in ("ogbn-arxiv", "ogbn-products", "ogbg-molhiv"):
        with pytest.raises(DatasetError, match=rf"'{name}' needs ogb: pip install graphfuse\[train\]"):
            datasets.load(name, str(tmp_path))


def test_reddit_from_a_local_copy(tmp_path: Path) -> None:
    _stand_ins.reddit(tmp_path)
    dataset = datasets.load("reddit", str(tmp_path))
    assert (dataset.num_features, dataset.num_classes) == (6, 3)
    assert [int(dataset.data[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [12, 12, 6]


def test_the_small_stand_in_by_name(tmp_path: Path) -> None:
    dataset = datasets.load("reddit-standin-small", str(tmp_path))
    assert (dataset.data.num_nodes, dataset.num_features, dataset.num_classes) == (2330, 602, 41)
    assert [path.name for path in (tmp_path / "reddit-standin").iterdir()] == ["scale0.01-seed0.safetensors"]
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DatasetError, match=r"cannot write reddit-standin-small to .* name another folder"):
        datasets.load("reddit-standin-small", str(blocked))


def test_splits_by_class(tmp_path: Path) -> None:
    _stand_ins.amazon_computers(tmp_path)
    data = datasets.load("amazon-computers", str(tmp_path)).data
    assert data.num_nodes == 180
    for name, size in (("train", 20), ("val", 30), ("test", 10)):
        assert data.y[data[f"{name}_mask"]].bincount().tolist() == [size] * 3
    assert bool((data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all())
    torch.rand(5)
    again = datasets.load("amazon-computers", str(tmp_path)).data
    assert torch.equal(again.train_mask, data.train_mask)
    other = sources.split_per_class(data.y, seed=1)
    assert not torch.equal(other["train_mask"], data.train_mask)


def test_zinc_from_a_local_copy(tmp_path: Path) -> None:
    _stand_ins.zinc(tmp_path)
    dataset = datasets.load("zinc", str(tmp_path))
    assert (dataset.task, dataset.num_features, dataset.num_classes, dataset.edge_dim) == ("graph", 28, 1, 4)
    assert dataset.metric == "mae" and not dataset.higher_is_better
    assert {part: len(graphs) for part, graphs in dataset.splits.items()} == {"train": 2, "val": 2, "test": 2}
    graph = dataset.splits["val"][1]
    assert graph.x.argmax(1).tolist() == [0, 5, 27, 1] and bool((graph.x.sum(1) == 1).all())
    assert graph.edge_attr.argmax(1).tolist() == [1, 2, 3, 1, 2, 3] and graph.y.tolist() == [0.5]
    assert dataset.evaluate(torch.tensor([[1.0], [4.0]]), torch.tensor([0.5, 1.0])) == 1.75


def test_molecules_of_a_file(tmp_path: Path) -> None:
    _stand_ins.molhiv_random(tmp_path)
    dataset = datasets.load("molhiv-random", str(tmp_path))
    assert (dataset.num_features, dataset.num_classes, dataset.edge_dim) == (174, 1, 13)
    assert {part: len(graphs) for part, graphs in dataset.splits.items()} == {
        "train": 32,
        "val": 4,
        "test": 4,
    }
    check_molecules(dataset)
    again = datasets.load("molhiv-random", str(tmp_path))
    assert torch.equal(again.splits["test"][0].x, dataset.splits["test"][0].x)


def check_molecules(dataset: datasets.Dataset) -> None:
    """All molecules of :func:`tests.train._stand_ins.molecules`, each once, both ways of every bond."""
    wanted = _stand_ins.molecules()
    graphs = [graph for part in dataset.splits.values() for graph in part]
    assert sum(graph.num_nodes for graph in graphs) == len(wanted["x"])
    assert sum(int(graph.y.sum()) for graph in graphs) == 10
    for graph in graphs:
        assert graph.y.shape == (1, 1) and int(graph.edge_index.max()) == graph.num_nodes - 1
        assert is_undirected(graph.edge_index)
    rows = sorted(tuple(row.nonzero().view(-1).tolist()) for graph in graphs for row in graph.x)
    offsets = torch.tensor((0, *_stand_ins.ATOMS)).cumsum(0)[:-1]
    assert rows == sorted(map(tuple, (torch.from_numpy(wanted["x"]) + offsets).tolist()))
    batch = next(iter(DataLoader(dataset.splits["train"], batch_size=8)))
    assert batch.x.dtype == batch.edge_attr.dtype == torch.float32 and batch.y.shape == (8, 1)


def test_a_linear_layer_on_one_hot_columns_is_a_sum_of_embeddings() -> None:
    columns = torch.tensor([[3, 0], [0, 1], [2, 2]])
    tables = [torch.nn.Embedding(size, 5) for size in (4, 3)]
    wanted = tables[0](columns[:, 0]) + tables[1](columns[:, 1])
    weight = torch.cat([table.weight for table in tables])
    torch.testing.assert_close(sources.one_hot(columns, (4, 3)) @ weight, wanted)
    with pytest.raises(ValueError, match=r"`columns` must be at least 0 and below \[3, 3\] \(got \[3, 2\]\)"):
        sources.one_hot(columns, (3, 3))


def test_metrics() -> None:
    logits, y = torch.randint(4, (30, 1)).float(), torch.randint(2, (30, 1))
    ones, zeros = logits[y > 0], logits[y == 0]
    pairs = (ones[:, None] > zeros).double() + 0.5 * (ones[:, None] == zeros)
    assert metrics.roc_auc(logits, y) == pytest.approx(float(pairs.mean()))
    assert metrics.roc_auc(y.float(), y) == 1.0
    with pytest.raises(ValueError, match=r"`y` must hold both 0 and 1 \(got 5 and 0\)"):
        metrics.roc_auc(torch.rand(5, 1), torch.zeros(5, 1))
    assert metrics.accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 0.75


class Stub(InMemoryDataset):
    """Saves and reads as ogb 1.3.6 does: whole objects, and ``torch.load`` without a word."""

    graphs: ClassVar[list[Data]] = []
    meta_info: ClassVar = {"add_inverse_edge": "False"}
    num_classes = 40
    raw_file_names = "edge.csv.gz"
    processed_file_names = "geometric_data_processed.pt"

    def __init__(self, name: str, root: str) -> None:
        super().__init__(str(Path(root) / name.replace("-", "_")))
        self.data, self.slices = torch.load(self.processed_paths[0])

    def download(self) -> None:
        offline()

    def process(self) -> None:
        torch.save(self.collate(self.graphs), self.processed_paths[0])

    def get_idx_split(self) -> dict[str, Tensor]:
        size = len(self.graphs) if len(self.graphs) > 1 else self.graphs[0].num_nodes
        return dict(zip(("train", "valid", "test"), torch.arange(size).split([2, 1, size - 3]), strict=True))


class Evaluator:
    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self, given: dict[str, Tensor]) -> dict[str, float]:
        assert given["y_true"].shape == given["y_pred"].shape == (given["y_true"].numel(), 1)
        return {"acc": 0.25} if self.name.startswith("ogbn") else {"rocauc": 0.75}


@pytest.fixture
def ogb(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr(Stub, "graphs", [])
    for kind, dataset in (
        ("nodeproppred", "PygNodePropPredDataset"),
        ("graphproppred", "PygGraphPropPredDataset"),
    ):
        module = ModuleType(f"ogb.{kind}")
        vars(module).update({dataset: Stub, "Evaluator": Evaluator})
        monkeypatch.setitem(sys.modules, f"ogb.{kind}", module)
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    return Stub


def raw(root: Path, name: str) -> Path:
    folder = root / "ogb" / name.replace("-", "_")
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "edge.csv.gz").touch()
    return folder


def test_a_graph_of_ogb(ogb: type[Stub], tmp_path: Path) -> None:
    edge_index = torch.stack([torch.arange(1, 12), torch.arange(11)])
    ogb.graphs = [
        Data(torch.rand(12, 4), edge_index, y=torch.arange(12).view(-1, 1) % 3, year=torch.ones(12))
    ]
    folder = raw(tmp_path, "ogbn-arxiv")
    dataset = datasets.load("ogbn-arxiv", str(tmp_path))
    data = dataset.data
    assert (dataset.num_features, dataset.num_classes, dataset.metric) == (4, 40, "accuracy")
    assert data.y.shape == (12,) and data.num_edges == 22 and data.is_undirected() and "year" not in data
    assert [int(data[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [2, 1, 9]
    assert dataset.evaluate(torch.rand(12, 40), data.y) == 0.25
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):  # what was allowed is so no longer
        torch.load(folder / "processed" / "geometric_data_processed.pt")
    assert Data in torch.serialization.get_safe_globals()  # what PyG allows still is


def test_molecules_of_ogb(ogb: type[Stub], tmp_path: Path) -> None:
    edge_index = torch.tensor([[0, 1], [1, 0]])
    ogb.graphs = [
        Data(torch.ones(2, 9).long(), edge_index, torch.ones(2, 3).long(), torch.tensor([[k % 2]]))
        for k in range(6)
    ]
    raw(tmp_path, "ogbg-molhiv")
    dataset = datasets.load("ogbg-molhiv", str(tmp_path))
    assert (dataset.num_features, dataset.num_classes, dataset.edge_dim) == (174, 1, 13)
    assert {part: len(graphs) for part, graphs in dataset.splits.items()} == {"train": 2, "val": 1, "test": 3}
    graph = dataset.splits["test"][0]
    assert graph.x.shape == (2, 174) and graph.y.tolist() == [[1.0]] and graph.x.sum() == 18
    assert dataset.metric == "rocauc" and dataset.evaluate(torch.rand(3, 1), torch.ones(3, 1)) == 0.75


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def test_objects_in_the_files_of_ogb_are_not_run(
    ogb: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = raw(tmp_path, "ogbn-arxiv") / "processed"
    folder.mkdir()
    torch.save(Harmful(), folder / "geometric_data_processed.pt")
    for name in ("pre_transform", "pre_filter"):
        torch.save("None", folder / f"{name}.pt")
    with pytest.raises(DatasetError, match=r"UnpicklingError: Weights only load failed"):
        datasets.load("ogbn-arxiv", str(tmp_path))
    assert not Path("harm").exists()


@pytest.mark.parametrize("failure", [EOFError, SystemExit, urllib.error.URLError])
def test_failed_downloads_of_ogb_leave_nothing(
    ogb: type[Stub], failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(self: Stub) -> None:
        raise failure("why")

    monkeypatch.setattr(Stub, "download", download)
    with pytest.raises(
        DatasetError, match=r"what products\.zip of OGB holds, as ogbn_products/raw, \.\.\./split"
    ):
        datasets.load("ogbn-products", str(tmp_path))
    assert list((tmp_path / "ogb").iterdir()) == []


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")  # of pandas 3, in ogb
def test_ogb_itself(tmp_path: Path) -> None:
    pytest.importorskip("ogb", reason="needs ogb: pip install graphfuse[train]")
    _stand_ins.ogbn_arxiv(tmp_path)
    _stand_ins.ogbg_molhiv(tmp_path)
    nodes = datasets.load("ogbn-arxiv", str(tmp_path))
    assert (nodes.num_features, nodes.num_classes, nodes.data.num_edges) == (8, 40, 98)
    assert [int(nodes.data[f"{part}_mask"].sum()) for part in ("train", "val", "test")] == [20, 10, 20]
    logits = torch.rand(50, 40)
    assert nodes.evaluate(logits, nodes.data.y) == pytest.approx(metrics.accuracy(logits, nodes.data.y))
    again = datasets.load("ogbn-arxiv", str(tmp_path))  # what ogb has saved
    assert torch.equal(again.data.x, nodes.data.x)
    molecules = datasets.load("ogbg-molhiv", str(tmp_path))
    check_molecules(molecules)
    assert {part: len(graphs) for part, graphs in molecules.splits.items()} == {
        "train": 20,
        "val": 10,
        "test": 10,
    }
    scores, y = torch.rand(20, 1), torch.cat([graph.y for graph in molecules.splits["train"]])
    assert molecules.evaluate(scores, y) == pytest.approx(metrics.roc_auc(scores, y))
    from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims

    assert (
        tuple(get_atom_feature_dims()) == sources._ATOMS and tuple(get_bond_feature_dims()) == sources._BONDS
    )


@pytest.mark.data
def test_cora_as_published(data_root: Path) -> None:
    dataset = datasets.load("cora", str(data_root))
    assert (dataset.num_features, dataset.num_classes, dataset.data.num_edges) == (1433, 7, 10556)
    sizes = [int(dataset.data[f"{part}_mask"].sum()) for part in ("train", "val", "test")]
    assert sizes == [140, 500, 1000]
