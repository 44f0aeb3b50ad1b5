"""Whole graphs, in batches: classes and numbers of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from torch_geometric.data import Batch

from graphfuse.train import loop, models, tasks
from tests.train._runs import batched, molecules

CPU = torch.device("cpu")


@pytest.mark.parametrize("metric", ["rocauc", "mae"])
@pytest.mark.parametrize("model", ["gcn", "gat", "transformer", "graph_transformer"])
def test_layers_train_alike(model: str, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run = batched(model, edge_features=model != "gcn", epochs=3)
    ours, theirs = (
        loop.train(dataclasses.replace(run, layers=layers), molecules(metric), False)
        for layers in ("graphfuse", "pyg")
    )
    assert [row[:3] for row in ours.curve] == [row[:3] for row in theirs.curve]
    assert ours.metric == metric and (ours.path, theirs.path) == ("generic", "pyg")
    better = min if metric == "mae" else max
    assert ours.val_accuracy == better(row[1] for row in ours.curve)


def test_fused_batches_follow_pygs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.warmup", lambda *_: None)  # the interpreter is slow
    dataset = molecules("mae", count=12)
    run = batched("transformer", edge_features=True, num_layers=1, epochs=1, batch_size=2)
    ours, theirs = (
        loop.train(dataclasses.replace(run, layers=layers), dataset, False) for layers in ("graphfuse", "pyg")
    )
    assert ours.curve[0][:3] == pytest.approx(theirs.curve[0][:3], rel=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "sum", "max"])
def test_pooling_is_pygs(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run, dataset = batched("gcn", pooling=pooling, dropout=0.0, input_dropout=0.0), molecules()
    model = models.build(run, 5, 1, graphs=True)
    batch = Batch.from_data_list(dataset.splits["train"])
    rows = model.body(batch.x, batch.edge_index)
    pool = {"mean": pyg.global_mean_pool, "sum": pyg.global_add_pool, "max": pyg.global_max_pool}[pooling]
    wanted = model.lin_out(pool(rows, batch.batch))
    torch.testing.assert_close(model(batch.x, batch.edge_index, None, batch.ptr), wanted)


def test_scores_are_of_all_graphs_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    dataset = molecules()
    task = tasks.of(batched("gcn"), dataset, CPU)
    model = models.build(batched("gcn"), 5, 1, graphs=True).eval()
    found = task.scores(model)
    for split, score in zip(("val", "test"), found.tolist(), strict=True):
        whole = Batch.from_data_list(dataset.splits[split])
        logits = model(whole.x, whole.edge_index, None, whole.ptr).detach()
        assert score == pytest.approx(100 * dataset.evaluate(logits, whole.y))


@pytest.mark.parametrize("metric", ["rocauc", "mae"])
def test_scores_of_nan_are_nan(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    result = loop.train(batched(lr=1e38, epochs=2), molecules(metric), progress=False)
    assert all(math.isnan(score) for row in result.curve for score in row[1:3])
    assert result.best_epoch == 0 and math.isnan(result.test_accuracy)


def test_the_loss_of_an_epoch_is_the_mean_over_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    given = {"lr": 0.0, "dropout": 0.0, "input_dropout": 0.0, "epochs": 1}
    whole, parts = (batched(batch_size=size, **given) for size in (7, 3))  # of 3, 3 and 1
    wanted = loop.train(whole, molecules(count=15), progress=False).curve[0][0]
    assert loop.train(parts, molecules(count=15), progress=False).curve[0][0] == pytest.approx(
        wanted, rel=1e-5
    )


def test_an_epoch_sees_each_graph_once() -> None:
    task = tasks.of(batched(), molecules(), CPU)
    epochs = [[graph.x for batch in task.batches() for graph in batch.to_data_list()] for _ in range(2)]
    sums = [sorted(float(x.sum()) for x in epoch) for epoch in epochs]
    assert sums[0] == sums[1] == sorted(float(g.x.sum()) for g in molecules().splits["train"])
    assert [x.shape for x in epochs[0]] != [x.shape for x in epochs[1]]  # shuffled


def test_random_walks_join_the_features() -> None:
    task = tasks.of(batched(random_walk=4), molecules(), CPU)
    assert task.in_channels == 9
    graph = molecules().splits["val"][0]
    wanted = T.AddRandomWalkPE(4, attr_name="walk")(graph).walk
    torch.testing.assert_close(task.splits["val"][0].x[:, 5:], wanted)
    assert task.splits["val"][0].edge_attr is None  # not asked for


def test_molecules_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    run = batched("gcn", epochs=30, lr=0.02, dropout=0.0, input_dropout=0.0)
    result = loop.train(run, molecules("mae", 20), progress=False)
    assert result.curve[-1][0] < 0.6 * result.curve[0][0]
