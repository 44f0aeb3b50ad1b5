"""GCN and GAT against PyG's, GraphTransformer against its blocks' reference: numbers, gradients, state."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN

import graphfuse
from graphfuse import RowWindows, reference
from graphfuse.nn import models
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, agree, compare
from tests.nn.test_transformer_matrix import pairwise

WIDTH, HIDDEN, OUT, EDGE_DIM = 7, 6, 5, 3
MODELS = ("GCN", "GAT", "GATv2")
NAMES = (*MODELS, "GraphTransformer")
CONVS: dict[str, tuple[dict[str, Any], ...]] = {
    "GCN": ({}, {"bias": False, "improved": True}, {"normalize": False, "flow": "target_to_source"}),
    "GAT": (
        {"heads": 2},
        {"heads": 3, "residual": True, "negative_slope": 0.5, "fill_value": "add"},
        {"heads": 4, "concat": False, "add_self_loops": False, "bias": False},
    ),
}
CONVS["GATv2"] = (*CONVS["GAT"][:2], CONVS["GAT"][2] | {"share_weights": True})
ACTS: dict[str, dict[str, Any]] = {
    "relu": {},
    "in place": {"act_kwargs": {"inplace": True}},
    "elu first": {"act": torch.nn.ELU(0.7), "act_first": True},
    "none": {"act": None},
}


# Seven nodes, one without edges; repeated edges, and two self-loops. None is repeated: of the weights of one
# node's loops GCN takes the last, but PyG's gradient reaches all.
EDGES = torch.tensor([[0, 0, 1, 2, 4, 4, 5, 3, 2, 5, 1], [1, 1, 0, 0, 3, 3, 0, 3, 2, 4, 5]])


class Case(NamedTuple):
    """A model of PyG's and how it is called; empty strings and 0 stand for None."""

    model: str
    num_layers: int = 2
    out_channels: int = OUT
    jk: str = ""
    norm: str = ""
    act: str = "relu"
    conv: int = 0  # which options the convolutions have
    edges: bool = False  # weights, or features
    windows: bool = False  # a record in place of edge_index
    training: bool = True

    def arguments(self) -> dict[str, Any]:
        """Of the constructor but for its ``in_channels`` and ``hidden_channels``."""
        given = {"num_layers": self.num_layers, "out_channels": self.out_channels or None}
        given |= {"jk": self.jk or None, "norm": self.norm or None}
        given |= ACTS[self.act] | CONVS[self.model][self.conv]
        given |= {"edge_dim": EDGE_DIM} if self.edges and self.model != "GCN" else {}
        return given | {"dropout": 0.0 if self.training else 0.5}


NORMS = ("", "batch_norm", "layer_norm", "graph_norm")
JKS = ("", "last", "cat", "max", "lstm")
FLAGS = ((False, True),) * 3
CASES = [Case(*row) for row in pairwise(MODELS, (1, 3), (0, OUT), JKS, NORMS, tuple(ACTS), (0, 1, 2), *FLAGS)]
TRANSFORMERS: list[dict[str, Any]] = [
    {"num_layers": 2, "out_channels": OUT, "heads": 2},
    {"num_layers": 1, "edge_dim": EDGE_DIM, "norm": "layer"},
    {"num_layers": 3, "heads": 3, "norm": "layer", "ffn_ratio": 3, "out_channels": 1},
    {"num_layers": 2, "heads": 6, "edge_dim": EDGE_DIM},
]


class Definition(torch.nn.Module):
    """GraphTransformer of blocks that run PyG's ``propagate``."""

    def __init__(
        self, width: int, hidden: int, num_layers: int, out_channels: int = 0, heads: int = 1, **options: Any
    ) -> None:
        super().__init__()
        block = functools.partial(reference.GraphTransformerLayer, hidden, heads, **options)
        self.lin_in = torch.nn.Linear(width, hidden)
        self.layers = torch.nn.ModuleList(block() for _ in range(num_layers))
        self.lin_out = torch.nn.Linear(hidden, out_channels) if out_channels else torch.nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x = self.lin_in(x)
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr)
        out: Tensor = self.lin_out(x)
        return out


def classes(name: str) -> tuple[Any, Any]:
    """Our model and its definition."""
    if name == "GATv2":
        return functools.partial(models.GAT, v2=True), functools.partial(pyg.GAT, v2=True)
    return getattr(models, name), getattr(pyg, name, Definition)


