"""GCNConv as one Function: sums whose launch is at hand are those of the op, and so where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows
from graphfuse.kernels import copies, orders
from graphfuse.nn import GCNConv
from graphfuse.ops import _aggregate, gcn_layer
from graphfuse.testing import GRAPHS

CASES = (
    "plain",
    "rows are copied",
    "products follow",
    "strided",
    "strided bias",
    "off 16 bytes",
    "without bias",
)
CASES += ("wide",)


def numbers(layer: GCNConv, x: Tensor, edges: Tensor, grad: Tensor) -> list[Tensor]:
    out = layer(x, edges)
    given = [one for one in (x, *layer.parameters()) if one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_op(
    case: str, of_x: bool, of_weight: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    edges, (num_nodes, _) = GRAPHS["ragged"](device)
    in_dim, out_dim = (300, 5) if case == "wide" else (9, 5)
    layer = GCNConv(in_dim, out_dim, bias=case != "without bias").to(device)
    x, grad = torch.randn(num_nodes, in_dim, device=device), torch.randn(num_nodes, out_dim, device=device)
    if case == "rows are copied":
        monkeypatch.setattr(copies, "copy_pays", lambda *_: True)
    if case == "products follow":
        monkeypatch.setattr(orders, "gemm_order", lambda *_: orders.GemmOrder.AGGREGATE)
    if case == "strided":
        x, grad = torch.randn(num_nodes, in_dim + 2, device=device)[:, 1:-1], grad[:1].expand_as(grad)
    if case.startswith("strided"):
        layer.bias.data = torch.randn(2 * out_dim, device=device)[::2]
    if case == "off 16 bytes":
        memory = torch.randn(x.numel() + grad.numel() + 2, device=device)
        x, grad = memory[1 : x.numel() + 1].view_as(x), memory[x.numel() + 2 :].view_as(grad)
    x, layer.lin.weight.requires_grad = x.requires_grad_(of_x), of_weight
    if not (of_x or of_weight or case != "without bias"):
        return
    found = [numbers(layer, x, edges, grad) for _ in range(2)]  # the second with a launch at hand
    monkeypatch.setattr(gcn_layer, "runs_whole", lambda *_: False)
    wanted = numbers(layer, x, edges, grad)
    torch.testing.assert_close(found, [wanted, wanted], rtol=1e-5, atol=1e-5)


def test_a_weight_of_other_strides_finds_another_launch(device: torch.device) -> None:
    pytest.importorskip("triton")
    edges, (num_nodes, _) = GRAPHS["ragged"](device)
    layer, x = GCNConv(9, 5).to(device), torch.randn(num_nodes, 9, device=device, requires_grad=True)
    grad = torch.randn(num_nodes, 5, device=device)
    wanted = numbers(layer, x, edges, grad)
    layer.lin.weight.data = layer.lin.weight.data.t().contiguous().t()
    torch.testing.assert_close(numbers(layer, x, edges, grad), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reason", ["rows are copied", "a product follows"])
def test_where_no_launch_is_at_hand(
    reason: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    edges, (num_nodes, _) = GRAPHS["ragged"](device)
    if reason == "rows are copied":
        monkeypatch.setattr(copies, "copy_pays", lambda *_: True)
    walks = RowWindows.from_edge_index(edges, (num_nodes, num_nodes)).walks(False, False)
    how = _aggregate.Aggregation(walks, None, None, False, False, torch.float32)
    sums = gcn_layer.Sums(how, None, 5, 300 if reason == "a product follows" else None)
    assert not sums.direct
    assert gcn_layer.Sums(how, None, 5, 9).direct == (reason != "rows are copied")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_factors_leave_no_launch_at_hand_where_they_are_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    edges, (num_nodes, _) = GRAPHS["ragged"](device)
    scale = torch.rand(num_nodes, device=device)
    windows = RowWindows.from_edge_index(edges, (num_nodes, num_nodes))
    for rows in (False, True):
        walks = windows.walks(rows, False)
        how = _aggregate.Aggregation(walks, scale, scale, False, False, dtype)
        for pays in (False, True):
            monkeypatch.setattr(copies, "scaled_copy_pays", lambda *_, pays=pays: pays)
            assert gcn_layer.Sums(how, None, 8, None).direct == (rows or not pays)
            assert gcn_layer.Sums(how._replace(col_scale=None), None, 8, None).direct
    monkeypatch.setattr(copies, "copy_pays", lambda *_: True)
    assert not gcn_layer.Sums(how, None, 9, None).direct
    assert not gcn_layer.Sums(how, None, 8, 9).direct


def test_a_launch_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    pytest.importorskip("triton")
    kernels, found = _aggregate.kernels(), list[Any]()
    plan_of = kernels.plan_of
    monkeypatch.setattr(kernels, "plan_of", lambda *given: found.append(given) or plan_of(*given))
    edges, (num_nodes, _) = GRAPHS["ragged"](device)
    layer, x = GCNConv(9, 5).to(device), torch.randn(num_nodes, 9, device=device, requires_grad=True)
    for _ in range(3):
        layer(x, edges).sum().backward()
    # of the last the gradient is expanded, and has to be made contiguous
    assert len(found) == 1 + 3
    found.clear()
    for _ in range(3):
        layer(x, edges).square().sum().backward()
    assert len(found) == 1  # backward's
