"""The same inputs give the same bits: every layer, forward and backward, run after run and process after
process, with PyTorch's deterministic mode off, as users have it, and on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphfuse
from tests.reliability import LAYERS, ON_GPU, WIDTH, fused, larger_on_gpu, random_edges, step

ROOT = Path(__file__).parents[2]
HASHED = ("GCNConv, weights", "GATConv")  # few: a new process compiles its kernels
RUNS = 250  # on a GPU: in the interpreter, which runs one program at a time, nothing can race
# cuBLAS would rather have a workspace of fixed size; with one stream it is deterministic without
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*CUBLAS_WORKSPACE_CONFIG.*:UserWarning"),
    larger_on_gpu,
]


def graph(device: torch.device) -> tuple[int, Tensor]:
    """On a GPU many programs at once, and rows that are cut into slices; in the interpreter few."""
    num_nodes, num_edges = (20_000, 500_000) if ON_GPU else (10, 9)
    return num_nodes, random_edges(num_nodes, num_edges, device)


def given(
    name: str, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    num_nodes, edge_index = graph(device)
    layer = LAYERS[name].make().to(device, dtype)
    x = torch.randn(num_nodes, WIDTH, device=device).to(dtype)
    return layer, x, edge_index, LAYERS[name].values(edge_index.size(1), device, dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_repeats_itself(name: str, device: torch.device) -> None:
    # float16 has the kernels that walk windows, and those of edges walk rows
    dtype = torch.float16 if ON_GPU and LAYERS[name].edges is None else torch.float32
    layer, x, edge_index, values = given(name, device, dtype)
    first: dict[str, Tensor] = {}
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        if ON_GPU or not first:  # PyTorch's own operations may add otherwise in the other mode
            first = fused(step, layer, x, edge_index, **values)
            assert bool(first["out"].isfinite().all())
        for run in range(RUNS if ON_GPU else deterministic):
            found = step(layer, x, edge_index, **values)
            for what, tensor in found.items():
                assert torch.equal(tensor, first[what]), f"{what} of run {run} differs ({deterministic=})"


@pytest.mark.parametrize("name", ["GCNConv, weights", "TransformerConv"])
def test_a_record_that_is_built_again_gives_the_same_bits(name: str, device: torch.device) -> None:
    layer, x, edge_index, values = given(name, device, torch.float32)
    first = step(layer, x, edge_index, **values)
    graphfuse.clear_cache()
    found = step(layer, x, edge_index.clone(), **values)
    assert all(torch.equal(found[what], first[what]) for what in first)


def digests() -> list[str]:
    """A line for each layer: a hash of all bits of a training step. What the processes below print."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    lines = []
    for name in HASHED:
        layer, x, edge_index, values = given(name, device, torch.float16 if ON_GPU else torch.float32)
        digest = hashlib.sha256()
        for what, tensor in sorted(fused(step, layer, x, edge_index, **values).items()):
            digest.update(what.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        lines.append(f"{name}: {digest.hexdigest()}")
    return lines


def test_other_processes_give_the_same_bits() -> None:
    code = """
import sys
import torch
if sys.argv[1] == "interpreted":
    from tests.interpreter import prepare
    prepare()
torch.use_deterministic_algorithms(sys.argv[2] == "strict")
from tests.reliability.test_repeats import digests
print("\\n".join(digests()))
"""
    outputs = [] if ON_GPU else [digests()]
    # no operation may refuse PyTorch's strict mode, and objects lie elsewhere in each process
    for mode, seed in (("strict", "1"), ("users", "2")) if ON_GPU else (("strict", "1"),):
        environment = os.environ | {"PYTHONHASHSEED": seed, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        done = subprocess.run(
            [sys.executable, "-c", code, "compiled" if ON_GPU else "interpreted", mode],
            env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout.splitlines())
    assert len(outputs[0]) == len(HASHED)
    assert outputs[0] == outputs[1]
