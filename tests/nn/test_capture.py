"""Layers and whole training steps as CUDA graphs, and what a call must not do once it is warm."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse import RowWindows, ops
from graphfuse.formats.walk import copies
from graphfuse.nn import AGNNConv, GATConv, GATv2Conv, GCNConv, TransformerConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from graphfuse.train.loop import captured

# the leaves saw the warm-up's stream
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCNConv": lambda: GCNConv(4, 3),
    "GCNConv cached": lambda: GCNConv(4, 3, cached=True),
    "GCNConv plain": lambda: GCNConv(4, 3, normalize=False),
    "TransformerConv": lambda: TransformerConv(4, 3),
    "TransformerConv gate": lambda: TransformerConv(4, 3, heads=2, beta=True),
    "TransformerConv mean": lambda: TransformerConv(4, 3, heads=3, concat=False, beta=True),
    "TransformerConv bare": lambda: TransformerConv(4, 3, heads=2, bias=False, root_weight=False),
    "TransformerConv dropout": lambda: TransformerConv(4, 3, heads=2, dropout=0.5),
    "GATConv": lambda: GATConv(4, 3, heads=2),
    "GATConv dropout": lambda: GATConv(4, 3, heads=2, dropout=0.3),
    "GATv2Conv": lambda: GATv2Conv(4, 3, heads=2),
    "GATv2Conv dropout": lambda: GATv2Conv(4, 3, heads=2, dropout=0.3),
    "AGNNConv": AGNNConv,
}
MODELS: dict[str, Callable[[float], tuple[torch.nn.Module, torch.nn.Module]]] = {
    "TransformerConv": lambda dropout: (
        TransformerConv(8, 8, heads=4, beta=True, dropout=dropout),
        TransformerConv(32, 5, heads=2, concat=False, dropout=dropout),
    ),
    "GATConv": lambda dropout: (
        GATConv(8, 16, heads=2, dropout=dropout),
        GATConv(32, 5, heads=2, concat=False, dropout=dropout),
    ),
    "GATv2Conv": lambda dropout: (
        GATv2Conv(8, 16, heads=2, dropout=dropout),
        GATv2Conv(32, 5, heads=2, concat=False, dropout=dropout),
    ),
    "AGNNConv": lambda dropout: (GCNConv(8, 5), AGNNConv()),
}
MESSAGE = r"graphfuse\.warmup\(model, data\) before, in training mode, or run the op and its backward once"


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_replays_to_eagers_numbers(layer: str) -> None:
    edge_index, _ = GRAPHS["self_loops"]("cuda")
    module = LAYERS[layer]().cuda()
    x = torch.randn(37, 4, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = module(x, edge_index)
        return out, *torch.autograd.grad(
            out.square().sum(), [x, *module.parameters()], materialize_grads=True
        )

    replay = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    torch.cuda.manual_seed(1)
    found = replay()
    torch.cuda.manual_seed(1)
    assert all(map(torch.equal, found, step()))
    assert path_taken(module) == []


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_no_synchronisation_after_the_first_call(layer: str) -> None:
    edge_index, _ = GRAPHS["self_loops"]("cuda")
    weight = torch.rand(edge_index.size(1), device="cuda", requires_grad=True)
    module = LAYERS[layer]().cuda()
    x = torch.randn(37, 4, device="cuda", requires_grad=True)

    def step() -> None:
        module(x, edge_index).sum().backward()
        if layer == "GCNConv":
            module(x, edge_index, weight).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnOneGraph(torch.nn.Module):
    """A layer and its edges: what is captured belongs to them, so they are no argument."""

    def __init__(self, layer: torch.nn.Module, edge_index: Tensor) -> None:
        super().__init__()
        self.layer, self.edge_index = layer, edge_index

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.edge_index)
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [name for name in LAYERS if "dropout" not in name])
def test_make_graphed_callables(layer: str) -> None:
    edge_index, _ = GRAPHS["self_loops"]("cuda")
    module = OnOneGraph(LAYERS[layer]().cuda(), edge_index)
    x = torch.randn(37, 4, device="cuda", requires_grad=True)
    given = [x, *module.parameters()]

    def results(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = forward(x)
        gradients = torch.autograd.grad(out.square().sum(), given, materialize_grads=True)
        return [value.detach().clone() for value in (out, *gradients)]  # a graph kept alive keeps its stream

    wanted = results(module)
    graphed = torch.cuda.make_graphed_callables(
        module, (torch.randn_like(x).requires_grad_(),), allow_unused_input=True
    )
    for _ in range(2):
        assert all(map(torch.equal, results(graphed), wanted))


class Training:
    """A two-layer model with all that a step of its training needs; the same start for the same seed."""

    def __init__(
        self, device: str, dtype: torch.dtype, dropout: float, model: str = "TransformerConv"
    ) -> None:
        torch.manual_seed(0)
        self.edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
        self.layers = torch.nn.ModuleList(MODELS[model](dropout)).to(device, dtype)
        self.x = torch.randn(num_nodes, 8).to(device, dtype)
        self.target = torch.randint(5, (num_nodes,)).to(device)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.01, capturable=device == "cuda")

    def forward(self) -> Tensor:
        first, second = self.layers
        return second(first(self.x, self.edge_index).relu(), self.edge_index)

    def step(self) -> tuple[Tensor, Tensor]:
        """Scores and loss of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.forward()
        loss = F.cross_entropy(scores.float(), self.target)
        loss.backward()
        self.optimizer.step()
        return scores.detach(), loss.detach()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.layers.parameters()]


