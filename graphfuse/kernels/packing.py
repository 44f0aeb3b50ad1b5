"""Several programs in one block of threads, where a program is a warp.

A GPU begins blocks one after the other: an H200 some 820 a microsecond of those that walk rows. Rows of five
edges are done sooner than the next can begin, and Triton makes a block of each program. Programs of one warp
have nothing in common but the block's shared memory, so several fit into one: here PTX is told that its
threads are more, which of the programs a warp is, and where that one's part of shared memory begins. A warp
goes its own way as before, which several rows in one program of Triton would not: they would all be as long
as the longest (results/nvidia-h200/packing.md).

What a kernel was packed by stands in its metadata, for which :class:`.run.Launch` asks, and programs beyond
the last are for the kernel to leave out: a block may have more than there are left.
"""

from __future__ import annotations

import re
from typing import Any

MOST_SHARED = 98_304  # bytes of a block, two of which fit on a multiprocessor

_ONE_WARP = re.compile(r"(\.reqntid )32((?:, 1, 1)?\s)")
_BODY = re.compile(r"^\{\n(?:\t\.reg [^\n]*\n)+", re.MULTILINE)  # of the kernel, and of what it calls
_SHARED = re.compile(r"(\tmov\.(?:b|u)32 \t%r\d+, |\[)global_smem(?=;|\]|\+\d+\])")
# Whatever speaks of the other threads of a block.
_OF_THE_BLOCK = re.compile(r"\bbar\.sync|\bbarrier\.|\bmbarrier\.|%nctaid\.x|%ntid|%warpid|%cluster")
_PREAMBLE = """\
	.reg .b32 	%packed<4>;
	mov.u32 	%packed0, %tid.x;
	shr.u32 	%packed0, %packed0, 5;
	shfl.sync.idx.b32 	%packed0, %packed0, 0, 31, -1; // the same for all of a warp
	mov.u32 	%packed1, %ctaid.x;
	mad.lo.u32 	%packed1, %packed1, {programs}, %packed0;
	mov.u32 	%packed2, %laneid;
"""
_PREAMBLE_OF_SHARED = """\
	mov.b32 	%packed3, global_smem;
	mad.lo.u32 	%packed3, %packed0, {shared}, %packed3;
"""


def packed(ptx: str, metadata: dict[str, Any], programs: int) -> str:
    """PTX of ``programs`` in a block, whose ``metadata`` then says so; or as it is, where it cannot be.

    Args:
        ptx: Of a kernel.
        metadata: Of that kernel, as Triton's compiler keeps it: warps of a block, bytes of shared memory.
        programs: At most so many.
    """
    shared = -(-metadata["shared"] // 128) * 128
    programs = min(programs, MOST_SHARED // max(1, shared))
    if programs < 2 or not _ONE_WARP.search(ptx) or _OF_THE_BLOCK.search(ptx) or not _BODY.search(ptx):
        return ptx
    if ptx.count("global_smem") != len(_SHARED.findall(ptx)) + (shared > 0):
        return ptx
    preamble = _PREAMBLE.format(programs=programs)
    preamble += _PREAMBLE_OF_SHARED.format(shared=shared) if shared > 0 else ""
    ptx = _SHARED.sub(r"\1%packed3", _ONE_WARP.sub(rf"\g<1>{32 * programs}\2", ptx))
    ptx = ptx.replace("%ctaid.x;", "%packed1;").replace("%tid.x;", "%packed2;")
    metadata["num_warps"], metadata["shared"] = programs, shared * programs
    return _BODY.sub(lambda found: found[0] + preamble, ptx)
