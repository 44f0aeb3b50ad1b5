"""Times of other projects' kernels, measured once and kept: nobody has to build them to compare."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "h200.json").read_text())
    return found


def times(gpu: str | None, graph: str, heads: int, dim: int, mode: str) -> dict[str, float]:
    """Milliseconds of each peer for attention in float16, empty where none were measured.

    Args:
        gpu: Name of the GPU at hand: times of another one say nothing about it.
        graph: A name of :mod:`benchmarks.graphs`.
        heads: Heads of the attention.
        dim: Width of a head.
        mode: ``fwd``, ``fwd+bwd``; or ``gather``: reading one matrix of that width, way by way; or ``spmm``:
            a sum over neighbours of that width.
    """
    recorded = _recorded()
    shapes = recorded["graphs"].get(graph, {}) if gpu == recorded["gpu"] else {}
    found: dict[str, float] = dict(shapes.get(f"{heads}x{dim}", {}).get(mode, {}))
    return found


def gather_ms(gpu: str | None, graph: str, heads: int, dim: int) -> float | None:
    """The fastest gather of one matrix that was measured beside the peers: what a good floor comes near."""
    ways = times(gpu, graph, heads, dim, "gather")
    ways.pop("walk_kv", None)  # two matrices
    return min(ways.values(), default=None)
