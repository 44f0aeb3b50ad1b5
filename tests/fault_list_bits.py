"""Faults of numbers: bits that are lost, and those that threads do not share."""

from __future__ import annotations

from tests.fault import Fault, select

SPMM = select("ops/test_spmm", "test_widths and float32 and 33")

OF_BITS = (
    Fault(
        "spmm-window-bits",
        "half precision where float32 is due",
        "the window kernel drops the last 13 of the 24 bits of x",
        "kernels/tiles.py",
        'step = tl.dot(a, x - high, tl.zeros_like(acc), input_precision="tf32", out_dtype=ACC)',
        "step = tl.zeros_like(acc)",
        SPMM,
    ),
    Fault(
        "attention-row-bits",
        "half precision where float32 is due",
        "keys are rounded to float16 before the scores are summed",
        "kernels/attention_rows.py",
        "s = sum_of_products(q[None, :, :], k, live",
        "s = sum_of_products(q[None, :, :], k.to(tl.float16).to(ACC), live",
        select("ops/test_attention", "output_and_gradients and float32 and rows and ragged"),
    ),
    Fault(
        "dense-product-bits",
        "half precision where float32 is due",
        "products in float32 are those of operands in float16",
        "kernels/tiles.py",
        "return tl.dot(a, b, acc, input_precision=_FLOAT32, out_dtype=ACC)",
        "return tl.dot(a.to(tl.float16), b.to(tl.float16), acc, out_dtype=ACC)",
        select("kernels/test_linear", "float32"),
    ),
    Fault(
        "scores-of-two-roundings",
        "a number that threads do not share",
        "products of edges' numbers are part of the first addition: rounded in one thread, not in the next",
        "kernels/attention_rows.py",
        "EDGE_WIDTH: tl.constexpr = 1 if PRECISE else EDGE_DIM",
        "EDGE_WIDTH: tl.constexpr = EDGE_DIM",
        select("kernels/test_scores", "test_scores_of_attention and 16"),
    ),
)
