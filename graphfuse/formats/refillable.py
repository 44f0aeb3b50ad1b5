"""A record whose edges are replaced: one place in memory for graph after graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphfuse.formats import build, inputs, quick
from graphfuse.formats import packed as packing
from graphfuse.formats.filling import Filling
from graphfuse.formats.fingerprint import fingerprint
from graphfuse.formats.lasting import lasting, make_lasting
from graphfuse.formats.row_windows import RowWindows
from graphfuse.formats.structure import Structure
from graphfuse.formats.walk import know_no_copies, walk


class RefillableWindows(RowWindows):
    """Row windows in memory that stays, for the edges of one mini-batch after the other.

    A CUDA graph reads what it was captured with. So that one capture of a training step serves batches of
    different sizes, everything has room for the largest: features for ``num_nodes``, of which a batch fills
    the first and the others have no edges, and these windows. Between two replays :meth:`refill` replaces
    the edges, in the same memory.

    A layer takes it in place of ``edge_index``, and :meth:`transpose` shares its memory. It stays where it
    is: it is not moved, copied or saved. Values of edges (weights, features) need the order of the edges,
    which it does not have.

    Args:
        num_nodes: Room for nodes, of both directions.
        num_edges: Room for edges.
        device: Where the windows lie.
        num_entries: Room for column entries of a direction (see :class:`RowWindows`). As many as edges
            always suffice, and are taken for ``None``. Kernels and launches are chosen for this number: of
            graphs whose rows share columns, that of the largest batch makes for a better choice.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> windows = RefillableWindows(num_nodes=4, num_edges=8)
        >>> windows.refill(torch.tensor([[0, 1, 2], [1, 2, 0]])).num_edges
        3
        >>> windows.refill(torch.tensor([[3], [0]])).num_edges
        1
    """

    @lasting
    def __init__(
        self, num_nodes: int, num_edges: int, device: Any = "cpu", num_entries: int | None = None
    ) -> None:
        entries = num_edges if num_entries is None else num_entries
        rooms = (("num_nodes", num_nodes, quick.MOST_NODES // 2), ("num_edges", num_edges, quick.MOST_EDGES))
        for name, given, most in (*rooms, ("num_entries", entries, num_edges)):
            if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
                raise ValueError(
                    f"`{name}` must be an integer in [1, {most}] (got {given!r}); pass what the largest "
                    "batch has, and to graphs beyond these bounds give RowWindows of their own"
                )
        super().__init__(_Refillable(num_nodes, num_edges, entries, torch.device(device)))

    def transpose(self) -> RefillableWindows:
        """The windows of the transposed matrix, refilled together with these."""
        other = RefillableWindows.__new__(RefillableWindows)
        RowWindows.__init__(other, self._structure, not self._transposed)
        return other

    @lasting
    def refill(self, edge_index: Tensor) -> RefillableWindows:
        """Replaces the edges; what layers derived of them is computed anew, in its place.

        Work that was launched before still sees the old edges. A backward pass whose forward saw other edges
        raises: it has to be launched before.

        Args:
            edge_index: ``int32 | int64[2, num_edges]``, sources over receivers, on any device; no edge twice.

        Returns:
            Itself.

        Raises:
            IndexError: an index is negative or beyond ``num_nodes``.
            ValueError: there are more edges or column entries than room, or an edge is repeated. The old
                edges stay.
            RuntimeError: a CUDA graph is being captured.

        Note:
            Waits for the GPU once.
        """
        structure = self._structure
        assert isinstance(structure, _Refillable)
        edge_index = inputs.plain(edge_index)
        inputs.check_edge_index(edge_index)
        if structure.windows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "windows were refilled during CUDA graph capture, which must not wait for the GPU; refill "
                "them before the replay"
            )
        edges = edge_index.detach().to(structure.windows.device)
        structure.refill(edges.flip(0) if self._transposed else edges)
        return self

    @property
    def room(self) -> tuple[int, int]:
        """``(num_nodes, num_edges)``, how many there may be."""
        scalars = self._structure.scalars
        return scalars.num_dst, scalars.num_edges

    def edge_index(self) -> Tensor:
        """The edges that it was filled with.

        Raises:
            RuntimeError: a CUDA graph is being captured, whose replays would keep these edges.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the edge_index of refillable windows was asked for during CUDA graph capture, whose replays "
                "would not see others; see graphfuse.why_not for what does not run fused"
            )
        return super().edge_index()

    def snapshot(self) -> RowWindows:
        """Windows of the edges that it has now, which stay, in memory of their own."""
        return RowWindows.from_edge_index(self.edge_index().clone(), (self.shape[1], self.shape[0]))

    def statistics(self) -> dict[str, float]:
        """Those of :meth:`snapshot`."""
        return self.snapshot().statistics()

    def validate(self) -> RefillableWindows:
        """Raises ``ValueError`` if it holds other edges than it was filled with, else returns itself."""
        plain = self.snapshot().validate()
        if not torch.equal(plain.to_edge_index(), self.to_edge_index()):
            raise ValueError("the windows hold other edges than they were filled with; refill them")
        return self

    def _map(self, fn: Callable[[Tensor], Tensor], keep_source: bool = True) -> NoReturn:
        raise RuntimeError(
            "refillable windows stay where they are (asked to be moved, copied or saved); make others there, "
            "or take snapshot(), which are plain RowWindows"
        )

    def share_memory_(self) -> NoReturn:
        """Raises, as does whatever moves, copies or saves it."""
        self._map(torch.Tensor.detach)

    def __getstate__(self) -> NoReturn:
        self._map(torch.Tensor.detach)

    def __repr__(self) -> str:
        nodes, edges = self.room
        return (
            f"RefillableWindows(num_nodes={nodes}, room={edges}, num_edges={self.num_edges}, "
            f"nbytes={self.nbytes}, device={str(self.device)!r})"
        )


