"""Attention on real and on large graphs: as exact as PyG's formula, and bitwise repeatable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import scatter, softmax

from graphfuse import RowWindows, ops, reference
from graphfuse.reference.attention import kept
from graphfuse.testing import GRAPHS, assert_close, check
from tests.ops.test_real_graphs import DTYPES, graph, some_rows

SHAPES = [(1, 64), (1, 128), (4, 32), (8, 16)]
CHUNK = 1 << 20  # edges whose rows are held in float64 at a time


def pyg_attention(
    edge_index: Tensor, q: Tensor, k: Tensor, v: Tensor, dropout: float, keep: Tensor | None
) -> Tensor:
    """TransformerConv's message and aggregation, with the weights that ``keep`` drops."""
    src, dst = edge_index
    q_i, k_j, v_j = q.index_select(0, dst), k.index_select(0, src), v.index_select(0, src)
    alpha = softmax((q_i * k_j).sum(-1) * q.size(2) ** -0.5, dst, num_nodes=q.size(0))
    if keep is not None:
        alpha = alpha * keep.to(alpha.dtype) / (1 - dropout)
    return scatter(v_j * alpha[:, :, None], dst, dim=0, dim_size=q.size(0), reduce="sum")


def exact_attention(
    edge_index: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    dropout: float,
    keep: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    chunk: int = CHUNK,
) -> dict[str, Tensor]:
    """Output and gradients in float64 on ``rows`` (of out and dq) and ``columns`` (of dk and dv).

    Of all edges only numbers per head are held, of ``chunk`` edges rows as wide as a head's.
    """
    src, dst = edge_index
    q, k, v, grad = tensors
    scale = q.size(2) ** -0.5
    score = _products(q, dst, k, src, chunk) * scale
    index = dst[:, None].expand_as(score)
    shape = q.shape[:2]
    top = score.new_full(shape, float("-inf")).scatter_reduce_(0, index, score, "amax")
    weight = (score - top[dst]).exp_()
    weight /= weight.new_zeros(shape).index_add_(0, dst, weight)[dst]
    factor = torch.ones_like(weight) if keep is None else keep.double() / (1 - dropout)
    slope = _products(grad, dst, v, src, chunk) * factor
    delta = weight.new_zeros(shape).index_add_(0, dst, weight * slope)
    slope = weight * (slope - delta[dst]) * scale
    factor *= weight
    return {
        "out": _sums(rows, dst, q.size(0), factor, v, src, chunk),
        "dq": _sums(rows, dst, q.size(0), slope, k, src, chunk),
        "dk": _sums(columns, src, k.size(0), slope, q, dst, chunk),
        "dv": _sums(columns, src, k.size(0), factor, grad, dst, chunk),
    }


def _products(a: Tensor, a_rows: Tensor, b: Tensor, b_rows: Tensor, chunk: int) -> Tensor:
    """Scalar products of rows of ``a`` and ``b``, ``float64[num_edges, heads]``."""
    parts = zip(a_rows.split(chunk), b_rows.split(chunk), strict=True)
    return torch.cat([(a[one].double() * b[other].double()).sum(2) for one, other in parts])


def _sums(
    wanted: Tensor, owner: Tensor, num_rows: int, factor: Tensor, x: Tensor, x_rows: Tensor, chunk: int
) -> Tensor:
    """Sums of ``factor`` times rows of ``x`` over the edges of each of the ``wanted`` owners."""
    place = torch.full((num_rows,), -1, device=x.device)
    place[wanted] = torch.arange(wanted.numel(), device=x.device)
    out = x.new_zeros((wanted.numel(), *x.shape[1:]), dtype=torch.float64)
    at = place[owner]
    for edges in (at >= 0).nonzero()[:, 0].split(chunk):
        out.index_add_(0, at[edges], factor[edges][:, :, None] * x[x_rows[edges]].double())
    return out


