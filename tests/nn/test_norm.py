"""A residual and its norm in one launch: numbers, and when it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from graphfuse import reference, testing
from graphfuse.kernels.device import HALF
from graphfuse.nn import GraphTransformerLayer
from graphfuse.nn._norm import mapped_relu, residual_norm
from graphfuse.ops import residual_norm as module
from graphfuse.testing import GRAPHS

DTYPES = (torch.float32, *HALF)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each launch had."""
    pytest.importorskip("triton")
    rows: list[int] = []
    kernel = module._launcher()

    def noted(x: Tensor, *others: Any) -> Tensor:
        rows.append(x.size(0))
        found: Tensor = kernel(x, *others)
        return found

    monkeypatch.setattr(module, "_launcher", lambda: noted)
    return rows


def make(kind: str, dim: int, device: torch.device) -> torch.nn.Module:
    """A norm in inference, none of its numbers at its start."""
    norm: torch.nn.Module = {"batch": torch.nn.BatchNorm1d, "layer": torch.nn.LayerNorm}[kind](dim)
    for value in norm.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5)
    return norm.to(device).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 33, 128, 602, 4096])
@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_numbers(kind: str, dim: int, dtype: torch.dtype, device: torch.device, launched: list[int]) -> None:
    norm = make(kind, dim, device)
    x = torch.randn(37, dim + 3, device=device).to(dtype)[:, 2:-1]  # strided rows
    y = torch.randn(dim, 37, device=device).to(dtype).t()
    with torch.no_grad():
        exact = copy.deepcopy(norm).double()(x.double() + y.double())
        narrow = norm.to(dtype)
        rounded, found = narrow(x + y), residual_norm(x, y, narrow)
    assert launched == [37] and found.dtype == dtype
    testing.assert_close("out", found, rounded, exact)


@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_without_variance(kind: str, device: torch.device, launched: list[int]) -> None:
    norm, x = make(kind, 6, device), torch.ones(3, 6, device=device)
    if kind == "batch":
        norm.running_var.zero_()
    with torch.no_grad():
        # the last bit of a mean, times 1 / sqrt(eps)
        torch.testing.assert_close(residual_norm(x, x, norm), norm(x + x), rtol=0, atol=2**-22 * 317)
    assert launched == [3]


@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_nan_and_inf_stay_in_their_places(kind: str, device: torch.device, launched: list[int]) -> None:
    norm, x = make(kind, 5, device), torch.randn(9, 5, device=device)
    x[3, 1], x[4, 0] = float("nan"), float("inf")
    with torch.no_grad():
        found, wanted = residual_norm(x, x, norm), norm(x + x)
    assert launched == [9]
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())


def _hooked(norm: torch.nn.Module) -> torch.nn.Module:
    norm.register_forward_hook(lambda *given: None)
    return norm


def _replaced(norm: torch.nn.Module) -> torch.nn.Module:
    class Other(type(norm)):  # type: ignore[misc]
        pass

    norm.__class__ = Other
    return norm


def _pruned(norm: torch.nn.Module) -> torch.nn.Module:
    prune.random_unstructured(norm, "weight", 2)
    return prune.random_unstructured(norm, "bias", 2)


def _replicated(norm: torch.nn.Module) -> torch.nn.Module:
    # as DataParallel does: parameters become attributes
    replica = norm._replicate_for_data_parallel()
    for name, value in norm.named_parameters():
        setattr(replica, name, value.detach())
    return replica


def _patched(norm: torch.nn.Module) -> torch.nn.Module:
    norm.forward = torch.neg
    return norm


OTHERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "hooked": _hooked,
    "of another class": _replaced,
    "with a forward of its own": _patched,
    "pruned": _pruned,
    "a replica of DataParallel": _replicated,
    "in training": lambda norm: norm.train(),
    "without statistics": lambda norm: torch.nn.BatchNorm1d(6, track_running_stats=False).to(
        norm.weight.device
    ),
    "without weights": lambda norm: torch.nn.LayerNorm(6, elementwise_affine=False),
    "another module": lambda norm: torch.nn.Identity(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_norm_that_does_more_is_called(other: str, device: torch.device, launched: list[int]) -> None:
    norm, x = OTHERS[other](make("batch", 6, device)), torch.randn(4, 6, device=device)
    with torch.no_grad():
        found = residual_norm(x, x, norm)
        assert torch.equal(found, norm(x + x)) or other == "in training"
    assert launched == []


def test_what_is_differentiated_traced_or_converted_is_pytorchs(
    device: torch.device, launched: list[int]
) -> None:
    norm, x = make("layer", 6, device), torch.randn(4, 6, device=device)
    assert residual_norm(x, x, norm).requires_grad
    with torch.no_grad():
        assert residual_norm(x.double(), x.double(), copy.deepcopy(norm).double()).dtype == torch.float64
        assert residual_norm(x, x.bfloat16(), norm).dtype == torch.float32
        assert residual_norm(x[:0], x[:0], norm).shape == (0, 6)
        torch.func.vmap(lambda one: residual_norm(one, one, norm))(x[None])
        assert launched == []
        residual_norm(x, x, norm)
        assert launched == [4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_inference_of_a_layer(
    norm: str, dtype: torch.dtype, device: torch.device, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index, (num_nodes, _) = GRAPHS["hub"](device)
    ours, theirs = (
        layer(24, 3, norm=norm).to(device).eval()
        for layer in (GraphTransformerLayer, reference.GraphTransformerLayer)
    )
    for one in (theirs.norm_1, theirs.norm_2):
        one.load_state_dict(make(norm, 24, device).state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(num_nodes, 24, device=device).to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(x.double(), edge_index)
        found = ours.to(dtype)(x, edge_index)
        testing.assert_close("out", found, theirs.to(dtype)(x, edge_index), exact)
        assert launched == [num_nodes] * 2
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
        ours(x, edge_index)
        assert launched == [num_nodes] * 2
    monkeypatch.delenv("GRAPHFUSE_DISABLE")
    ours(x, edge_index)
    assert launched == [num_nodes] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_and_its_relu(dtype: torch.dtype, device: torch.device) -> None:
    lin = reference.GraphTransformerLayer(24, 1).lin_1.to(device, dtype)
    x = torch.randn(50, 24, device=device).to(dtype)
    learnt = mapped_relu(x, lin)
    assert learnt.requires_grad
    with torch.no_grad():
        exact = copy.deepcopy(lin).double()(x.double()).relu()
        testing.assert_close("out", mapped_relu(x, lin), lin(x).relu(), exact)
        assert mapped_relu(x[:0], lin).shape == (0, 48)
        with torch.autocast(device.type, torch.bfloat16):
            assert mapped_relu(x, lin).dtype == torch.bfloat16
        before = mapped_relu(x, lin)
        lin.register_forward_hook(lambda module, given, out: -out)
        assert torch.equal(mapped_relu(x, lin), lin(x).relu()) and not torch.equal(before, lin(x).relu())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_large_layers(norm: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    numbers, x = make(norm, 256, device).to(dtype), torch.randn(100_003, 256, device=device).to(dtype)
    lin = reference.GraphTransformerLayer(256, 1).lin_1.to(device, dtype)
    with torch.no_grad():
        exact = copy.deepcopy(numbers).double()(2 * x.double())
        testing.assert_close("out", residual_norm(x, x, numbers), numbers(x + x), exact)
        exact = copy.deepcopy(lin).double()(x.double()).relu()
        testing.assert_close("hidden", mapped_relu(x, lin), lin(x).relu(), exact)
        assert mapped_relu(x[:0], lin).shape == (0, 512)
