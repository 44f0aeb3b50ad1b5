"""GAT's windows that make do with a guess at their maxima, and with factors for exponentials."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch
from graphfuse.testing import check
from tests.ops.test_running_maximum import ALONE, RECEIVERS, SOURCES, graph

SLOPE = 0.2
FIRST = 32  # whose mean is what is guessed from
EARLY = 19  # a receiver of sources right after the first


@pytest.fixture(autouse=True)
def windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = launch.gat_window(2, 8, False, False, False, launch.Load.FEW)
    assert config.guess and config.step == FIRST
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *sizes: sizes[-1] is torch.float32)


def draw(device: torch.device, dtype: torch.dtype, heads: int = 2, dim: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)  # of the CPU: which windows are done again is the draw's
    shapes = {"a_src": (SOURCES, heads), "a_dst": (RECEIVERS, heads), "x": (SOURCES, heads, dim)}
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def attend(windows: RowWindows, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The output, and what stood in the place of the maximum."""
    packed = (windows.packed_windows, None, False, *windows.shape)
    operands = (given["a_dst"], given["a_src"], given["x"], None, None, None)
    found = torch.ops.graphfuse.additive_attention(*packed, SLOPE, 0.0, False, False, False, *operands)
    return found[0], found[1][..., 0]


def guesses(given: dict[str, Tensor]) -> Tensor:
    """What is guessed for each receiver and head, 0 without edges."""
    mean = given["a_src"][:FIRST].float().mean(0)
    guess = torch.nn.functional.leaky_relu(given["a_dst"].float() + mean, SLOPE)
    guess[ALONE] = 0
    return guess


