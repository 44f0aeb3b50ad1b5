"""GAT's benchmark as it is trained: with a loop for each node, and weights that are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import additive, bench, graphs

CASE: dict[str, Any] = {"graph": "tiny", "kind": "gat", "shape": (2, 8), "mode": "fwd+bwd"}
OTHERWISE: dict[str, dict[str, Any]] = {
    "no loops": {"self_loops": False},
    "nothing dropped": {"dropout": 0.0, "seed": None},
    "others dropped": {"seed": torch.tensor([1], device=bench.device())},
}


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges of the graph that are loops themselves, which are to be left out."""
    tiny = graphs.load("tiny", bench.device())
    nodes = torch.arange(3, device=bench.device()).expand(2, -1)
    edge_index = torch.unique(torch.cat([tiny.edge_index, nodes], 1), dim=1)
    looped = graphs.Graph("tiny", edge_index, tiny.num_nodes)
    monkeypatch.setattr(graphs, "load", lambda name, device: looped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_what_is_timed_is_checked(mode: str, dtype: torch.dtype) -> None:
    made = bench.REGISTRY["additive"]
    problem = made.problem(**CASE | {"mode": mode, "dtype": dtype, "dropout": 0.6})
    assert {"dropout": 0.6, "self_loops": True}.items() <= problem.facts["extra"].items()
    for provider in ("graphfuse", "pyg"):
        assert not problem.check(made.providers[provider](problem.inputs).results()).wrong, provider


@pytest.mark.parametrize("change", OTHERWISE)
def test_another_attention_is_wrong(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.REGISTRY["additive"]
    problem = made.problem(**CASE | {"dtype": torch.float32, "dropout": 0.6})
    options = problem.inputs.options | OTHERWISE[change]
    monkeypatch.setattr(additive.Inputs, "options", options)
    assert problem.check(made.providers["graphfuse"](problem.inputs).results()).wrong


def test_without_dropout_there_are_no_loops() -> None:
    problem = bench.REGISTRY["additive"].problem(**CASE | {"dtype": torch.float32})
    assert problem.inputs.options == {} and not {"dropout", "self_loops"} & problem.facts["extra"].keys()
