"""Programs of the repository that the package does not bring: its benchmarks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NotThere(Exception):
    """There is no such program, or something that it needs is missing."""


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs ``python -m benchmarks.NAME`` of the checkout that this package lies in; returns its exit status.

    Raises:
        NotThere: the package was installed without the repository, or a library is missing.
    """
    if not (ROOT / "benchmarks" / f"{name}.py").is_file():
        raise NotThere(
            f"benchmarks are part of the repository, not of the package (looked in {ROOT}); clone it and run "
            "pip install -e '.[bench]' there"
        )
    if str(ROOT) not in sys.path:  # a command is started from where it is installed
        sys.path.insert(0, str(ROOT))
    try:
        program = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        raise NotThere(
            f"benchmarks need {error.name}, which is not installed; run: pip install graphfuse[bench]"
        ) from error
    status: int = program.main(arguments)
    return status
