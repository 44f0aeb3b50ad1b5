"""The attention of GAT, GATv2 and AGNN, forward and backward: one row is gathered for an edge, not two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from benchmarks import floors, gat_moves, graphs, truth
from benchmarks.baselines import PygAdditive
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.spmm import scatter_installed
from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch, walk_rules
from graphfuse.kernels.device import kernel_problem
from graphfuse.ops.unit_rows import unit_rows
from graphfuse.reference.attention import kept

_MODES = ("fwd", "fwd+bwd")
_OF_EDGES = ("edge_score", "edge")  # operands, in the order of the edge list


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    kind: str
    operands: dict[str, Tensor]
    grad: Tensor | None  # of the output; None: forward only
    dropout: float = 0.0  # of GAT, which is trained with it and with a loop for each node
    seed: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the op and its definition are told beside the operands."""
        given = {"dropout": self.dropout, "seed": self.seed, "self_loops": True}
        return {} if self.seed is None else given

    def run(self, attention: Callable[..., Tensor], path: str = "-") -> Prepared:
        """``attention`` of the operands and, with a gradient of the output, theirs."""
        leaves = {name: x.detach().requires_grad_(self.grad is not None) for name, x in self.operands.items()}

        def call() -> Sequence[Tensor]:
            out = attention(**leaves)
            if self.grad is None:
                return (out,)
            return out.detach(), *torch.autograd.grad(out, list(leaves.values()), self.grad)

        return Prepared(call, call, path)


def _agnn(edge_index: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    """AGNN's attention: scores are beta times the cosine of the rows."""
    unit = torch.nn.functional.normalize(x, dim=2)
    out = reference.sparse_attention(edge_index, beta * unit, unit, x, 1.0)
    assert isinstance(out, Tensor)
    return out


_DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "gat": reference.gat_attention,
    "gatv2": reference.gatv2_attention,
    "agnn": _agnn,
}


def _problem(
    graph: str,
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    mode: str,
    dropout: float = 0.0,
    terms: torch.dtype | None = None,
    edges: bool = False,
) -> Problem:
    """One attention.

    ``terms`` is the dtype of GAT's numbers of nodes, where it is not ``dtype``, of which the floor's are.
    With ``edges`` there are numbers of edges, too: one a head, or as many as a row of GATv2 has.
    """
    loaded = graphs.load(graph, device())
    operands, grad = _draw(kind, loaded, *shape, dtype, edges)
    results = terms or dtype  # as PyG has them, and so their gradients
    operands |= {name: operands[name].to(results) for name in ("a_src", "a_dst") if kind == "gat"}
    backward = mode == "fwd+bwd"
    seed = torch.tensor([1 << 40 | 5], device=device()) if dropout > 0 else None
    inputs = Inputs(loaded, kind, operands, grad.to(results) if backward else None, dropout, seed)
    rows = edges or _rows(kind, loaded.windows, shape, backward, dropout > 0, terms or dtype, dtype)
    facts = loaded.facts(dtype)
    facts["extra"] |= {"kind": kind} | ({"dropout": dropout, "self_loops": True} if dropout > 0 else {})
    facts["extra"] |= {} if terms is None else {"terms": str(terms).removeprefix("torch.")}
    facts["extra"] |= {"edges": True} if edges else {}
    floor_ms = None
    if device().type == "cuda":
        numbers = shape[0] * dtype.itemsize
        sizes = {"gather_ms": shape[1] * numbers} | ({"gather_numbers_ms": numbers} if kind == "gat" else {})
        for name, size in sizes.items():
            facts["extra"][name] = floors.gather_ms(loaded.windows, rows, size)
        of_edge = numbers * (1 if kind == "gat" else shape[1]) if edges else 0
        floor_ms = floors.additive_ms(loaded.windows, kind, *shape, dtype, backward, of_edge)
        if kind == "gat" and dropout == 0 and not rows:
            facts["extra"]["moves_ms"] = gat_moves.gat_moves_ms(loaded.windows, *shape, dtype, backward)
    checks = _expected(inputs, grad)
    return Problem(
        facts=facts | {"heads": shape[0], "head_dim": shape[1], "mode": mode},
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([one for _, one in checks], [results[at] for at, _ in checks]),
        floor_ms=floor_ms,
    )