def maxima(edge_index: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The largest score of each receiver and head, 0 without."""
    scores = given["a_dst"].float()[:, :, None] + given["a_src"].float().t()[None]
    scores = torch.nn.functional.leaky_relu(scores, SLOPE)
    edge = torch.zeros(RECEIVERS, SOURCES, dtype=torch.bool, device=edge_index.device)
    edge[edge_index[1], edge_index[0]] = True
    top = scores.where(edge[:, None], -float("inf")).amax(2)
    return torch.where(top.isinf(), 0.0, top)


# from scores near 0 to weights of 0 and 1; a slope beyond [0, 1] has to keep exponentials for scores
@pytest.mark.parametrize(
    ("factor", "slope", "dropout"),
    [
        *((0.3, 0.2, 0.0), (1.0, 0.0, 0.0), (4.0, 1.0, 0.0), (20.0, 0.2, 0.0), (40.0, 0.2, 0.0)),
        *((1.0, 1.5, 0.0), (0.3, 0.2, 0.4), (20.0, 0.2, 0.4)),
    ],
)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_changes_no_result(
    dtype: torch.dtype,
    heads: int,
    factor: float,
    slope: float,
    dropout: float,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loops = heads == 3
    if factor in (1.0, 20.0):
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 72)  # and windows are cut, to slices of 64
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, dtype, heads, 8 if heads == 3 else 32)
    for name in ("a_src", "a_dst"):
        given[name] *= factor
    given = {name: x.requires_grad_() for name, x in given.items()}
    options: dict[str, Any] = {"negative_slope": slope, "self_loops": loops, "dropout": dropout}
    options |= {"seed": torch.tensor([7], device=device)} if dropout > 0 else {}
    check(
        lambda **given: ops.gat_attention(**given, windows=windows, **options),
        lambda **given: reference.gat_attention(edge_index, **given, **options),
        given,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (3, 16), (1, 64), (1, 128)])
def test_tiny_windows_do_without_where_numbers_are_drawn(
    heads: int, dim: int, dropout: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = launch.gat_window
    monkeypatch.setattr(launch, "gat_window", lambda *kind: config(*kind[:-1], launch.Load.TINY))
    guess = launch.gat_window(heads, dim, dropout > 0, False, True, launch.Load.FEW).guess
    assert guess == (dropout == 0)
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = {name: x.requires_grad_() for name, x in draw(device, torch.float16, heads, dim).items()}
    options: dict[str, Any] = {"dropout": dropout, "self_loops": heads > 1}
    options |= {"seed": torch.tensor([7], device=device)} if dropout > 0 else {}
    check(
        lambda **given: ops.gat_attention(**given, windows=windows, **options),
        lambda **given: reference.gat_attention(edge_index, **given, **options),
        given,
    )


def as_drawn(given: dict[str, Tensor]) -> None:
    pass


def large(given: dict[str, Tensor]) -> None:
    given["a_dst"][16:32] += 12  # exp of these scores would be no numbers of float16


def far_down(given: dict[str, Tensor]) -> None:
    given["a_src"] -= 90  # exp of one is 0 in float32, and of the other infinite: scores are near 0
    given["a_dst"] += 90


def far_up(given: dict[str, Tensor]) -> None:
    given["a_src"] += 110
    given["a_dst"] -= 110


@pytest.mark.parametrize("move", [as_drawn, large, far_down, far_up])
def test_the_guess_serves(move: Any, device: torch.device) -> None:
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    move(given)
    out, found = attend(windows, given)
    torch.testing.assert_close(found, guesses(given), rtol=1e-5, atol=1e-5)
    assert (found < maxima(edge_index, given) - 0.01).any()  # it is no maximum
    torch.testing.assert_close(out.double(), defined(edge_index, given), rtol=2e-3, atol=2e-3)


def defined(edge_index: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The output by the definition, in float64."""
    wanted = reference.gat_attention(
        edge_index, **{name: x.double() for name, x in given.items()}, negative_slope=SLOPE
    )
    assert isinstance(wanted, Tensor)
    return wanted


def far_above(given: dict[str, Tensor]) -> None:
    given["a_src"][90] = 20  # exp of it would be no number of float16


def far_below(given: dict[str, Tensor]) -> None:
    given["a_src"][100:] -= 60  # the last sources, where exp(-12) would have lost bits


def out_of_sight(given: dict[str, Tensor]) -> None:
    given["a_src"][100:] -= 300  # exp(-60) is 0 in half precision


def out_of_sight_early(given: dict[str, Tensor]) -> None:
    given["a_src"][FIRST : 2 * FIRST] -= 300  # and no other entry is a neighbour of EARLY


SPOILERS = [far_above, far_below, out_of_sight, out_of_sight_early]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_window_that_it_does_not_serve_has_its_maximum(spoil: Any, device: torch.device) -> None:
    edge_index = graph(device)
    early = (edge_index[0] >= FIRST) & (edge_index[0] < 2 * FIRST)
    edge_index = edge_index[:, early | (edge_index[1] != EARLY)]
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    spoil(given)
    out, found = attend(windows, given)
    again = torch.zeros(RECEIVERS, dtype=torch.bool, device=device)
    again[16:32] = True  # LATE, EARLY and ALONE lie there
    if spoil is far_above:
        again[:] = True
    torch.testing.assert_close(found[again], maxima(edge_index, given)[again], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[~again], guesses(given)[~again], rtol=1e-5, atol=1e-5)
    assert not out[ALONE].any()
    torch.testing.assert_close(out.double(), defined(edge_index, given), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        *((name, source, float("nan")) for name in ("a_src", "a_dst", "x") for source in (5, 90)),
        *((name, 5, float("inf")) for name in ("a_src", "a_dst", "x")),
        *((name, 90, -float("inf")) for name in ("a_src", "x")),
    ],
)
def test_nan_and_inf_reach_their_neighbours_alone(
    name: str, source: int, value: float, device: torch.device
) -> None:
    edge_index = graph(device)
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, RECEIVERS))
    given = draw(device, torch.float16)
    given[name][(3 if name == "a_dst" else source, 1)] = value
    out, _ = attend(windows, given)
    wanted = reference.gat_attention(edge_index, **given, negative_slope=SLOPE)
    assert isinstance(wanted, Tensor)
    assert (name == "a_src" and value == -float("inf")) or not wanted.isfinite().all()
    assert int((~wanted.isfinite()).sum()) < wanted.numel() // 2
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
