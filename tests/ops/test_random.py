"""Ops with options drawn at random, all at once, against their definitions: what no list pairs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import check
from tests.ops.test_attention import DTYPES

HALVES = [torch.float16, torch.bfloat16]

SEEDS = range(12)  # of each op
HEADS = [(1, 8), (1, 64), (1, 100), (2, 16), (2, 32), (3, 7), (4, 8), (8, 16)]
ORDERS = ["natural", "degree", "polish", "bisection"]


class Draw:
    """A graph, a way to walk it, and numbers, all from one seed."""

    def __init__(self, seed: int, dtypes: list[torch.dtype], device: torch.device) -> None:
        self.of = random.Random(seed)
        self.device = device
        self.numbers = torch.Generator().manual_seed(seed)  # the same on each device
        self.dtype = self.of.choice(dtypes)
        self.num_src = self.of.choice([5, 17, 33, 48, 70])
        self.num_dst = self.of.choice([self.num_src] * 3 + [16, 31, 64])
        count = self.of.choice([1, 3, 6]) * self.num_src
        ends = [self._ends(size, count) for size in (self.num_src, self.num_dst)]
        self.edge_index = torch.tensor(ends, device=device)

    def _ends(self, num_nodes: int, count: int) -> list[int]:
        # of a third of the graphs half are one node's
        hub = 0.5 if self.of.random() < 0.3 else 0.0
        return [0 if self.of.random() < hub else self.of.randrange(num_nodes) for _ in range(count)]

    def windows(self) -> RowWindows:
        size = (self.num_src, self.num_dst)
        return RowWindows.from_edge_index(self.edge_index, size, reorder=self.of.choice(ORDERS))

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.numbers).to(self.device)
        return (drawn * self.of.choice([0.3, 1.0, 1.0, 3.0])).to(dtype or self.dtype).requires_grad_()

    def factors(self, length: int) -> Tensor:
        drawn = torch.rand(length, generator=self.numbers).to(self.device)
        return (drawn + 0.1) * self.of.choice([0.01, 1.0, 10.0])

    def maybe(self, likely: float = 0.4) -> bool:
        return self.of.random() < likely

    def dropout(self, loops: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"self_loops": True} if loops and self.maybe() else {}
        if self.maybe(0.3):
            seed = torch.tensor([self.of.randrange(1 << 40)], device=self.device)
            options |= {"dropout": self.of.choice([0.1, 0.5]), "seed": seed}
        return options


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor], dict[str, Any]]


def aggregation(draw: Draw, gemm: bool) -> Case:
    dim = draw.of.choice([1, 3, 8, 16, 33, 64])
    given = {"x": draw.tensor(draw.num_src, dim)}
    options: dict[str, Any] = {}
    if draw.maybe():
        given["edge_weight"] = draw.tensor(draw.edge_index.size(1))
    if draw.maybe():
        options["row_scale"] = draw.factors(draw.num_dst)
    if draw.maybe():
        options["col_scale"] = draw.factors(draw.num_src)
    if draw.num_src >= draw.num_dst and draw.maybe():
        given["loop_weight"] = draw.tensor(draw.num_dst, dtype=torch.float32)
    if gemm:
        given["weight"] = draw.tensor(draw.of.choice([1, 4, 16, 40]), dim)
        if draw.maybe():
            given["bias"] = draw.tensor(given["weight"].size(0))
    if draw.maybe():
        options["activation"] = "relu"
    op, definition = (ops.spmm_gemm, reference.spmm_gemm) if gemm else (ops.spmm, reference.spmm)
    return op, functools.partial(definition, num_dst=draw.num_dst), given, options


def attention(draw: Draw) -> Case:
    heads, dim = draw.of.choice(HEADS)
    sizes = {"q": draw.num_dst, "k": draw.num_src, "v": draw.num_src}
    given = {name: draw.tensor(size, heads, dim) for name, size in sizes.items()}
    options = draw.dropout(loops=False)
    if draw.maybe(0.3):
        options["scale"] = draw.of.choice([-0.5, 0.1])
    return ops.sparse_attention, reference.sparse_attention, given, options


def gat(draw: Draw) -> Case:
    heads, dim = draw.of.choice(HEADS)
    sizes = {"a_src": (draw.num_src, heads), "a_dst": (draw.num_dst, heads), "x": (draw.num_src, heads, dim)}
    given = {name: draw.tensor(*size) for name, size in sizes.items()}
    options = draw.dropout(loops=True) | {"negative_slope": draw.of.choice([0.2, 0.2, 0.0, 1.5, -0.3])}
    return ops.gat_attention, reference.gat_attention, given, options


def gatv2(draw: Draw) -> Case:
    heads, dim = draw.of.choice(HEADS)
    given = {
        "x_src": draw.tensor(draw.num_src, heads, dim),
        "x_dst": draw.tensor(draw.num_dst, heads, dim),
        "att": (draw.tensor(heads, dim).detach() * dim**-0.5).requires_grad_(),
    }
    options = draw.dropout(loops=True) | {"negative_slope": draw.of.choice([0.2, 0.0, 0.9])}
    return ops.gatv2_attention, reference.gatv2_attention, given, options


OPS: dict[str, Callable[[Draw], Case]] = {
    "spmm": functools.partial(aggregation, gemm=False),
    "spmm_gemm": functools.partial(aggregation, gemm=True),
    "attention": attention,
    "gat": gat,
    "gatv2": gatv2,
}


# GATv2 has rows alone
WALKS = [(name, walk) for name in OPS for walk in ("windows", "rows") if (name, walk) != ("gatv2", "windows")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "walked"), WALKS, indirect=["walked"])
def test_options_together(
    name: str, seed: int, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = name in ("spmm", "spmm_gemm")  # windows of the others take half precision alone
    draw = Draw(1000 * list(OPS).index(name) + seed, DTYPES if sums or walked == "rows" else HALVES, device)
    if draw.maybe(0.6):
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)  # long windows are cut
    op, definition, given, options = OPS[name](draw)
    op = functools.partial(op, windows=draw.windows(), **options)
    check(op, functools.partial(definition, draw.edge_index, **options), given)
