"""Plots of how kernels compare and grow: which numbers are in them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import page_plots, page_scaling
from benchmarks.bench import Record
from benchmarks.rows import Case


def case(op: str, graph: str, edges: int, width: str, mode: str, ms: dict[str, float], **given: Any) -> Case:
    extra = given.pop("extra", {})
    of = {
        name: Record(op, name, graph=graph, num_edges=edges, p50_ms=time, extra=extra, **given)
        for name, time in ms.items()
    }
    return Case((op, graph, width, "float16", mode), of)


LARGE = case("attention", "large", 900, "64", "fwd+bwd", {"graphfuse": 4.0, "pyg": 8.0}, floor_ms=3.0)
SMALL = case("attention", "small", 10, "64", "fwd+bwd", {"graphfuse": 1.0, "torch.sparse": 2.0})
WIDE = case("attention", "small", 10, "128", "fwd+bwd", {"graphfuse": 1.5})


def test_times_over_edges_and_features() -> None:
    found = page_scaling.scaling({"attention": [LARGE, WIDE, SMALL]})
    assert found == {
        "attention: edges": {
            "graphfuse": [10.0, 1.0, 900.0, 4.0],
            "cuSPARSE": [10.0, 2.0],
            "PyG": [900.0, 8.0],
            "gather floor": [900.0, 3.0],
        },
        "attention: features, small": {"graphfuse": [64.0, 1.0, 128.0, 1.5], "cuSPARSE": [64.0, 2.0]},
    }
    figure = page_scaling.draw_scaling(found, "title")
    drawn = {line.get_label(): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert drawn["graphfuse"] == [10.0, 900.0] and len(drawn) == 4


def test_what_is_no_such_case_is_left_out() -> None:
    several = case("attention", "g", 5, "4x32", "fwd+bwd", {"graphfuse": 1.0})
    dropped = case("attention", "g", 5, "64", "fwd+bwd, dropout 0.3", {"graphfuse": 1.0})
    failed = Case(("attention", "g", "64", "float16", "fwd+bwd"), {"pyg": Record("attention", "pyg")})
    benches = {"attention": [several, dropped, failed]}
    assert not page_scaling.scaling(benches) and not page_scaling.memory(benches)
    assert not page_scaling.speedups(benches)


def test_speedups_of_all_who_have_a_time() -> None:
    forward = case(
        "attention", "g", 5, "64", "fwd", {"graphfuse": 2.0, "pyg": 9.0}, floor_ms=1.0,
        extra={"peers": {"fused3s": 5.0, "pyg": 7.0}},
    )  # fmt: skip
    alone = case("attention", "h", 9, "64", "fwd", {"graphfuse": 2.0})
    found = page_scaling.speedups({"attention": [LARGE, alone, forward]})
    assert found == {"g": {"PyG": [4.5], "Fused3S": [2.5]}}  # PyG's own time, not the recorded one
    figure = page_scaling.draw_speedups(found, "title")
    assert sorted(bar.get_width() for bar in figure.axes[0].patches) == [2.5, 4.5]


def test_memory_of_both_layers() -> None:
    needs = case("attention", "g", 5, "64", "fwd+bwd", {"graphfuse": 1.0}, peak_mib=2.0)
    theirs = Record("attention", "pyg", peak_mib=90_000.0)
    both = Case(needs.what, {**needs.of, "pyg": theirs})
    unknown = case("attention", "h", 9, "64", "fwd+bwd", {"graphfuse": 1.0, "pyg": 2.0})
    found = page_scaling.memory({"attention": [both, unknown]})
    assert found == {"g": {"graphfuse": [2.0], "pyg": [90_000.0]}}
    labels = page_plots.draw_bars(found, "title", "MiB").axes[0].xaxis.get_ticklocs()
    inside = [at for at in labels if 1.0 <= at <= 270_000.0]
    assert inside == pytest.approx([10.0**power for power in range(6)])
