"""Stacked parameters are bitwise those that PyTorch stacks: several tiles, ragged edges, any start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphfuse.nn import TransformerConv
from graphfuse.ops import _whole
from graphfuse.ops._whole import Maps


def maps_of(count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Maps:
    width, dim = shape
    weights = [torch.randn(width, dim, device=device).to(dtype) for _ in range(count)]
    return Maps(weights, [torch.randn(width, device=device).to(dtype) for _ in range(count)])


def stacked_by_pytorch(maps: Maps, turned: bool) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat(tuple(maps.weights))
    if turned:
        weight = torch.cat([one.t() for one in maps.weights], 1)
    return weight, torch.cat(tuple(maps.biases)) if maps.biases else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (32, 32), (40, 65)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_equals_what_pytorch_stacks(
    dtype: torch.dtype, count: int, shape: tuple[int, int], turned: bool, device: torch.device
) -> None:
    pytest.importorskip("triton")
    from graphfuse.kernels.stacked import stacked

    maps = maps_of(count, shape, dtype, device)
    for given in (maps, maps._replace(biases=[])):
        found, wanted = stacked(*given, turned), stacked_by_pytorch(given, turned)
        assert found[0].is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", ["strided", "five", "of no features", "one", "off 16 bytes"])
def test_what_the_kernel_does_not_take(case: str, turned: bool, device: torch.device) -> None:
    """And what starts anywhere, which it takes."""
    pytest.importorskip("triton")
    count = {"five": 5, "one": 1}.get(case, 4)
    maps = maps_of(count, (6, 0 if case == "of no features" else 8), torch.float32, device)
    if case == "strided":
        maps = maps._replace(weights=[*maps.weights[:3], torch.randn(8, 6, device=device).t()])
    if case == "off 16 bytes":
        memory = torch.randn(49, device=device)
        maps = maps._replace(weights=[*maps.weights[:3], memory[1:].view(6, 8)])
    found = _whole._stacked(maps, turned)
    torch.testing.assert_close(found, stacked_by_pytorch(maps, turned), rtol=0, atol=0)
    assert case != "one" or found[0].is_contiguous()  # one is taken to be turned


def test_a_layer_stacks_its_parameters_by_one_launch(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    pytest.importorskip("triton")
    kernels, launched = _whole._kernels(), list[bool]()
    stacked = kernels.stacked
    monkeypatch.setattr(kernels, "stacked", lambda *given: launched.append(given[2]) or stacked(*given))
    layer = TransformerConv(6, 4, heads=2).to(device)
    x = torch.randn(7, 6, device=device)
    edges = torch.tensor([[0, 1, 2, 6], [1, 2, 2, 0]], device=device)
    layer(x, edges)
    layer(x.to_sparse_csr(), edges)
    assert launched == [False, True]
