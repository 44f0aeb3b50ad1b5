"""Layers that are one Function: what they are composed of gives the same, and so do unusual ways to ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows
from graphfuse.kernels import copies, float32_rows
from graphfuse.nn import AGNNConv, GATConv, GATv2Conv, GCNConv, TransformerConv
from graphfuse.ops import agnn_layer, gat_layer, gatv2_layer, gcn_layer, transformer_layer
from tests.nn._layers import EDGES

LAYERS: dict[str, Any] = {
    "GCNConv": lambda: GCNConv(6, 4),
    "GCNConv, reversed, cached": lambda: GCNConv(6, 3, bias=False, cached=True, flow="target_to_source"),
    "GCNConv of sums": lambda: GCNConv(6, 6, normalize=False),
    "GATConv": lambda: GATConv(6, 4, heads=2),
    "GATConv of one head": lambda: GATConv(6, 5, concat=False, add_self_loops=False),
    "GATConv, reversed, with dropout": lambda: GATConv(6, 3, heads=3, dropout=0.5, flow="target_to_source"),
    "GATv2Conv": lambda: GATv2Conv(6, 4, heads=2),
    "GATv2Conv of shared weights": lambda: GATv2Conv(6, 3, heads=2, share_weights=True, add_self_loops=False),
    "GATv2Conv, reversed, with dropout": lambda: GATv2Conv(6, 7, dropout=0.5, flow="target_to_source"),
    "AGNNConv": lambda: AGNNConv(),
    "AGNNConv, reversed": lambda: AGNNConv(flow="target_to_source", add_self_loops=False),
    "AGNNConv without a parameter": lambda: AGNNConv(requires_grad=False),
    "TransformerConv": lambda: TransformerConv(6, 4, heads=2),
    "TransformerConv without bias": lambda: TransformerConv(6, 7, bias=False, concat=False),
    "TransformerConv, reversed, with dropout": lambda: TransformerConv(
        6, 3, heads=3, dropout=0.5, flow="target_to_source"
    ),
}
MODULES = (agnn_layer, gat_layer, gatv2_layer, gcn_layer, transformer_layer)


@pytest.fixture
def layer(name: str, device: torch.device) -> Any:
    layer = LAYERS[name]().to(device)
    for key, parameter in layer.named_parameters():
        if key.endswith(("bias", "beta")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(7, 6, device=device)


@pytest.fixture
def composed() -> Iterator[pytest.MonkeyPatch]:
    """What makes layers compose their ops, within the context that it gives."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def compose(patch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        patch.setattr(module, "runs_whole", lambda *_: False)


def named_nodes(out: Tensor) -> str:
    assert out.grad_fn is not None
    return out.grad_fn.name()


