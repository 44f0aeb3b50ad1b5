"""What a compiled kernel may take of a GPU."""

from __future__ import annotations

import triton

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# Instructions of tensor cores, of both loops, where only a head's own features are summed for it. Were all
# that its group gathers, the first had 184, with one loop 96.
PRODUCTS = {
    "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4": 88,
    "attention_window_kernel[fp16-4-32-0-0.0-False-False]-2": 80,
    "attention_bwd_window_kernel[fp16-8-16-0-0.0-False-True]": 40,
    "attention_bwd_window_kernel[fp16-4-32-0-0.0-False-True]": 80,
    "gat_window_kernel[fp16-4-32-0.0-False-None]": 90,
    "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted": 50,
    "gat_bwd_window_kernel[fp16-4-32-0.0-False-None]": 42,
}
# Bytes that a thread may spill, and kernels that may spill more: windows that guess, in the loop with a
# running maximum, which is for those that guessed wrong. Their bounds on registers were swept on sm_90, GAT's
# without self-loops, which only small graphs tell by place.
SPILLED = 64 if triton.__version__.startswith("3.6.") else 128  # launches are chosen for 3.6's compiler
SPILLED_MORE = {
    "sm_80": {
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4": 264,
        "gat_window_kernel[fp16-4-32-0.0-False-None]": 136,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted": 216,
        "gat_window_kernel[fp16-8-8-0.0-False-None]-untilted": 160,
    },
    "sm_90": {
        "gat_window_kernel[fp16-4-32-0.0-False-None]": 104,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted": 272,
        "gat_window_kernel[fp16-8-8-0.0-False-None]-untilted": 152,
    },
    "sm_100": {
        "gat_window_kernel[fp16-4-32-0.0-False-None]": 112,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted": 272,
        "gat_window_kernel[fp16-8-8-0.0-False-None]-untilted": 144,
    },
    "gfx942": {
        "attention_window_kernel[fp16-8-16-0-0.0-False-False]-4": 236,
        "gat_window_kernel[fp16-4-32-0.0-False-None]": 804,
        "gat_window_kernel[fp16-4-32-0.0-False-None]-untilted": 484,
        "gat_window_kernel[fp16-8-8-0.0-False-None]": 692,
    },
}
