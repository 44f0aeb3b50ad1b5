"""Whether a kernel walks rows or windows: a function of the graph's counts and the shapes, of no timing."""

from __future__ import annotations

import torch

from graphfuse.formats.listed import MAX_COLS
from graphfuse.kernels.device import HALF
from graphfuse.kernels.loads import FULL

# A matrix beyond this does not stay in the L2 cache of an H200 (60 MB) while it is gathered.
_CACHED_BYTES = 48_000_000
# And of one beyond this hardly anything does, so that a kernel waits for memory in either walk.
_GATHERED_BYTES = 200_000_000
# Edges, and edges for each row, from which on a list of them is made for GAT. The record of a smaller graph,
# or of a sampled mini-batch, which is nearly a tree, may serve one step, and the list is not made in that.
_LISTED, _LISTED_DEGREE = 1 << 16, 3


def prefers_rows(
    num_rows: int, num_cols: int, num_edges: int, num_entries: int, dim: int, dtype: torch.dtype, fused: bool
) -> bool:  # fmt: skip
    """Whether aggregation walks rows one by one rather than windows of 16.

    Windows read a shared column once and sum on tensor cores, and win in half precision where they fill the
    GPU, even if they share nothing. (With a value per edge, rows always are.) Numbers of float32 they have to
    cut in two: rows win where windows share next to nothing, as on graphs with hubs, unless they are short.

    Args:
        num_rows: Receivers.
        num_cols: Senders.
        num_edges: Edges between them.
        num_entries: What windows read of them.
        dim: Features of a row as it is gathered.
        dtype: Of the features.
        fused: Whether a product that widens the sums may follow in the same kernel, which is for windows.
    """
    if num_rows < FULL and dim <= 16:
        return True
    if dtype is not torch.float32 or fused or dim <= 32 or num_cols * dim * 4 > _GATHERED_BYTES:
        return False
    most, shared = max(num_rows, num_cols), 1400 if dim <= 64 else 1300
    return most >= 2 * FULL and num_edges >= 8 * most and 1000 * num_edges <= shared * num_entries


def _beyond_cache(num_cols: int, heads: int, dim: int, size: int) -> bool:
    # whether k and v, or the x of GAT and its gradient, which is gathered in backward, are
    return 2 * num_cols * heads * dim * size > _CACHED_BYTES


def _slivers(
    num_cols: int, num_edges: int, num_entries: int, heads: int, dim: int, size: int, dropout: bool
) -> bool:
    # whether heads are slivers of a row, k and v do not stay in the L2 cache, and windows share few columns
    most = 1500 if dropout or dim < 16 else 1003  # next to none, as where edges were drawn at random
    narrow = heads > 1 and dim * size <= 64 and 1000 * num_edges <= most * num_entries
    return narrow and _beyond_cache(num_cols, heads, dim, size)


def attention_prefers_rows(
    num_rows: int, num_cols: int, num_edges: int, num_entries: int, heads: int, dim: int, dropout: bool,
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether attention walks rows, all heads of one at a time, rather than windows, a group at a time.

    Windows win in half precision, though they compute 16 scores for each row of k that they read, except
    where they share few columns, k and v do not stay in the L2 cache, and heads are slivers of a row: padded
    ones, or with ``dropout``, for which a window draws numbers for 16 rows an entry, or where next to no
    column is shared. In float32 scores would be sums of tensor cores, less exact than the definition's.
    """
    slivers = _slivers(num_cols, num_edges, num_entries, heads, dim, dtype.itemsize, dropout)
    return slivers or dtype not in HALF


def gat_lists_edges(
    num_rows: int, num_cols: int, num_edges: int, num_entries: int, heads: int, dim: int, trained: bool,
    dropout: bool, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether GAT's attention makes a weight of each edge of a window, rather than 16 of each column.

    A column that rows of a window share is gathered for each of them then. Of heads of 8 features by eights,
    a sector of half precision for two, where windows share few columns and have 320 of them at most, as a
    program makes one step after the other; with gradients (``trained``) or ``dropout``, for which each weight
    has a draw, also where windows are of a step or two. Of heads of 16 features with gradients, of windows of
    160 columns. The rest as of :func:`gat_prefers_rows` (results: listed_edges.md).
    """
    fits = dtype in HALF and dim in (8, 16) and heads % 8 == 0 and num_cols <= MAX_COLS
    if not fits or num_edges < max(_LISTED, _LISTED_DEGREE * num_rows):
        return False
    if 2 * num_cols * heads * dim * dtype.itemsize > _GATHERED_BYTES:
        return False
    apart = 4 * num_edges <= 5 * num_entries
    if dim == 16:
        return trained and apart and num_entries <= 10 * num_rows
    few_steps = (trained or dropout) and num_entries <= 4 * num_rows
    return few_steps or (apart and num_entries <= 20 * num_rows)


def gat_prefers_rows(
    num_rows: int, num_cols: int, num_edges: int, num_entries: int, heads: int, dim: int, trained: bool,
    dropout: bool, terms: torch.dtype, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether GAT's attention walks rows rather than windows; ``trained`` if its receivers get gradients.

    In float32; for the reasons of dot-product attention where heads are slivers; and where heads are narrower
    than half a sector, which has 32 bytes. Several heads of half a sector walk windows only where those share
    columns, and so do several of a sector in training, if x stays in the L2 cache, but by fours, of which
    backward sums factors, without ``dropout`` and with ``terms`` of scores in ``dtype``. With
    dropout training asks for more, as windows draw for 16 rows an entry. Windows of small and sparse graphs
    are walked where heads have 16 features together, as it is the longest row that is waited for (results:
    gat_shapes.md, rows_once_more.md, dropout.md, wide_and_odd.md, few_rows.md, records.md).
    """
    few = max(num_rows, num_cols) < FULL and num_edges <= 8 * num_rows and heads * dim >= 16
    sector = dim * dtype.itemsize
    if sector < 32:
        draws = trained and dropout and num_entries >= 4 * num_rows  # windows of more than a step or two
        skips = draws or sector != 16 or heads == 1 or 2 * num_edges <= 3 * num_entries
        return dtype not in HALF or (skips and not few)
    skips = sector == 32 and heads > 1 and trained and 4 * num_edges <= (6 if dropout else 5) * num_entries
    skips = skips and (dropout or heads % 4 != 0 or terms != dtype)
    skips = skips and not few and (dropout or not _beyond_cache(num_cols, heads, dim, dtype.itemsize))
    # dropout is no reason: windows of wider heads are faster with it too
    slivers = _slivers(num_cols, num_edges, num_entries, heads, dim, dtype.itemsize, dropout=False)
    return skips or slivers or dtype not in HALF
