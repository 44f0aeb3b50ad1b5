"""A graph structure as one int32 tensor whose first entries say where its parts lie.

One tensor, because every tensor argument of a ``torch.library`` op costs host time on every call, and
because one buffer is one copy to another device. A header, because an op may be handed a tensor it has
never seen (saved-tensor hooks, a deserialised program) and must still find its way in it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

SCHEMA = 1
_HEADER = 64  # int32 entries in front of the sections
_ALIGN = 32  # int32 entries: sections start on 128 bytes, so that kernels may use their widest loads
_SCALARS = 12

WINDOWS, ROWS, WINDOW_EDGES, ROW_EDGES = 1, 2, 3, 4


class Scalars(NamedTuple):
    """The numbers of a packed structure that the host needs to launch a kernel."""

    num_dst: int
    num_src: int
    num_edges: int
    symmetric: int  # 1: both directions have the same sections
    split_dst: int  # a window (row) with more entries than this is cut into slices ...
    split_src: int
    slots_dst: int  # ... whose partial results take this many slots, all windows together
    slots_src: int


class Packed(NamedTuple):
    """What :func:`unpack` finds in a packed tensor: views, no copies."""

    kind: int
    scalars: Scalars
    sections: tuple[Tensor, ...]


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
_LOCK = threading.Lock()


def pack(kind: int, scalars: Scalars, sections: Sequence[Tensor]) -> Tensor:
    """Copies int32 ``sections`` into one tensor; a section given twice is stored once."""
    header = [SCHEMA, kind, *scalars, *[0] * (_SCALARS - 2 - len(scalars))]
    start, first_use = _HEADER, dict[int, int]()
    for section in sections:
        if id(section) not in first_use:
            first_use[id(section)] = start
            start += -(-section.numel() // _ALIGN) * _ALIGN
        header += [first_use[id(section)] // _ALIGN, section.numel()]
    device = sections[0].device
    header += [0] * (_HEADER - len(header))
    zeros = torch.zeros(_ALIGN, dtype=torch.int32, device=device)
    pieces = [torch.tensor(header, dtype=torch.int32).to(device)]
    for section in {id(section): section for section in sections}.values():
        pieces += [section.reshape(-1), zeros[: -section.numel() % _ALIGN]]
    packed = torch.cat(pieces)
    adopt(packed, tuple(header))
    return packed


def adopt(packed: Tensor, header: tuple[int, ...]) -> Packed:
    """Remembers the header of ``packed`` on the host, so that no op has to read it from the device."""
    if header[0] != SCHEMA:
        raise ValueError(
            f"the packed graph has schema {header[0]}, this graphfuse reads {SCHEMA}; build the windows again"
        )
    entries = header[_SCALARS:]
    pairs = [(entries[i], entries[i + 1]) for i in range(0, len(entries) - 1, 2)]
    parts = tuple(_alias(packed, start * _ALIGN, length) for start, length in pairs if start > 0)
    known = Packed(header[1], Scalars(*header[2 : 2 + len(Scalars._fields)]), parts)
    with _LOCK:
        _KNOWN[packed] = (header, known)
    return known


def header_of(packed: Tensor) -> tuple[int, ...]:
    """The header as Python integers; read from the device (one synchronisation) only when not known."""
    with _LOCK:
        entry = _KNOWN.get(packed)
    if entry is not None:
        header: tuple[int, ...] = entry[0]
        return header
    if packed.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a packed graph was first seen during CUDA graph capture, where its header cannot be read; "
            "call graphfuse.warmup(model, data), or the op itself, before the capture"
        )
    header = tuple(packed[:_HEADER].tolist())
    adopt(packed, header)
    return header


def unpack(packed: Tensor) -> Packed:
    """Views of the sections of ``packed``."""
    with _LOCK:
        entry = _KNOWN.get(packed)
    if entry is None:
        header_of(packed)
        with _LOCK:
            entry = _KNOWN[packed]
    known: Packed = entry[1]
    return known


def _alias(packed: Tensor, start: int, length: int) -> Tensor:
    # A slice would hold `packed` alive as its base, and with it this table's own weak entry for it.
    view = torch.empty(0, dtype=packed.dtype, device=packed.device)
    offset = packed.storage_offset() + start
    return view.set_(packed.untyped_storage(), offset, (length,), (1,))
