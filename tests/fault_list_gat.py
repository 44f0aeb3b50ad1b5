"""The faults of :mod:`tests.fault_list` that are planted where GAT makes no weights, but sums factors."""

from __future__ import annotations

from tests.fault import Fault, select

_SPLIT, _KERNEL = "ops/test_gat_split", "kernels/gat_bwd_split.py"

OF_FACTORS = (
    Fault(
        "factors-far",
        "unguarded value",
        "sources far from each other have weights by factors that half precision does not hold",
        _KERNEL,
        "_NEAR, _GREATER = tl.constexpr(8.0)",
        "_NEAR, _GREATER = tl.constexpr(80.0)",
        select(_SPLIT, "far_from_each_other and 30 and float16"),
    ),
    Fault(
        "factors-delta",
        "half precision where float32 is due",
        "delta enters a product as one number of half precision, without the rest",
        "kernels/additive_delta.py",
        "low = low.to(tl.uint16, bitcast=True)",
        "low = (low * 0).to(tl.uint16, bitcast=True)",
        select(_SPLIT, "shapes and hub and 8-16 and bfloat16 and False"),
    ),
    Fault(
        "factors-loop",
        "missing rescale",
        "a loop of u < 0 is scaled as one of u > 0 when forward goes on with factors",
        "kernels/gat_windows.py",
        "own * LOG2_E, own * (LOG2_E * SLOPE)",
        "own * LOG2_E, own * LOG2_E",
        select(_SPLIT, "shapes and ragged and 8-16 and float16 and True"),
    ),
    Fault(
        "factors-slice",
        "missing merge",
        "each slice of a window adds the loops of its sources once more",
        _KERNEL,
        "with_loop = (begin == tl.load(ptr_ptr + window)) & (rows < num_loops)",
        "with_loop = rows < num_loops",
        select(_SPLIT, "shapes and hub and 8-16 and float16 and True"),
    ),
)
