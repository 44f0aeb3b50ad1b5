"""Row windows for the edge_index a user passes: found if they exist, built if not, never stale.

Two ways lead to a record that exists: the identity of the tensor object (with its version, address, shape,
dtype, device and the sizes), and, as ``data.to(device)`` makes a new tensor, the fingerprint of a live
record. Records are held weakly by their edge_index: they die with it.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric import EdgeIndex

from graphfuse.formats import inputs
from graphfuse.formats.late import LateWindows
from graphfuse.formats.row_windows import RowWindows
from graphfuse.formats.structure import Structure, find_live

_BY_TENSOR: WeakIdKeyDictionary = WeakIdKeyDictionary()
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
    key = _key(edge_index, num_src, num_dst)
    with _LOCK:
        records = _BY_TENSOR.get(edge_index)
        if records is not None and records[0] == key[0]:
            found = records[1].get(key[1])
            if found is not None and (not _must_hash(edge_index, key) or found.matches(_plain(edge_index))):
                return pin_if_capturing(found)
        else:
            records = (key[0], {})  # edited in place since: what was built from the old edges goes
        record = _find_or_build(edge_index, num_src, num_dst)
        records[1][key[1]] = record
        _BY_TENSOR[edge_index] = records
    return pin_if_capturing(record)


def remember(edge_index: Tensor, record: RowWindows) -> None:
    """Makes ``record`` what :func:`row_windows` returns for ``edge_index`` and the record's sizes."""
    num_dst, num_src = record.shape
    version, sizes = _key(edge_index, num_src, num_dst)
    with _LOCK:
        known = _BY_TENSOR.get(edge_index)
        records = known[1] if known is not None and known[0] == version else {}
        records[sizes] = record
        _BY_TENSOR[edge_index] = (version, records)


def clear_cache() -> None:
    """Forgets every record that was found or built for an edge_index, those pinned by captures included.

    A CUDA graph that replays a forgotten record reads freed memory: drop such graphs first.
    """
    with _LOCK:
        _BY_TENSOR.clear()
        _PINNED.clear()


def pin_if_capturing(record: RowWindows) -> RowWindows:
    """Keeps ``record`` alive for good if a CUDA graph is being captured: replay outlives a weak entry."""
    if record.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with _LOCK:
            _PINNED.append(record)
    return record


def _key(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[Any, tuple[int, int]]:
    plain = _plain(edge_index)
    # of an EdgeIndex the wrapper and what it wraps, as each counts only the writes made through it
    counts = not (edge_index.is_inference() or plain.is_inference())
    versions = (edge_index._version, plain._version) if counts else None
    state = (versions, plain.data_ptr(), plain.shape, plain.dtype, plain.device)
    return state, (num_src, num_dst)


def _find_or_build(edge_index: Tensor, num_src: int, num_dst: int) -> RowWindows:
    if _is_capturing(edge_index):
        raise RuntimeError(
            "CUDA graph capture met an `edge_index` without row windows, and building them synchronises; "
            "call graphfuse.warmup(model, data) before the capture, or pass RowWindows in place of "
            "`edge_index`"
        )
    plain = _plain(edge_index)
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


def _plain(edge_index: Tensor) -> Tensor:
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def _must_hash(edge_index: Tensor, key: Any) -> bool:
    """Whether only a hash, which synchronises, tells if ``edge_index`` was written to."""
    checks = os.environ.get("GRAPHFUSE_CHECK", "0") not in ("", "0")
    return (checks or key[0][0] is None) and not _is_capturing(edge_index)


def _is_capturing(edge_index: Tensor) -> bool:
    return edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
