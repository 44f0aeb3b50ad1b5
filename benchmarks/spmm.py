"""Aggregation: plain, with edge weights, normalised as in GCNConv, and followed by a dense layer."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_geometric.typing
from torch import Tensor

from benchmarks import floors, graphs, moves, truth
from benchmarks.baselines import PygSum, SparseSum
from benchmarks.bench import Bench, Prepared, Problem, device
from graphfuse import ops
from graphfuse.kernels import launch
from graphfuse.kernels.device import kernel_problem

_GRAPHS = (
    "cora", "pubmed", "github", "blogcatalog3", "ego-twitter", "dblp-2010", "uniform-1m-12m", "reddit",
    "products",
)  # fmt: skip
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Inputs:
    """What the aggregation's providers are given."""

    graph: graphs.Graph
    x: Tensor
    edge_weight: Tensor | None
    cotangent: Tensor | None  # None: forward only
    factor: Tensor | None = None  # of each node; those of an edge's ends make its weight

    def run(self, product: Callable[[Tensor], Tensor], path: str = "-") -> Prepared:
        """``product`` of x and, with a cotangent, its gradient in x."""
        x = self.x.detach().requires_grad_(self.cotangent is not None)

        def call() -> Sequence[Tensor]:
            out = product(x)
            if self.cotangent is None:
                return (out,)
            return out.detach(), *torch.autograd.grad(out, x, self.cotangent)

        return Prepared(call, call, path)


def _problem(graph: str, head_dim: int, dtype: torch.dtype, mode: str, edges: str = "plain") -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    size = (loaded.num_nodes, head_dim)
    x, cotangent = (torch.randn(size, device=device(), generator=random).to(dtype) for _ in range(2))
    weighted = edges == "weighted"  # with numbers that no node has
    weight = factor = None
    if weighted:
        weight = torch.rand(loaded.num_edges, device=device(), generator=random).to(dtype)
    backward = mode == "fwd+bwd"
    source, target = loaded.edge_index
    if edges == "normalized":
        factor = torch.bincount(target, minlength=loaded.num_nodes).clamp(min=1).float().rsqrt()
        weight = factor[source] * factor[target]  # what is exact is not rounded
    expected = [_expected(truth.sample(target, source, size[0]), x, weight, 2.0)]
    if backward:
        expected.append(_expected(truth.sample(source, target, size[0]), cotangent, weight, 3.0))
    windows = loaded.windows
    rows = weighted or launch.prefers_rows(*windows.sizes, head_dim, dtype, False)
    facts = loaded.facts(dtype) | {"heads": 1, "head_dim": head_dim, "mode": mode}
    floor_ms = None
    if device().type == "cuda":
        of_walks = [floors.spmm_ms(windows, rows, head_dim, dtype, backward)]
        if rows and not weighted:  # windows could have been walked
            of_walks.append(floors.spmm_ms(windows, False, head_dim, dtype, backward))
        floor_ms = min((ms for ms in of_walks if ms is not None), default=None)
        if not rows:
            facts["extra"]["moves_ms"] = moves.moves_ms(windows, head_dim, dtype, backward)
        if not (backward or rows):
            facts["extra"]["gather_by_task_ms"] = floors.gather_by_task_ms(windows, head_dim * dtype.itemsize)
            facts["extra"] |= {f"launch_{n}_ms": floors.launch_ms(n, device()) for n in (1, 2)}
    gathered = loaded.num_edges if rows else windows.num_entries
    per_pass = (gathered + loaded.num_nodes) * head_dim * dtype.itemsize + gathered * (4 if rows else 6)
    if factor is not None:
        per_pass += (gathered + loaded.num_nodes) * factor.itemsize
    elif weight is not None:
        per_pass += weight.nbytes
    weight = None if weight is None else weight.to(dtype)
    return Problem(
        facts=facts,
        inputs=Inputs(loaded, x, weight, cotangent if backward else None, factor),
        device=device(),
        check=lambda results: truth.worst(expected, results),
        floor_ms=floor_ms,
        bytes_moved=per_pass * (1 + backward),
    )


def _expected(at: truth.Rows, x: Tensor, weight: Tensor | None, factor: float) -> truth.Expected:
    exact = truth.row_sum(at, x, weight, torch.float64)
    return truth.Expected(exact, truth.row_sum(at, x, weight, x.dtype), at.rows, factor)


def _path(x: Tensor) -> str:
    return "fused" if kernel_problem(x.device, x.dtype) is None else "generic"


def _graphfuse(i: Inputs) -> Prepared:
    windows = i.graph.windows
    if i.factor is not None:
        return i.run(lambda x: ops.spmm(windows, x, row_scale=i.factor, col_scale=i.factor), _path(i.x))
    return i.run(lambda x: ops.spmm(windows, x, i.edge_weight), _path(i.x))


