"""GAT's benchmark as it is trained: with a loop for each node, and weights that are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import additive, bench, graphs, rows

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


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_numbers_of_edges_are_operands_of_a_case_of_their_own(kind: str) -> None:
    """Their gradients are checked, and their rows hide no others."""
    made, case = bench.REGISTRY["additive"], CASE | {"kind": kind, "dtype": torch.float32}
    without, problem = (made.problem(**case, edges=edges) for edges in (False, True))
    results = made.providers["graphfuse"](problem.inputs).results()
    assert len(results) == len(made.providers["graphfuse"](without.inputs).results()) + 1
    assert not problem.check(results).wrong
    assert problem.check([*results[:-1], results[-1] + 1]).wrong
    described = [
        rows.describe(bench.Record(op="additive", provider="graphfuse", **one.facts))
        for one in (without, problem)
    ]
    assert described[0][:4] == described[1][:4] and described[1][4] == f"{described[0][4]}, edges"
