"""How the ops are registered, and when a call may skip the registration.

Each op is one ``autograd.Function``. Registered under the dispatcher's Autograd key it serves torch.compile,
export, dispatch modes and functorch; called directly it serves plain eager code, where the dispatcher's
Python path, and `custom_op` still more, would cost several times the launch of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import row_windows
from graphfuse.formats.late import LateWindows
from graphfuse.formats.walk import Walks, walks

_PLAIN = frozenset((Tensor, Parameter, type(None), float, bool, int, torch.dtype))
_LIBRARY = torch.library.Library("graphfuse", "DEF")


class Packed(NamedTuple):
    """A graph as an op of the dispatcher receives it: packed tensors of a record, and which way to read.

    Or, from a trace, an ``edge_index`` in their place, whose record the op looks up when it runs.
    """

    graph: Tensor
    order: Tensor | None
    transposed: bool
    num_rows: int
    num_cols: int

    def transpose(self) -> Packed:
        """The other direction."""
        return Packed(self.graph, self.order, not self.transposed, self.num_cols, self.num_rows)


Graph = Walks | Packed  # what the Functions take: views at hand, or tensors that may be symbolic
Sizes = tuple[int, int, int, int]  # of a record
Choose = Callable[..., tuple[bool, bool]]
SCHEMA = "Tensor graph, Tensor? order, bool transposed, SymInt num_rows, SymInt num_cols"


def register(
    name: str,
    arguments: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    apply: Callable[..., Any],
    choose: Choose,
) -> None:
    """Registers ``graphfuse::name``.

    Args:
        name: Name of the op.
        arguments: Its schema after :data:`SCHEMA`, with the return type.
        run: The implementation, on :class:`Walks` and the remaining arguments.
        fake: Shapes and dtypes of the result, on :class:`Packed` and the remaining arguments.
        apply: ``autograd.Function.apply``, on :class:`Packed` and the remaining arguments.
        choose: Whether the op walks rows, and whether it needs the order of the edges: on a record's
            ``sizes`` and the remaining arguments.
    """
    fields = len(Packed._fields)

    def run_registered(*args: Any) -> Any:
        graph, rest = Packed(*args[:fields]), args[fields:]
        return run(_walks(graph, choose, rest), *rest)

    # a CUDA graph that inductor makes would replay the edges it was made with
    _LIBRARY.define(f"{name}({SCHEMA}, {arguments}", tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl(name, run_registered, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, lambda *args: apply(Packed(*args[:fields]), *args[fields:]), "Autograd")
    torch.library.register_fake(
        f"graphfuse::{name}", lambda *args: fake(Packed(*args[:fields]), *args[fields:]), lib=_LIBRARY
    )


def _walks(graph: Packed, choose: Choose, arguments: tuple[Any, ...]) -> Walks:
    if graph.graph.dim() == 1:
        return walks(*graph[:3])
    windows = record(graph)
    return windows.walks(*choose(windows.sizes, *arguments))


def record(graph: Packed) -> RowWindows:
    """The record of a graph that a trace gave as its ``edge_index``."""
    if graph.transposed:
        return row_windows(graph.graph, graph.num_rows, graph.num_cols).transpose()
    return row_windows(graph.graph, graph.num_cols, graph.num_rows)


def below_autograd(op: Any, *arguments: Any) -> Any:
    """Calls ``op`` where its Function would otherwise call itself."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def runs_directly(*arguments: Any) -> bool:
    """Whether a call may skip the dispatcher: tensors are plain, and nothing but autograd watches them."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0  # which no_grad leaves on, and a Function refuses
    )
    return not watched and _PLAIN.issuperset(map(type, arguments))


def records(*operands: Tensor | None) -> bool:
    """Whether autograd has to know of a call: its results may be differentiated."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in operands])


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` for plain eager calls, without its look for functorch in every argument."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator of that name, without its host time where nobody asks for a second derivative."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grads)

    return once


def for_gradient(graph: Graph, *grads: Tensor | None) -> Graph:
    """``graph`` in the form that a backward pass needs for these gradients.

    A batch of gradients, as of ``torch.autograd.functional.jacobian(vectorize=True)``, has no memory that a
    kernel could read: PyTorch calls the registered op for one at a time.
    """
    if isinstance(graph, Walks):
        graph.require_same_edges()
        if any(grad is not None and is_batched(grad) for grad in grads):
            return Packed(*graph.source, graph.forward.num_rows, graph.forward.num_cols)
    return graph


def packed_of(graph: Graph) -> Tensor | None:
    """What a Function saves for its backward beside operands: PyTorch raises if it was refilled meanwhile.

    Views of a record say so themselves, see :func:`for_gradient`.
    """
    return None if isinstance(graph, Walks) else graph.graph


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for a batch, under either of PyTorch's ways to vectorise gradients."""
    batched = torch._C._functorch
    return batched.is_legacy_batchedtensor(tensor) or batched.is_batchedtensor(tensor)


def graph_of(windows: RowWindows, choose: Choose, *arguments: Any) -> Graph:
    """The graph in the form this call needs: views if nothing but autograd watches, else packed tensors.

    Args:
        windows: The graph.
        choose: That of the op.
        arguments: Those of the op after the graph.
    """
    if isinstance(windows, LateWindows):
        return Packed(windows.plain, None, windows.transposed, *windows.shape)
    rows, with_edges = choose(windows.sizes, *arguments)
    if runs_directly(*arguments):
        return windows.walks(rows, with_edges)
    order = None
    if with_edges:
        order = windows.packed_row_edges if rows else windows.packed_window_edges
    graph = windows.packed_rows if rows else windows.packed_windows
    return Packed(graph, order, windows.transposed, *windows.shape)


def _of_rows(edge_index: Tensor, transposed: bool, num_rows: int, num_cols: int, what: str) -> Tensor:
    found: Tensor = getattr(record(Packed(edge_index, None, transposed, num_rows, num_cols)), what)()
    return found  # a copy, as an op's result has to be


# What layers derive from a record, as an int64 number of each row: `what` names a method of RowWindows.
_LIBRARY.define(
    "of_rows(Tensor edge_index, bool transposed, SymInt num_rows, SymInt num_cols, str what) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_LIBRARY.impl("of_rows", _of_rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "graphfuse::of_rows",
    lambda edge_index, transposed, num_rows, num_cols, what: edge_index.new_empty(
        num_rows, dtype=torch.int64
    ),
    lib=_LIBRARY,
)
