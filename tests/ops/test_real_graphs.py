"""Aggregation on real and on large graphs: as exact as PyG, forward and backward, and bitwise repeatable."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import Tensor
from torch_geometric.datasets import GitHub
from torch_geometric.nn import SimpleConv

from graphfuse import RowWindows, ops
from graphfuse.testing import assert_close

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def from_csr(path: Path) -> tuple[Tensor, int]:
    with np.load(path) as arrays:
        indptr, indices = (torch.from_numpy(arrays[name]).long() for name in ("indptr", "indices"))
    row = torch.repeat_interleave(torch.diff(indptr))
    return torch.stack([row, indices]), indptr.numel() - 1


def uniform(num_nodes: int, num_pairs: int) -> tuple[Tensor, int]:
    """Random pairs, both ways."""
    pairs = torch.randint(num_nodes, (2, num_pairs), generator=torch.Generator().manual_seed(0))
    return torch.cat([pairs, pairs.flip(0)], 1), num_nodes


@functools.lru_cache(maxsize=1)
def graph(name: str, root: Path | None) -> tuple[Tensor, RowWindows]:
    if name == "hubs":  # rows of 30,000 edges: what a sum loses with every addition shows
        hubs, leaves = torch.randint(64, (2_000_000,)), torch.randint(64, 100_000, (2_000_000,))
        edges = torch.stack([hubs, leaves])
        edge_index, num_nodes = torch.cat([edges, edges.flip(0)], 1), 100_000
    elif name == "uniform-1m-12m":
        edge_index, num_nodes = uniform(1_000_000, 6_050_000)
    elif name == "musae-github":
        assert root is not None
        with FileLock(root / f"{name}.lock"):  # PyG writes what another worker would read
            edge_index, num_nodes = GitHub(str(root / name))[0].edge_index, 37_700
    else:
        assert root is not None
        edge_index, num_nodes = from_csr(root / "csr" / f"{name}.npz")
    edge_index = edge_index.cuda()
    return edge_index, RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes))


def some_rows(receivers: Tensor, num_rows: int) -> Tensor:
    """4,096 random rows and the 16 with most edges."""
    generator = torch.Generator(receivers.device).manual_seed(1)
    longest = torch.bincount(receivers, minlength=num_rows).topk(16).indices
    drawn = torch.randperm(num_rows, device=receivers.device, generator=generator)[:4096]
    return torch.cat([longest, drawn]).unique()


def exact_rows(edge_index: Tensor, rows: Tensor, num_rows: int, x: Tensor) -> Tensor:
    """Sums over the in-neighbours of ``rows``, in float64."""
    place = torch.full((num_rows,), -1, device=x.device)
    place[rows] = torch.arange(rows.numel(), device=x.device)
    src, at = edge_index[0], place[edge_index[1]]
    out = torch.zeros(rows.numel(), x.size(1), dtype=torch.float64, device=x.device)
    return out.index_add_(0, at[at >= 0], x[src[at >= 0]].double())


def compare_with_pyg(
    edge_index: Tensor, windows: RowWindows, dtype: torch.dtype, dim: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """``(name, ours, PyG's, float64)`` on some rows, for the output and the gradient."""
    num_nodes = windows.shape[0]
    x = torch.randn(num_nodes, dim, device="cuda").to(dtype).requires_grad_()
    cotangent = torch.randn(num_nodes, dim, device="cuda").to(dtype)
    ours = ops.spmm(windows, x)
    (our_grad,) = torch.autograd.grad(ours, x, cotangent)
    theirs = SimpleConv(aggr="sum")(x, edge_index)
    (their_grad,) = torch.autograd.grad(theirs, x, cotangent)
    rows, columns = some_rows(edge_index[1], num_nodes), some_rows(edge_index[0], num_nodes)
    yield "out", ours[rows], theirs[rows], exact_rows(edge_index, rows, num_nodes, x.detach())
    exact = exact_rows(edge_index.flip(0), columns, num_nodes, cotangent)
    yield "dx", our_grad[columns], their_grad[columns], exact


def check(name: str, root: Path | None, dtype: torch.dtype, dim: int) -> None:
    edge_index, windows = graph(name, root)
    for part, actual, rounded, exact in compare_with_pyg(edge_index, windows, dtype, dim):
        assert_close(part, actual, rounded, exact)


@pytest.mark.data
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["musae-github", "ego-twitter", "dblp-2010"])  # last: one is held at a time
def test_as_exact_as_pyg(name: str, dim: int, dtype: torch.dtype, data_root: Path) -> None:
    check(name, data_root, dtype, dim)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["uniform-1m-12m", "hubs"])
def test_as_exact_as_pyg_on_generated_graphs(name: str, dim: int, dtype: torch.dtype) -> None:
    check(name, None, dtype, dim)


def check_repeats(edge_index: Tensor, windows: RowWindows, dtype: torch.dtype, dim: int) -> None:
    torch.use_deterministic_algorithms(False)  # the promise is for everybody
    num_nodes = windows.shape[0]
    x = torch.randn(num_nodes, dim, device="cuda").to(dtype).requires_grad_()
    edge_weight = torch.randn(windows.num_edges, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(32, dim, device="cuda").to(dtype).requires_grad_()
    first: list[Tensor] = []
    for run in range(50):
        weighted, fused = ops.spmm(windows, x, edge_weight), ops.spmm_gemm(windows, x, weight)
        plain = ops.spmm(windows, x)
        sums = (plain.float().mul(1e-2).sum() + weighted.float().sum()) + fused.float().square().sum() * 1e-4
        found = [plain, weighted, fused, *torch.autograd.grad(sums, [x, edge_weight, weight])]
        first = first or found
        for one, other in zip(first, found, strict=True):
            assert torch.equal(one, other), f"run {run} differs"


@pytest.mark.data
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["musae-github", "dblp-2010"])
def test_bitwise_repeatable(name: str, dim: int, dtype: torch.dtype, data_root: Path) -> None:
    check_repeats(*graph(name, data_root), dtype, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitwise_repeatable_on_a_million_nodes(dtype: torch.dtype) -> None:
    check_repeats(*graph("uniform-1m-12m", None), dtype, 64)


@pytest.mark.usefixtures("tens_of_gib")
def test_offsets_beyond_32_bits() -> None:
    """num_nodes * dim > 2^31: the last rows read and write the right place."""
    num_nodes, dim = 4_300_000, 512
    last = torch.arange(num_nodes - 1000, num_nodes, device="cuda")
    edge_index = torch.stack([last, last.flip(0)])
    windows = RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes))
    x = torch.zeros(num_nodes, dim, dtype=torch.float16, device="cuda")
    x[-1000:] = torch.randn(1000, dim, device="cuda")
    out = ops.spmm(windows, x)
    assert torch.equal(out[-1000:], x[-1000:].flip(0))
    assert not out[:-1000].any()
