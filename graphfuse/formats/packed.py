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
    ids = [id(section) for section in sections]
    lengths = [section.numel() for section in sections]
    header, _ = _lay_out(kind, scalars, lengths, [ids.index(own) for own in ids])
    device = sections[0].device
    zeros = torch.zeros(_ALIGN, dtype=torch.int32, device=device)
    pieces = [_to_device(header, device)]
    for section in {id(section): section for section in sections}.values():
        pieces += [section.reshape(-1), zeros[: -section.numel() % _ALIGN]]
    packed = torch.cat(pieces)
    adopt(packed, header)
    return packed


def blank(
    kind: int, scalars: Scalars, lengths: Sequence[int], shared: Sequence[int] | None, device: torch.device
) -> Tensor:
    """What :func:`pack` returns, for sections of these lengths, but for their numbers, which are 0.

    Args:
        kind: What the tensor holds.
        scalars: As in its header.
        lengths: Numbers in each section.
        shared: Of each section, the first that is stored in its place; ``None``: each is stored.
        device: Of the tensor.
    """
    header, length = _lay_out(kind, scalars, lengths, shared or range(len(lengths)))
    packed = torch.zeros(length, dtype=torch.int32, device=device)
    packed[:_HEADER].copy_(_to_device(header, device))
    adopt(packed, header)
    return packed


def _lay_out(
    kind: int, scalars: Scalars, lengths: Sequence[int], stored_as: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    # the header, and the length of all
    header = [SCHEMA, kind, *scalars, *[0] * (_SCALARS - 2 - len(scalars))]
    end, starts = _HEADER, list[int]()
    for section, (length, first) in enumerate(zip(lengths, stored_as, strict=True)):
        starts.append(end if first == section else starts[first])
        end += -(-length // _ALIGN) * _ALIGN if first == section else 0
        header += [starts[section] // _ALIGN, length]
    return (*header, *[0] * (_HEADER - len(header))), end


def _to_device(header: tuple[int, ...], device: torch.device) -> Tensor:
    # pageable memory: the call has read it when it returns, and need not wait for the GPU
    return torch.tensor(header, dtype=torch.int32).to(device, non_blocking=True)


def adopt(packed: Tensor, header: tuple[int, ...]) -> Packed:
    """Remembers the header of ``packed`` on the host, so that no op has to read it from the device."""
    if header[0] != SCHEMA:
        raise ValueError(
            f"the packed graph has schema {header[0]}, this graphfuse reads {SCHEMA}; build the windows again"
        )
    entries = header[_SCALARS:]
    pairs = [(entries[i], entries[i + 1]) for i in range(0, len(entries) - 1, 2)]
    whole = _alias(packed)
    starts = [(start * _ALIGN, length) for start, length in pairs if start > 0]
    parts = tuple(whole[start : start + length] for start, length in starts)
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


def _alias(packed: Tensor) -> Tensor:
    # A slice of `packed` would hold it alive as its base, and with it this table's own weak entry for it.
    view = torch.empty(0, dtype=packed.dtype, device=packed.device)
    return view.set_(packed.untyped_storage(), packed.storage_offset(), packed.shape, (1,))
