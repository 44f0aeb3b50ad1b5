"""How the ops are registered, and when a call may skip the registration.

Each op is one ``autograd.Function``. Registered under the dispatcher's Autograd key it serves torch.compile,
export, dispatch modes and functorch; called directly it serves plain eager code, where the dispatcher's
Python path, and `custom_op` still more, would cost several times the launch of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from graphfuse.formats import RowWindows
from graphfuse.formats.walk import Walks, walks

_PLAIN = frozenset((Tensor, Parameter, type(None)))
_LIBRARY = torch.library.Library("graphfuse", "DEF")


class Packed(NamedTuple):
    """A graph as an op of the dispatcher receives it: packed tensors of a record, and which way to read."""

    graph: Tensor
    order: Tensor | None
    transposed: bool
    num_rows: int
    num_cols: int

    def transpose(self) -> Packed:
        """The other direction."""
        return Packed(self.graph, self.order, not self.transposed, self.num_cols, self.num_rows)


Graph = Walks | Packed  # what the Functions take: views at hand, or tensors that may be symbolic
SCHEMA = "Tensor graph, Tensor? order, bool transposed, SymInt num_rows, SymInt num_cols"


def register(
    name: str, arguments: str, run: Callable[..., Any], fake: Callable[..., Any], apply: Callable[..., Any]
) -> None:
    """Registers ``graphfuse::name``.

    Args:
        name: Name of the op.
        arguments: Its schema after :data:`SCHEMA`, with the return type.
        run: The implementation, on :class:`Walks` and the remaining arguments.
        fake: Shapes and dtypes of the result, on :class:`Packed` and the remaining arguments.
        apply: ``autograd.Function.apply``, on :class:`Packed` and the remaining arguments.
    """
    fields = len(Packed._fields)
    _LIBRARY.define(f"{name}({SCHEMA}, {arguments}")
    _LIBRARY.impl(name, lambda *args: run(walks(*args[:3]), *args[fields:]), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, lambda *args: apply(Packed(*args[:fields]), *args[fields:]), "Autograd")
    torch.library.register_fake(
        f"graphfuse::{name}", lambda *args: fake(Packed(*args[:fields]), *args[fields:]), lib=_LIBRARY
    )


def below_autograd(op: Any, *arguments: Any) -> Any:
    """Calls ``op`` where its Function would otherwise call itself."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether a call may skip the dispatcher: plain tensors, and nothing but autograd watches them."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    )
    return not watched and _PLAIN.issuperset(map(type, tensors))


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` for plain eager calls, without its look for functorch in every argument."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def for_gradient(graph: Graph, *grads: Tensor | None) -> Graph:
    """``graph`` in the form that a backward pass needs for these gradients.

    A batch of gradients, as of ``torch.autograd.functional.jacobian(vectorize=True)``, has no memory that a
    kernel could read: PyTorch calls the registered op for one at a time.
    """
    if isinstance(graph, Walks) and any(grad is not None and is_batched(grad) for grad in grads):
        return Packed(*graph.source, graph.forward.num_rows, graph.forward.num_cols)
    return graph


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for a batch, under either of PyTorch's ways to vectorise gradients."""
    batched = torch._C._functorch
    return batched.is_legacy_batchedtensor(tensor) or batched.is_batchedtensor(tensor)


def graph_of(windows: RowWindows, rows: bool, with_edges: bool, *tensors: Tensor | None) -> Graph:
    """The graph in the form this call needs: views if nothing but autograd watches, else packed tensors."""
    if runs_directly(*tensors):
        return windows.walks(rows, with_edges)
    order = None
    if with_edges:
        order = windows.packed_row_edges if rows else windows.packed_window_edges
    graph = windows.packed_rows if rows else windows.packed_windows
    return Packed(graph, order, windows.transposed, *windows.shape)
