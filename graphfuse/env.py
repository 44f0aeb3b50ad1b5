"""What is installed, what can fuse, and whether the numbers are right on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse
from graphfuse import RowWindows, ops, reference
from graphfuse.kernels.device import has_triton, kernel_problem
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS, check

OPTIONAL = (
    *("matplotlib", "ogb", "pandas", "pyg_lib", "scipy", "tabulate", "torch_scatter", "torch_sparse"),
    "torchmetrics",
)
VARIABLES = (
    *("GRAPHFUSE_DATA", "GRAPHFUSE_DISABLE", "GRAPHFUSE_STRICT", "GRAPHFUSE_CHECK", "GRAPHFUSE_COMMIT"),
    *("TRITON_INTERPRET", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"),
)
# First and last versions that the tests have passed with; other ones may work as well
TESTED = {
    "torch": ((2, 11), (2, 13)),
    "torch_geometric": ((2, 7), (2, 8)),
    "triton": ((3, 6), (3, 9)),
}
# Every layer, for 8 features: graphfuse's from `graphfuse.nn`, and what it must equal
_LAYERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "GCNConv": lambda kind: kind(8, 4),
    "GATConv": lambda kind: kind(8, 4, heads=2),
    "GATv2Conv": lambda kind: kind(8, 4, heads=2),
    "AGNNConv": lambda kind: kind(),
    "TransformerConv": lambda kind: kind(8, 4, heads=2),
    "GraphTransformerLayer": lambda kind: kind(8, heads=2, norm="layer"),
}


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


def untested() -> Iterator[str]:
    """A sentence for each installed package whose version lies outside :data:`TESTED`."""
    for name, (first, last) in TESTED.items():
        found = _version(name)
        release = re.match(r"(\d+)\.(\d+)", found or "")
        if release is not None and not first <= (int(release[1]), int(release[2])) <= last:
            tested = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys((first, last)))
            yield (
                f"graphfuse is tested with {name} {tested} (found {found}); `graphfuse doctor` checks the "
                "numbers on this machine"
            )


def _driver() -> str | None:
    """Version of NVIDIA's driver, also where torch was built without CUDA."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def kernel_cache() -> dict[str, Any]:
    """``path`` of the folder where Triton keeps compiled kernels, and whether it is ``writable``."""
    path = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    try:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError:  # a folder of somebody else's, or a name that is too long
        writable = False
    return {"path": str(path), "writable": writable}


def describe() -> dict[str, Any]:
    """Versions, devices, the kernel cache, optional packages, settings, and which layers can fuse here."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    others = sorted(k for k in os.environ if k.startswith(("GRAPHFUSE_", "TRITON_")) and k not in VARIABLES)
    return {
        "versions": {**versions(), "driver": _driver()},
        "gpus": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_gib": round(gpu.total_memory / 2**30, 1),
            }
            for gpu in gpus
        ],
        "kernel_cache": kernel_cache(),
        "optional": {name: _version(name) for name in OPTIONAL},
        "environment": {name: os.environ.get(name) for name in (*VARIABLES, *others)},
        "layers": layers(_device()),
    }


def layers(device: torch.device) -> dict[str, list[str]]:
    """Why each layer would not fuse for an ordinary float32 input on ``device``; empty: it fuses."""
    edge_index = torch.tensor([[0, 1], [1, 0]], device=device)
    x = torch.ones(2, 8, device=device)
    with _own_random_numbers():
        made = {name: make(getattr(graphfuse.nn, name)).to(device) for name, make in _LAYERS.items()}
    return {name: graphfuse.why_not(layer, x, edge_index) for name, layer in made.items()}


def self_check() -> Iterator[tuple[str, str | None]]:
    """Runs small numerical checks on this machine: ``(what, problem or None)`` one by one.

    Kernels are checked where they run, else the paths that run instead of them.
    """
    device = _device()
    where = f"on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "on the CPU"
    if device.type == "cuda" and not has_triton():
        yield "triton is installed", "triton is missing; it comes with torch's CUDA wheel"
    for graph in ("hub", "repeated", "bipartite"):
        yield f"row windows of {graph!r} {where}", _problem(_check_windows, graph, device)
        for dtype in (torch.float32, torch.float16):
            path = "kernels" if kernel_problem(device, dtype) is None else "definition"
            name = str(dtype).removeprefix("torch.")
            yield f"aggregation of {graph!r} in {name} ({path})", _problem(_check_spmm, graph, dtype, device)
    for name, reasons in layers(device).items():
        whose = "PyG's" if hasattr(pyg, name) else "its definition"
        what = f"{name} equals {whose}, forward and backward ({'PyG path' if reasons else 'kernels'})"
        yield what, _problem(_check_layer, name, device, not reasons)


def hints() -> Iterator[str]:
    """What to do about what is not wrong yet, a sentence each."""
    yield from untested()
    cache = kernel_cache()
    if not cache["writable"]:
        yield (
            f"the kernel cache {cache['path']} cannot be written to, so that kernels cannot be compiled; set "
            "TRITON_CACHE_DIR to a folder on a local disk"
        )


def _device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def _without_strict() -> Iterator[None]:
    # both paths are checked, also the one that GRAPHFUSE_STRICT=1 forbids
    strict = os.environ.pop("GRAPHFUSE_STRICT", None)
    try:
        yield
    finally:
        if strict is not None:
            os.environ["GRAPHFUSE_STRICT"] = strict


def _problem(run: Any, *arguments: Any) -> str | None:
    try:
        with _own_random_numbers(), _without_strict():
            run(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
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


def _check_layer(name: str, device: torch.device, fuses: bool) -> None:
    edge_index, (num_nodes, _) = GRAPHS["repeated"](device)
    theirs = _LAYERS[name](getattr(pyg, name, None) or getattr(reference, name))
    ours = _LAYERS[name](getattr(graphfuse.nn, name))
    ours.load_state_dict(theirs.state_dict())
    x, cotangent = torch.randn(num_nodes, 8), torch.randn(num_nodes, 8)  # wide enough for every output
    exact = _results(theirs.to(device, torch.float64), x, edge_index, cotangent)
    actual = _results(ours.to(device), x, edge_index, cotangent)
    if fuses and path_taken(ours):
        raise RuntimeError(f"it was to run fused, but {'; '.join(path_taken(ours) or ())}")
    for what, value in actual.items():
        torch.testing.assert_close(
            value.double(), exact[what], rtol=1e-4, atol=1e-4, msg=functools.partial("{}: {}".format, what)
        )


def _results(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    dtype = next(layer.parameters()).dtype
    x = x.to(edge_index.device, dtype).requires_grad_()
    out = layer(x, edge_index)
    (out * cotangent[:, : out.size(1)].to(out)).sum().backward()
    gradients = {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    found = {f"gradient of {name}": value for name, value in gradients.items() if value is not None}
    return {"output": out.detach(), **found}
