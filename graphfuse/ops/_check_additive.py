"""Argument checks that additive attention and its weights share."""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.ops import _check
from graphfuse.ops.attention import MAX_HEAD_DIM


def check_gat(
    a_src: Tensor,
    a_dst: Tensor,
    x: Tensor | None,
    windows: RowWindows,
    dropout: float,
    seed: Tensor | None,
    self_loops: bool,
    edge_score: Tensor | None,
    loop_score: Tensor | None,
) -> Tensor | None:
    """Checks the arguments of :func:`gat_attention`, and returns the seed; ``x`` may be missing."""
    _check.windows(windows)
    (num_dst, num_src), device = windows.shape, windows.device
    if x is None:
        _check.matrix("a_src", a_src, num_src, device)
    else:
        _check.heads("x", x, num_src, device)
    like, name = (a_src, "a_src") if x is None else (x, "x")
    heads = like.size(1)
    _check.matrix("a_src", a_src, num_src, device, heads)
    _check.terms_dtype("a_src", a_src, name, like.dtype)
    _check.matrix("a_dst", a_dst, num_dst, device, heads)
    _check.same_dtype("a_dst", a_dst, "a_src", a_src.dtype)
    if edge_score is not None or loop_score is not None:
        of_edges = {"edge_score": edge_score, "loop_score": loop_score}
        _check_edges(a_src, windows, self_loops, (heads,), of_edges, "a_src")
    return _checked(like, windows, dropout, seed, name)


def check_gatv2(
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    windows: RowWindows,
    dropout: float,
    seed: Tensor | None,
    self_loops: bool,
    edge: Tensor | None,
    loop_edge: Tensor | None,
) -> Tensor | None:
    """Checks the arguments of :func:`gatv2_attention`, and returns the seed."""
    _check.windows(windows)
    num_dst, num_src = windows.shape
    _check.heads("x_src", x_src, num_src, windows.device)
    _check.heads("x_dst", x_dst, num_dst, x_src.device, x_src, "x_src")
    _check.matrix("att", att, x_src.size(1), x_src.device, x_src.size(2))
    _check.terms_dtype("att", att, "x_src", x_src.dtype)
    if edge is not None or loop_edge is not None:
        of_edges = {"edge": edge, "loop_edge": loop_edge}
        _check_edges(x_src, windows, self_loops, tuple(x_src.shape[1:]), of_edges, "x_src")
    return _checked(x_src, windows, dropout, seed, "x_src")


def _checked(x: Tensor, windows: RowWindows, dropout: float, seed: Tensor | None, name: str) -> Tensor | None:
    """Checks what both attentions take, and returns the seed."""
    if x.dim() == 3 and x.size(2) > MAX_HEAD_DIM:
        raise ValueError(f"`{name}` must have a head_dim of at most {MAX_HEAD_DIM} (got {x.size(2)})")
    if not torch.compiler.is_compiling():
        _check.runs_kernel(x, name)
        pin_if_capturing(windows)
    return _check.dropout_seed(dropout, seed, x.device)


def _check_edges(
    x: Tensor,
    windows: RowWindows,
    self_loops: bool,
    width: tuple[int, ...],
    of_edges: dict[str, Tensor | None],
    name: str,
) -> None:
    """Checks what is given for each edge and for each loop, in this order."""
    rows = (windows.num_edges, min(windows.shape))
    for (given, value), num in zip(of_edges.items(), rows, strict=True):
        if value is not None:
            _check.strided(given, value, x.device)
            _check.same_dtype(given, value, name, x.dtype)
            if value.shape != (num, *width):
                raise ValueError(f"`{given}` must have shape {[num, *width]} (got {list(value.shape)})")
    (edge_name, edge), (loop_name, loop_edge) = of_edges.items()
    if (loop_edge is not None) != (edge is not None and self_loops):
        wanted = "with" if loop_edge is None else "only with"
        raise ValueError(f"`{loop_name}` must be given {wanted} both `{edge_name}` and `self_loops`")
