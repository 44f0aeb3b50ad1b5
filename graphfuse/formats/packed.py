"""A graph structure as one int32 tensor whose first entries say where its parts lie.

One tensor, because every tensor argument of a ``torch.library`` op costs host time on every call, and
because one buffer is one copy to another device. A header, because an op may be handed a tensor it has
never seen (saved-tensor hooks, a deserialised program) and must still find its way in it. What such a
header says is compared with the tensor before anyone believes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphfuse.formats.by_tensor import ByTensor

# The second is of windows that have an order of the rows, two sections more than others: releases that only
# know the first refuse it.
SCHEMA, ORDERED_SCHEMA = SCHEMAS = (1, 2)
_ORDERED_SECTIONS = 12
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
    long_dst: int = 0  # rows of more than split_dst edges that are not cut
    long_src: int = 0


class Packed(NamedTuple):
    """What :func:`unpack` finds in a packed tensor: views, no copies."""

    kind: int
    scalars: Scalars
    sections: tuple[Tensor, ...]


class _Trusted(tuple[int, ...]):
    """A header that was made here, or found to fit its tensor: copies of the tensor need no other look."""


class _Entry:
    """A header, and the views that it describes once they are asked for: each is a call of PyTorch."""

    __slots__ = ("found", "header", "scalars")

    def __init__(self, header: tuple[int, ...]) -> None:
        self.header = header
        self.scalars = Scalars(*header[2 : 2 + len(Scalars._fields)])
        self.found: Packed | None = None

    def unpack(self, packed: Tensor) -> Packed:
        if self.found is None:
            whole, places = _alias(packed), _places(self.header)
            views = {place: whole.narrow(0, *place) for place in dict.fromkeys(places)}
            self.found = Packed(self.header[1], self.scalars, tuple([views[place] for place in places]))
        return self.found


_KNOWN: ByTensor[_Entry] = ByTensor()
_LOCK = threading.Lock()


def pack(kind: int, scalars: Scalars, sections: Sequence[Tensor]) -> Tensor:
    """Copies int32 ``sections`` into one tensor; a section given twice is stored once."""
    ids = [id(section) for section in sections]
    lengths = [section.numel() for section in sections]
    header, _ = _lay_out(kind, scalars, lengths, [ids.index(own) for own in ids])
    device = sections[0].device
    zeros = torch.zeros(_ALIGN, dtype=torch.int32, device=device)
    pieces = [_as_tensor(header).to(device)]
    for section in {id(section): section for section in sections}.values():
        pieces += [section.reshape(-1), zeros[: -section.numel() % _ALIGN]]
    packed = torch.cat(pieces)
    _remember(packed, header)
    return packed


class Layout(NamedTuple):
    """What :func:`blank` makes room for."""

    kind: int
    scalars: Scalars
    lengths: Sequence[int]  # numbers in each section
    shared: Sequence[int] | None  # of each section, the first that is stored in its place; None: each is


def blank(layouts: Sequence[Layout], device: torch.device) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Headers, up to the last section, and memory for what :func:`pack` would return for such sections.

    Nothing is written to that memory: neither the header nor the zeros behind each section.
    """
    headers, tensors = list[tuple[int, ...]](), list[Tensor]()
    for kind, scalars, lengths, shared in layouts:
        header, length = _lay_out(kind, scalars, lengths, shared or range(len(lengths)))
        tensors.append(torch.empty(length, dtype=torch.int32, device=device))
        _remember(tensors[-1], header)
        headers.append(tuple(header[: _SCALARS + 2 * len(lengths)]))
    return headers, tensors