def pair(name: str, device: Any = "cpu", width: Any = WIDTH, **options: Any) -> tuple[Any, Any]:
    """Both with equal weights."""
    ours, theirs = (cls(width, HIDDEN, **options).to(device) for cls in classes(name))
    with torch.no_grad():
        for value in theirs.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:  # biases and norms, 0 or 1 as they are drawn
                value.uniform_(0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())  # strict, and back
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def all_fused(model: Any) -> bool:
    """Whether the last forward of every layer ran fused; PyG's layers never do."""
    layers = [layer for layer in model.modules() if isinstance(layer, pyg.MessagePassing)]
    return len(layers) > 0 and all(path_taken(layer) == [] for layer in layers)


def call(model: torch.nn.Module, edge_index: Any, given: dict[str, Any], **values: Tensor) -> Tensor:
    """The model in the dtype of ``x``, with features, weights and parameters as arguments."""
    model = copy.deepcopy(model).to(values["x"].dtype)
    inputs = given | {name: values.pop(name) for name in ("edge_weight", "edge_attr") if name in values}
    x = values.pop("x")
    out: Tensor = torch.func.functional_call(model, values, (x, edge_index), inputs)
    assert all_fused(model) == type(model).__module__.startswith("graphfuse")
    return out


def check(
    draw: Any, device: torch.device, edges: str = "", windows: bool = False, batch: bool = False, on: str = ""
) -> None:
    """Output and the gradients of every input, and of all parameters as one.

    How far PyG rounds one number, or a gradient that a norm makes 0, is luck, on a GPU of each run: there
    four draws are one comparison.
    """
    edge_index, (num_nodes, _) = GRAPHS[on](device) if on else (EDGES.to(device), (7, 7))
    num_edges = edge_index.size(1)
    record = RowWindows.from_edge_index(edge_index, (num_nodes, num_nodes)) if windows else edge_index
    given = {"batch": torch.arange(num_nodes, device=device) * 2 // num_nodes} if batch else {}

    def results() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        ours, theirs = draw()
        inputs = {name: value.detach() for name, value in theirs.named_parameters()}
        inputs["x"] = torch.randn(num_nodes, WIDTH, device=device)
        if edges == "edge_weight":
            inputs[edges] = torch.rand(num_edges, device=device) + 0.1
        elif edges:
            inputs[edges] = torch.randn(num_edges, EDGE_DIM, device=device)
        for value in inputs.values():
            value.requires_grad_()
        runs = (functools.partial(call, *one, given) for one in ((ours, record), (theirs, edge_index)))
        with torch.backends.cudnn.flags(False):  # its LSTM has no backward in eval, and rounds to TF32
            compared = list(compare(*runs, inputs))
        for name, *values in compared:
            key = "dparameters" if "." in name else name
            zeros[key] = zeros.get(key, True) and not values[2].any()
            yield key, *values

    zeros: dict[str, bool] = {}
    agree(results, 4 if device.type == "cuda" else 1)
    assert num_edges == 0 or not any(zeros.values()), zeros


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_output_and_gradients_match_pygs(case: Case, device: torch.device) -> None:
    def draw() -> list[Any]:
        return [layer.train(case.training) for layer in pair(case.model, device, **case.arguments())]

    edges = ("edge_weight" if case.model == "GCN" else "edge_attr") if case.edges else ""
    check(draw, device, edges, case.windows, case.norm == "graph_norm")


@pytest.mark.parametrize("graph", ["no_nodes", "one_edge"])
@pytest.mark.parametrize("model", MODELS)
def test_other_graphs(model: str, graph: str, device: torch.device) -> None:
    check(functools.partial(pair, model, device, num_layers=2), device, on=graph)


@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_transformer_matches_its_definition(options: dict[str, Any], device: torch.device) -> None:
    edges = "edge_attr" if "edge_dim" in options else ""
    draw = functools.partial(pair, "GraphTransformer", device, **options)
    check(draw, device, edges, windows=options["num_layers"] == 2)


def same_draws(name: str, **options: Any) -> list[Any]:
    """Both built from one seed: the same state in the same order; theirs and ours drawn anew."""
    built = []
    for cls in classes(name):
        torch.manual_seed(3)
        built.append(cls(WIDTH, HIDDEN, **options))
    first = copy.deepcopy(built[0])
    assert list(first.state_dict()) == list(built[1].state_dict())
    assert all(map(torch.equal, first.state_dict().values(), built[1].state_dict().values()))
    for seed in (4, 3):
        torch.manual_seed(seed)
        for parameter in built[0].parameters():
            parameter.data.fill_(7)
        built[0].reset_parameters()
        for key, value in first.named_parameters():
            assert seed == 3 or value.dim() == 1 or not torch.equal(value, built[0].get_parameter(key))
    return [first, *built]


def same_attributes(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Names of classes and plain attributes, rates and sizes among them, of every module."""
    for mine, other in zip(ours.modules(), theirs.modules(), strict=True):
        kinds = (int, float, str, tuple, type(None))
        wanted = {name: value for name, value in vars(other).items() if isinstance(value, kinds)}
        assert {name: getattr(mine, name, "missing") for name in wanted} == wanted
        assert type(mine).__name__ == type(other).__name__ and type(mine) is not pyg.MessagePassing


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_same_seed_same_weights_same_attributes(case: Case) -> None:
    _, ours, theirs = same_draws(case.model, **case.arguments())
    torch.manual_seed(3)
    theirs.reset_parameters()
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    assert repr(ours) == repr(theirs)
    same_attributes(ours, theirs)
    wanted = getattr(graphfuse.nn, f"{case.model}Conv")
    assert [type(conv) for conv in ours.convs] == [wanted] * case.num_layers


@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
def test_transformers_state(options: dict[str, Any]) -> None:
    mine, theirs = (inspect.signature(cls).parameters for cls in (models.GraphTransformer, BasicGNN))
    for name in ("in_channels", "hidden_channels", "num_layers", "out_channels", "dropout"):
        assert list(mine).index(name) == list(theirs).index(name)
        assert (mine[name].default, mine[name].kind) == (theirs[name].default, theirs[name].kind)
    first, ours, definition = same_draws("GraphTransformer", dropout=0.3, **options)
    assert all(map(torch.equal, first.state_dict().values(), ours.state_dict().values()))
    same_attributes(ours.layers, definition.layers)
    out = options.get("out_channels", HIDDEN)
    assert repr(ours) == f"GraphTransformer({WIDTH}, {out}, num_layers={options['num_layers']})"


def run(model: Any, x: Tensor, edge_index: Any, seed: int = 5) -> list[Tensor]:
    """Output and gradients of one call, dropout drawn from ``seed``."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    out = model(x, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def start(name: str, device: Any, dropout: float = 0.4) -> tuple[Any, Any, Tensor, Tensor]:
    """Two layers, ours and theirs, and their input."""
    options: dict[str, Any] = {"num_layers": 2, "out_channels": OUT, "dropout": dropout}
    options |= {} if name == "GCN" else {"heads": 2}
    options |= {"norm": "layer"} if name == "GraphTransformer" else {}
    return *pair(name, device, **options), torch.randn(7, WIDTH, device=device), EDGES.to(device)


@pytest.mark.parametrize("name", NAMES)
def test_dropout(name: str, device: torch.device) -> None:
    """Rows are dropped as in PyG's model; attention weights have a generator of their own."""
    ours, theirs, x, edge_index = start(name, device)
    once, other = (run(ours, x, edge_index, seed) for seed in (1, 2))
    assert all_fused(ours) and not torch.allclose(once[0], other[0], atol=1e-2)
    if name in ("GCN", "GraphTransformer"):
        torch.testing.assert_close(once, run(theirs, x, edge_index, 1), rtol=1e-3, atol=1e-4)
    drawn = ours.eval()(x, edge_index)
    assert torch.equal(drawn, ours(x, edge_index)) and all_fused(ours)


@pytest.mark.parametrize("name", NAMES)
def test_pygs_path_is_pygs(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFUSE_DISABLE", "1")
    ours, theirs, x, edge_index = start(name, device)
    if device.type == "cpu":  # to the bit, dropout included; a GPU adds the edges of a node in any order
        assert all(map(torch.equal, run(ours, x, edge_index), run(theirs, x, edge_index)))
    windows = RowWindows.from_edge_index(edge_index, (7, 7))
    torch.testing.assert_close(ours.eval()(x, windows), theirs.eval()(x, edge_index))
    layers = [layer for layer in ours.modules() if isinstance(layer, pyg.MessagePassing)]
    assert [path_taken(layer)[0] for layer in layers] == ["GRAPHFUSE_DISABLE=1 is set"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_copies(name: str, device: torch.device) -> None:
    """A copy made before or after a run gives the same bits, output and gradients."""
    model, _, x, edge_index = start(name, device, dropout=0.0)
    unused = copy.deepcopy(model)
    wanted = run(model, x, edge_index)
    for twin in (unused, pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, run(twin, x, edge_index), wanted)) and all_fused(twin)
        shared = zip(twin.parameters(), model.parameters(), strict=True)
        assert all(one.data_ptr() != other.data_ptr() for one, other in shared)


def test_one_record_serves_all_layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = RowWindows.from_edge_index, []
    monkeypatch.setattr(RowWindows, "from_edge_index", lambda *given: built.append(1) or build(*given))
    for i, name in enumerate(NAMES):
        model, _, x, _ = start(name, device)
        edge_index = torch.randint(7, (2, 12), device=device)
        out = model.eval()(x, edge_index)
        out.sum().backward()
        assert len(built) == i + 1 and all_fused(model)
        windows = build(edge_index, (7, 7))
        torch.testing.assert_close(model(x, windows), out)
        assert len(built) == i + 1 and all_fused(model)
        with pytest.raises(ValueError, match="build them from this graph's edge_index"):
            model(x[:5], windows)


@pytest.mark.parametrize(("model", "ignored"), [("GCN", "edge_attr"), ("GAT", "edge_weight")])
def test_what_pyg_ignores_is_ignored(model: str, ignored: str, device: torch.device) -> None:
    ours, theirs, x, edge_index = start(model, device)
    values = {ignored: torch.rand(edge_index.size(1), device=device)}
    out = ours.eval()(x, edge_index, **values)
    assert torch.equal(out, ours(x, edge_index))
    torch.testing.assert_close(out, theirs.eval()(x, edge_index, **values))


@pytest.mark.parametrize("model", MODELS)
def test_sampled_hops_are_trimmed(model: str, device: torch.device) -> None:
    """As of NeighborLoader: 2 seeds, then 4 and 5 nodes, and the edges from each of these to earlier ones."""
    src = torch.tensor([2, 3, 4, 5, 2, 4, 6, 7, 8, 9, 10, 6, 7, 8, 10], device=device)
    dst = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 2], device=device)
    ours, theirs = pair(model, device, num_layers=2)
    x, edge_index = torch.randn(11, WIDTH, device=device), torch.stack([src, dst])
    sampled = {"num_sampled_nodes_per_hop": [2, 4, 5], "num_sampled_edges_per_hop": [6, 9]}
    out = ours(x, edge_index, **sampled)
    assert out.shape == (6, HIDDEN) and all_fused(ours)
    torch.testing.assert_close(out, theirs(x, edge_index, **sampled))
    windows = RowWindows.from_edge_index(edge_index, (11, 11))
    with pytest.raises(AssertionError):
        ours(x, windows, **sampled)


@pytest.mark.parametrize("name", ["GAT", "GATv2"])
def test_a_pair_of_widths(name: str, device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite_tall"](device)
    x = torch.randn(num_src, 4, device=device), torch.randn(num_dst, 3, device=device)
    ours, theirs = pair(name, device, (4, 3), num_layers=1, heads=2)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert all_fused(ours)


@pytest.mark.parametrize("name", NAMES)
def test_lazy_widths(name: str, device: torch.device) -> None:
    ours, theirs = classes(name)
    lazy, theirs = ours(-1, HIDDEN, 2).to(device), theirs(WIDTH, HIDDEN, 2).to(device)
    x, edge_index = torch.randn(7, WIDTH, device=device), EDGES.to(device)
    lazy(x, edge_index)
    theirs.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(lazy.eval()(x, edge_index), theirs.eval()(x, edge_index))
    assert all_fused(lazy)


def test_refusals() -> None:
    with pytest.raises(ValueError) as error:
        pyg.GAT(WIDTH, 8, 2, heads=3)
    with pytest.raises(ValueError, match=re.escape(str(error.value))):
        models.GAT(WIDTH, 8, 2, heads=3)
    models.GAT(WIDTH, 8, 2, heads=3, concat=False)
    with pytest.raises(ValueError, match=r"`channels` must be a positive multiple of `heads`"):
        models.GraphTransformer(WIDTH, 8, 2, heads=3)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_stays_fused(name: str, device: torch.device) -> None:
    ours, theirs, x, edge_index = start(name, device)
    with torch.autocast(device.type, torch.bfloat16):
        out, wanted = ours.eval()(x, edge_index), theirs.eval()(x, edge_index)
    assert all_fused(ours) and out.dtype is wanted.dtype
    torch.testing.assert_close(out, wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", NAMES)
def test_compile_has_no_graph_break(name: str, device: torch.device) -> None:
    ours, theirs, x, edge_index = start(name, device)
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, edge_index), theirs.eval()(x, edge_index), rtol=1e-4, atol=1e-4)


def test_torchscript_takes_pygs_path() -> None:
    """PyG's GAT cannot be scripted."""
    ours, theirs = pair("GCN", num_layers=3, out_channels=OUT, norm="layer_norm", jk="cat")
    x, weight = torch.randn(7, WIDTH), torch.rand(EDGES.size(1))
    torch.testing.assert_close(torch.jit.script(ours)(x, EDGES, weight), theirs(x, EDGES, weight))
