"""A graph whose row windows are looked up when an op runs, for code that is being traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphfuse.formats.row_windows import RowWindows


class LateWindows(RowWindows):
    """Stands for the record of an ``edge_index`` while torch.compile or torch.export traces a layer.

    A trace knows neither the edges nor, with dynamic shapes, how many there are, so it can build no record.
    The ops take the ``edge_index`` itself and find its record when they run, through the cache that serves
    eager calls. What layers derive from a record's structure is an op of its own. Nothing but what is below
    works before there is a record.

    Args:
        edge_index: ``int32 | int64[2, num_edges]``.
        num_src: Number of sources.
        num_dst: Number of receivers.
        transposed: Whether this stands for the transpose of that record.
    """

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int, transposed: bool = False) -> None:
        self.plain = edge_index
        self._sizes = (num_src, num_dst)
        self._transposed = transposed

    def transpose(self) -> LateWindows:
        """The other direction."""
        return LateWindows(self.plain, *self._sizes, not self._transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """``(num_dst, num_src)`` of this direction."""
        num_src, num_dst = self._sizes
        return (num_src, num_dst) if self._transposed else (num_dst, num_src)

    @property
    def num_edges(self) -> int:
        """Edges, repeated ones counted as often as they appear."""
        return self.plain.size(1)

    @property
    def device(self) -> torch.device:
        """Where the edges lie, and the record will."""
        return self.plain.device

    def edge_index(self) -> Tensor:
        """The edge list of this direction, in the caller's order."""
        return self.plain.flip(0) if self._transposed else self.plain

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``: a trace keeps nothing."""
        return make()

    def edges_per_row(self) -> Tensor:
        """See :meth:`RowWindows.edges_per_row`."""
        return self._of_rows("edges_per_row")

    def loops_per_row(self) -> Tensor:
        """See :meth:`RowWindows.loops_per_row`."""
        return self._of_rows("loops_per_row")

    def last_loop(self) -> Tensor:
        """See :meth:`RowWindows.last_loop`."""
        return self._of_rows("last_loop")

    def _of_rows(self, what: str) -> Tensor:
        found: Tensor = torch.ops.graphfuse.of_rows(self.plain, self._transposed, *self.shape, what)
        return found