def scatter_installed() -> dict[str, str]:
    """The version of torch_scatter if PyG found it: where PyG prefers it, it takes it unasked."""
    if not torch_geometric.typing.WITH_TORCH_SCATTER:
        return {}
    return {"torch_scatter": importlib.metadata.version("torch_scatter")}


def _pyg(i: Inputs) -> Prepared:
    layer = PygSum()
    prepared = i.run(lambda x: layer(x, i.graph.edge_index, i.edge_weight))
    return prepared._replace(extra=scatter_installed())


def _torch_sparse(i: Inputs) -> Prepared:
    return i.run(SparseSum(i.graph.edge_index, i.graph.num_nodes, i.x.dtype, i.edge_weight))


Bench(
    name="spmm",
    sweep=[{"graph": _GRAPHS, "head_dim": (64, 128), "dtype": _DTYPES, "mode": _MODES}],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "pyg": _pyg, "torch.sparse": _torch_sparse},
)

Bench(
    name="spmm_weighted",
    sweep=[
        {
            "graph": ("cora", "github", "ego-twitter", "uniform-1m-12m", "reddit"),
            "head_dim": (64,),
            "dtype": (torch.float16, torch.float32),
            "mode": _MODES,
        }
    ],
    problem=functools.partial(_problem, edges="weighted"),
    providers={"graphfuse": _graphfuse, "pyg": _pyg, "torch.sparse": _torch_sparse},
)


Bench(
    name="spmm_normalized",
    sweep=[
        {
            "graph": ("cora", "pubmed", "github", "blogcatalog3", "ego-twitter", "dblp-2010", "reddit"),
            "head_dim": (64, 128),
            "dtype": _DTYPES,
            "mode": _MODES,
        }
    ],
    problem=functools.partial(_problem, edges="normalized"),
    providers={"graphfuse": _graphfuse, "pyg": _pyg, "torch.sparse": _torch_sparse},
)


@dataclass(frozen=True)
class LayerInputs:
    """What providers of relu(A X W^T + b) are given."""

    graph: graphs.Graph
    x: Tensor
    weight: Tensor
    bias: Tensor

    def around(self, product: Callable[[Tensor], Tensor]) -> Prepared:
        """The layer from an aggregation, which runs on the narrower side."""

        def call() -> Sequence[Tensor]:
            if self.weight.size(0) < self.weight.size(1):
                return ((product(self.x @ self.weight.t()) + self.bias).relu(),)
            return (torch.addmm(self.bias, product(self.x), self.weight.t()).relu(),)

        return Prepared(call, call)


def _layer_problem(graph: str, shape: tuple[int, int], dtype: torch.dtype, mode: str) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    dim, out_dim = shape
    x = torch.randn(loaded.num_nodes, dim, device=device(), generator=random).to(dtype)
    weight = (torch.randn(out_dim, dim, device=device(), generator=random) / dim**0.5).to(dtype)
    bias = torch.randn(out_dim, device=device(), generator=random).to(dtype)
    source, target = loaded.edge_index
    at = truth.sample(target, source, loaded.num_nodes)
    exact, rounded = (
        torch.relu(truth.row_sum(at, x, None, to) @ weight.t().to(to) + bias.to(to))
        for to in (torch.float64, dtype)
    )
    expected = truth.Expected(exact, rounded, at.rows, 2.0)
    facts = loaded.facts(dtype) | {"heads": 1, "head_dim": out_dim, "mode": mode}
    facts["extra"] = facts["extra"] | {"in_dim": dim}
    return Problem(
        facts=facts,
        inputs=LayerInputs(loaded, x, weight, bias),
        device=device(),
        check=lambda results: truth.worst([expected], results),
    )


def _graphfuse_layer(i: LayerInputs) -> Prepared:
    windows = i.graph.windows

    def call() -> Sequence[Tensor]:
        return (ops.spmm_gemm(windows, i.x, i.weight, i.bias, "relu"),)

    return Prepared(call, call, _path(i.x))


def _pyg_layer(i: LayerInputs) -> Prepared:
    layer = PygSum()
    return i.around(lambda x: layer(x, i.graph.edge_index))._replace(extra=scatter_installed())


def _torch_sparse_layer(i: LayerInputs) -> Prepared:
    return i.around(SparseSum(i.graph.edge_index, i.graph.num_nodes, i.x.dtype))


Bench(
    name="spmm_gemm",
    sweep=[
        {"graph": on, "shape": (shape,), "dtype": _DTYPES, "mode": ("fwd",)}
        for on, shape in (
            (("cora",), (1433, 16)),
            (("pubmed", "github"), (64, 64)),
            (("ego-twitter",), (128, 128)),
            (("reddit",), (602, 128)),
        )
    ],
    problem=_layer_problem,
    providers={"graphfuse": _graphfuse_layer, "pyg": _pyg_layer, "torch.sparse": _torch_sparse_layer},
)