def _draw(
    kind: str, graph: graphs.Graph, heads: int, dim: int, dtype: torch.dtype, edges: bool
) -> tuple[dict[str, Tensor], Tensor]:
    random, num_nodes = torch.Generator(device()).manual_seed(0), graph.num_nodes
    draw = functools.partial(torch.randn, device=device(), generator=random)
    x, grad = (draw(num_nodes, heads, dim) for _ in range(2))
    operands = {
        "gat": lambda: {"a_src": draw(num_nodes, heads), "a_dst": draw(num_nodes, heads), "x": x},
        "gatv2": lambda: {
            "x_src": x,
            "x_dst": draw(num_nodes, heads, dim),
            "att": draw(heads, dim) / dim**0.5,
        },
        "agnn": lambda: {"x": x, "beta": torch.full((1,), 1.5, device=device())},
    }[kind]()
    if edges:
        name, size = ("edge_score", (heads,)) if kind == "gat" else ("edge", (heads, dim))
        operands[name] = draw(graph.edge_index.size(1), *size)
    return {name: value.to(dtype) for name, value in operands.items()}, grad.to(dtype)


def _rows(
    kind: str,
    windows: RowWindows,
    shape: tuple[int, int],
    trained: bool,
    dropout: bool,
    terms: torch.dtype,
    dtype: torch.dtype,
) -> bool:
    """Whether rows are walked, not windows."""
    if kind == "gat":
        which = (*windows.sizes, *shape, trained, dropout)
        listed = walk_rules.gat_lists_edges(*which, dtype)
        return not listed and launch.gat_prefers_rows(*which, terms, dtype)
    return kind == "gatv2" or launch.attention_prefers_rows(*windows.sizes, *shape, False, dtype)


def _expected(i: Inputs, grad: Tensor) -> list[tuple[int, truth.Expected]]:
    """Results on a sample of receivers and, with a gradient, of sources: (position in the results, it).

    Computed by the definition on the edges of the sample alone: all edges into the receivers, and all into
    those that the sources reach.
    """
    source, target = i.graph.edge_index
    at = truth.sample(target, source, i.graph.num_nodes)
    both = [_by_definition(i, at.edge, None, dtype) for dtype in (torch.float64, grad.dtype)]
    checks = [(0, truth.Expected(both[0][0][at.rows], both[1][0][at.rows], at.rows, 2.0))]
    if i.grad is None:
        return checks
    nodes, reached = truth.sample_sources(source, target, i.graph.num_nodes)
    if i.kind == "agnn" or i.options:  # rows of AGNN are receivers, too; with loops sources are
        reached = torch.unique(torch.cat([reached, nodes]))
    edges = truth.edges_of(reached, target, source, i.graph.num_nodes).edge
    both = [_by_definition(i, edges, grad, dtype) for dtype in (torch.float64, grad.dtype)]
    of_sources = {"gat": ("a_src", "x"), "gatv2": ("x_src",), "agnn": ("x",)}[i.kind]
    for at_result, name in enumerate(i.operands, start=1):
        exact, rounded = both[0][at_result], both[1][at_result]
        if name in _OF_EDGES:
            checks.append((at_result, truth.Expected(exact, rounded, edges, 3.0)))
            continue
        wanted = nodes if name in of_sources else reached
        if exact.size(0) == i.graph.num_nodes:  # else a sum over all edges, which tests check
            checks.append((at_result, truth.Expected(exact[wanted], rounded[wanted], wanted, 3.0)))
    return checks


def _by_definition(i: Inputs, edges: Tensor, grad: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    given = {name: x[edges] if name in _OF_EDGES else x for name, x in i.operands.items()}
    leaves = {name: x.to(dtype).requires_grad_(grad is not None) for name, x in given.items()}
    out = _DEFINITIONS[i.kind](i.graph.edge_index[:, edges], **leaves, **i.options)
    if grad is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))]


