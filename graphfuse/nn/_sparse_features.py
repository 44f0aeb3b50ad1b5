"""The linear map of features that are a torch.sparse matrix, as bags of words are: an aggregation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse import ops
from graphfuse.formats.cache import matrix_windows
from graphfuse.formats.lasting import savable
from graphfuse.kernels.device import kernel_problem
from graphfuse.ops._whole import Features


def affine_of_sparse(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    r"""The rows :math:`W x_i + b` of a sparse ``x``, dense.

    That is :math:`\sum_j x_{ij} W_j + b`, with columns of W: each node sums over its entries as it would over
    its neighbours, so :func:`graphfuse.ops.spmm` does it, over row windows of the entries that are built once
    for a matrix object and serve both directions. PyTorch's product where kernels do not take ``x``, where it
    is to have a gradient, in a trace, and in a capture that met no such windows.

    Args:
        x: ``[num_nodes, in_dim]``, COO, CSR or CSC; entries that stand at one place add up.
        weight: :math:`W`, ``[out_dim, in_dim]``.
        bias: :math:`b`, ``[out_dim]``, or None.

    Returns:
        ``[num_nodes, out_dim]``, in the dtype of ``x``, or autocast's.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    operands = [weight] if bias is None else [weight, bias]
    fits = all(one.device == x.device and (autocast or one.dtype is dtype) for one in operands)
    found = features_of(x, dtype) if fits and weight.size(1) == x.size(1) else None
    if found is None:
        return F.linear(x, weight, bias)
    assert found.entries is not None
    bias = None if bias is None else bias.to(dtype)
    return ops.spmm(found.entries, weight.t().to(dtype), found.x.to(dtype), bias=bias)


def features_of(x: Tensor, dtype: torch.dtype) -> Features | None:
    """``x``, if sparse its entries; None where an aggregation in ``dtype`` cannot stand for its product."""
    if x.layout is torch.strided:
        return Features(x)
    if x.requires_grad or torch.compiler.is_compiling() or kernel_problem(x.device, dtype) is not None:
        return None
    windows = matrix_windows(x)
    if windows is None:
        return None
    values = savable(x._values() if x.layout is torch.sparse_coo else x.values())
    assert values is not None
    return Features(values, windows)
