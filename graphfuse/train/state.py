"""What training changes: parameters, buffers, the optimizer and its schedule, random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from graphfuse.train import models
from graphfuse.train.checkpoint import refuse
from graphfuse.train.config import TrainConfig
from graphfuse.train.history import COLUMNS

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class State:
    """Optimizer, schedule and gradient scaler of a model, and all of it as tensors and numbers.

    Args:
        config: The run.
        model: On ``device``.
        device: Where it trains.
        higher_is_better: Of the scores that the plateau schedule watches.
    """

    def __init__(
        self, config: TrainConfig, model: torch.nn.Module, device: torch.device, higher_is_better: bool
    ) -> None:
        self.config, self.model, self.device = config, model, device
        groups = models.groups(model, config.weight_decay)
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        if config.cuda_graph and config.schedule != "none":
            for group in groups:  # a replay reads the rate from memory, where the schedule writes it
                group["lr"] = torch.tensor(config.lr, device=device)
        self.optimizer = torch.optim.Adam(groups, lr=config.lr, fused=True, capturable=config.cuda_graph)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "fp16")
        self.schedule: CosineAnnealingLR | ReduceLROnPlateau | None = None
        if config.schedule == "cosine":
            self.schedule = CosineAnnealingLR(self.optimizer, config.epochs, config.min_lr)
        elif config.schedule == "plateau":
            self.schedule = ReduceLROnPlateau(
                self.optimizer, "max" if higher_is_better else "min", config.lr_factor, config.lr_patience,
                min_lr=config.min_lr,
            )  # fmt: skip

    def update(self) -> None:
        """Clips the gradients and takes an optimizer step."""
        if self.config.clip_norm > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def end_epoch(self, val: float | None) -> None:
        """Lets the schedule know that an epoch is over, and its validation score if there is one."""
        if isinstance(self.schedule, CosineAnnealingLR):
            self.schedule.step()
        elif self.schedule is not None and val is not None:
            self.schedule.step(val)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors themselves, by name: ``model.*`` and, once there was a step, ``optimizer.*``."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for k, parameter in enumerate(self.parameters):
            moments = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer.{k}.{name}": tensor for name, tensor in moments.items()}
        return found

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it, for a file."""
        tensors = self.tensors() | {"rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        schedule = {} if self.schedule is None else self.schedule.state_dict()
        numbers = {
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "schedule": {name: _plain(value) for name, value in schedule.items()},
            "scaler": self.scaler.state_dict(),
        }
        return tensors, numbers

    def load(self, path: Path, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> list[list[float]]:
        """Takes what :meth:`dump` gave; ``path`` is for the messages.

        Returns:
            The rows of the history.

        Raises:
            ValueError: a tensor is missing, or one is not of this model; nothing was changed.
        """
        history = tensors.pop("history", torch.empty(0))
        self._check(path, tensors, history)
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(tensors[f"model.{name}"])
        for k, parameter in enumerate(self.parameters):
            if f"optimizer.{k}.step" in tensors:
                moments = {name: tensors[f"optimizer.{k}.{name}"].to(self.device) for name in _MOMENTS}
                self.optimizer.state[parameter] = moments
        for group, rate in zip(self.optimizer.param_groups, numbers["lr"], strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.schedule is not None:
            self.schedule.load_state_dict(numbers["schedule"])
        self.scaler.load_state_dict(numbers["scaler"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        rows: list[list[float]] = history.tolist()
        return rows

    def _check(self, path: Path, tensors: dict[str, Tensor], history: Tensor) -> None:
        wanted = {name: _kind(tensor) for name, tensor in self.model.state_dict(prefix="model.").items()}
        wanted["rng.cpu"] = _kind(torch.get_rng_state())
        if self.device.type == "cuda":
            wanted["rng.cuda"] = _kind(torch.cuda.get_rng_state(self.device))
        for k, parameter in enumerate(self.parameters):
            if any(name.startswith(f"optimizer.{k}.") for name in tensors):  # none before its first gradient
                wanted |= {f"optimizer.{k}.{name}": _kind(parameter) for name in _MOMENTS[1:]}
                wanted[f"optimizer.{k}.step"] = _kind(torch.zeros(()))
        got = {name: _kind(tensor) for name, tensor in tensors.items()}
        for name in sorted(wanted.keys() | got.keys()):
            if wanted.get(name) != got.get(name):
                refuse(path, f"{name} {wanted.get(name, 'not')}", str(got.get(name, "none")))
        if history.dtype != torch.float64 or history.dim() != 2 or history.shape[1:] != (len(COLUMNS),):
            refuse(path, f"history float64[epochs, {len(COLUMNS)}]", _kind(history))

    def snapshot(self) -> dict[str, Any]:
        """A copy, to be put back."""
        kept: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return kept | {"scaler": self.scaler.state_dict()}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Writes a copy into the tensors that a capture reads; what was not there then is zero."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                if name in kept:
                    tensor.copy_(kept[name])
                else:
                    tensor.zero_()
        self.scaler.load_state_dict(kept["scaler"])

    @contextlib.contextmanager
    def kept_generators(self) -> Iterator[None]:
        """Random numbers go on after the block as if it had drawn none."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield


def _plain(value: Any) -> Any:
    # schedules keep rates in tensors where the optimizer does
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return float(value) if isinstance(value, Tensor) else value


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
