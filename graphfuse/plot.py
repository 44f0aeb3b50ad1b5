"""What a graph looks like to the kernels: blocks and edges of its row windows, and where its edges lie."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.build import BLOCK, WINDOW
from graphfuse.formats.save import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_BLUE, _ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito: told apart whatever the colour vision
_CELLS = 256  # a side of the spy plot, at most
_CHUNK = 1 << 24  # edges placed at a time


def blocks_per_window(windows: RowWindows) -> Tensor:
    """TCBs, blocks of 8 column entries, of each row window: ``int64[num_windows]``."""
    length = torch.diff(windows.walk().ptr).long()
    return length.add(BLOCK - 1).div(BLOCK, rounding_mode="floor")


def edges_per_window(windows: RowWindows) -> Tensor:
    """Edges of each row window: ``int64[num_windows]``."""
    rows, order = windows.edges_per_row(), windows.walk().row_index
    if order is not None:
        rows = rows[order[: rows.numel()]]
    window = torch.arange(rows.numel(), device=rows.device) // WINDOW
    counts = torch.zeros(-(-rows.numel() // WINDOW), dtype=torch.int64, device=rows.device)
    return counts.index_add_(0, window, rows)


def density(windows: RowWindows, cells: int = _CELLS, in_windows: bool = False) -> Tensor:
    """Edges in each cell of a grid over the matrix, receivers by sources: ``int64[rows, columns]``.

    A cell is one entry of the matrix where a side has at most ``cells`` of them, else an equal share.

    Args:
        windows: The graph.
        cells: A side of the grid, at most.
        in_windows: Whether receivers stand in the order of the windows, not as they are numbered.
    """
    num_dst, num_src = windows.shape
    rows, columns = min(num_dst, cells), min(num_src, cells)
    counts = torch.zeros(rows * columns, dtype=torch.int64, device=windows.device)
    edges, order = windows.edge_index(), windows.walk().row_index if in_windows else None
    place = None
    if order is not None:
        place = torch.empty(num_dst, dtype=torch.int64, device=windows.device)
        place[order[:num_dst].long()] = torch.arange(num_dst, device=windows.device)
    for start in range(0, edges.size(1), _CHUNK):
        src, dst = edges[:, start : start + _CHUNK].long()
        dst = dst if place is None else place[dst]
        counts += torch.bincount(
            dst * rows // num_dst * columns + src * columns // num_src, minlength=len(counts)
        )
    return counts.view(rows, columns)


def draw(windows: RowWindows, title: str, reordered: RowWindows | None = None) -> Figure:
    """A figure of three panels: TCBs and edges of the row windows, as histograms, and a spy plot.

    Args:
        windows: The graph.
        title: Its name.
        reordered: The same graph with other rows in a window: three more panels below, the receivers of its
            spy plot in the order of its windows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: it would look for a screen
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed; run: pip install graphfuse[bench]"
        ) from error

    records = [windows] if reordered is None else [windows, reordered]
    figure = Figure(figsize=(13.5, 4.4 * len(records)), layout="constrained")
    rows = figure.subplots(len(records), 3, squeeze=False)
    num_dst, num_src = windows.shape
    says = (
        f"{title}: {num_dst:,} x {num_src:,}, {windows.num_edges:,} edges, {-(-num_dst // WINDOW):,} windows"
    )
    if reordered is not None:
        says += f"; above as numbered, {windows.num_entries:,} column entries, below reordered, "
        says += f"{reordered.num_entries:,}"
    figure.suptitle(says)
    for axes, record in zip(rows, records, strict=True):
        _histograms(axes[0], axes[1], record)
        _spy_plot(figure, axes[2], record, in_windows=record is reordered)
    if reordered is not None:  # to be compared
        for left, right in zip(rows[0][:2], rows[1][:2], strict=True):
            left.sharex(right)
            left.sharey(right)
            left.autoscale()
    return figure


def _histograms(left: Any, middle: Any, windows: RowWindows) -> None:
    blocks, edges = blocks_per_window(windows).cpu(), edges_per_window(windows).cpu()
    most = int(blocks.max()) if len(blocks) else 0
    width = -(-(most + 1) // 60)  # whole blocks in a bar
    left.hist(blocks.numpy(), bins=torch.arange(0, most + 2 * width, width).numpy() - 0.5, color=_BLUE)
    left.set(xlabel=f"TCBs ({WINDOW} x {BLOCK}) in a row window", ylabel="row windows")
    left.set_title(f"mean {blocks.double().mean():.1f}, most {most:,}" if len(blocks) else "no windows")

    used = edges[edges > 0]
    if len(used):
        left.set_yscale("log")  # few windows are long, and these are the ones to see
        left.set_ylim(bottom=0.5)
        low, high = (int(used.min()) - 0.5, int(used.max()) + 0.5)
        middle.hist(
            used.numpy(), bins=torch.logspace(math.log10(low), math.log10(high), 41).numpy(), color=_ORANGE
        )
        middle.set_xscale("log")
    middle.set(xlabel="edges in a row window", ylabel="row windows")
    middle.set_title(f"{len(edges) - len(used):,} windows without edges")


def _spy_plot(figure: Figure, axes: Any, windows: RowWindows, in_windows: bool) -> None:
    from matplotlib.colors import LogNorm

    num_dst, num_src = windows.shape
    cells = density(windows, in_windows=in_windows).cpu()
    axes.locator_params(nbins=5)
    receiver = "receiver, as windows have them" if in_windows else "receiver"
    axes.set(xlabel="source", ylabel=receiver, title="edges in a cell")
    if cells.any():
        shown = cells.double()
        shown[cells == 0] = float("nan")
        image = axes.imshow(
            shown.numpy(), extent=(0, num_src, num_dst, 0), aspect="equal" if num_src == num_dst else "auto",
            cmap="cividis", norm=LogNorm(1, max(2, int(cells.max()))), interpolation="nearest",
        )  # fmt: skip
        figure.colorbar(image, ax=axes)


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Raises ``ValueError`` unless ``path`` is a ``.png`` or ``.svg``."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"a plot must end in {' or '.join(SUFFIXES)} (got {str(path)!r})")


def write(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes ``figure`` as PNG or SVG, by the suffix of ``path``, whole or not at all.

    The same figure gives the same bytes: neither date nor random identifiers go in.

    Raises:
        ValueError: the suffix is another one.
        OSError: the folder does not exist or cannot be written to.
    """
    import matplotlib

    check_suffix(path)
    svg = Path(path).suffix.lower() == ".svg"
    settings: Any = {"svg.hashsalt": "graphfuse", "svg.fonttype": "none"}  # text stays text
    with matplotlib.rc_context(settings), replacing(path) as partial:
        figure.savefig(partial, dpi=150, metadata={"Date": None} if svg else None)
