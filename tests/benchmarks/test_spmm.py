"""Benchmarks of sums over neighbours: all providers compute the same, and what differs is seen."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import bench, graphs, run, synth
from benchmarks.bench import Problem
from graphfuse import ops

DTYPES = [torch.float16, torch.float32]


def problem_of(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Problem:
    assert run  # which registers them
    monkeypatch.setitem(graphs._GENERATED, "tiny", functools.partial(synth.uniform_graph, 20, 60))
    return bench.REGISTRY[op].problem(graph="tiny", head_dim=8, dtype=dtype, mode="fwd+bwd")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["spmm", "spmm_weighted", "spmm_normalized"])
def test_providers_compute_the_same(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(op, dtype, monkeypatch)
    providers = bench.REGISTRY[op].providers
    assert list(providers) == ["graphfuse", "pyg", "torch.sparse"]
    for name, provider in providers.items():
        prepared = provider(problem.inputs)
        if name == "torch.sparse" and dtype == torch.float16 and problem.device.type == "cpu":
            with pytest.raises((NotImplementedError, RuntimeError)):  # which would be a row
                prepared.results()
        else:
            assert not problem.check(prepared.results()).wrong


@pytest.mark.parametrize("missing", ["row_scale", "col_scale"])
def test_a_factor_that_is_missing_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("spmm_normalized", torch.float16, monkeypatch)
    inputs = problem.inputs
    factors = {name: inputs.factor for name in ("row_scale", "col_scale") if name != missing}
    wrong = inputs.run(lambda x: ops.spmm(inputs.graph.windows, x, **factors))
    assert problem.check(wrong.results()).wrong
