"""The training loop: epochs of optimizer steps, each timed alone, with evaluations between them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

import graphfuse
from graphfuse.formats.cache import row_windows
from graphfuse.kernels.device import kernel_problem
from graphfuse.train import checkpoint, models, tasks
from graphfuse.train.checkpoint import Checkpoints
from graphfuse.train.config import TrainConfig
from graphfuse.train.datasets import Dataset
from graphfuse.train.history import History, peak_mib, timed
from graphfuse.train.state import State

T = TypeVar("T")
Log = Callable[[TrainConfig, int, dict[str, float]], None]


@dataclass
class Result:
    """What one run reports.

    Args:
        layers: Whose convolutions ran.
        seed: Its seed.
        metric: Of the scores: ``accuracy`` and ``rocauc`` in percent, ``mae`` in the unit of the targets.
        test_accuracy: The metric at the epoch of the best validation score (the first of equals).
        val_accuracy: The best.
        best_epoch: The epoch of it, from 1; 0 if no score was a number, and the scores are those of the last.
        epochs: Epochs that ran.
        epoch_ms: Median time of an epoch's training: batches, forward, loss, backward and optimizer.
        eval_ms: Median time of an evaluation.
        train_s: All epochs with their evaluations; no set-up.
        time_to_accuracy_s: The part of ``train_s`` to the first validation score that reached
            ``config.target``; ``None`` if none did, or there is no target.
        setup_ms: What came before the first epoch: ``windows`` of the full graph, ``warmup`` (which compiles
            kernels), ``compile`` and ``capture``. What exists already, as in later runs of a process, is
            fast.
        peak_mib: Most memory in use after ``windows`` and ``warmup``: allocated on the GPU, or the process's
            resident set, which has no beginning, on a CPU.
        path: ``fused``, ``generic`` or ``pyg``; of a compiled model, before it was.
        reasons: Why it was not fused.
        curve: A row for each epoch, see ``graphfuse.train.history``.
        setup_mib: Most memory in use during ``windows`` and ``warmup``.
    """

    layers: str
    seed: int
    metric: str
    test_accuracy: float
    val_accuracy: float
    best_epoch: int
    epochs: int
    epoch_ms: float
    eval_ms: float
    train_s: float
    time_to_accuracy_s: float | None
    setup_ms: dict[str, float]
    peak_mib: float
    path: str
    reasons: list[str]
    curve: list[list[float]] = field(repr=False)
    setup_mib: dict[str, float] = field(default_factory=dict)


def pick_device(name: str) -> torch.device:
    """``auto``: the first GPU if there is one, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise RuntimeError("of no use here")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        said = str(error).splitlines()[0]
        raise ValueError(
            f"`device` must be auto, cpu or a GPU that is here, such as cuda:0 (got {name}: {said}); set "
            "device=auto"
        ) from error


def train(
    config: TrainConfig,
    dataset: Dataset,
    progress: bool = True,
    checkpoints: Checkpoints | None = None,
    log: Log | None = None,
) -> Result:
    """Trains ``config`` once on ``dataset``.

    Args:
        config: The run.
        dataset: Its data, on the CPU or the device that runs.
        progress: Whether to draw a progress bar, if there is a terminal.
        checkpoints: Where to save the run, and what to go on from. A run that goes on ends with the weights
            of one that was never stopped, bit for bit where its layers repeat (fused layers and CPUs do,
            PyG's scatter on a GPU does not).
        log: Called after each evaluation with the run, the epoch, from 1, and its loss, scores and times.

    Raises:
        ValueError: the configuration does not fit the data or the device, or the file to go on from is none.
    """
    device = pick_device(config.device)
    if config.cuda_graph and device.type != "cuda":
        raise ValueError("`cuda_graph` must be false on a CPU (got true); set cuda_graph=false")
    checkpoints = checkpoints or Checkpoints()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if device.type == "cuda":
            gc.collect()  # the model of an earlier run, and its captured graph
            torch.cuda.reset_peak_memory_stats(device)
        torch.manual_seed(config.seed)
        run = _Run(config, dataset, device)
        if checkpoints.resume is not None:
            run.resume(checkpoints)
        run.prepare()
        return run.train(progress, checkpoints, log)


