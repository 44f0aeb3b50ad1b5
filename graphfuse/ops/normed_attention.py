"""Attention of one head, a residual and the norm after it, of inference, in one launch."""

from __future__ import annotations

from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.formats.cache import pin_if_capturing
from graphfuse.formats.memory import advises
from graphfuse.ops import attention, residual_norm
from graphfuse.ops._heads import contiguous_heads, width_of
from graphfuse.ops.residual_norm import Norm
from graphfuse.ops.sddmm import contiguous_rows


def fits(windows: RowWindows, q: Tensor, x: Tensor, norm: Norm, offset: Tensor | None) -> bool:
    """Whether :func:`normed_attention` takes these; ``k`` and ``v`` are as ``q``.

    Where rows are walked, as those of float32 are, or gathered with more features than they have, the norm
    stays a launch of its own.
    """
    if q.dim() != 3 or q.size(1) != 1 or not residual_norm.fits(x, q[:, 0], norm, offset):
        return False
    how = attention.How(q.size(2) ** -0.5, 0.0, False)
    rows, _ = attention.choose(windows.sizes, *how, q, q, q, None, None, None, None)
    return not rows and width_of(windows.walks(False, False).forward, q) == q.size(2)


@advises
def normed_attention(
    windows: RowWindows, q: Tensor, k: Tensor, v: Tensor, x: Tensor, norm: Norm, offset: Tensor | None
) -> Tensor:
    r"""Rows :math:`w \odot (z - \mu) / \sqrt{\sigma^2 + \epsilon} + b` of :math:`z = x + y + c`.

    Args:
        windows: The graph, of one set of nodes.
        q: Queries of :math:`y`, the result of :func:`graphfuse.ops.sparse_attention`, for which :func:`fits`
            holds, ``[num_nodes, 1, dim]``.
        k: Its keys.
        v: Its values.
        x: ``[num_nodes, dim]``.
        norm: As :func:`graphfuse.ops.residual_norm.residual_norm` takes it.
        offset: :math:`c`, ``[dim]``, or None.

    Returns:
        ``[num_nodes, dim]`` in the dtype of ``x``; what lies between is kept in float32.
    """
    pin_if_capturing(windows)
    kernels, _ = attention.launchers()
    walk, dim = windows.walks(False, False).forward, q.size(2)
    shape = kernels.Shape(1, dim, dim**-0.5, 0.0, q.dtype)
    residual = kernels.Residual(contiguous_rows(x), offset, *norm)
    operands = [contiguous_heads(rows) for rows in (q, k, v)]
    structure = attention.structure_of(walk, None, 0.0)
    found = kernels.attention_fwd(
        structure, *operands, None, None, None, shape, residual=residual, keep_softmax=False
    )
    out: Tensor = found[0]
    return out[:, 0]
