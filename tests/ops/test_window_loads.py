"""Windows of attention with the launch rows of large graphs: small ones have few tasks, and short ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from graphfuse.kernels import launch
from graphfuse.testing import check
from tests.ops.test_head_groups import KINDS, problem
from tests.ops.test_row_loads import take
from tests.ops.test_running_maximum import SOURCES
from tests.pairs import NIGHTLY

SHAPES = [(8, 16), (4, 32), (1, 64), (2, 128), (8, 8), (1, 41), (2, 100), (1, 256), (4, 25)]
LOADS = [load for load in launch.Load if load is not launch.Load.FEWEST]
EACH = [*itertools.product(KINDS, LOADS)]
# by day each load and kind with the first shape, whose groups differ most, and two of the others in turns, so
# that each kind has each of them
OTHERS = len(SHAPES) - 1
TURNS = [
    (*one, SHAPES[at])
    for place, one in enumerate(EACH)
    for at in (0, 1 + place % OTHERS, 1 + (place + OTHERS // 2) % OTHERS)
]
if NIGHTLY:
    TURNS = [(*one, shape) for one in EACH for shape in SHAPES]


@pytest.mark.parametrize("options", [{}, {"self_loops": True, "dropout": 0.4}], ids=["plain", "trained"])
@pytest.mark.parametrize(("kind", "load", "shape"), TURNS, ids=str)
def test_every_launch_row(
    kind: str,
    load: launch.Load,
    shape: tuple[int, int],
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = take("load", load, monkeypatch)
    monkeypatch.setattr(launch, "gat_prefers_rows", lambda *sizes: False)
    if options:
        options = {**options, "seed": torch.tensor([3], device=device)}
    ours, theirs, given = problem(kind, *shape, device, SOURCES)
    given = {name: x.requires_grad_() for name, x in given.items()}
    check(lambda **given: ours(**given, **options), lambda **given: theirs(**given, **options), given)
    assert asked


def test_rows_of_loads_differ() -> None:
    """Or the test above would run one kernel several times."""
    tables = (
        lambda load: launch.attention_window(8, 16, 2, False, False, load),
        lambda load: launch.attention_bwd_window(8, 16, False, False, load),
        lambda load: launch.gat_window(8, 16, False, True, False, load),
    )
    for row in tables:
        assert len({row(load) for load in LOADS}) >= 2
