"""What a compiled kernel is like: registers, spills, instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def without_interpreter(script: str, *arguments: str) -> str:
    """What a script prints that compiles kernels for GPUs that are not there: here they are interpreted."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def usage(compiled: Any, target: str) -> dict[str, int]:
    """Registers, and bytes spilled, of a thread."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        count, scratch = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1])
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
        return {"registers": count, "spilled": scratch}
    text = dump(compiled, "--dump-resource-usage")
    stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("STACK", "LOCAL"))
    return {"registers": int(re.search(r"REG:(\d+)", text)[1]), "spilled": stack + local}


def dump(compiled: Any, what: str) -> str:
    """What ``cuobjdump`` prints of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


def inner_loop(sass: str) -> list[str]:
    """The instructions of the shortest loop that reads memory; ``sass`` is what :func:`dump` prints."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", sass)
    instructions, loops = [(int(at, 16), text) for at, text in found], []
    for at, text in instructions:
        if jump := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text):
            loop = [one for place, one in instructions if int(jump[1], 16) <= place <= at]
            loops += [loop] if any("LDG" in one for one in loop) else []
    return min(loops, key=len)


def rows_asked_for(loop: list[str]) -> tuple[int, int]:
    """How many gathers of 16 bytes a loop has, and how many before it computes with what one has brought."""
    brought, count, early, waits = set[str](), 0, 0, False
    for text in loop:
        if found := re.search(r"LDG\.E\.128\S* R(\d+)", text):
            count, early = count + 1, early + (not waits)
            brought |= {f"R{int(found[1]) + nth}" for nth in range(4)}
        else:
            _, _, sources = text.partition(",")
            waits |= not brought.isdisjoint(re.findall(r"\bR\d+", sources))
    return count, early
