"""What a training run is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass
class TrainConfig:
    """A node classification run on one full graph. Files under ``configs/`` set every hyper-parameter.

    Args:
        dataset: Name of a data set, see ``graphfuse train --list``.
        model: Architecture.
        hidden_channels: Width between layers.
        num_layers: Graph convolutions.
        dropout: Rate after each hidden layer.
        input_dropout: Rate on the input features.
        normalize_features: Whether rows of the features are scaled to sum to one.
        epochs: Passes over the graph; there is one optimizer step in each.
        lr: Adam's learning rate.
        weight_decay: Adam's L2 penalty, one for each layer.
        layers: Whose convolutions: graphfuse's, or PyG's with everything else equal.
        cuda_graph: Whether the whole training step is captured once and replayed.
        device: ``auto`` is the first GPU if there is one, else the CPU.
        seed: Of the first run; run k takes ``seed + k``.
    """

    dataset: str
    model: Literal["gcn"] = "gcn"
    hidden_channels: int = 16
    num_layers: int = 2
    dropout: float = 0.5
    input_dropout: float = 0.5
    normalize_features: bool = True
    epochs: int = 200
    lr: float = 0.01
    weight_decay: list[float] = field(default_factory=lambda: [5e-4, 0.0])
    layers: Literal["graphfuse", "pyg"] = "graphfuse"
    cuda_graph: bool = False
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.weight_decay) != self.num_layers:
            raise ValueError(
                f"`weight_decay` must have one value for each of the {self.num_layers} layers "
                f"(got {len(self.weight_decay)})"
            )
        for name in ("hidden_channels", "num_layers", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1 (got {getattr(self, name)})")


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, str]:
    """Reads a configuration file and applies ``key=value`` overrides.

    Returns:
        The configuration, and itself as YAML, complete.

    Raises:
        SystemExit: with status 2, after a message that names the key: a key is unknown or a value does not
            fit its type.
    """
    from jsonargparse import ActionConfigFile, ArgumentParser

    parser = ArgumentParser(prog="graphfuse train", allow_abbrev=False)
    parser.add_class_arguments(TrainConfig)
    parser.add_argument("--config", action=ActionConfigFile)
    for override in overrides:
        if "=" not in override:
            parser.error(f"an override is key=value (got {override!r})")
    if not Path(path).is_file():
        parser.error(f"there is no configuration file {path}")
    namespace = parser.parse_args(["--config", str(path), *(f"--{override}" for override in overrides)])
    text = parser.dump(namespace)
    values = {key: value for key, value in namespace.as_dict().items() if key != "config"}
    try:
        return TrainConfig(**values), text
    except ValueError as error:
        parser.error(str(error))
