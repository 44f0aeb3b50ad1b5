"""Barriers of programs of one warp: what becomes of PTX, and that Triton's hook is there for a while only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from graphfuse import RowWindows, ops
from graphfuse.kernels import run
from graphfuse.kernels.barriers import narrowed, of_one_warp
from tests import stub_kernel

PTX = """.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
.maxnreg 128
{{
	st.shared.b32 	[%r1], %r2;
	bar.sync 	0;
	ld.shared.b32 	%r3, [%r4];
	bar.warp.sync 	-1;
	bar.sync 	1, 64;
	bar.sync 0;
	ret;
}}
"""

# compiles a kernel for a GPU that is not there, in one warp and in four
COMPILES = """
from types import SimpleNamespace

import torch, triton
from triton.backends.compiler import GPUTarget

device = {"get_current_device": lambda: 0, "get_current_stream": lambda index: 0}
target = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, **device))

from benchmarks.floors import _gather_kernel
from graphfuse.kernels.barriers import of_one_warp

x, column = torch.zeros(100, 32, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
for warps in (1, 4):
    with of_one_warp():
        compiled = _gather_kernel.warmup(
            x, None, x, None, column, 10, 4, 32, 32, 16, 4, num_warps=warps, enable_fp_fusion=True, grid=(1,)
        )
    print(*(compiled.asm["ptx"].count(name) for name in ("bar.sync", "bar.warp.sync")))
"""


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    assert hook() is None
    yield
    assert hook() is None


def hook() -> Any:
    return knobs.runtime.add_stages_inspection_hook


def stages(**others: Any) -> dict[str, Any]:
    """Stages of Triton's compiler as a hook is told of them, and leaves them."""
    found = {"ttir": lambda source, metadata: source, **others}
    hook()(None, found, None, None, 90)
    return found


@pytest.mark.parametrize("threads", ["32", "32, 1, 1"])
def test_barriers_of_one_warp_are_its_own(threads: str) -> None:
    ptx = PTX.format(threads=threads)
    lines = narrowed(ptx).splitlines()
    waits = [" ".join(line.split()) for line in lines if "bar." in line]
    assert waits == ["bar.warp.sync -1;", "bar.warp.sync -1;", "bar.sync 1, 64;", "bar.warp.sync -1;"]
    assert [line for line in lines if "bar." not in line] == [
        line for line in ptx.splitlines() if "bar." not in line
    ]


@pytest.mark.parametrize("threads", ["64", "128", "320", "32, 2, 1", "132"])
def test_barriers_of_more_stay(threads: str) -> None:
    ptx = PTX.format(threads=threads)
    assert narrowed(ptx) == ptx


def test_a_kernel_that_does_not_say_how_many_it_has_keeps_them() -> None:
    ptx = PTX.format(threads=32).replace(".reqntid 32", "")
    assert narrowed(ptx) == ptx


def test_the_stage_of_ptx_is_what_changes() -> None:
    with of_one_warp():
        assert hook()() == hook()()  # the key of Triton's cache
        assert all(type(part) is str and part for part in hook()())
        found, metadata = stages(ptx=lambda source, metadata: PTX.format(threads=source)), {"shared": 0}
        assert found["ttir"]("as it was", metadata) == "as it was"
        assert found["ptx"](32, metadata) == narrowed(PTX.format(threads=32))
        assert found["ptx"](64, metadata) == PTX.format(threads=64)
        assert stages(amdgcn=str)["amdgcn"] is str  # an AMD GPU's have no PTX


def test_the_hook_goes_with_the_last_call() -> None:
    entered, leave = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with of_one_warp():
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=compile_slowly)
    with of_one_warp():
        thread.start()
        assert entered.wait(10)
    assert hook() is not None
    leave.set()
    thread.join()
    with pytest.raises(RuntimeError, match="of the compiler"), of_one_warp(), of_one_warp():
        raise RuntimeError("of the compiler")


def test_who_else_looks_at_the_stages_is_left_alone() -> None:
    def others(*arguments: Any) -> tuple[str, str]:
        return "theirs", "theirs"

    knobs.runtime.add_stages_inspection_hook = others
    try:
        with of_one_warp():
            assert hook() is others
        assert hook() is others
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def test_triton_asks_the_hook(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILES], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, four = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert one[0] == 0 < one[1]
    assert four[0] > 0


def test_a_launch_compiles_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    stub_kernel.launch(monkeypatch, lambda options: met.append(hook()))((), (), True, 0)
    assert [one is not None for one in met] == [True]


@pytest.mark.gpu
def test_what_is_launched_has_no_others() -> None:
    edge_index = torch.randint(300, (2, 2000), device="cuda")
    x = torch.randn(300, 64, device="cuda", dtype=torch.float16)
    ops.spmm(RowWindows.from_edge_index(edge_index, (300, 300)), x)
    kernels = [found[0] for found in run._COMPILED.values()]
    known = {kernel.metadata.num_warps: kernel.asm.get("ptx", "") for kernel in kernels}
    assert "bar.sync" not in known[1]
    assert all("bar.sync" not in kernel.asm["ptx"] for kernel in kernels if kernel.metadata.num_warps == 1)
