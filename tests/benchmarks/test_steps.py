"""Block-sparse products, steps of each layer as CUDA graphs, and host times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from benchmarks import bench, blocksparse, captured_steps, host_time, run, timing
from benchmarks.bench import Bench
from graphfuse.train import datasets

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
KINDS = ("gcn", "gat", "gatv2", "agnn", "transformer")
NARROW = {
    "gcn": ("GCNConv", 3, None),
    "gat": ("GATConv", 2, 2),
    "gatv2": ("GATv2Conv", 2, 2),
    "agnn": ("AGNNConv", 3, None),
    "transformer": ("TransformerConv", 2, 2),
}


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    # what is checked has run; the interpreter takes seconds for each time more
    once = timing.Timing(2.0, 2.0, 2.0, 0.0, "none", (1.0, 1.0, 1.0))
    monkeypatch.setattr(bench, "time_call", lambda call, device, seconds: once)
    monkeypatch.setattr(bench, "time_rounds", lambda calls, *given: dict.fromkeys(calls, once))


def blocks(kind: str, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    shape = {"rows": 32, "block": 16, "density": 0.25, "kind": kind, "width": 8}
    return shape | {"dtype": dtype, "mode": "fwd"}


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("kind", ["dsd", "sdd"])
def test_block_sparse_products_count_useful_operations(kind: str) -> None:
    made = bench.REGISTRY["blocksparse"]
    rows = list(made.rows(blocks(kind), quick=True))
    assert [row.provider for row in rows] == ["graphfuse", "torch.mm", "torch.bmm"]
    assert [row.path for row in rows] == ["fused", "-", "-"]
    for row in rows:
        assert (row.status, row.num_edges, row.head_dim) == ("ok", 16 * 16, 8)
        assert row.floor_ms is not None and row.floor_ms > 0
        assert row.extra["operations"] == 2 * 16 * 16 * 8
        assert row.extra["tflops"] == row.extra["operations"] / 2e-3 / 1e12
    assert f"blocksparse {kind}  32 x 32, blocks of 16, 25 %  8" in run.table(rows)


def test_block_sparse_cases_share_a_mask() -> None:
    cases = bench.REGISTRY["blocksparse"].cases()
    assert len(cases) == 24
    masks = [(case["block"], case["density"]) for case in cases]
    assert masks == sorted(masks) and len(set(masks)) == 6  # one after the other
    blocksparse._mask.cache_clear()
    first, second = (bench.REGISTRY["blocksparse"].problem(**blocks(kind)) for kind in ("dsd", "sdd"))
    assert first.inputs.mask is second.inputs.mask


@pytest.mark.parametrize("kind", ["dsd", "sdd"])
def test_wrong_block_sparse_products_are_found(kind: str) -> None:
    made = bench.REGISTRY["blocksparse"].problem(**blocks(kind, torch.bfloat16))
    (result,) = blocksparse._blocks(made.inputs).results()
    assert not made.check([result]).wrong
    for place in (0, -1):
        damaged = result.clone()
        damaged.view(-1)[place] += 0.1
        assert made.check([damaged]).wrong
    turned = result.view(-1, 16, 16).transpose(1, 2).flatten() if kind == "sdd" else result.flip(0)
    assert made.check([turned]).wrong


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Bench:
    data = datasets.planted_partition(num_nodes=6, num_classes=2, num_words=5)
    data.edge_index = torch.cat([data.edge_index, torch.tensor([[3], [3]])], 1)  # a self-loop
    monkeypatch.setattr(captured_steps.datasets, "load", lambda name: datasets.of_nodes(name, data.clone()))
    monkeypatch.setattr(captured_steps, "_NETS", NARROW)
    monkeypatch.setattr(bench, "_QUICK_ROUNDS", (1, 1))
    return bench.REGISTRY["captured_steps"]


def case(kind: str, captured: bool, dtype: torch.dtype = torch.float32, **more: str) -> dict[str, Any]:
    given = {"graph": "small", "kind": kind, "dtype": dtype, "captured": captured, "mode": "step"}
    return {"features": "dense", **given, **more}


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("kind", ["gcn", "gat", "agnn", "transformer"])  # gatv2 takes what gat takes
def test_eager_steps(kind: str, steps: Bench) -> None:
    ours, theirs = steps.rows(case(kind, False), quick=True)
    assert (ours.status, ours.path, theirs.status, theirs.path) == ("ok", "fused", "ok", "-")
    assert ours.extra["kind"] == kind and not ours.extra["captured"]
    assert {row.extra["loops and weights"] for row in (ours, theirs)} == {"made by the layers"}
    assert theirs.extra["time over graphfuse"]["p50"] == 1.0


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("kind", ["gcn", "gat", "transformer"])
def test_steps_on_sparse_features(kind: str, steps: Bench) -> None:
    ours, theirs = steps.rows(case(kind, False, features="sparse"), quick=True)
    assert (ours.status, ours.path, theirs.status) == ("ok", "fused", "ok"), (ours, theirs)
    assert ours.extra["features"] == "sparse"
    given = steps.problem(**case(kind, False, features="sparse")).inputs
    assert given.x.layout is torch.sparse_csr and given.x.to_dense().equal(given.data.x)


@pytest.mark.parametrize("kind", KINDS)
def test_what_pyg_needs_for_a_capture_changes_no_number(kind: str, steps: Bench) -> None:
    made = steps.problem(**case(kind, True))
    inputs = made.inputs
    net, edges = inputs.net(pyg, prepared=True), inputs.edges(prepared=True)
    found = captured_steps._results(inputs, net, inputs.x, edges)
    assert not made.check(found).wrong
    for place in range(2):
        damaged = [result.clone() for result in found]
        damaged[place].view(-1)[-1] += 0.01
        assert made.check(damaged).wrong
    if kind != "transformer":  # without the loops, or with all weights 1, it would be wrong
        plain = (edges[0][:, : inputs.data.num_edges], *(torch.ones_like(w) for w in edges[1:]))
        if kind == "gcn":
            plain = (edges[0], *plain[1:])
        assert made.check(captured_steps._results(inputs, net, inputs.x, plain)).wrong


@pytest.mark.usefixtures("untimed")
def test_a_captured_step_is_checked_by_a_replay(steps: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what stands for a capture where there is no GPU."""
    captured = []

    def replayed(step: Any) -> Any:
        captured.append(step)
        return step

    monkeypatch.setattr(captured_steps.loop, "captured", replayed)
    monkeypatch.setattr(torch.optim, "Adam", lambda parameters, **options: torch.optim.SGD(parameters))
    ours, theirs = steps.rows(case("gcn", True), quick=True)
    assert (ours.status, theirs.status) == ("ok", "ok") and len(captured) == 4
    assert ours.extra["captured"] and ours.extra["loops and weights"] == "made by the layers"
    assert theirs.extra["loops and weights"] == "made beforehand"
    scores, gradients = captured[0]()
    assert scores.shape == (6, 2) and gradients.dim() == 1 and captured[1]() is None


