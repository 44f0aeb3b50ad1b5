"""The transform that attaches row windows to a graph."""

from __future__ import annotations

from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import remember
from graphfuse.formats.reorder import check_method


@functional_transform("to_row_windows")
class ToRowWindows(BaseTransform):
    r"""Attaches ``row_windows``, a :class:`graphfuse.RowWindows`, to every edge store with an ``edge_index``.

    The layers of :mod:`graphfuse.nn` find the record again from ``data.edge_index``, also after
    ``data.to(device)``, and take ``data.row_windows`` itself in place of ``edge_index``. Works as
    ``transform``, as ``pre_transform`` (the record is saved with the data set) and inside ``T.Compose``.

    In a mini-batch made by ``Batch`` the records of the single graphs are of no use and are ignored: apply
    the transform to the batch, or pass ``batch.edge_index``, for which layers build the windows themselves.
    The record of the batch stands in their place then, and graphs that are taken from the batch have none.
    After a transform that changes edges, apply this one again: it comes last.

    Args:
        edge_order: Whether to also build, now instead of on first use, what layers with edge weights need
            to find the caller's edges.
        reorder: Which rows share a window: ``"natural"``, consecutive ones; ``"auto"``, those that make the
            graph cheaper to read, where that saves 2 %; or another way of
            :meth:`graphfuse.RowWindows.from_edge_index`. Nodes keep their numbers.

    Raises:
        ValueError: ``reorder`` is no such way.
    """

    def __init__(self, edge_order: bool = False, reorder: str = "natural") -> None:
        check_method(reorder, "reorder")
        self.edge_order, self.reorder = edge_order, reorder

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Attaches the records; tensors of ``data`` are left alone."""
        for store in data.edge_stores:
            if "edge_index" not in store or store.edge_index is None:
                continue
            windows = RowWindows.from_edge_index(store.edge_index, store.size(), self.reorder)
            if self.edge_order:
                # both, as the width and dtype of a layer decide which one it walks
                _ = windows.packed_window_edges, windows.packed_row_edges, windows.packed_rows
            remember(store.edge_index, windows)
            store.row_windows = windows
            whole = vars(data.stores[0])
            for name in ("_slice_dict", "_inc_dict"):
                if name in whole:  # a batch, whose graphs may have had records
                    whole[name] = _without_records(whole[name], store._key)
        return data

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}(edge_order={self.edge_order}, reorder={self.reorder!r})"


def _without_records(slices: dict[Any, Any], key: Any) -> dict[Any, Any]:
    """Where ``Batch`` finds the parts of each graph, less its record; ``key`` is the type of edges, if any.

    It would take the one record of all for a list of theirs.
    """
    if key is None:
        return {name: part for name, part in slices.items() if name != "row_windows"}
    return slices | {key: _without_records(slices[key], None)} if key in slices else slices
