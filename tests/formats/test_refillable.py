"""Windows in memory that stays: what they hold after each graph, what layers make of it, what is refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.data import Data

from graphfuse import RefillableWindows, RowWindows, nn, ops
from graphfuse.formats import quick, save_windows
from graphfuse.formats.walk import Walk, filled, row_masks
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from graphfuse.train.loop import captured
from tests.pairs import NIGHTLY

NODES, EDGES = 130, 1_200
# without repeated edges, and the empty one twice, as others leave their edges behind
NAMES = ("hub", "no_edges", "self_loops", "bipartite", "one_loop", "ragged", "isolated", "no_edges")


def edges_of(name: str, device: torch.device) -> Tensor:
    edge_index, size = GRAPHS[name](device)
    assert max(size) <= NODES
    return edge_index.unique(dim=1) if edge_index.numel() else edge_index


def plain(edge_index: Tensor, nodes: int = NODES) -> RowWindows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "suits", lambda *_: False)
        return RowWindows.from_edge_index(edge_index, (nodes, nodes))


def parts(walk: Walk) -> list[Tensor]:
    walk = filled(walk)
    masks = [] if walk.row_mask is None else [walk.row_mask]
    return [walk.ptr, walk.tasks, walk.merges, walk.column, *masks]


def check(windows: RefillableWindows, edge_index: Tensor) -> None:
    wanted = plain(edge_index)
    assert windows.fingerprint == wanted.fingerprint and windows.matches(edge_index)
    assert windows.num_edges == edge_index.size(1) and torch.equal(windows.edge_index(), edge_index)
    for one, other in ((windows, wanted), (windows.transpose(), wanted.transpose())):
        # whose number of tasks never changes: no row is one, however long
        by_row = other.row_walk()._replace(tasks=other.row_walk().tasks[:0])
        for walk, wanted_walk in ((one.walk(), other.walk()), (one.row_walk(), by_row)):
            assert all(map(torch.equal, parts(walk), parts(wanted_walk)))
        assert torch.equal(one.to_edge_index(), other.to_edge_index())
        for count in (RowWindows.edges_per_row, RowWindows.loops_per_row, RowWindows.last_loop):
            assert torch.equal(count(one), count(other))
    assert windows.validate() is windows


@pytest.mark.parametrize("small", [False, True], ids=["operations", "kernels"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_it_holds_what_it_was_last_filled_with(
    small: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "suits", lambda _, num_edges, *__: small and num_edges > 0)
    windows = RefillableWindows(NODES, EDGES, device)
    check(windows, torch.empty(2, 0, dtype=torch.int64, device=device))
    memory = [one.data_ptr() for one in (windows.packed_windows, windows.packed_rows)]
    for name in NAMES:
        assert windows.refill(edges_of(name, device).to(dtype)) is windows
        check(windows, edges_of(name, device).to(dtype))
    shuffled = edges_of("ragged", device)[:, torch.randperm(edges_of("ragged", device).size(1))]
    windows.refill(shuffled.cpu())  # from wherever the loader left it
    check(windows, shuffled)
    windows.transpose().refill(shuffled)
    check(windows, shuffled.flip(0))
    assert memory == [one.data_ptr() for one in (windows.packed_windows, windows.packed_rows)]


LAYERS: dict[str, Any] = {
    "GCNConv": lambda: nn.GCNConv(4, 3),
    "GCNConv without loops": lambda: nn.GCNConv(4, 3, add_self_loops=False),
    "GATConv": lambda: nn.GATConv(4, 3, heads=2),
    "GATv2Conv": lambda: nn.GATv2Conv(4, 3, heads=2),
    "AGNNConv": nn.AGNNConv,
    "TransformerConv": lambda: nn.TransformerConv(4, 3, heads=2),
}


def results(layer: torch.nn.Module, x: Tensor, edge_index: Any) -> tuple[Tensor, ...]:
    """The output and all gradients of a loss that looks at the nodes of the batch alone."""
    x = x.detach().requires_grad_()
    out = layer(x, edge_index)
    loss = (out * torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)).sum()
    return out.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_see_the_new_edges(name: str, device: torch.device) -> None:
    layer, nodes = LAYERS[name]().to(device), 45
    windows = RefillableWindows(nodes, 150, device, num_entries=140)
    for graph in ("ragged", "no_edges", "self_loops"):
        edge_index, x = edges_of(graph, device), torch.randn(nodes, 4, device=device)
        wanted = results(layer, x, plain(edge_index, nodes))
        found = results(layer, x, windows.refill(edge_index))
        assert path_taken(layer) == []
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_what_is_derived_follows(device: torch.device) -> None:
    windows = RefillableWindows(NODES, EDGES, device)
    memory = windows.memo("twice", lambda: (2 * windows.edges_per_row(), None))
    assert not memory[0].any()
    windows.refill(edges_of("hub", device))
    assert windows.memo("twice", pytest.fail) is memory
    assert torch.equal(memory[0], 2 * plain(edges_of("hub", device)).edges_per_row())


@pytest.mark.parametrize(
    ("name", "dispatched"),
    [
        *((name, False) for name in (LAYERS if NIGHTLY else ("GCNConv", "GATConv", "TransformerConv"))),
        *((name, True) for name in (("GCNConv", "TransformerConv") if NIGHTLY else ("GCNConv",))),
    ],
    ids=lambda value: {False: "directly", True: "by the dispatcher"}.get(value, value),
)
def test_backward_after_the_next_refill_raises(
    name: str, dispatched: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch does not see what kernels write
    monkeypatch.setattr(quick, "suits", lambda _, num_edges, *__: num_edges > 0)
    layer, windows = LAYERS[name]().to(device), RefillableWindows(NODES, EDGES, device)
    x = torch.randn(NODES, 4, device=device, requires_grad=True)
    windows.refill(edges_of("ragged", device))
    with FlopCounterMode(display=False) if dispatched else contextlib.nullcontext():
        late, kept = layer(x, windows).sum(), layer(x, windows).sum()
        kept.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="take snapshot"):
            windows.to("meta")
        with pytest.raises(ValueError, match="edge twice"):  # changes nothing
            windows.refill(torch.tensor([[1, 1], [0, 0]], device=device))
        kept.backward(retain_graph=True)
        windows.refill(edges_of("hub", device))
        says = "modified by an inplace operation" if dispatched else "refilled between the forward and the"
        for loss in (late, kept):
            with pytest.raises(RuntimeError, match=says):
                loss.backward()
        layer(x, windows).sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, windows: ops.spmm(windows, x),
        lambda x, windows: ops.spmm_gemm(windows, x, torch.ones(3, 4, device=x.device)),
        lambda x, windows: ops.sparse_attention(*[x.view(-1, 2, 2)] * 3, windows),
        lambda x, windows: ops.gat_attention(x[:, :2], x[:, 2:], x.view(-1, 2, 2), windows),
        lambda x, windows: ops.spmm(windows.transpose(), x),
    ],
    ids=["spmm", "spmm_gemm", "sparse_attention", "gat_attention", "transpose"],
)
def test_so_does_that_of_ops(call: Any, device: torch.device) -> None:
    windows = RefillableWindows(NODES, EDGES, device).refill(edges_of("ragged", device))
    x = torch.randn(NODES, 4, device=device, requires_grad=True)
    late = call(x, windows).sum()
    windows.refill(edges_of("ragged", device))  # equal ones too: nobody compares
    with pytest.raises(RuntimeError, match="refilled between the forward and the backward"):
        late.backward()
    call(x, windows).sum().backward()


def test_so_does_that_of_a_compiled_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "suits", lambda _, num_edges, *__: num_edges > 0)
    windows = RefillableWindows(NODES, EDGES, device).refill(edges_of("ragged", device))
    x = torch.randn(NODES, 4, device=device, requires_grad=True)
    ops.spmm(windows, x)  # builds what the trace may not
    compiled = torch.compile(lambda x: ops.spmm(windows, x).square().sum(), backend="aot_eager")
    compiled(x).backward()
    late = compiled(x)
    windows.refill(edges_of("hub", device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_loops_are_told_in_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.walk._CLEARED", 1)  # else masks are made once, without loops
    layer, windows = nn.GATConv(4, 3).to(device), RefillableWindows(NODES, EDGES, device)
    for graph in ("self_loops", "ragged"):
        edge_index, x = edges_of(graph, device), torch.randn(NODES, 4, device=device)
        found = layer(x, windows.refill(edge_index))
        torch.testing.assert_close(found, layer(x, plain(edge_index)))
        masks, loops = row_masks(windows.walk(), True)
        assert loops == 1 and masks is windows.walk().row_mask  # nothing was derived that would stay


@pytest.mark.parametrize("small", [False, True], ids=["operations", "kernels"])
def test_what_has_no_room_leaves_the_old_edges(
    small: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "suits", lambda _, num_edges, *__: small and num_edges > 0)
    old = edges_of("hub", device)
    windows = RefillableWindows(NODES, EDGES, device, num_entries=200).refill(old)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"at most 1200 edges, .*\(got 1201\)", torch.zeros(2, EDGES + 1, dtype=torch.int64)),
        (ValueError, r"no edge twice \(got 3 edges, 2 ", torch.tensor([[0, 1, 0], [2, 2, 2]])),
        (IndexError, "negative", torch.tensor([[0, -1], [1, 1]])),
        (IndexError, "larger than 129", torch.tensor([[0, 1], [1, 130]])),
        (ValueError, r"at most 200 column entries .*\(got 201\)", spread(201)),
        (ValueError, "integer type", torch.zeros(2, 3)),
        (ValueError, "first dimension", torch.zeros(3, 3, dtype=torch.int64)),
    ]
    for error, message, edges in refused:
        with pytest.raises(error, match=message):
            windows.refill(edges.to(device))
        check(windows, old)
    windows.refill(spread(200).to(device))
    check(windows, spread(200).to(device))


def spread(entries: int) -> Tensor:
    """Edges that are as many entries, forward: no two of a window have a column in common."""
    place = torch.arange(entries)
    return torch.stack([place % NODES, place // NODES * 16])


def test_a_crowded_window_takes_longer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "suits", lambda _, num_edges, *__: num_edges > 0)
    windows, edges = RefillableWindows(NODES, 1 << 15, device), edges_of("hub", device)
    seen: list[Any] = []
    monkeypatch.setattr(quick, "_sort", lambda *given: seen.append(given))  # None: not sorted here
    windows.refill(edges)
    assert len(seen) == 1
    check(windows, edges)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 5), r"`num_nodes` must be an integer in \[1, 2097152\] \(got 0\)"),
        ((5, True), "`num_edges`"),
        ((5, (1 << 20) + 1), r"`num_edges` must be an integer in \[1, 1048576\]"),
        ((5.0, 5), "`num_nodes`"),
        ((5, 5, "cpu", 6), r"`num_entries` must be an integer in \[1, 5\] \(got 6\)"),
    ],
)
def test_room_has_bounds(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RefillableWindows(*numbers)


def test_it_stays_where_it_is(tmp_path: Path, device: torch.device) -> None:
    edges = edges_of("ragged", device)
    windows = RefillableWindows(NODES, EDGES, device).refill(edges)
    assert windows.to(device) is windows and Data(windows=windows).to(device).windows is windows
    moves: list[Any] = [
        lambda: windows.to("meta"),
        windows.clone,
        windows.share_memory_,
        lambda: copy.deepcopy(windows),
        lambda: pickle.dumps(windows.transpose()),
        lambda: save_windows(tmp_path / "windows.safetensors", windows),
    ]
    for move in moves:
        with pytest.raises(RuntimeError, match=r"take snapshot\(\)"):
            move()
    taken = windows.snapshot()
    windows.refill(edges_of("hub", device))
    assert torch.equal(taken.to_edge_index(), plain(edges).to_edge_index())
    assert taken.statistics() == plain(edges).statistics()
    assert windows.statistics() == windows.snapshot().statistics() != taken.statistics()
    assert repr(windows).startswith("RefillableWindows(num_nodes=130, room=1200, num_edges=198, nbytes=")
    assert windows.room == (NODES, EDGES)


def test_values_of_edges_are_refused(device: torch.device) -> None:
    edges = edges_of("ragged", device)
    windows, x = RefillableWindows(NODES, EDGES, device).refill(edges), torch.randn(NODES, 4, device=device)
    weight = torch.rand(edges.size(1), device=device)
    for call in (
        lambda: ops.spmm(windows, x, weight),
        lambda: nn.GCNConv(4, 3).to(device)(x, windows, weight),
        lambda: nn.TransformerConv(4, 3, edge_dim=1).to(device)(x, windows, weight[:, None]),
    ):
        with pytest.raises(RuntimeError, match="pass edge_index or RowWindows"):
            call()


def test_it_is_not_found_by_its_edges(device: torch.device) -> None:
    edges = edges_of("ragged", device)
    windows = RefillableWindows(NODES, edges.size(1), device).refill(edges)
    layer, x = nn.GCNConv(4, 3).to(device), torch.randn(NODES, 4, device=device)
    wanted = layer(x, edges)  # must not keep the refillable record for these edges
    windows.refill(edges_of("one_loop", device))
    assert torch.equal(layer(x, edges.clone()), wanted)


def test_pygs_path_gets_the_edges(device: torch.device) -> None:
    layer, x = nn.GCNConv(4, 3).to(device), torch.randn(NODES, 4, device=device)
    windows = RefillableWindows(NODES, EDGES, device)
    layer.explain = False
    for graph in ("ragged", "hub"):
        edges = edges_of(graph, device)
        wanted = layer(x, windows.refill(edges))
        hook = layer.register_message_forward_hook(lambda *_: None)
        torch.testing.assert_close(layer(x, windows), wanted)
        assert path_taken(layer) != []
        hook.remove()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("num_entries", [None, 200])
@pytest.mark.parametrize("name", LAYERS)
def test_one_capture_serves_all_batches(name: str, num_entries: int | None) -> None:
    device = torch.device("cuda")
    layer, x = LAYERS[name]().to(device), torch.randn(NODES, 4, device=device)
    windows = RefillableWindows(NODES, EDGES, device, num_entries).refill(edges_of("hub", device))
    replay = captured(lambda: results(layer, x, windows))
    for graph in NAMES:
        windows.refill(edges_of(graph, device))
        x.normal_()
        found = replay()
        assert all(map(torch.equal, found, results(layer, x, windows)))
        for one, other in zip(found, results(layer, x, plain(edges_of(graph, device))), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_captures_refuse_what_would_wait() -> None:
    windows = RefillableWindows(NODES, EDGES, "cuda").refill(edges_of("hub", torch.device("cuda")))
    x, edges = torch.randn(NODES, 4, device="cuda"), windows.edge_index()
    for call in (
        lambda: windows.refill(edges),
        windows.edge_index,
        windows.to_edge_index,
    ):
        with (
            pytest.raises(RuntimeError, match=r"during CUDA graph capture|capture must not wait"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            x.neg()  # PyTorch warns of an empty graph
            call()
        torch.cuda.synchronize()
    assert torch.equal(ops.spmm(windows, x).isfinite(), torch.ones_like(x, dtype=torch.bool))
