"""What a compiled kernel may take of a GPU."""

from __future__ import annotations

import triton

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Instructions of tensor cores, of both loops, where only a head's own features are summed for it. Were all
# that its group gathers, the first had 184, with one loop 96.
PRODUCTS = {
    "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 88,
    "attention_window_kernel[fp16-4-32-0-0.0-False-False]-2-32": 80,
    "attention_bwd_window_kernel[fp16-8-16-0-0.0-False-True]-2-32": 40,
    "attention_bwd_window_kernel[fp16-8-16-0-0.0-False-True]-4-32": 80,
    "attention_bwd_window_kernel[fp16-4-32-0-0.0-False-True]-2-32": 80,
    "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 93,
    "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 53,
    "gat_bwd_window_kernel[fp16-4-32-0.0-False-None]-32-5": 42,
}
# Bytes that a thread may spill, and kernels that may spill more: windows that guess, in the walk with a
# running maximum, which is for those that guessed wrong, and GAT's that are told a bound on registers or want
# all there are. They were swept on sm_90, most without self-loops, which only small graphs tell by place, and
# with triton 3.6; of later ones the numbers are larger here and there.
SPILLED = 64 if triton.__version__.startswith("3.6.") else 128  # launches are chosen for 3.6's compiler
SPILLED_MORE = {
    "sm_80": {
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 264,
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-32-5": 224,
        "gat_bwd_window_kernel[fp16-1-128-0.6-False-None]-32-3": 344,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-32-5": 304,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 400,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-16-2": 72,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-32-3": 120,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-untilted-32-3": 120,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 200,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 192,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-16-5": 80,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 336,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-2": 112,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 320,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-32-5": 112,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-untilted-32-3": 160,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 104,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-untilted-32-3": 80,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-16-5": 72,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-32-5": 288,
    },
    "sm_90": {
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-32-5": 344,
        "gat_bwd_window_kernel[fp16-1-128-0.6-False-None]-32-3": 280,
        "gat_bwd_window_kernel[fp16-4-32-0.6-False-None]-32-3": 136,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-32-5": 272,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 328,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-untilted-32-3": 96,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 128,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 136,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-16-5": 80,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 288,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-2": 176,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 256,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-untilted-32-3": 120,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 112,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-untilted-32-3": 112,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-32-5": 320,
    },
    "sm_100": {
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 120,
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-32-5": 256,
        "gat_bwd_window_kernel[fp16-1-128-0.6-False-None]-32-3": 296,
        "gat_bwd_window_kernel[fp16-4-32-0.6-False-None]-32-3": 152,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-32-5": 280,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 320,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-32-3": 88,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-untilted-32-3": 96,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 136,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 120,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-16-5": 96,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 280,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-2": 176,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 264,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-untilted-32-3": 120,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 96,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-untilted-32-3": 120,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-16-5": 72,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-32-5": 312,
    },
    "gfx942": {
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 236,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-32-5": 928,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 728,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-32-3": 628,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-untilted-32-3": 396,
        "gat_window_kernel[fp16-3-100-0.0-False-None]-32-2": 120,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 908,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 548,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-32-5": 1364,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-untilted-32-3": 704,
        "gat_window_kernel[fp16-8-8-0.0-False-None]-32-5": 940,
        "gat_window_kernel[fp16-8-8-0.0-False-None]-untilted-32-3": 612,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-32-3": 628,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-untilted-32-3": 408,
        "gat_window_kernel[terms-fp16-4-32-0.0-False-None]-32-5": 908,
    },
}
