"""Graphs of communities: the size and row-window statistics of a large data set, with other edges.

A fused kernel sees a graph through its row windows: 16 consecutive rows whose columns are compacted. Columns
per window, their spread over the windows and edges per column entry decide its work, so those are imitated,
with a two-level Chung-Lu model:

* Degrees are quantiles of a truncated power law (its lower end solved for the mean). They are dealt to ids
  through a Gaussian copula in which a share ``rho`` of the variance is common to a community, so that
  neighbouring ids have similar degrees; without it 16 rows average their degrees out.
* Ids are cut into contiguous communities. A share of each node's edges stays in its community, the rest goes
  anywhere in proportion to degree. The share is solved, from the expected number of distinct columns in
  sampled windows, for the wanted edges per tensor-core block (TCB, 16 x 8 entries).
* Sampling repeats until the edge count is exact; the surplus is dropped at random.

Not imitated: triangles beyond those the communities bring, and structure that the original's order of ids
hides. A result depends on its arguments and on NumPy's random streams, not on the number of threads.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Job = tuple[Any, ...]  # a function that draws endpoints (u, v), and its arguments
Jobs = Callable[[Callable[..., np.random.Generator], float], list[Job]]

_WINDOW, _BLOCK = 16, 8  # rows of a window, columns of a TCB
DRAWS = 2_000_000  # edges drawn by one job


@dataclass(frozen=True)
class Preset:
    """What a stand-in imitates; the shape parameters were fitted at full size.

    Args:
        nodes: Published number of nodes.
        edges: Published number of directed edges of the symmetric graph.
        max_degree: As commonly quoted for the data set.
        hub: Factor on ``max_degree`` for the drawn degrees: large nodes lose most edges to duplicates.
        gamma: Exponent of the power law.
        rho: Share of a degree's variance that is common to a community.
        block: Mean nodes of a community.
        edges_per_block: Edges of a TCB, as published for Fused3S (arXiv:2505.08098, table 6).
    """

    nodes: int
    edges: int
    max_degree: int
    hub: float
    gamma: float
    rho: float
    block: int
    edges_per_block: float


PRESETS = {
    "reddit": Preset(232_965, 114_615_892, 21_657, 3.0, 1.8, 0.70, 4096, 16.5),
    "ogbn-products": Preset(2_449_029, 123_718_280, 17_481, 1.0, 2.7, 0.30, 1024, 8.0),
}


class CommunityGraph(NamedTuple):
    """A simple, symmetric graph as CSR with sorted rows.

    Args:
        indptr: ``int64[num_nodes + 1]``.
        indices: ``int32[num_edges]``.
        bounds: ``int64[num_communities + 1]``; nodes ``bounds[c]`` to ``bounds[c + 1]`` are community c.
    """

    indptr: Array
    indices: Array
    bounds: Array


def community_graph(
    name: str,
    seed: int = 0,
    num_nodes: int | None = None,
    num_edges: int | None = None,
    share: float | None = None,
) -> CommunityGraph:
    """The stand-in called ``name``.

    Args:
        name: Of :data:`PRESETS`.
        seed: Of the generator.
        num_nodes: At least 64; the preset's by default. Communities shrink with it.
        num_edges: Directed edges, rounded down to even; the preset's by default.
        share: Of a node's edges, how many are drawn in its community; at most half of its members are joined
            so. By default it is solved for the preset's edges per TCB.

    Raises:
        ValueError: so many edges do not fit.
    """
    preset = PRESETS[name]
    num_nodes = preset.nodes if num_nodes is None else max(64, num_nodes)
    half = half_of(num_nodes, preset.edges if num_edges is None else num_edges)
    tag = [seed, zlib.crc32(name.encode()), num_nodes, half]
    rates = _rates(preset, num_nodes, half, np.random.default_rng(tag), share)
    return CommunityGraph(*to_csr(collect(rates.jobs(), num_nodes, half, tag), num_nodes), rates.bounds)


def half_of(num_nodes: int, num_edges: int) -> int:
    """The undirected edges that ``num_edges`` directed ones make, if they fit ``num_nodes`` nodes."""
    half = max(1, num_edges // 2)
    if num_nodes >= 2**31 or half > 0.2 * num_nodes * num_nodes:
        raise ValueError(f"{half:,} undirected edges do not fit {num_nodes:,} nodes")
    return half


# Community model


def _power_law(count: int, mean: float, largest: float, gamma: float) -> Array:
    # ascending quantiles of a power law cut at `largest`, lower end solved for the mean
    q = (np.arange(count) + 0.5) / count
    a = 1.0 - gamma

    def at(low: float) -> Array:
        values: Array = (low**a + q * (largest**a - low**a)) ** (1 / a)
        return values

    low, high = 1e-3, float(mean)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).mean() < mean else (low, middle)
    return at(high)


def _communities(num_nodes: int, block: float, rng: np.random.Generator) -> Array:
    # boundaries of contiguous communities: multiples of a window, log-normal sizes around `block`
    count = int(2 * num_nodes / block) + 16
    size = np.maximum(2 * _WINDOW, block * np.exp(0.5 * rng.standard_normal(count) - 0.125))
    cut = np.cumsum((size // _WINDOW).astype(np.int64) * _WINDOW)
    return np.concatenate([[0], cut[cut < num_nodes - _WINDOW], [num_nodes]])


class _Rates:
    """Expected degree of each node inside its community and outside it, for a share of inner edges."""

    def __init__(self, degree: Array, bounds: Array, share: float) -> None:
        size = np.diff(bounds)
        self.bounds, self.community = bounds, np.repeat(np.arange(len(size)), size)
        self.inner = np.minimum(share * degree, 0.5 * size[self.community])  # a hub cannot fill more
        self.outer = degree - self.inner
        self.inner_sum = np.concatenate([[0.0], np.cumsum(self.inner)])
        self.outer_sum = np.concatenate([[0.0], np.cumsum(self.outer)])

    def windows(self, picks: Array, boost: float, bins: int = 256) -> tuple[Array, Array]:
        """Expected (edges, distinct columns) of the windows in ``picks``, all rates times ``boost``."""
        order = np.sort(self.outer)
        edge = np.linspace(0, len(order), bins + 1).astype(np.int64)
        count = np.diff(edge)
        mean_rate = np.add.reduceat(order, edge[:-1]) / count  # outer rate of each quantile bin
        edges, columns = np.empty(len(picks)), np.empty(len(picks))
        volume = self.outer_sum[-1]
        for k, window in enumerate(picks):
            rows = slice(window * _WINDOW, (window + 1) * _WINDOW)
            community = self.community[window * _WINDOW]
            members = slice(self.bounds[community], self.bounds[community + 1])
            inner_volume = self.inner_sum[members.stop] - self.inner_sum[members.start]
            outer = boost * self.outer[rows, None]
            anywhere = outer * mean_rate / volume  # rows x bins
            here = boost * self.inner[rows, None] * self.inner[members] / max(inner_volume, 1e-9)
            far = outer * self.outer[members] / volume
            near = here + far
            edges[k] = (_hit(anywhere) * count).sum() + (_hit(near) - _hit(far)).sum()
            columns[k] = (_hit(anywhere.sum(0)) * count).sum()
            columns[k] += (_hit(near.sum(0)) - _hit(far.sum(0))).sum()
        return edges, columns

    def jobs(self) -> Jobs:
        """Jobs that draw the edges of both levels."""
        num_nodes = len(self.community)

        def draw(
            rng: np.random.Generator, low: int, high: int, rate: Array, cum: Array, first: Array, last: Array,
            boost: float,
        ) -> tuple[Array, Array]:  # fmt: skip
            count = np.floor(rate[low:high] * (boost / 2) + rng.random(high - low)).astype(np.int64)
            u = np.repeat(np.arange(low, high, dtype=np.int64), count)
            a, b = cum[first[low:high]], cum[last[low:high]]
            at = np.repeat(a, count) + rng.random(len(u)) * np.repeat(b - a, count)
            v = np.searchsorted(cum, at, side="right") - 1
            return u, np.minimum(v, num_nodes - 1)

        inside = (self.bounds[self.community], self.bounds[self.community + 1])
        everywhere = (np.zeros(num_nodes, np.int64), np.full(num_nodes, num_nodes, np.int64))
        levels = ((self.inner, self.inner_sum, *inside), (self.outer, self.outer_sum, *everywhere))

        def jobs(rng_of: Callable[..., np.random.Generator], boost: float) -> list[Job]:
            found: list[Job] = []
            for level, (rate, cum, first, last) in enumerate(levels):
                parts = max(1, int(cum[-1] * boost / 2 / DRAWS))
                cut = np.unique(np.searchsorted(cum, np.linspace(0, cum[-1], parts + 1)[1:-1]))
                cut = np.concatenate([[0], cut[(cut > 0) & (cut < num_nodes)], [num_nodes]])
                for i in range(len(cut) - 1):
                    bounds = (cut[i], cut[i + 1])
                    found.append((draw, rng_of(level, i), *bounds, rate, cum, first, last, boost))
            return found

        return jobs


def _hit(rate: Array) -> Array:
    # probability of at least one edge
    return -np.expm1(-rate)


def _rates(
    preset: Preset, num_nodes: int, half: int, rng: np.random.Generator, share: float | None
) -> _Rates:
    mean = 2 * half / num_nodes
    largest = min(preset.hub * preset.max_degree, num_nodes / 2)
    bounds = _communities(num_nodes, max(64, preset.block * min(1.0, num_nodes / preset.nodes)), rng)
    size = np.diff(bounds)
    z = np.repeat(rng.standard_normal(len(size)), size) * np.sqrt(preset.rho)
    z += rng.standard_normal(num_nodes) * np.sqrt(1 - preset.rho)
    degree = np.empty(num_nodes)
    degree[np.argsort(z, kind="stable")] = _power_law(num_nodes, mean, largest, preset.gamma)
    if share is None:
        share = _solve(preset, num_nodes, degree, bounds)
    return _Rates(degree, bounds, share)


def _solve(preset: Preset, num_nodes: int, degree: Array, bounds: Array) -> float:
    # the share of inner edges that gives the preset's edges per TCB
    num_windows = num_nodes // _WINDOW
    sampled = min(num_windows, 256)
    volume = degree[: num_windows * _WINDOW].reshape(num_windows, _WINDOW).sum(1)
    quantiles = ((np.arange(sampled) + 0.5) * num_windows / sampled).astype(np.int64)
    picks = np.argsort(volume, kind="stable")[quantiles]
    wanted = degree[(picks[:, None] * _WINDOW + np.arange(_WINDOW)).ravel()].sum()

    def edges_per_block(share: float) -> float:
        rates, boost = _Rates(degree, bounds, share), 1.0
        for _ in range(4):  # repeated draws are lost, so more are drawn until the count is right
            edges, columns = rates.windows(picks, boost)
            boost *= min(2.0, wanted / edges.sum())
        blocks = (columns / _BLOCK + 0.5 * np.minimum(1, columns)).sum()  # half a block is padding
        return float(edges.sum() / blocks)

    low, high = 0.0, 0.95  # more locality, more edges per block
    for _ in range(12):
        share = (low + high) / 2
        low, high = (share, high) if edges_per_block(share) < preset.edges_per_block else (low, share)
    return low


# Assembly


def collect(jobs_of: Jobs, num_nodes: int, half: int, tag: list[int]) -> Array:
    """Exactly ``half`` distinct undirected edges, as sorted keys min * num_nodes + max."""

    def run(job: Job) -> Array:
        u, v = job[0](*job[1:])
        kept = u != v
        u, v = u[kept], v[kept]
        found: Array = np.minimum(u, v) * num_nodes + np.maximum(u, v)
        return found

    keys, boost, rounds = np.empty(0, np.int64), 1.03, 40
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for turn in range(rounds):

            def rng_of(*ids: int, turn: int = turn) -> np.random.Generator:
                return np.random.default_rng([*tag, turn, *ids])

            new = list(pool.map(run, jobs_of(rng_of, boost)))
            before = len(keys)
            keys = _sorted_unique(np.concatenate([keys, *new]))
            if len(keys) >= half:
                break
            drawn = sum(map(len, new))
            fresh = max(0.02, (len(keys) - before) / max(1, drawn))  # share that was new
            boost = max(1e-3, 1.1 * (half - len(keys)) / half / fresh)
        else:
            raise RuntimeError(f"only {len(keys):,} of {half:,} edges after {rounds} rounds")
    rng = np.random.default_rng([*tag, 999])
    keep = np.ones(len(keys), bool)
    keep[rng.choice(len(keys), len(keys) - half, replace=False, shuffle=False)] = False
    kept: Array = keys[keep]
    return kept


def _sorted_unique(keys: Array) -> Array:
    keys.sort()
    keep = np.empty(len(keys), bool)
    keep[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    kept: Array = keys[keep]
    return kept


def to_csr(keys: Array, num_nodes: int) -> tuple[Array, Array]:
    """Mirrors the undirected keys and splits them into indptr and sorted indices."""
    half = len(keys)
    full = np.empty(2 * half, np.int64)
    full[:half] = keys
    row = keys // num_nodes
    full[half:] = (keys - row * num_nodes) * num_nodes + row
    del keys, row
    full.sort()
    indptr = np.searchsorted(full, np.arange(num_nodes + 1, dtype=np.int64) * num_nodes)
    indices = np.empty(2 * half, np.int32)
    for low in range(0, 2 * half, 1 << 24):  # pieces, as the remainder is int64 before it is cast
        indices[low : low + (1 << 24)] = full[low : low + (1 << 24)] % num_nodes
    return indptr.astype(np.int64), indices
