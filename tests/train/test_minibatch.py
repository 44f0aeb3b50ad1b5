"""Steps that see a part of the graph: sampled neighbourhoods, random parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch_geometric.data import Data

from graphfuse.train import loop, tasks
from graphfuse.train.config import TrainConfig
from tests.train._runs import molecules, nodes, settings

CPU = torch.device("cpu")
NEIGHBOR = {"loader": "neighbor", "batch_size": 4, "num_neighbors": [3, 2]}
RANDOM = {"loader": "random_node", "batch_size": 12}


def task(run: TrainConfig) -> tasks.NodeTask:
    found = tasks.of(run, nodes(), CPU)
    assert isinstance(found, tasks.NodeTask)
    return found


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)


def seeds(task: tasks.NodeTask) -> list[int]:
    """The nodes that an epoch trains on, found by their features, which differ."""
    graph = task.graph
    graph.x = torch.rand_like(graph.x)
    task.host.x = graph.x.cpu()
    found = []
    for batch in task.batches():
        trained = batch.x[batch.target != tasks.IGNORED]
        places = (trained[:, None] == graph.x).all(2).nonzero()[:, 1]
        assert torch.equal(batch.target[batch.target != tasks.IGNORED], graph.y[places])
        found += places.tolist()
    return found


@pytest.mark.parametrize("given", [NEIGHBOR, RANDOM], ids=["neighbor", "random_node"])
def test_an_epoch_trains_on_each_node_once(given: dict[str, Any], no_libraries: None) -> None:
    found = task(settings(**given))
    orders = [seeds(found) for _ in range(3)]
    wanted = found.graph.train_mask.nonzero().view(-1).tolist()
    assert all(sorted(order) == wanted for order in orders)
    assert orders[0] != orders[1] != orders[2]  # shuffled
    torch.manual_seed(5)
    first = [batch.x for batch in found.batches()]
    torch.manual_seed(5)
    again = [batch.x for batch in found.batches()]
    assert all(map(torch.equal, first, again))


def test_neighbourhoods_have_the_seeds_first(no_libraries: None) -> None:
    for batch in task(settings(**NEIGHBOR)).batches():
        assert (batch.target[: batch.batch_size] != tasks.IGNORED).all()
        assert (batch.target[batch.batch_size :] == tasks.IGNORED).all()
        assert batch.num_nodes > batch.batch_size


def test_parts_are_cut_on_the_cpu_for_any_device() -> None:
    dataset = nodes()
    found = tasks.NodeTask(settings(**RANDOM), dataset, torch.device("meta"))
    assert found.graph.x.is_meta and found.train_nodes.is_meta and not dataset.data.x.is_meta
    batches = list(found.batches())
    assert all(batch.x.is_meta and batch.edge_index.is_meta for batch in batches)
    assert sum(batch.num_nodes for batch in batches) == 30 and sum(batch.count for batch in batches) == 10


def test_pygs_sampler_is_taken_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Loader:
        def __init__(self, data: Data, *arguments: Any, **options: Any) -> None:
            given.append((arguments, options))
            self.data = data

        def __iter__(self) -> Iterator[Data]:
            self.data.batch_size = 4
            yield self.data

    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    monkeypatch.setattr(tasks, "NeighborLoader", Loader)
    found = task(settings(**NEIGHBOR))
    assert len(list(found.batches())) == 1
    ((count, input_nodes), options) = given[0]
    assert count == [3, 2] and torch.equal(input_nodes, found.train_nodes)
    assert options == {"batch_size": 4, "shuffle": True}


def test_a_batch_without_training_nodes_is_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    dataset = nodes()
    dataset.data.train_mask = torch.arange(30) < 2
    result = loop.train(settings(loader="random_node", batch_size=4), dataset, progress=False)
    assert all(row[0] >= 0 for row in result.curve)


@pytest.mark.parametrize(
    "given",
    [{}, {**NEIGHBOR, "batch_size": 3}, {**RANDOM, "batch_size": 4}],
    ids=["full", "neighbor", "random"],
)
def test_the_loss_of_an_epoch_is_the_mean_over_training_nodes(
    given: dict[str, Any], no_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    dataset = nodes()
    dataset.data.edge_index = torch.empty(2, 0, dtype=torch.int64)  # batches cut no edges
    dataset.data.train_mask = torch.arange(30) < 5
    whole, parts = (settings(lr=0.0, dropout=0.0, input_dropout=0.0, **one) for one in ({}, given))
    wanted = loop.train(whole, dataset, progress=False).curve[0][0]
    assert loop.train(parts, dataset, progress=False).curve[0][0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("given", [NEIGHBOR, RANDOM], ids=["neighbor", "random_node"])
def test_batches_train_as_pygs(
    given: dict[str, Any], no_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.warmup", lambda *_: None)  # the interpreter is slow
    run = settings(**given, epochs=1, num_layers=1, weight_decay=[0.0])
    ours, theirs = (
        loop.train(dataclasses.replace(run, layers=layers), nodes(18), False)
        for layers in ("graphfuse", "pyg")
    )
    assert ours.curve[0][0] == pytest.approx(theirs.curve[0][0], rel=1e-4)
    assert ours.test_accuracy == pytest.approx(theirs.test_accuracy, abs=20)  # of six nodes


@pytest.mark.parametrize("given", [NEIGHBOR, RANDOM], ids=["neighbor", "random_node"])
def test_batches_learn(given: dict[str, Any], no_libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    result = loop.train(settings(**given, epochs=25, lr=0.05, dropout=0.0), nodes(60), progress=False)
    assert result.curve[-1][0] < 0.9 * result.curve[0][0]


def test_loaders_that_do_not_fit() -> None:
    with pytest.raises(
        ValueError, match=r"`loader` must be full, neighbor or random_node as small is one graph"
    ):
        loop.train(settings(loader="graphs", batch_size=2), nodes(), progress=False)
    with pytest.raises(ValueError, match=r"`loader` must be graphs as molecules is many graphs \(got full\)"):
        loop.train(settings(), molecules(), progress=False)
    with pytest.raises(ValueError, match=r"`edge_features` must be false as small has none \(got true\)"):
        loop.train(settings("gat", edge_features=True), nodes(), progress=False)
