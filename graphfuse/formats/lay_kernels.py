"""The kernels of :mod:`.quick` that lay out what :mod:`.quick_kernels` sorted, and count rows."""

from __future__ import annotations

import triton
import triton.language as tl

from graphfuse.formats.quick_kernels import BEGIN, HEIGHT, MIDDLE, PLACE, PTR, of_windows

COLUMNS = 32  # edges or entries of a window that are looked at together
ROWS = 32  # rows of a program that looks for long ones ...
_OTHER_ROWS = tl.constexpr(1024)  # ... and those that it compares them with at a time
_COLUMN_MASK = tl.constexpr((1 << 28) - 1)
# where a header tells of its sections, see packed.py
_HEADER, _SECTIONS, _ALIGN = tl.constexpr(64), tl.constexpr(12), tl.constexpr(32)


def headed(header: tuple[int, ...]) -> tuple[int, ...]:
    """``header`` as :func:`lay_kernel` takes it: 16 n + 2 for each number.

    Triton compiles anew for a number of a tuple that is 1, or a multiple of 16, whatever it is told: none is.
    """
    return tuple([16 * number + 2 for number in header])


# Lays out packed tensors: what their headers say is to be in them.
#   grid      (windows of the longer direction, directions): one program = one window; one direction if
#             the second holds the same
#   reads     first and second: the headers, see headed(), of windows or window_edges, and of rows or
#             row_edges; key int64 [2 * num_edges], sorted; order int32, the edge of each, if there are
#             window_edges; the table
#   writes    windows int32, and masks int16, the same memory; rows; window_edges; row_edges, unless None
@triton.jit(
    do_not_specialize=["first", "second", "num_edges", "num_rows", "back_rows", "num_windows", "all_windows"]
)
def lay_kernel(
    windows_ptr, masks_ptr, rows_ptr, window_edges_ptr, row_edges_ptr, first, second, key_ptr, order_ptr,
    table_ptr, num_edges, num_rows, back_rows, num_windows, all_windows, COLUMNS: tl.constexpr,
):  # fmt: skip
    window, back = tl.program_id(0), tl.program_id(1)
    if window == 0:
        if windows_ptr is not None:
            _begin(windows_ptr, first, back)
            _begin(rows_ptr, second, back)
            entries = _length(first, back, 3)
            out_ptr = masks_ptr + 2 * _start(first, back, 4) + entries  # two masks in one int32
            tl.store(out_ptr, tl.zeros_like(entries).to(tl.int16), mask=entries % 2 > 0)
        else:
            _begin(window_edges_ptr, first, back)
            _begin(row_edges_ptr, second, back)
    listed = window + back * num_windows  # in the table
    num_rows = tl.where(back > 0, back_rows, num_rows)
    if window * HEIGHT >= num_rows:
        return
    begin_ptr = of_windows(table_ptr, BEGIN, all_windows) + listed
    begin, end = tl.load(begin_ptr).to(tl.int32), tl.load(begin_ptr + 1).to(tl.int32)
    ptr_ptr = of_windows(table_ptr, PTR, all_windows) + listed
    middle = back * tl.load(table_ptr + MIDDLE).to(tl.int32)
    entry, last = tl.load(ptr_ptr).to(tl.int32) - middle, tl.load(ptr_ptr + 1).to(tl.int32) - middle
    skipped = back * num_edges
    offset = tl.arange(0, HEIGHT)
    row = window * HEIGHT + offset
    if windows_ptr is not None:
        out_ptr = windows_ptr + _start(first, back, 0)
        tl.store(out_ptr + window, entry)
        tl.store(out_ptr + window + 1, last, mask=window * HEIGHT + HEIGHT >= num_rows)
        task = tl.load(of_windows(table_ptr, PLACE, all_windows) + listed) - back * num_windows
        task_ptr = windows_ptr + _start(first, back, 1) + task * 4
        tl.store(task_ptr, window)
        tl.store(task_ptr + 1, entry)
        tl.store(task_ptr + 2, last)
        tl.store(task_ptr + 3, -1)
    # where each row begins
    count, at = tl.zeros((HEIGHT,), tl.int32), begin
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        key = tl.load(key_ptr + offs, mask=offs < end, other=0)
        count += tl.sum(_bits(key, offset, offs < end), 1)
        at += COLUMNS
    row_end = begin - skipped + tl.cumsum(count, 0)
    place = row_end - count
    if rows_ptr is not None:
        out_ptr = rows_ptr + _start(second, back, 0)
        tl.store(out_ptr + row, place, mask=row < num_rows)
        tl.store(out_ptr + row + 1, row_end, mask=row == num_rows - 1)
    at = begin
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        live = offs < end
        key = tl.load(key_ptr + offs, mask=live, other=0)
        earlier = tl.load(key_ptr + offs - 1, mask=live & (offs > begin), other=-1)
        new = live & (key >> 4 != earlier >> 4)
        number = entry + tl.cumsum(new.to(tl.int32), 0) - 1
        entry += tl.sum(new.to(tl.int32), 0)
        column = ((key >> 4) & _COLUMN_MASK).to(tl.int32)
        bit = _bits(key, offset, live)
        within = place[:, None] + tl.cumsum(bit, 1) - bit
        place += tl.sum(bit, 1)
        if windows_ptr is not None:
            mask = tl.full((COLUMNS,), 1, tl.int32) << (key & 15).to(tl.int32)
            for further in tl.range(1, HEIGHT):  # an entry has at most an edge of each row
                other = tl.load(key_ptr + offs + further, mask=offs + further < end, other=-1)
                mask |= tl.where(other >> 4 == key >> 4, 1 << (other & 15).to(tl.int32), 0)
            tl.store(windows_ptr + _start(first, back, 3) + number, column, mask=new)
            tl.store(masks_ptr + 2 * _start(first, back, 4) + number, mask.to(tl.int16), mask=new)
        if rows_ptr is not None:
            out_ptr = rows_ptr + _start(second, back, 3)
            tl.store(out_ptr + within, tl.broadcast_to(column[None, :], bit.shape), mask=bit != 0)
        if order_ptr is not None:
            edge = tl.load(order_ptr + offs, mask=live, other=0)
            out_ptr = window_edges_ptr + _start(first, back, 0)
            tl.store(out_ptr + number, offs - skipped, mask=new)
            tl.store(out_ptr + number + 1, offs + 1 - skipped, mask=live & (offs - skipped == num_edges - 1))
            tl.store(window_edges_ptr + _start(first, back, 1) + offs - skipped, edge, mask=live)
            out_ptr = row_edges_ptr + _start(second, back, 0)
            tl.store(out_ptr + within, tl.broadcast_to(edge[None, :], bit.shape), mask=bit != 0)
        at += COLUMNS


