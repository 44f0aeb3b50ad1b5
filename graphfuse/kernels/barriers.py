"""Barriers of programs of one warp, which Triton makes as dear as those of many.

Before shared memory is read or written again, Triton has all threads of a program wait for one another with
``bar.sync``. Those of one warp may do so with ``bar.warp.sync``, which orders memory alike (PTX ISA, section
"bar.warp.sync") and is next to nothing where no thread has gone another way; within a change of layout
Triton takes that itself. A step of a window kernel has two to nine of the others. Without them sums over
neighbours took 2 to 7 % less, attention 1 to 3 and GAT 4 to 10 (results/nvidia-h200/warp_barriers.md).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from triton import knobs

from graphfuse.kernels.packing import packed

_KEY = "graphfuse: programs of one warp"  # in the key of Triton's cache, from Triton 3.7 on
_ONE_WARP = re.compile(r"\.reqntid 32(?:, 1, 1)?\s")
_ALL_THREADS = re.compile(r"\bbar\.sync\s+0;")

_lock = threading.Lock()
_compiling = 0  # calls that are within `of_one_warp`
_here = threading.local()  # programs of a block of what this thread compiles


@contextlib.contextmanager
def of_one_warp(programs: int = 1) -> Iterator[None]:
    """Within, kernels whose programs have one warp are compiled with barriers of that warp.

    So is what another thread compiles meanwhile, and means the same. Where somebody else looks at the stages
    of Triton's compiler, barriers stay as they are, and each program has a block of its own.

    Args:
        programs: That share a block, as far as they can, in what this thread compiles (:mod:`.packing`).
    """
    global _compiling
    with _lock:
        if knobs.runtime.add_stages_inspection_hook is None:
            knobs.runtime.add_stages_inspection_hook = _add_stages
        _compiling += 1
    before, _here.programs = _programs(), programs
    try:
        yield
    finally:
        _here.programs = before
        with _lock:
            _compiling -= 1
            if _compiling == 0 and knobs.runtime.add_stages_inspection_hook is _add_stages:
                knobs.runtime.add_stages_inspection_hook = None


def _programs() -> int:
    found: int = getattr(_here, "programs", 1)
    return found


def _add_stages(*arguments: Any) -> tuple[str, str] | None:
    # Triton's hook, told of a backend, its stages by name and more, or, for the key of a cache, of nothing
    if not arguments:
        key = f"{_KEY}, {_programs()} of which share a block"
        return key, key
    stages = arguments[1]
    if "ptx" in stages:  # an AMD GPU's have none
        made = stages["ptx"]
        programs = _programs()
        stages["ptx"] = lambda source, metadata: packed(narrowed(made(source, metadata)), metadata, programs)
    return None


def narrowed(ptx: str) -> str:
    """PTX whose barriers are those of a warp, if its programs have no more; else as it is."""
    return _ALL_THREADS.sub("bar.warp.sync -1;", ptx) if _ONE_WARP.search(ptx) else ptx
