"""Aggregation over a graph, alone or followed by a dense layer."""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.ops import _check
from graphfuse.ops._aggregate import Operands, aggregate


def spmm(
    windows: RowWindows,
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    transpose: bool = False,
) -> Tensor:
    r"""Sums the features of each node's in-neighbours.

    .. math::
        y_i = \sigma\Big(r_i \sum_{e = (j \to i)} w_e c_j x_j + b\Big)

    Repeated edges count each; a node without in-neighbours gets :math:`\sigma(b)`. Deterministic: sums run
    in a fixed order and are kept in float32.

    Args:
        windows: The graph, ``windows.shape == (num_dst, num_src)``.
        x: ``float16 | bfloat16 | float32[num_src, dim]`` (float64 on a CPU); rows may be strided.
        edge_weight: :math:`w`, any float dtype, ``[num_edges]`` in the order of the edge list that the
            windows were built from. ``None`` means 1.
        loop_weight: ``float32[num_dst]`` (or dtype of ``x``). If given it replaces the diagonal: edges with
            source == receiver are left out, and receiver i gets ``loop_weight[i]`` times its own row.
        row_scale: :math:`r`, like ``loop_weight``; not differentiable. ``None`` means 1.
        col_scale: :math:`c`, ``[num_src]``, likewise.
        bias: :math:`b`, ``[dim]``.
        activation: :math:`\sigma`, ``"relu"`` or ``None`` for the identity.
        out_dtype: Dtype of the result, one of the float dtypes above; ``None`` means that of ``x``.
        transpose: Whether to take the transposed matrix: each node sums over those it sends to, and
            ``num_dst`` and ``num_src`` change places above. Builds nothing; ``edge_weight`` keeps its order.

    Returns:
        ``[num_dst, dim]``.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.
        TypeError: an operand is None, or ``out_dtype`` is no dtype.

    Note:
        On a CPU this runs :func:`graphfuse.reference.spmm`, unless ``TRITON_INTERPRET=1``. Differentiable in
        ``x``, ``edge_weight``, ``loop_weight`` and ``bias``, any number of times.
    """
    relu = _check.activation(activation)
    _check.result_dtype(out_dtype)
    _check.windows(windows)
    windows = windows.transpose() if transpose else windows
    _check.matrix("x", x, windows.shape[1], windows.device)
    _check_operands(windows, x, edge_weight, loop_weight, row_scale, col_scale)
    if bias is not None:
        _check.vector("bias", bias, x.size(1), x.device)
    operands = Operands(x, edge_weight, loop_weight, None, bias)
    return aggregate(windows, operands, row_scale, col_scale, relu, out_dtype)


def spmm_gemm(
    windows: RowWindows,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    edge_weight: Tensor | None = None,
    loop_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""A graph convolution: aggregation and dense layer in one.

    .. math::
        Y = \sigma\big(R A C X W^\top + b\big)

    Either :math:`(AX)W^\top` in one kernel, which keeps the 16 aggregated rows of a window on chip and
    multiplies them there, or :math:`A(XW^\top)`, a dense product and :func:`spmm`: whichever is estimated to
    move fewer bytes for these widths and this graph.

    Args:
        windows: The graph, ``windows.shape == (num_dst, num_src)``.
        x: ``float16 | bfloat16 | float32[num_src, dim]`` (float64 on a CPU).
        weight: :math:`W`, dtype of ``x``, ``[out_dim, dim]`` as in ``torch.nn.functional.linear``.
        bias: :math:`b`, ``[out_dim]``.
        activation: :math:`\sigma`, ``"relu"`` or ``None`` for the identity.
        edge_weight: As in :func:`spmm`.
        loop_weight: As in :func:`spmm`.
        row_scale: As in :func:`spmm`, the diagonal of :math:`R`.
        col_scale: As in :func:`spmm`, the diagonal of :math:`C`.
        out_dtype: Dtype of the result, one of the float dtypes above; ``None`` means that of ``x``.

    Returns:
        ``[num_dst, out_dim]``.

    Raises:
        ValueError: a shape, dtype or device differs from the above; the message names the argument.
        TypeError: an operand is None, or ``out_dtype`` is no dtype.

    Note:
        Differentiable in ``x``, ``weight``, ``bias``, ``edge_weight`` and ``loop_weight``, any number of
        times. Source: Kipf & Welling, ICLR 2017 (arXiv:1609.02907).
    """
    relu = _check.activation(activation)
    _check.result_dtype(out_dtype)
    _check.windows(windows)
    num_src = windows.shape[1]
    _check.matrix("x", x, num_src, windows.device)
    _check.matrix("weight", weight, None, x.device, x.size(1), "out_dim")
    _check.same_dtype("weight", weight, "x", x.dtype)
    _check_operands(windows, x, edge_weight, loop_weight, row_scale, col_scale)
    if bias is not None:
        _check.vector("bias", bias, weight.size(0), x.device)
    operands = Operands(x, edge_weight, loop_weight, weight, bias)
    return aggregate(windows, operands, row_scale, col_scale, relu, out_dtype)


def _check_operands(
    windows: RowWindows,
    x: Tensor,
    edge_weight: Tensor | None,
    loop_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    num_dst, num_src = windows.shape
    if edge_weight is not None:
        _check.vector("edge_weight", edge_weight, windows.num_edges, x.device)
    if loop_weight is not None:
        _check.vector("loop_weight", loop_weight, num_dst, x.device)
    for name, scale, length in (("row_scale", row_scale, num_dst), ("col_scale", col_scale, num_src)):
        if scale is not None:
            _check.vector(name, scale, length, x.device)
            if scale.requires_grad:
                raise ValueError(
                    f"`{name}` must not require a gradient; multiply `x` or the result by it instead"
                )
