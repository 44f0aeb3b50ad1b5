"""Dot-product attention whose edges carry numbers, as of TransformerConv with ``edge_dim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.utils import softmax

from benchmarks import floors, graphs, truth
from benchmarks.bench import Bench, Prepared, Problem, device
from benchmarks.spmm import scatter_installed
from graphfuse import ops, reference
from graphfuse.kernels.device import kernel_problem

_MODES = ("fwd", "fwd+bwd")
_OF_SOURCES, _OF_EDGES = ("k", "v"), "edge_attr"
Results = tuple[Tensor, Tensor]  # the output, and the weighted sums of the edges' numbers


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    operands: dict[str, Tensor]  # q, k, v, edge_query, edge_attr
    grads: Results | None  # of both results; None: forward only

    def run(self, attention: Callable[..., Results], path: str = "-") -> Prepared:
        """``attention`` of the operands and, with gradients of its results, theirs."""
        leaves = {
            name: x.detach().requires_grad_(self.grads is not None) for name, x in self.operands.items()
        }

        def call() -> Sequence[Tensor]:
            results = attention(**leaves)
            if self.grads is None:
                return results
            return *(x.detach() for x in results), *torch.autograd.grad(
                results, [*leaves.values()], self.grads
            )

        return Prepared(call, call, path)


def _problem(graph: str, shape: tuple[int, int], edge_dim: int, dtype: torch.dtype, mode: str) -> Problem:
    """Heads and their features, and numbers of an edge, which all heads share."""
    loaded, backward = graphs.load(graph, device()), mode == "fwd+bwd"
    random = torch.Generator(device()).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device(), generator=random).to(dtype)

    nodes, edges, (heads, dim) = loaded.num_nodes, loaded.edge_index.size(1), shape
    operands = {name: draw(nodes, heads, dim) for name in "qkv"}
    operands |= {"edge_query": draw(nodes, heads, edge_dim), _OF_EDGES: draw(edges, edge_dim)}
    grads = (draw(nodes, heads, dim), draw(nodes, heads, edge_dim))
    inputs = Inputs(loaded, operands, grads if backward else None)
    checks = _expected(inputs, grads)
    floor_ms = None
    if device().type == "cuda":
        floor_ms = _floor_ms(loaded, heads, dim, edge_dim, dtype, backward)
    facts = loaded.facts(dtype)
    facts["extra"] |= {"kind": f"{edge_dim} numbers"}
    return Problem(
        facts=facts | {"heads": heads, "head_dim": dim, "mode": mode},
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst([one for _, one in checks], [results[at] for at, _ in checks]),
        floor_ms=floor_ms,
    )


def _floor_ms(
    graph: graphs.Graph, heads: int, dim: int, edge_dim: int, dtype: torch.dtype, backward: bool
) -> float | None:
    """The floor of attention by rows, with the edges' numbers and sums of them streamed.

    Numbers in each walk, and their gradient once; queries and sums of theirs, and with ``backward`` those
    again, with the gradients of both.
    """
    known = floors.attention_ms(graph.windows, True, heads, dim, dtype, backward)
    if known is None:
        return None
    of_edges = (4 if backward else 1) * graph.edge_index.size(1) * edge_dim
    of_nodes = (6 if backward else 2) * graph.num_nodes * heads * edge_dim
    return known + (of_edges + of_nodes) * dtype.itemsize / floors.copy_bytes_per_ms(device())


def _expected(i: Inputs, grads: Results) -> list[tuple[int, truth.Expected]]:
    """Results on a sample of receivers and, with gradients, of sources and edges: (position, it).

    Computed by the definition on the edges of the sample alone: all edges into the receivers, and all into
    those that the sources reach.
    """
    source, target = i.graph.edge_index
    at, dtypes = truth.sample(target, source, i.graph.num_nodes), (torch.float64, grads[0].dtype)
    both = [_by_definition(i, at.edge, None, dtype) for dtype in dtypes]
    checks = [(n, truth.Expected(both[0][n][at.rows], both[1][n][at.rows], at.rows, 2.0)) for n in range(2)]
    if i.grads is None:
        return checks
    nodes, reached = truth.sample_sources(source, target, i.graph.num_nodes)
    edges = truth.edges_of(reached, target, source, i.graph.num_nodes).edge
    both = [_by_definition(i, edges, grads, dtype) for dtype in dtypes]
    for place, name in enumerate(i.operands, start=2):
        exact, rounded = both[0][place], both[1][place]
        if name == _OF_EDGES:
            checks.append((place, truth.Expected(exact, rounded, edges, 3.0)))
        else:
            wanted = nodes if name in _OF_SOURCES else reached
            checks.append((place, truth.Expected(exact[wanted], rounded[wanted], wanted, 3.0)))
    return checks


def _by_definition(i: Inputs, edges: Tensor, grads: Results | None, dtype: torch.dtype) -> list[Tensor]:
    given = {name: x[edges] if name == _OF_EDGES else x for name, x in i.operands.items()}
    leaves = {name: x.to(dtype).requires_grad_(grads is not None) for name, x in given.items()}
    q, k, v, edge_query, edge_attr = leaves.values()
    edge_index = i.graph.edge_index[:, edges]
    results = reference.sparse_attention(edge_index, q, k, v, edge_query=edge_query, edge_attr=edge_attr)
    assert isinstance(results, tuple)
    if grads is None:
        return [*results]
    found = torch.autograd.grad(results, [*leaves.values()], [grad.to(dtype) for grad in grads])
    return [*(x.detach() for x in results), *found]


def _graphfuse(i: Inputs) -> Prepared:
    windows, x = i.graph.windows, i.operands["q"]
    path = "fused" if kernel_problem(x.device, x.dtype) is None else "generic"

    def attention(q: Tensor, k: Tensor, v: Tensor, edge_query: Tensor, edge_attr: Tensor) -> Results:
        return ops.sparse_attention(q, k, v, windows, edge_query=edge_query, edge_attr=edge_attr)

    return i.run(attention, path)


def _pyg(i: Inputs) -> Prepared:
    """The steps of PyG's TransformerConv, the map of the edges' numbers applied to queries and sums."""
    source, target = i.graph.edge_index

    def attention(q: Tensor, k: Tensor, v: Tensor, edge_query: Tensor, edge_attr: Tensor) -> Results:
        score = (q[target] * k[source]).sum(2) + (edge_query[target] * edge_attr.unsqueeze(1)).sum(2)
        alpha = softmax(score / math.sqrt(q.size(2)), target, num_nodes=q.size(0)).unsqueeze(2)
        sums = (torch.zeros_like(like) for like in (q, edge_query))
        messages = (alpha * v[source], alpha * edge_attr.unsqueeze(1))
        out, edge_sum = (x.index_add(0, target, one) for x, one in zip(sums, messages, strict=True))
        return out, edge_sum

    return i.run(attention)._replace(extra=scatter_installed())


Bench(
    name="edge_attention",
    sweep=[
        {
            "graph": ("github", "ego-twitter"),
            "shape": ((1, 64), (4, 32), (8, 8)),
            "edge_dim": (16,),
            "dtype": (torch.float16, torch.float32),
            "mode": _MODES,
        },
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "pyg": _pyg},
)
