"""The benchmarks' generated graphs: stand-ins of :mod:`graphfuse.train.communities`, and random pairs.

A result depends on its arguments and on NumPy's random streams, not on the number of threads. Reddit takes
about half a minute and 2.6 GiB on two cores.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from graphfuse.train import communities
from graphfuse.train.communities import DRAWS, Array, Job


def community_graph(name: str, seed: int = 0, scale: float = 1.0) -> tuple[Array, Array]:
    """``(indptr int64, indices int32)`` of the stand-in called ``name``: simple, symmetric, sorted rows.

    ``scale`` multiplies nodes and edges and keeps the mean degree and the number of communities.
    """
    preset = communities.PRESETS[name]
    nodes, edges = round(preset.nodes * scale), round(preset.edges * scale)
    return communities.community_graph(name, seed, nodes, edges)[:2]


def uniform_graph(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Array, Array]:
    """Random pairs, symmetrised: ``(indptr int64, indices int32)``; an odd ``num_edges`` is rounded down."""
    half = communities.half_of(num_nodes, num_edges)

    def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        return rng.integers(0, num_nodes, count), rng.integers(0, num_nodes, count)

    def jobs(rng_of: Callable[..., np.random.Generator], boost: float) -> list[Job]:
        total = int(boost * half) + 1
        starts = range(0, total, DRAWS)
        return [(draw, rng_of(0, i), min(DRAWS, total - start)) for i, start in enumerate(starts)]

    tag = [seed, zlib.crc32(b"uniform"), num_nodes, half]
    return communities.to_csr(communities.collect(jobs, num_nodes, half, tag), num_nodes)
