"""What ``graphfuse train`` does with its options."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse import plot
from graphfuse.train import curves, report
from graphfuse.train.checkpoint import Checkpoints
from graphfuse.train.config import TrainConfig
from graphfuse.train.trackers import tracking


@dataclass(frozen=True)
class Options:
    """How often to train, and where results go; the run itself is a :class:`TrainConfig`.

    Args:
        name: Of the configuration file, without folder and suffix.
        seeds: Runs, with seeds counted up.
        compare: Whether PyG's layers train too.
        data_root: Folder of data sets.
        checkpoint: File that the run is saved to.
        checkpoint_every: Epochs from one saving to the next; 0 saves at the end.
        resume: File that the run goes on from.
        results: File that JSON lines are added to; with ``compare`` one in ``runs`` by default.
        go_on: Whether runs that ``results`` has already are not trained again.
        plot: File of learning curves and memory.
        tensorboard: Folder that TensorBoard reads.
        wandb: Whether to print each evaluation and send it to Weights & Biases.

    Raises:
        ValueError: an option is out of range or does not go with another.
    """

    name: str
    seeds: int = 1
    compare: bool = False
    data_root: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: str | None = None
    results: str | None = None
    go_on: bool = False
    plot: str | None = None
    tensorboard: str | None = None
    wandb: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds must be at least 1 (got {self.seeds})")
        every = self.checkpoint_every
        if every < 0 or (every > 0 and self.checkpoint is None):
            raise ValueError(f"--checkpoint-every N needs --checkpoint FILE and N > 0 (got {every})")
        if (self.checkpoint or self.resume) and (self.seeds > 1 or self.compare):
            raise ValueError("--checkpoint and --resume are for one run: leave out --seeds and --compare")
        if self.go_on and not (self.results or self.compare):
            raise ValueError("--continue needs the lines of earlier runs: give --results FILE too")
        if self.go_on and self.plot is not None:
            raise ValueError("--plot draws curves, which the lines that --continue reads lack: leave one out")
        if self.go_on and self.checkpoint is not None:
            raise ValueError(
                "--checkpoint saves weights, which the lines that --continue reads lack: leave one out"
            )
        if self.plot is not None:  # before a long run, not after it
            plot.check_suffix(self.plot)
            curves.require_matplotlib()


def run(config: TrainConfig, options: Options) -> tuple[dict[str, Any], str]:
    """Trains, and writes what is asked for.

    Returns:
        The summary of :func:`graphfuse.train.report.run`, and what to print.

    Raises:
        ValueError: a file cannot be written to, or is named twice; nothing was trained.
    """
    results = options.results or (f"runs/{options.name}.jsonl" if options.compare else None)
    outputs = {"checkpoint": options.checkpoint, "plot": options.plot, "results": results}
    for name, path in outputs.items():
        _check_output(name, path)  # before a long run, not after it
    _check_apart({"resume": options.resume, **outputs})
    saved, resumed = (None if name is None else Path(name) for name in (options.checkpoint, options.resume))
    with tracking(config, options.wandb, options.tensorboard) as log:
        found, runs = report.run(
            config, options.seeds, options.compare, options.data_root, progress=not options.wandb,
            results=None if results is None else Path(results), log=log,
            checkpoints=Checkpoints(saved, options.checkpoint_every, resumed), go_on=options.go_on,
        )  # fmt: skip
    lines = [report.table(found)]
    if results is not None:
        lines.append(f"results: {results}")
    if options.plot is not None:
        plot.write(curves.draw(runs, f"{config.model} on {config.dataset}"), options.plot)
        lines.append(f"plot: {options.plot}")
    return found, "\n".join(lines)


def _check_output(name: str, given: str | None) -> None:
    """Refuses a file that a run could not write when it ends; the folder of ``results`` is made."""
    if given is None:
        return
    path = Path(given)
    if name == "results":
        with contextlib.suppress(OSError):  # told below
            path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise ValueError(f"--{name} must lie in a folder that is there (got {given}); make it first")
    # lines are added to a file, others are replaced
    touched = path if name == "results" and path.exists() else path.parent
    if path.is_dir() or not os.access(touched, os.W_OK):
        raise ValueError(f"--{name} must be a file that can be written to (got {given}); name another")


def _check_apart(given: dict[str, str | None]) -> None:
    """Refuses a file that two options name, as one would replace what the other wrote or reads."""
    names: dict[Path, str] = {}
    for name, path in given.items():
        first = name if path is None else names.setdefault(Path(path).resolve(), name)
        if first != name and (first, name) != ("resume", "checkpoint"):
            raise ValueError(f"--{first} and --{name} must be two files (got {path} for both); name another")
