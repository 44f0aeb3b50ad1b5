"""GAT's terms of scores in float32 beside rows of half precision, where windows guess at the maxima."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels.device import HALF
from graphfuse.testing import GRAPHS, check


@pytest.fixture(params=["small", pytest.param("large", marks=pytest.mark.gpu)])
def edges(request: pytest.FixtureRequest, device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    if request.param == "small":
        return GRAPHS["hub"](device)
    return torch.randint(3000, (2, 200_000), device=device), (3000, 3000)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["half", "float32"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (1, 64)])
def test_both_dtypes(
    heads: int,
    dim: int,
    wide: bool,
    dtype: torch.dtype,
    edges: tuple[Tensor, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graphfuse.kernels.launch.gat_prefers_rows", lambda *_: False)
    edge_index, size = edges
    windows = RowWindows.from_edge_index(edge_index, size)
    given = {"a_src": (size[1], heads), "a_dst": (size[0], heads), "x": (size[1], heads, dim)}
    values = {name: torch.randn(shape, device=edge_index.device).to(dtype) for name, shape in given.items()}
    if wide:  # numbers that half precision has, so that no score is rounded to the other side of 0
        values |= {name: values[name].float() for name in ("a_src", "a_dst")}

    def by_definition(**given: Tensor) -> Tensor:
        if given["x"].dtype == torch.float64:
            return reference.gat_attention(edge_index, **given)
        in_half = {name: value.to(dtype) for name, value in given.items()}
        return reference.gat_attention(edge_index, **in_half).to(given["a_src"].dtype)

    check(
        lambda **given: ops.gat_attention(**given, windows=windows),
        by_definition,
        {name: value.requires_grad_() for name, value in values.items()},
    )