def record(step: Callable[[], tuple[Tensor, Tensor]], steps: int, seed: int) -> list[tuple[Tensor, ...]]:
    """What ``steps`` calls return, from a given state of the GPU's generator on."""
    torch.cuda.manual_seed(seed)
    return [tuple(value.clone() for value in step()) for _ in range(steps)]


def check_training(
    device: str, dtype: torch.dtype, dropout: float, capture: Callable[..., Any], model: str
) -> None:
    eager, graphed = (Training(device, dtype, dropout, model) for _ in range(2))
    warmup = 3
    torch.cuda.manual_seed(1)
    replay = capture(graphed.step, warmup)
    record(eager.step, warmup, 1)
    for _, loss in (trajectory := record(replay, 10, 2)):
        assert loss.isfinite()
    assert trajectory[-1][1] < trajectory[0][1] or dropout > 0
    for found, wanted in zip(trajectory, record(eager.step, 10, 2), strict=True):
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, graphed.parameters(), eager.parameters()))
    assert not any(map(path_taken, graphed.layers))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model", "dropout"),
    [
        ("TransformerConv", 0.0),
        ("TransformerConv", 0.5),
        ("GATConv", 0.0),
        ("GATConv", 0.3),
        ("GATv2Conv", 0.0),
        ("GATv2Conv", 0.3),
        ("AGNNConv", 0.0),
    ],
)
def test_training_replays_to_eagers_numbers(model: str, dropout: float, dtype: torch.dtype) -> None:
    """Forward, loss, backward and Adam in one graph; dropout draws what eager draws."""
    check_training("cuda", dtype, dropout, captured, model)


def check_masks(device: str, capture: Callable[..., Any]) -> None:
    training = Training(device, torch.float32, 0.5)
    parameters = list(training.layers.parameters())

    def step() -> tuple[Tensor, Tensor]:
        scores = training.forward()
        return scores.detach(), torch.autograd.grad(scores.square().sum(), parameters)[0]

    replay = capture(step)
    first, again, other = record(replay, 4, 1), record(replay, 4, 1), record(replay, 4, 2)
    for one, same in zip(first, again, strict=True):
        assert all(map(torch.equal, one, same))
    drawn = [scores for scores, _ in first + other]
    for i, scores in enumerate(drawn):  # nothing but the masks tells one replay from another
        assert not any(torch.equal(scores, earlier) for earlier in drawn[:i])
    training.layers.eval()
    plain = capture(step)
    assert all(map(torch.equal, *record(plain, 2, 1)))


@pytest.mark.gpu
def test_each_replay_draws_a_mask_from_the_generator() -> None:
    check_masks("cuda", captured)


@pytest.mark.gpu
def test_dropout_must_be_warm() -> None:
    edge_index, size = GRAPHS["repeated"]("cuda")
    windows = RowWindows.from_edge_index(edge_index, size)
    q = torch.randn(20, 2, 8, device="cuda")
    ops.sparse_attention(q, q, q, windows)  # all is warm but what dropout reads
    with pytest.raises(RuntimeError, match=MESSAGE), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.sparse_attention(q, q, q, windows, dropout=0.5)
    torch.cuda.synchronize()
    replay = captured(lambda: ops.sparse_attention(q, q, q, windows, dropout=0.5))
    assert not torch.equal(replay().clone(), replay())


def test_copies_are_not_counted_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    edge_index, size = GRAPHS["repeated"]()
    walk = RowWindows.from_edge_index(edge_index, size).walks(True, False).forward
    on_gpu = walk._replace(column=SimpleNamespace(is_cuda=True), ptr=None)  # there is nothing to compute with
    with pytest.raises(RuntimeError, match=MESSAGE):
        copies(on_gpu)
    counted = copies(walk)  # counting on a CPU does not disturb a capture
    assert counted is not None and counted.max() == 2
    assert copies(on_gpu) is counted  # at hand once it was counted: the walks share their plans
