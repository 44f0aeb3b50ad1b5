"""A training run in a file, so that it can go on: safetensors, which runs no code when it is read."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphfuse.formats.save import check_no_folder, replacing
from graphfuse.train.config import TrainConfig

_FORMAT, _SCHEMA = "graphfuse.checkpoint", "1"


@dataclass(frozen=True)
class Checkpoints:
    """Where a run is saved to, and where it goes on from.

    Args:
        path: The file that is written; ``None`` writes none.
        every: Epochs from one writing to the next; the end of the run is always written.
        resume: The file to go on from; ``None`` starts anew.
    """

    path: Path | None = None
    every: int = 0
    resume: Path | None = None

    def due(self, epochs: int, last: bool) -> bool:
        """Whether to write after ``epochs`` epochs."""
        return self.path is not None and (last or (self.every > 0 and epochs % self.every == 0))


def save(
    path: Path, config: TrainConfig, device: str, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Writes a run, whole or not at all: a file that is there is replaced when the new one is complete.

    Args:
        path: The file.
        config: The run; only the same one can go on from the file.
        device: ``"cpu"`` or ``"cuda"``.
        tensors: Of the model, the optimizer, the generators and the history, by name, on any device.
        numbers: The rest, as JSON has it.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "config": json.dumps(asdict(config)),
        "device": device,
        "numbers": json.dumps(numbers),
    }
    metadata["crc32"] = str(_checksum(metadata, tensors))
    with replacing(path) as partial:
        save_file(tensors, partial, metadata)


def read(path: Path, config: TrainConfig, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and numbers that :func:`save` wrote.

    Raises:
        OSError: there is no such file, or it is a folder.
        ValueError: the file is damaged, not from :func:`save`, or of another configuration or kind of
            device.
    """
    from safetensors import SafetensorError, safe_open

    check_no_folder(path)
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("schema") != _SCHEMA:
                got = f"{metadata.get('format')}, schema {metadata.get('schema')}"
                refuse(path, f"a file of the format {_FORMAT}, schema {_SCHEMA}", got)
            # cloned: the tensors of a file are not safe from other writers
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    except SafetensorError as error:
        refuse(path, "a complete safetensors file", str(error))
    given = {key: value for key, value in asdict(config).items() if key != "device"}  # auto and cpu are one
    found = str(_checksum(metadata, tensors))
    if metadata.get("crc32") != found:
        refuse(path, f"the checksum {metadata.get('crc32')}", f"{found}: it is damaged")
    try:
        written, numbers = json.loads(metadata["config"]), json.loads(metadata["numbers"])
        differing = [key for key, value in given.items() if written.get(key) != value]
    except (KeyError, ValueError, AttributeError, RecursionError) as error:
        refuse(path, "a configuration and numbers in JSON", f"{type(error).__name__}: {error}")
    if differing:
        wanted, got = (", ".join(f"{key}={one.get(key)}" for key in differing) for one in (given, written))
        raise ValueError(
            f"{path} is a checkpoint of another run: wanted {wanted} (got {got}); give the settings of the "
            "file, or start anew without it"
        )
    if metadata.get("device") != device:
        raise ValueError(
            f"{path} is a checkpoint of a run on another device: wanted {device} (got "
            f"{metadata.get('device')}); go on where it ran, as other devices draw other random numbers"
        )
    return tensors, numbers


def refuse(path: Path, wanted: str, got: str) -> NoReturn:
    """Raises the error of a file that is no checkpoint."""
    raise ValueError(
        f"{path} is no checkpoint that this run can go on from: wanted {wanted} (got {got}); name a file "
        "that `graphfuse train --checkpoint` wrote, or start anew without it"
    )


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> int:
    fields = sorted((name, value) for name, value in metadata.items() if name != "crc32")
    crc = zlib.crc32(json.dumps(fields).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc
