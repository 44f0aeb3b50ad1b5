"""Where else losses and scores go while a run trains: Weights & Biases, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from torch_geometric import logging as pyg_logging

from graphfuse.train.config import TrainConfig
from graphfuse.train.loop import Log


@contextmanager
def tracking(config: TrainConfig, wandb: bool, tensorboard: str | None) -> Iterator[Log | None]:
    """What :func:`graphfuse.train.loop.train` calls after each evaluation; ``None`` if nobody listens.

    Args:
        config: The first run.
        wandb: Whether to print each evaluation and send it to Weights & Biases, both by PyG's helpers.
        tensorboard: Folder that TensorBoard reads.

    Raises:
        ModuleNotFoundError: what is asked for is not installed.
    """
    if wandb:
        try:
            pyg_logging.init_wandb(f"{config.model}-{config.dataset}", **asdict(config))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "--wandb needs wandb, which is not installed; run: pip install wandb"
            ) from error
    writer = None
    if tensorboard is not None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "--tensorboard needs tensorboard, which is not installed; run: pip install tensorboard"
            ) from error
        writer = SummaryWriter(tensorboard)

    def log(run: TrainConfig, epoch: int, row: dict[str, float]) -> None:
        if wandb:
            scores = {"Loss": row["loss"], "Val": row["val"], "Test": row["test"]}
            pyg_logging.log(Layers=run.layers, Seed=run.seed, Epoch=epoch, **scores)
        if writer is not None:
            for name, value in row.items():
                writer.add_scalar(f"{run.layers}/{run.seed}/{name}", value, epoch)

    try:
        yield log if wandb or writer is not None else None
    finally:
        if writer is not None:
            writer.close()
