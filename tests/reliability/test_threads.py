"""Many at once: threads, streams, processes that compile, and a kernel cache that nobody can write to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphfuse.nn._dispatch import path_taken
from tests.properties import on
from tests.reliability import LAYERS, ON_GPU, PLAIN, WIDTH, larger_on_gpu, random_edges, step

ROOT = Path(__file__).parents[2]
THREADS = 8


def together(work: Callable[[int], None]) -> None:
    """``work`` in eight threads that start at the same time; raises what the first of them raised."""
    start, errors = threading.Barrier(THREADS), []

    def run(place: int) -> None:
        try:
            start.wait(timeout=60)
            work(place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def train(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, values: dict[str, Tensor]) -> list[Tensor]:
    """Output and gradients of a layer that drops nothing."""
    x = x.detach().requires_grad_()
    out = layer(x, edge_index, **values)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@larger_on_gpu
@pytest.mark.parametrize("name", ("GCNConv, weights", "GATConv", "TransformerConv") if ON_GPU else LAYERS)
def test_eight_threads_start_one_cold_layer(name: str, device: torch.device) -> None:
    """Nothing is built or compiled yet. The interpreter is no thread's but one: there, definitions run."""
    num_nodes = 3000 if ON_GPU else 40
    edge_index = random_edges(num_nodes, 8 * num_nodes, device)
    width = 23  # which no other test compiles
    options = {"heads": 1} if name == "GraphTransformerLayer" else {}
    layer = LAYERS[name].make(width, 5, **options).to(device).eval()
    x = torch.randn(num_nodes, width, device=device)
    values = LAYERS[name].values(edge_index.size(1), device, x.dtype)
    found: dict[int, list[Tensor]] = {}
    with contextlib.nullcontext() if ON_GPU else on("definitions"):
        together(lambda place: found.update({place: train(layer, x, edge_index, values)}))
        wanted = train(layer, x, edge_index, values)
    assert path_taken(layer) == []
    assert len(found) == THREADS
    for results in found.values():
        for one, other in zip(results, wanted, strict=True):
            if ON_GPU:
                assert torch.equal(one, other)
            else:  # sums of scatter_add_, whose order threads of PyTorch's own decide
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # parameters have seen the other one
@pytest.mark.parametrize("name", PLAIN)
def test_two_streams(name: str) -> None:
    """One layer and one record on two streams at once; and a record that one stream builds, for the other."""
    device = torch.device("cuda")
    edge_index = random_edges(5000, 60_000, device)
    layer = LAYERS[name].make().to(device)
    inputs = [torch.randn(5000, WIDTH, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    first, second = streams
    first.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(first):
        cold = step(layer, inputs[0], edge_index)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        warm = step(layer, inputs[0], edge_index)
    torch.cuda.synchronize()
    assert all(torch.equal(cold[what], warm[what]) for what in cold)
    wanted = [step(layer, x, edge_index) for x in inputs]
    torch.cuda.synchronize()
    found: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(20):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[place].append(step(layer, inputs[place], edge_index))
    torch.cuda.synchronize()
    for place, runs in enumerate(found):
        for run in runs:
            assert all(torch.equal(run[what], wanted[place][what]) for what in run)


CHILD = """
import torch
import graphfuse
from tests.reliability import LAYERS, fused, random_edges, step
torch.manual_seed(0)
layer = LAYERS["GCNConv"].make(width=19).cuda()
x, edge_index = torch.randn(500, 19).cuda(), random_edges(500, 3000).cuda()
"""
RUN = """
found = fused(step, layer, x, edge_index)
print("sum", *(value.double().sum().item() for value in found.values()))
"""


def start(code: str, cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err[-3000:]
    return [line for line in out.splitlines() if line.startswith(("sum", "refused"))]


@pytest.mark.gpu
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """The same kernels, into one empty cache."""
    processes = [start(RUN, tmp_path / "cache") for _ in range(2)]
    outputs = [finish(process) for process in processes]
    assert len(outputs[0]) == 1 and outputs[0] == outputs[1]
    assert any((tmp_path / "cache").rglob("*.cubin"))


@pytest.mark.gpu
def test_a_cache_that_cannot_be_written_to(tmp_path: Path) -> None:
    """The error names the folder, and with another one the same process goes on."""
    (tmp_path / "file").touch()
    code = f"""
import os
try:
    step(layer, x, edge_index)
except OSError as error:
    print("refused", error)
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "cache")!r}
"""
    refused, found = finish(start(code + RUN, tmp_path / "file" / "cache"))
    assert refused.startswith("refused") and str(tmp_path / "file") in refused
    assert [found] == finish(start(RUN, tmp_path / "cache"))
