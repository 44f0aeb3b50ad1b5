"""The benchmark of attention whose edges carry numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks import bench, edge_attention, floors, graphs

CASE: dict[str, Any] = {"graph": "tiny", "shape": (2, 8), "edge_dim": 3, "mode": "fwd+bwd"}
MADE = bench.REGISTRY["edge_attention"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
def test_what_is_timed_is_checked(mode: str, dtype: torch.dtype) -> None:
    problem = MADE.problem(**CASE | {"mode": mode, "dtype": dtype})
    assert problem.facts["extra"]["kind"] == "3 numbers"
    for provider in ("graphfuse", "pyg"):
        results = MADE.providers[provider](problem.inputs).results()
        assert len(results) == (2 if mode == "fwd" else 7)
        assert not problem.check(results).wrong, provider
        for place in range(len(results)):
            changed = [x + 1 if n == place else x for n, x in enumerate(results)]
            assert problem.check(changed).wrong, place


@pytest.mark.parametrize("name", ["q", "k", "v", "edge_query", "edge_attr"])
def test_an_attention_of_other_operands_is_wrong(name: str) -> None:
    problem = MADE.problem(**CASE | {"mode": "fwd", "dtype": torch.float32})
    operands = problem.inputs.operands | {name: problem.inputs.operands[name].roll(1, 0)}
    other = dataclasses.replace(problem.inputs, operands=operands)
    assert problem.check(MADE.providers["graphfuse"](other).results()).wrong


def test_the_floor_reads_numbers_of_edges_in_each_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, known = graphs.load("tiny", bench.device()), [5.0]
    monkeypatch.setattr(floors, "attention_ms", lambda *arguments: known[0])
    monkeypatch.setattr(floors, "copy_bytes_per_ms", lambda device: 1.0)
    shape = (2, 8, 3, torch.float16)
    edges, nodes = tiny.edge_index.size(1) * 3 * 2, tiny.num_nodes * 2 * 3 * 2
    assert edge_attention._floor_ms(tiny, *shape, False) == 5 + edges + 2 * nodes
    assert edge_attention._floor_ms(tiny, *shape, True) == 5 + 4 * edges + 6 * nodes
    known[0] = None
    assert edge_attention._floor_ms(tiny, *shape, True) is None
