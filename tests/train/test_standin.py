"""The stand-in for Reddit: what it imitates, what is planted, and that it stays the same."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from graphfuse.train import communities, standin
from graphfuse.train.communities import PRESETS

SCALE = 0.01


@pytest.fixture(scope="module")
def parts() -> dict[str, Tensor]:
    return standin.generate(SCALE)


@pytest.fixture(scope="module")
def data(parts: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Data:
    return standin.load(tmp_path_factory.mktemp("standin"), SCALE)


def test_it_is_the_same_everywhere(parts: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    known = standin._KNOWN[SCALE, 0]
    assert standin.fingerprint(parts) == known  # on whatever machine this runs
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    torch.rand(3)  # nor does it depend on PyTorch's random numbers
    assert standin.fingerprint(standin.generate(SCALE)) == known
    parts["x"][7, 5] += 1
    assert standin.fingerprint(parts) != known
    parts["x"][7, 5] -= 1
    assert standin.fingerprint(standin.generate(SCALE, seed=1)) != known


def test_another_result_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(standin._KNOWN, (0.002, 0), "0123456789abcdef")
    with pytest.warns(UserWarning, match=r"fingerprint .* here and 0123456789abcdef elsewhere"):
        standin.generate(0.002)


def test_the_graph_is_simple_symmetric_and_heavy_tailed(data: Data) -> None:
    num_nodes = round(PRESETS["reddit"].nodes * SCALE)
    source, target = data.edge_index
    assert data.num_nodes == num_nodes and data.edge_index.dtype == torch.int64
    assert data.num_edges == round(PRESETS["reddit"].edges * SCALE**1.5) // 2 * 2
    key = source * num_nodes + target
    assert bool((key.diff() > 0).all()) and not data.has_self_loops()
    assert torch.equal((target * num_nodes + source).sort()[0], key)
    degree = torch.bincount(source, minlength=num_nodes).double()
    assert degree.min() >= 1
    assert degree.max() > 8 * degree.mean() and degree.median() < 0.6 * degree.mean()


@pytest.mark.gpu  # seconds of 256 windows of 232,965 columns
def test_full_size_has_the_edges_of_the_benchmarks() -> None:
    preset = PRESETS["reddit"]
    tag = [0, zlib.crc32(b"reddit"), preset.nodes, preset.edges // 2]  # as community_graph seeds it
    solved = communities._rates(preset, preset.nodes, preset.edges // 2, np.random.default_rng(tag), None)
    given = communities._rates(
        preset, preset.nodes, preset.edges // 2, np.random.default_rng(tag), standin._SHARE
    )
    assert np.array_equal(solved.inner, given.inner) and np.array_equal(solved.outer, given.outer)


def test_labels_features_and_split_are_planted(parts: dict[str, Tensor], data: Data) -> None:
    latent = parts["latent"].long()
    assert data.x.shape == (data.num_nodes, 602) and data.x.dtype == torch.float32
    assert data.y.dtype == torch.int64 and int(data.y.min()) >= 0 and int(data.y.max()) <= 40
    sizes = [int(data[f"{name}_mask"].sum()) for name in ("train", "val", "test")]
    assert sizes == [1535, 238, 557]  # 153,431, 23,831 and 55,703 hundredths
    assert bool((data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all())
    changed = (data.y != latent).double()
    assert changed.mean() == pytest.approx(standin.NOISE, abs=0.015)  # 3 standard deviations
    assert changed[data.test_mask].mean() == pytest.approx(standin.NOISE, abs=0.03)
    same = (latent[data.edge_index[0]] == latent[data.edge_index[1]]).double().mean()
    assert same > 10 / 41  # of random pairs 1/41 would be
    noise = data.x - parts["mean"][latent]
    assert noise.mean().abs() < 0.005 and noise.std() == pytest.approx(1.0, abs=0.005)
    torch.testing.assert_close(parts["mean"].norm(dim=1), torch.full((41,), standin.SIGNAL))


def test_features_alone_give_what_is_stated(parts: dict[str, Tensor], data: Data) -> None:
    # with the means known, the nearest one is the best guess that there is
    mean = parts["mean"]
    guess = (data.x @ mean.T - mean.square().sum(1) / 2).argmax(1)
    assert (guess == data.y).double().mean() == pytest.approx(0.56, abs=0.03)


def accuracy_of_linear(x: Tensor, data: Data) -> float:
    """Test accuracy of a linear model on standardised ``x``."""
    x = (x - x.mean(0)) / x.std(0)
    linear = torch.nn.Linear(x.size(1), standin.NUM_CLASSES)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(linear(x[data.train_mask]), data.y[data.train_mask]).backward()
        optimizer.step()
    return float((linear(x[data.test_mask]).argmax(1) == data.y[data.test_mask]).double().mean())


@torch.no_grad()
def averaged(data: Data, edge_index: Tensor) -> Tensor:
    """The propagation of PyG's GCNConv, without weights."""
    conv = GCNConv(602, 602, bias=False)
    conv.lin.weight.copy_(torch.eye(602))
    return conv(data.x, edge_index)


def test_neighbours_give_the_planted_accuracy(data: Data) -> None:
    alone = accuracy_of_linear(data.x, data)
    together = accuracy_of_linear(averaged(data, data.edge_index), data)
    others = accuracy_of_linear(averaged(data, torch.randint(data.num_nodes, data.edge_index.shape)), data)
    assert alone < 0.57 and others < 0.57
    assert 0.90 < together < 1 - standin.NOISE + 0.028  # 557 nodes: 3 standard deviations of luck


def test_the_file_is_read_and_made_again_if_it_is_damaged_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    generate = standin.generate

    def counting(scale: float, seed: int) -> dict[str, Tensor]:
        made.append((scale, seed))
        return generate(scale, seed)

    monkeypatch.setattr(standin, "generate", counting)
    folder = tmp_path / "new" / "folder"
    first = standin.load(folder, 0.001)
    again = standin.load(folder, 0.001)
    assert made == [(0.001, 0)]
    assert all(torch.equal(first[key], again[key]) for key in first.keys())  # noqa: SIM118
    (file,) = folder.iterdir()  # and nothing that was left half-written
    written = file.read_bytes()
    flipped = written[:-9] + bytes([written[-9] ^ 1]) + written[-8:]
    for times, damaged in enumerate((b"", written[:1000], written[:-1], flipped), start=2):
        file.write_bytes(damaged)
        for _ in range(2):
            assert torch.equal(standin.load(folder, 0.001).x, first.x)
            assert len(made) == times
    monkeypatch.setattr(standin, "_VERSION", 0)
    standin.load(folder, 0.001)
    assert len(made) == 6
    assert not torch.equal(standin.load(folder, 0.001, seed=1).x, first.x)


@pytest.mark.parametrize("scale", [0.0, 0.0002, 1.5])
def test_scale_has_bounds(scale: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`scale` must be between 0.0003 and 1 \(got"):
        standin.load(tmp_path, scale)


def test_the_smallest_one(tmp_path: Path) -> None:
    data = standin.load(tmp_path, 0.0003)
    assert data.num_nodes == 70 and int(data.train_mask.sum()) == 46
