"""A training step of two layers of each kind on a small graph: eager, and as a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

import graphfuse.nn
from benchmarks import truth
from benchmarks.bench import Bench, Prepared, Problem, device
from graphfuse.train import datasets, loop, models

Provider = Callable[[Any], Prepared]
# convolution, channels of a head, heads; the last layer has one head, and AGNN's layers have none
Layers = tuple[str, int, int | None]
_NETS: dict[str, Layers] = {
    "gcn": ("GCNConv", 16, None),
    "gat": ("GATConv", 8, 8),
    "gatv2": ("GATv2Conv", 8, 8),
    "agnn": ("AGNNConv", 16, None),
    "transformer": ("TransformerConv", 8, 8),
}
DROPOUT = 0.5  # of the features between the layers, and of the attention weights where a layer drops them


class Net(torch.nn.Module):
    """Two layers, ReLU and dropout between them; AGNN's stand between two dense layers.

    What is checked, in evaluation, has ELU instead: of millions of numbers a few are rounded to the other
    side of 0, where the derivative of ReLU jumps, and one of those exceeds every other error.
    """

    def __init__(self, package: Any, layers: Layers, in_dim: int, classes: int, prepared: bool) -> None:
        super().__init__()
        name, width, heads = layers
        conv = getattr(package, name)
        options: dict[str, Any] = {} if heads is None else {"dropout": DROPOUT}
        if name == "GCNConv":
            options |= {"normalize": False} if prepared else {"cached": True}
        elif name != "TransformerConv" and prepared:
            options |= {"add_self_loops": False}
        self.before: torch.nn.Module = torch.nn.Identity()
        self.after: torch.nn.Module = torch.nn.Identity()
        if name == "AGNNConv":
            self.before, self.after = package.Linear(in_dim, width), package.Linear(width, classes)
            self.first, self.last = conv(requires_grad=False, **options), conv(**options)
            return
        first = options if heads is None else options | {"heads": heads}
        self.first = conv(in_dim, width, **first)
        self.last = conv(width * (heads or 1), classes, **options)

    def forward(self, x: Tensor, edges: Sequence[Tensor]) -> Tensor:
        """Class scores of every node."""
        x = self.first(self.before(x), *edges)
        x = x.relu() if self.training else F.elu(x)
        x = F.dropout(x, DROPOUT, self.training)
        scores: Tensor = self.after(self.last(x, *edges))
        return scores


@dataclass(frozen=True)
class Inputs:
    """What providers are given. Nodes that are not trained on have the target -100: nothing synchronises."""

    data: Data
    layers: Layers
    dtype: torch.dtype
    captured: bool
    sparse: bool = False

    @functools.cached_property
    def x(self) -> Tensor:
        """The features of the nodes, as a layer of the step is given them."""
        x: Tensor = self.data.x.to(self.dtype)
        return x.to_sparse_csr() if self.sparse else x

    @functools.cached_property
    def target(self) -> Tensor:
        """The class of each node that is trained on."""
        return torch.where(self.data.train_mask, self.data.y, -100)

    def net(self, package: Any, prepared: bool = False) -> Net:
        """The network of the layers of ``package``, with the same start for all."""
        torch.manual_seed(0)
        sizes = (self.data.num_features, int(self.data.y.max()) + 1)
        return Net(package, self.layers, *sizes, prepared).to(self.data.x.device, self.dtype)

    def edges(self, prepared: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The graph as given, or as PyG's layers need it to be captured: loops added, weights computed.

        The weights, in ``dtype`` or that of the step, are rounded once. Degrees that PyG's layers count in
        half precision stop at 256 or 2048.
        """
        edge_index, num_nodes = self.data.edge_index, self.data.num_nodes
        if not prepared or self.layers[0] == "TransformerConv":
            return (edge_index,)
        if self.layers[0] == "GCNConv":
            dtype = dtype or self.dtype
            precise = torch.promote_types(dtype, torch.float32)
            edge_index, weight = gcn_norm(edge_index, None, num_nodes, dtype=precise)
            return edge_index, weight.to(dtype)
        return (add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_nodes)[0],)


