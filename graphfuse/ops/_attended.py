"""Attention within a layer's Function: all that steps have in common is prepared once for a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.memory import advises
from graphfuse.formats.walk import Walks
from graphfuse.ops import additive, attention
from graphfuse.ops._heads import contiguous_heads, width_of
from graphfuse.ops._library import is_batched


class Ready(NamedTuple):
    """A graph as the launchers take it, for features of one shape."""

    graph: Walks
    structures: tuple[Any, Any]  # forward and backward
    shape: Any  # None where rows are gathered with more features than they have, so that the op pads them


@advises
def additive_forward(
    windows: RowWindows, how: additive.How, given: additive.Operands
) -> tuple[Ready, tuple[Tensor, Tensor, Tensor]]:
    """What additive attention of contiguous heads returns, without features of edges."""
    x = given.x

    def prepare() -> Ready:
        graph = windows.walks(*additive.choose(windows.sizes, *how, *given))
        forward, backward = (
            additive.structure_of(walk, None, how) for walk in (graph.forward, graph.backward)
        )
        shape = None
        if width_of(graph.forward, x) == x.size(2):
            shape = additive.launchers()[0].Shape(*x.shape[1:], *how[:4], x.dtype)
        return Ready(graph, (forward, backward), shape)

    ready: Ready = windows.memo(("additive", how, x.shape[1:], x.dtype), prepare)
    if ready.shape is None:
        return ready, additive.run_forward(ready.graph, how, given)
    launch = additive.launchers()[0].additive_fwd
    return ready, launch(ready.structures[0], given, ready.shape, how.tilted)


@advises
def additive_backward(
    ready: Ready, how: additive.How, grad: Tensor, saved: Sequence[Any]
) -> additive.Gradients:
    """Its gradients, from operands and results."""
    if ready.shape is None or is_batched(grad):
        return additive.gradients(ready.graph, how, False, grad, saved)
    kernels = additive.launchers()[1]
    given, results = additive.Operands(*saved[:-3]), kernels.Saved(*saved[-3:])
    found: additive.Gradients = kernels.additive_bwd(
        ready.structures, contiguous_heads(grad), given, results, ready.shape, False
    )
    return found


@advises
def attention_forward(
    windows: RowWindows, how: attention.How, given: attention.Operands
) -> tuple[Ready, tuple[Tensor, Tensor, Tensor]]:
    """What dot-product attention of contiguous heads returns, without numbers of edges.

    With a ``key_scale`` the keys that are given are the values.
    """
    q, k, v, seed, _, _, key_scale = given

    def prepare() -> Ready:
        graph = windows.walks(*attention.choose(windows.sizes, *how, *given))
        forward, backward = (
            attention.structure_of(walk, None, how.dropout) for walk in (graph.forward, graph.backward)
        )
        shape = None
        if width_of(graph.forward, q) == q.size(2):
            make = attention.launchers()[0].Shape
            shape = make(*q.shape[1:], how.scale, how.dropout, q.dtype, 0, how.self_loops)
        return Ready(graph, (forward, backward), shape)

    ready: Ready = windows.memo(("attention", how, q.shape[1:], q.dtype), prepare)
    if ready.shape is None:
        return ready, attention.run_forward(ready.graph, how, given)
    launch = attention.launchers()[0].attention_fwd
    return ready, launch(ready.structures[0], q, k, v, key_scale, seed, None, ready.shape)


@advises
def attention_backward(
    ready: Ready, how: attention.How, grad: Tensor, saved: Sequence[Any]
) -> attention.Gradients:
    """Its gradients, from operands and results."""
    q, k, v, seed, _, _, key_scale, out, softmax, edge_sum = saved
    if ready.shape is None or is_batched(grad):
        return attention.gradients(ready.graph, how, False, grad, edge_sum, saved)
    kernels = attention.launchers()[1]
    results = kernels.Saved(q, k, v, key_scale, out, softmax, edge_sum, seed, None)
    found: attention.Gradients = kernels.attention_bwd(
        ready.structures, contiguous_heads(grad), None, results, ready.shape, False
    )
    return found
