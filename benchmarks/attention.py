"""Sparse attention, forward and backward, in one head and in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import floors, graphs, peers, truth
from benchmarks.baselines import PygAttention
from benchmarks.bench import Bench, Prepared, Problem, device, machine
from benchmarks.spmm import scatter_installed
from graphfuse import RowWindows, ops
from graphfuse.kernels import launch
from graphfuse.kernels.device import kernel_problem
from graphfuse.reference.attention import kept

_GRAPHS = (
    "cora", "pubmed", "github", "blogcatalog3", "ego-twitter", "dblp-2010", "uniform-1m-12m", "reddit",
    "products", "uniform-2.4m-124m",
)  # fmt: skip
_SHAPES = ((1, 64), (1, 128), (4, 32), (8, 16))  # heads, head_dim
_MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Inputs:
    """What providers are given."""

    graph: graphs.Graph
    operands: truth.Operands

    def run(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], path: str = "-") -> Prepared:
        """``attention`` of q, k and v and, with a gradient of the output, theirs."""
        grad = self.operands.grad
        q, k, v = (x.detach().requires_grad_(grad is not None) for x in self.operands[:3])

        def call() -> Sequence[Tensor]:
            out = attention(q, k, v)
            if grad is None:
                return (out,)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

        return Prepared(call, call, path)


def _problem(
    graph: str, shape: tuple[int, int], dtype: torch.dtype, mode: str, dropout: float = 0.0
) -> Problem:
    loaded = graphs.load(graph, device())
    random = torch.Generator(device()).manual_seed(0)
    size = (loaded.num_nodes, *shape)
    q, k, v, grad = (torch.randn(size, device=device(), generator=random).to(dtype) for _ in range(4))
    backward = mode == "fwd+bwd"
    seed = torch.tensor([1 << 40 | 5], device=device()) if dropout > 0 else None
    operands = truth.Operands(q, k, v, grad if backward else None, dropout, seed)
    expected = _expected(loaded, operands)
    windows = loaded.windows
    rows = launch.attention_prefers_rows(*windows.sizes, *shape, dropout > 0, dtype)
    facts = loaded.facts(dtype)
    facts["extra"] |= {"dropout": dropout} if dropout > 0 else _recorded(loaded, shape, dtype, mode)
    facts["extra"] |= _gathers(windows, rows, shape, dtype)
    floor_ms = None
    if device().type == "cuda":
        floor_ms = floors.attention_ms(windows, rows, *shape, dtype, backward)
    return Problem(
        facts=facts | {"heads": shape[0], "head_dim": shape[1], "mode": mode},
        inputs=Inputs(loaded, operands),
        device=device(),
        check=lambda results: truth.worst(expected, results),
        floor_ms=floor_ms,
        bytes_moved=_bytes_moved(windows, rows, shape, dtype, backward),
    )


def _expected(graph: graphs.Graph, operands: truth.Operands) -> list[truth.Expected]:
    """The output and, with a gradient, dq, dk and dv, on a sample of their rows."""
    source, target = graph.edge_index
    at = truth.sample(target, source, graph.num_nodes)
    both = [truth.attention(at, operands, to) for to in (torch.float64, operands.q.dtype)]
    found = [
        truth.Expected(exact, rounded, at.rows, factor)
        for exact, rounded, factor in zip(*both, (2.0, 3.0), strict=False)
    ]
    if operands.grad is not None:
        at = truth.sample(source, target, graph.num_nodes)
        both = [
            truth.attention_transposed(at, target, source, operands, to)
            for to in (torch.float64, operands.q.dtype)
        ]
        found += [truth.Expected(exact, rounded, at.rows, 3.0) for exact, rounded in zip(*both, strict=True)]
    return found


def _recorded(graph: graphs.Graph, shape: tuple[int, int], dtype: torch.dtype, mode: str) -> dict[str, Any]:
    """Peers' times, which are without dropout, and the best gather that was recorded with them."""
    if dtype is not torch.float16:
        return {}
    case = (machine()["gpu"], graph.name, *shape)
    found = {"peers": peers.times(*case, mode), "recorded_gather_ms": peers.gather_ms(*case)}
    return {key: value for key, value in found.items() if value}


def _gathers(
    windows: RowWindows, rows: bool, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, float | None]:
    """The gathers that the floor is made of."""
    if device().type != "cuda":
        return {}
    row_bytes = shape[0] * shape[1] * dtype.itemsize
    return {
        "gather_ms": floors.gather_ms(windows, rows, row_bytes),
        "gather_kv_ms": floors.gather_kv_ms(windows, rows, row_bytes),
    }


def _bytes_moved(
    windows: RowWindows, rows: bool, shape: tuple[int, int], dtype: torch.dtype, backward: bool
) -> int:
    # a row of two matrices per entry and pass, the structure in each pass, what is streamed
    heads, dim = shape
    gathered = windows.num_edges if rows else windows.num_entries
    row_bytes = heads * dim * dtype.itemsize
    moved = gathered * (2 * row_bytes + (4 if rows else 6)) * (3 if backward else 1)
    if backward:
        moved += gathered * 8 * heads
    return moved + (11 if backward else 2) * windows.shape[0] * row_bytes


def _graphfuse(i: Inputs) -> Prepared:
    windows, dropout, seed = i.graph.windows, i.operands.dropout, i.operands.seed
    path = "fused" if kernel_problem(i.operands.q.device, i.operands.q.dtype) is None else "generic"
    return i.run(lambda q, k, v: ops.sparse_attention(q, k, v, windows, None, dropout, seed), path)


def pyg_layer(i: Inputs) -> PygAttention:
    """PyG's layer, with the weights drawn beforehand that dropout keeps."""
    factor, (q, *_, dropout, seed) = None, i.operands
    if seed is not None:
        factor = kept(i.graph.edge_index, q.size(1), dropout, seed).to(q.dtype) / (1 - dropout)
    return PygAttention(factor)


def _pyg(i: Inputs) -> Prepared:
    layer = pyg_layer(i)
    return i.run(lambda q, k, v: layer(q, k, v, i.graph.edge_index))._replace(extra=scatter_installed())


Bench(
    name="attention",
    sweep=[
        {"graph": _GRAPHS, "shape": _SHAPES, "dtype": (torch.float16,), "mode": _MODES},
        {
            "graph": ("github", "ego-twitter", "reddit"),
            "shape": ((1, 64), (4, 32)),
            "dtype": (torch.bfloat16, torch.float32),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter"),
            "shape": ((1, 128), (4, 64), (8, 16), (8, 8)),
            "dtype": (torch.float32,),
            "mode": _MODES,
        },
        {
            "graph": ("github", "ego-twitter"),
            "shape": (*_SHAPES, (8, 8)),
            "dtype": (torch.float32,),
            "mode": _MODES,
            "dropout": (0.3,),
        },
        {"graph": ("cora", "pubmed"), "shape": ((8, 8),), "dtype": (torch.float32,), "mode": _MODES},
        {
            "graph": ("github", "ego-twitter", "reddit"),
            "shape": _SHAPES,
            "dtype": (torch.float16,),
            "mode": _MODES,
            "dropout": (0.3,),
        },
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "pyg": _pyg},
)
