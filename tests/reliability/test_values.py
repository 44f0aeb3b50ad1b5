"""Numbers that break layers: NaN, Inf, logits of 10,000, sums beyond float16; and 200 epochs of training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import check
from tests.reliability import LAYERS, ON_GPU, WIDTH, larger_on_gpu, random_edges

# a triangle, a chain, a repeated edge and a loop; 8 hears nobody, nobody hears 7, and 9 is alone
EDGES = torch.tensor([[0, 1, 2, 2, 3, 4, 4, 5, 7, 8], [1, 2, 0, 3, 4, 5, 5, 5, 6, 6]])
NUM_NODES = 10


def pair(name: str, device: torch.device, dtype: torch.dtype, **changed: Any) -> tuple[Any, Any]:
    """Our layer and its definition with equal weights, none of which drops anything."""
    theirs = LAYERS[name].definition(**changed).to(device, dtype).eval()
    ours = LAYERS[name].make(**changed).to(device, dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", LAYERS)
def test_nan_and_inf_reach_pygs_rows(name: str, bad: float, device: torch.device) -> None:
    ours, theirs = pair(name, device, torch.float32)
    edge_index = EDGES.to(device)
    values = LAYERS[name].values(EDGES.size(1), device, torch.float32)
    clean = torch.randn(NUM_NODES, WIDTH, device=device)
    wanted = theirs(clean, edge_index, **values)
    for node in (4, 9) if bad != bad else (2,):
        x = clean.clone()
        x[node, 3] = bad
        spoilt = theirs(x, edge_index, **values).isfinite().logical_not().any(1)
        found = ours(x, edge_index, **values)
        assert path_taken(ours) == []
        assert torch.equal(found.isfinite().logical_not().any(1), spoilt), node
        assert 0 < int(spoilt.sum()) < 5
        torch.testing.assert_close(found[~spoilt], wanted[~spoilt], rtol=1e-4, atol=1e-5)


def with_large_logits(name: str, device: torch.device, **changed: Any) -> tuple[Any, Any, Tensor]:
    """Our layer, its definition and features that make scores of the order of 10,000."""
    ours, theirs = pair(name, device, torch.float32, **changed)
    with torch.no_grad():
        for layer in (ours, theirs):
            for key, parameter in layer.named_parameters():
                if key in ("att", "att_src", "beta"):
                    parameter.mul_(1e4)
                elif key == "lin_query.weight":
                    parameter.mul_(1e4 / WIDTH)
    torch.manual_seed(7)
    return ours, theirs, torch.randn(NUM_NODES, WIDTH, device=device).requires_grad_()


ATTENTION = ("GATConv", "GATv2Conv", "AGNNConv", "TransformerConv")


@pytest.mark.parametrize("name", ATTENTION)
def test_logits_of_ten_thousand(name: str, device: torch.device) -> None:
    """Weights become 0 and 1, and gradients vanish: as exactly as PyG in the same dtype."""
    ours, theirs, x = with_large_logits(name, device)
    edge_index = EDGES.unique(dim=1).to(device)

    def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
        return layer.to(x.dtype)(x, edge_index)

    check(functools.partial(run, ours), functools.partial(run, theirs), {"x": x})
    assert path_taken(ours) == []


@pytest.mark.parametrize("name", ATTENTION)
def test_copies_that_share_a_row_of_such_logits(name: str, device: torch.device) -> None:
    """PyG's derivative in their score is 0; ours the rounding of two sums, here multiplied by 10,000."""
    # without loops, which may outweigh the copies: 5 hears 4 alone, twice
    changed = {} if name == "TransformerConv" else {"add_self_loops": False}
    ours, theirs, x = with_large_logits(name, device, **changed)
    edge_index = EDGES[:, EDGES[0] != EDGES[1]].to(device)
    out = ours(x, edge_index)
    cotangent = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, cotangent)
    assert path_taken(ours) == []
    exact = x.detach().double().requires_grad_()
    wanted_out = theirs.double()(exact, edge_index)
    (heard,) = torch.autograd.grad(wanted_out[5].sum(), exact, retain_graph=True)
    assert float(heard[4].abs().max()) > 0.1
    (wanted,) = torch.autograd.grad(wanted_out, exact, cotangent.double())
    torch.testing.assert_close(out.double(), wanted_out, rtol=1e-5, atol=1e-5)
    largest = float((cotangent.abs().sum(-1) * out.detach().abs().amax(-1)).max())  # of the terms of a sum
    assert float((found - wanted).abs().max()) <= 1e4 * torch.finfo(torch.float32).eps * largest


