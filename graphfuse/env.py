"""What is installed, what can fuse, and whether the numbers are right on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import graphfuse
from graphfuse import RowWindows, ops, reference
from graphfuse.kernels.device import has_triton, kernel_problem
from graphfuse.testing import GRAPHS, check

_OPTIONAL = ("triton", "torch_scatter", "torch_sparse", "ogb", "torchmetrics", "matplotlib", "pandas")


def versions() -> dict[str, str | None]:
    """Versions of graphfuse and of what its results depend on."""
    found: dict[str, str | None] = {"graphfuse": graphfuse.__version__, "python": platform.python_version()}
    for name in ("torch", "torch_geometric", "numpy", "triton"):
        found[name] = _version(name)
    found["cuda"] = torch.version.cuda
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Versions, devices, the kernel cache, optional packages, and which layers can fuse here."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return {
        "versions": versions(),
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
            }
            for i in range(torch.cuda.device_count())
        ],
        "kernel_cache": {"path": str(cache), "writable": os.access(existing, os.W_OK)},
        "optional": {name: _version(name) for name in _OPTIONAL},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("GRAPHFUSE_", "TRITON_"))},
        "layers": layers(device),
    }


def layers(device: torch.device) -> dict[str, list[str]]:
    """Why each layer would not fuse for an ordinary float32 input on ``device``; empty: it fuses."""
    edge_index = torch.tensor([[0, 1], [1, 0]], device=device)
    x = torch.ones(2, 4, device=device)
    kinds = (graphfuse.nn.GCNConv, graphfuse.nn.TransformerConv, graphfuse.nn.GraphTransformerLayer)
    return {kind.__name__: graphfuse.why_not(kind(4, 4).to(device), x, edge_index) for kind in kinds}


def self_check() -> Iterator[tuple[str, str | None]]:
    """Runs small numerical checks on this machine: ``(what, problem or None)`` one by one.

    Kernels are checked where they run, else the paths that run instead of them.
    """
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    runs = kernel_problem(device, torch.float32) is None
    where = f"on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "on the CPU"
    if device.type == "cuda" and not has_triton():
        yield "triton is installed", "triton is missing; it comes with torch's CUDA wheel"
    for graph in ("hub", "repeated", "bipartite"):
        yield f"row windows of {graph!r} {where}", _problem(_check_windows, graph, device)
        for dtype in (torch.float32, torch.float16):
            kind = "kernels" if runs else "definition"
            name = str(dtype).removeprefix("torch.")
            yield f"aggregation of {graph!r} in {name} ({kind})", _problem(_check_spmm, graph, dtype, device)
    yield f"GCNConv equals PyG's {where}", _problem(_check_gcn, device)


def _problem(run: Any, *arguments: Any) -> str | None:
    try:
        run(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_windows(graph: str, device: torch.device) -> None:
    edge_index, size = GRAPHS[graph](device)
    RowWindows.from_edge_index(edge_index, size).validate()


def _check_spmm(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    edge_index, size = GRAPHS[graph](device)
    windows = RowWindows.from_edge_index(edge_index, size)
    x = torch.randn(size[0], 24, device=device).to(dtype).requires_grad_()
    check(
        lambda x: ops.spmm(windows, x),
        lambda x: reference.spmm(edge_index, x, num_dst=size[1]),
        {"x": x},
    )


def _check_gcn(device: torch.device) -> None:
    import torch_geometric.nn as pyg

    edge_index, (num_nodes, _) = GRAPHS["self_loops"](device)
    ours, theirs = graphfuse.nn.GCNConv(8, 4).to(device), pyg.GCNConv(8, 4).to(device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(num_nodes, 8, device=device)
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index), rtol=1e-4, atol=1e-5)
