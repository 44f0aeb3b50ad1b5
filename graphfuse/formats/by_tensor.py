"""Values of tensors, found by the tensor object."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

_Value = TypeVar("_Value")


class ByTensor(Generic[_Value]):
    """A value for each of some tensor objects, as long as these live.

    By the object's id, with a look whose it is: torch's ``WeakIdKeyDictionary`` makes a weak reference and
    compares two for every look-up, of which a forward has many. Changes want a lock of the caller's.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], _Value]] = {}

    def get(self, tensor: Tensor) -> _Value | None:
        """The value of ``tensor``, or None."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __setitem__(self, tensor: Tensor, value: _Value) -> None:
        at, entries = id(tensor), self._entries
        entries[at] = (weakref.ref(tensor, lambda _: entries.pop(at, None)), value)

    def values(self) -> Iterator[_Value]:
        """The values of the tensors that live."""
        return iter([value for _, value in list(self._entries.values())])

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
