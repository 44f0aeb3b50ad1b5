"""The faults of :mod:`tests.fault_list` that are planted where GAT makes no weights, but sums factors."""

from __future__ import annotations

from tests.fault import Fault, select

_SPLIT, _KERNEL, _RECORDS = "ops/test_gat_split", "kernels/gat_bwd_split.py", "kernels/gat_records.py"

OF_FACTORS = (
    Fault(
        "factors-far",
        "unguarded value",
        "sources far from each other have weights by factors that half precision does not hold",
        _RECORDS,
        "NEAR, GREATER = tl.constexpr(6.0)",
        "NEAR, GREATER = tl.constexpr(80.0)",
        select(_SPLIT, "far_from_each_other and 60 and 4-16 and float16"),
    ),
    Fault(
        "factors-delta",
        "half precision where float32 is due",
        "delta enters a product as one number of half precision, without the rest",
        _RECORDS,
        "_packed(high, (delta - high.to(delta.dtype)).to(HALF))",
        "_packed(high, (delta * 0).to(HALF))",
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
    Fault(
        "factors-centre",
        "swapped index",
        "sources of all heads of a record count from the centre of its first",
        _RECORDS,
        "(7 * GROUP + head % GROUP)",
        "(7 * GROUP + head * 0)",
        select(_SPLIT, "shapes and hub and 8-16 and float16 and False"),
    ),
    Fault(
        "factors-beyond",
        "unguarded value",
        "rows beyond the last source are far from a centre that is not near 0, and their window goes without",
        _KERNEL,
        "tl.where(tile_rows < num_rows, its_own, centre)",
        "tl.where(tile_rows < num_rows, its_own, 0.0)",
        select(_SPLIT, "far_from_zero and float16"),
    ),
    Fault(
        "records-apart",
        "swapped index",
        "where sources are far from each other, delta of a record is that of its first head",
        _RECORDS,
        "halves + (4 * GROUP + nth * 2)",
        "halves + (4 * GROUP + nth * 0)",
        select(_SPLIT, "far_from_each_other and 60 and 4-16 and float16"),
    ),
)
