"""Attention that nobody differentiates keeps no softmax, and gives the numbers that it gives in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops
from graphfuse.kernels import launch
from tests.ops.test_running_maximum import ALONE, RECEIVERS, SOURCES, graph

# windows, in groups of heads and not, and the row kernels of float32
SHAPES = [(torch.float16, 1, 64), (torch.float16, 4, 32), (torch.bfloat16, 3, 7), (torch.float32, 2, 33)]
Run = Callable[[dict[str, Tensor]], Tensor]


def attention(windows: RowWindows) -> Run:
    return lambda given: ops.sparse_attention(given["y"], given["x"], given["x"], windows)


def scaled_keys(windows: RowWindows) -> Run:
    def run(given: dict[str, Tensor]) -> Tensor:
        scale = given["x"].detach().float().norm(dim=2)
        key = (scale[:, :, None] * given["x"]).to(given["x"].dtype)
        return ops.sparse_attention(given["y"], key, given["x"], windows, key_scale=scale)

    return run


def gat(windows: RowWindows) -> Run:
    # receivers' numbers have no gradient: forward with the tilt is another kernel
    return lambda given: ops.gat_attention(
        given["x"].detach()[:, :, 0].contiguous(), given["y"].detach()[:, :, 0], given["x"], windows
    )


def gatv2(windows: RowWindows) -> Run:
    return lambda given: ops.gatv2_attention(given["x"], given["y"], given["x"].detach()[0], windows)


OPS = [attention, scaled_keys, gat, gatv2]


@pytest.fixture(params=[None, 72], ids=["whole", "cut"])
def windows(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> RowWindows:
    if request.param:  # windows in slices of 64
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", request.param)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *sizes: sizes[-1] is torch.float32)
    monkeypatch.setattr(launch, "attention_prefers_rows", lambda *sizes: sizes[-1] is torch.float32)
    return RowWindows.from_edge_index(graph(device), (SOURCES, RECEIVERS))


def draw(device: torch.device, dtype: torch.dtype, heads: int, dim: int, trained: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = {"y": RECEIVERS, "x": SOURCES}
    drawn = {name: torch.randn(num, heads, dim, generator=generator) for name, num in rows.items()}
    return {name: x.to(device, dtype).requires_grad_(trained) for name, x in drawn.items()}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES)
def test_same_numbers(
    op: Callable[[RowWindows], Run],
    dtype: torch.dtype,
    heads: int,
    dim: int,
    windows: RowWindows,
    device: torch.device,
) -> None:
    run = op(windows)
    trained = run(draw(device, dtype, heads, dim, True))
    assert trained.requires_grad
    given = draw(device, dtype, heads, dim, False)
    plain = run(given)
    with torch.no_grad():
        unrecorded = run(draw(device, dtype, heads, dim, True))
    with torch.inference_mode():
        inferred = run(given)
    assert trained.abs().sum() > 0 and not trained[ALONE].any()
    for one in (plain, unrecorded, inferred):
        assert not one.requires_grad
        assert torch.equal(one, trained.detach())


def kept(op: Callable[[RowWindows], Run], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch that follows, whether it keeps a softmax."""
    module = ops.attention if op in (attention, scaled_keys) else ops.additive
    kernels, found = module.launchers()[0], list[bool]()
    name = "attention_fwd" if module is ops.attention else "additive_fwd"
    launched = getattr(kernels, name)

    def noted(*given: Any, **options: Any) -> Any:
        results = launched(*given, **options)
        found.append(results[1] is not None)
        return results

    monkeypatch.setattr(kernels, name, noted)
    return found


@pytest.mark.parametrize("alone", ["q", "k", "v"])
def test_one_operand_is_enough(alone: str, windows: RowWindows, device: torch.device) -> None:
    y, x = draw(device, torch.float16, 2, 16, False).values()
    given = {"q": y, "k": x, "v": x.clone()}
    given[alone].requires_grad_()
    ops.sparse_attention(**given, windows=windows).square().sum().backward()
    grad = given[alone].grad
    assert grad is not None and grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("alone", ["a_src", "a_dst", "x"])
def test_one_of_gat_is_enough(alone: str, windows: RowWindows, device: torch.device) -> None:
    y, x = draw(device, torch.float16, 2, 16, False).values()
    given = {"a_src": x[:, :, 0].contiguous(), "a_dst": y[:, :, 0].contiguous(), "x": x}
    given[alone].requires_grad_()
    ops.gat_attention(**given, windows=windows).square().sum().backward()
    grad = given[alone].grad
    assert grad is not None and grad.isfinite().all() and grad.any()


@pytest.mark.parametrize("op", OPS)
def test_only_backward_is_kept_for(
    op: Callable[[RowWindows], Run],
    windows: RowWindows,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":
        pytest.importorskip("triton")
    found, run = kept(op, monkeypatch), op(windows)
    run(draw(device, torch.float16, 1, 16, True)).sum().backward()
    run(draw(device, torch.float16, 1, 16, False))
    with torch.no_grad():
        run(draw(device, torch.float16, 1, 16, True))
    assert found == [True, False, False]