def _problem(graph: str, kind: str, dtype: torch.dtype, captured: bool, features: str, mode: str) -> Problem:
    data = datasets.load(graph).data.to(device())
    facts = {
        "graph": graph,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "extra": {"kind": kind, "captured": captured, "dropout": DROPOUT, "features": features},
    }
    inputs = Inputs(data, _NETS[kind], dtype, captured, features == "sparse")
    return problem(inputs, facts, prepared=False)


def problem(i: Inputs, facts: dict[str, Any], prepared: bool) -> Problem:
    """The problem whose truth PyG's layers give in float64, the graph as given to them or ``prepared``."""
    results = [
        _results(i, i.net(pyg, prepared).to(precise), i.data.x.to(precise), i.edges(prepared, precise))
        for precise in (torch.float64, i.dtype)
    ]
    expected = [
        truth.Expected(exact, rounded, None, factor)
        for exact, rounded, factor in zip(*results, (2.0, 3.0), strict=True)
    ]
    return Problem(facts, i, device(), lambda results: truth.worst(expected, results))


def _results(i: Inputs, net: torch.nn.Module, x: Tensor, edges: Sequence[Tensor]) -> Sequence[Tensor]:
    """Scores without dropout, and the gradients of all parameters as one."""
    net.eval()
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    scores = net(x, edges)
    gradients = torch.autograd.grad(_loss(i, scores), parameters)
    return scores.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _loss(i: Inputs, scores: Tensor) -> Tensor:
    wide = scores if scores.dtype is torch.float64 else scores.float()
    return F.cross_entropy(wide, i.target)


def training_step(
    i: Inputs, package: Any, *, prepared: bool, captured: bool, compiled: bool = False
) -> Prepared:
    """A step with Adam. Captured, what is checked are the numbers of a replay.

    Args:
        i: What the step is made from.
        package: Whose layers the network has.
        prepared: Whether they are given the loops and weights of :meth:`Inputs.edges`.
        captured: Whether the step is a CUDA graph.
        compiled: Whether the network is under ``torch.compile``.
    """
    net = i.net(package, prepared)
    if compiled:
        compile_in_place(net)
    edges, x = i.edges(prepared), i.x
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005, fused=True, capturable=captured)

    def forward_and_backward() -> Sequence[Tensor]:
        return _results(i, net, x, edges)

    replay = loop.captured(forward_and_backward) if captured else forward_and_backward
    checked = [result.clone() for result in replay()]
    if x.is_cuda:
        torch.cuda.synchronize()
    del replay  # and its graph, with the memory that was read until now
    net.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(i, net(x, edges)).backward()
        optimizer.step()

    call = loop.captured(step) if captured else step
    taken = models.path(net)[0]
    extra = {"loops and weights": "made beforehand" if prepared else "made by the layers"}
    return Prepared(call, lambda: checked, "-" if taken == "pyg" else taken, extra)


def compile_in_place(*modules: torch.nn.Module) -> None:
    """Puts the modules under ``torch.compile``, and forgets others: dynamo gives up if they are many."""
    torch.compiler.reset()
    for module in modules:
        module.compile()


def without_compiled(providers: Mapping[str, Provider]) -> Mapping[str, Provider]:
    """All ``providers``, but where there is no GPU only those that need not compile for minutes."""
    if torch.cuda.is_available():
        return providers
    return {name: provider for name, provider in providers.items() if "compiled" not in name}


def _provider(package: Any, i: Inputs) -> Prepared:
    return training_step(i, package, prepared=i.captured and package is pyg, captured=i.captured)


Bench(
    name="captured_steps",
    sweep=[
        {
            "graph": ("cora", "pubmed"),
            "kind": tuple(_NETS),
            "dtype": (torch.float32, torch.bfloat16),
            "captured": (False, True),
            "features": ("dense",),
            "mode": ("step",),
        },
        {  # bags of words, of which Cora's are 1.3 % dense
            "graph": ("cora", "pubmed"),
            "kind": tuple(_NETS),
            "dtype": (torch.float32,),
            "captured": (False, True),
            "features": ("sparse",),
            "mode": ("step",),
        },
    ],
    problem=_problem,
    providers={
        "graphfuse": functools.partial(_provider, graphfuse.nn),
        "pyg": functools.partial(_provider, pyg),
    },
    take_turns=True,
)
