"""Epochs, stacks of Graph Transformer layers, batches of molecules, and the graphs that no sweep has."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from benchmarks import bench, captured_steps, epochs, graph_transformer, graphs, molecules, run, synth, timing
from benchmarks.bench import Bench
from graphfuse import RowWindows
from graphfuse.train import datasets

pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # inductor's, on a GPU
]
ON_GPU = bench.device().type == "cuda"
NARROW = {
    "gcn": ("GCNConv", 3, None),
    "gat": ("GATConv", 2, 2),
    "agnn": ("AGNNConv", 3, None),
    "transformer": ("TransformerConv", 2, 2),
}


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    # what is checked has run; the interpreter takes seconds for each time more
    once = timing.Timing(2.0, 2.0, 2.0, 0.0, "none", (1.0, 1.0, 1.0))
    monkeypatch.setattr(bench, "time_call", lambda call, device, seconds: once)
    monkeypatch.setattr(bench, "time_rounds", lambda calls, *given: dict.fromkeys(calls, once))
    monkeypatch.setattr(graph_transformer, "time_call", lambda call, device, seconds: call() and once)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in (("_IN", 5), ("_CLASSES", 3), ("_NETS", NARROW), ("_WARM_UP", 1)):
        monkeypatch.setattr(epochs, name, value)
    monkeypatch.setitem(graphs._GENERATED, "tiny", functools.partial(synth.uniform_graph, 20, 60))
    return bench.REGISTRY["epochs"]


def epoch(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"graph": "tiny", "kind": kind, "dtype": dtype, "mode": "step"}


@pytest.mark.parametrize("kind", NARROW)
def test_epochs(kind: str, steps: Bench) -> None:
    assert len(steps.cases()) == 8 and tuple(epochs._NETS) == tuple(NARROW)
    ours, theirs, *compiled = steps.rows(epoch(kind), quick=True)
    assert (ours.status, ours.path, theirs.status, theirs.path) == ("ok", "fused", "ok", "-"), (ours, theirs)
    launched = [row.extra["launched"] for row in (ours, theirs, *compiled)]
    assert launched == (["CUDA graph", "eager", "torch.compile"] if ON_GPU else ["eager", "eager"])
    assert ours.extra["loops and weights"] == "made by the layers" and ours.extra["kind"] == kind
    assert theirs.extra["loops and weights"] == "made beforehand"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # dynamo's part of compiling alone
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("traced")
def test_a_compiled_step_is_checked_as_it_is(steps: Bench) -> None:
    problem = steps.problem(**epoch("gcn"))
    prepared = epochs.PROVIDERS["pyg compiled"](problem.inputs)
    results = prepared.results()
    assert not problem.check(results).wrong and prepared.path == "-"
    for place in range(2):
        damaged = [result.clone() for result in results]
        damaged[place].view(-1)[-1] += 0.01
        assert problem.check(damaged).wrong
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with dropout and without


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_made_beforehand_count_all_of_a_hub(dtype: torch.dtype) -> None:
    leaves = torch.arange(1, 3001)
    edge_index = torch.stack([leaves, torch.zeros_like(leaves)])
    inputs = captured_steps.Inputs(Data(edge_index=edge_index, num_nodes=3001), NARROW["gcn"], dtype, False)
    (_, target), weight = inputs.edges(prepared=True)
    assert weight.dtype is dtype and weight.numel() == 6001
    torch.testing.assert_close(weight[target == 0][0].double().item(), 3001**-0.5, rtol=0.01, atol=0)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(graph_transformer, "_DEPTH", 2)
    return bench.REGISTRY["graph_transformer"]


def inference() -> dict[str, Any]:
    return {"graph": "tiny", "head_dim": 8, "dtype": torch.float16, "mode": "fwd"}


def test_graph_transformer(stack: Bench) -> None:
    assert len(stack.cases()) == 15
    ours, theirs, *_ = stack.rows(inference(), quick=True)
    assert (ours.status, ours.path, theirs.status, theirs.path) == ("ok", "fused", "ok", "-"), (ours, theirs)
    assert (ours.heads, ours.head_dim, ours.extra["layers"]) == (1, 8, 2)
    assert (ours.extra["attention_ms"], ours.extra["attention / whole"]) == (2.0, 1.0)


def test_a_stack_on_a_batch_of_molecules(stack: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_transformer, "_MOLECULES", 3)
    ours, *_ = stack.rows(inference() | {"graph": graph_transformer._BATCH}, quick=True)
    assert (ours.status, ours.path, ours.extra["stand_in"]) == ("ok", "fused", True), ours
    assert 20 < ours.num_nodes < 150


def test_every_layer_of_a_stack_is_checked(stack: Bench) -> None:
    problem = stack.problem(**inference())
    results = stack.providers["pyg"](problem.inputs).results()
    assert len(results) == 2 and not problem.check(results).wrong
    for layer in range(2):
        for row in (0, -1):
            damaged = [result.clone() for result in results]
            damaged[layer][row, 3] += 0.1
            assert problem.check(damaged).wrong
    assert problem.check(results[::-1]).wrong
    with pytest.raises(ValueError, match="shorter"):
        problem.check(results[:1])


@pytest.mark.usefixtures("traced")
def test_equal_layers_are_compiled_once(stack: Bench) -> None:
    problem = stack.problem(**inference())
    results = graph_transformer.PROVIDERS["pyg compiled"](problem.inputs).results()
    assert len(results) == 2 and not problem.check(results).wrong
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_molecules_are_of_the_sizes_of_molhiv() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        atoms, bonds = molecules.molecule(rng)
        assert len({frozenset(bond) for bond in bonds}) == len(bonds) and all(u != v for u, v in bonds)
        assert len(bonds) - atoms + 1 in molecules._RINGS
        joined = list(range(atoms))  # the least atom that each is joined to
        for _ in range(atoms):
            for u, v in bonds:
                joined[u] = joined[v] = min(joined[u], joined[v])
        assert set(joined) == {0}
    edge_index, num_nodes = molecules.batch(1024)
    assert (num_nodes / 1024, edge_index.size(1) / 2048) == pytest.approx((25, 27), abs=1)
    assert torch.equal(edge_index[:, ::2], edge_index[:, 1::2].flip(0)) and edge_index.max() == num_nodes - 1
    assert torch.bincount(edge_index[0]).max() <= 4
    assert hashlib.sha256(edge_index.numpy().tobytes()).hexdigest()[:16] == "6f01958cbcf18d89"


@pytest.fixture
def small_batch(monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in (("_IN", 5), ("_HEADS", 2), ("_HEAD_DIM", 3)):
        monkeypatch.setattr(molecules, name, value)
    return bench.REGISTRY["molecules"]


def one_molecule(windows: str) -> dict[str, Any]:
    return {"molecules": 1, "windows": windows, "dtype": torch.float32, "mode": "fwd+bwd"}


@pytest.mark.parametrize("windows", ["built", "given", "captured"])
def test_windows_of_molecules_are_built_within_the_call_or_given(
    windows: str, small_batch: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, built = RowWindows.from_edge_index, []
    monkeypatch.setattr(RowWindows, "from_edge_index", lambda *given: built.append(1) or build(*given))
    ours, theirs = small_batch.rows(one_molecule(windows), quick=True)
    assert (ours.status, ours.path, theirs.status, theirs.path) == ("ok", "fused", "ok", "-"), (ours, theirs)
    assert (ours.graph, ours.extra["kind"], ours.extra["stand_in"]) == (
        "1 molecules",
        f"windows {windows}",
        True,
    )
    assert len(built) == (2 if windows == "built" else 1)  # checked and called


def test_wrong_results_on_molecules_are_found(small_batch: Bench) -> None:
    problem = small_batch.problem(**one_molecule("built"))
    results = small_batch.providers["pyg"](problem.inputs).results()
    assert not problem.check(results).wrong
    for place in range(3):
        damaged = [result.clone() for result in results]
        damaged[place].view(-1)[0] += 0.01
        assert problem.check(damaged).wrong


@pytest.mark.parametrize(("name", "dataset"), [("computers", "amazon-computers"), ("cs", "coauthor-cs")])
def test_data_sets_by_their_short_names(name: str, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = datasets.planted_partition(num_nodes=32, num_classes=2, num_words=24)
    asked = []
    monkeypatch.setattr(
        graphs.datasets, "load", lambda name: asked.append(name) or datasets.of_nodes(name, small.clone())
    )
    graph = graphs.load(name, bench.device())
    assert asked == [dataset] and dataset in datasets.NAMES
    assert (graph.name, graph.num_nodes, graph.num_edges) == (name, 32, small.num_edges)
    assert graph.facts(torch.float32)["extra"] == {}


@pytest.mark.parametrize(
    ("name", "scale", "digest"),
    [
        ("blog", 0.02, "5eb5a269ef5d1cbd"),
        ("ogbn-arxiv", 0.01, "dfaccd3b86c14c34"),
        ("igb-small", 0.001, "614b1a2cfaed3c0a"),
        ("yelp", 0.002, "de3e2a08511f7cca"),
        ("amazonproducts", 0.002, "069c4517338afb49"),
        ("rmat", 0.02, "87365ae81ee26d9c"),
    ],
)
def test_stand_ins_are_always_the_same(name: str, scale: float, digest: str) -> None:
    assert name in graphs.STAND_INS and name in graphs.NAMES
    if name == "rmat":
        made = synth.rmat_graph(*(round(size * scale) for size in graphs._GENERATED[name].args))
    else:
        assert graphs._GENERATED[name].args == (name,)
        made = synth.community_graph(name, scale=scale)
    indptr, indices = made
    assert hashlib.sha256(indptr.tobytes() + indices.tobytes()).hexdigest()[:16] == digest
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    key = row * len(indptr) + indices
    assert (np.diff(key) > 0).all() and (row != indices).all()
    assert np.array_equal(np.sort(indices * len(indptr) + row), key)


def test_what_is_in_no_sweep_is_not_generated_unasked() -> None:
    swept = {case.get("graph") for made in run.REGISTRY.values() for case in made.cases()}
    assert swept & set(graphs._GENERATED) == set(graphs._IN_SWEEPS) - {"tiny"}
