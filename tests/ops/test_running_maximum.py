"""Windows that make do without a maximum: where they may, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch
from graphfuse.testing import check

RECEIVERS, SOURCES = 33, 120
LATE, ALONE = 18, 20  # a receiver of the last sources only, and one without


@pytest.fixture(autouse=True)
def guess(monkeypatch: pytest.MonkeyPatch) -> None:
    config, load = launch.attention_window, launch.Load

    assert config(8, 16, 2, False, False, load.NORMAL).guess
    assert config(1, 16, 2, False, True, load.NORMAL).guess

    def guessed(*arguments: Any) -> launch.Config:
        return config(*arguments)._replace(guess=True)

    monkeypatch.setattr(launch, "attention_window", guessed)


def graph(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    edge = torch.rand(RECEIVERS, SOURCES, generator=generator) < 0.2
    edge[[0, 16, 32]] = True  # every window has all sources as its entries
    edge[LATE] = torch.arange(SOURCES) >= 100
    edge[ALONE] = False
    return edge.nonzero().t().flip(0).contiguous().to(device)


def draw(device: torch.device, dtype: torch.dtype, heads: int = 2, dim: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)  # of the CPU: which windows are done again is the draw's
    shapes = {"q": RECEIVERS, "k": SOURCES, "v": SOURCES}
    return {
        name: torch.randn(rows, heads, dim, generator=generator).to(device, dtype)
        for name, rows in shapes.items()
    }


def attend(windows: RowWindows, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The output, and what stood in the place of the maximum."""
    packed = (windows.packed_windows, None, False, *windows.shape)
    found = torch.ops.graphfuse.attention(*packed, 1.0, 0.0, False, *given.values(), None, None, None, None)
    return found[0], found[1][..., 0]


def maxima(edge_index: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The largest score of each receiver and head, 0 without."""
    scores = torch.einsum("ihc,jhc->ihj", given["q"].float(), given["k"].float())
    edge = torch.zeros(RECEIVERS, SOURCES, dtype=torch.bool, device=edge_index.device)
    edge[edge_index[1], edge_index[0]] = True
    top = scores.where(edge[:, None], -float("inf")).amax(2)
    return torch.where(top.isinf(), 0.0, top)


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0, 40.0])  # from scores near 0 to weights of 0 and 1
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_changes_no_result(
    dtype: torch.dtype, factor: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = 0.4 if (dtype is torch.float16) == (factor in (0.3, 4.0)) else 0.0
    if dropout:
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 72)  # and windows are cut
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, dtype)
    given["q"] *= factor
    given = {name: x.requires_grad_() for name, x in given.items()}
    options: dict[str, Any] = {"scale": 0.5, "dropout": dropout, "seed": torch.tensor([3], device=device)}
    check(
        lambda **given: ops.sparse_attention(**given, windows=windows, **options),
        lambda **given: reference.sparse_attention(edge_index, **given, **options),
        given,
    )


@pytest.mark.parametrize("beta", [0.5, 12.0])
def test_nor_that_of_keys_that_are_scaled_values(beta: float, device: torch.device) -> None:
    nodes = 100
    generator = torch.Generator(device).manual_seed(2)
    edge_index = torch.randint(nodes, (2, 2500), device=device, generator=generator)
    windows = RowWindows.from_edge_index(edge_index, (nodes, nodes))
    x = torch.randn(nodes, 1, 16, device=device, generator=generator).half()
    norm = x.float().norm(dim=2)
    unit = (x.float() / norm[..., None]).half()
    given = {"q": unit * beta, "k": unit, "v": x}
    options: dict[str, Any] = {"scale": 1.0, "self_loops": True}
    check(
        lambda **given: ops.sparse_attention(**given, windows=windows, key_scale=1 / norm, **options),
        lambda **given: reference.sparse_attention(edge_index, **given, **options),
        {name: y.requires_grad_() for name, y in given.items()},
    )


def test_small_scores_need_none(device: torch.device) -> None:
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    given["q"] *= 0.3
    _, found = attend(windows, given)
    assert not found.any()
    assert maxima(edge_index, given).abs().max() > 1


def far_above(given: dict[str, Tensor]) -> None:
    given["q"][:, :, 0], given["k"][90, :, 0] = 0, 14
    given["q"][16, :, 0] = 1  # exp(14) would be no number of float16


def far_below(given: dict[str, Tensor]) -> None:
    given["q"][:, :, 0], given["k"][:, :, 0] = 0, -14
    given["q"][LATE, :, 0] = 1  # exp(-14) would have lost most bits


def out_of_sight(given: dict[str, Tensor]) -> None:
    given["q"][:, :, 0], given["k"][:, :, 0] = 0, -40
    given["q"][LATE, :, 0] = 1  # exp(-40) is 0 in half precision


def large(given: dict[str, Tensor]) -> None:
    given["q"][16:32, :, 0], given["k"][:, :, 0] = 20, 0  # the queries say so, though no key does


@pytest.mark.parametrize("spoil", [far_above, far_below, out_of_sight, large])
def test_a_window_that_needs_one_has_it(spoil: Any, device: torch.device) -> None:
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    given["q"] *= 0.3
    spoil(given)
    out, found = attend(windows, given)
    again = torch.zeros(RECEIVERS, dtype=torch.bool, device=device)
    again[16:32] = True  # LATE and 16 lie there
    torch.testing.assert_close(found[again], maxima(edge_index, given)[again], rtol=1e-5, atol=1e-5)
    assert not found[~again].any()
    wanted = reference.sparse_attention(
        edge_index, **{name: x.double() for name, x in given.items()}, scale=1
    )
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("source", "value"), [(5, float("nan")), (90, float("nan")), (5, float("inf")), (90, -float("inf"))]
)
def test_nan_and_inf_reach_their_neighbours_alone(source: int, value: float, device: torch.device) -> None:
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    for name, row in (("q", 3), ("k", source), ("v", source)):
        spoiled = {other: x.clone() for other, x in given.items()}
        spoiled[name][row, 1, 2] = value
        out, _ = attend(windows, spoiled)
        wanted = reference.sparse_attention(edge_index, **spoiled, scale=1.0)
        assert isinstance(wanted, Tensor) and 0 < int((~wanted.isfinite()).sum()) < wanted.numel() // 2
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
