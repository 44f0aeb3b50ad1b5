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


def density(windows: RowWindows, cells: int = _CELLS) -> Tensor:
    """Edges in each cell of a grid over the matrix, receivers by sources: ``int64[rows, columns]``.

    A cell is one entry of the matrix where a side has at most ``cells`` of them, else an equal share.
    """
    num_dst, num_src = windows.shape
    rows, columns = min(num_dst, cells), min(num_src, cells)
    counts = torch.zeros(rows * columns, dtype=torch.int64, device=windows.device)
    edges = windows.edge_index()
    for start in range(0, edges.size(1), _CHUNK):
        src, dst = edges[:, start : start + _CHUNK].long()
        counts += torch.bincount(
            dst * rows // num_dst * columns + src * columns // num_src, minlength=len(counts)
        )
    return counts.view(rows, columns)


def draw(windows: RowWindows, title: str) -> Figure:
    """A figure of three panels: TCBs and edges of the row windows, as histograms, and a spy plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure  # not pyplot: it would look for a screen
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed; run: pip install graphfuse[bench]"
        ) from error

    blocks, edges = blocks_per_window(windows).cpu(), edges_per_window(windows).cpu()
    figure = Figure(figsize=(13.5, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    num_dst, num_src = windows.shape
    figure.suptitle(
        f"{title}: {num_dst:,} x {num_src:,}, {windows.num_edges:,} edges, {len(blocks):,} windows"
    )

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

    cells = density(windows).cpu()
    right.locator_params(nbins=5)
    right.set(xlabel="source", ylabel="receiver", title="edges in a cell")
    if cells.any():
        shown = cells.double()
        shown[cells == 0] = float("nan")
        image = right.imshow(
            shown.numpy(), extent=(0, num_src, num_dst, 0), aspect="equal" if num_src == num_dst else "auto",
            cmap="cividis", norm=LogNorm(1, max(2, int(cells.max()))), interpolation="nearest",
        )  # fmt: skip
        figure.colorbar(image, ax=right)
    return figure


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
