"""What the tests of GATConv and GATv2Conv share: pairs of layers, comparisons, and what holds for both."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.explain import AttentionExplainer, Explainer

import graphfuse
from graphfuse import RowWindows
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, agree, compare
from tests.nn.test_transformer_matrix import pairwise

SIZES = ((1, 16), (3, 7), (2, 33))  # heads, channels
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EDGE_DIM = 3
FILLS: dict[str, Any] = {"mean": "mean", "row": torch.linspace(-1, 1, EDGE_DIM)}
MISFIT = "edge_attr is not a matrix of edge_dim columns, a row for each edge, in the dtype of x"
PLAIN = "lin_edge is not a plain linear map in the dtype of x"
TWO_SETS = "sources and receivers are two sets of nodes, and flow is 'target_to_source'"
NOT_DENSE = "the features are not a dense tensor"
EXPLAINED = "the layer is being explained (layer.explain is True), which needs every message"


class Options(NamedTuple):
    """What a layer and its input vary in besides graph, sizes and dtype."""

    edges: str = ""  # which features the loops have, if edges have any
    add_self_loops: bool = True
    concat: bool = True
    bias: bool = True
    residual: bool = False
    slope: float = 0.2
    backwards: bool = False  # flow='target_to_source'
    two: bool = False  # a pair of features and of maps; a bipartite graph always gets one
    share_weights: bool = False  # GATv2Conv only


VALUES = (
    ("", *FILLS),
    (True, False),
    (True, False),
    (True, False),
    (False, True),
    (0.2, 0.0, 1.5),
    (False, True),
    (False, True),
    (False, True),
)
# The interpreter is slow: it leaves the graphs with most edges to the tests of the ops.
_LARGE = () if torch.cuda.is_available() else ("hub", "full", "symmetric")
_NAMES = [name for name in GRAPHS if name not in _LARGE]
SUBSET = [(*row[:3], Options(*row[3:])) for row in pairwise(_NAMES, SIZES, DTYPES, *VALUES)]


def few_edges(device: torch.device) -> Tensor:
    """Seven nodes, one of them without edges; repeated edges and self-loops."""
    edge_index = torch.tensor([[0, 1, 2, 2, 3, 4, 4, 5, 2, 0, 3], [1, 0, 2, 0, 0, 3, 3, 0, 2, 1, 3]])
    return edge_index.to(device)


def name_of(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def make(cls: Any, *arguments: Any, device: Any = "cpu", dtype: Any = None, **options: Any) -> Any:
    """Our layer and PyG's with equal weights, none of them 0."""
    theirs = getattr(pyg, cls.__name__)(*arguments, **options)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    theirs, ours = theirs.to(device, dtype), cls(*arguments, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def call(layer: torch.nn.Module, edge_index: Any, **values: Tensor) -> Tensor:
    """The layer in the dtype of its inputs, parameters and features as arguments."""
    x: Any = tuple(values.pop(name) for name in ("x_src", "x_dst", "x") if name in values)
    layer = copy.deepcopy(layer).to(x[0].dtype)
    arguments = (x if len(x) == 2 else x[0], edge_index, values.pop("edge_attr", None))
    parameters = {name.replace("__", "."): value for name, value in values.items()}
    out = torch.func.functional_call(layer, parameters, arguments)
    assert not path_taken(layer)  # PyG's has none, ours must be empty
    return out


def on_a_grid(name: str, value: Tensor) -> Tensor:
    """Numbers of which projections and scores are exact in half precision.

    The LeakyReLU's derivative jumps at 0. A score that is rounded to the other side of it is an error as
    large as that edge's gradient, and whether PyG's layer rounds one so is luck.
    """
    if name.startswith("att"):
        return torch.randint(0, 2, value.shape, device=value.device).to(value.dtype) / 4 - 0.125
    if name.startswith(("x", "edge_attr")):
        return torch.randint(-1, 2, value.shape, device=value.device).to(value.dtype)
    return torch.randint(-4, 5, value.shape, device=value.device).to(value.dtype) / 4


def compare_with_pyg(
    cls: Any, graph: str, sizes: tuple[int, int], dtype: torch.dtype, options: Options, device: torch.device
) -> None:
    """Output and the gradients of every input and parameter.

    Weight and bias of a projection are one gradient: that of a bias may be a single number, and how far PyG
    rounds a single number is a matter of luck. On a GPU four draws are one comparison, for the same reason.
    """
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    edges, *flags, slope, backwards, two, share = options
    arguments: dict[str, Any] = dict(zip(Options._fields[1:5], flags, strict=True))
    arguments |= {"heads": sizes[0], "negative_slope": slope}
    two = two or num_src != num_dst
    if edges:
        # PyG counts the edges of the first nodes only, and fails if there are other receivers
        fill = "row" if num_dst > num_src else edges
        arguments |= {"edge_dim": EDGE_DIM, "fill_value": FILLS[fill]}
    if backwards and num_src == num_dst:
        arguments["flow"] = "target_to_source"
    if cls.__name__ == "GATv2Conv":
        arguments["share_weights"] = share
    own = 13 if share else 18
    shapes = {"x_src": (num_src, 13), "x_dst": (num_dst, own)} if two else {"x": (num_src, 13)}
    shapes |= {} if not edges else {"edge_attr": (edge_index.size(1), EDGE_DIM)}

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        channels = (13, own) if two else 13
        layers = make(cls, channels, sizes[1], device=device, dtype=dtype, **arguments)
        inputs = {name.replace(".", "__"): value for name, value in layers[1].named_parameters()}
        inputs |= {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
        if dtype != torch.float32:
            inputs = {name: on_a_grid(name, value) for name, value in inputs.items()}
        inputs = {name: value.detach().requires_grad_() for name, value in inputs.items()}
        ours, theirs = (functools.partial(call, layer, edge_index) for layer in layers)
        for name, *values in compare(ours, theirs, inputs):
            yield name.split("__")[0], *values

    agree(draw, 4 if device.type == "cuda" else 1)


def same_signatures(cls: Any) -> None:
    for method in ("__init__", "forward", "edge_update", "message"):
        ours, theirs = (inspect.signature(getattr(one, method)) for one in (cls, getattr(pyg, cls.__name__)))
        assert list(ours.parameters) == list(theirs.parameters)
        for mine, other in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert (mine.default, mine.kind) == (other.default, other.kind)
    ask = inspect.signature(cls.why_not_fused).parameters
    assert list(ask) == list(inspect.signature(cls.forward).parameters)


def same_weights(cls: Any, channels: Any, options: dict[str, Any]) -> None:
    """One seed, one state, in one order; the same attributes and text."""
    layers, attributes = [], []
    for one in (cls, getattr(pyg, cls.__name__)):
        torch.manual_seed(3)
        layers.append(one(channels, 4, **options))
        plain = {
            name: value
            for name, value in vars(layers[-1]).items()
            if isinstance(value, (int, float, str, tuple, type(None)))
        }
        attributes.append(plain)
    for _ in range(2):
        ours, theirs = (layer.state_dict() for layer in layers)
        assert list(ours) == list(theirs)
        assert all(map(torch.equal, ours.values(), theirs.values()))
        for layer in layers:
            torch.manual_seed(4)
            layer.reset_parameters()
    assert repr(layers[0]) == repr(layers[1]) and repr(layers[0]).startswith(f"{cls.__name__}(")
    assert attributes[0] == attributes[1] and {"lin_edge", "residual", "fill_value"} <= {*dir(layers[0])}
    for kind in ("_parameters", "_modules", "_buffers"):
        mine, other = (list(getattr(layer, kind)) for layer in layers)
        assert mine == other


def lazy_channels(cls: Any, channels: Any, options: dict[str, Any], device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    x: Any = torch.randn(num_src, 5, device=device)
    x = x if channels == -1 else (x, torch.randn(num_dst, 7, device=device))
    layers, results = [], []
    for one in (cls, getattr(pyg, cls.__name__)):
        torch.manual_seed(0)
        layers.append(one(channels, 6, **options).to(device))
        torch.manual_seed(1)  # most weights are drawn in the first forward
        results.append(layers[-1](x, edge_index))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(layers[0](x, edge_index), results[1])
    assert path_taken(layers[0]) == []
    layers[1].load_state_dict(layers[0].state_dict())


def not_false(argument: Any) -> Any:
    """What PyG's layer is given: before 2.8, any bool asks for attention weights, and nothing else does."""
    return bool(argument) or None if isinstance(argument, int) else argument


def falls_back(layers: Any, arguments: tuple[Any, ...], *reasons: str) -> None:
    """``why_not`` gives just these reasons, and the result is PyG's."""
    ours, theirs = layers
    assert graphfuse.why_not(ours, *arguments) == list(reasons)
    torch.testing.assert_close(ours(*arguments), theirs(*map(not_false, arguments)))
    assert path_taken(ours) == list(reasons)


def fails_alike(layers: Any, arguments: tuple[Any, ...], *reasons: str) -> None:
    """Both layers refuse the arguments in the same words."""
    if reasons:
        assert graphfuse.why_not(layers[0], *arguments) == list(reasons)
    messages = []
    for layer in layers:
        with pytest.raises(Exception) as error:
            layer(*arguments)
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


def to_the_bit(layers: Any, arguments: tuple[Any, ...], weights: bool | None) -> None:
    """PyG's path gives PyG's bits: output, attention, and the gradient of every parameter."""
    for training in (True, False):
        results = []
        for layer, wanted in zip(layers, (weights, not_false(weights)), strict=True):
            torch.manual_seed(1)  # dropout
            out: Any = layer.train(training)(*arguments, return_attention_weights=wanted)
            parts = [out]
            if weights:
                out, (returned, alpha) = out
                parts = [out, returned, alpha]
                out = torch.cat([out.flatten(), alpha.flatten()])
            loss = out.square().sum()
            results.append([*parts, *torch.autograd.grad(loss, layer.parameters(), allow_unused=True)])
        for mine, other in zip(*results, strict=True):
            assert torch.equal(mine, other) if other is not None else mine is None
        assert path_taken(layers[0])[0] == "GRAPHFUSE_DISABLE=1 is set"


def row_windows_and_other_kinds(cls: Any, options: dict[str, Any], device: torch.device) -> None:
    """A record, int32 and EdgeIndex in place of edge_index, fused or not."""
    edge_index = few_edges(device)
    x = torch.randn(7, 20, device=device)
    layers = make(cls, 20, 18, device=device, **options)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device) if "edge_dim" in options else None
    wrapped = EdgeIndex(edge_index, sparse_size=(7, 7))
    kinds = [edge_index.int(), wrapped, RowWindows.from_edge_index(edge_index, (7, 7))]
    wanted, (returned, alpha) = layers[1](x, edge_index, edge_attr, return_attention_weights=True)
    for given in kinds:
        torch.testing.assert_close(layers[0](x, given, edge_attr), wanted)
        assert path_taken(layers[0]) == []
        out, (mine, weights) = layers[0](x, given, edge_attr, return_attention_weights=True)
        assert path_taken(layers[0]) == []
        torch.testing.assert_close((out, weights), (wanted, alpha))
        assert torch.equal(torch.as_tensor(mine), returned)
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        layers[0](x[:5], kinds[-1])


def sparse_tensors(cls: Any, convert: Any, loops: bool, device: torch.device) -> None:
    """The attention comes back as values of the matrix."""
    edge_index, _ = GRAPHS["self_loops"](device)
    adj_t = convert(edge_index.flip(0), size=(37, 37))
    ours, theirs = make(cls, 4, 4, device=device, heads=2, add_self_loops=loops)
    x = torch.randn(37, 4, device=device)
    reason = f"the graph is a {adj_t.layout} tensor; pass an edge_index tensor or RowWindows"
    falls_back((ours, theirs), (x, adj_t), reason)
    _, (mine, alpha) = ours(x, adj_t, return_attention_weights=True)
    _, (other, wanted) = theirs(x, adj_t, return_attention_weights=True)
    torch.testing.assert_close((mine.values(), alpha), (other.values(), wanted))


def watched(cls: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, patches, overrides and explainers see what they see in PyG's layer."""
    edge_index = few_edges(device)
    x = torch.randn(7, 4, device=device)
    plain = make(cls, 4, 5, device=device, heads=2)
    for step, kind in (("message", "pre_hook"), ("message", "hook"), ("edge_update", "hook")):
        layers, seen = copy.deepcopy(plain), []
        for layer in layers:
            getattr(layer, f"register_{step}_forward_{kind}")(lambda *given, seen=seen: seen.append(given))
        sentence = f"a hook is registered on a step of message passing ({step}_forward_{kind}s)"
        falls_back(layers, (x, edge_index), sentence)
        mine, other = (given[1][-1] for given in seen)
        assert list(mine) == list(other)
    patched = copy.deepcopy(plain)
    for layer in patched:
        layer.message = lambda x_j, alpha: 2 * x_j * alpha[:, :, None]
    falls_back(patched, (x, edge_index), "`message` was replaced on this layer object")

    class Doubled(cls):  # type: ignore[misc]
        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return 2 * x_j * alpha[:, :, None]

    Doubled.__name__ += cls.__name__  # PyG generates one propagate for each name
    twice = Doubled(4, 5, heads=2).to(device)
    twice.load_state_dict(plain[0].state_dict())
    falls_back((twice, patched[1]), (x, edge_index), f"{Doubled.__name__} overrides `message`")
    decomposed = copy.deepcopy(plain)
    for layer in decomposed:
        layer.decomposed_layers = 2
    fails_alike(decomposed, (x, edge_index))
    masks = []
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    for layer in plain:
        explainer = Explainer(
            layer,
            AttentionExplainer(),
            explanation_type="model",
            edge_mask_type="object",
            model_config=config,
        )
        masks.append(explainer(x, edge_index).edge_mask)
        layer.explain = True
        layer._edge_mask = torch.linspace(-3, 3, edge_index.size(1), device=device)
        layer._loop_mask = edge_index[0] != edge_index[1]
    torch.testing.assert_close(*masks)
    assert masks[0].abs().sum() > 0
    falls_back(plain, (x, edge_index), EXPLAINED)
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    with pytest.raises(RuntimeError, match=f"{cls.__name__} is not fused: the layer is being explained"):
        plain[0](x, edge_index)


def dropout_is_for_training(cls: Any, device: torch.device) -> None:
    # every node has one in-neighbour, whose weight is 1 if it is kept
    edge_index = torch.stack([torch.arange(40, device=device), torch.arange(40, device=device).roll(1)])
    layers = make(cls, 4, 3, device=device, heads=2, dropout=0.75, bias=False, add_self_loops=False)
    x = torch.randn(40, 4, device=device)
    value = layers[0].eval()(x, edge_index)
    torch.testing.assert_close(value, layers[1].eval()(x, edge_index))
    layer, results = layers[0].train(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(layer(x, edge_index))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    factor = (results[0] / value).view(40, 2, 3)
    kept = factor[:, :, 0] > 0
    torch.testing.assert_close(factor, 4.0 * kept[:, :, None].expand(-1, -1, 3).float())
    assert 5 <= kept.sum() <= 40 and not torch.equal(kept[:, 0], kept[:, 1])  # of 80, 20 expected
    assert path_taken(layer) == []


def autocast_gives_pygs_dtype(cls: Any, options: dict[str, Any], device: torch.device) -> None:
    edge_index = few_edges(device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device) if "edge_dim" in options else None
    x = torch.randn(7, 4, device=device)
    for dtype in (None, torch.bfloat16):  # of the parameters
        layers = make(cls, 4, 4, device=device, dtype=dtype, **options)
        for given in (x, x.bfloat16()):
            results, weights = [], []
            for layer in layers:
                with torch.autocast(device.type, torch.bfloat16):
                    results.append(layer(given, edge_index, edge_attr))
                    weights.append(layer(given, edge_index, edge_attr, return_attention_weights=True)[1][1])
            assert results[0].dtype == results[1].dtype and path_taken(layers[0]) == []
            assert weights[0].dtype == weights[1].dtype
            torch.testing.assert_close(*weights, atol=3e-2, rtol=3e-2)
            torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)
    results[0].float().sum().backward()
    assert all(one.grad.dtype == torch.bfloat16 for one in layers[0].parameters())


def may_be_changed_in_place(cls: Any, options: dict[str, Any], device: torch.device) -> None:
    edge_index = few_edges(device)
    gradients = []
    for layer in make(cls, 4, 4, device=device, **options):
        x = torch.linspace(-1, 1, 28, device=device).view(7, 4).requires_grad_()
        gradients.append(torch.autograd.grad(layer(x, edge_index).relu_().square().sum(), x)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def copies_and_repeats(cls: Any, device: torch.device) -> None:
    """Copies and repeated calls give the same bits, output and gradients, dropout included."""
    edge_index = few_edges(device)
    x = torch.randn(7, 4, device=device)
    edge_attr = torch.randn(edge_index.size(1), 2, device=device)
    layer = cls(4, 4, heads=2, edge_dim=2, dropout=0.3, bias=False).to(device)

    def run(layer: torch.nn.Module) -> Iterator[Tensor]:
        torch.manual_seed(5)
        leaves = [x.clone().requires_grad_(), edge_attr.clone().requires_grad_()]
        out = layer(leaves[0], edge_index, leaves[1])
        yield out
        yield from torch.autograd.grad(out.square().sum(), [*leaves, *layer.parameters()])
        assert path_taken(layer) == []

    wanted = list(run(layer))
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(map(torch.equal, run(twin), wanted))
