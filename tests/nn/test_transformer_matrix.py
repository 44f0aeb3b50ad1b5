"""TransformerConv against PyG's over graph, heads, channels and dtype: pairwise, and on a GPU all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from graphfuse.testing import GRAPHS
from tests.nn._transformer import Options, compare_with_pyg

HEADS = (1, 3, 4, 8)
CHANNELS = (1, 7, 8, 16, 32, 64, 100, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SWITCHES = ((True, False),) * len(Options._fields)
WITHOUT_EDGES = ("no_nodes", "no_edges", "one_node")

Value = tuple[int, Any]  # number of a factor, one of its values


def pairs(row: list[Any]) -> Iterator[tuple[Value, Value]]:
    """The pairs of values that meet in ``row``; a graph without edges puts nothing to the test but itself."""
    chosen = [(i, value) for i, value in enumerate(row) if value is not None]
    for one, other in itertools.combinations(chosen, 2):
        if one[0] == 0 or row[0] not in WITHOUT_EDGES:
            yield one, other


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few rows in which each two values of two factors meet: greedy, the same on every call."""
    missing = {
        ((i, one), (j, other)): None  # a set that keeps its order
        for i, j in itertools.combinations(range(len(factors)), 2)
        for one, other in itertools.product(factors[i], factors[j])
    }
    rows, draw = [], random.Random(0)
    while missing:
        row: list[Any] = [None] * len(factors)
        for i, value in next(iter(missing)):
            row[i] = value
        for i, factor in enumerate(factors):
            if row[i] is None:
                gains = []
                for value in factor:
                    row[i] = value
                    gains.append((sum(pair in missing for pair in pairs(row)), draw.random()))
                row[i] = factor[gains.index(max(gains))]
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(row))
    return rows


SUBSET = pairwise(list(GRAPHS), CHANNELS, HEADS, DTYPES, *SWITCHES)
ROTATION = [Options(*row) for row in pairwise(*SWITCHES)]


def test_the_subset_is_pairwise_and_small() -> None:
    factors = [list(GRAPHS), CHANNELS, HEADS, DTYPES, *SWITCHES]
    for (i, one), (j, other) in itertools.combinations(enumerate(factors), 2):
        real = [row for row in SUBSET if i == 0 or row[0] not in WITHOUT_EDGES]
        assert {(row[i], row[j]) for row in real} == set(itertools.product(one, other))
    assert len(SUBSET) == len(GRAPHS) * len(CHANNELS)  # fewer cannot be
    assert len(ROTATION) < 10


@pytest.mark.parametrize(
    ("graph", "channels", "heads", "dtype", "options"),
    [(*row[:4], Options(*row[4:])) for row in SUBSET],
    ids=lambda value: "".join("01"[flag] for flag in value) if isinstance(value, Options) else str(value),
)
def test_pairwise(
    graph: str, channels: int, heads: int, dtype: torch.dtype, options: Options, device: torch.device
) -> None:
    compare_with_pyg(graph, device, dtype, heads, channels, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("heads", HEADS)
def test_full_matrix(heads: int, channels: int, dtype: torch.dtype) -> None:
    """On every graph, with options in turn, so that each graph and each width meets all of them."""
    turn = HEADS.index(heads) + CHANNELS.index(channels) + DTYPES.index(dtype)
    wrong = []
    for graph in GRAPHS:
        options = ROTATION[turn % len(ROTATION)]
        turn += 1
        try:
            compare_with_pyg(graph, torch.device("cuda"), dtype, heads, channels, options)
        except Exception as error:  # a kernel that does not launch is told with its graph, too
            wrong.append(f"{graph}, {options}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