def _graphfuse(i: Inputs) -> Prepared:
    windows, x = i.graph.windows, next(iter(i.operands.values()))
    path = "fused" if kernel_problem(x.device, x.dtype) is None else "generic"
    if i.kind == "agnn":
        return i.run(functools.partial(_agnn_fused, windows), path)
    op = ops.gat_attention if i.kind == "gat" else ops.gatv2_attention
    return i.run(lambda **operands: op(**operands, windows=windows, **i.options), path)


def _agnn_fused(windows: RowWindows, x: Tensor, beta: Tensor) -> Tensor:
    # as AGNNConv computes it
    query, key, inverse = unit_rows(x.squeeze(1), beta)
    return ops.sparse_attention(query.unsqueeze(1), key.unsqueeze(1), x, windows, 1.0, key_scale=inverse)


def pyg_layer(i: Inputs) -> tuple[PygAdditive, Tensor]:
    """PyG's layer, with the weights drawn beforehand that dropout keeps, and the edges, loops among them."""
    edge_index, factor = i.graph.edge_index, None
    if i.seed is not None:
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=i.graph.num_nodes)
        x = i.operands["x"]
        factor = kept(edge_index, x.size(1), i.dropout, i.seed).to(x.dtype) / (1 - i.dropout)
    return PygAdditive(i.kind, factor), edge_index


def _pyg(i: Inputs) -> Prepared:
    layer, edge_index = pyg_layer(i)
    prepared = i.run(lambda **operands: layer(edge_index, **operands))
    return prepared._replace(extra=scatter_installed())


_LARGE = ("reddit", "uniform-2.4m-124m")
_SHAPES = ((1, 64), (1, 128), (4, 32), (8, 8))  # heads, head_dim
Bench(
    name="additive",
    sweep=[
        {
            "graph": ("github", "ego-twitter", *_LARGE),
            "kind": ("gat", "gatv2"),
            "shape": ((4, 32), (8, 8)),
            "dtype": (torch.float16,),
            "mode": _MODES,
        },
        {
            "graph": ("blogcatalog3", "github", "ego-twitter", "dblp-2010"),
            "kind": ("gat",),
            "shape": ((1, 64), (1, 128), (8, 16)),
            "dtype": (torch.float16,),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter", *_LARGE),
            "kind": ("agnn",),
            "shape": ((1, 64), (1, 128)),
            "dtype": (torch.float16,),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter"),
            "kind": ("gat", "gatv2"),
            "shape": (*_SHAPES, (8, 16)),
            "dtype": (torch.float32,),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter", "dblp-2010", "reddit"),
            "kind": ("gat",),
            "shape": (*_SHAPES, (8, 16)),
            "dtype": (torch.float16,),
            "mode": _MODES,
            "dropout": (0.6,),
        },
        {
            "graph": ("github", "ego-twitter"),
            "kind": ("gat", "gatv2"),
            "shape": (*_SHAPES, (8, 16)),
            "dtype": (torch.float32,),
            "mode": _MODES,
            "dropout": (0.6,),
        },
        {
            "graph": ("blogcatalog3", "github", "ego-twitter", "reddit"),
            "kind": ("gat",),
            "shape": ((1, 64), (1, 128), (4, 32), (8, 16)),
            "dtype": (torch.float16,),
            "mode": _MODES,
            "terms": (torch.float32,),
        },
        {
            "graph": ("cora", "pubmed", "blogcatalog3"),
            "kind": ("gatv2",),
            "shape": ((4, 32), (8, 8)),
            "dtype": (torch.float16,),
            "mode": _MODES,
        },
        {
            "graph": ("cora", "github", "ego-twitter", "reddit"),
            "kind": ("gatv2",),
            "shape": ((1, 64), (1, 128), (8, 16)),
            "dtype": (torch.float16,),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter"),
            "kind": ("gatv2",),
            "shape": ((4, 32), (8, 8)),
            "dtype": (torch.float16,),
            "mode": _MODES,
            "dropout": (0.6,),
        },
        {
            "graph": ("github", "ego-twitter"),
            "kind": ("gat", "gatv2"),
            "shape": ((1, 64), (4, 32), (8, 8)),
            "dtype": (torch.float16, torch.float32),
            "mode": _MODES,
            "edges": (True,),
        },
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "pyg": _pyg},
)
