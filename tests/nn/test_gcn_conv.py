"""GCNConv against PyG's: signatures, parameters, numbers, every option and every way round the kernels."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import graphfuse
from graphfuse import RowWindows
from graphfuse.nn import GCNConv
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, check

SQUARE = [name for name in GRAPHS if not name.startswith("bipartite") and name != "no_nodes"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"improved": True},
    {"add_self_loops": False},
    {"normalize": False},
    {"flow": "target_to_source"},
    {"bias": False, "improved": True, "flow": "target_to_source"},
    {"cached": True},
]


def pair(dim: int, out_dim: int, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    theirs = pyg.GCNConv(dim, out_dim, **options).to(device, dtype)
    ours = GCNConv(dim, out_dim, **options).to(device, dtype)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def call(layer: torch.nn.Module, edge_index: Any, **values: Tensor) -> Tensor:
    """The layer in the dtype of its inputs, parameters and features as arguments."""
    inputs = {name: values.pop(name) for name in ("x", "edge_weight") if name in values}
    layer = copy.deepcopy(layer).to(inputs["x"].dtype)
    if layer.cached:
        layer.reset_parameters()  # a graph cached in another dtype
    parameters = {name.replace("__", "."): value for name, value in values.items()}
    out = torch.func.functional_call(layer, parameters, (inputs.pop("x"), edge_index), inputs)
    call.path = path_taken(layer)
    return out


def first_loops(edge_index: Tensor) -> Tensor:
    seen: set[int] = set()
    kept = [src != dst or not (src in seen or seen.add(src)) for src, dst in edge_index.t().tolist()]
    return edge_index[:, torch.tensor(kept, dtype=torch.bool, device=edge_index.device)]


def compare_with_pyg(
    graph: str,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    weighted: bool,
    **options: Any,
) -> None:
    edge_index, (num_nodes, _) = GRAPHS[graph](device)
    if weighted:  # of several loops at a node PyG counts one, but gives the gradient to all of them
        edge_index = first_loops(edge_index)
    ours, theirs = pair(*dims, device, dtype, **options)
    inputs = {name.replace(".", "__"): value for name, value in theirs.named_parameters()}
    inputs["x"] = torch.randn(num_nodes, dims[0], device=device).to(dtype).requires_grad_()
    if weighted:
        weight = torch.rand(edge_index.size(1), device=device).add(0.1).to(dtype)
        inputs["edge_weight"] = weight.requires_grad_(not options.get("cached", False))
    check(functools.partial(call, ours, edge_index), functools.partial(call, theirs, edge_index), inputs)


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_outputs_and_gradients_equal_pyg(graph: str, weighted: bool, device: torch.device) -> None:
    turn = SQUARE.index(graph) + weighted
    options = OPTIONS[turn % len(OPTIONS)]
    dims = [(8, 16), (16, 7), (33, 5)][turn % 3]
    compare_with_pyg(graph, device, torch.float32, dims, weighted, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_every_option(options: dict[str, Any], weighted: bool, device: torch.device) -> None:
    compare_with_pyg("self_loops", device, torch.float32, (9, 6), weighted, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("dims", [(8, 16), (16, 7)], ids=str)
def test_half_precision(
    dtype: torch.dtype, weighted: bool, dims: tuple[int, int], device: torch.device
) -> None:
    compare_with_pyg("self_loops", device, dtype, dims, weighted)


def test_those_comparisons_ran_fused(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, _ = pair(4, 3, device, torch.float32)
    call(ours, edge_index, x=torch.randn(33, 4, device=device))
    assert call.path == []


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signatures(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (GCNConv, pyg.GCNConv))
    assert list(ours.parameters) == list(theirs.parameters)
    for mine, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
        assert (mine.default, mine.kind) == (other.default, other.kind)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_seed_same_weights_same_repr(options: dict[str, Any]) -> None:
    layers = []
    for cls in (GCNConv, pyg.GCNConv):
        torch.manual_seed(3)
        layers.append(cls(5, 4, **options))
    ours, theirs = layers
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert repr(ours) == repr(theirs) == "GCNConv(5, 4)"
    assert torch.get_rng_state().sum() >= 0


def test_errors_are_pygs() -> None:
    for arguments in ({"normalize": False, "add_self_loops": True}, {"flow": "sideways"}):
        messages = []
        for cls in (GCNConv, pyg.GCNConv):
            with pytest.raises(ValueError) as error:
                cls(4, 4, **arguments)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    messages = []
    for cls in (GCNConv, pyg.GCNConv):
        with pytest.raises(ValueError, match="received a tuple") as error:
            cls(4, 4)((torch.ones(3, 4), None), torch.empty(2, 0, dtype=torch.int64))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    with pytest.raises(ValueError, match=r"`x` must have shape \[3, 4\] \(got \[3, 5\]\)"):
        GCNConv(4, 4)._forward_fused(torch.ones(3, 5), torch.empty(2, 0, dtype=torch.int64), None)


def test_of_several_loops_the_last_one_counts() -> None:
    edge_index = torch.tensor([[0, 1, 1, 1, 2], [1, 1, 1, 0, 1]])
    weight = torch.tensor([1.0, 0.3, 0.7, 2.0, 0.5])
    ours, theirs = pair(3, 2, torch.device("cpu"), torch.float32)
    x = torch.randn(3, 3)
    torch.testing.assert_close(ours(x, edge_index, weight), theirs(x, edge_index, weight))


def test_degrees_are_part_of_the_gradient_of_weights(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, _ = pair(4, 4, device, torch.float32)
    x = torch.randn(33, 4, device=device)
    weight = torch.rand(edge_index.size(1), device=device).requires_grad_()
    grad = torch.autograd.grad(ours(x, edge_index, weight).square().sum(), weight)[0]
    _, fixed = gcn_norm(edge_index, weight, 33)
    factor = fixed.detach()[: weight.numel()] / weight.detach()
    kept = GCNConv(4, 4, normalize=False).to(device)
    kept.load_state_dict(ours.state_dict())
    loops = torch.arange(33, device=device).expand(2, 33)
    full = torch.cat([edge_index, loops], 1)
    values = torch.cat([weight * factor, fixed.detach()[weight.numel() :]])
    detached = torch.autograd.grad(kept(x, full, values).square().sum(), weight)[0]
    assert (grad - detached).norm() > 0.3 * grad.norm()


def test_cached_graph_is_pygs_and_is_obeyed(device: torch.device) -> None:
    edge_index, _ = GRAPHS["self_loops"](device)
    other = edge_index.flip(1)[:, :20]
    x = torch.randn(37, 4, device=device)
    for weight in (None, torch.rand(edge_index.size(1), device=device)):
        ours, theirs = pair(4, 4, device, torch.float32, cached=True)
        for layer in (ours, theirs):
            layer(x, edge_index, weight)
        for mine, other_ in zip(ours._cached_edge_index, theirs._cached_edge_index, strict=True):
            torch.testing.assert_close(mine, other_)
        torch.testing.assert_close(ours(x, other), theirs(x, other))  # both ignore the new graph
        twin = copy.deepcopy(ours)
        torch.testing.assert_close(twin(x, other), theirs(x, other))
        # what PyG cached is used as it is
        ours.reset_parameters()
        assert ours._cached_edge_index is None
        ours.load_state_dict(theirs.state_dict())
        ours._cached_edge_index = theirs._cached_edge_index
        torch.testing.assert_close(ours(x, other), theirs(x, other))
        assert path_taken(ours) == []


def test_cached_graph_serves_more_nodes(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    for weight in (None, torch.rand(edge_index.size(1), device=device)):
        ours, theirs = pair(4, 4, device, torch.float32, cached=True)
        for num_nodes in (33, 40, 33):
            x = torch.randn(num_nodes, 4, device=device)
            torch.testing.assert_close(ours(x, edge_index, weight), theirs(x, edge_index, weight))
            assert path_taken(ours) == []
    with pytest.raises(IndexError, match="larger than 31"):
        ours(x[:32], edge_index)


def test_row_windows_in_place_of_edge_index(device: torch.device) -> None:
    edge_index, size = GRAPHS["self_loops"](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    x = torch.randn(37, 4, device=device)
    weight = torch.rand(edge_index.size(1), device=device)
    for flow in ("source_to_target", "target_to_source"):
        ours, theirs = pair(4, 4, device, torch.float32, flow=flow)
        for extra in ((), (weight,)):
            wanted = theirs(x, edge_index, *extra)
            torch.testing.assert_close(ours(x, windows, *extra), wanted)
            assert path_taken(ours) == []
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GRAPHFUSE_DISABLE", "1")
                torch.testing.assert_close(ours(x, windows, *extra), wanted)
                assert path_taken(ours) == ["GRAPHFUSE_DISABLE=1 is set"]
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        ours(x[:5], windows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("disabled", [False, True])
def test_index_dtypes(
    dtype: torch.dtype, disabled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disabled:
        monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index, _ = GRAPHS["ragged"](device)
    for options in ({}, {"normalize": False}):
        ours, theirs = pair(20, 18, device, torch.float32, **options)
        x = torch.randn(33, 20, device=device)
        torch.testing.assert_close(ours(x, edge_index.to(dtype)), theirs(x, edge_index))


def test_edge_index_class_runs_fused(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32)
    x = torch.randn(33, 4, device=device)
    wrapped = EdgeIndex(edge_index, sparse_size=(33, 33)).sort_by("col").values
    torch.testing.assert_close(ours(x, wrapped), theirs(x, wrapped))
    assert path_taken(ours) == []


@pytest.mark.parametrize("convert", [to_torch_coo_tensor, to_torch_csr_tensor])
def test_sparse_tensors_run_pygs_path(convert, device: torch.device) -> None:
    edge_index, _ = GRAPHS["self_loops"](device)
    adj_t = convert(edge_index.flip(0), size=(37, 37))
    for options in ({}, {"add_self_loops": False}, {"normalize": False}):
        ours, theirs = pair(4, 4, device, torch.float32, **options)
        x = torch.randn(37, 4, device=device)
        torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))
        assert path_taken(ours) == [
            f"the graph is a {adj_t.layout} tensor; pass an edge_index tensor or RowWindows"
        ]


def test_static_graphs_run_pygs_path(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32)
    x = torch.randn(2, 33, 4, device=device)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert path_taken(ours) == ["the features have 3 dimensions; the kernels take 2"]


def test_lazy_channels(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x = torch.randn(33, 4, device=device)
    layers, results = [], []
    for cls in (GCNConv, pyg.GCNConv):
        layers.append(cls(-1, 6).to(device))
        torch.manual_seed(0)  # weights are drawn in the first forward
        results.append(layers[-1](x, edge_index))
    torch.testing.assert_close(*results)
    assert path_taken(layers[0]) == []
    assert layers[0].lin.weight.shape == (6, 4)


def test_a_replaced_projection_is_called(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 6, device, torch.float32)
    x = torch.randn(33, 4, device=device)
    hooked: list[int] = []
    ours.lin.register_forward_hook(lambda *args: hooked.append(1))
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert hooked == [1]
    ours.lin = theirs.lin = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh()).to(device)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert path_taken(ours) == []


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_gives_pygs_dtype(normalize: bool, bias: bool, device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32, normalize=normalize, bias=bias)
    x = torch.randn(33, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, wanted = ours(x, edge_index), theirs(x, edge_index)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted, atol=3e-2, rtol=3e-2)
    assert path_taken(ours) == []
    out.float().sum().backward()
    assert ours.lin.weight.grad.dtype == torch.float32


def test_pickle_and_deepcopy(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x = torch.randn(33, 4, device=device)
    for options in ({}, {"cached": True}):
        layer = GCNConv(4, 4, **options).to(device)
        wanted = layer(x, edge_index)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x, edge_index), wanted)
            assert path_taken(twin) == []


def test_torchscript_takes_pygs_path() -> None:
    edge_index, _ = GRAPHS["ragged"]()
    ours, theirs = pair(4, 4, torch.device("cpu"), torch.float32)
    x = torch.randn(33, 4)

    class Net(torch.nn.Module):
        def __init__(self, conv: torch.nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    scripted = torch.jit.script(Net(ours))
    torch.testing.assert_close(scripted(x, edge_index), theirs(x, edge_index))


def test_plain_edge_index_is_windowed_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    edge_index = edge_index.roll(1, 1)
    model = torch.nn.ModuleList([GCNConv(4, 4), GCNConv(4, 4, flow="target_to_source")]).to(device)
    calls: list[int] = []
    build = RowWindows.from_edge_index
    monkeypatch.setattr(
        RowWindows, "from_edge_index", staticmethod(lambda *args: calls.append(1) or build(*args))
    )
    x = torch.randn(33, 4, device=device)
    for _ in range(3):
        for layer in model:
            layer(x, edge_index)
    assert len(calls) == 1


@pytest.mark.gpu
def test_repeated_runs_are_bitwise_equal() -> None:
    torch.use_deterministic_algorithms(False)
    edge_index, _ = GRAPHS["hub"]("cuda")
    layer = GCNConv(24, 16).cuda()
    x = torch.randn(100, 24, device="cuda", requires_grad=True)
    weight = torch.rand(edge_index.size(1), device="cuda", requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        out = layer(x, edge_index, weight)
        return out, *torch.autograd.grad(out.square().sum(), [x, weight, *layer.parameters()])

    first = run()
    for _ in range(250):
        assert all(map(torch.equal, first, run()))


def test_graphfuse_exports() -> None:
    assert graphfuse.nn.GCNConv is GCNConv
