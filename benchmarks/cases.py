"""Cases of a benchmark as the command line names them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.bench import REGISTRY, Case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names cases, for :func:`chosen`."""
    parser.add_argument("bench", choices=sorted(REGISTRY), metavar="BENCH", help="of benchmarks.run")
    parser.add_argument("--graphs", nargs="+", metavar="GRAPH", help="instead of those of the sweep")
    parser.add_argument("--only", nargs="+", default=(), metavar="AXIS=VALUE", help="of the cases")


def chosen(given: argparse.Namespace) -> list[Case]:
    """The cases that were named; says so if there are none."""
    plan = [case for case in REGISTRY[given.bench].cases(given.graphs) if fits(case, given.only)]
    if not plan:
        print(f"no case of {given.bench} is {' '.join(given.only)}", file=sys.stderr)
    return plan


def fits(case: Case, only: Sequence[str]) -> bool:
    """Whether the case has these values: ``shape=4x32``, ``mode=fwd``, or ``dropout=none`` if it has none."""
    return all(as_text(case.get(axis)) == value for axis, value in pairs(only).items())


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` of each.

    Raises:
        ValueError: one of them is not of this form.
    """
    found = [text.partition("=") for text in texts]
    if any(not mark or not value for _, mark, value in found):
        raise ValueError(f"write NAME=VALUE (got {' '.join(texts)})")
    return {name: value for name, _, value in found}


def as_text(value: Any) -> str:
    """A value of a case as the command line has it: ``4x32``, ``float16``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.").lower()