def _lay_out(
    kind: int, scalars: Scalars, lengths: Sequence[int], stored_as: Sequence[int]
) -> tuple[_Trusted, int]:
    # the header, and the length of all
    header = [schema_of(kind, len(lengths)), kind, *scalars, *[0] * (_SCALARS - 2 - len(scalars))]
    end, starts = _HEADER, list[int]()
    for section, (length, first) in enumerate(zip(lengths, stored_as, strict=True)):
        starts.append(end if first == section else starts[first])
        end += -(-length // _ALIGN) * _ALIGN if first == section else 0
        header += [starts[section] // _ALIGN, length]
    return _Trusted((*header, *[0] * (_HEADER - len(header)))), end


def schema_of(kind: int, num_sections: int) -> int:
    """The schema of what has so many sections."""
    return ORDERED_SCHEMA if (kind, num_sections) == (WINDOWS, _ORDERED_SECTIONS) else SCHEMA


def is_ordered(windows: Tensor) -> bool:
    """Whether packed windows have an order of the rows."""
    return header_of(windows)[0] == ORDERED_SCHEMA


def _as_tensor(header: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.array(header, dtype=np.int32))  # sooner than torch.tensor


def adopt(packed: Tensor, header: tuple[int, ...]) -> None:
    """Remembers the header of ``packed`` on the host, so that no op has to read it from the device.

    Raises:
        ValueError: it is of another schema, or names a section that is not within ``packed``.
    """
    if not isinstance(header, _Trusted):
        _check_places(packed, header)
    _remember(packed, header)


def _check_places(packed: Tensor, header: tuple[int, ...]) -> None:
    # a section beyond the end would be read from foreign memory
    plain = packed.dtype == torch.int32 and packed.dim() == 1 and packed.is_contiguous()
    if not plain or packed.numel() < _HEADER:
        found = f"{packed.dtype} {list(packed.shape)}"
        raise ValueError(
            f"a packed graph must be int32[{_HEADER} or more] (got {found}); build the windows again"
        )
    if header[0] not in SCHEMAS:
        known = " and ".join(map(str, SCHEMAS))
        raise ValueError(
            f"the packed graph has schema {header[0]}, this graphfuse reads {known}; build the windows again"
        )
    for i in range(_SCALARS, _HEADER - 1, 2):
        start, length = header[i] * _ALIGN, header[i + 1]
        if (start or length) and not (start >= _HEADER and 0 <= length <= packed.numel() - start):
            section, last = (i - _SCALARS) // 2, packed.numel()
            raise ValueError(
                f"section {section} of the packed graph must lie in [{_HEADER}, {last}] (got {length} "
                f"numbers from {start}); build the windows again"
            )


def _remember(packed: Tensor, header: tuple[int, ...]) -> _Entry:
    entry = _Entry(header)
    with _LOCK:
        _KNOWN[packed] = entry
    return entry


def _places(header: tuple[int, ...]) -> list[tuple[int, int]]:
    # starts and lengths of the sections that are there
    return [(header[at] * _ALIGN, header[at + 1]) for at in range(_SCALARS, _HEADER - 1, 2) if header[at]]


def _check_sizes(packed: Tensor, header: _Trusted, known: Packed) -> None:
    # on the host alone: the numbers in the sections are for RowWindows.validate() to look at
    from graphfuse.formats import validate  # which reads this module

    kind, scalars, sections = known
    names = {number: name for name, (number, _) in validate.PARTS.items()}
    validate._require(kind in names, f"the header must name a kind of {names} (got {kind})")
    name, sizes = names[kind], list(scalars[:3])
    validate._require(min(sizes) >= 0, f"{name}: the header must hold sizes of 0 or more (got {sizes})")
    square = scalars.symmetric == 0 or (scalars.symmetric == 1 and sizes[0] == sizes[1])
    validate._require(square, f"{name}: `symmetric` must be 0, or 1 for a square matrix (got {scalars[:4]})")
    view = _alias(packed)  # what is known of `packed` itself stays as it is, should this fail
    _remember(view, header)
    validate._check_lengths(name, view)
    if kind not in (WINDOWS, ROWS):
        return
    half = len(sections) // 2
    counts = ((0, scalars.slots_dst, scalars.long_dst), (half, scalars.slots_src, scalars.long_src))
    for first, num_slots, long in counts:
        ptr, tasks, merges, column = (part.numel() for part in sections[first : first + 4])
        # a task is a window or a long row that is not cut, or fills a slot
        wanted = tasks // 4 - (ptr - 1 - merges // 4 if kind == WINDOWS else long)
        where = f"{'transposed ' if first else ''}{name}"
        validate._require(num_slots == wanted, f"{where}: there must be {wanted} slots (got {num_slots})")
        if kind == WINDOWS:
            fits = column <= scalars.num_edges <= 16 * column
            found = f"{scalars.num_edges} edges in {column} entries"
            validate._require(fits, f"{where}: an entry must hold 1 to 16 edges (got {found})")


def header_of(packed: Tensor) -> tuple[int, ...]:
    """The header as Python integers; read from the device (one synchronisation) only when not known."""
    entry = _KNOWN.get(packed)
    if entry is not None:
        return entry.header
    if packed.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a packed graph was first seen during CUDA graph capture, where its header cannot be read; "
            "call graphfuse.warmup(model, data), or the op itself, before the capture"
        )
    header = tuple(packed[:_HEADER].tolist())
    adopt(packed, header)
    return header


def unpack(packed: Tensor) -> Packed:
    """Views of the sections of ``packed``.

    Raises:
        ValueError: the header comes from elsewhere and does not fit the sections.
    """
    return _entry(packed).unpack(packed)


def scalars_of(packed: Tensor) -> Scalars:
    """The scalars of ``packed``; raises as :func:`unpack` does."""
    return _entry(packed).scalars


def lengths_of(packed: Tensor) -> list[int]:
    """How many numbers each section of ``packed`` holds; raises as :func:`unpack` does."""
    return [length for _, length in _places(_entry(packed).header)]


def _entry(packed: Tensor) -> _Entry:
    # one whose header fits
    entry = _KNOWN.get(packed)
    if entry is None:
        header_of(packed)
        entry = _KNOWN.get(packed)
        assert entry is not None
    if not isinstance(entry.header, _Trusted):
        header = _Trusted(entry.header)
        _check_sizes(packed, header, entry.unpack(packed))
        entry = _remember(packed, header)
    return entry


def _alias(packed: Tensor) -> Tensor:
    # A slice of `packed` would hold it alive as its base, and with it this table's own weak entry for it.
    return packed.detach()
