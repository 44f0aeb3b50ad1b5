"""GraphTransformerLayer against its reference: parameters, numbers, dropout, every way round the kernel."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.explain import AttentionExplainer, Explainer
from torch_geometric.utils import to_torch_coo_tensor

import graphfuse
from graphfuse import RowWindows, reference, testing
from graphfuse.nn import GraphTransformerLayer
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from graphfuse.train.loop import captured

SQUARE = [name for name, graph in GRAPHS.items() if len(set(graph()[1])) == 1]
HEADS = (1, 3, 4, 8)
NORMS = ("batch", "layer")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLASSES = (GraphTransformerLayer, reference.GraphTransformerLayer)
SPARSE = "the graph is a torch.sparse_coo tensor; pass an edge_index tensor or RowWindows"
HOOK = "a hook is registered on a step of message passing (message_forward_hooks)"
WIDE = "channels / heads is 257; the kernels take heads of at most 256"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "layer", "ffn_ratio": 3},
    {"edge_dim": 3, "dropout": 0.5},
    {"norm": "layer", "edge_dim": 1},
]


def pair(channels: int, heads: int, device: torch.device, **options: Any) -> tuple[Any, Any]:
    ours, theirs = (cls(channels, heads, **options).to(device) for cls in CLASSES)
    with torch.no_grad():
        for norm in (theirs.norm_1, theirs.norm_2):
            for value in norm.state_dict().values():  # at their first values they hide where they enter
                if value.is_floating_point():
                    value.uniform_(0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def features(edge_index: Tensor, options: dict[str, Any]) -> Tensor | None:
    width = options.get("edge_dim")
    return width and torch.randn(edge_index.size(1), width, device=edge_index.device)


def call(layer: torch.nn.Module, edge_index: Any, x: Tensor, **values: Tensor) -> Tensor:
    """The layer in the dtype of ``x``, parameters and features as arguments."""
    layer = copy.deepcopy(layer).to(x.dtype)
    edge_attr = [values.pop("edge_attr")] if "edge_attr" in values else []
    parameters = {name.replace("__", "."): value for name, value in values.items()}
    out = torch.func.functional_call(layer, parameters, (x, edge_index, *edge_attr))
    assert not path_taken(layer)
    return out


def compare(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, norm: str, edge_dim: int | None = None
) -> None:
    """Output and gradients, weight and bias of a module as one.

    Batch norm takes away what a bias before it adds: such a gradient is 0 but for the rounding of few sums.
    How far the reference rounds those is a matter of luck, on a GPU of each run: there four draws are one.
    """
    edge_index, (num_nodes, _) = GRAPHS[graph](device)

    def draw() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        layers = pair(24, heads, device, norm=norm, edge_dim=edge_dim)
        for layer in layers:
            # half of the hidden units on, half off: near the kink of the ReLU, rounding decides the gradient
            layer.lin_1.bias.data = torch.tensor([6.0, -6.0], device=device).repeat(24)
            layer.train(norm == "layer" or num_nodes > 1)  # batch norm of one row raises in training
        inputs = {name.replace(".", "__"): value for name, value in layers[1].named_parameters()}
        inputs["x"] = torch.randn(num_nodes, 24, device=device)
        if edge_dim is not None:
            inputs["edge_attr"] = torch.randn(edge_index.size(1), edge_dim, device=device)
        inputs = {name: value.detach().to(dtype).requires_grad_() for name, value in inputs.items()}
        runs = (functools.partial(call, layer, edge_index) for layer in layers)
        for name, *values in testing.compare(*runs, inputs):
            yield name.split("__")[0], *values

    testing.agree(draw, 4 if device.type == "cuda" else 1)


@pytest.mark.parametrize("edge_dim", [None, 5])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("graph", SQUARE)
def test_outputs_and_gradients(graph: str, norm: str, edge_dim: int | None, device: torch.device) -> None:
    heads = HEADS[(SQUARE.index(graph) + NORMS.index(norm)) % 4]
    compare(graph, device, torch.float32, heads, norm, edge_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "norm"), [*zip(HEADS, NORMS * 2, strict=True)])
def test_heads_and_dtypes(dtype: torch.dtype, heads: int, norm: str, device: torch.device) -> None:
    compare("self_loops", device, dtype, heads, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("graph", SQUARE)
def test_the_full_matrix(graph: str, heads: int, dtype: torch.dtype) -> None:
    for norm in NORMS:
        compare(graph, torch.device("cuda"), dtype, heads, norm)


def test_the_definition_from_scratch() -> None:
    # no PyG: a loop over nodes and heads, so that reference and layer cannot be wrong alike
    edge_index, (num_nodes, _) = GRAPHS["repeated"]()
    layer = reference.GraphTransformerLayer(8, 2, norm="layer", edge_dim=3).double()
    x, edge_attr = torch.randn(num_nodes, 8).double(), torch.randn(edge_index.size(1), 3).double()
    weights = {name: value.detach() for name, value in layer.state_dict().items()}
    rows = []
    for i in range(num_nodes):
        edges = (edge_index[1] == i).nonzero()[:, 0]
        query = weights["lin_query.weight"] @ x[i]
        feature = edge_attr[edges] @ weights["lin_edge.weight"].t()
        key = x[edge_index[0, edges]] @ weights["lin_key.weight"].t() + feature
        value = x[edge_index[0, edges]] @ weights["lin_value.weight"].t() + feature
        parts = []
        for head in (slice(0, 4), slice(4, 8)):
            alpha = (key[:, head] @ query[head] / 2).softmax(0)
            parts.append(alpha @ value[:, head])
        rows.append(torch.cat(parts))
    attended = torch.stack(rows) @ weights["lin_out.weight"].t() + weights["lin_out.bias"]
    h = torch.nn.functional.layer_norm(x + attended, (8,))
    hidden = (h @ weights["lin_1.weight"].t() + weights["lin_1.bias"]).clamp(min=0)
    wanted = h + hidden @ weights["lin_2.weight"].t() + weights["lin_2.bias"]
    torch.testing.assert_close(layer(x, edge_index, edge_attr), torch.nn.functional.layer_norm(wanted, (8,)))


def test_the_report_of_convert_names_heads_and_edges() -> None:
    wide, many = GraphTransformerLayer(257, 1), GraphTransformerLayer(4, 2, edge_dim=4096, dropout=1.0)
    reasons = graphfuse.convert(torch.nn.ModuleList([wide, many])).report
    over = (
        "heads * max(out_channels, edge_dim) is over 4096 in powers of two (got 2 heads of 2, edge_dim 4096)"
    )
    assert dict(reasons) == {"0": [WIDE], "1": [over]}


def test_signatures() -> None:
    for method in ("__init__", "forward", "message"):
        ours, theirs = (inspect.signature(getattr(cls, method)) for cls in CLASSES)
        assert ours == theirs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_seed_same_weights_same_repr(options: dict[str, Any]) -> None:
    layers = []
    for cls in CLASSES:
        torch.manual_seed(3)
        layers.append(cls(8, 2, **options))
    first = copy.deepcopy(layers[0].state_dict())
    for _ in range(2):
        ours, theirs = (layer.state_dict() for layer in layers)
        assert list(ours) == list(theirs)
        assert all(map(torch.equal, ours.values(), theirs.values()))
        for layer in layers:
            torch.manual_seed(4)
            layer.norm_1.bias.data.fill_(7)
            layer.reset_parameters()
    assert layers[0].norm_1.bias.eq(0).all() and not torch.equal(
        first["lin_out.bias"], layers[0].lin_out.bias
    )
    assert ("lin_edge.weight" in first) == ("edge_dim" in options)
    assert first["lin_1.weight"].size(0) == 8 * options.get("ffn_ratio", 2)
    assert ("norm_2.running_var" in first) == ("norm" not in options)
    wanted = f"GraphTransformerLayer(8, heads=2, norm={options.get('norm', 'batch')!r})"
    assert [repr(layer) for layer in layers] == [wanted, wanted]


@pytest.mark.parametrize("cls", CLASSES)
def test_constructor_refuses(cls: Any) -> None:
    for channels, heads in ((10, 4), (8, 0), (0, 1), (4, 8)):
        with pytest.raises(
            ValueError, match=rf"`channels` must be .* \(got channels={channels}, heads={heads}"
        ):
            cls(channels, heads)
    with pytest.raises(ValueError, match=r"`norm` must be 'batch' or 'layer' \(got 'graph'\)"):
        cls(8, 2, norm="graph")
    for rate in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"`dropout` must be in \[0, 1\] \(got {rate}\)"):
            cls(8, 2, dropout=rate)


@pytest.mark.parametrize("cls", CLASSES)
def test_forward_refuses(cls: Any) -> None:
    edge_index, _ = GRAPHS["one_edge"]()
    x, edge_attr = torch.ones(3, 8), torch.ones(1, 3)
    layer, with_edges = cls(8, 2), cls(8, 2, edge_dim=3)
    for given, got in (((x, x), "tuple"), (x[None], r"\[1, 3, 8\]"), (x[:, :7], r"\[3, 7\]"), (None, "None")):
        with pytest.raises(ValueError, match=rf"`x` must be a tensor \[num_nodes, 8\] \(got {got}"):
            layer(given, edge_index)
    with pytest.raises(ValueError, match=r"`edge_attr` must be None \(got \[1, 3\]\)"):
        layer(x, edge_index, edge_attr)
    for given, got in ((None, "None"), (edge_attr[0], r"\[3\]"), (edge_attr[:, :2], r"\[1, 2\]")):
        with pytest.raises(ValueError, match=rf"`edge_attr` must be a tensor \[num_edges, 3\] \(got {got}"):
            with_edges(x, edge_index, given)


def test_dropout_draws_as_the_reference(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(12, 3, device, dropout=0.4)
    x = torch.randn(33, 12, device=device)
    results = []
    for layer, seed in itertools.product(layers, (1, 2)):
        torch.manual_seed(seed)
        results.append(layer(x, edge_index))
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], results[1], atol=0.1)
    assert path_taken(layers[0]) == []
    ours = layers[0].eval()
    out, ours.dropout = ours(x, edge_index), 0.0
    assert torch.equal(out, ours(x, edge_index))


def test_where_dropout_acts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(12, 3, device, dropout=1.0)  # all features: what is left is residuals and biases
    x, results = torch.randn(33, 12, device=device), []
    shapes: list[tuple[int, ...]] = []
    dropout = torch.nn.functional.dropout
    seen = lambda x, *given: shapes.append(tuple(x.shape)) or dropout(x, *given)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "dropout", seen)
    for layer in layers:
        h = layer.norm_1(x + layer.lin_out.bias)
        results.append(layer(x, edge_index))
        torch.testing.assert_close(results[-1], layer.norm_2(h + layer.lin_2.bias))
    assert shapes == [(33, 12), (33, 24)] * 2
    assert path_taken(layers[0]) == []


def falls_back(layers: Any, arguments: tuple[Any, ...], *reasons: str) -> None:
    ours, theirs = layers
    assert graphfuse.why_not(ours, *arguments) == list(reasons)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments), rtol=1e-4, atol=1e-4)
    assert path_taken(ours) == list(reasons)


def test_reasons(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    x, edge_attr = torch.randn(33, 4, device=device), torch.randn(edge_index.size(1), 3, device=device)
    plain = pair(4, 2, device)
    falls_back(plain, (x, edge_index))
    falls_back(pair(4, 2, device, edge_dim=3), (x, edge_index, edge_attr))
    wide = torch.randn(33, 257, device=device)
    falls_back(pair(257, 1, device), (wide, edge_index), WIDE)
    falls_back(plain, (x, to_torch_coo_tensor(edge_index.flip(0), size=(33, 33))), SPARSE)
    with_hook = plain[0].register_message_forward_hook(lambda *arguments: None)
    falls_back(plain, (x, edge_index), HOOK)
    with_hook.remove()
    plain[0].aggr = "max"
    assert graphfuse.why_not(plain[0], x, edge_index) == ["the aggregation is 'max'; the kernels sum"]
    monkeypatch.setenv("GRAPHFUSE_STRICT", "1")
    with pytest.raises(RuntimeError, match="GraphTransformerLayer is not fused: the aggregation is 'max'"):
        plain[0](x, edge_index)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pygs_path_is_the_reference(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    edge_index, _ = GRAPHS["self_loops"]()
    layers = pair(8, 2, torch.device("cpu"), **options)
    x = torch.randn(37, 8)
    edge_attr = features(edge_index, options)
    results = []
    for layer in layers:
        torch.manual_seed(1)  # dropout
        out = layer(x, edge_index, edge_attr)
        grads = torch.autograd.grad(out.square().sum(), layer.parameters())
        results.append([out, *grads, *layer.buffers()])
        assert layer._alpha is None
    assert all(map(torch.equal, *results))
    assert path_taken(layers[0])[0] == "GRAPHFUSE_DISABLE=1 is set"


@pytest.mark.parametrize("disabled", [False, True])
def test_kinds_of_edge_index(disabled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", str(int(disabled)))
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(20, 2, device)
    x = torch.randn(33, 20, device=device)
    wanted = theirs(x, edge_index)
    wrapped = EdgeIndex(edge_index, sparse_size=(33, 33)).sort_by("col").values
    windows = RowWindows.from_edge_index(edge_index, (33, 33))
    for given in (edge_index.int(), wrapped, windows):
        torch.testing.assert_close(ours(x, given), wanted, rtol=1e-4, atol=1e-4)
        assert len(path_taken(ours)) == disabled
    monkeypatch.delenv("GRAPHFUSE_DISABLE")
    with pytest.raises(ValueError, match="build them from this graph's edge_index"):
        ours(x[:5], windows)


def test_explaining(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(4, 2, device, norm="layer")
    x, masks = torch.randn(33, 4, device=device), []
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    kinds = {"explanation_type": "model", "edge_mask_type": "object", "model_config": config}
    for layer in layers:
        masks.append(Explainer(layer, AttentionExplainer(), **kinds)(x, edge_index).edge_mask)
        layer.explain = True
        layer._edge_mask = torch.linspace(-3, 3, edge_index.size(1), device=device)
    torch.testing.assert_close(*masks)
    assert masks[0].abs().sum() > 0
    reason = "the layer is being explained (layer.explain is True), which needs every message"
    falls_back(layers, (x, edge_index), reason)


@pytest.mark.parametrize(("change", "products"), [("", 1), ("hooked", 3), ("replaced", 3), ("bias", 3)])
def test_projections(change: str, products: int, device: torch.device, monkeypatch: Any) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(6, 2, device)
    seen: list[int] = []
    for layer in layers:
        value = layer.lin_value
        if change == "hooked":
            value.register_forward_hook(lambda *arguments: 2 * arguments[-1])
        elif change == "replaced":
            layer.lin_value = torch.nn.Sequential(torch.nn.Tanh(), value)
        elif change:
            value.bias = torch.nn.Parameter(torch.ones(6, device=device))
    x = torch.randn(33, 6, device=device)
    wanted = layers[1](x, edge_index)
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: seen.append(1) or linear(*given))
    torch.testing.assert_close(layers[0](x, edge_index), wanted, rtol=1e-4, atol=1e-4)
    assert path_taken(layers[0]) == [] and len(seen) == products + 3  # O, W1 and W2


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_autocast_gives_the_references_dtype(options: dict[str, Any], device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    layers = pair(4, 2, device, **options)
    x = torch.randn(33, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, wanted = (layer(x, edge_index) for layer in layers)
    assert out.dtype == wanted.dtype
    torch.testing.assert_close(out, wanted, atol=5e-2, rtol=5e-2)
    assert path_taken(layers[0]) == []
    out.float().square().sum().backward()
    assert layers[0].lin_value.weight.grad.dtype == torch.float32


def test_ten_layers_train(device: torch.device) -> None:
    edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
    model = torch.nn.ModuleList(GraphTransformerLayer(8, 1) for _ in range(10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, labels = torch.randn(num_nodes, 8, device=device), torch.arange(num_nodes, device=device) % 8
    losses = []
    for _ in range(3):
        h = x
        with torch.autocast(device.type, torch.bfloat16):
            for layer in model:
                h = layer(h, edge_index)
        losses.append(torch.nn.functional.cross_entropy(h.float(), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert all(path_taken(layer) == [] for layer in model)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the leaves saw the warm-up's stream
@pytest.mark.parametrize("norm", NORMS)
def test_capture_and_replay(norm: str) -> None:
    edge_index, _ = GRAPHS["self_loops"]("cuda")
    layer = GraphTransformerLayer(12, 3, norm=norm, dropout=0.5).cuda()
    x = torch.randn(37, 12, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = layer(x, edge_index)
        return out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])

    replays = []
    for layer.dropout in (0.0, 0.5):
        replays.append(captured(step))
    plain, masked = replays
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    layer.dropout = 0.0
    assert all(map(torch.equal, plain(), step()))
    assert not torch.equal(masked()[0].clone(), masked()[0])  # a fresh mask per replay
