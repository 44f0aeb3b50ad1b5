"""A training step of the two-layer GCN on Cora, eager and captured, graphfuse and PyG taking turns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from benchmarks import truth
from benchmarks.bench import Bench, Prepared, Problem, device
from graphfuse.train import datasets, loop, models
from graphfuse.train.config import TrainConfig


@dataclass(frozen=True)
class Inputs:
    """What both providers are given."""

    data: Data
    target: Tensor  # -100 on nodes that are not trained on: nothing that synchronises
    captured: bool

    def model(self, layers: str) -> torch.nn.Module:
        """1433 -> 16 -> 7, cached graph convolutions with dropout between, the same start for all."""
        config = TrainConfig("cora", layers=layers, input_dropout=0.0)  # type: ignore[arg-type]
        torch.manual_seed(0)
        net = models.build(config, self.data.num_features, int(self.data.y.max()) + 1)
        return net.to(self.data.x.device)


def _data(dataset: str) -> tuple[Data, str]:
    """The data set and its name, or generated data of Cora's size where Cora cannot be had."""
    try:
        return datasets.load(dataset).data, dataset
    except datasets.DatasetError:
        return datasets.planted_partition(), f"planted partition, for want of {dataset}"


def _problem(dataset: str, mode: str, captured: bool) -> Problem:
    if captured and device().type != "cuda":
        raise ValueError("a CUDA graph needs a GPU")
    data, name = _data(dataset)
    data = data.to(device())
    target = torch.where(data.train_mask, data.y, -100)
    inputs = Inputs(data, target, captured)
    results = [_results(inputs, inputs.model("pyg").to(dtype)) for dtype in (torch.float64, torch.float32)]
    factors = [2.0] + [3.0] * (len(results[0]) - 1)
    expected = [
        truth.Expected(exact, rounded, None, factor)
        for exact, rounded, factor in zip(*results, factors, strict=True)
    ]
    return Problem(
        facts={
            "graph": name,
            "num_nodes": data.num_nodes,
            "num_edges": data.num_edges,
            "dtype": "float32",
            "mode": mode,
            "extra": {"captured": captured},
        },
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst(expected, results),
    )


def _results(inputs: Inputs, model: torch.nn.Module) -> Sequence[Tensor]:
    """Scores without dropout, and the gradients of the loss in every parameter."""
    model.eval()
    parameters = list(model.parameters())
    scores = model(inputs.data.x.to(parameters[0].dtype), inputs.data.edge_index)
    loss = F.cross_entropy(scores, inputs.target)
    return scores.detach(), *torch.autograd.grad(loss, parameters)


def _provider(layers: str, inputs: Inputs) -> Prepared:
    model, data = inputs.model(layers), inputs.data
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.01, weight_decay=5e-4, fused=True, capturable=inputs.captured
    )
    checked = _results(inputs, model)
    model.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(data.x, data.edge_index), inputs.target).backward()
        optimizer.step()

    call = loop.captured(step) if inputs.captured else step
    taken = models.path(model)[0]
    return Prepared(call, lambda: checked, "-" if taken == "pyg" else taken)


Bench(
    name="cora_step",
    sweep=[{"dataset": ("cora",), "mode": ("step",), "captured": (False, True)}],
    problem=_problem,
    providers={
        "graphfuse": functools.partial(_provider, "graphfuse"),
        "pyg": functools.partial(_provider, "pyg"),
    },
    take_turns=True,
)
