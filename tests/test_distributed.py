"""Data parallel training of two processes: the gradients of PyG's layers in one, and sharded parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.nn._layers import EDGES, NAMES, pair, paths, two_gpus

RANKS = 2


class Stack(torch.nn.Module):
    """The five layers in a row, as ours or as PyG's; the same weights whichever."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(pair(name)[0 if ours else 1] for name in NAMES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, edge_index).tanh()
        return x


def loss_of(model: torch.nn.Module, rank: int, device: Any = "cpu") -> Tensor:
    """On what process ``rank`` trains on: features and a graph of its own."""
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(rank))
    return model(x.to(device), EDGES[:, rank:].contiguous().to(device)).square().sum()


def work(rank: int, backend: str, folder: str) -> None:
    """One process: a step under DDP, and one with sharded parameters."""
    torch.set_num_threads(1)
    if backend == "gloo":
        from tests.interpreter import prepare

        prepare()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=RANKS)
    plain, sharded = Stack(True).to(device), Stack(True).to(device)
    parallel = DistributedDataParallel(plain)  # find_unused_parameters is False
    loss_of(parallel, rank, device).backward()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    loss_of(sharded, rank, device).backward()
    optimizer.step()
    found = {
        "grads": [parameter.grad.cpu() for parameter in plain.parameters()],
        "stepped": [parameter.detach().full_tensor().cpu() for parameter in sharded.parameters()],
        "paths": paths(plain) + paths(sharded),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_two_processes_equal_one(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, so that the processes start once."""
    if backend == "gloo":  # the kernels in the interpreter, wherever this runs
        from tests.interpreter import runs

        if not runs():
            pytest.skip("the interpreter of triton 3.6 needs NumPy older than 2.4")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.multiprocessing.spawn(work, (backend, str(tmp_path)), RANKS)
    model = Stack(False)
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss_of(model, rank), parameters) for rank in range(RANKS)]
    mean = [sum(parts) / RANKS for parts in zip(*grads, strict=True)]
    stepped = [value.detach() - 0.1 * grad for value, grad in zip(parameters, mean, strict=True)]
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["paths"] == [[]] * 2 * len(NAMES)
        torch.testing.assert_close(found["grads"], mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["stepped"], stepped, rtol=1e-4, atol=1e-4)
