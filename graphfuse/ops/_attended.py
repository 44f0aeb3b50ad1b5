"""Attention within a layer's Function: all that steps have in common is prepared once for a graph.

Heads stand side by side, ``[num_nodes, heads * dim]``, as projections and layers have them: a view is a call
of PyTorch, and a kernel is told no shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.walk import Walks
from graphfuse.ops import additive, attention
from graphfuse.ops._heads import width_of
from graphfuse.ops._library import is_batched

Heads = tuple[int, int]  # and features of each


class Ready:
    """A graph as the launchers take it, and their launches, for features of one shape and layout.

    On any other device, or for another layout, a layer finds another of these.
    """

    __slots__ = ("backward", "forward", "graph", "heads", "how", "shape", "structures")

    def __init__(self, graph: Walks, how: Any, heads: Heads, structures: tuple[Any, Any]) -> None:
        self.graph, self.how, self.heads = graph, how, heads
        self.structures = structures  # forward and backward
        self.shape: Any = None  # stays None where rows are gathered with more features than they have
        self.forward: Any = None
        self.backward: Any = None  # made when it is first asked for, as evaluation never does


def additive_forward(
    windows: RowWindows, how: additive.How, heads: Heads, given: additive.Operands, bias: Tensor
) -> tuple[Ready, tuple[Tensor, Tensor, Tensor], Tensor]:
    """What additive attention returns, without features of edges, and that plus a contiguous bias."""
    x = given.x
    key = ("additive", how, heads, given.own.dtype, given.other.dtype, x.dtype, x.stride(0))
    ready: Ready = windows.memo(key, lambda: _ready_additive(windows, how, heads, given, bias))
    if ready.shape is None:
        out, softmax, tilt = additive.run_forward(ready.graph, how, _additive_by_heads(ready, given))
        out = out.flatten(1)
        return ready, (out, softmax, tilt), out + bias
    launch = additive.launchers()[0].additive_fwd
    found = launch(ready.structures[0], given, ready.shape, how.tilted, ready.forward, bias)
    return ready, found[:3], found[3]


def _ready_additive(
    windows: RowWindows, how: additive.How, heads: Heads, given: additive.Operands, bias: Tensor
) -> Ready:
    x, kernels = given.x.view(-1, *heads), additive.launchers()[0]
    graph = windows.walks(*additive.choose(windows.sizes, *how, *given._replace(x=x)))
    forward, backward = (additive.structure_of(walk, None, how) for walk in (graph.forward, graph.backward))
    ready = Ready(graph, how, heads, (forward, backward))
    if width_of(graph.forward, x) == x.size(2):
        ready.shape = kernels.Shape(*heads, *how[:4], x.dtype)
        ready.forward = kernels.forward_plan(forward, given, ready.shape, how.tilted, bias)
    return ready


def _additive_by_heads(ready: Ready, given: additive.Operands) -> additive.Operands:
    x, own = given.x.view(-1, *ready.heads), given.own
    return given._replace(x=x, own=own.view(-1, *ready.heads) if ready.how.v2 else own)


def additive_backward(ready: Ready, grad: Tensor, saved: Sequence[Any]) -> additive.Gradients:
    """Its gradients, from operands and results."""
    ready.graph.require_same_edges()
    given, (out, softmax, tilt) = additive.Operands(*saved[:-3]), saved[-3:]
    if ready.shape is None or is_batched(grad):
        results = (out.view(-1, *ready.heads), softmax, tilt.view(-1, *ready.heads) if tilt.numel() else tilt)
        saved = (*_additive_by_heads(ready, given), *results)
        d_own, d_other, dx, *none = additive.gradients(
            ready.graph, ready.how, False, grad.view(-1, *ready.heads), saved
        )
        return d_own.view(given.own.shape), d_other, dx.view(given.x.shape), none[0], none[1]
    kernels, grad = additive.launchers()[1], grad.contiguous()
    arguments = (ready.structures, grad, given, kernels.Saved(out, softmax, tilt), ready.shape)
    if ready.backward is None:
        ready.backward = kernels.backward_plans(*arguments)
    found: additive.Gradients = kernels.additive_bwd(*arguments, False, ready.backward)
    return found


def attention_forward(
    windows: RowWindows,
    how: attention.How,
    heads: Heads,
    given: attention.Operands,
    skip: Tensor | None = None,
    twice: bool = False,
) -> tuple[Ready, tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """What dot-product attention returns, without numbers of edges, and that plus ``skip``.

    With a ``key_scale`` the keys that are given are the values. Rows of ``skip``, of contiguous features, are
    as far apart as those of the values. ``twice``: without ``skip`` the result itself comes a second time.
    """
    q, k, v, seed, _, _, key_scale = given
    key = ("attention", how, heads, q.dtype, v.stride(0), key_scale is None, skip is None, twice)
    residual = attention.launchers()[0].Residual(skip) if twice or skip is not None else None
    ready: Ready = windows.memo(key, lambda: _ready_attention(windows, how, heads, given, residual))
    if ready.shape is None:
        out, softmax, edge_sum = attention.run_forward(ready.graph, how, _by_heads(ready, given))
        out = out.flatten(1)
        again = out.clone() if twice else None
        return ready, (out, softmax, edge_sum), again if skip is None else out + skip
    kernels = attention.launchers()[0]
    operands = (q, k, v, key_scale, seed, None, ready.shape, ready.forward, residual)
    out, softmax, edge_sum, total = kernels.attention_fwd(ready.structures[0], *operands)
    return ready, (out, softmax, edge_sum), total


def _ready_attention(
    windows: RowWindows, how: attention.How, heads: Heads, given: attention.Operands, residual: Any
) -> Ready:
    q, k, v, _, _, _, key_scale = given
    by_heads, kernels = q.view(-1, *heads), attention.launchers()[0]
    graph = windows.walks(*attention.choose(windows.sizes, *how, *given._replace(q=by_heads)))
    forward, backward = (
        attention.structure_of(walk, None, how.dropout) for walk in (graph.forward, graph.backward)
    )
    ready = Ready(graph, how, heads, (forward, backward))
    if width_of(graph.forward, by_heads) == by_heads.size(2):
        ready.shape = kernels.Shape(*heads, how.scale, how.dropout, q.dtype, 0, how.self_loops)
        ready.forward = kernels.forward_plan(forward, q, k, v, key_scale, None, ready.shape, residual)
    return ready


def _by_heads(ready: Ready, given: attention.Operands) -> attention.Operands:
    q, k, v = [rows.view(-1, *ready.heads) for rows in given[:3]]
    return given._replace(q=q, k=k, v=v)


def attention_backward(
    ready: Ready, grad: Tensor, saved: Sequence[Any], into: Sequence[Tensor] | None = None
) -> attention.Gradients:
    """Its gradients, from operands and results.

    Args:
        ready: What forward was run with.
        grad: The gradient of its result.
        saved: Operands and results.
        into: Where the gradients of ``q``, ``k`` and ``v`` go, and a copy of ``grad`` if there is a fourth,
            rows of one stride.
    """
    ready.graph.require_same_edges()
    q, k, v, seed, _, _, key_scale, out, softmax, edge_sum = saved
    if ready.shape is None or is_batched(grad):
        given = _by_heads(ready, attention.Operands(*saved[:-3]))
        saved = (*given, out.view(-1, *ready.heads), softmax, edge_sum)
        grad = grad.view(-1, *ready.heads)
        dq, dk, dv, *none = attention.gradients(ready.graph, ready.how, False, grad, edge_sum, saved)
        found = dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
        for place, one in zip(into or (), (*found, grad.view(q.shape)), strict=False):
            place.copy_(one)
        return *found, none[0], none[1]
    kernels, grad = attention.launchers()[1], grad.contiguous()
    results = kernels.Saved(q, k, v, key_scale, out, softmax, edge_sum, seed, None)
    if ready.backward is None:
        stride = q.size(1) if into is None else into[0].stride(0)  # of one layer always the same
        copies = into is not None and len(into) == 4
        ready.backward = kernels.backward_plans(ready.structures, grad, results, ready.shape, stride, copies)
    gradients: attention.Gradients = kernels.attention_bwd(
        ready.structures, grad, None, results, ready.shape, False, ready.backward, into
    )
    return gradients
