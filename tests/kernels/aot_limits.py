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
    "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 56,
    "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted-32-5": 31,
    "gat_bwd_window_kernel[fp16-4-32-0.0-False-None]-32-5": 42,
    "gat_bwd_window_kernel[fp16-4-32-0.0-False-None]-factors-32-5": 71,
}
# Bytes that a thread may spill, and kernels that may spill more: windows that guess, in the walk with a
# running maximum, which is for those that guessed wrong, and GAT's that are told a bound on registers or want
# all there are; its backward by factors, of 128 features, behind its loop. They were swept on sm_90, most
# without self-loops, which only small graphs tell by place, and with triton 3.6; of later ones the numbers
# are larger here and there.
SPILLED = 64 if triton.__version__.startswith("3.6.") else 128  # launches are chosen for 3.6's compiler
SPILLED_MORE = {
    "sm_80": {
        "attention_bwd_window_kernel[fp16-1-256-0-0.6-False-True]-1-32": 88,
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 256,
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-factors-32-5": 280,
        "gat_bwd_window_kernel[fp16-3-100-0.0-False-None]-factors-32-3": 264,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-16-2": 184,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-32-3": 88,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-16-5": 144,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 144,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 144,
        "gat_window_kernel[fp16-3-100-0.0-False-None]-32-5": 112,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-16-2": 368,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-32-3": 416,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-untilted-32-3": 128,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-16-5": 200,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-untilted-32-2": 160,
        "gat_window_kernel[fp16-8-16-0.6-False-None]-32-5": 96,
        "gat_window_kernel[fp16-8-8-0.6-False-None]-32-3": 144,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-16-5": 72,
    },
    "sm_90": {
        "attention_bwd_window_kernel[fp16-1-256-0-0.0-False-True]-1-32": 72,
        "attention_bwd_window_kernel[fp16-1-256-0-0.6-False-True]-1-32": 72,
        "attention_window_kernel[fp16-3-100-0-0.6-False-False]-1-32": 144,
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-factors-32-5": 240,
        "gat_bwd_window_kernel[fp16-3-100-0.0-False-None]-32-3": 128,
        "gat_bwd_window_kernel[fp16-3-100-0.0-False-None]-factors-32-3": 344,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-16-2": 104,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 72,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-32-3": 88,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-16-5": 96,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 128,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 104,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-16-2": 384,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-32-3": 448,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-32-5": 72,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-16-5": 184,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-untilted-32-2": 176,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-untilted-32-5": 72,
        "gat_window_kernel[fp16-8-16-0.6-False-None]-32-5": 112,
        "gat_window_kernel[fp16-8-8-0.6-False-None]-32-3": 208,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-16-5": 104,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 96,
    },
    "sm_100": {
        "attention_window_kernel[fp16-3-100-0-0.6-False-False]-1-32": 152,
        "gat_bwd_window_kernel[fp16-1-128-0.0-False-None]-factors-32-5": 232,
        "gat_bwd_window_kernel[fp16-1-128-0.6-False-None]-32-3": 72,
        "gat_bwd_window_kernel[fp16-3-100-0.0-False-None]-32-3": 136,
        "gat_bwd_window_kernel[fp16-3-100-0.0-False-None]-factors-32-3": 256,
        "gat_bwd_window_kernel[fp16-4-32-0.6-False-None]-16-5": 80,
        "gat_bwd_window_kernel[fp16-8-16-0.6-False-None]-32-3": 96,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-16-2": 120,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-32-3": 88,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-16-5": 80,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 136,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-untilted-32-3": 128,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-16-2": 296,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-32-3": 432,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-16-5": 200,
        "gat_window_kernel[fp16-4-32-0.6-False-None]-untilted-32-2": 176,
        "gat_window_kernel[fp16-8-16-0.0-False-None]-untilted-32-3": 88,
        "gat_window_kernel[fp16-8-16-0.6-False-None]-32-5": 88,
        "gat_window_kernel[fp16-8-8-0.6-False-None]-32-3": 328,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-16-5": 104,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 72,
    },
    "gfx942": {
        "attention_bwd_window_kernel[fp16-1-256-0-0.0-False-True]-1-32": 156,
        "attention_bwd_window_kernel[fp16-1-256-0-0.6-False-True]-1-32": 236,
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4-32": 236,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-32-5": 604,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-16-2": 148,
        "gat_window_kernel[fp16-1-128-0.0-False-None]-untilted-32-5": 148,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-32-3": 812,
        "gat_window_kernel[fp16-1-128-0.6-False-None]-untilted-32-3": 248,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-16-5": 176,
        "gat_window_kernel[fp16-1-64-0.0-False-None]-32-5": 176,
        "gat_window_kernel[fp16-1-64-0.6-False-None]-32-3": 268,
        "gat_window_kernel[fp16-3-100-0.0-False-None]-32-5": 564,
        "gat_window_kernel[fp16-3-100-0.0-False-None]-untilted-16-2": 180,
        "gat_window_kernel[fp16-3-100-0.0-False-None]-untilted-32-5": 180,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-32-3": 684,
        "gat_window_kernel[fp16-3-100-0.6-False-None]-untilted-32-3": 292,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-16-5": 192,
        "gat_window_kernel[reordered-fp16-1-64-0.0-False-None]-32-5": 192,
        "gat_window_kernel[reordered-fp16-1-64-0.6-False-None]-32-3": 268,
    },
}