# Lists the rows of more edges than `split` as tasks, longest first, of equal ones the first.
#   grid      (cdiv(rows of the longer direction, ROWS), directions)
#   reads     the header of rows, see headed(); ptr
#   writes    tasks
@triton.jit(do_not_specialize=["header", "num_rows", "back_rows", "split", "back_split"])
def list_kernel(rows_ptr, header, num_rows, back_rows, split, back_split, ROWS: tl.constexpr):
    back = tl.program_id(1)
    if back > 0:
        num_rows, split = back_rows, back_split
    ptr_ptr = rows_ptr + _start(header, back, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin, end = _bounds(ptr_ptr, row, num_rows)
    length = end - begin
    long = length > split
    if tl.max(long.to(tl.int32), 0) == 0:
        return
    task, at = tl.zeros_like(row), 0
    while at < num_rows:
        others = at + tl.arange(0, _OTHER_ROWS)
        first, last = _bounds(ptr_ptr, others, num_rows)
        other = (last - first)[None, :]
        sooner = (other > length[:, None]) | ((other == length[:, None]) & (others[None, :] < row[:, None]))
        task += tl.sum(sooner.to(tl.int32), 1)
        at += _OTHER_ROWS
    task_ptr = rows_ptr + _start(header, back, 1) + task.to(tl.int64) * 4
    tl.store(task_ptr, row, mask=long)
    tl.store(task_ptr + 1, begin, mask=long)
    tl.store(task_ptr + 2, end, mask=long)
    tl.store(task_ptr + 3, tl.full(row.shape, -1, tl.int32), mask=long)


@triton.jit
def _bounds(ptr_ptr, row, num_rows):
    # first edge and end of rows; none of those that there are not
    inside = row < num_rows
    return tl.load(ptr_ptr + row, mask=inside, other=0), tl.load(ptr_ptr + row + 1, mask=inside, other=0)


@triton.jit
def _start(header, back, SECTION: tl.constexpr):
    # of a section of a direction
    AT: tl.constexpr = _SECTIONS + 2 * SECTION
    HALF: tl.constexpr = (len(header) - _SECTIONS) // 2
    return (tl.where(back > 0, header[AT + HALF], header[AT]) >> 4).to(tl.int64) * _ALIGN


@triton.jit
def _length(header, back, SECTION: tl.constexpr):
    AT: tl.constexpr = _SECTIONS + 2 * SECTION + 1
    HALF: tl.constexpr = (len(header) - _SECTIONS) // 2
    return tl.where(back > 0, header[AT + HALF], header[AT]) >> 4


@triton.jit
def _begin(packed_ptr, header, back):
    # the header, and the end of the last line of each section of a direction, which is 0 behind its numbers
    KNOWN: tl.constexpr = len(header)
    for i in tl.static_range(KNOWN):
        tl.store(packed_ptr + i, header[i] >> 4)
    offs = tl.arange(0, _HEADER)
    tl.store(packed_ptr + offs, tl.zeros_like(offs), mask=offs >= KNOWN)
    behind = tl.arange(0, _ALIGN)
    for section in tl.static_range((KNOWN - _SECTIONS) // 4):
        length = _length(header, back, section).to(tl.int64)
        at = length // _ALIGN * _ALIGN + behind
        out_ptr = packed_ptr + _start(header, back, section)
        tl.store(out_ptr + at, tl.zeros((_ALIGN,), tl.int32), mask=(at >= length) & (length % _ALIGN > 0))


@triton.jit
def _bits(key, offset, live):
    # [WINDOW, COLUMNS] of 0 and 1: the row of each key
    return (((key & 15).to(tl.int32)[None, :] == offset[:, None]) & live[None, :]).to(tl.int32)


# Edges and self-loops of every row.
#   grid      (windows of the longer direction, directions): one program = one window
#   reads     ptr, column, mask of the windows of each direction
#   writes    count, loops int64 [num_rows + back_rows], rows of the transpose last
@triton.jit(do_not_specialize=["num_rows", "back_rows"])
def degrees_kernel(
    count_ptr, loops_ptr, ptr_ptr, column_ptr, mask_ptr, back_ptr, back_column_ptr, back_mask_ptr,
    num_rows, back_rows, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) > 0:
        count_ptr += num_rows
        loops_ptr += num_rows
        ptr_ptr, column_ptr, mask_ptr, num_rows = back_ptr, back_column_ptr, back_mask_ptr, back_rows
    offset = tl.arange(0, HEIGHT)
    row = tl.program_id(0) * HEIGHT + offset
    inside = row < num_rows
    count, loops = tl.zeros_like(row), tl.zeros_like(row)
    at, end = _window(ptr_ptr, tl.program_id(0), num_rows)
    while at < end:
        offs = at + tl.arange(0, COLUMNS)
        column = tl.load(column_ptr + offs, mask=offs < end, other=0)
        bit = _mask_bits(mask_ptr, offs, offset, end)
        count += tl.sum(bit, 1)
        loops += tl.sum(tl.where(column[None, :] == row[:, None], bit, 0), 1)
        at += COLUMNS
    tl.store(count_ptr + row, count.to(tl.int64), mask=inside)
    tl.store(loops_ptr + row, loops.to(tl.int64), mask=inside)


@triton.jit
def _window(ptr_ptr, window, num_rows):
    # first entry and end of a window; none of one that this direction does not have
    inside = window * HEIGHT < num_rows
    return tl.load(ptr_ptr + window, mask=inside, other=0), tl.load(
        ptr_ptr + window + 1, mask=inside, other=0
    )


@triton.jit
def _mask_bits(mask_ptr, offs, offset, end):
    # [WINDOW, COLUMNS] of 0 and 1: which rows use which entries
    mask = tl.load(mask_ptr + offs, mask=offs < end, other=0).to(tl.int32)
    return (mask[None, :] >> offset[:, None]) & 1
