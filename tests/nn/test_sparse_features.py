"""Features that are a torch.sparse matrix: an aggregation projects them, and layers fuse from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import graphfuse.nn as ours
from graphfuse import RowWindows, clear_cache, warmup, why_not
from graphfuse.formats.cache import matrix_windows
from graphfuse.nn._dispatch import path_taken
from graphfuse.nn._sparse_features import affine_of_sparse
from graphfuse.testing import GRAPHS, assert_close
from graphfuse.train import loop

LAYERS: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "GATConv": {"heads": 2, "residual": True},
    "GATv2Conv": {"heads": 2, "share_weights": True},
    "TransformerConv": {"heads": 2, "beta": True},
}
LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_features_fuse(name: str, layout: str, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    generator = torch.Generator(device).manual_seed(3)
    dense = torch.rand(num_nodes, 12, device=device, generator=generator)
    dense *= torch.rand(dense.shape, device=device, generator=generator) < 0.2
    x = dense.to_sparse(layout=LAYOUTS[layout])
    theirs = getattr(pyg, name)(12, 4, **LAYERS[name]).to(device)
    layer = getattr(ours, name)(12, 4, **LAYERS[name]).to(device)
    layer.load_state_dict(theirs.state_dict())
    assert why_not(layer, x, edge_index) == []
    found, wanted = layer(x, edge_index), theirs(dense, edge_index)
    assert path_taken(layer) == []
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (found**2).sum().backward()
    (wanted**2).sum().backward()
    for (key, mine), other in zip(layer.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_one_side_of_two_may_be_sparse(device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    x_src, x_dst = torch.rand(num_src, 12, device=device), torch.rand(num_dst, 5, device=device)
    theirs = pyg.TransformerConv((12, 5), 4, heads=2).to(device)
    layer = ours.TransformerConv((12, 5), 4, heads=2).to(device)
    layer.load_state_dict(theirs.state_dict())
    for pair in ((x_src.to_sparse(), x_dst), (x_src, x_dst.to_sparse_csr())):
        found = layer(pair, edge_index)
        assert path_taken(layer) == []
        torch.testing.assert_close(found, theirs((x_src, x_dst), edge_index), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_gcn_with_weights_and_a_cache(weighted: bool, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    weight = torch.rand(edge_index.size(1), device=device) if weighted else None
    dense = torch.eye(num_nodes, device=device)  # as where nodes have no features
    layer = ours.GCNConv(num_nodes, 3, cached=True).to(device)
    theirs = pyg.GCNConv(num_nodes, 3).to(device)
    layer.load_state_dict(theirs.state_dict())
    for _ in range(2):
        found = layer(dense.to_sparse_csr(), edge_index, weight)
        assert path_taken(layer) == []
        torch.testing.assert_close(found, theirs(dense, edge_index, weight), rtol=1e-4, atol=1e-5)


def test_a_layer_without_a_projection_says_why_not(device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    x = torch.eye(num_nodes, device=device).to_sparse()
    assert why_not(ours.AGNNConv(), x, edge_index) == ["the features are not a dense tensor"]


def matrix(num_rows: int, num_cols: int, layout: str, device: torch.device) -> torch.Tensor:
    """A sparse matrix with an empty row, a full one, an empty column and a number that is stored though 0."""
    generator = torch.Generator(device).manual_seed(5)
    dense = torch.randn(num_rows, num_cols, device=device, generator=generator)
    dense *= torch.rand(dense.shape, device=device, generator=generator) < 0.2
    dense[0], dense[1], dense[:, 0] = 0.0, 1.0, 0.0
    x = dense.to_sparse(layout=LAYOUTS[layout])
    (x._values() if layout == "coo" else x.values())[3] = 0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dim", [1, 7, 33])
def test_the_map_and_its_gradients(
    out_dim: int, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = matrix(37, 21, layout, device)
    x = x if dtype is torch.float32 else x.to(dtype)
    weight = torch.randn(out_dim, 21, device=device).to(dtype).requires_grad_()
    bias = torch.randn(out_dim, device=device).to(dtype).requires_grad_()
    grad = torch.randn(37, out_dim, device=device).to(dtype)

    def run(x: torch.Tensor, dtype: torch.dtype | None, call: Any) -> list[torch.Tensor]:
        operands = [one.detach().to(dtype or one.dtype).requires_grad_() for one in (weight, bias)]
        out = call(x if dtype is None else x.to(dtype), *operands)
        return [out, *torch.autograd.grad(out, operands, grad.to(out.dtype))]

    actual = run(x, None, affine_of_sparse)
    rounded, exact = run(x.to_dense(), None, F.linear), run(x.to_dense(), torch.float64, F.linear)
    for name, *three in zip(("out", "d_weight", "d_bias"), actual, rounded, exact, strict=True):
        assert three[0].dtype is dtype
        assert_close(name, *three)


def test_numbers_at_one_place_add_up(device: torch.device) -> None:
    at = torch.tensor([[0, 0, 2], [1, 1, 0]], device=device)
    x = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0, 4.0], device=device), (3, 2))
    weight = torch.tensor([[8.0, 16.0]], device=device)
    assert not x.is_coalesced()
    assert affine_of_sparse(x, weight, None).tolist() == [[48.0], [0.0], [32.0]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (3, 0)], ids=str)
def test_no_numbers(shape: tuple[int, int], device: torch.device) -> None:
    x = torch.zeros(shape, device=device).to_sparse()
    weight, bias = torch.ones(2, shape[1], device=device, requires_grad=True), torch.ones(2, device=device)
    out = affine_of_sparse(x, weight, bias)
    torch.testing.assert_close(out, torch.ones(shape[0], 2, device=device))
    assert torch.autograd.grad(out.sum(), weight)[0].count_nonzero() == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_found_again_until_they_are_stale(layout: str, device: torch.device) -> None:
    x = matrix(20, 9, layout, device)
    found = matrix_windows(x)
    assert isinstance(found, RowWindows)
    assert found.shape == (20, 9)
    assert matrix_windows(x) is found
    (x._values() if layout == "coo" else x.values()).mul_(2)  # no part of the record
    assert matrix_windows(x) is found
    weight = torch.eye(9, device=device)
    torch.testing.assert_close(affine_of_sparse(x, weight, None), x.to_dense())
    if layout == "coo":
        x._indices()[1] -= 1  # the first column is empty, as is the first row
    else:
        (x.col_indices() if layout == "csr" else x.row_indices()).sub_(1)
    assert matrix_windows(x) is not found
    torch.testing.assert_close(affine_of_sparse(x, weight, None), x.to_dense())
    found = matrix_windows(x)
    clear_cache()
    assert matrix_windows(x) is not found


def test_warmup_builds_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    data = Data(x=matrix(num_nodes, 12, "csr", device), edge_index=edge_index)
    layer = warmup(ours.GATConv(12, 4).to(device), data)

    def build(*_: Any) -> None:
        raise AssertionError("windows are built again")

    monkeypatch.setattr(RowWindows, "from_edge_index", build)
    layer(data.x, data.edge_index).sum().backward()
    with pytest.raises(AssertionError, match="again"):
        layer(data.x.clone(), data.edge_index)


def test_features_of_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        x = matrix(20, 9, "csr", device)
        dense = x.to_dense()
        assert affine_of_sparse(x, torch.eye(9, device=device), None).equal(dense)
    weight = torch.eye(9, device=device, requires_grad=True)
    affine_of_sparse(x, weight, None).sum().backward()
    torch.testing.assert_close(weight.grad, dense.sum(0).expand(9, 9))


def test_a_gradient_of_the_features_is_pytorchs(device: torch.device) -> None:
    x = matrix(20, 9, "coo", device).coalesce().requires_grad_()
    weight = torch.randn(4, 9, device=device)
    affine_of_sparse(x, weight, None).sum().backward()
    torch.testing.assert_close(x.grad.to_dense(), weight.sum(0).expand(20, 9), rtol=1e-4, atol=1e-4)


def test_autocast(device: torch.device) -> None:
    x = matrix(20, 9, "csr", device)
    weight = torch.randn(4, 9, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = affine_of_sparse(x, weight, weight.detach()[:, 0])
        wanted = F.linear(x.to_dense(), weight, weight.detach()[:, 0])
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    found.sum().backward()
    assert weight.grad.dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LAYERS, "Linear"])
def test_captured(name: str, device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    x = matrix(num_nodes, 12, "csr", device)
    layer = getattr(ours, name)(12, 4, **LAYERS.get(name, {})).to(device)

    def step() -> list[torch.Tensor]:
        out = layer(x) if name == "Linear" else layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad((out**2).sum(), list(layer.parameters()))]

    wanted = step()
    for mine, other in zip(loop.captured(step)(), wanted, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_layer_of_them(
    layout: str, bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = matrix(20, 9, layout, device)
    # both draw their weights, on the device, when they first see features
    theirs, layer = (kind.Linear(-1, 4, bias=bias).to(device) for kind in (pyg, ours))
    torch.manual_seed(2)
    wanted = theirs(x.to_dense())
    torch.manual_seed(2)
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", None)  # PyTorch's product is not asked
        found = layer(x)
        patch.setenv("GRAPHFUSE_DISABLE", "1")
        with pytest.raises(TypeError, match="not callable"):
            layer(x)
    assert layer.in_channels == 9
    torch.testing.assert_close(found, wanted)
    for mine, other in zip(layer.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        gradients = [
            torch.autograd.grad((out**2).sum(), to, retain_graph=True)[0]
            for out, to in ((found, mine), (wanted, other))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    layer.load_state_dict(torch.nn.Linear(9, 4, bias=bias).state_dict(), strict=True)


def test_a_dense_layer_of_dense_features_is_pygs(device: torch.device) -> None:
    layer, x = ours.Linear(9, 4).to(device), torch.randn(2, 5, 9, device=device)
    wanted = F.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), wanted)
    assert torch.equal(torch.jit.script(layer)(x), wanted)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted)
    assert repr(layer) == "Linear(9, 4, bias=True)"


def test_a_network_of_agnn_from_sparse_features(device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    x = matrix(num_nodes, 12, "csr", device)

    def network(package: Any) -> torch.nn.Module:
        net = pyg.Sequential("x, edges", [
            (package.Linear(12, 16), "x -> x"), torch.nn.ReLU(),
            (package.AGNNConv(), "x, edges -> x"), (package.Linear(16, 3), "x -> x"),
        ])  # fmt: skip
        return net.to(device)

    mine, theirs = network(ours), network(pyg)
    mine.load_state_dict(theirs.state_dict())
    found, wanted = mine(x, edge_index), theirs(x.to_dense(), edge_index)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for out in (found, wanted):
        (out**2).sum().backward()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
