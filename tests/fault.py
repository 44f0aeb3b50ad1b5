"""What a planted fault is: a line of source, what it becomes, and the tests that have to see it."""

from __future__ import annotations

from typing import NamedTuple

# What reviewers of GPU kernels have learnt to look for: each is planted at least once.
KINDS = (
    "off by one in a mask",
    "missing rescale",
    "swapped index",
    "wrong stride",
    "missing merge",
    "dropped tail",
    "half precision where float32 is due",
    "a number that threads do not share",
    "race",
    "int32 offset",
    "stale record",
    "unguarded value",
    "unchecked file",
    "wrong device",
    "state left behind",
)


class Tests(NamedTuple):
    """A selection of tests."""

    file: str  # from the root
    select: str  # the expression of -k


def select(file: str, expression: str) -> Tests:
    """Tests of a file below ``tests/``, which is named without its suffix."""
    return Tests(f"tests/{file}.py", expression)


class Fault(NamedTuple):
    """One piece of source, what it becomes, and who has to notice."""

    name: str
    kind: str  # one of KINDS
    what: str  # is wrong then, for the table
    file: str  # below graphfuse/
    old: str  # stands there once
    new: str
    tests: Tests
    gpu: bool = False  # whether only a GPU can show it
