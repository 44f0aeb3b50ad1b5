"""The training loop: one optimizer step an epoch, timed alone, with an evaluation after each."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from graphfuse.train import models
from graphfuse.train.config import TrainConfig

T = TypeVar("T")


@dataclass
class Result:
    """What one run reports.

    Args:
        layers: Whose convolutions ran.
        seed: Its seed.
        test_accuracy: At the epoch of the best validation accuracy (the first of equals), in percent.
        val_accuracy: The best, in percent.
        epoch_ms: Median time of a training step: forward, loss, backward and optimizer.
        peak_mib: Most memory in use: allocated on the GPU, or the process's resident set on a CPU.
        path: ``fused``, ``generic`` or ``pyg``.
        reasons: Why it was not fused.
    """

    layers: str
    seed: int
    test_accuracy: float
    val_accuracy: float
    epoch_ms: float
    peak_mib: float
    path: str
    reasons: list[str]


def pick_device(name: str) -> torch.device:
    """``auto``: the first GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def train(config: TrainConfig, data: Data, progress: bool = True) -> Result:
    """Trains ``config`` once on ``data``, which lies on the device that runs."""
    device = data.x.device
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        gc.collect()  # the model of an earlier run, and its captured graph
        torch.cuda.reset_peak_memory_stats(device)
    model = models.build(config, data.num_features, int(data.y.max()) + 1).to(device)
    groups = [
        {"params": list(conv.parameters()), "weight_decay": decay}
        for conv, decay in zip(model.convs, config.weight_decay, strict=True)
    ]
    optimizer = torch.optim.Adam(groups, lr=config.lr, fused=True, capturable=config.cuda_graph)
    # nodes that are not trained on are ignored by the loss: no gather, and nothing that synchronises
    target = torch.where(data.train_mask, data.y, -100)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(data.x, data.edge_index), target, ignore_index=-100).backward()
        optimizer.step()

    model.train()
    run = _capture(step, model, optimizer) if config.cuda_graph else step
    clock = _Clock(device)
    scores: list[Tensor] = []
    with tqdm(range(config.epochs), desc=_describe(config), disable=None if progress else True) as bar:
        for epoch in bar:
            model.train()
            clock.time(run)
            scores.append(_evaluate(model, data))
            if not bar.disable and (epoch + 1) % 10 == 0:  # reading a score synchronises
                val, test = scores[-1].tolist()
                bar.set_postfix(val=f"{val:.1f}", test=f"{test:.1f}", epoch_ms=f"{clock.last_ms():.2f}")
    val, test = torch.stack(scores).cpu().unbind(1)
    best = int(val.argmax())
    path, reasons = models.path(model)
    return Result(
        layers=config.layers,
        seed=config.seed,
        test_accuracy=float(test[best]),
        val_accuracy=float(val[best]),
        epoch_ms=clock.median_ms(),
        peak_mib=_peak_mib(device),
        path=path,
        reasons=reasons,
    )


def _describe(config: TrainConfig) -> str:
    return f"{config.dataset} {config.model} ({config.layers}, seed {config.seed})"


@torch.no_grad()
def _evaluate(model: torch.nn.Module, data: Data) -> Tensor:
    """Validation and test accuracy in percent, on the device."""
    model.eval()
    correct = model(data.x, data.edge_index).argmax(1) == data.y
    masks = torch.stack([data.val_mask, data.test_mask])
    accuracy: Tensor = 100.0 * (correct & masks).sum(1) / masks.sum(1)
    return accuracy


def captured(step: Callable[[], T], warmup: int = 3) -> Callable[[], T]:
    """``step`` as a CUDA graph: what is returned replays it.

    Every replay does what ``step`` would have launched and overwrites the tensors that the capture returned,
    which it returns again. Random numbers are drawn anew from PyTorch's generator of the device.

    Args:
        step: Launches the same work on every call and never waits for the GPU once it is warm. Tensors that
            it reads keep their place: new inputs are written into them. An optimizer must be ``capturable``.
        warmup: Calls that come first, on a stream of their own; they build what is built on first use (row
            windows, compiled kernels, the optimizer's state) and change what ``step`` changes.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("capturing a CUDA graph needs a GPU (got none); call `step` itself")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(kept: Callable[[], T] = step) -> T:  # replay reads the memory that the step holds
        graph.replay()
        return result

    return replay


def _capture(step: Callable[[], None], model: torch.nn.Module, optimizer: Any) -> Callable[[], None]:
    """``step`` as a CUDA graph; training still starts from the parameters that were drawn."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError("`cuda_graph` must be false on a CPU (got true); set cuda_graph=false")
    start = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.cuda.device(device):
        run = captured(step)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    return run


class _Clock:
    """Times calls on the device without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._seconds: list[float] = []
        self._cuda = device.type == "cuda"

    def time(self, call: Callable[[], None]) -> None:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            self._events.append((begin, end))
        else:
            begin_s = time.perf_counter()
            call()
            self._seconds.append(time.perf_counter() - begin_s)

    def last_ms(self) -> float:
        if not self._cuda:
            return 1e3 * self._seconds[-1]
        begin, end = self._events[-1]
        end.synchronize()
        return float(begin.elapsed_time(end))

    def median_ms(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
            return statistics.median(float(begin.elapsed_time(end)) for begin, end in self._events)
        return 1e3 * statistics.median(self._seconds)


def _peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
