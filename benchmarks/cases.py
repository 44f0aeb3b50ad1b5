"""Cases of a benchmark as the command line names them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench import REGISTRY, Case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names cases, for :func:`chosen`."""
    parser.add_argument("bench", choices=sorted(REGISTRY), metavar="BENCH", help="of benchmarks.run")
    parser.add_argument("--graphs", nargs="+", metavar="GRAPH", help="instead of those of the sweep")
    add_only(parser)


def add_only(parser: argparse.ArgumentParser) -> None:
    """Adds ``--only``, for :func:`fits`."""
    parser.add_argument(
        "--only", nargs="+", action=_Pairs, default={}, metavar="AXIS=VALUE", help="of the cases; or =A,B"
    )


class _Pairs(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            setattr(namespace, self.dest, pairs(values))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def chosen(given: argparse.Namespace) -> list[Case]:
    """The cases that were named; says so if there are none."""
    cases = list(REGISTRY[given.bench].cases(given.graphs))
    plan = [case for case in cases if fits(case, given.only)]
    if not plan:
        print(nothing_fits(given.bench, cases, given.only), file=sys.stderr)
    return plan


def fits(case: Case, only: Mapping[str, str]) -> bool:
    """Whether the case has these values: ``shape=4x32,8x16``, or ``dropout=none``, which has no such axis."""
    return all(as_text(case.get(axis)) in values.split(",") for axis, values in only.items())


def nothing_fits(name: str, cases: Sequence[Case], only: Mapping[str, str]) -> str:
    """What to say if no case fits: which values there are; an empty ``only`` fits every case."""
    if not cases:
        return f"{name} has no cases of these graphs"
    there = [
        f"{axis} is {', '.join(dict.fromkeys(as_text(case.get(axis)) for case in cases))}" for axis in only
    ]
    wanted = " ".join(f"{axis}={values}" for axis, values in only.items())
    return f"no case of {name} is {wanted}; of {len(cases)} cases {'; '.join(there)}"


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` of each, in small letters, as :func:`as_text` has values.

    Raises:
        ValueError: one of them is not of this form, or two have the same name.
    """
    found = [text.partition("=") for text in texts]
    if any(not mark or not value for _, mark, value in found):
        raise ValueError(f"write NAME=VALUE (got {' '.join(texts)})")
    named = {name: value.lower() for name, _, value in found}
    if len(named) < len(found):
        raise ValueError(f"write a name once, several values as NAME=A,B (got {' '.join(texts)})")
    return named


def as_text(value: Any) -> str:
    """A value of a case as the command line has it: ``4x32``, ``float16``."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.").lower()
