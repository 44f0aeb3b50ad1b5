"""The faults of :mod:`tests.fault_list` in GAT's sums of factors, GATv2's pairs, and what adds slices."""

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
        "tl.load(stats_ptr + head * 4)",
        "tl.load(stats_ptr + head * 0)",
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
    Fault(
        "records-rounded",
        "half precision where float32 is due",
        "a record holds numbers of receivers of float32 in half precision",
        _RECORDS,
        "+ nth, own.to(NUMBER)",
        "+ nth, own.to(HALF).to(NUMBER)",
        select(_SPLIT, "are_not_rounded and 4-16"),
    ),
    Fault(
        "records-outlier",
        "unguarded value",
        "one source far from the others moves the centre so far that all windows go the slow way",
        _RECORDS,
        "(total - least - greatest) * (1.0 / (_SAMPLES - 2))",
        "total * (1.0 / _SAMPLES)",
        select(_SPLIT, "one_far_source"),
    ),
    Fault(
        "factors-dropped",
        "unguarded value",
        "backward drops edges of u > 0 alone",
        _KERNEL,
        "bent, rest = bent * drawn, rest * drawn",
        "bent, rest = bent * drawn, rest",
        select(_SPLIT, "shapes and hub and 8-16 and float16 and 0.4"),
    ),
    Fault(
        "factors-copies",
        "swapped index",
        "backward draws once for all copies of an edge",
        _KERNEL,
        "head + g, False), copy[None, :])",
        "head + g, False), copy[None, :] * 0)",
        select(_SPLIT, "test_dropout and repeated and 4-16"),
    ),
    Fault(
        "factors-alone",
        "unguarded value",
        "a loop that is all of its row gets the rounding error of delta",
        _KERNEL,
        "of_delta -= slope(p, dp, delta, False)",
        "of_delta -= p * (dp - delta)",
        select(_SPLIT, "all_of_its_row"),
    ),
)

OF_PAIRS = (
    Fault(
        "pairs-sum",
        "swapped index",
        "the last quarter of a row meets the numbers of `att` before it",
        "kernels/pairs.py",
        "b3, _words(a3), part",
        "b3, _words(a2), part",
        select("ops/test_pairs", "rows_of_pairs and 32 and float16"),
    ),
    Fault(
        "pairs-zero",
        "off by one in a mask",
        "a sum of two rows that is 0 has the slope of a positive one",
        "kernels/pairs.py",
        "acc = tl.where(u > 0, acc + x, acc)",
        "acc = tl.where(u >= 0, acc + x, acc)",
        select("ops/test_pairs", "rows_of_pairs and 32 and float16"),
    ),
    Fault(
        "pairs-slope",
        "missing rescale",
        "the gradient of a row of GATv2 is that of sums above 0 alone",
        "kernels/gatv2_rows.py",
        "scored = SLOPE * tl.sum(level, 0)[:, None] + (1.0 - SLOPE) * scored",
        "scored = (1.0 - SLOPE) * scored",
        select("ops/test_additive_attention", "test_gatv2 and ragged and float16"),
    ),
)

OF_MERGES = (
    Fault(
        "slices-filled-up",
        "wrong stride",
        "what adds slices of gradients steps over their rows as if these had not been filled up",
        "kernels/attention_bwd_merge.py",
        "WIDTH: tl.constexpr = slice_width(SUMS, HEADS * EDGE_DIM)",
        "WIDTH: tl.constexpr = SUMS + HEADS * EDGE_DIM",
        select(_SPLIT, "slices_of_walks_by_weights and 3"),
    ),
    Fault(
        "gradient-merge-tail",
        "dropped tail",
        "of a long window no more slices of a gradient are added than are loaded at a time",
        "kernels/attention_bwd_merge.py",
        "for start in tl.range(begin, end, SLOTS, ",
        "for start in tl.range(begin, tl.minimum(begin + SLOTS, end), SLOTS, ",
        select("ops/test_attention", "slices and crowd and windows"),
    ),
)

OF_GAT = OF_FACTORS + OF_PAIRS + OF_MERGES
