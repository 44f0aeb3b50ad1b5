"""GATv2Conv against PyG's: parameters, numbers, every gradient, options, and every way round the kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

from graphfuse import RowWindows
from graphfuse.nn import GATv2Conv
from graphfuse.nn._dispatch import path_taken
from graphfuse.nn.gat_conv import summed_at_receivers
from graphfuse.ops import _aggregate
from graphfuse.testing import GRAPHS
from tests.nn import _gat
from tests.nn._gat import MISFIT, NOT_DENSE, PLAIN, SUBSET, TWO_SETS, falls_back, name_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"heads": 3, "concat": False, "residual": True, "negative_slope": 0.0, "share_weights": True},
    {"heads": 2, "bias": False, "add_self_loops": False},
    {
        "heads": 2,
        "edge_dim": 3,
        "dropout": 0.5,
        "residual": True,
        "flow": "target_to_source",
        "fill_value": "add",
    },
]
NO_EDGE_DIM = "edge_attr is given to a layer without edge_dim, which refuses it"

make = functools.partial(_gat.make, GATv2Conv)


def test_signatures() -> None:
    _gat.same_signatures(GATv2Conv)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("channels", [5, (5, 7)], ids=str)
def test_same_seed_same_weights_same_repr(channels: Any, options: dict[str, Any]) -> None:
    _gat.same_weights(GATv2Conv, channels, options)
    layer = GATv2Conv(channels, 4, **options)
    assert (layer.lin_r is layer.lin_l) == bool(options.get("share_weights"))
    assert layer.aggr == "sum"  # in GATConv "add"


@pytest.mark.parametrize(("graph", "sizes", "dtype", "options"), SUBSET, ids=name_of)
def test_output_and_gradients_match_pygs(
    graph: str, sizes: tuple[int, int], dtype: torch.dtype, options: Any, device: torch.device
) -> None:
    _gat.compare_with_pyg(GATv2Conv, graph, sizes, dtype, options, device)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], {"residual": True}], ids=str)
@pytest.mark.parametrize("channels", [-1, (-1, -1)], ids=str)
def test_lazy_channels(channels: Any, options: dict[str, Any], device: torch.device) -> None:
    _gat.lazy_channels(GATv2Conv, channels, options, device)


def test_lazy_edge_dim_fuses_from_the_second_call(device: torch.device) -> None:
    edge_index = _gat.few_edges(device)
    x, edge_attr = torch.randn(7, 4, device=device), torch.randn(edge_index.size(1), 3, device=device)
    layer = GATv2Conv(-1, 4, edge_dim=-1).to(device)
    wanted = layer(x, edge_index, edge_attr)
    assert path_taken(layer) == [PLAIN]
    torch.testing.assert_close(layer(x, edge_index, edge_attr), wanted)
    assert path_taken(layer) == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("weights", [None, False, True])
def test_pygs_path_is_pygs_to_the_bit(
    options: dict[str, Any], two: bool, weights: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index = _gat.few_edges(torch.device("cpu"))
    own = 4 if options.get("share_weights") else 5
    layers = make((4, own) if two else 4, 6, **options)
    num_src = 7 if "flow" in options else 9  # backwards, PyG takes one number for both
    x: Any = (torch.randn(num_src, 4), torch.randn(7, own)) if two else torch.randn(7, 4)
    edge_attr = torch.randn(edge_index.size(1), 3) if "edge_dim" in options else None
    _gat.to_the_bit(layers, (x, edge_index, edge_attr), weights)


def test_reasons(device: torch.device) -> None:
    edge_index = _gat.few_edges(device)
    x, edge_attr = torch.randn(7, 4, device=device), torch.randn(edge_index.size(1), 3, device=device)
    plain, featured = make(4, 5, device=device), make(4, 5, device=device, edge_dim=3)
    falls_back(plain, (x, edge_index))
    falls_back(plain, ([x, x], edge_index))
    falls_back(plain, ((x, x, x), edge_index))  # as in PyG, the third is ignored
    falls_back(plain, (x, edge_index, None, False))
    falls_back(plain, (x, edge_index, None, True))
    falls_back(featured, (x, edge_index))  # the edges then bring nothing
    falls_back(featured, (x, edge_index, edge_attr))
    falls_back(featured, (x, edge_index, edge_attr[:, None]), MISFIT)  # PyG's view lets it pass
    mean = make(4, 5, device=device, aggr="mean")
    falls_back(mean, (x, edge_index), "the aggregation is 'mean'; the kernels sum")
    wide = "out_channels is 257; the kernels take heads of at most 256"
    falls_back(make(4, 257, device=device), (x, edge_index), wide)
    no_rate = "dropout is 1.0; the kernels take rates from 0 to below 1"
    falls_back(make(4, 5, device=device, dropout=1.0), (x, edge_index), no_rate)
    promoted = make(4, 5, device=device)
    for layer in promoted:
        layer.att.data = layer.att.data.double()
    other_dtype = "the attention vectors are torch.float64 and the features are torch.float32"
    falls_back(promoted, (x, edge_index), other_dtype)
    for fill_value in ("min", "max", "mul"):
        reason = f"fill_value is '{fill_value}'; fused self-loops take a sum, a mean or a constant"
        layers = make(4, 5, device=device, edge_dim=3, fill_value=fill_value)
        falls_back(layers, (x, edge_index, edge_attr), reason)
        falls_back(layers, (x, edge_index))  # nothing to fill in
        layers[0].add_self_loops = layers[1].add_self_loops = False
        falls_back(layers, (x, edge_index, edge_attr))
    hooked = make(4, 5, device=device, edge_dim=3)
    for layer in hooked:
        layer.lin_edge.register_forward_hook(lambda module, args, out: 2 * out)
    falls_back(hooked, (x, edge_index, edge_attr), PLAIN)


def test_errors_are_pygs(device: torch.device) -> None:
    edge_index, _ = GRAPHS["self_loops"](device)
    x = torch.randn(37, 4, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    plain, featured = make(4, 5, device=device), make(4, 5, device=device, edge_dim=3)
    for wrong in (edge_attr[1:], edge_attr[:, :2], edge_attr.double(), edge_attr[:, 0]):
        _gat.fails_alike(featured, (x, edge_index, wrong), MISFIT)
    _gat.fails_alike(plain, (x, edge_index, edge_attr), NO_EDGE_DIM)
    _gat.fails_alike(plain, ((x, None), edge_index), NOT_DENSE)
    _gat.fails_alike(plain, (x[None], edge_index), "the features have 3 dimensions; the kernels take 2")
    _gat.fails_alike(plain, ((x,), edge_index))
    _gat.fails_alike(plain, (x.half(), edge_index))
    reason = "fill_value is 'most'; fused self-loops take a sum, a mean or a constant"
    _gat.fails_alike(
        make(4, 5, device=device, edge_dim=3, fill_value="most"), (x, edge_index, edge_attr), reason
    )
    _gat.fails_alike(
        make(4, 5, device=device, edge_dim=3, fill_value=torch.ones(2)), (x, edge_index, edge_attr)
    )


@pytest.mark.parametrize("share_weights", [False, True])
def test_pairs(share_weights: bool, device: torch.device) -> None:
    """Backwards, PyG's own propagate takes the first of a pair for the neighbours."""
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    x, y = torch.randn(num_src, 4, device=device), torch.randn(num_dst, 4, device=device)
    layers = make(4, 5, device=device, heads=2, share_weights=share_weights, residual=True)
    falls_back(layers, ((x, y), edge_index))
    falls_back(layers, ([x, y], edge_index))
    falls_back(layers, ((x, x), edge_index))
    options = {"flow": "target_to_source", "add_self_loops": False, "share_weights": share_weights}
    layers = make((4, 4), 5, device=device, **options)
    falls_back(layers, ((x, y), edge_index.clamp(max=num_dst - 1)), TWO_SETS)
    falls_back(layers, ((x, 2 * x), edge_index))
    falls_back(layers, (x, edge_index))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_one_number_per_edge(flow: str, device: torch.device) -> None:
    """Of either flow, loops get the mean or sum over the edges whose second end they are."""
    edge_index = _gat.few_edges(device)
    x = torch.randn(7, 4, device=device)
    fills: list[Any] = ["mean", "sum", 2, True, None, torch.tensor(0.5), torch.tensor([0.5]), torch.randn(7)]
    for fill_value in fills:
        layers = make(4, 5, device=device, heads=2, edge_dim=1, fill_value=fill_value, flow=flow)
        results = []
        for layer in layers:
            edge_attr = torch.linspace(-2, 2, edge_index.size(1), device=device).requires_grad_()
            out = layer(x, edge_index, edge_attr)
            results.append([out, torch.autograd.grad(out.square().sum(), edge_attr)[0]])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert path_taken(layers[0]) == []


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (7, 1), (7, 3)], ids=str)
def test_tensors_to_fill_in(shape: tuple[int, ...], device: torch.device) -> None:
    edge_index = _gat.few_edges(device)
    x, edge_attr = torch.randn(7, 4, device=device), torch.randn(edge_index.size(1), 3, device=device)
    filled = torch.randn(shape, dtype=torch.float64).requires_grad_()  # of another dtype, and on the CPU
    layers = make(4, 5, device=device, heads=2, edge_dim=3, fill_value=filled)
    results = []
    for layer in layers:
        out = layer(x, edge_index, edge_attr)
        results.append([out, torch.autograd.grad(out.square().sum(), filled)[0]])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert path_taken(layers[0]) == []


