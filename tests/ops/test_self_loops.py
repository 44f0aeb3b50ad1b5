"""Attention in which each node has one loop, whatever loops the graph has, against its definition."""

from __future__ import annotations

import functools

import pytest
import torch

from graphfuse import ops, reference
from graphfuse.kernels import launch
from graphfuse.testing import GRAPHS, check
from tests.ops.test_additive_attention import check_additive
from tests.ops.test_attention import DTYPES, check_attention, check_scaled_keys, draw, narrow
from tests.ops.test_spmm import check_spmm
from tests.pairs import in_turns

SQUARE = [name for name in GRAPHS if not name.startswith("bipartite")]


@pytest.mark.parametrize(("graph", "dtype"), in_turns(SQUARE, DTYPES), ids=str)
def test_output_and_gradients_match_definition(
    graph: str, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    turn = SQUARE.index(graph) + DTYPES.index(dtype)
    if walked == "windows" and dtype is torch.float32:
        dtype = torch.float16  # windows take half precision alone
    heads, dim = [(1, 8), (3, 7), (2, 16), (5, 12)][turn % 4]
    # the interpreter negates the bit patterns of bfloat16
    scale = -0.4 if turn % 5 == 0 and dtype is not torch.bfloat16 else 0.4
    check_attention(graph, device, dtype, heads, dim, self_loops=True, scale=scale)


@pytest.mark.parametrize("graph", ["repeated", "self_loops", "isolated"])
def test_dropout(graph: str, walked: str, device: torch.device) -> None:
    seed = torch.tensor([(5 << 40) + 3], device=device)
    options = {"dropout": 0.4, "seed": seed, "self_loops": True}
    check_attention(graph, device, narrow(walked), 3, 8, **options)
    check_attention(graph, device, torch.bfloat16, 1, 24, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_slices(dropout: float, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    windows = draw("hub", device, torch.float32, 1, 1)[0]
    assert windows.walks(walked == "rows", False).forward.num_slots > 0
    seed = torch.tensor([4], device=device) if dropout > 0 else None
    check_attention("hub", device, narrow(walked), 2, 12, self_loops=True, dropout=dropout, seed=seed)


def test_a_node_alone_attends_to_itself(walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw("isolated", device, narrow(walked), 2, 8)
    out = ops.sparse_attention(**given, windows=windows, self_loops=True)
    alone = torch.bincount(edge_index[1][edge_index[0] != edge_index[1]], minlength=45) == 0
    assert alone.any() and torch.equal(out[alone], given["v"][alone])


def test_slices_without_the_loop_see_nothing_of_it(
    walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Were its score 0 there instead of none, its weight would be Inf: all scores are about -200
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    windows, edge_index, given = draw("hub", device, narrow(walked), 1, 8)
    with torch.no_grad():
        given["q"].fill_(-5.0)
        given["k"].fill_(5.0)
    out = ops.sparse_attention(**given, windows=windows, scale=1.0, self_loops=True)
    wanted = reference.sparse_attention(edge_index, **given, scale=1.0, self_loops=True)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    # keys that are all alike leave dq and dk nothing but rounding
    grads = torch.autograd.grad(out.square().sum(), list(given.values()))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize("graph", ["ragged", "isolated"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_their_neighbours_alone(
    value: float, operand: str, graph: str, walked: str, device: torch.device
) -> None:
    windows, edge_index, given = draw(graph, device, narrow(walked), 2, 8)
    values = {name: tensor.detach().clone() for name, tensor in given.items()}
    node = 5  # of "isolated", one without edges
    values[operand][node] = value
    out = ops.sparse_attention(**values, windows=windows, self_loops=True)
    reached = torch.zeros(out.size(0), dtype=torch.bool, device=device)
    if operand != "q":
        reached[edge_index[1][edge_index[0] == node]] = True
    reached[node] = True
    if operand == "k" and value == float("inf"):  # a score of -inf weighs nothing
        assert not (~out.isfinite().all(2).all(1) & ~reached).any() and not out[node].isfinite().all()
    else:
        assert torch.equal(~out.isfinite().all(2).all(1), reached)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float64 runs in the interpreter alone")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(dropout: float) -> None:
    windows, _, given = draw("self_loops", torch.device("cpu"), torch.float64, 2, 3)
    seed = torch.tensor([2]) if dropout > 0 else None
    op = functools.partial(ops.sparse_attention, windows=windows, dropout=dropout, seed=seed, self_loops=True)
    assert torch.autograd.gradcheck(op, tuple(given.values()), fast_mode=True)


def test_one_record_serves_both_rules(device: torch.device) -> None:
    windows, edge_index, given = draw("self_loops", device, torch.float16, 2, 8)
    for loops in (True, False, True):
        op = functools.partial(ops.sparse_attention, windows=windows, self_loops=loops)
        check(op, functools.partial(reference.sparse_attention, edge_index, self_loops=loops), given)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    windows, _, given = draw("bipartite", device, torch.float32, 2, 4)
    with pytest.raises(ValueError, match=r"`self_loops` wants one set of nodes.*21 receivers and 50 sources"):
        ops.sparse_attention(**given, windows=windows, self_loops=True)
    windows, edge_index, given = draw("ragged", device, torch.float32, 2, 4)
    edges = {"edge_query": given["q"], "edge_attr": torch.randn(edge_index.size(1), 4, device=device)}
    with pytest.raises(ValueError, match="edges without numbers"):
        ops.sparse_attention(**given, windows=windows, self_loops=True, **edges)


@pytest.mark.parametrize("graph", ["repeated", "self_loops", "hub"])
def test_masks_that_come_without_loops(
    graph: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on large graphs, in windows: attention, GAT and `spmm` do not look for loops themselves."""
    monkeypatch.setattr("graphfuse.formats.walk._CLEARED", 0)
    monkeypatch.setattr("graphfuse.formats.walk._CHUNK", 7)
    for prefers in ("prefers_rows", "attention_prefers_rows", "gat_prefers_rows"):
        monkeypatch.setattr(launch, prefers, lambda *sizes: False)
    check_attention(graph, device, torch.float16, 2, 8, self_loops=True)
    check_additive("gat", graph, device, torch.float16, 1, 24, self_loops=True)
    check_scaled_keys(graph, device, torch.float16, 2, 8, self_loops=True)
    for dtype in (torch.float16, torch.float32):
        check_spmm(graph, device, dtype, 12, weighted=False, loops=True)
