"""Rows copied before they are gathered, as on large graphs: padded to 16 bytes, and scaled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from graphfuse import ops, reference
from graphfuse.kernels import copies, launch, orders
from graphfuse.ops._heads import contiguous_heads
from graphfuse.testing import check
from tests.ops import test_attention, test_edge_attention
from tests.ops.test_additive_attention import WALKS, check_additive, check_mixed
from tests.ops.test_attention import narrow
from tests.ops.test_spmm import build, check_spmm, scales
from tests.ops.test_spmm import draw as draw_matrices


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Makes copies pay on small graphs; the widths of what was copied, before and after."""
    from graphfuse.kernels import gathered, spmm

    kernel, widths = gathered.gathered, []

    def noted(plans: Any, x: torch.Tensor, width: int, *scale: Any) -> torch.Tensor:
        widths.append((x.size(2), width))
        return kernel(plans, x, width, *scale)

    monkeypatch.setattr(copies, "copy_pays", lambda *sizes: True)
    monkeypatch.setattr("graphfuse.ops._heads._gathered", lambda: noted)
    monkeypatch.setattr(spmm, "gathered", noted)
    return widths


@pytest.mark.parametrize(
    ("dtype", "dim", "width"),
    [
        (torch.float16, 7, 8),
        (torch.bfloat16, 41, 48),
        (torch.float32, 7, 8),
        (torch.float32, 33, 36),
        (torch.float32, 12, 12),
    ],
    ids=str,
)
def test_spmm(
    dtype: torch.dtype, dim: int, width: int, walked: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    for weighted, loops in ((False, True), (True, False)):
        check_spmm("ragged", device, dtype, dim, weighted, loops)
    if walked == "windows":  # which scale what they copy
        assert set(copied) == {(dim, width)}
    else:
        assert set(copied) == ({(dim, width)} if dim != width else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_are_scaled_where_columns_have_many_entries(
    dtype: torch.dtype,
    walked: str,
    device: torch.device,
    copied: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_spmm("ragged", device, dtype, 8, weighted=False, loops=True)
    assert not copied
    monkeypatch.setattr(copies, "scaled_copy_pays", lambda *sizes: True)
    check_spmm("ragged", device, dtype, 8, weighted=False, loops=True)
    assert set(copied) == ({(8, 8)} if walked == "windows" else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_cut_windows_and_rows(
    dtype: torch.dtype,
    walked: str,
    device: torch.device,
    copied: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    check_spmm("hub", device, dtype, 7, weighted=False, loops=True)
    assert copied


@pytest.mark.parametrize("order", orders.GemmOrder)
def test_spmm_gemm(
    order: orders.GemmOrder,
    walked: str,
    device: torch.device,
    copied: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gemm_order(*sizes: Any) -> orders.GemmOrder:
        return orders.GemmOrder.AGGREGATE if sizes[-1] and order is orders.GemmOrder.PROJECT else order

    monkeypatch.setattr(orders, "gemm_order", gemm_order)
    windows, edge_index, num_src, num_dst = build("isolated", device)
    for dim, out_dim in ((9, 5), (5, 9)):
        inputs = draw_matrices(
            device, torch.float32, x=(num_src, dim), weight=(out_dim, dim), bias=(out_dim,)
        )
        options = scales(num_src, num_dst, device)
        op = functools.partial(ops.spmm_gemm, windows, **options)
        check(op, functools.partial(reference.spmm_gemm, edge_index, num_dst=num_dst, **options), inputs)
    assert copied


@pytest.mark.parametrize("heads_dim", [(1, 41), (3, 7)], ids=str)
def test_attention_of_odd_heads(
    heads_dim: tuple[int, int], walked: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    dtype = narrow(walked)
    test_attention.check_attention("ragged", device, dtype, *heads_dim)
    seed = torch.tensor([5], device=device)
    test_attention.check_attention(
        "ragged", device, dtype, *heads_dim, dropout=0.3, seed=seed, self_loops=True
    )
    dim = heads_dim[1]
    assert set(copied) == {(dim, -(-dim * dtype.itemsize // 16) * 16 // dtype.itemsize)}


def test_scaled_keys_that_are_the_values(
    walked: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    test_attention.check_scaled_keys("ragged", device, torch.float16, 2, 7, self_loops=True)
    assert set(copied) == {(7, 8)}


def test_attention_over_edges_with_numbers(device: torch.device, copied: list[tuple[int, int]]) -> None:
    test_edge_attention.check_attention("ragged", device, torch.float32, (2, 7, 3), scale=0.4)
    assert set(copied) == {(7, 8)}  # what belongs to edges is not copied


@WALKS
def test_additive_attention(
    kind: str, walked: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    dtype = narrow(walked)
    for heads, dim in ((1, 41), (2, 7)):
        check_additive(kind, "ragged", device, dtype, heads, dim, self_loops=dim == 7)
    assert {before for before, _ in copied} == {41, 7}


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_additive_attention_with_edges(
    kind: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    check_additive(kind, "ragged", device, torch.float32, 2, 7, edges=True, self_loops=True)
    # GATv2's edges have rows themselves, which would have to be copied
    assert bool(copied) == (kind == "gat")


@WALKS
def test_terms_of_float32(
    kind: str, walked: str, device: torch.device, copied: list[tuple[int, int]]
) -> None:
    """Results have another dtype than rows, and are as wide."""
    check_mixed(kind, "ragged", device, torch.float16, 2, 7, edges=False)
    assert set(copied) == {(7, 8)}


def test_rows_an_odd_number_apart_are_made_contiguous() -> None:
    odd, even = torch.randn(4, 9)[:, :8].view(4, 2, 4), torch.randn(4, 10)[:, :8].view(4, 2, 4)
    assert torch.equal(contiguous_heads(odd), odd) and contiguous_heads(odd).is_contiguous()
    assert contiguous_heads(even) is even
    whole = torch.randn(4, 1, 7)
    assert contiguous_heads(whole) is whole


def test_half_precision_rows_are_gathered_backward_too(walked: str, device: torch.device) -> None:
    """Where the result, and so its gradient, is float32, as GCN's under autocast."""
    windows, _, num_src, _ = build("ragged", device)
    x = torch.randn(num_src, 8, device=device).half().requires_grad_()
    out = ops.spmm(windows, x, out_dtype=torch.float32)
    torch.autograd.grad(out.sum(), x)
    walks = windows.walks(walked == "rows", False)
    for walk in (walks.forward, walks.backward):
        dtypes = {key[2] for key in walk.plans if isinstance(key, tuple) and key[0] == "spmm"}
        assert dtypes == {torch.float16}


def test_padding_is_zero_whatever_the_scale(device: torch.device) -> None:
    from graphfuse.kernels.gathered import gathered

    x = torch.randn(9, 2, 5, device=device)[::2].half()
    scale = torch.tensor([1.0, 0.5, float("inf"), float("nan"), 2.0], device=device)
    for factor in (None, scale):
        found = gathered({}, x, 8, factor)
        wanted = x if factor is None else (x.float() * factor[:, None, None]).half()
        assert torch.equal(found[..., 5:], torch.zeros_like(found[..., 5:]))
        torch.testing.assert_close(found[..., :5], wanted, rtol=0, atol=0, equal_nan=True)


def test_an_op_under_compile_has_the_strides_of_its_fake(
    device: torch.device, copied: list[tuple[int, int]]
) -> None:
    windows, _, given = test_attention.draw("ragged", device, torch.float16, 2, 7)
    q, k, v = (given[name].detach() for name in "qkv")
    packed = (windows.packed_windows, None, False, *windows.shape)
    arguments = (*packed, 0.4, 0.0, False, q, k, v, None, None, None, None)
    torch.library.opcheck(torch.ops.graphfuse.attention, arguments)
    out = torch.ops.graphfuse.attention(*arguments)[0]
    assert copied and out.is_contiguous()


def test_rows_of_any_width_are_copied(device: torch.device) -> None:
    from graphfuse.kernels.gathered import gathered

    x = torch.randn(2, 1, 18_001, device=device)
    assert torch.equal(gathered({}, x, 18_004), torch.nn.functional.pad(x, (0, 3)))
    assert launch.whole_rows(18_004).warps == 16  # AMD's GPUs take no more


def test_which_graphs_copy() -> None:
    many = (1 << 20, 10_000, 10_000)
    assert copies.gathered_width(*many, 41, 2) == 48
    assert copies.gathered_width(*many, 602, 2) == 608
    assert copies.gathered_width(*many, 41, 4) == 44
    for dim, size in ((40, 2), (100, 2), (602, 4), (3, 2), (1, 4)):  # pieces of 8 bytes, or few of them
        assert copies.gathered_width(*many, dim, size) == dim
    assert copies.gathered_width(10_000, 100, 100, 41, 2) == 41  # a launch would cost more
    assert copies.gathered_width(1 << 20, 10_000, 200_000, 41, 2) == 41  # rows are hardly read twice


def test_which_graphs_scale_what_they_copy() -> None:
    reddit, twitter = (54_935_245, 232_965, 232_965), (1_341_115, 81_306, 81_306)
    assert copies.scaled_copy_pays(*reddit, 2) and copies.scaled_copy_pays(*reddit, 4)
    assert not copies.scaled_copy_pays(*twitter, 2) and copies.scaled_copy_pays(*twitter, 4)
    assert not copies.scaled_copy_pays(1 << 20, 1_000, 1_000, 2)  # a launch would cost more
