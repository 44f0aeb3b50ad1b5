"""How row kernels of half precision are launched, beside what they have in common with attention's."""

from __future__ import annotations

from graphfuse.kernels.loads import RowLoad


def stages_with_edges(heads: int, load: RowLoad, backward: bool) -> int:
    """Stages of a pipeline of attention whose edges carry numbers (results: pairs.md)."""
    many = load in (RowLoad.NORMAL, RowLoad.LONG)
    return 1 if many and (heads > 1 or not backward) else 2


def gatv2(heads: int, dim: int, width: int, load: RowLoad, backward: bool) -> tuple[int, int, int, int]:
    """Steps of GATv2's in those of attention, stages, warps (0: attention's), and programs of a block.

    Where rows are few the longest is waited for, and where they are long the end of a row counts for little:
    steps are wide. A pipeline is for few rows alone (results: row_kernels.md, pairs.md). Where rows are many,
    one of a few edges ends sooner than other blocks can begin, so four share one (packing.md).

    Args:
        heads: Of a row.
        dim: Features of a head.
        width: Features of a program, padded.
        load: What the rows ask of the GPU.
        backward: Whether these are gradients.
    """
    step, stages, warps = 1, 1, 0
    if load is RowLoad.LONG and width <= 256:
        if backward and dim >= 32:
            step, warps = 2, 2
        elif not backward and dim >= (32 if heads == 1 else 16):
            step = 2 if heads == 1 else 4
    elif load is RowLoad.FEW and width in (64, 128):
        step = 2 if backward and (width == 64 or dim < 32) else 4
        stages = 1 if backward or width == 64 else 3
        warps = 1 if backward and heads == 1 else 2
    elif load is RowLoad.FEW:
        step, stages = 2 if heads > 1 and dim >= 16 and not backward else 1, 3
    return step, stages, warps, 4 if load is RowLoad.NORMAL else 1
