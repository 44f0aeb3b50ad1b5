"""Every graph input PyG takes, and PyG's words when it is wrong."""

from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

from graphfuse import RowWindows
from graphfuse.testing import GRAPHS


def by_edge(record: RowWindows) -> list[tuple[int, ...]]:
    return sorted(map(tuple, record.to_edge_index().t().tolist()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integer_dtypes(dtype: torch.dtype) -> None:
    edge_index, size = GRAPHS["repeated"]()
    record = RowWindows.from_edge_index(edge_index.to(dtype), size)
    wanted = RowWindows.from_edge_index(edge_index, size)
    assert torch.equal(record.packed_windows, wanted.packed_windows)
    assert record.fingerprint == wanted.fingerprint


@pytest.mark.parametrize("sort", [None, "row", "col"])
def test_edge_index(sort: str | None) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"]()
    wrapped = EdgeIndex(edge_index, sparse_size=(num_src, num_dst))
    if sort is not None:
        wrapped = wrapped.sort_by(sort).values
    record = RowWindows.from_edge_index(wrapped)
    assert record.shape == (num_dst, num_src) and record.matches(wrapped)
    assert by_edge(record) == sorted(map(tuple, edge_index.t().tolist()))


@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor, to_torch_csc_tensor])
def test_sparse_tensors_are_the_transposed_adjacency(convert) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["ragged"]()
    adj_t = convert(edge_index.flip(0), size=(num_dst, num_src))
    record = RowWindows.from_edge_index(adj_t)
    assert record.shape == (num_dst, num_src)
    assert by_edge(record) == sorted(map(tuple, edge_index.t().tolist()))


def test_torch_sparse_tensor_if_installed() -> None:
    torch_sparse = pytest.importorskip("torch_sparse")
    edge_index, (num_src, num_dst) = GRAPHS["ragged"]()
    adj_t = torch_sparse.SparseTensor.from_edge_index(edge_index.flip(0), sparse_sizes=(num_dst, num_src))
    assert by_edge(RowWindows.from_edge_index(adj_t)) == sorted(map(tuple, edge_index.t().tolist()))


def test_size_is_inferred_as_in_pyg() -> None:
    edge_index = torch.tensor([[0, 7], [3, 2]])
    assert RowWindows.from_edge_index(edge_index).shape == (8, 8)
    assert RowWindows.from_edge_index(edge_index, (8, None)).shape == (8, 8)
    assert RowWindows.from_edge_index(edge_index, (9, 4)).shape == (4, 9)
    assert RowWindows.from_edge_index(torch.empty(2, 0, dtype=torch.int64)).shape == (0, 0)


@pytest.mark.parametrize("bad", [-1, 5])
def test_out_of_range_is_pygs_index_error(bad: int, device: torch.device) -> None:
    edge_index = torch.tensor([[0, bad], [1, 2]])
    conv = GCNConv(2, 2, add_self_loops=False, normalize=False)
    with pytest.raises(IndexError) as pyg:
        conv(torch.ones(5, 2), edge_index)
    with pytest.raises(IndexError) as ours:
        RowWindows.from_edge_index(edge_index.to(device), (5, 5))
    assert str(ours.value) == str(pyg.value)
    torch.ones(1, device=device).add_(1)  # the device is still usable


@pytest.mark.parametrize("bad", [-1, 4])
def test_out_of_range_receivers(bad: int) -> None:
    with pytest.raises(IndexError, match=r"interval \[0, 4\)"):
        RowWindows.from_edge_index(torch.tensor([[0, 1], [1, bad]]), (9, 4))


@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (torch.zeros(2, 3), "integer type .got 'torch.float32'"),
        (torch.zeros(6, dtype=torch.int64), "two-dimensional .got 1 dimensions"),
        (torch.zeros(3, 3, dtype=torch.int64), "have size '2' in the first dimension .got '3'"),
        ("edges", "must be an integer tensor .* .got str"),
        (None, "must be an integer tensor"),
    ],
)
def test_wrong_inputs(edge_index: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowWindows.from_edge_index(edge_index)


@pytest.mark.parametrize("size", [5, (5,), (5, 5, 5)])
def test_wrong_sizes(size: object) -> None:
    edge_index = torch.tensor([[0, 1], [1, 2]])
    for graph in (edge_index, EdgeIndex(edge_index, sparse_size=(5, 5))):
        with pytest.raises(ValueError, match=r"`size` must be \(num_src, num_dst\) \(got "):
            RowWindows.from_edge_index(graph, size)


def test_sizes_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`num_src` must lie in \[0, 2147483647\]"):
        RowWindows.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), (2**31, 5))