def test_features_of_edges_where_pyg_has_no_mean(device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite_tall"](device)
    x, y = torch.randn(num_src, 4, device=device), torch.randn(num_dst, 4, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    ours, theirs = make((4, 4), 5, device=device, edge_dim=3)
    means = summed_at_receivers(RowWindows.from_edge_index(edge_index, (num_src, num_dst)), edge_attr, "mean")
    theirs.fill_value = means
    torch.testing.assert_close(ours((x, y), edge_index, edge_attr), theirs((x, y), edge_index, edge_attr))
    assert path_taken(ours) == []


@pytest.mark.parametrize("options", [{}, {"edge_dim": 3, "fill_value": 0.5}], ids=str)
def test_kinds_of_edge_index(options: dict[str, Any], device: torch.device) -> None:
    _gat.row_windows_and_other_kinds(GATv2Conv, options, device)


@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor])
@pytest.mark.parametrize("loops", [False, True])
def test_sparse_tensors_run_pygs_path(convert: Any, loops: bool, device: torch.device) -> None:
    _gat.sparse_tensors(GATv2Conv, convert, loops, device)


def test_who_watches_sees_pygs_path(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _gat.watched(GATv2Conv, device, monkeypatch)


CHANGES = ["hooked", "replaced", "parametrised", "patched", "one bias less"]
PROJECTIONS = [
    (4, "", {}, [24]),
    (4, "", {"bias": False}, [24]),
    (4, "", {"share_weights": True}, [12]),
    (4, "", {"residual": True}, [12, 24]),
    ((4, 4), "", {}, [24]),
    *((4, change, {}, [12, 12]) for change in CHANGES),
]


@pytest.mark.parametrize(("channels", "change", "options", "widths"), PROJECTIONS, ids=str)
def test_projections(
    channels: Any,
    change: str,
    options: dict[str, Any],
    widths: list[int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One product for both, unless a projection is not what it was; then it is called."""
    edge_index = _gat.few_edges(device)
    layers = make(channels, 6, device=device, heads=2, **options)
    for layer in layers:
        lin = layer.lin_r
        if change == "hooked":
            lin.register_forward_hook(lambda *arguments: 2 * arguments[-1])
        elif change == "replaced":
            layer.lin_r = torch.nn.Sequential(torch.nn.Tanh(), lin)
        elif change == "parametrised":
            torch.nn.utils.parametrizations.weight_norm(lin)
        elif change == "patched":
            lin.forward = lambda x, forward=lin.forward: forward(x).tanh()
        elif change:
            lin.bias = None
    x = torch.randn(7, 4, device=device)
    seen: list[int] = []
    wanted = layers[1](x, edge_index)
    for module, place in (
        (torch.nn.functional, 1),
        (_aggregate, 2),
    ):  # a layer as one Function has the latter
        linear = module.linear

        def watched(*given: Any, linear: Any = linear, place: int = place) -> Any:
            seen.append(given[place].size(0))
            return linear(*given)

        monkeypatch.setattr(module, "linear", watched)
    torch.testing.assert_close(layers[0](x, edge_index), wanted)
    assert path_taken(layers[0]) == [] and seen == widths


def test_dropout_is_for_training(device: torch.device) -> None:
    _gat.dropout_is_for_training(GATv2Conv, device)


@pytest.mark.parametrize("options", [{"bias": False}, {"concat": False, "edge_dim": 3}], ids=str)
def test_autocast_gives_pygs_dtype(options: dict[str, Any], device: torch.device) -> None:
    _gat.autocast_gives_pygs_dtype(GATv2Conv, options, device)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_an_activation_in_place_may_follow(options: dict[str, Any], device: torch.device) -> None:
    _gat.may_be_changed_in_place(GATv2Conv, options, device)


def test_copies_and_repeated_calls_give_the_same_bits(device: torch.device) -> None:
    _gat.copies_and_repeats(GATv2Conv, device)


def test_strict_runs_what_fuses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    edge_index = _gat.few_edges(device)
    x = torch.randn(7, 4, device=device)
    layer = GATv2Conv(4, 4).to(device)
    layer(x, edge_index)
    layer(x, edge_index, return_attention_weights=True)
    layer.dropout = 1.0
    with pytest.raises(RuntimeError, match="GATv2Conv is not fused: dropout is 1"):
        layer(x, edge_index)
