"""Plants faults in a copy of the package, one at a time, and asks the tests for each.

``python -m tests.faults`` plants all of :mod:`tests.fault_list` that this machine can show, names choose.
A fault is caught if tests that pass without it fail with it. The exit status is 1 if one is not caught, and 2
if the tests fail before anything is planted. Kernels run in Triton's interpreter, but for the few faults that
only a GPU shows. TF32 and races do not exist there: a rounding to half precision and a shared place to write
to stand in.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.fault import Fault, Tests
from tests.fault_list import FAULTS

ROOT = Path(__file__).parents[1]
COPIED = ("graphfuse", "tests", "pyproject.toml", "benchmarks", "configs", "docs", "README.md")
_TIMEOUT_S = 600


class Outcome(NamedTuple):
    """What pytest said."""

    status: int  # its exit status, negative if it was killed or crashed
    failed: tuple[str, ...]  # tests, without their folders
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        """Whether a test failed, or the process crashed as it read what is not there."""
        return bool(self.failed) or self.status < 0


def copy_package(root: Path, target: Path) -> None:
    """Copies what the tests need from the checkout ``root`` to the folder ``target``."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "results", "_build")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy(source, target / name)


def plant(fault: Fault, text: str) -> str:
    """``text`` of the fault's file with the fault in it.

    Raises:
        ValueError: what it replaces does not stand there once.
    """
    found = text.count(fault.old)
    if found != 1:
        raise ValueError(f"{fault.name}: wanted once in graphfuse/{fault.file} (got {found}): {fault.old}")
    return text.replace(fault.old, fault.new)


def ask(folder: Path, tests: Tests, gpu: bool) -> Outcome:
    """Runs a selection of tests in ``folder`` up to the first that fails."""
    # no byte code: a planted line may leave a file's size and, to the second, its time as they were
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    # a GPU is hidden from what is interpreted, where tests would take it for their device
    env |= {} if gpu else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    command += [tests.file, "-k", tests.select]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(124, (), time.perf_counter() - begin, f"no end after {_TIMEOUT_S} s")
    failed = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+?\.py::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    seconds = time.perf_counter() - begin
    return Outcome(done.returncode, tuple(failed), seconds, done.stdout + done.stderr)


def fails_clean(folder: Path, faults: Sequence[Fault]) -> bool:
    """Whether the tests of ``faults`` fail, or there are none, with nothing planted; says which."""
    wanted: dict[tuple[str, bool], dict[str, None]] = defaultdict(dict)
    for fault in faults:
        wanted[fault.tests.file, fault.gpu][f"({fault.tests.select})"] = None
    for (file, gpu), selections in wanted.items():
        outcome = ask(folder, Tests(file, " or ".join(selections)), gpu)
        if outcome.status != 0:
            print(f"{file} fails with nothing planted\n{outcome.output[-2000:]}", file=sys.stderr)
            return True
    return False


def run(faults: Sequence[Fault]) -> int:
    """Plants each of ``faults``, prints what became of it, and returns the exit status."""
    missed = []
    with tempfile.TemporaryDirectory(prefix="graphfuse-faults-") as name:
        folder = Path(name)
        copy_package(ROOT, folder)
        if fails_clean(folder, faults):
            return 2
        for fault in faults:
            path = folder / "graphfuse" / fault.file
            text = path.read_text()
            path.write_text(plant(fault, text))
            outcome = ask(folder, fault.tests, fault.gpu)
            path.write_text(text)
            if outcome.caught:
                by = " ".join(outcome.failed) or f"a crash, status {outcome.status}"
                verdict = f"caught by {by}"
            else:
                verdict = f"NOT CAUGHT by {fault.tests.file} -k '{fault.tests.select}', {outcome.status}"
                missed.append(fault.name)
            print(f"{fault.name}: {verdict} [{outcome.seconds:.0f} s]", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} caught")
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("name", nargs="*", help="faults to plant (default: all that this machine can show)")
    parser.add_argument("--list", action="store_true", help="list them and plant none")
    given = parser.parse_args(arguments)
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in given.name if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; --list names all")
    chosen = [known[name] for name in given.name] or list(FAULTS)
    if given.list:
        for fault in chosen:
            place = " (needs a GPU)" if fault.gpu else ""
            print(f"{fault.name}: {fault.kind}: {fault.what}{place}")
        return 0
    with_gpu = torch.cuda.is_available()
    for fault in chosen:
        if fault.gpu and not with_gpu:
            print(f"{fault.name}: not planted, as only a GPU can show it")
    return run([fault for fault in chosen if with_gpu or not fault.gpu])


if __name__ == "__main__":
    sys.exit(main())
