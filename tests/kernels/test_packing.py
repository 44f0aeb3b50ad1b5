"""Programs that share a block: what becomes of PTX, and how many blocks are launched."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from graphfuse.kernels.barriers import of_one_warp
from graphfuse.kernels.packing import MOST_SHARED, packed
from tests import stub_kernel
from tests.kernels.compiled import without_interpreter
from tests.kernels.test_barriers import stages

PTX = """.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
.maxnreg 128
{{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<9>;
$L__func_begin0:
	mov.u32 	%r1, %ctaid.x;
	mov.u32 	%r2, %ctaid.y;
	mov.u32 	%r3, %tid.x;
	mov.b32 	%r4, global_smem;
	st.shared.b32 	[global_smem], %r1;
	ld.shared.b32 	%r5, [global_smem+128];
	bar.warp.sync 	-1;
	ret;
}}
.func again(
	.param .b32 again_param_0
)
{{
	.reg .b32 	%r<3>;
	mov.u32 	%r1, %tid.x;
	mov.b32 	%r2, global_smem;
	ret;
}}
"""

# compiles row kernels, with numbers in shared memory and without, for a GPU that is not there
COMPILES = """
import re
from tests.kernels import aot
from tests.kernels.compiled import dump

for heads, dim, shared in ((8, 8, True), (4, 32, False)):
    for case in aot.additive_attention("fp16", heads, dim):
        if case.kernel.__name__ == "gatv2_bwd_row_kernel" and case.constants["PACKED"] > 1:
            break
    for count in (1, 3):
        kernel = aot.compiled(case._replace(constants=case.constants | {"PACKED": count}), "sm_90")
        code = dump(kernel, "-sass")
        assert (kernel.metadata.shared > 0) is shared
        instructions = len(re.findall(r"/\\*[0-9a-f]{4,5}\\*/", code))
        print(kernel.metadata.num_warps, kernel.metadata.shared, instructions)
