"""What a walk asks of the GPU, by which launch configurations are chosen."""

from __future__ import annotations

import enum

# 32 warps on each of 132 multiprocessors: with fewer programs the GPU is not full.
FULL = 4224
# Those 32 warps share four schedulers.
_SCHEDULERS = 528
# Column entries of a task below which all of its steps are on their way at once, or nearly.
_SHORT = 96


class Load(enum.Enum):
    """What a walk over windows asks of the GPU."""

    FEW = "fewer programs than half of what the GPU holds: make each faster, with all registers"
    SOME = "fewer than it holds, but no fewer than half: make each faster"
    SHORT = "fewer than it holds, of few steps: let there be more of them, of fewer features each"
    FEWEST = "as short, and fewer than schedulers: let there be one for each head"
    LONG = "many long tasks: make each step wide"
    NORMAL = "many tasks: keep programs small"
    TINY = "many tasks of a step or two: keep steps narrow"

    @property
    def few(self) -> bool:
        """Whether the GPU holds more programs than there are."""
        return self in (Load.SOME, Load.FEW) or self.short

    @property
    def roomy(self) -> bool:
        """Whether there are so few that a program may have all registers it wants."""
        return self.few and self is not Load.SOME

    @property
    def short(self) -> bool:
        """Whether there are few programs of few steps."""
        return self in (Load.SHORT, Load.FEWEST)

    @property
    def deep(self) -> bool:
        """Whether programs take more than a few steps, which pay for what stands before and after them."""
        return not self.short and self is not Load.TINY


class RowLoad(enum.Enum):
    """What rows ask of the GPU."""

    SHORT = "three edges or fewer, as in molecules: a step of many would be empty, and so would be its warps"
    LONG = "256 edges and more: make each step wide"
    FEW = "fewer rows than the GPU holds: the longest is what is waited for"
    NORMAL = "many rows: keep programs small"


def load(num_tasks: int, num_entries: int) -> Load:
    """The load of ``num_tasks`` programs that share ``num_entries`` column entries or edges."""
    mean = num_entries / max(num_tasks, 1)
    if num_tasks < FULL and mean < _SHORT:
        return Load.FEWEST if num_tasks < _SCHEDULERS else Load.SHORT
    if num_tasks < FULL:
        return Load.FEW if num_tasks < FULL // 2 else Load.SOME
    return Load.LONG if mean >= 1024 else Load.TINY if mean < 64 else Load.NORMAL


def row_load(num_rows: int, num_cols: int, num_edges: int) -> RowLoad:
    """Of a structure and its transpose the same, as both sum up a row's products alike."""
    if num_edges <= 3 * min(num_rows, num_cols):
        return RowLoad.SHORT
    most = max(num_rows, num_cols)
    if num_edges >= 256 * most:
        return RowLoad.LONG
    return RowLoad.FEW if most < FULL else RowLoad.NORMAL
