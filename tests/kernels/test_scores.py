"""Threads that share a score hold the same one, to the bit: else a weight and the sum of weights disagree."""

from __future__ import annotations

import json
import re

import pytest

from tests.kernels.compiled import without_interpreter

COMPILES = """
import json, sys

import torch
import triton

from graphfuse.kernels import run
from tests.kernels import aot

kernels, (heads, dim, *edge_dim), odd, first = sys.argv[1], *map(json.loads, sys.argv[2:])
run._overlaps = lambda index: False
given = run.Launch(None, 1, 1, (), ()).options(0, torch.zeros(5)[first:])
compile, aot.ALIGNED = triton.compile, [["tt.divisibility", 4 if first else 16]]
triton.compile = lambda source, target, options: compile(
    source, target=target, options={**options, "enable_fp_fusion": given["enable_fp_fusion"]}
)
for case in getattr(aot, kernels)("fp32", heads, dim, *edge_dim):
    strides = dict.fromkeys(case.constants.keys() & aot.ROW_STRIDES, heads * dim + odd)
    case = case._replace(constants={**case.constants, **strides})
    if "_row_kernel" in case.name and "-0.0-" in case.name and "gat_" not in case.name:
        print(json.dumps(aot.compiled(case, "sm_90").asm["ptx"]))
"""

# A thread adds what another one had rounded to a product of its own, unrounded.
UNROUNDED = """
shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;
fma.rn.f32 %r3, %r4, %r5, %r2;
mul.f32 %r6, %r3, 0f3FB8AA3B;
ex2.approx.ftz.f32 %r7, %r6;
"""
ROUNDED = """
shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;
add.f32 %r3, %r1, %r2;
ex2.approx.ftz.f32 %r7, %r3;
fma.rn.f32 %r8, %r7, %r5, %r2;
"""


def weighs_unrounded(ptx: str) -> bool:
    """Whether an exponential depends on a product that was added to another thread's number unrounded."""
    shuffled, apart, weighs = set[str](), set[str](), False
    for guarded in ptx.splitlines():
        line = re.sub(r"@!?%p\d+", "", guarded).strip()
        registers = re.findall(r"%\w+", line)
        if line.startswith("st"):  # stores write no register
            continue
        if "shfl.sync" in line:
            shuffled.add(registers[0])
        elif "fma.rn.f32" in line and registers[-1] in shuffled:
            apart.add(registers[0])
        elif not apart.isdisjoint(registers[1:]):
            apart.add(registers[0])
            weighs |= "ex2.approx" in line
    return weighs


def test_one_of_two_is_found() -> None:
    assert weighs_unrounded(UNROUNDED) and not weighs_unrounded(ROUNDED)


@pytest.mark.parametrize("shape", [(4, 1, 16), (2, 8, 64), (3, 7, 0), (2, 16, 7), (1, 64, 16)], ids=str)
def test_scores_of_attention(shape: tuple[int, int, int]) -> None:
    assert_rounded("sparse_attention", shape)


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (3, 7)], ids=str)
def test_scores_of_gatv2(shape: tuple[int, int]) -> None:
    assert_rounded("additive_attention", shape)


def test_rows_an_odd_number_apart() -> None:
    """They are loaded one number at a time, whatever their width."""
    assert_rounded("sparse_attention", (1, 16, 0), odd=1)
    assert_rounded("additive_attention", (4, 8), odd=1)


def test_rows_that_start_anywhere() -> None:
    """Likewise: kernels are compiled for such tensors by themselves, and fuse no products."""
    assert_rounded("sparse_attention", (4, 32, 0), first=1)
    assert_rounded("additive_attention", (4, 8), first=1)


def assert_rounded(kernels: str, shape: tuple[int, ...], odd: int = 0, first: int = 0) -> None:
    """Of float32, where a product of two numbers is not exact.

    Args:
        kernels: A function of ``aot.py``.
        shape: Its heads, and so on.
        odd: How much farther apart rows are than their features.
        first: Where tensors start, in features of an aligned one.
    """
    found = without_interpreter(COMPILES, kernels, *map(json.dumps, (shape, odd, first))).splitlines()
    assert len(found) > 2 and not any(weighs_unrounded(json.loads(ptx)) for ptx in found)
