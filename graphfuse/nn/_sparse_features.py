"""The linear map of features that are a torch.sparse matrix, as bags of words are: an aggregation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphfuse import ops
from graphfuse.formats.cache import matrix_windows
from graphfuse.formats.lasting import savable
from graphfuse.kernels.device import kernel_problem


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
    fits = fits and weight.size(1) == x.size(1) and kernel_problem(x.device, dtype) is None
    fits = fits and not x.requires_grad and not torch.compiler.is_compiling()
    windows = matrix_windows(x) if fits else None
    if windows is None:
        return F.linear(x, weight, bias)
    values = savable(x._values() if x.layout is torch.sparse_coo else x.values())
    bias = None if bias is None else bias.to(dtype)
    assert values is not None
    return ops.spmm(windows, weight.t().to(dtype), values.to(dtype), bias=bias)
