"""When rows are copied before they are gathered: to start on 16 bytes, or to be scaled once for all."""

# Entries from which on a copy of x, a launch of some microseconds, costs little beside gathering its rows.
_COPIED = 1 << 17
# Likewise beside loading a factor for each entry, and entries of a column from which on that takes longer.
_SCALED, _SCALED_TIMES = 1 << 22, 64


def copy_pays(num_entries: int, num_rows: int, num_cols: int) -> bool:
    """Whether rows are gathered so often that it pays to copy all of them first, for a faster gather."""
    return num_entries >= max(_COPIED, 8 * max(num_rows, num_cols))


def scaled_copy_pays(num_entries: int, num_rows: int, num_cols: int, size: int) -> bool:
    """Whether windows gather rows of elements of ``size`` bytes that were scaled before.

    Windows put factors of half precision in their tile of ones, and what is left is to load one for each
    entry: copies take longer but where a column has many entries (results: factors.md). Other precisions
    would have them scale each row of each step, on its way through registers.
    """
    if size == 2:
        return num_entries >= max(_SCALED, _SCALED_TIMES * num_cols)
    return copy_pays(num_entries, num_rows, num_cols)


def gathered_width(num_entries: int, num_rows: int, num_cols: int, dim: int, size: int) -> int:
    """Features of a row as it is gathered: ``dim``, or more that are 0, so that rows start on 16 bytes.

    Rows that start anywhere are loaded in pieces of 2 or 4 bytes. 41 features of half precision took 2.1 to
    3 times as long as 48, of float32 1.6 to 3.7 times (results/nvidia-h200/odd_widths.md).
    """
    row = dim * size
    if row % 8 == 0 or row < 8 or not copy_pays(num_entries, num_rows, num_cols):
        return dim
    return -(-row // 16) * 16 // size


def gathers_copies(num_entries: int, num_rows: int, num_cols: int, dim: int, size: int, scaled: bool) -> bool:
    """Whether what is gathered is a copy of the rows: wider, or of windows that are ``scaled`` by column."""
    sizes = (num_entries, num_rows, num_cols)
    return gathered_width(*sizes, dim, size) != dim or (scaled and scaled_copy_pays(*sizes, size))