class _Refillable(Structure):
    """Sections with room: of no use is what lies behind the entries and edges that there are."""

    is_for_good = False
    filling: Filling

    def __init__(self, num_nodes: int, num_edges: int, num_entries: int, device: torch.device) -> None:
        count = -(-num_nodes // build.WINDOW)
        # no window is cut and no row is a task: which are long changes
        scalars = packing.Scalars(num_nodes, num_nodes, num_edges, 0, num_edges, num_edges, 0, 0)
        half = [count + 1, 4 * count, 0, num_entries, -(-num_entries // 2)]
        of_rows = [num_nodes + 1, 0, 0, num_edges]
        layouts = (
            packing.Layout(packing.WINDOWS, scalars, half * 2, None),
            packing.Layout(packing.ROWS, scalars, of_rows * 2, None),
        )
        headers, (windows, rows) = packing.blank(layouts, device)
        self.filling = Filling()
        for packed in (windows, rows):
            know_no_copies(packed, refilled=True)
        nothing = torch.empty(2, 0, dtype=torch.int64, device=device)
        super().__init__(windows, fingerprint(nothing), nothing)
        self.rows = rows
        self.place = quick.Place(windows, rows, headers)
        self.makers: dict[Any, Callable[[], Any]] = {}
        self.refill(nothing)

    def refill(self, edge_index: Tensor) -> None:
        num_edges, scalars = edge_index.size(1), self.scalars
        if num_edges > scalars.num_edges:
            raise ValueError(
                f"`edge_index` must have at most {scalars.num_edges} edges, for which there is room (got "
                f"{num_edges}); make RefillableWindows with room for more"
            )
        with self.lock:
            quickly = quick.suits(self.windows, num_edges, scalars.num_src, scalars.num_dst)
            facts = quick.refill(self.place, edge_index) if quickly else None
            if facts is None:
                key = self._write(edge_index)
            else:
                self._check_room(facts.middle, facts.total - facts.middle)
                key = facts.fingerprint
            self.source, self.num_edges, self.fingerprint = edge_index, num_edges, key
            self._replace_filling()
            self._make_anew()

    def _replace_filling(self) -> None:
        # Who still holds views of the old edges is told; of what torch.compile saved, PyTorch finds out.
        self.filling.replaced, self.filling = True, Filling()
        self.memo = {key: made for key, made in self.memo.items() if key in self.makers}
        assert self.rows is not None
        torch.autograd.graph.increment_version((self.windows, self.rows))

    def _check_room(self, *entries: int) -> None:
        room = packing.lengths_of(self.windows)[3]
        if max(entries) > room:
            raise ValueError(
                f"`edge_index` must have at most {room} column entries in each direction, for which there is "
                f"room (got {max(entries)}); make RefillableWindows with a larger num_entries"
            )

    def _write(self, edge_index: Tensor) -> int:
        # what the kernels of the quick build do, in PyTorch's operations
        scalars = self.scalars
        num_nodes, num_edges = scalars.num_dst, edge_index.size(1)
        inputs.check_indices(edge_index, num_nodes, num_nodes)
        src, dst = edge_index.long()
        distinct = (src * num_nodes + dst).unique().numel()
        if distinct < num_edges:
            raise ValueError(
                f"`edge_index` must have no edge twice (got {num_edges} edges, {distinct} of them distinct); "
                "apply torch_geometric.utils.coalesce, or pass RowWindows.from_edge_index"
            )
        pairs = ((dst, src), (src, dst))
        directions = [build.build_direction(*pair, num_nodes, num_nodes) for pair in pairs]
        self._check_room(*(direction.column.numel() for direction in directions))
        assert self.rows is not None
        for back, direction, (row, column) in zip((False, True), directions, pairs, strict=True):
            window, by_row = walk(self.windows, back), walk(self.rows, back)
            tasks, _, _ = build.cut_tasks(direction.ptr, scalars.num_edges)
            order = torch.argsort(row * num_nodes + column)
            starts = torch.searchsorted(row[order], torch.arange(num_nodes + 1, device=row.device))
            assert window.row_mask is not None
            _write(window.ptr, direction.ptr)
            _write(window.tasks, tasks)
            _write(window.column, direction.column)
            _write(window.row_mask, direction.row_mask)
            _write(by_row.ptr, starts)
            _write(by_row.column, column[order])
        return fingerprint(edge_index)

    def lazy(self, name: str) -> Tensor:
        if name != "rows":
            raise RuntimeError(
                "refillable row windows have no order of their edges, which values of edges (weights, "
                "features) and weights of attention need; pass edge_index or RowWindows"
            )
        return super().lazy(name)

    def _make(self, key: Any, make: Callable[[], Any]) -> Any:
        made = super()._make(key, make)
        if isinstance(made, Tensor) or type(made) is tuple:
            self.makers[key] = make
        return made

    def _make_anew(self) -> None:
        # in the order in which they were made, as some are made of others
        for key, make in self.makers.items():
            old, new = self.memo[key], make_lasting(make)
            both = ((old, new),) if isinstance(old, Tensor) else zip(old, new, strict=True)
            for place, found in both:
                if place is not None and place.data_ptr() != found.data_ptr():
                    place.copy_(found)


def _write(place: Tensor, found: Tensor) -> None:
    place[: len(found)].copy_(found)