def test_sums_overflow_float16_where_the_exact_ones_do(device: torch.device) -> None:
    ours, _ = pair("GCNConv", device, torch.float16, normalize=False, bias=False, out=WIDTH)
    with torch.no_grad():
        ours.lin.weight.copy_(torch.eye(WIDTH))
    # 0 hears 1 to 4, whose sum stays small though their partial ones do not; 5 hears 1 to 3
    edge_index = torch.tensor([[1, 2, 3, 4, 1, 2, 3], [0, 0, 0, 0, 5, 5, 5]], device=device)
    x = torch.tensor([0.0, 4e4, 4e4, -4e4, -4e4, 0.0], device=device).half()[:, None].repeat(1, WIDTH)
    x[2, 1] = 6e4
    with torch.no_grad():
        found = ours(x, edge_index)
        assert path_taken(ours) == []
        wanted = torch.zeros_like(x)
        wanted[0, 1], wanted[5], wanted[5, 1] = x[2, 1] - x[1, 1], x[1], x[2, 1]
        assert torch.equal(found, wanted)
        x[3] = 4e4
        assert bool(ours(x, edge_index)[5].isposinf().all())


def test_scores_may_overflow_float16(device: torch.device) -> None:
    """Scores of 100,000 and more are float32, although what they are made of is not."""
    edge_index = EDGES.to(device)
    windows = RowWindows.from_edge_index(edge_index, (NUM_NODES, NUM_NODES))

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * size).clamp(-6e4, 6e4).half().requires_grad_()

    q, k, v = draw(NUM_NODES, 2, 16, size=300), draw(NUM_NODES, 2, 16, size=300), draw(NUM_NODES, 2, 16)
    a_src, a_dst = draw(NUM_NODES, 2, size=5e4), draw(NUM_NODES, 2, size=5e4)
    scores = torch.einsum("nhd,mhd->hnm", q.detach().float(), k.detach().float())
    assert float(scores.abs().max()) > 65504
    for op, definition, given in (
        (ops.sparse_attention, reference.sparse_attention, {"q": q, "k": k, "v": v}),
        (ops.gat_attention, reference.gat_attention, {"a_src": a_src, "a_dst": a_dst, "x": v}),
    ):
        found = op(**given, windows=windows)
        wanted = definition(edge_index, **{key: one.detach().double() for key, one in given.items()})
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)
        grads = torch.autograd.grad(found.float().square().sum(), list(given.values()))
        assert all(bool(grad.isfinite().all()) for grad in grads)


def losses(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, y: Tensor, epochs: int) -> Tensor:
    """The loss before each of ``epochs`` steps."""
    optimizer, found = torch.optim.Adam(layer.parameters(), lr=0.02), []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x, edge_index), y)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@larger_on_gpu
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "TransformerConv"])
def test_two_hundred_epochs_are_pygs(name: str, device: torch.device) -> None:
    """The losses of every step of Adam. In the interpreter, where steps take long, few in float64."""
    dtype, epochs = (torch.float32, 200) if ON_GPU else (torch.float64, 6)
    num_nodes = 2000 if ON_GPU else 4
    edge_index = random_edges(num_nodes, 8 * num_nodes, device) if ON_GPU else EDGES[:, :4].to(device)
    x = torch.randn(num_nodes, WIDTH, device=device, dtype=dtype, requires_grad=name == "AGNNConv")
    y = torch.randint(4, (num_nodes,), device=device)
    ours, theirs = pair(name, device, dtype, **({} if "AGNN" in name or "GCN" in name else {"concat": False}))
    found, wanted = (losses(layer, x, edge_index, y, epochs) for layer in (ours, theirs))
    assert path_taken(ours) == []
    assert float(wanted[-1]) < float(wanted[0])  # it learns
    tolerance = 2e-2 if ON_GPU else 1e-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
