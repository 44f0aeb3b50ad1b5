"""Windows whose programs take several heads, gathered one or more at a time: any group is as good as one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.formats.walk import longer_slices
from graphfuse.kernels import launch
from graphfuse.testing import check
from tests.ops.test_running_maximum import RECEIVERS, SOURCES, graph
from tests.pairs import NIGHTLY

# heads a program takes, heads there are, features of each: groups that are whole or not, of pairs or not
GROUPS = [(4, 4, 16), (4, 3, 16), (4, 8, 7), (2, 3, 32), (8, 5, 8)]
KINDS = ["attention", "gat"]


def take(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention_window", "attention_bwd_window", "gat_window"):
        config = getattr(launch, name)

        def grouped(*arguments: Any, config: Any = config, **more: Any) -> launch.Config:
            return config(*arguments, **more)._replace(rows=group)

        monkeypatch.setattr(launch, name, grouped)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *sizes: False)
    monkeypatch.setattr(launch, "attention_prefers_rows", lambda *sizes: False)


def cases() -> Iterator[Any]:
    """All groups of all kinds as they are and, by day, with loops or dropout by turns."""
    options = {"plain": {}, "loops": {"self_loops": True}, "drop": {"dropout": 0.4}}
    for turn, (group, kind) in enumerate(itertools.product(GROUPS, KINDS)):
        for name in options if NIGHTLY else ("plain", ("loops", "drop")[turn % 2]):
            yield pytest.param(*group, kind, options[name], id="-".join(map(str, (*group, kind, name))))


def problem(
    kind: str,
    heads: int,
    dim: int,
    device: torch.device,
    receivers: int = RECEIVERS,
    edge_index: Tensor | None = None,
) -> tuple[Any, Any, dict[str, Tensor]]:
    """The op, its definition, and what both are given, for a graph whose windows have all sources."""
    edge_index = graph(device) if edge_index is None else edge_index
    windows = RowWindows.from_edge_index(edge_index, (SOURCES, receivers))
    generator = torch.Generator().manual_seed(heads)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (receivers, heads, dim),
        "k": (SOURCES, heads, dim),
        "v": (SOURCES, heads, dim),
    }
    ours, theirs = ops.sparse_attention, reference.sparse_attention
    if kind == "gat":
        shapes = {"a_src": (SOURCES, heads), "a_dst": (receivers, heads), "x": (SOURCES, heads, dim)}
        ours, theirs = ops.gat_attention, reference.gat_attention
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given = {name: x.to(device, torch.float16) for name, x in given.items()}
    return functools.partial(ours, windows=windows), functools.partial(theirs, edge_index), given


@pytest.mark.parametrize(("group", "heads", "dim", "kind", "options"), [*cases()])
def test_any_group(
    group: int,
    heads: int,
    dim: int,
    kind: str,
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(group, monkeypatch)
    if heads != 4:
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 72)  # and windows are cut
    if "dropout" in options:
        options = {**options, "seed": torch.tensor([3], device=device)}
    receivers = SOURCES if "self_loops" in options else RECEIVERS
    ours, theirs, given = problem(kind, heads, dim, device, receivers)
    given = {name: x.requires_grad_() for name, x in given.items()}
    check(lambda **given: ours(**given, **options), lambda **given: theirs(**given, **options), given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "heads", "dim"), [(4, 7, 32), (2, 3, 64), (2, 2, 32)])
def test_inference_of_any_group(
    group: int, heads: int, dim: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that are gathered one or two at a time, where nothing is kept for backward."""
    take(group, monkeypatch)
    ours, theirs, given = problem(kind, heads, dim, device)
    wanted = theirs(**{name: x.double() for name, x in given.items()}).to(torch.float16)
    torch.testing.assert_close(ours(**given), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "dim", "times"), [(4, 32, 2), (1, 128, 1.25)], ids=["twice_as_long", "a_quarter_longer"]
)
def test_slices_of_groups_and_of_wide_heads_are_longer(
    heads: int, dim: int, times: float, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *sizes: False)
    edges = torch.rand(SOURCES, 70, generator=torch.Generator().manual_seed(0)) < 0.3
    ours, theirs, given = problem(kind, heads, dim, device, 70, edges.nonzero().t().contiguous().to(device))
    given = {name: x.requires_grad_() for name, x in given.items()}
    check(ours, theirs, given)
    walks = ours.keywords["windows"].walks(False, False)
    for w in (walks.forward, walks.backward):
        longer = w.plans["longer_slices", times]
        assert longer_slices(w, times) is longer and 0 < longer.num_slots < w.num_slots


# by day each group with one kind, in turns
PAIRS = [(group, kind) for group in GROUPS for kind in KINDS]
TURNS = PAIRS if NIGHTLY else [(group, KINDS[place // 2 % 2]) for place, group in enumerate(GROUPS)]


@pytest.mark.parametrize(("group", "heads", "dim", "kind"), [(*group, kind) for group, kind in TURNS])
def test_nan_of_one_head_stays_there(
    group: int, heads: int, dim: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(group, monkeypatch)
    turn = GROUPS.index((group, heads, dim)) + KINDS.index(kind)
    if turn % 2:  # the others are of whole windows
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 72)
    ours, theirs, given = problem(kind, heads, dim, device)
    given[list(given)[turn % len(given)]][7, heads - 1] = float("nan")
    wanted = theirs(**given)
    assert 0 < int(wanted.isnan().sum()) < wanted.numel()
    assert not wanted[:, : heads - 1].isnan().any()
    torch.testing.assert_close(ours(**given), wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_the_first_maximum_does_not_serve(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four heads has a large score late: all heads of the program are done once more."""
    take(4, monkeypatch)
    ours, theirs, given = problem(kind, 4, 16, device)
    if kind == "attention":
        given["k"][90, 2] = given["q"][16, 2] * 10
    else:
        given["a_src"][90, 2] = 15
    given = {name: x.requires_grad_() for name, x in given.items()}
    check(ours, theirs, given)
