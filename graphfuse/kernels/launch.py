"""Launch configurations: a function of the walk, the width and the element size, the same on every run.

No run-time autotuning: it races across threads, must not run inside a CUDA graph capture, and would let the
machine's mood choose the order of summation. Rules were read off sweeps on an H200 or H100 (tune.jsonl), over
real graphs from Cora to dblp-2010 and stand-ins of larger ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from graphfuse.kernels import float32_rows, half_rows, row_sums
from graphfuse.kernels.loads import Load as Load
from graphfuse.kernels.loads import RowLoad as RowLoad
from graphfuse.kernels.loads import load as load
from graphfuse.kernels.loads import row_load as row_load
from graphfuse.kernels.walk_rules import attention_prefers_rows as attention_prefers_rows
from graphfuse.kernels.walk_rules import gat_prefers_rows as gat_prefers_rows
from graphfuse.kernels.walk_rules import prefers_rows as prefers_rows

_MAX_EDGE_TILE = 4096  # elements of a row, or of what an edge adds to it, that attention with edges holds
_MANY_ELEMENTS = 1 << 20  # whose programs do not all start at once (results, of slices too: row_kernels.md)
FEW_SLICES = 264  # slices of rows, two for a multiprocessor of an H200: their merge takes little time


class Config(NamedTuple):
    """How one kernel is launched."""

    block_dim: int  # features a program handles
    step: int  # column entries or edges per step of its loop
    stages: int  # software pipelining depth of the loop
    warps: int
    block_out: int = 16  # output features per step of the fused GEMM
    rows: int = 1  # rows a program of the row kernel handles, or heads one of attention does
    registers: int | None = None  # most of a thread; None lets the compiler choose
    packed: int = 1  # programs of one warp that share a block, where rows are walked
    guess: bool = False  # whether windows of attention try to make do with a guess at their maxima


@functools.cache
def whole_rows(dim: int, tile: int = 1024) -> Config:
    """Kernels of whole rows: 8 elements of a tile a thread, or more, as a program has 512 threads at most."""
    width = power_of_two(dim)
    rows = max(1, tile // width)
    return Config(width, 1, 1, min(16, max(1, rows * width // 256)), rows=rows)


def rows_at_once(dim: int, num_rows: int) -> Config:
    """:func:`whole_rows` of kernels that walk no slices: of a large matrix fewer programs do more each."""
    return whole_rows(dim, 2048 if num_rows * dim >= _MANY_ELEMENTS else 1024)


def row_slices(num_rows: int, rows: int, steps: int = 16, most: int = 1056) -> tuple[int, int]:
    """Rows of a slice, which has partial sums for the gradient of a weight, and the number of slices.

    Args:
        num_rows: At least 1.
        rows: Of a step, of which slices are made.
        steps: Of a slice, or fewer where that would leave fewer slices than FEW_SLICES.
        most: Slices.
    """
    total = -(-num_rows // rows)
    length = -(-total // min(most, max(total // steps, FEW_SLICES))) * rows
    return length, -(-num_rows // length)


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@functools.cache
def spmm_window(dim: int, size: int, out_dim: int | None, load: Load, scaled: bool = False) -> Config:
    """Window kernel of :func:`graphfuse.kernels.spmm.spmm`, elements of ``size`` bytes.

    ``scaled``: with factors of columns.
    """
    config = _spmm_window(dim, size, out_dim, load)
    if scaled and size == 2 and out_dim is None and load is Load.TINY and config.block_dim == 64:
        # steps of 16 would load the columns twice, once for their rows and once for their factors
        config = config._replace(step=32, stages=2, registers=96)
    unaligned = dim * size % 16 != 0
    if size == 2 and out_dim is None and unaligned and dim * size % 8 == 0:
        return config._replace(registers=None)
    # told no bound, the assembler spills products, and rows off 8 bytes, out of 128 or 72 registers
    return config._replace(registers=255) if out_dim is not None or unaligned else config


def _spmm_window(dim: int, size: int, out_dim: int | None, load: Load) -> Config:
    width = power_of_two(dim, 16)
    if out_dim is not None:
        stages, warps = (5, 1) if width * size <= 256 else (2, 4)
        return Config(width, 32, stages, warps, min(power_of_two(out_dim, 16), 32 if size > 2 else 64))
    narrow, short = width <= 16, load.short and width <= 128
    block = min(width, 64)
    if size > 2:
        if narrow:
            return Config(block, 64 if load.few else 32, 2 if load is Load.LONG else 3, 1)
        if load is Load.TINY:
            return Config(block, 16, 3, 1)
        return Config(32 if short else block, 32, 5, 1)
    if load is Load.LONG:
        step = 64 if narrow or (width <= 64 and dim % 8 == 0) else 32
        return Config(min(width, 128), step, 3 if narrow else 5, 1)
    if load is Load.TINY:
        return Config(128, 16, 2, 1) if width >= 128 else Config(block, 16, 3, 1, registers=80)
    if narrow:
        return Config(block, 64, 3, 1)
    if short and dim * size % 16 == 0:
        return Config(32, 64, 5, 1) if width <= 64 else Config(64, 32, 5, 1)
    if width >= 128 and load in (Load.FEW, Load.SOME):
        return Config(64, 32, 5 if load is Load.FEW else 6, 1)
    return Config(min(width, 128), 32, 5, 1, registers=96 if width <= 64 else None)


@functools.cache
def spmm_row(dim: int, out_dim: int | None, num_rows: int, num_edges: int, num_tasks: int) -> Config:
    """Row kernel of :func:`graphfuse.kernels.spmm.spmm`."""
    shape = row_sums.shape(power_of_two(dim), out_dim is not None, num_rows, num_edges, num_tasks)
    return Config(*shape[:4], power_of_two(min(out_dim or 1, 16)), shape.rows)


@functools.cache
def sddmm_row(dim: int) -> Config:
    """Row kernel of :func:`graphfuse.kernels.sddmm.sddmm`."""
    block = min(power_of_two(dim), 128)
    return Config(block, min(32, max(4, 1024 // block)), 2, 1)


@functools.cache
def attention_window(heads: int, dim: int, size: int, dropout: bool, scaled: bool, load: Load) -> Config:
    """Window kernel of :func:`graphfuse.kernels.attention.attention_fwd`, elements of ``size`` bytes.

    ``rows`` is the group of heads, a row of 64 features where heads are narrow. Half precision is spared the
    running maximum where a step computes longer than it gathers: of four heads, of two where tasks are long,
    and of keys that are ``scaled`` values but for one load; not where there is hardly more than a first step.
    """
    config = _attention_window(heads, dim, size, dropout, scaled, load)
    bound = _starts_on_16_bytes(config.rows * dim) or (load is Load.TINY and config.rows > 1)
    return config if bound else config._replace(registers=None)


def _attention_window(heads: int, dim: int, size: int, dropout: bool, scaled: bool, load: Load) -> Config:
    width, group, long = power_of_two(dim, 16), attention_group(heads, dim), load is Load.LONG
    guess = size == 2 and not dropout and (scaled or group > 2 or (group == 2 and long))
    if load is Load.FEWEST and group > 1 and dim > 8 and not scaled:  # see few_programs.md
        return Config(width, 32, 3, 1) if dropout else Config(width, 32, 5, 1, registers=168, guess=size == 2)
    if load is Load.TINY and not (dropout or scaled) and (group > 1 or dim == 128):
        return Config(width, 16, 5, 1, rows=group, registers=128) if group > 1 else Config(width, 16, 2, 2)
    if group > 1 and not (dropout or scaled):
        # a bound costs instructions, but where tasks are short what it makes of the loop is faster
        stages, most = 3 if long and width == 32 else 5, 168 if group > 2 else None if long else 128
        return Config(width, 32, stages, 1, rows=group, registers=most, guess=guess)
    if dropout and width == 32 and group > 1:
        return Config(width, 32, 3, 1, rows=group, registers=168)
    if width == 64 and load.few and not scaled:
        return Config(width, 32, 5, 1, registers=144 if dropout else 168)
    if width == 64 and scaled and load is Load.NORMAL:
        return Config(width, 32, 3, 1, registers=128)
    if width <= 64:  # told no bound, the compiler spares registers in inference: only tiny tasks gain by it
        tight = guess or (width == 64 and load is not Load.TINY)
        registers = 144 if dropout and width == 64 else 168 if tight else None
        stages = 5 if group > 1 or (scaled and long and width == 64) else 3
        return Config(width, 32, stages, 1, rows=group, registers=registers, guess=guess)
    if width <= 128:
        return Config(width, 32, 2 if scaled else 3, 1, guess=guess)
    return Config(width, 32, 2, 2, guess=guess)


@functools.cache
def attention_bwd_window(heads: int, dim: int, dropout: bool, self_loops: bool, load: Load) -> Config:
    """Window kernel of :func:`graphfuse.kernels.attention_bwd.attention_bwd`; ``rows`` is the group of heads.

    168 registers let twelve programs of a warp stay on a multiprocessor; the compiler would take 194. Dropout
    and two heads of 32 would spill. 32 and 64 features, and two heads, do better with two steps of rows on
    their way than with more programs. Four heads pay where windows are many and not long.
    """
    width, tiny = power_of_two(dim, 16), load is Load.TINY
    if width <= 64:
        four = tiny or (load is Load.NORMAL and not dropout)
        group = 1 if dropout and width == 32 else min(attention_group(heads, dim), 4 if four else 2)
        registers = None if dropout or group > 1 or not _starts_on_16_bytes(dim) else 168
        stages = 5 if width >= 32 or group > 1 else 2
        return Config(width, 16 if tiny and group > 1 else 32, stages, 1, rows=group, registers=registers)
    if width <= 128 and dim % 8 == 0:
        return Config(width, 16, 2, 2) if tiny else Config(width, 64, 2 if dropout or self_loops else 3, 2)
    return Config(width, 32, 2, 2)


def _starts_on_16_bytes(gathered: int) -> bool:
    # whether rows of so many numbers of half precision do; else they come in more pieces, which take
    # registers for addresses, and a bound that suits other rows makes a step spill (results: wide_and_odd.md)
    return gathered % 8 == 0


def attention_group(heads: int, dim: int) -> int:
    """Heads whose features a window program gathers as one piece: those of 64 features, or one wider."""
    return min(power_of_two(heads), max(1, 64 // power_of_two(dim, 16)))


def slices(groups: int, block_dim: int, num_tasks: int, num_slots: int, num_entries: int) -> float:
    """How long slices of cut windows are for attention, in those of the record (results: slices.md).

    Each group of heads has programs of its own, so half as many slices fill the GPU, and as few are merged.
    """
    share = num_slots / max(num_tasks, 1)
    if share > 0.5:
        return 2 if groups > 1 else 1.25 if block_dim == 128 else 1  # of 128 features fewer fit at a time
    if share == 0 or groups == 1 or load(num_tasks, num_entries) is not Load.NORMAL:
        return 1
    return 2 if share > 1 / 3 else 1.5


def spmm_slices(blocks: int, size: int, num_tasks: int, num_slots: int, load: Load) -> float:
    """Likewise for aggregation, whose blocks of features have programs of their own (weighted_rows.md)."""
    few = load is Load.FEW and 2 * num_slots > num_tasks
    return 1.5 if size == 2 and blocks > 1 and few else 1


@functools.cache
def attention_delta(dim: int) -> Config:
    """Kernel of what backward knows of rows in float32: four elements a thread, one warp if that will do."""
    width = power_of_two(dim)
    return Config(width, 1, 1, max(1, width // 128), rows=max(1, 128 // width))


@functools.cache
def attention_row(
    heads: int, dim: int, size: int, load: RowLoad, backward: bool, edge_dim: int = 0
) -> Config:
    """Row kernels of attention, elements of ``size`` bytes; float32 has no pipeline.

    ``rows`` is the block of heads, ``block_out`` that of an edge's numbers, whose gradient wants all heads in
    one program. In half precision a step of one warp is one load of 16 bytes a thread.
    """
    block_dim, block_edge, block_heads = power_of_two(dim), power_of_two(edge_dim), power_of_two(heads)
    if edge_dim == 0:
        block_heads = min(block_heads, max(1, 512 // block_dim))
    width = block_heads * max(block_dim, block_edge)
    if size > 2 and edge_dim == 0:
        step, warps = float32_rows.attention(heads, width, load, backward)
        return Config(block_dim, step, 1, warps, block_edge, rows=block_heads)
    warps = min(16, max(1, width // 256))
    step = min(32, max(1, 256 * (warps if edge_dim > 0 else 1) // width))
    stages = 3 if edge_dim == 0 else 2 if size > 2 else half_rows.stages_with_edges(heads, load, backward)
    return Config(block_dim, step, stages, warps, block_edge, rows=block_heads)


@functools.cache
def gat_window(heads: int, dim: int, dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    """Window kernels of GAT's attention; ``rows`` is the group of heads.

    Forward makes do with a guess at the maxima, except where dropout meets windows of a step or two. Sums
    that are ``tilted`` want all registers for heads of 64 features and more, four that share a gather, or
    dropout; so does backward if a bound makes no more room (guesses_apart.md, dropout.md, slim_walk.md).
    """
    config = _gat_window(heads, dim, dropout, backward, tilted, load)
    return config._replace(guess=not (backward or (dropout and load is Load.TINY)))


def _gat_window(heads: int, dim: int, dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    width, kind = power_of_two(dim, 16), (dropout, backward, tilted, load)
    if load is Load.FEWEST and heads > 1 and 8 < dim <= 32:
        most = 128 if _starts_on_16_bytes(dim) and not (dropout and tilted) else None
        return Config(width, 32, 5, 1, registers=most)
    if width > 128:
        config = _gat_beyond_128(width, *kind[:3])
    elif width == 128:
        config = _gat_of_128(dim, *kind)
    elif width == 64 or heads == 1:
        config = _gat_of_one(width, *kind)
    elif width == 32:
        config = _gat_of_two(*kind)
    else:
        config = _gat_of_narrow(heads, dim, *kind)
    grouped = load is Load.TINY and config.rows > 1 and (backward or tilted)
    if not (_starts_on_16_bytes(config.rows * dim) or grouped):
        bound = backward and width <= 128 and not (dropout or tilted or load.few)
        config = config._replace(registers=168 if bound else None)
    if backward and width >= 32 and load.roomy and (not dropout or config.rows > 1):
        config = config._replace(registers=None)
    return config


def _gat_beyond_128(width: int, dropout: bool, backward: bool, tilted: bool) -> Config:
    if backward:
        return Config(width, 32, 2, 4 if dropout else 2)
    return Config(width, 32, 2, 2) if tilted else Config(width, 16, 2, 1)


def _gat_of_128(dim: int, dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    inference = not (dropout or backward or tilted)
    if load is Load.TINY and (inference or (dropout and tilted)):
        return Config(128, 16, 2, 1, registers=128 if inference else None)
    if dim % 8 != 0:
        return Config(128, 32, 3 if dropout or backward else 5, 1)
    bound = (backward and not tilted) or (inference and load is Load.NORMAL)
    return Config(128, 32, 3 if dropout else 5, 1, registers=168 if bound else 192 if inference else None)


def _gat_of_one(width: int, dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    # a head at a time
    if width == 64 and tilted and (load.deep if backward else not dropout):
        return Config(64, 16, 5, 1, registers=128) if load is Load.TINY else Config(64, 32, 5, 1)
    if width == 16:
        return Config(16, 32, 3, 1, registers=None if dropout or tilted else 168)
    wide = (width == 64 and load.few) or (tilted and dropout)
    deep = width == 64 and load.roomy and not (dropout or backward)
    return Config(width, 32, 5 if deep else 3, 1, registers=168 if wide else 128)


def _gat_of_two(dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    # two heads of 32
    if load is Load.TINY and (backward or dropout):
        step, stages = (16, 5) if backward or tilted else (32, 2)
        return Config(32, step, stages, 1, rows=2, registers=168 if tilted else 128)
    most = 168 if backward or tilted else 144 if load.roomy and not dropout else 128
    return Config(32, 32, 5, 1, rows=2, registers=None if tilted and dropout else most)


def _gat_of_narrow(heads: int, dim: int, dropout: bool, backward: bool, tilted: bool, load: Load) -> Config:
    # heads of up to 16 features, up to four at a time; of up to 8 backward takes two, padded to 16
    inference = not (dropout or backward or tilted)
    block, group = power_of_two(dim, 8), 4 if heads > 2 else 2
    if dim <= 8 and backward and not tilted:
        return Config(16, 32, 3, 1, rows=2)
    if dim <= 8 and not (inference or backward):
        return Config(block, 32, 3 if dropout else 5, 1, rows=group, registers=168)
    if backward and dropout and not tilted:
        return Config(block, 32, 3, 1, rows=2, registers=128)
    if backward and load is Load.TINY:
        return Config(block, 16, 2, 1, rows=group, registers=168)
    if inference and load is Load.TINY:
        return Config(block, 32, 3, 1, rows=group, registers=128)
    if inference and dim > 8 and load is not Load.LONG:
        stages, most = (5, 168) if load.roomy else (2, None)
        return Config(block, 32, stages, 1, rows=group, registers=most)
    return Config(block, 32, 5 if tilted and (load.deep or not backward) else 3, 1, rows=group)


@functools.cache
def gat_row(heads: int, dim: int, size: int, load: RowLoad, backward: bool) -> Config:
    """Row kernels of GAT's attention; forward reads but one row an edge, and takes twice as many a step."""
    config = attention_row(heads, dim, size, load, backward)
    if size > 2:
        step, warps = float32_rows.gat(heads, config.rows * config.block_dim, load, backward)
        return config._replace(step=step, warps=warps)
    step = config.step if dim < 32 or backward else 2 * config.step
    stages = config.stages if load is RowLoad.FEW and dim >= 32 else 1  # results: pairs.md
    return config._replace(step=step, stages=stages)


@functools.cache
def gatv2_row(heads: int, dim: int, size: int, load: RowLoad, backward: bool) -> Config:
    """Row kernels of GATv2's attention."""
    config = attention_row(heads, dim, size, load, backward)
    width = config.rows * config.block_dim
    if size > 2:
        step, warps = float32_rows.gatv2(heads, width, load, backward)
        return config._replace(step=step, warps=warps)
    step, stages, warps, packed = half_rows.gatv2(heads, dim, width, load, backward)
    step, warps = step * config.step, warps or config.warps
    return config._replace(step=step, stages=stages, warps=warps, packed=packed)


def attention_takes_edges(heads: int, dim: int, edge_dim: int) -> bool:
    """Whether one program of the row kernel holds all heads of a row and of the numbers of an edge."""
    widest = max(power_of_two(dim), power_of_two(edge_dim))
    return power_of_two(heads) * widest <= _MAX_EDGE_TILE
