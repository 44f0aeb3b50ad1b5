"""Plots of a graph: the numbers in them, and the files."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch

from graphfuse import RowWindows, plot
from graphfuse.testing import GRAPHS


def build(graph: str) -> tuple[list[tuple[int, int]], RowWindows]:
    edge_index, size = GRAPHS[graph]()
    return list(map(tuple, edge_index.t().tolist())), RowWindows.from_edge_index(edge_index, size)


@pytest.mark.parametrize("graph", ["no_nodes", "no_edges", "isolated", "self_loops", "hub", "bipartite_tall"])
def test_counts_are_those_of_the_edge_list(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "_CHUNK", 7)
    edges, windows = build(graph)
    num_dst, num_src = windows.shape
    in_window = Counter(dst // 16 for _, dst in edges)
    num_windows = -(-num_dst // 16)
    assert plot.edges_per_window(windows).tolist() == [in_window[w] for w in range(num_windows)]
    # each column that a window uses is an entry, once for each copy of its most repeated edge
    copies = Counter(edges)
    entries: Counter[tuple[int, int]] = Counter()
    for (src, dst), count in copies.items():
        entries[dst // 16, src] = max(entries[dst // 16, src], count)
    lengths = [sum(n for (window, _), n in entries.items() if window == w) for w in range(num_windows)]
    assert plot.blocks_per_window(windows).tolist() == [-(-length // 8) for length in lengths]
    ordered = RowWindows.from_edge_index(windows.edge_index(), (num_src, num_dst), reorder="degree")
    degree = sorted(Counter(dst for _, dst in edges).values(), reverse=True)
    sums = [sum(degree[first : first + 16]) for first in range(0, num_dst, 16)]
    assert plot.edges_per_window(ordered).tolist() == sums
    order = ordered.walk().row_index  # None: the rows as numbered were best
    walked = torch.arange(num_dst) if order is None else order[:num_dst].long()
    # one cell for each entry of the matrix, then shares of it
    exact = torch.zeros(num_dst, num_src, dtype=torch.int64)
    for (src, dst), count in copies.items():
        exact[dst, src] = count
    assert torch.equal(plot.density(windows), exact)
    assert torch.equal(plot.density(windows, in_windows=True), exact)
    assert torch.equal(plot.density(ordered), exact)
    assert torch.equal(plot.density(ordered, in_windows=True), exact[walked])
    rough = plot.density(windows, cells=5)
    assert rough.shape == (min(num_dst, 5), min(num_src, 5)) and int(rough.sum()) == len(edges)
    for row in range(rough.size(0)):
        rows = [r for r in range(num_dst) if r * 5 // num_dst == row] if num_dst > 5 else [row]
        assert int(rough[row].sum()) == int(exact[rows].sum())


@pytest.mark.parametrize("graph", ["no_nodes", "no_edges", "one_edge", "bipartite"])
def test_no_window_is_left_out(graph: str, tmp_path: Path) -> None:
    edges, windows = build(graph)
    figure = plot.draw(windows, "name")
    left, middle, right = figure.axes[:3]
    shown = [round(sum(bar.get_height() for bar in axes.patches)) for axes in (left, middle)]
    assert shown == [-(-windows.shape[0] // 16), len({dst // 16 for _, dst in edges})]
    images = [int(image.get_array().filled(0).sum()) for image in right.images]
    assert images == ([len(edges)] if edges else [])
    plot.write(figure, tmp_path / "graph.png")


def test_two_orders_of_rows_are_drawn_alike() -> None:
    _, windows = build("ragged")
    ordered = RowWindows.from_edge_index(windows.edge_index(), windows.shape[::-1], reorder="degree")
    assert ordered.walk().row_index is not None
    figure = plot.draw(windows, "name", ordered)
    above, below = figure.axes[:3], figure.axes[3:6]
    for left, right in zip(above[:2], below[:2], strict=True):
        assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
    shown = [[image.get_array().filled(0) for image in axes.images] for axes in (above[2], below[2])]
    assert (shown[0][0] != shown[1][0]).any() and shown[0][0].sum() == shown[1][0].sum()
    says = f"above as numbered, {windows.num_entries} column entries, below reordered, {ordered.num_entries}"
    assert says in str(figure.get_suptitle())


def test_files_are_png_and_svg_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # it picks a backend, and may want a screen
    _, windows = build("ragged")
    for name in ("a.svg", "b.svg", "a.png"):
        plot.write(plot.draw(windows, "ragged"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    text = "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    for part in ("ragged: 33 x 33", "TCBs (16 x 8) in a row window", "edges in a row window", "receiver"):
        assert part in text


def test_a_plot_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plot.draw(build("one_edge")[1], "one_edge")
    path = tmp_path / "graph.png"
    path.write_bytes(b"old")

    def full(partial: Path, **options: object) -> None:
        partial.write_bytes(b"half")
        raise OSError("no space left on the device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(OSError, match="no space"):
        plot.write(figure, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"must end in .png or .svg \(got 'graph.pdf'\)"):
        plot.write(figure, "graph.pdf")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.colors", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install graphfuse\[bench\]"):
        plot.draw(build("one_edge")[1], "one_edge")