"""


def lines(ptx: str) -> list[str]:
    return [" ".join(line.split()) for line in ptx.splitlines()]


@pytest.mark.parametrize("threads", ["32", "32, 1, 1"])
def test_a_warp_is_told_which_program_it_is(threads: str) -> None:
    metadata = {"num_warps": 1, "shared": 200, "name": "kernel"}
    given = PTX.format(threads=threads)
    found = lines(packed(given, metadata, 4))
    assert metadata == {"num_warps": 4, "shared": 4 * 256, "name": "kernel"}
    assert f".reqntid 128{threads[2:]}" in found and ".maxnreg 128" in found
    program = "mad.lo.u32 %packed1, %packed1, 4, %packed0;"
    shared = "mad.lo.u32 %packed3, %packed0, 256, %packed3;"
    assert found.count(program) == found.count(shared) == 2  # in what the kernel calls, too
    changed = {
        "mov.u32 %r1, %ctaid.x;": "mov.u32 %r1, %packed1;",
        "mov.u32 %r3, %tid.x;": "mov.u32 %r3, %packed2;",
        "mov.u32 %r1, %tid.x;": "mov.u32 %r1, %packed2;",
        "mov.b32 %r4, global_smem;": "mov.b32 %r4, %packed3;",
        "mov.b32 %r2, global_smem;": "mov.b32 %r2, %packed3;",
        "st.shared.b32 [global_smem], %r1;": "st.shared.b32 [%packed3], %r1;",
        "ld.shared.b32 %r5, [global_smem+128];": "ld.shared.b32 %r5, [%packed3+128];",
        f".reqntid {threads}": f".reqntid 128{threads[2:]}",
    }
    ours = [line for line in found if "%packed" not in line or line in changed.values()]
    assert ours == [changed.get(line, line) for line in lines(given)]
    begin = found.index(".reg .b32 %r<9>;")
    assert found[begin + 1] == ".reg .b32 %packed<4>;" and found.index("$L__func_begin0:") > begin + 8


def computed(ptx: str, thread: int, block: int) -> dict[str, int]:
    """What the lines that packing adds compute: registers of a thread. Shared memory begins at 1024."""
    found = {"%tid.x": thread, "%ctaid.x": block, "%laneid": thread % 32, "global_smem": 1024}
    for line in lines(ptx):
        name, _, rest = line.partition(" ")
        if "%packed" not in line or name == ".reg":
            continue
        result, *given = (part.strip(" ;") for part in rest.partition("//")[0].split(","))
        if name == "shfl.sync.idx.b32":  # that of lane 0, which has computed as much
            assert given[1:] == ["0", "31", "-1"]
            found[result] = computed(ptx[: ptx.index("shfl")], thread - thread % 32, block)[given[0]]
            continue
        values = [found[one] if one in found else int(one) for one in given]
        result_of = {"mov": lambda a: a, "shr": lambda a, b: a >> b, "mad": lambda a, b, c: a * b + c}
        found[result] = result_of[name.partition(".")[0]](*values)
    return found


@pytest.mark.parametrize("thread", [0, 31, 32, 70, 127])
def test_what_a_thread_computes(thread: int) -> None:
    ptx = packed(PTX.format(threads=32), {"num_warps": 1, "shared": 200}, 4)
    found = computed(ptx[: ptx.index("$L__func_begin0")], thread, 5)
    assert found["%packed1"] == 5 * 4 + thread // 32  # the program
    assert found["%packed2"] == thread % 32
    assert found["%packed3"] == 1024 + thread // 32 * 256


def test_without_shared_memory_nothing_is_told_of_it() -> None:
    kept = [line for line in PTX.format(threads=32).splitlines(True) if "global_smem" not in line]
    metadata = {"num_warps": 1, "shared": 0}
    found = packed("".join(kept), metadata, 2)
    assert metadata == {"num_warps": 2, "shared": 0} and "global_smem" not in found
    assert "%packed1, %packed1, 2, %packed0" in found and "%packed3," not in found


@pytest.mark.parametrize(
    ("shared", "programs"), [(1, 8), (MOST_SHARED // 8, 8), (MOST_SHARED // 8 + 1, 7), (MOST_SHARED // 2, 2)]
)
def test_as_many_as_there_is_shared_memory_for(shared: int, programs: int) -> None:
    metadata = {"num_warps": 1, "shared": shared}
    packed(PTX.format(threads=32), metadata, 8)
    assert metadata["num_warps"] == programs and metadata["shared"] <= MOST_SHARED


def unlike(old: str, new: str) -> str:
    ptx = PTX.format(threads=32)
    assert old in ptx
    return ptx.replace(old, new, 1)


@pytest.mark.parametrize(
    ("ptx", "shared", "programs"),
    [
        (PTX.format(threads=32), 0, 1),
        (PTX.format(threads=32), MOST_SHARED // 2 + 1, 4),
        (PTX.format(threads=64), 128, 4),
        (PTX.format(threads="32, 2, 1"), 128, 4),
        (unlike(".reqntid 32", ".maxntid 32"), 128, 4),
        (unlike("bar.warp.sync 	-1;", "bar.sync 	1, 64;"), 128, 4),
        (unlike("bar.warp.sync 	-1;", "barrier.cluster.arrive;"), 128, 4),
        (unlike("%ctaid.y", "%nctaid.x"), 128, 4),
        (unlike("%ctaid.y", "%ntid.x"), 128, 4),
        (unlike("%r4, global_smem;", "%r4, global_smem+16;"), 128, 4),
        (unlike("mov.b32 	%r4, global_smem;", "mov.b64 	%rd4, global_smem;"), 128, 4),
    ],
)
def test_what_is_not_understood_stays(ptx: str, shared: int, programs: int) -> None:
    metadata = {"num_warps": 1, "shared": shared}
    assert packed(ptx, metadata, programs) == ptx
    assert metadata == {"num_warps": 1, "shared": shared}


def test_another_thread_compiles_as_it_is_told() -> None:
    found: dict[str, dict[str, Any]] = {name: {"num_warps": 1, "shared": 128} for name in ("here", "there")}

    def compile_with(name: str) -> None:
        stages(ptx=lambda source, metadata: PTX.format(threads=32))["ptx"]("", found[name])

    with of_one_warp(4):
        thread = threading.Thread(target=compile_with, args=("there",))
        thread.start()
        thread.join()
        with of_one_warp():
            pass
        compile_with("here")
    assert found["here"]["num_warps"] == 4 and found["there"]["num_warps"] == 1


def test_the_assembler_takes_it() -> None:
    reports = [list(map(int, line.split())) for line in without_interpreter(COMPILES).splitlines()]
    assert [warps for warps, *_ in reports] == [1, 3, 1, 3]
    for (_, alone, before), (_, shared, after) in (reports[:2], reports[2:]):
        assert shared == 3 * -(-alone // 128) * 128
        assert after <= 1.05 * before + 16  # nothing is made ready for threads that go apart


@pytest.mark.parametrize(("programs", "warps", "blocks"), [(12, 4, 3), (13, 4, 4), (1, 4, 1), (13, 1, 13)])
def test_blocks_are_as_many_as_hold_the_programs(
    programs: int, warps: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a block has not as many as it should have, it is what was compiled that counts."""
    grids: list[tuple[int, ...]] = []
    given = {"programs": programs, "warps": warps, "packed": 4, "groups": 2}
    launch = stub_kernel.launch(
        monkeypatch, lambda options: None, launched=lambda *grid: grids.append(grid[:3]), **given
    )
    for _ in range(2):
        launch((), (), True, 0)
    assert grids == [(blocks, 2, 1)] * 2
