"""Public sparse attention: softmax of sampled scores, times values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from graphfuse import reference
from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.walk import Walk, Walks, copies, to_edge_index
from graphfuse.kernels import launch
from graphfuse.ops import _check
from graphfuse.ops._library import Graph, Packed, below_autograd, for_gradient, graph_of, register

MAX_HEAD_DIM = 256  # what a window kernel holds on chip


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: RowWindows,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    r"""Scaled dot-product attention in which node :math:`i` sees only its in-neighbours :math:`N(i)`.

    .. math::
        s_{ij} = \lambda\, q_i^\top k_j, \qquad
        o_i = \sum_{j \in N(i)} \frac{e^{s_{ij}}}{\sum_{l \in N(i)} e^{s_{il}}}\, v_j

    Scores, softmax and sum run in one kernel for each head; no score reaches memory, forward or backward. A
    node without in-neighbours gets 0 and gives finite gradients.

    Args:
        q: Queries, ``float16 | bfloat16 | float32[num_dst, heads, head_dim]`` (float64 on a CPU), heads of a
            row contiguous, rows may be strided; ``head_dim`` at most 256.
        k: Keys, dtype of ``q``, ``[num_src, heads, head_dim]``.
        v: Values, dtype of ``q``, ``[num_src, heads, head_dim]``.
        windows: The graph, ``windows.shape == (num_dst, num_src)``; a repeated edge counts as often.
        scale: The factor :math:`\lambda`, without unit; ``None`` means ``head_dim ** -0.5``.
        dropout: Probability that a weight is dropped after the softmax; the others grow by 1 / (1 - dropout).
        seed: ``int64[1]`` on the device of ``q``; which weights are dropped is a function of it and of
            (receiver, source, copy of the edge, head). ``None`` draws one with ``torch.randint``.

    Returns:
        ``[num_dst, heads, head_dim]`` in the dtype of ``q``; sums are kept in float32.

    Raises:
        ValueError: a shape, dtype, device or rate differs from the above; the message names the argument.

    Note:
        Saved for backward: ``q, k, v``, the output, and maximum and sum of each softmax (``float32[num_dst,
        heads, 2]``). Bitwise reproducible, forward and backward. Not differentiable twice. Reference:
        :func:`graphfuse.reference.sparse_attention`. Source: Li & Chandramowlishwaran, Fused3S, ICS 2025
        (arXiv:2505.08098).
    """
    _check.windows(windows)
    num_dst, num_src = windows.shape
    _check.heads("q", q, num_dst, windows.device)
    _check.heads("k", k, num_src, q.device, q)
    _check.heads("v", v, num_src, q.device, q)
    if q.size(2) > MAX_HEAD_DIM:
        raise ValueError(f"`q` must have a head_dim of at most {MAX_HEAD_DIM} (got {q.size(2)})")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"`dropout` must be in [0, 1) (got {dropout})")
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(1 << 62, (1,), device=q.device)
    elif seed.shape != (1,) or seed.dtype != torch.int64 or seed.device != q.device:
        got = f"{seed.dtype}{list(seed.shape)} on {seed.device}"
        raise ValueError(f"`seed` must be int64[1] on {q.device} (got {got})")
    if not torch.compiler.is_compiling():
        _check.runs_kernel(q)
        pin_if_capturing(windows)
    rows = launch.attention_prefers_rows(*windows.sizes, q.size(1), q.size(2), q.dtype)
    graph = graph_of(windows, rows, False, q, k, v)
    scale = q.size(2) ** -0.5 if scale is None else float(scale)
    arguments = (scale, dropout, q, k, v, seed)
    if isinstance(graph, Walks):
        out: Tensor = Attention.apply(graph, *arguments)[0]
        return out
    out = torch.ops.graphfuse.attention(*graph, *arguments)[0]
    return out


@functools.cache
def _launchers() -> tuple[Any, Any, Any]:
    from graphfuse.kernels.attention import Shape, attention_fwd  # imports triton
    from graphfuse.kernels.attention_bwd import attention_bwd

    return Shape, attention_fwd, attention_bwd


def _copies(w: Walk, dropout: float) -> Tensor | None:
    return copies(w) if dropout > 0 else None


def _run(
    w: Walks, scale: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not _check.runs_kernel(q):
        out = reference.sparse_attention(to_edge_index(w.forward), q, k, v, scale, dropout, seed)
        return out, q.new_empty(0)
    shape_of, forward, _ = _launchers()
    shape = shape_of(q.size(1), q.size(2), scale, dropout, q.dtype)
    rows = (contiguous_heads(tensor) for tensor in (q, k, v))
    found: tuple[Tensor, Tensor] = forward(w.forward, _copies(w.forward, dropout), *rows, seed, shape)
    return found


def _run_backward(
    w: Walks,
    scale: float,
    dropout: float,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax: Tensor,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _check.runs_kernel(q):
        edge_index = to_edge_index(w.forward)
        with torch.enable_grad():
            q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
            again = reference.sparse_attention(edge_index, q, k, v, scale, dropout, seed)
        dq, dk, dv = torch.autograd.grad(again, (q, k, v), grad)
        return dq, dk, dv
    shape_of, _, backward = _launchers()
    shape = shape_of(q.size(1), q.size(2), scale, dropout, q.dtype)
    both = (_copies(w.forward, dropout), _copies(w.backward, dropout))
    rows = (contiguous_heads(tensor) for tensor in (grad, q, k, v))
    found: tuple[Tensor, Tensor, Tensor] = backward(w, both, *rows, out, softmax, seed, shape)
    return found


def contiguous_heads(x: Tensor) -> Tensor:
    """``x`` with the heads of a row contiguous; its rows may stay strided."""
    return x if x.stride()[1:] == (x.size(2), 1) and x.stride(0) > 0 else x.contiguous()


def _fake(
    graph: Packed, scale: float, dropout: float, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((*q.shape[:2], 2), dtype=torch.float32)


def _fake_backward(
    graph: Packed, scale: float, dropout: float, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class Attention(torch.autograd.Function):
    """Attention and its derivative: ``(out, softmax)``, the second without gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: Graph,
        scale: float,
        dropout: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Over the forward direction of ``graph``."""
        arguments = (scale, dropout, q, k, v, seed)
        if isinstance(graph, Walks):
            out, softmax = _run(graph, *arguments)
        else:
            out, softmax = below_autograd(torch.ops.graphfuse.attention, *graph, *arguments)
        ctx.graph, ctx.scale, ctx.dropout = graph, scale, dropout
        ctx.save_for_backward(q, k, v, out, softmax, seed)
        ctx.mark_non_differentiable(softmax)
        return out, softmax

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``q``, ``k`` and ``v``."""
        arguments = (ctx.scale, ctx.dropout, grad, *ctx.saved_tensors)
        graph = for_gradient(ctx.graph, grad)
        if isinstance(graph, Walks):
            gradients = _run_backward(graph, *arguments)
        else:
            gradients = torch.ops.graphfuse.attention_backward(*graph, *arguments)
        return None, None, None, *gradients, None


def _no_derivative(graph: Packed, *arguments: Any) -> Any:
    return below_autograd(torch.ops.graphfuse.attention_backward, *graph, *arguments)


register(
    "attention",
    "float scale, float dropout, Tensor q, Tensor k, Tensor v, Tensor? seed) -> (Tensor, Tensor)",
    _run,
    _fake,
    Attention.apply,
)
register(
    "attention_backward",
    "float scale, float dropout, Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax, "
    "Tensor? seed) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _no_derivative,
)
