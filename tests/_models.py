"""Small models of PyG's layers, as users write them, each with what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor

WIDTH, OUT, EDGE_DIM = 4, 3, 2
NUM_NODES = 7
# One node without edges, two self-loops, one repeated edge
EDGES = torch.tensor([[0, 1, 2, 4, 4, 5, 3, 2, 5, 1, 1], [1, 0, 0, 3, 3, 0, 3, 2, 4, 5, 2]])
TYPES = [("user", "likes", "item"), ("item", "liked", "user")]


class Inputs:
    """What the models are called with, on one device; the same numbers in every object."""

    def __init__(self, device: Any = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.x = draw(NUM_NODES, WIDTH).requires_grad_()
        self.edge_index = EDGES.to(device)
        self.edge_attr = draw(EDGES.size(1), EDGE_DIM)
        self.edge_weight = draw(EDGES.size(1)).abs()
        self.layers = draw(NUM_NODES, 2, WIDTH).requires_grad_()
        self.x_dict = {"user": self.x, "item": draw(5, WIDTH).requires_grad_()}
        likes = torch.tensor([[0, 1, 2, 6, 6, 3], [0, 0, 4, 1, 1, 2]], device=device)
        self.edge_index_dict = {TYPES[0]: likes, TYPES[1]: likes.flip(0)}


class Stack(torch.nn.Module):
    """Convolutions in a ModuleList; the last two are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([pyg.GCNConv(WIDTH, 4), pyg.GATv2Conv(4, 2, heads=2)])
        self.convs.append(self.convs[1])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Deep(torch.nn.Module):
    """Blocks of the deep GCN; the second recomputes its convolution in backward."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.LayerNorm(4)
        self.lin = torch.nn.Linear(WIDTH, 4)
        self.first = pyg.DeepGCNLayer(pyg.GATConv(4, 4), norm, torch.nn.ReLU(), dropout=0.0)
        self.second = pyg.DeepGCNLayer(pyg.GCNConv(4, 4), norm, torch.nn.ELU(), dropout=0.0, ckpt_grad=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(self.lin(x), edge_index), edge_index)


class Jumping(torch.nn.Module):
    """GCN and AGNN, joined by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GCNConv(WIDTH, 4), pyg.AGNNConv()
        self.jump = pyg.JumpingKnowledge("lstm", 4, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first = self.first(x, edge_index).relu()
        return self.jump([first, self.second(first, edge_index)])


class Pooling(torch.nn.Module):
    """A pooling of nodes whose scores a GCNConv gives."""

    def __init__(self, pool: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.pool = pool(WIDTH, GNN=pyg.GCNConv)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.pool(x, edge_index)[0]


class Encoder(torch.nn.Module):
    """Mean and scale of a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, 4, cached=True)
        self.mean, self.log_std = pyg.GCNConv(4, 2, cached=True), pyg.GCNConv(4, 2, cached=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index).relu()
        return self.mean(x, edge_index), self.log_std(x, edge_index)


class Attending(torch.nn.Module):
    """TransformerConv with a gate and edge features, then averaged heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.TransformerConv(WIDTH, 2, heads=2, beta=True, edge_dim=EDGE_DIM)
        self.second = pyg.TransformerConv(-1, OUT, heads=2, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index)


class OfTypes(torch.nn.Module):
    """A convolution for each type of edges, of lazy sizes."""

    def __init__(self) -> None:
        super().__init__()
        convs = {kind: pyg.GATConv((-1, -1), 2, add_self_loops=False) for kind in TYPES}
        self.convs = torch.nn.ModuleList([pyg.HeteroConv(convs, aggr="sum")])

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict


class Homogeneous(torch.nn.Module):
    """What to_hetero makes copies of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.GATConv((-1, -1), 4, add_self_loops=False)
        self.second = pyg.GATConv((-1, -1), OUT, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def of_types() -> torch.nn.Module:
    """Homogeneous, for every type of edges."""
    return pyg.to_hetero(Homogeneous(), (["user", "item"], TYPES), aggr="mean")


def sequence() -> torch.nn.Module:
    """PyG's Sequential."""
    return pyg.Sequential(
        "x, edge_index, edge_weight",
        [
            (pyg.GCNConv(-1, 4), "x, edge_index, edge_weight -> x"),
            torch.nn.ReLU(inplace=True),
            (pyg.GCNConv(4, OUT, normalize=False), "x, edge_index -> x"),
        ],
    )


def mixed() -> torch.nn.Module:
    """PyG's GPSConv: a GATConv beside dense attention."""
    return pyg.GPSConv(4, pyg.GATConv(4, 2, heads=2, residual=True), heads=1)


class Case(NamedTuple):
    """How a model is made, the names of what it is called with, and its layers that have twins."""

    make: Callable[[], torch.nn.Module]
    names: str = "x edge_index"
    swapped: int = 2

    def arguments(self, inputs: Inputs) -> list[Any]:
        """What the model is called with."""
        return [getattr(inputs, name) for name in self.names.split()]


MODELS: dict[str, Case] = {
    "GCN": Case(lambda: pyg.GCN(WIDTH, 5, 2, OUT, norm="batch"), "x edge_index edge_weight"),
    "GCN jk": Case(lambda: pyg.GCN(-1, 5, 2, OUT, jk="cat")),
    "GAT": Case(lambda: pyg.GAT(WIDTH, 6, 2, OUT, heads=2)),
    "GATv2": Case(lambda: pyg.GAT(WIDTH, 6, 2, OUT, v2=True, heads=2, residual=True)),
    "GraphUNet": Case(lambda: pyg.GraphUNet(WIDTH, 4, OUT, depth=1), swapped=3),
    "DeepGCN": Case(Deep),
    "JumpingKnowledge": Case(Jumping),
    "Sequential": Case(sequence, "x edge_index edge_weight"),
    "ModuleList": Case(Stack),
    "HeteroConv": Case(OfTypes, "x_dict edge_index_dict"),
    "to_hetero": Case(of_types, "x_dict edge_index_dict", 4),
    "TransformerConv": Case(Attending, "x edge_index edge_attr"),
    "GATConv": Case(lambda: pyg.GATConv(WIDTH, 2, edge_dim=EDGE_DIM), "x edge_index edge_attr", 1),
    "GPSConv": Case(mixed, swapped=1),
    "SAGPooling": Case(lambda: Pooling(pyg.SAGPooling), swapped=1),
    "ASAPooling": Case(lambda: Pooling(pyg.ASAPooling), swapped=1),
    "VGAE": Case(lambda: pyg.VGAE(Encoder()), swapped=3),
    "GraphSAGE": Case(lambda: pyg.GraphSAGE(WIDTH, 5, 2, OUT), swapped=0),
    "DNAConv": Case(lambda: pyg.DNAConv(4), "layers edge_index", 0),
    "LINKX": Case(lambda: pyg.LINKX(NUM_NODES, WIDTH, 4, OUT, 1), swapped=0),
}


def tensors(result: Any) -> list[Tensor]:
    """Those of a model's result."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [tensor for part in parts for tensor in tensors(part)]


def run(model: torch.nn.Module, case: Case, inputs: Inputs) -> list[Tensor]:
    """The result, then the gradients of the parameters and of the arguments."""
    arguments = case.arguments(inputs)
    with torch.backends.cudnn.flags(False):  # its LSTM rounds to TF32, and wants its weights in one piece
        results = tensors(model(*arguments))
        leaves = [tensor for tensor in (*model.parameters(), *tensors(arguments)) if tensor.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        # uneven cotangents: batch norm and softmax are blind to ones
        cotangents = [torch.linspace(-1, 2, r.numel()).view_as(r).to(r) for r in results]
        torch.autograd.backward(results, cotangents)
    # copied, and read by backward, which recomputed layers need
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return [result.detach() for result in results] + grads