def draw(num_nodes: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k and v, which require gradients, and the gradient of the output."""
    drawn = [torch.randn(num_nodes, *shape, device=device).to(dtype) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in drawn[:3]] + drawn[3:]


def compare_with_pyg(
    edge_index: Tensor, windows: RowWindows, dtype: torch.dtype, shape: tuple[int, int], dropout: float
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """``(name, ours, PyG's, float64)`` on some rows, for the output and the gradients."""
    num_nodes, device = windows.shape[0], edge_index.device
    *qkv, cotangent = draw(num_nodes, shape, dtype, device)
    seed = torch.tensor([(5 << 32) + 3], device=device)
    keep = kept(edge_index, shape[0], dropout, seed) if dropout > 0 else None
    rows, columns = some_rows(edge_index[1], num_nodes), some_rows(edge_index[0], num_nodes)
    where = {"out": rows, "dq": rows, "dk": columns, "dv": columns}

    def run(function: Callable[[], Tensor]) -> list[Tensor]:
        out = function()
        found = [out.detach(), *torch.autograd.grad(out, qkv, cotangent)]
        return [tensor[chosen] for tensor, chosen in zip(found, where.values(), strict=True)]

    ours = run(lambda: ops.sparse_attention(*qkv, windows, dropout=dropout, seed=seed))
    torch.use_deterministic_algorithms(False)  # PyG's sums would take an index for each element
    theirs = run(lambda: pyg_attention(edge_index, *qkv, dropout, keep))
    with torch.no_grad():
        exact = exact_attention(edge_index, (*qkv, cotangent), dropout, keep, rows, columns)
    for name, actual, rounded in zip(where, ours, theirs, strict=True):
        yield name, actual, rounded, exact[name]


def compare_on(
    name: str, root: Path | None, dtype: torch.dtype, shape: tuple[int, int], dropout: float = 0.0
) -> None:
    for part, actual, rounded, exact in compare_with_pyg(*graph(name, root), dtype, shape, dropout):
        assert_close(part, actual, rounded, exact)


@pytest.mark.gpu
@pytest.mark.data
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["musae-github", "ego-twitter", "dblp-2010"])  # last: one is held at a time
@pytest.mark.usefixtures("tens_of_gib")  # PyG in float64
def test_as_exact_as_pyg(name: str, dtype: torch.dtype, shape: tuple[int, int], data_root: Path) -> None:
    compare_on(name, data_root, dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["uniform-1m-12m", "hubs"])
@pytest.mark.usefixtures("tens_of_gib")
def test_as_exact_as_pyg_on_generated_graphs(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    compare_on(name, None, dtype, shape)


@pytest.mark.gpu
@pytest.mark.data
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_as_exact_as_pyg(dtype: torch.dtype, data_root: Path) -> None:
    compare_on("musae-github", data_root, dtype, (4, 32), dropout=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_as_exact_as_pyg_on_repeated_edges(dtype: torch.dtype) -> None:
    edge_index, _ = graph("hubs", None)
    assert torch.unique(edge_index, dim=1).size(1) < edge_index.size(1)
    compare_on("hubs", None, dtype, (4, 32), dropout=0.25)


def check_repeats(
    edge_index: Tensor, windows: RowWindows, dtype: torch.dtype, shape: tuple[int, int], dropout: float
) -> None:
    torch.use_deterministic_algorithms(False)  # the promise is for everybody
    *qkv, cotangent = draw(windows.shape[0], shape, dtype, edge_index.device)
    seed = torch.tensor([7], device=edge_index.device)
    first: list[Tensor] = []
    for run in range(50):
        out = ops.sparse_attention(*qkv, windows, dropout=dropout, seed=seed)
        found = [out, *torch.autograd.grad(out, qkv, cotangent)]
        first = first or found
        for name, one, other in zip(("out", "dq", "dk", "dv"), first, found, strict=True):
            assert torch.equal(one, other), f"{name} of run {run} differs"


@pytest.mark.gpu
@pytest.mark.data
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(1, 64), (4, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["musae-github", "dblp-2010"])
def test_bitwise_repeatable(
    name: str, dtype: torch.dtype, shape: tuple[int, int], dropout: float, data_root: Path
) -> None:
    check_repeats(*graph(name, data_root), dtype, shape, dropout)


def check_last_rows(device: str, dtype: torch.dtype, num_nodes: int, num_last: int, num_edges: int) -> None:
    """Attention among the last of ``num_nodes`` nodes, as among ``num_last``; all other rows are zero."""
    heads, dim, first = 4, 128, num_nodes - num_last
    edge_index = torch.randint(num_last, (2, num_edges), device=device)
    windows = RowWindows.from_edge_index(edge_index + first, (num_nodes, num_nodes))

    def zero_before(x: Tensor) -> None:
        assert not x[:first].any()

    def attend(**last: Tensor) -> Tensor:
        qkv = [F.pad(tensor, (0, 0, 0, 0, first, 0)) for tensor in last.values()]
        for tensor in qkv:
            tensor.register_hook(zero_before)
        out = ops.sparse_attention(*qkv, windows)
        zero_before(out)
        return out[first:]

    given = {
        name: torch.randn(num_last, heads, dim, device=device).to(dtype).requires_grad_() for name in "qkv"
    }
    check(attend, functools.partial(reference.sparse_attention, edge_index), given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # windows and rows
@pytest.mark.usefixtures("tens_of_gib")
def test_offsets_beyond_32_bits(dtype: torch.dtype) -> None:
    """num_nodes * heads * dim > 2^31: the last rows read and write the right place, backward too."""
    check_last_rows("cuda", dtype, 4_300_000, 1000, 20_000)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_float64_in_chunks_is_the_definition(dropout: float, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
    *qkv, cotangent = draw(num_nodes, (3, 5), torch.float64, device)
    seed = torch.tensor([3], device=device)
    keep = kept(edge_index, 3, dropout, seed) if dropout > 0 else None
    rows, columns = torch.tensor([1, 4, 7], device=device), torch.arange(3, 20, device=device)
    attend = functools.partial(reference.sparse_attention, edge_index, dropout=dropout, seed=seed)
    with torch.no_grad():
        found = exact_attention(edge_index, (*qkv, cotangent), dropout, keep, rows, columns, chunk=7)
    for function in (attend, lambda *given: pyg_attention(edge_index, *given, dropout, keep)):
        out = function(*qkv)
        dq, dk, dv = torch.autograd.grad(out, qkv, cotangent)
        wanted = {"out": out[rows], "dq": dq[rows], "dk": dk[columns], "dv": dv[columns]}
        torch.testing.assert_close(found, wanted)
