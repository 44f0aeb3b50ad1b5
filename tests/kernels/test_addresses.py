"""The reading of kernels' addresses finds what 32 bits cannot hold, and nothing else."""

from __future__ import annotations

import pytest

from tests.kernels.addresses import beyond_32_bits

# As Triton prints it. {lines} make %at, the offset of the last line.
KERNEL = """\
module {{
  tt.func public @kernel(%arg0: !tt.ptr<f16> {{tt.noalias = 1 : i32}}, %arg1: !tt.ptr<i32>, %arg2: i32) {{
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %c16_i32 = arith.constant 16 : i32
    %c64_i32 = arith.constant 64 : i32
    %c64_i64 = arith.constant 64 : i64
    %cst = arith.constant dense<64> : tensor<8xi32>
    %range = tt.make_range {{end = 8 : i32, start = 0 : i32}} : tensor<8xi32>
    %pid = tt.get_program_id x : i32
    %node = tt.load %arg1 : !tt.ptr<i32>
    {lines}
    %last = tt.addptr %arg0, %at : !tt.ptr<f16>, i32
    tt.return
  }}
}}
"""
TOO_NARROW = {
    "a row of a node": ["%at = arith.muli %node, %c64_i32 : i32"],
    "widened when it is too late": [
        "%1 = arith.muli %node, %c64_i32 : i32",
        "%at = arith.extsi %1 : i32 to i64",
    ],
    "a tile of rows": [
        "%1 = tt.splat %node : i32 -> tensor<8xi32>",
        "%2 = arith.addi %1, %range : tensor<8xi32>",
        "%3 = arith.muli %2, %cst : tensor<8xi32>",
        "%at = tt.expand_dims %3 {axis = 1 : i32} : tensor<8xi32> -> tensor<8x1xi32>",
    ],
    "by way of a loop": [
        "%1 = scf.for %arg3 = %c0_i32 to %node step %c1_i32 iter_args(%arg4 = %c0_i32) -> (i32)  : i32 {",
        "  %2 = arith.muli %arg3, %c64_i32 : i32",
        "  scf.yield %2 : i32",
        "}",
        "%at = arith.addi %1, %c1_i32 : i32",
    ],
    "by way of a branch": [
        "%1:2 = scf.if %true -> (i32, i32) {",
        "  scf.yield %node, %c0_i32 : i32, i32",
        "} else {",
        "  %2 = arith.muli %node, %c64_i32 : i32",
        "  scf.yield %node, %2 : i32, i32",
        "}",
        "%at = arith.minsi %1#1, %arg2 : i32",
    ],
    "a node times a stride": ["%at = arith.muli %node, %arg2 : i32"],
    "a row of what the launch counts": ["%at = arith.muli %arg2, %c64_i32 : i32"],
    "a row of a program": ["%100 = arith.constant 100 : i32", "%at = arith.muli %pid, %100 : i32"],
    "a program times a node": ["%at = arith.muli %pid, %node : i32"],
    "a node divided": ["%1 = arith.divsi %node, %arg2 : i32", "%at = arith.muli %1, %c64_i32 : i32"],
    "shifted": ["%6 = arith.constant 6 : i32", "%at = arith.shli %node, %6 : i32"],
    "made with an operation that it does not know": [
        "%1 = arith.muli %node, %c64_i32 : i32",
        "%at = arith.ori %1, %c1_i32 : i32",
    ],
    "a product of 64 bits, cut off": [
        "%1 = arith.extsi %node : i32 to i64",
        "%2 = arith.muli %1, %c64_i64 : i64",
        "%at = arith.trunci %2 : i64 to i32",
    ],
    "a name that another branch gave to a program": [
        "scf.if %true {",
        "  %1 = arith.remsi %pid, %arg2 : i32",
        "}",
        "%1 = arith.addi %node, %c1_i32 : i32",
        "%at = arith.muli %1, %c64_i32 : i32",
    ],
}
WIDE_ENOUGH = {
    "a node": ["%at = arith.addi %node, %c64_i32 : i32"],
    "a row in 64 bits": ["%1 = arith.extsi %node : i32 to i64", "%at = arith.muli %1, %c64_i64 : i64"],
    "the first row of a window": ["%at = arith.muli %node, %c16_i32 : i32"],
    "the first row of a program": [
        "%1 = arith.remsi %pid, %arg2 : i32",
        "%at = arith.muli %1, %c64_i32 : i32",
    ],
    "a block of features": ["%1 = arith.divsi %pid, %arg2 : i32", "%at = arith.muli %1, %c64_i32 : i32"],
    "a row of a weight": [
        "%1 = tt.splat %arg2 : i32 -> tensor<8xi32>",
        "%at = arith.muli %range, %1 : tensor<8xi32>",
    ],
    "a bit of a node": ["%1 = arith.andi %node, %c1_i32 : i32", "%at = arith.muli %1, %c64_i32 : i32"],
}


@pytest.mark.parametrize("name", TOO_NARROW)
def test_what_32_bits_cannot_hold_is_found(name: str) -> None:
    found = beyond_32_bits(KERNEL.format(lines="\n    ".join(TOO_NARROW[name])))
    assert found == ["%last = tt.addptr %arg0, %at : !tt.ptr<f16>, i32"]


@pytest.mark.parametrize("name", WIDE_ENOUGH)
def test_counts_are_not_found(name: str) -> None:
    assert beyond_32_bits(KERNEL.format(lines="\n    ".join(WIDE_ENOUGH[name]))) == []


def test_what_a_loop_hands_to_its_next_round() -> None:
    lines = [
        "scf.for %arg3 = %c0_i32 to %node step %c1_i32 iter_args(%arg4 = %c0_i32) -> (i32)  : i32 {",
        "  %9 = tt.addptr %arg0, %arg4 : !tt.ptr<f16>, i32",
        "  %2 = arith.muli %arg3, %c64_i32 : i32",
        "  scf.yield %2 : i32",
        "}",
        "%at = arith.addi %node, %c1_i32 : i32",
    ]
    found = beyond_32_bits(KERNEL.format(lines="\n    ".join(lines)))
    assert found == ["%9 = tt.addptr %arg0, %arg4 : !tt.ptr<f16>, i32"]