class _Run:
    """A model and all that its training changes."""

    def __init__(self, config: TrainConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.device, self.metric = config, device, dataset.metric
        self.task = tasks.of(config, dataset, device)
        self.model = models.build(
            config, self.task.in_channels, self.task.out_channels, self.task.edge_dim, dataset.task == "graph"
        ).to(device)
        self.state = State(config, self.model, device, dataset.higher_is_better)
        self.history = History(device, dataset.higher_is_better)
        self.setup_ms: dict[str, float] = {}
        self.setup_mib: dict[str, float] = {}
        self.called: torch.nn.Module = self.model  # or what torch.compile makes of it
        self.step: Callable[[Any], Tensor] = self._step
        self.evaluate: Callable[[], Tensor] = self._evaluate
        self.path: tuple[str, list[str]] = ("pyg", [])

    def autocast(self) -> Any:
        """The context of every forward pass."""
        if self.config.dtype == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype)

    def _step(self, batch: Any) -> Tensor:
        self.model.train()
        self.state.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.task.loss(self.called, batch)
        self.state.scaler.scale(loss).backward()
        self.state.update()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self) -> Tensor:
        self.model.eval()
        with self.autocast():
            return self.task.scores(self.called)

    def resume(self, checkpoints: Checkpoints) -> None:
        """Takes the state of a file; the generators' comes last."""
        path = checkpoints.resume
        assert path is not None
        tensors, numbers = checkpoint.read(path, self.config, self.device.type)
        self.history.rows = self.state.load(path, tensors, numbers)

    def prepare(self) -> None:
        """Builds and compiles what the first steps would, on the clock; leaves no other trace."""
        with self.state.kept_generators():
            self._build_windows()
            batch = next(iter(self.task.batches()))
            self._warm_up("warmup", batch)
            self._note_peak("warmup")
            self.path = models.path(self.model)
            if self.config.compile:
                torch.compiler.reset()  # after a few models of a class it would leave the next one as it is
                self.called = torch.compile(self.model)  # type: ignore[assignment]
                self._warm_up("compile", batch)
            if self.config.cuda_graph:
                with timed(self.setup_ms, "capture", self.device):
                    self._capture(batch)

    def _build_windows(self) -> None:
        # those of batches are built, and timed, with each batch
        fuses = self.config.layers == "graphfuse" and kernel_problem(self.device, torch.float32) is None
        if fuses and isinstance(self.task, tasks.NodeTask):
            graph = self.task.graph
            with timed(self.setup_ms, "windows", self.device):
                row_windows(graph.edge_index, int(graph.num_nodes), int(graph.num_nodes))
            self._note_peak("windows")

    def _note_peak(self, name: str) -> None:
        self.setup_mib[name] = peak_mib(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _warm_up(self, name: str, batch: Any) -> None:
        arguments = self.task.arguments(batch)
        with timed(self.setup_ms, name, self.device):
            for training in (False, True):
                self.model.train(training)
                with self.autocast():
                    graphfuse.warmup(self.called, *arguments)

    def _capture(self, batch: Any) -> None:
        before = self.state.snapshot()
        step = captured(lambda: self._step(batch))
        self.state.put_back(before)
        self.step = lambda batch: step()
        if not self.task.waits:
            self.evaluate = captured(self._evaluate)

    def train(self, progress: bool, checkpoints: Checkpoints, log: Log | None) -> Result:
        """Runs the epochs that are left."""
        config, history = self.config, self.history
        first = len(history)
        reads = log is not None or config.patience > 0 or config.schedule == "plateau"
        history.go()
        with tqdm(total=config.epochs, initial=first, desc=_describe(config),
                  disable=None if progress else True) as bar:  # fmt: skip
            over = self._is_over()
            if over and checkpoints.due(first, over):  # the file to go on from was that of a whole run
                self._save(checkpoints)
            while not over:
                evaluated = self._epoch()
                epoch = len(history)
                if not bar.disable and (reads or epoch % 10 == 0):  # reading synchronises
                    row = history.last()
                    bar.set_postfix(loss=f"{row['loss']:.3f}", val=f"{row['val']:.2f}",
                                    epoch_ms=f"{row['train_ms']:.2f}", refresh=False)  # fmt: skip
                if evaluated and log is not None:
                    log(config, epoch, history.last())
                self.state.end_epoch(history.last()["val"] if reads and evaluated else None)
                over = self._is_over()
                if checkpoints.due(epoch, over):
                    self._save(checkpoints)
                    history.go()
                bar.update()
        return self._result()

    def _epoch(self) -> bool:
        begin = self.history.mark()
        losses, counts = [], []
        for batch in self.task.batches():
            losses.append(self.step(batch))
            counts.append(batch.get("count", 1))
        trained = self.history.mark()
        loss = _mean(torch.stack(losses), counts)  # a copy: a replay overwrites what it returned
        epoch = len(self.history) + 1
        due = self._is_evaluated(epoch)
        scores = self.evaluate().clone() if due else None
        self.history.append(loss, scores, (begin, trained, self.history.mark()))
        return due

    def _is_over(self) -> bool:
        epoch, patience = len(self.history), self.config.patience
        if epoch >= self.config.epochs:
            return True
        if patience == 0 or epoch == 0 or not self._is_evaluated(epoch):  # the last epoch always is
            return False
        return epoch - 1 - self.history.best() >= patience

    def _is_evaluated(self, epoch: int) -> bool:
        return epoch % self.config.eval_every == 0 or epoch == self.config.epochs

    def _save(self, checkpoints: Checkpoints) -> None:
        assert checkpoints.path is not None
        tensors, numbers = self.state.dump()
        tensors["history"] = self.history.tensor()
        checkpoint.save(checkpoints.path, self.config, self.device.type, tensors, numbers)

    def _result(self) -> Result:
        rows, best = self.history.resolve(), self.history.best()
        target = self.config.target
        return Result(
            layers=self.config.layers,
            seed=self.config.seed,
            metric=self.metric,
            test_accuracy=rows[best][2],
            val_accuracy=rows[best][1],
            best_epoch=best + 1,
            epochs=len(rows),
            epoch_ms=self.history.median("train_ms"),
            eval_ms=self.history.median("eval_ms"),
            train_s=rows[-1][-1],
            time_to_accuracy_s=self.history.reached(target) if target else None,
            setup_ms=self.setup_ms,
            peak_mib=peak_mib(self.device),
            path=self.path[0],
            reasons=self.path[1],
            curve=rows,
            setup_mib=self.setup_mib,
        )


def _describe(config: TrainConfig) -> str:
    return f"{config.dataset} {config.model} ({config.layers}, seed {config.seed})"


def _mean(losses: Tensor, counts: list[int]) -> Tensor:
    """Over nodes or graphs, of which batches have different numbers: the last one, or random parts."""
    if len(set(counts)) == 1:
        return losses.mean()
    # non-blocking: the host does not wait for the epoch
    weights = torch.tensor(counts, dtype=losses.dtype).to(losses.device, non_blocking=True)
    mean: Tensor = (losses * weights).sum() / max(1, sum(counts))
    return mean


def captured(step: Callable[[], T], warmup: int = 3) -> Callable[[], T]:
    """``step`` as a CUDA graph: what is returned replays it.

    Every replay does what ``step`` would have launched and overwrites the tensors that the capture returned,
    which it returns again. Random numbers are drawn anew from PyTorch's generator of the device.

    Args:
        step: Launches the same work on every call and never waits for the GPU once it is warm. Tensors that
            it reads keep their place: new inputs are written into them. An optimizer must be ``capturable``.
            If it has a backward pass, no result of an earlier forward pass with gradients may still be there.
        warmup: Calls that come first, on a stream of their own; they build what is built on first use (row
            windows, compiled kernels, the optimizer's state) and change what ``step`` changes.

    Raises:
        RuntimeError: there is no GPU, or the step cannot be captured. Then nothing is, the current stream is
            what it was, and random numbers can be drawn.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("capturing a CUDA graph needs a GPU (got none); call `step` itself")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            step()
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = step()
    except Exception as error:
        _leave_capture(current)
        if "legacy stream" in f"{error} {error.__context__}":
            raise RuntimeError(
                "`step` must not meet an earlier forward pass, to whose stream gradients go (got results of "
                "one, such as `out` or `loss`, that are still there); delete or detach them before"
            ) from error
        raise

    def replay(kept: Callable[[], T] = step) -> T:  # replay reads the memory that the step holds
        graph.replay()
        return result

    return replay


def _leave_capture(stream: torch.cuda.Stream) -> None:
    # After one that failed PyTorch stays on the capture's stream, and its generator draws in captures alone,
    # until one ends as it should.
    torch.cuda.set_stream(stream)
    number = torch.zeros(1, device=stream.device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)
