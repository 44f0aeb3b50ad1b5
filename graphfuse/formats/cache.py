"""Row windows for the edge_index a user passes: found if they exist, built if not, never stale.

Two ways lead to a record that exists: the identity of the tensor object (with its version, address, shape,
dtype, device and the sizes), and, as ``data.to(device)`` makes a new tensor, the fingerprint of a live
record. Records are held weakly by their edge_index: they die with it.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from graphfuse.formats import inputs
from graphfuse.formats.by_tensor import ByTensor
from graphfuse.formats.environment import is_on
from graphfuse.formats.late import LateWindows
from graphfuse.formats.row_windows import RowWindows
from graphfuse.formats.structure import Structure, find_live

Sizes = tuple[int, int]  # num_src, num_dst


class _Known(NamedTuple):
    """The records of an ``edge_index``; they hold as long as it is in this state."""

    state: Any
    records: dict[Sizes, RowWindows]


_KNOWN: ByTensor[_Known] = ByTensor()
_PINNED: list[Any] = []
_LOCK = threading.RLock()


def row_windows(edge_index: Tensor | RowWindows, num_src: int, num_dst: int) -> RowWindows:
    """The record of ``edge_index`` for the given sizes; a :class:`RowWindows` is checked and returned.

    The second call with one tensor object costs a dictionary look-up. The record is rebuilt after an
    in-place edit, and for other sizes. Writes that PyTorch does not count (through ``.data`` or NumPy) are
    seen only with ``GRAPHFUSE_CHECK=1``, which hashes ``edge_index`` on every call; PyTorch counts no writes
    to an inference tensor, so that one is always hashed. No hash is taken during CUDA graph capture. Code
    that is being traced gets :class:`LateWindows`, which the ops resolve through this function when they run.

    Raises:
        ValueError: a record of another shape was passed.
        RuntimeError: no record exists during CUDA graph capture, where none can be built.
    """
    if isinstance(edge_index, RowWindows):
        if edge_index.shape != (num_dst, num_src):
            raise ValueError(
                f"`edge_index` must be row windows of shape {(num_dst, num_src)} (got {edge_index.shape}); "
                "build them from this graph's edge_index"
            )
        return edge_index if torch.compiler.is_compiling() else pin_if_capturing(edge_index)
    if torch.compiler.is_compiling():
        return LateWindows(edge_index, num_src, num_dst)
    state, sizes = _state(edge_index), (num_src, num_dst)
    known = _KNOWN.get(edge_index)
    if known is not None and known.state == state and not _must_hash(edge_index, state):
        found = known.records.get(sizes)
        if found is not None:
            return pin_if_capturing(found)
    with _LOCK:
        records = _records(edge_index, state)
        found = records.get(sizes)
        if found is None or (_must_hash(edge_index, state) and not found.matches(edge_index)):
            found = _find_or_build(edge_index, num_src, num_dst)
            _keep(edge_index, state, records | {sizes: found})
    return pin_if_capturing(found)


def matrix_windows(matrix: Tensor) -> RowWindows | None:
    """The record of the entries of a ``torch.sparse`` matrix (COO, CSR or CSC), the rows its receivers.

    Edges are numbered as the matrix's values are. Found and kept as by :func:`row_windows`. PyTorch counts
    writes to indices and values together, so after either the indices are hashed. During CUDA graph capture
    there is None where a record would have to be built or hashed.
    """
    state, sizes = [_state(part) for part in inputs.index_parts(matrix)], (matrix.size(1), matrix.size(0))
    with _LOCK:
        known = _KNOWN.get(matrix)
        found = None if known is None else known.records.get(sizes)
        same = known is not None and known.state == state
        if found is not None and same and not any(_must_hash(matrix, part) for part in state):
            return pin_if_capturing(found)
        if _is_capturing(matrix):
            return None
        if found is None or not found.matches(inputs.as_edge_index(matrix, None)[0]):
            found = RowWindows.from_edge_index(matrix)
        _keep(matrix, state, {sizes: found})
    return found


def remember(edge_index: Tensor, record: RowWindows) -> None:
    """Makes ``record`` what :func:`row_windows` returns for ``edge_index`` and the record's sizes."""
    num_dst, num_src = record.shape
    state = _state(edge_index)
    with _LOCK:
        _keep(edge_index, state, _records(edge_index, state) | {(num_src, num_dst): record})


def clear_cache() -> None:
    """Forgets every record that was found or built for an edge_index, those pinned by captures included.

    A CUDA graph that replays a forgotten record reads freed memory: drop such graphs first.
    """
    with _LOCK:
        _KNOWN.clear()
        _PINNED.clear()


def pin_if_capturing(record: RowWindows) -> RowWindows:
    """Keeps ``record`` alive for good if a CUDA graph is being captured: replay outlives a weak entry."""
    if record.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with _LOCK:
            _PINNED.append(record)
    return record


def _records(edge_index: Tensor, state: Any) -> dict[Sizes, RowWindows]:
    """What was built from ``edge_index`` as it is; nothing if it was edited in place since."""
    known = _KNOWN.get(edge_index)
    return {} if known is None or known.state != state else known.records


def _keep(edge_index: Tensor, state: Any, records: dict[Sizes, RowWindows]) -> None:
    _KNOWN[edge_index] = _Known(state, records)


def _state(edge_index: Tensor) -> Any:
    """What changes when ``edge_index`` does."""
    plain = inputs.plain(edge_index)
    versions: Any = None if plain.is_inference() else plain._version
    if plain is not edge_index and versions is not None:
        # of an EdgeIndex the wrapper and what it wraps, as each counts only the writes made through it
        versions = None if edge_index.is_inference() else (edge_index._version, versions)
    return versions, plain.data_ptr(), plain.shape, plain.dtype, plain.device


def _find_or_build(edge_index: Tensor, num_src: int, num_dst: int) -> RowWindows:
    if _is_capturing(edge_index):
        raise RuntimeError(
            "CUDA graph capture met an `edge_index` without row windows, and building them synchronises; "
            "call graphfuse.warmup(model, data) before the capture, or pass RowWindows in place of "
            "`edge_index`"
        )
    plain = inputs.plain(edge_index)
    if isinstance(edge_index, EdgeIndex):
        inputs.check_own_size(edge_index.sparse_size(), (num_src, num_dst))
    inputs.check_edge_index(plain)
    live = find_live(plain, num_src, num_dst)
    if live is None:
        return RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    # all but the edge list is shared: that of `live` may be edited later, or lie on another device
    found = Structure(live.windows, live.fingerprint, plain.detach())
    for name, tensor in live.packed().items():
        setattr(found, name, tensor)
    found.memo, found.lock = live.memo, live.lock
    return RowWindows(found)


def _must_hash(edge_index: Tensor, state: Any) -> bool:
    """Whether only a hash, which synchronises, tells if ``edge_index`` was written to."""
    return (state[0] is None or is_on("GRAPHFUSE_CHECK")) and not _is_capturing(edge_index)


def _is_capturing(edge_index: Tensor) -> bool:
    return edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
