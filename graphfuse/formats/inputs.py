"""The graph inputs PyG accepts, reduced to one ``[2, num_edges]`` tensor and its sizes."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LIMIT = 2**31 - 1  # columns, offsets and edge numbers are int32

Size = tuple[int | None, int | None]


def as_edge_index(graph: Any, size: Size | None) -> tuple[Tensor, int, int]:
    """``(edge_index, num_src, num_dst)`` of any supported ``graph``, checked on the host only.

    Sparse matrices are the transposed adjacency, rows are receivers, as in PyG; their values are ignored
    and their edges are numbered in the matrix's own order (row by row for CSR and ``SparseTensor``).
    """
    if size is not None and (not isinstance(size, Sized) or len(size) != 2):
        raise ValueError(f"`size` must be (num_src, num_dst) (got {size})")
    if isinstance(graph, EdgeIndex):
        own = graph.sparse_size()
        size = own if size is None else size
        check_own_size(own, size)
        graph = graph.as_tensor()
    elif isinstance(graph, Tensor) and graph.layout != torch.strided:
        size = (graph.size(1), graph.size(0)) if size is None else size
        graph = _sparse_indices(graph)
    elif not isinstance(graph, Tensor) and hasattr(graph, "coo") and hasattr(graph, "sparse_sizes"):
        size = tuple(reversed(graph.sparse_sizes())) if size is None else size  # torch_sparse.SparseTensor
        row, col, _ = graph.coo()
        graph = torch.stack([col, row])
    check_edge_index(graph)
    num_src, num_dst = (None, None) if size is None else size
    if num_src is None or num_dst is None:
        # as PyG: without sizes the graph is square and ends at its largest index
        known = num_dst if num_src is None else num_src
        inferred = known if known is not None else (int(graph.max()) + 1 if graph.numel() > 0 else 0)
        num_src = inferred if num_src is None else num_src
        num_dst = inferred if num_dst is None else num_dst
    return graph, num_src, num_dst


def plain(edge_index: Tensor) -> Tensor:
    """What an ``EdgeIndex`` wraps; another tensor itself."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def check_own_size(own: Size, size: Size) -> None:
    """Raises when what an ``EdgeIndex`` says of its size is not ``size``; PyG raises there too."""
    if any(None not in pair and pair[0] != pair[1] for pair in zip(own, size, strict=False)):
        raise ValueError(
            f"`edge_index` is an EdgeIndex of size {own}, wanted {size}, that of the features; give it the "
            "right sparse_size or pass edge_index.as_tensor()"
        )


def check_edge_index(edge_index: Tensor) -> None:
    """Raises ValueError when it is no tensor, or, in PyG's words, when dtype, rank or shape is wrong."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            "`edge_index` must be an integer tensor of shape [2, num_edges], an EdgeIndex, a sparse tensor "
            f"or a SparseTensor (got {type(edge_index).__name__})"
        )
    if edge_index.dtype not in INTEGERS:
        raise ValueError(f"Expected 'edge_index' to be of integer type (got '{edge_index.dtype}')")
    if edge_index.dim() != 2:
        raise ValueError(f"Expected 'edge_index' to be two-dimensional (got {edge_index.dim()} dimensions)")
    if edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' to have size '2' in the first dimension (got '{edge_index.size(0)}')"
        )
    if edge_index.is_meta:
        raise ValueError(
            "`edge_index` must hold indices (got a tensor on meta); move it where the features are"
        )


def check_sizes(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raises when a size or the number of edges does not fit int32 offsets."""
    for name, count in (("num_src", num_src), ("num_dst", num_dst), ("num_edges", edge_index.size(1))):
        try:
            operator.index(count)
        except TypeError:
            raise ValueError(f"`{name}` must be an integer (got {count!r})") from None
        if not 0 <= count <= LIMIT:
            raise ValueError(
                f"`{name}` must lie in [0, {LIMIT}] (got {count}); split the graph, for example with "
                "torch_geometric.loader.ClusterLoader"
            )


def check_indices(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raises PyG's IndexError when an index is out of range; one synchronisation."""
    if edge_index.size(1) == 0:
        return
    low, high = torch.aminmax(edge_index, dim=1)
    (low_src, low_dst), (high_src, high_dst) = torch.stack([low, high]).tolist()
    for lowest, highest, num_nodes in ((low_src, high_src, num_src), (low_dst, high_dst, num_dst)):
        if lowest < 0:
            raise IndexError(
                f"Found negative indices in 'edge_index' (got {lowest}). Please ensure that all indices in "
                f"'edge_index' point to valid indices in the interval [0, {num_nodes}) in your node feature "
                "matrix and try again."
            )
        if highest >= num_nodes:
            raise IndexError(
                f"Found indices in 'edge_index' that are larger than {num_nodes - 1} (got {highest}). Please "
                f"ensure that all indices in 'edge_index' point to valid indices in the interval "
                f"[0, {num_nodes}) in your node feature matrix and try again."
            )


def index_parts(matrix: Tensor) -> tuple[Tensor, ...]:
    """The tensors that say where the values of a sparse matrix stand; writes to it change their versions."""
    if matrix.layout == torch.sparse_coo:
        return (matrix._indices(),)
    if matrix.layout == torch.sparse_csr:
        return matrix.crow_indices(), matrix.col_indices()
    if matrix.layout == torch.sparse_csc:
        return matrix.ccol_indices(), matrix.row_indices()
    raise ValueError(f"`edge_index` has layout {matrix.layout}, wanted strided, sparse COO, CSR or CSC")


def _sparse_indices(adj_t: Tensor) -> Tensor:
    if adj_t.dim() != 2:
        raise ValueError(f"`edge_index` must be a sparse matrix (got {adj_t.dim()} dimensions)")
    parts = index_parts(adj_t)
    if adj_t.layout == torch.sparse_coo:
        row, col = parts[0]
    else:
        starts, inner = parts
        outer = torch.repeat_interleave(torch.diff(starts))
        row, col = (outer, inner) if adj_t.layout == torch.sparse_csr else (inner, outer)
    return torch.stack([col, row])