def run(layer: Any, x: Tensor, edges: Tensor = EDGES) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients, of weights that are dropped alike."""
    torch.manual_seed(3)
    out = layer(x, edges.to(x.device))
    given = [one for one in (x, *layer.parameters()) if one.requires_grad]
    return out, list(torch.autograd.grad(out.square().sum(), given))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("of_x", [True, False], ids=["gradient of x", "x is given"])
def test_the_numbers_are_those_of_the_parts(layer: Any, x: Tensor, of_x: bool, composed: Any) -> None:
    x.requires_grad_(of_x)
    if not (of_x or list(layer.parameters())):
        return
    found, found_grads = run(layer, x)
    assert named_nodes(found).endswith("LayerBackward")
    compose(composed)
    wanted, wanted_grads = run(layer, x)
    assert not named_nodes(wanted).endswith("LayerBackward")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # another kernel may take its product
    # some gradients are 0 but for the rounding of sums, which have another order, as that of the keys' bias
    largest = max(float(one.abs().max()) for one in wanted_grads)
    torch.testing.assert_close(found_grads, wanted_grads, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("Transformer")])
def test_so_are_those_of_a_larger_graph(
    layer: Any, x: Tensor, composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # backward of attention is three kernels there
    monkeypatch.setattr(float32_rows, "FEW_EDGES", -1)
    monkeypatch.setattr(float32_rows, "SHORT_ROWS", 0)
    test_the_numbers_are_those_of_the_parts(layer, x, True, composed)


SPARSE = [name for name in LAYERS if name.startswith(("GAT", "Transformer"))]


@pytest.fixture
def layout() -> torch.layout:
    return torch.sparse_csr


@pytest.fixture
def entries(layout: torch.layout, device: torch.device) -> Tensor:
    dense = torch.randn(7, 6, device=device)
    dense[torch.rand(7, 6, device=device) < 0.6] = 0.0
    dense[3], dense[:, 2] = 0.0, 0.0
    return dense.to_sparse(layout=layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, torch.sparse_csr) for name in SPARSE]
    + [("GATv2Conv", torch.sparse_coo), ("GATv2Conv", torch.sparse_csc)],
    ids=str,
)
def test_features_that_are_a_sparse_matrix(layer: Any, entries: Tensor, composed: Any) -> None:
    found, found_grads = run(layer, entries)
    assert named_nodes(found).endswith("LayerBackward")
    dense = run(layer, entries.to_dense())
    torch.testing.assert_close((found, found_grads), dense, rtol=1e-4, atol=2e-5)
    for parameter, grad in zip(layer.parameters(), found_grads, strict=True):
        assert grad is not None and grad.stride() == parameter.stride()
    compose(composed)
    wanted, wanted_grads = run(layer, entries)
    assert not named_nodes(wanted).endswith("LayerBackward")
    torch.testing.assert_close((found, found_grads), (wanted, wanted_grads), rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # one gradient of the batch at a time
@pytest.mark.parametrize("name", [name for name in SPARSE if "dropout" not in name])
def test_batched_gradients_where_features_are_sparse(layer: Any, entries: Tensor) -> None:
    given, out = list(layer.parameters()), layer(entries, EDGES.to(entries.device))
    batch = torch.randn(3, *out.shape, device=entries.device)
    found = torch.autograd.grad(out, given, batch, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(out, given, grad, retain_graph=True) for grad in batch]
    for ours, theirs in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in SPARSE if "dropout" not in name])
def test_some_parameters_are_frozen_where_features_are_sparse(layer: Any, entries: Tensor) -> None:
    wanted = run(layer, entries)[1]
    for place, parameter in enumerate(layer.parameters()):
        layer.requires_grad_(False)
        parameter.requires_grad_()
        torch.testing.assert_close(run(layer, entries)[1], [wanted[place]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("name", ["GATConv", "TransformerConv"])
def test_what_sparse_features_do_not_fit_is_said(layer: Any, entries: Tensor) -> None:
    with pytest.raises(RuntimeError):  # as PyTorch's product of them does
        layer(entries.to_dense()[:, :5].to_sparse_csr(), EDGES.to(entries.device))
    out = layer(entries, EDGES.to(entries.device))
    entries.values().mul_(2.0) if entries.layout is not torch.sparse_coo else entries._values().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", [name for name in LAYERS if "dropout" in name or "one head" in name])
def test_rows_that_are_copied_before_they_are_gathered(
    layer: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(layer, x, EDGES.roll(1, 1))
    monkeypatch.setattr(copies, "copy_pays", lambda *_: True)
    found = run(layer, x, EDGES.roll(2, 1))  # equal edges would find what was prepared
    atol = 1e-4 if x.is_cuda else 2e-5  # sums are in another order on a GPU
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=atol)


_JOINED = [name for name in LAYERS if name.startswith(("TransformerConv", "AGNNConv"))]
_JOINED += ["GATConv", "GATv2Conv"]


@pytest.mark.parametrize("name", _JOINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_hubs_whose_slices_are_joined(
    layer: Any, dtype: torch.dtype, device: torch.device, composed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    others = torch.arange(1, 100, device=device)
    spokes = torch.stack(
        [torch.cat([others, others[:40] * 0 + 1]), torch.cat([others * 0, others[:40] + 40])]
    )
    edges = torch.cat([spokes, spokes.flip(0)], 1)  # a hub and a lesser one, each way
    layer, x = layer.to(dtype), torch.randn(100, 6, device=device, dtype=dtype, requires_grad=True)
    walks = RowWindows.from_edge_index(edges, (100, 100)).walks(dtype is torch.float32, False)
    assert walks.forward.num_slots > 0 and walks.backward.num_slots > 0
    found, found_grads = run(layer, x, edges)
    assert named_nodes(found).endswith("LayerBackward")
    compose(composed)
    wanted, wanted_grads = run(layer, x, edges)
    bound = 1e-5 if dtype is torch.float32 else 4e-3  # a bias is added before or after the result is rounded
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    bound = 5e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found_grads, wanted_grads, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", LAYERS)
def test_other_layouts_do_not_find_what_was_prepared(layer: Any, x: Tensor, composed: Any) -> None:
    edges, wide = EDGES.to(x.device), torch.randn(7, 15, device=x.device)
    given = [wide[:, :6].requires_grad_(), wide.t()[:7, :6].detach().requires_grad_(), x.requires_grad_()]

    def results() -> list[Any]:
        found = []
        for one in given:  # rows that are strided, columns, neither; gradients likewise, and of one number
            torch.manual_seed(3)
            out = layer(one, edges)
            others = [
                torch.ones_like(out),
                torch.randn(out.shape[::-1]).to(out).t(),
                out.new_ones(1, 1).expand_as(out),
            ]
            found += [torch.autograd.grad(out, one, other, retain_graph=True) for other in others]
        return found

    found = results()
    compose(composed)
    torch.testing.assert_close(found, results(), rtol=1e-5, atol=1e-6)


def test_attentions_of_one_shape_do_not_find_each_others_launches(
    device: torch.device, composed: Any
) -> None:
    edges, x = EDGES.to(device), torch.randn(7, 4, device=device)[:, :1].requires_grad_()
    transformer, agnn = TransformerConv(1, 1).to(device), AGNNConv(add_self_loops=False).to(device)
    found = [run(layer, x, edges) for layer in (transformer, agnn, transformer)]
    compose(composed)
    wanted = [run(layer, x, edges) for layer in (transformer, agnn, transformer)]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_parameters_get_no_gradient(layer: Any, x: Tensor, composed: Any) -> None:
    x.requires_grad_()
    wanted = run(layer, x)[1]
    names = ["x", *[key for key, one in layer.named_parameters() if one.requires_grad]]
    for place, (key, parameter) in enumerate(layer.named_parameters(), start=1):
        layer.requires_grad_(False)
        parameter.requires_grad_()
        found = run(layer, x)[1]
        torch.testing.assert_close(found, [wanted[0], wanted[place]], rtol=1e-5, atol=1e-6, msg=names[place])
        assert key == names[place]
    layer.requires_grad_(False)
    torch.testing.assert_close(run(layer, x)[1], wanted[:1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # one gradient of the batch at a time
@pytest.mark.parametrize("name", [name for name in LAYERS if "dropout" not in name])
def test_batched_gradients(layer: Any, x: Tensor) -> None:
    edges = EDGES.to(x.device)
    given = [x.requires_grad_(), *layer.parameters()]
    out = layer(x, edges)
    batch = torch.randn(3, *out.shape, device=x.device)
    found = torch.autograd.grad(out, given, batch, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(out, given, grad, retain_graph=True) for grad in batch]
    for ours, theirs in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "AGNNConv", "TransformerConv"])
def test_a_second_derivative_is_refused(layer: Any, x: Tensor) -> None:
    out = layer(x.requires_grad_(), EDGES.to(x.device))
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("name", [name for name in LAYERS if "GCN" in name])
def test_a_second_derivative_is_that_of_the_parts(layer: Any, x: Tensor, composed: Any) -> None:
    given = [x.requires_grad_(), *layer.parameters()]

    def second() -> Sequence[Tensor]:
        out = layer(x, EDGES.to(x.device))
        first = torch.autograd.grad(out.pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), given)

    found = second()
    compose(composed)
    torch.testing.assert_close(found, second(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "TransformerConv"])
def test_the_result_may_be_changed_in_place(
    layer: Any, x: Tensor, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "copy_pays", lambda *_: padded)
    edges = EDGES.roll(3, 1).to(x.device)  # others would find what was prepared for them
    if padded:  # to 16 bytes
        layer, x = layer.half(), x.half()
    x.requires_grad_()
    wanted = torch.autograd.grad(layer(x, edges).relu().sum(), x)
    found = torch.autograd.grad(layer(x, edges).relu_().sum(), x)
    assert torch.equal(*found, *wanted)


@pytest.mark.parametrize("name", ["AGNNConv", "TransformerConv"])
def test_a_nan_reaches_its_neighbours_alone(layer: Any, x: Tensor, walked: str, composed: Any) -> None:
    layer, x = layer.half(), x.half()
    x[2] = float("nan")
    found = layer(x.requires_grad_(), EDGES.to(x.device))
    assert named_nodes(found).endswith("LayerBackward")
    compose(composed)
    wanted = layer(x, EDGES.to(x.device))
    assert 0 < int(wanted.isnan().any(1).sum()) < 7
    torch.testing.assert_close(found, wanted, equal_nan=True)
