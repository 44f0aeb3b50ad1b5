"""Gradients that are a part of wider rows, as that of one of several concatenated results is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops
from graphfuse.testing import GRAPHS
from tests.ops.test_attention import narrow

OPS: dict[str, Callable[..., Tensor]] = {
    "sparse_attention": lambda w, q, k, v: ops.sparse_attention(q, k, v, w),
    "scaled keys": lambda w, q, k, v: ops.sparse_attention(
        q, 2 * v, v, w, key_scale=torch.full_like(v[:, :, 0], 2, dtype=torch.float32)
    ),
    "gat_attention": lambda w, q, k, v: ops.gat_attention(k[:, :, 0], q[:, :, 0], v, w),
    "gatv2_attention": lambda w, q, k, v: ops.gatv2_attention(k, q, v[0], w),
}


@pytest.mark.parametrize("name", OPS)
def test_its_strides_change_no_bit(name: str, walked: str, device: torch.device) -> None:
    edge_index, sizes = GRAPHS["ragged"](device)
    windows = RowWindows.from_edge_index(edge_index, sizes)
    given = [torch.randn(33, 3, 8, device=device, dtype=narrow(walked)).requires_grad_() for _ in range(3)]
    out = OPS[name](windows, *given)
    wide = torch.randn(33, 7, 8, device=device).to(out.dtype)
    for grad in (wide[:, 2:5], wide.transpose(1, 2)[:, :, :3].transpose(1, 2), wide[:1, :3].expand(33, 3, 8)):
        found = torch.autograd.grad(out, given, grad, retain_graph=True, materialize_grads=True)
        wanted = torch.autograd.grad(out, given, grad.contiguous(), retain_graph=True, materialize_grads=True)
        assert all(map(torch.equal, found, wanted))
        assert any(gradient.count_nonzero() > 0 for gradient in found)
