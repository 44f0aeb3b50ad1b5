"""The record: a graph as windows of 16 rows, for both directions, with what layers derive from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphfuse.formats import blocks, build, inputs
from graphfuse.formats import packed as packing
from graphfuse.formats.build import BLOCK
from graphfuse.formats.fingerprint import fingerprint
from graphfuse.formats.lasting import lasting
from graphfuse.formats.reorder import check_method
from graphfuse.formats.structure import Structure, build_structure
from graphfuse.formats.walk import EdgeOrder, Walk, Walks, edge_order, filled, to_edge_index, walk, walks


class RowWindows:
    r"""A graph cut into windows of 16 rows, the structure every fused kernel reads.

    Row :math:`i` of the matrix holds the in-neighbours of node :math:`i`. A *row window* is 16 rows,
    consecutive ones or, with ``reorder``, such as share columns; its *column entries* are the columns that
    any of its rows uses, sorted, each stored once as one ``int32`` column and one 16-bit mask that says which
    rows use it (the bitmap of a Binary Sparse Block, stored by column). A repeated edge is kept: its k-th
    copy takes the k-th entry of its column. Windows with many entries are cut into slices, so that a hub does
    not hold up the rest.

    Both directions are stored; if the structure is symmetric they share memory. What only some layers need
    (rows one by one, the order of the caller's edges) is built on first use. Self-loops are stored as given:
    layers mask or replace the diagonal themselves, so one record serves all of them.

    Build one with :meth:`from_edge_index` or :class:`graphfuse.transforms.ToRowWindows`; pass it to a layer
    in place of ``edge_index``. The record is immutable; it can be moved, copied, pickled and shared. What
    ``walk`` and its like return is its own memory, which nothing may write to.

    Example:
        >>> windows = RowWindows.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> windows.shape
        (3, 3)

    Note:
        Format: Li & Chandramowlishwaran, Fused3S, ICS 2025 (arXiv:2505.08098), with masks by column.
    """

    def __init__(self, structure: Structure, transposed: bool = False) -> None:
        self._structure = structure
        self._transposed = transposed

    # Making one

    @classmethod
    @lasting
    def from_edge_index(
        cls, edge_index: Any, size: inputs.Size | None = None, reorder: str = "natural"
    ) -> RowWindows:
        """Builds the windows of a graph, on the device of ``edge_index``.

        Args:
            edge_index: ``int32 | int64[2, num_edges]``, sources over receivers; an ``EdgeIndex``; a
                ``torch.sparse`` matrix (COO, CSR, CSC) or ``SparseTensor``, which are the transposed
                adjacency as in PyG and whose values are ignored.
            size: ``(num_src, num_dst)``, PyG's size. ``None``: the sparse matrix's own, else square up to the
                largest index.
            reorder: Which rows share a window: ``"natural"``, those of consecutive numbers; ``"auto"``, those
                that make few column entries, if that saves 2 % of them, which takes many times as long to
                build; ``"degree"``, ``"polish"`` or ``"bisection"``, see
                :func:`graphfuse.formats.reorder.cluster`. Each direction has an order of its own. Inputs and
                outputs of layers and ops keep the caller's order.

        Raises:
            IndexError: an index is negative or not below its size.
            ValueError: dtype, rank or size is wrong, there are 2^31 edges or more, or ``reorder`` is no such
                way.

        Note:
            CPU and CUDA give the same integers. A build that takes over two seconds shows a progress bar on
            a terminal.
        """
        check_method(reorder, "reorder")
        return cls(build_structure(*inputs.as_edge_index(edge_index, size), reorder))

    @classmethod
    @lasting
    def from_blocks(
        cls,
        block_rows: Tensor,
        block_cols: Tensor,
        block_size: int,
        shape: tuple[int, int] | None = None,
    ) -> RowWindows:
        r"""Builds the windows of a block mask: of a matrix that is dense in some square blocks, else empty.

        Element :math:`(r, c)` of block b is edge ``(b * block_size + r) * block_size + c``, so values of
        edges are ``[num_blocks, block_size, block_size]``, flattened. With windows of this mask
        :func:`graphfuse.ops.sddmm` is what block-sparse libraries call SDD, :func:`graphfuse.ops.spmm` with
        ``edge_weight`` DSD (and DDS by ``transpose=True``, as :math:`X S = (S^\top X^\top)^\top`), and
        :func:`graphfuse.ops.sparse_attention` attention under a static mask.

        Args:
            block_rows: ``int[num_blocks]``, the row of blocks (receivers) that each block stands in.
            block_cols: Its column of blocks (sources), likewise. A repeated block counts as often.
            block_size: 16, 32, 64 or 128.
            shape: ``(num_dst, num_src)``, rows and columns of the matrix, multiples of ``block_size``.
                ``None``: up to the last blocks.

        Raises:
            IndexError: a block does not lie in ``shape``.
            ValueError: dtype, rank, size or shape is wrong, or there are 2^31 elements or more.
        """
        return cls(build_structure(*blocks.as_edge_index(block_rows, block_cols, block_size, shape)))

    def transpose(self) -> RowWindows:
        """The windows of the transposed matrix; shares everything and builds nothing."""
        return RowWindows(self._structure, not self._transposed)

    # What it describes

    @property
    def shape(self) -> tuple[int, int]:
        """``(num_dst, num_src)``, the rows and columns of the matrix."""
        num_dst, num_src, _, _ = self.sizes
        return num_dst, num_src

    @property
    def num_edges(self) -> int:
        """Edges, repeated ones counted as often as they appear."""
        return self._structure.num_edges

    @property
    def num_entries(self) -> int:
        """Column entries: rows of a feature matrix that one pass over all windows reads."""
        return self.sizes[3]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``(num_dst, num_src, num_edges, num_entries)``."""
        return self._structure.sizes[1 if self._transposed else 0]  # Dynamo takes no bool as an index

    @property
    def symmetric(self) -> bool:
        """Whether the matrix equals its transpose, so that both directions share memory."""
        return bool(self._structure.scalars.symmetric)

    @property
    def device(self) -> torch.device:
        """Where the record lies."""
        return self._structure.windows.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything built so far, both directions, without the caller's edge list."""
        found = self._structure.packed()
        graphs = [found[name] for name in ("windows", "rows") if name in found]
        derived = [walk(graph, back).derived.values() for graph in graphs for back in (False, True)]
        parts = [*found.values(), *(part for values in derived for part in values if part is not None)]
        return sum({id(part): part.nbytes for part in parts}.values())

    @property
    def fingerprint(self) -> int:
        """64-bit hash of the edge list this was built from; depends on the order of its edges."""
        return self._structure.fingerprint

    def matches(self, edge_index: Tensor) -> bool:
        """Whether ``edge_index`` still is the edge list this was built from (hashes it: synchronises)."""
        edge_index = inputs.plain(edge_index)
        return edge_index.size(1) == self.num_edges and fingerprint(edge_index) == self.fingerprint

    # Views for kernels, tests and the curious: the record's own memory, not to be written to

    def walk(self) -> Walk:
        """The windows of this direction: ``ptr``, ``tasks``, ``merges``, ``column``, ``row_mask``."""
        return walk(self._structure.windows, self._transposed)

    def row_walk(self) -> Walk:
        """The rows of this direction one by one (CSR), built on first use."""
        return walk(self.packed_rows, self._transposed)

    def window_edges(self) -> EdgeOrder:
        """Order of the caller's edges seen from :meth:`walk`, built on first use."""
        return edge_order(self.packed_window_edges, self._transposed)

    def row_edges(self) -> EdgeOrder:
        """Order of the caller's edges seen from :meth:`row_walk`, built on first use."""
        return edge_order(self.packed_row_edges, self._transposed)

    def walks(self, rows: bool, with_edges: bool) -> Walks:
        """Both directions, of the rows or the windows, for a launcher; kept with the record."""
        found: Walks | None = self._structure.memo.get(("walks", rows, with_edges, self._transposed))
        if found is None:
            graph = self.packed_rows if rows else self.packed_windows
            order = None
            if with_edges:
                order = self.packed_row_edges if rows else self.packed_window_edges
            found = walks(graph, order, self._transposed, self._structure.filling)
            self._structure.memo["walks", rows, with_edges, self._transposed] = found
        return found

    @property
    def transposed(self) -> bool:
        """Whether this is the backward direction of its packed tensors."""
        return self._transposed

    @property
    def packed_windows(self) -> Tensor:
        """Both directions of the windows in one int32 tensor: what an op takes."""
        return self._structure.windows

    @property
    def packed_rows(self) -> Tensor:
        """Both directions of the rows in one int32 tensor, built on first use."""
        return self._structure.lazy("rows")

    @property
    def packed_window_edges(self) -> Tensor:
        """Edge order of the windows, both directions, built on first use from the caller's edge list."""
        return self._structure.lazy("window_edges")

    @property
    def packed_row_edges(self) -> Tensor:
        """Edge order of the rows, both directions, built on first use from the caller's edge list."""
        return self._structure.lazy("row_edges")

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, computed once per record and direction and kept as long as the record.

        Layers keep here what they derive from the structure alone. A moved or copied record starts afresh.
        """
        return self._structure.keep((key, self._transposed), make)

    def edges_per_row(self) -> Tensor:
        """Edges of each row, ``int64[num_dst]``; counted once, returned as a copy."""
        counts: Tensor = self.memo("edges_per_row", lambda: self._count(0))
        return counts.clone()

    def loops_per_row(self) -> Tensor:
        """Self-loops (edges with column == row) of each row, ``int64[num_dst]``; likewise."""
        counts: Tensor = self.memo("loops_per_row", lambda: self._count(1))
        return counts.clone()

    def _count(self, loops: int) -> Tensor:
        both = self._structure.row_counts()
        if both is not None:
            at_end, num_rows = self._transposed and not self.symmetric, self.shape[0]
            return both[loops][-num_rows:] if at_end else both[loops][:num_rows]
        w = filled(self.walk())
        assert w.row_mask is not None
        if loops:
            return build.loops_per_row(w.ptr, w.column, w.row_mask, w.num_rows, w.row_index)
        return build.edges_per_row(w.ptr, w.row_mask, w.num_rows, w.row_index)

    def last_loop(self) -> Tensor:
        """Position in the caller's edge list of each row's last self-loop, -1 without; likewise a copy."""

        def find() -> Tensor:
            src, dst = self.edge_index()
            loops = torch.where(src == dst, torch.arange(self.num_edges, device=self.device), -1)
            last = torch.full((self.shape[0],), -1, device=self.device)
            return last.scatter_reduce_(0, dst.long(), loops, "amax")

        found: Tensor = self.memo("last_loop", find)
        return found.clone()

    def edge_index(self) -> Tensor:
        """The edge list this was built from, on the record's device, in the caller's order.

        Raises:
            RuntimeError: the list was modified since, so that edge numbers no longer mean anything.
        """
        source = self._structure.edge_index()
        return source.flip(0) if self._transposed else source

    def to_edge_index(self) -> Tensor:
        """Decodes the windows: ``int64[2, num_edges]``, sources over receivers, in window order."""
        return to_edge_index(self.walk())

    def validate(self) -> RowWindows:
        """Raises ``ValueError`` if the record is not a consistent structure, else returns it."""
        from graphfuse.formats.validate import validate

        validate(self)
        return self

    # Moving and copying

    @lasting
    def _map(self, fn: Callable[[Tensor], Tensor], keep_source: bool = True) -> RowWindows:
        old = self._structure
        moved = {name: fn(tensor) for name, tensor in old.packed().items()}
        for name, tensor in moved.items():
            packing.adopt(tensor, packing.header_of(getattr(old, name)))
        source = old.source if keep_source or old.source is None else fn(old.source)
        new = Structure(moved.pop("windows"), old.fingerprint, source)
        for name, tensor in moved.items():
            setattr(new, name, tensor)
        return RowWindows(new, self._transposed)

    def to(self, device: Any, non_blocking: bool = False) -> RowWindows:
        """The record on ``device``; itself if it is there. The caller's edge list is not copied along."""
        if torch.empty(0, device=device).device == self.device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cpu(self) -> RowWindows:
        """The record in host memory."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> RowWindows:
        """The record on a GPU, the current one by default."""
        return self.to("cuda" if device is None else device, non_blocking)

    def pin_memory(self) -> RowWindows:
        """A copy in page-locked host memory."""
        return self._map(Tensor.pin_memory)

    def clone(self) -> RowWindows:
        """A copy that shares no memory, the edge list it was built from included."""
        return self._map(Tensor.clone, keep_source=False)

    def share_memory_(self) -> RowWindows:
        """Moves the record into shared memory, in place, for worker processes."""
        for tensor in self._structure.packed().values():
            header = packing.header_of(tensor)
            tensor.share_memory_()
            packing.adopt(tensor, header)
        return self

    def detach(self) -> RowWindows:
        """The record itself: it carries no gradient."""
        return self

    detach_ = contiguous = detach

    def record_stream(self, stream: Any) -> None:
        """Tells the allocator that ``stream`` reads the record (see ``torch.Tensor.record_stream``)."""
        for tensor in self._structure.packed().values():
            tensor.record_stream(stream)

    def __getstate__(self) -> dict[str, Any]:
        structure = self._structure
        return {
            "transposed": self._transposed,
            "fingerprint": structure.fingerprint,
            "source": structure.source,
            **structure.packed(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._transposed = state["transposed"]
        self._structure = Structure(state["windows"], state["fingerprint"], state["source"])
        for name in ("rows", "window_edges", "row_edges"):
            setattr(self._structure, name, state.get(name))

    def __deepcopy__(self, memo: dict[int, Any]) -> RowWindows:
        copied = self._map(Tensor.clone)
        # through `memo`, so that a deep copy of a Data still has one edge list, not two
        copied._structure.source = copy.deepcopy(self._structure.source, memo)
        return copied

    def statistics(self) -> dict[str, float]:
        """``windows``, ``blocks_per_window`` (TCBs of 16 x 8), ``edges_per_block``, ``edges_per_entry``."""

        def count() -> dict[str, float]:
            length = torch.diff(self.walk().ptr)
            blocks = int(length.add(BLOCK - 1).div(BLOCK, rounding_mode="floor").sum())
            return {
                "windows": length.numel(),
                "blocks_per_window": blocks / max(length.numel(), 1),
                "edges_per_block": self.num_edges / max(blocks, 1),
                "edges_per_entry": self.num_edges / max(self.num_entries, 1),
            }

        return dict(self.memo("statistics", count))

    def __repr__(self) -> str:
        s = self.statistics()
        return (
            f"RowWindows(num_dst={self.shape[0]}, num_src={self.shape[1]}, num_edges={self.num_edges}, "
            f"windows={s['windows']:.0f}, blocks_per_window={s['blocks_per_window']:.1f}, "
            f"edges_per_block={s['edges_per_block']:.1f}, symmetric={self.symmetric}, nbytes={self.nbytes}, "
            f"device={str(self.device)!r})"
        )


torch.serialization.add_safe_globals([RowWindows])
