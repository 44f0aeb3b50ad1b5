"""Row windows for the edge_index a user passes: found if they exist, built if not, never stale.

Two ways lead to a record that exists: the identity of the tensor object (with its version, shape, dtype,
device and the sizes), and, as ``data.to(device)`` makes a new tensor, the fingerprint of a live record.
Records are held weakly by their edge_index: they die with it.
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
from graphfuse.formats.row_windows import RowWindows
from graphfuse.formats.structure import find_live

_BY_TENSOR: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PINNED: list[Any] = []
_LOCK = threading.RLock()


def row_windows(edge_index: Tensor | RowWindows, num_src: int, num_dst: int) -> RowWindows:
    """The record of ``edge_index`` for the given sizes; a :class:`RowWindows` is checked and returned.

    The second call with one tensor object costs a dictionary look-up. The record is rebuilt after an
    in-place edit, and for other sizes. Writes that PyTorch does not count (through ``.data`` or NumPy) are
    seen only with ``GRAPHFUSE_CHECK=1``, which hashes ``edge_index`` on every call.

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
        return pin_if_capturing(edge_index)
    key = _key(edge_index, num_src, num_dst)
    with _LOCK:
        records = _BY_TENSOR.get(edge_index)
        if records is not None and records[0] == key[0]:
            found = records[1].get(key[1])
            if found is not None and not _checks():
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
    version = None if edge_index.is_inference() else edge_index._version  # inference tensors count none
    return (version, edge_index.shape, edge_index.dtype, edge_index.device), (num_src, num_dst)


def _find_or_build(edge_index: Tensor, num_src: int, num_dst: int) -> RowWindows:
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "CUDA graph capture met an `edge_index` without row windows, and building them synchronises; run "
            "the layer once before the capture, or pass RowWindows in place of `edge_index`"
        )
    plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    inputs.check_edge_index(plain)
    live = find_live(plain, num_src, num_dst)
    return (
        RowWindows(live) if live is not None else RowWindows.from_edge_index(edge_index, (num_src, num_dst))
    )


def _checks() -> bool:
    return os.environ.get("GRAPHFUSE_CHECK", "0") not in ("", "0")
