"""What holds for every graph: random ones, found and made small by hypothesis.

``HYPOTHESIS_PROFILE`` chooses how many: ``ci``, about 1,100 that are always the same, or ``nightly``, 10,000
others, which the properties share as they share those. On a GPU run those that need no float64.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from graphfuse.testing import assert_close

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
PATHS = ("kernels", "definitions")
LAWS = ("even", "skewed", "hub", "repeated", "isolated", "loops", "both ways")
HALF = (torch.float16, torch.bfloat16)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
in_float64 = pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter computes float64")

_SLOW = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large)}
settings.register_profile("ci", derandomize=True, database=None, **_SLOW)
settings.register_profile("nightly", print_blob=True, **_SLOW)


def examples(count: int) -> settings:
    """``count`` under the profile ``ci``, and nine times as many under ``nightly``."""
    return settings(max_examples=count if PROFILE == "ci" else 9 * count)


class Graph(NamedTuple):
    """Edges, and how many nodes they may name."""

    edge_index: Tensor
    num_src: int
    num_dst: int

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def size(self) -> tuple[int, int]:
        return self.num_src, self.num_dst

    def distinct(self) -> Graph:
        """Each edge once, in an order of its own."""
        once = torch.unique(self.edge_index, dim=1)
        return self._replace(edge_index=once.roll(1, 1) if once.size(1) else once)

    def in_order(self, order: Tensor) -> Graph:
        """The edges in another order."""
        return self._replace(edge_index=self.edge_index[:, order])

    def dense(self) -> Tensor:
        """How often each edge is there, ``int64[num_dst, num_src]``."""
        src, dst = self.edge_index.long()
        flat = torch.bincount(dst * max(self.num_src, 1) + src, minlength=self.num_dst * self.num_src)
        return flat.view(self.num_dst, self.num_src)


@st.composite
def graphs(draw: st.DrawFn, nodes: int = 12, edges: int = 24, square: bool | None = None) -> Graph:
    """Graphs of up to ``nodes`` receivers and sources: no edges, a few of any, or many by one law."""
    num_dst = draw(st.integers(0, nodes))
    same = draw(st.booleans()) if square is None else square
    num_src = num_dst if same else draw(st.integers(0, nodes))
    if num_src == 0 or num_dst == 0:
        return Graph(torch.empty(2, 0, dtype=torch.int64, device=DEVICE), num_src, num_dst)
    if draw(st.booleans()):
        edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
        listed = draw(st.lists(edge, max_size=min(edges, 10)))
        edge_index = torch.tensor(listed, dtype=torch.int64).view(-1, 2).t().contiguous()
    else:
        edge_index = _by_law(draw, num_src, num_dst, draw(st.integers(1, edges)))
    return Graph(edge_index.to(DEVICE), num_src, num_dst)


def _by_law(draw: st.DrawFn, num_src: int, num_dst: int, count: int) -> Tensor:
    law, generator = draw(st.sampled_from(LAWS)), generator_of(draw(seeds))
    unit = torch.rand(2, count, generator=generator)
    if law == "skewed":
        unit = unit**3
    elif law == "isolated":
        unit = unit / 3
    sizes = torch.tensor([[num_src], [num_dst]])
    edge_index = (unit * sizes).long()
    if law == "hub":
        edge_index[draw(st.integers(0, 1))] = 0
    elif law == "repeated":
        edge_index = edge_index[:, torch.randint(min(count, 3), (count,), generator=generator)]
    elif law == "loops":
        edge_index[0, ::2] = edge_index[1, ::2] = edge_index[0, ::2] % min(num_src, num_dst)
    elif law == "both ways" and num_src == num_dst:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)[:, : 2 * (count // 2)]
    return edge_index


seeds = st.integers(0, 2**31)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def permutation(length: int, seed: int) -> Tensor:
    return torch.randperm(length, generator=generator_of(seed)).to(DEVICE)


class Numbers:
    """Tensors of random numbers, contiguous or with strides, that want gradients."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, strided: bool = False) -> None:
        self.generator, self.dtype, self.strided = generator_of(seed), dtype, strided

    def __call__(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)
        if self.strided and len(shape) > 1:
            # columns of something wider, and rows of something longer
            wide = numbers.new_full((2 * shape[0], *shape[1:-1], shape[-1] + 3), float("nan"))
            wide[::2, ..., 1:-2] = numbers
            numbers = wide[::2, ..., 1:-2]
        return numbers.detach().requires_grad_()


@contextlib.contextmanager
def on(path: str, slices: bool = False) -> Iterator[None]:
    """Runs ops by their kernels or by their definitions, and cuts windows of more than 32 entries."""
    with contextlib.ExitStack() as stack:
        if path == "definitions":
            stack.enter_context(mock.patch("graphfuse.ops._check.runs_kernel", lambda *given: False))
        if slices:
            stack.enter_context(mock.patch("graphfuse.formats.build._MIN_SLICE", 32))
        yield


@contextlib.contextmanager
def walking(rows: bool) -> Iterator[None]:
    """Forces the kernels that walk rows, or windows where there are such."""

    def on_rows(*sizes: Any) -> bool:
        return rows or sizes[-1] not in HALF  # attention's windows are of half precision

    with contextlib.ExitStack() as stack:
        for prefers, choose in (
            ("prefers_rows", lambda *sizes: rows),
            ("attention_prefers_rows", on_rows),
            ("gat_prefers_rows", on_rows),
        ):
            stack.enter_context(mock.patch(f"graphfuse.kernels.launch.{prefers}", choose))
        yield


def with_gradients(
    function: Callable[..., Any], inputs: dict[str, Tensor], seed: int = 0
) -> dict[str, Tensor]:
    """The results of ``function``, and the gradients of its inputs for random cotangents."""
    results = function(**inputs)
    results = results if isinstance(results, tuple) else (results,)
    generator = generator_of(seed)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in results]
    wanted = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    grads = torch.autograd.grad(results, list(wanted.values()), cotangents, materialize_grads=True)
    found = {f"out{place}": result.detach() for place, result in enumerate(results)}
    return found | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=False, msg=name)


def assert_same_numbers(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """In float64, but for rounding (of factors such as a slope, to float32): any other error is larger."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == torch.float64
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


class Pool:
    """Results of all examples of a test as one comparison: how far few numbers are rounded is luck.

    One example of large numbers may still decide, so the factors are twice those of the rule.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[str, torch.dtype], list[tuple[Tensor, ...]]] = {}

    def add(self, ours: dict[str, Tensor], rounded: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        assert ours.keys() == rounded.keys() == exact.keys()
        for name, values in ours.items():
            assert values.shape == exact[name].shape and values.dtype == rounded[name].dtype, name
            triple = (values.flatten(), rounded[name].flatten(), exact[name].flatten())
            self.parts.setdefault((name, values.dtype), []).append(triple)

    def check(self) -> None:
        for (name, _), parts in self.parts.items():
            factor = 6.0 if name.startswith("d") else 4.0
            assert_close(name, *map(torch.cat, zip(*parts, strict=True)), factor=factor)
