"""The benchmarks' generated graphs: stand-ins of :mod:`graphfuse.train.communities`, random pairs, R-MAT.

A result depends on its arguments and on NumPy's random streams, not on the number of threads. Reddit takes
about half a minute and 2.6 GiB on two cores.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from graphfuse.train import communities
from graphfuse.train.communities import DRAWS, Array, Job, Preset

# Nodes and edges are published, and blog's edges per tensor-core block. Of the others those and `rho`
# are guesses, and so is the maximum degree of igb-small, yelp and amazonproducts: 250 times the mean.
PRESETS = communities.PRESETS | {
    "blog": Preset(88_784, 4_186_390, 9_444, 1.7, 1.75, 0.65, 256, 11.0),
    "ogbn-arxiv": Preset(169_343, 2_315_598, 13_161, 1.0, 2.3, 0.10, 512, 8.0),
    "igb-small": Preset(1_000_000, 12_070_502, 3_018, 1.0, 2.5, 0.10, 512, 8.0),
    "yelp": Preset(716_847, 13_954_818, 4_867, 1.0, 2.5, 0.30, 512, 8.5),
    "amazonproducts": Preset(1_569_960, 264_339_468, 42_093, 1.0, 2.4, 0.30, 2048, 9.0),
}
_CORNERS = (0.57, 0.19, 0.19)  # of Graph500: what goes to each quarter of the matrix but the last

Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]  # that many edges' endpoints


def community_graph(name: str, seed: int = 0, scale: float = 1.0) -> tuple[Array, Array]:
    """``(indptr int64, indices int32)`` of the stand-in called ``name``: simple, symmetric, sorted rows.

    ``scale`` multiplies nodes and edges and keeps the mean degree and the number of communities.
    """
    preset = PRESETS[name]
    num_nodes = max(64, round(preset.nodes * scale))
    half = communities.half_of(num_nodes, round(preset.edges * scale))
    tag = [seed, zlib.crc32(name.encode()), num_nodes, half]
    rates = communities._rates(preset, num_nodes, half, np.random.default_rng(tag), None)
    return communities.to_csr(communities.collect(rates.jobs(), num_nodes, half, tag), num_nodes)


def uniform_graph(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Array, Array]:
    """Random pairs, symmetrised: ``(indptr int64, indices int32)``; an odd ``num_edges`` is rounded down."""

    def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        return rng.integers(0, num_nodes, count), rng.integers(0, num_nodes, count)

    return _drawn("uniform", draw, num_nodes, num_edges, seed)


def rmat_graph(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Array, Array]:
    """As :func:`uniform_graph`, but each bit of a pair is drawn with the odds of Graph500: low ids are hubs.

    Source: Chakrabarti, Zhan & Faloutsos, R-MAT, SDM 2004.
    """
    a, b, c = _CORNERS
    bits = max(1, (num_nodes - 1).bit_length())

    def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        u, v = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(bits):
            at = rng.random(count)
            right = ((at >= a) & (at < a + b)) | (at >= a + b + c)
            u, v = 2 * u + (at >= a + b), 2 * v + right
        kept = (u < num_nodes) & (v < num_nodes)
        return u[kept], v[kept]

    return _drawn("rmat", draw, num_nodes, num_edges, seed)


def _drawn(law: str, draw: Draw, num_nodes: int, num_edges: int, seed: int) -> tuple[Array, Array]:
    half = communities.half_of(num_nodes, num_edges)

    def jobs(rng_of: Callable[..., np.random.Generator], boost: float) -> list[Job]:
        total = int(boost * half) + 1
        starts = range(0, total, DRAWS)
        return [(draw, rng_of(0, i), min(DRAWS, total - start)) for i, start in enumerate(starts)]

    tag = [seed, zlib.crc32(law.encode()), num_nodes, half]
    return communities.to_csr(communities.collect(jobs, num_nodes, half, tag), num_nodes)
