"""What a training run is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass
class TrainConfig:
    """A training run. Files under ``configs/`` set every one of these.

    Args:
        dataset: Name of a data set, see ``graphfuse train --list``.
        model: Architecture, see ``graphfuse.train.models``.
        layers: Whose convolutions: graphfuse's, or PyG's with everything else equal.
        hidden_channels: Width between layers, of all heads together.
        num_layers: Convolutions or blocks.
        heads: Attention heads, concatenated; a divisor of ``hidden_channels``.
        out_heads: Heads of the last convolution, averaged.
        gate: Whether a convolution of ``transformer`` learns how much of a node's own row to keep.
        norm: Normalisation after each hidden layer; in the blocks of ``graph_transformer``, ``"batch"`` or
            ``"layer"``.
        activation: After each hidden layer.
        dropout: Rate after each hidden layer.
        input_dropout: Rate on the input features.
        attention_dropout: Rate on attention weights.
        edge_features: Whether the model is given the features of edges.
        pooling: How the rows of a graph become one, where graphs are predicted.
        normalize_features: Whether rows of the features are scaled to sum to one.
        random_walk: Steps of the random walks whose probabilities of return are concatenated to the features.
        loader: What a step sees: the ``full`` graph; the sampled surroundings of some training nodes
            (``neighbor``); a random part of the nodes (``random_node``); or some ``graphs`` of many.
        batch_size: Training nodes, nodes or graphs of a step, at most; 0 with the full graph.
        num_neighbors: In-neighbours that ``neighbor`` samples of a node in each hop, -1 for all.
        epochs: Passes over the training data, at most.
        lr: Adam's learning rate.
        weight_decay: Adam's L2 penalty: one value, or one for each convolution if there is nothing else.
        schedule: Of the learning rate: ``cosine`` falls to ``min_lr`` in ``epochs`` epochs, ``plateau``
            multiplies by ``lr_factor`` when more than ``lr_patience`` evaluations in a row were not better.
        lr_factor: See ``schedule``.
        lr_patience: See ``schedule``.
        min_lr: See ``schedule``.
        patience: Epochs without a better validation score after which the next evaluation stops training; 0
            is never.
        clip_norm: Largest norm of all gradients together; 0 is any.
        eval_every: Epochs from one evaluation to the next; the last is always evaluated.
        target: Validation score whose first epoch gives the time to accuracy; 0 asks for none.
        dtype: Of the layers: ``fp32``, or ``bf16`` and ``fp16`` under autocast, fp16 with scaled gradients.
        cuda_graph: Whether a whole training step, and a whole evaluation, are captured once and replayed.
        compile: Whether the model goes through ``torch.compile``.
        device: ``auto`` is the first GPU if there is one, else the CPU.
        seed: Of the first run; run k takes ``seed + k``.

    Raises:
        ValueError: a value is out of range, or does not go with another.
    """

    dataset: str
    model: Literal["gcn", "gat", "gatv2", "agnn", "transformer", "graph_transformer"] = "gcn"
    layers: Literal["graphfuse", "pyg"] = "graphfuse"
    hidden_channels: int = 16
    num_layers: int = 2
    heads: int = 1
    out_heads: int = 1
    gate: bool = False
    norm: Literal["none", "batch", "layer"] = "none"
    activation: Literal["relu", "elu"] = "relu"
    dropout: float = 0.5
    input_dropout: float = 0.5
    attention_dropout: float = 0.0
    edge_features: bool = False
    pooling: Literal["mean", "sum", "max"] = "mean"
    normalize_features: bool = True
    random_walk: int = 0
    loader: Literal["full", "neighbor", "random_node", "graphs"] = "full"
    batch_size: int = 0
    num_neighbors: list[int] = field(default_factory=list)
    epochs: int = 200
    lr: float = 0.01
    weight_decay: list[float] = field(default_factory=lambda: [5e-4, 0.0])
    schedule: Literal["none", "cosine", "plateau"] = "none"
    lr_factor: float = 0.5
    lr_patience: int = 10
    min_lr: float = 0.0
    patience: int = 0
    clip_norm: float = 0.0
    eval_every: int = 1
    target: float = 0.0
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    cuda_graph: bool = False
    compile: bool = False
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        convolutions = self.num_layers if self.model in ("gcn", "gat", "gatv2", "transformer") else 1
        if len(self.weight_decay) not in (1, convolutions):
            each = "" if convolutions == 1 else f", or one value for each of the {convolutions} layers"
            raise ValueError(f"`weight_decay` must have one value{each} (got {len(self.weight_decay)})")
        for name, least in (("hidden_channels", 1), ("num_layers", 1), ("epochs", 1), ("eval_every", 1),
                            ("heads", 1), ("out_heads", 1), ("batch_size", 0), ("patience", 0),
                            ("clip_norm", 0), ("random_walk", 0), ("min_lr", 0),
                            ("lr_patience", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least} (got {getattr(self, name)})")
        for name in ("dropout", "input_dropout", "attention_dropout", "lr_factor"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1) (got {getattr(self, name)})")
        if min(self.weight_decay) < 0:
            raise ValueError(f"`weight_decay` must be at least 0 (got {self.weight_decay})")
        self._check_together()

    @property
    def brings_loops(self) -> bool:
        """Whether the graph holds its self-loops and no layer adds any.

        PyG's layers wait for the GPU to add them, which a capture forbids; so captured they get them
        beforehand. Those of GCN are cached, and graphfuse's need none.
        """
        return self.cuda_graph and self.layers == "pyg" and self.model in ("gat", "gatv2", "agnn")

    def _check_together(self) -> None:
        if self.hidden_channels % self.heads:
            raise ValueError(
                f"`hidden_channels` must be a multiple of `heads` (got {self.hidden_channels} and "
                f"{self.heads}); each head takes an equal share"
            )
        if (self.loader == "full") != (self.batch_size == 0):
            wanted = "0" if self.loader == "full" else "positive"
            raise ValueError(
                f"`batch_size` must be {wanted} with loader={self.loader} (got {self.batch_size})"
            )
        if (self.loader == "neighbor") != bool(self.num_neighbors):
            wanted = "a number for each hop" if self.loader == "neighbor" else "empty"
            raise ValueError(
                f"`num_neighbors` must be {wanted} with loader={self.loader} (got {self.num_neighbors})"
            )
        if self.cuda_graph and self.loader != "full":
            raise ValueError(
                f"`cuda_graph` needs loader=full, as a capture replays one graph (got loader={self.loader}); "
                "set cuda_graph=false"
            )
        if self.edge_features and self.model in ("gcn", "agnn"):
            raise ValueError(
                f"`edge_features` must be false with model={self.model}, which takes none (got true)"
            )
        if self.gate and self.model != "transformer":
            raise ValueError(f"`gate` must be false with model={self.model}, which has none (got true)")
        if self.model == "graph_transformer" and self.norm == "none":
            raise ValueError("`norm` must be batch or layer with model=graph_transformer (got none)")
        unused = {
            "attention_dropout": ("gcn", "agnn", "graph_transformer"),
            "input_dropout": ("graph_transformer",),
        }
        for name, without in unused.items():
            if self.model in without and getattr(self, name) > 0:
                raise ValueError(
                    f"`{name}` must be 0 with model={self.model}, which has none (got {getattr(self, name)})"
                )


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
    try:
        namespace = parser.parse_args(["--config", str(path), *(f"--{override}" for override in overrides)])
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {path} ({error}); name a YAML file")
    text = parser.dump(namespace)
    values = {key: value for key, value in namespace.as_dict().items() if key != "config"}
    try:
        return TrainConfig(**values), text
    except ValueError as error:
        parser.error(str(error))