def test_a_capture_wants_a_gpu(steps: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = list(steps.rows(case("gcn", True), quick=True))
    assert {row.status for row in rows} == {"error"}
    assert all("needs a GPU" in str(row.message) for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps(kind: str, dtype: torch.dtype, steps: Bench) -> None:
    for captured in (False, True):
        ours, theirs = steps.rows(case(kind, captured, dtype), quick=True)
        assert (ours.status, ours.path, theirs.status) == ("ok", "fused", "ok"), (ours, theirs)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in (("_NUM_NODES", 6), ("_NUM_EDGES", 12), ("_WIDTH", 4), ("_HEADS", 2)):
        monkeypatch.setattr(host_time, name, value)
    monkeypatch.setattr(bench, "_QUICK_ROUNDS", (1, 1))
    return bench.REGISTRY["host_time"]


@pytest.mark.parametrize("kind", [*KINDS, "graph_transformer"])
def test_a_layer_by_hand_is_the_layer(kind: str, hosts: Bench) -> None:
    inputs = hosts.problem(kind, True, "fwd").inputs
    results: list[Tensor] = [make(inputs).results()[0] for make in hosts.providers.values()]
    for result in results:  # to the bit, but where the layer takes its narrow product by its own kernel
        bound = 1e-6 if kind in ("gat", "gatv2", "transformer") else 0.0
        torch.testing.assert_close(result, results[-1], rtol=bound, atol=bound)
    assert not results[0].requires_grad and results[0].shape == (6, 4)


@pytest.mark.parametrize("grad", [False, True])
def test_host_times(grad: bool, hosts: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = graphfuse.nn.GCNConv.forward
    monkeypatch.setattr(
        graphfuse.nn.GCNConv,
        "forward",
        lambda *given: seen.append(torch.is_grad_enabled()) or forward(*given),
    )
    assert len(hosts.cases()) == 12
    by_hand, registered, layer = hosts.rows({"kind": "gcn", "grad": grad, "mode": "fwd"}, quick=True)
    assert [row.status for row in (by_hand, registered, layer)] == ["ok"] * 3
    assert (by_hand.provider, registered.provider) == ("graphfuse.ops", "torch.ops.graphfuse")
    assert (layer.provider, layer.path, layer.extra["grad"]) == ("graphfuse", "fused", grad)
    assert layer.extra["time over graphfuse.ops"]["p50"] > 0
    assert layer.timer == "wall clock, 1 rounds of 1" and set(seen) == {grad}
    if bench.device().type == "cuda":
        assert layer.extra["gpu_ms"] > 0


@pytest.mark.usefixtures("untimed")
def test_a_gcn_on_a_matrix_made_by_hand_gives_the_same_scores() -> None:
    case = {"graph": "tiny", "dtype": torch.float32, "mode": "step"}
    rows = list(bench.REGISTRY["gcn_step"].rows(case, quick=True))
    assert [row.provider for row in rows] == ["torch.sparse", "pyg", "graphfuse"]
    assert [(row.status, row.message) for row in rows] == [("ok", None)] * 3
    assert [row.path for row in rows] == ["-", "-", "fused"]
