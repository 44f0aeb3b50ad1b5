"""Training results: the newest of each configuration and mode, as tables."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.markdown import figure, table
from graphfuse.train import config

KINDS = {"graphfuse": "graphfuse", "pyg": "PyG"}
_SETUP = {"windows": "row windows", "warmup": "warm-up", "compile": "compile", "capture": "capture"}
_CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Training:
    """One call of ``graphfuse train``: its summary, and the test score of each run that a line was kept of.

    Args:
        name: Of the configuration file.
        overrides: Settings that differ from the file, as ``key=value``.
        summary: The line that ends the runs; PyG's part of it under ``pyg``.
        scores: Kind of layers -> test score of each seed.
    """

    name: str
    overrides: tuple[str, ...]
    summary: Mapping[str, Any]
    scores: Mapping[str, Sequence[float]]

    @property
    def of(self) -> dict[str, Mapping[str, Any]]:
        """Kind of layers -> what the summary says of it."""
        both = {self.summary["layers"]: self.summary}
        return both | ({"pyg": self.summary["pyg"]} if "pyg" in self.summary else {})

    @property
    def mode(self) -> str:
        """How steps ran, and what differs from the file."""
        how = ["CUDA graph"] if self.setting("cuda_graph") else []
        how += ["compiled"] if self.setting("compile") else []
        return ", ".join([*(how or ["eager"]), *self.overrides])

    @property
    def command(self) -> str:
        """What repeats it."""
        words = ["graphfuse train", f"configs/{self.name}.yaml", *self.overrides]
        words += [f"--seeds {len(self.summary['seeds'])}"]
        words += ["--compare"] if "pyg" in self.summary else [f"--layers {self.summary['layers']}"]
        words += ["--cuda-graph"] if self.setting("cuda_graph") else []
        words += ["--compile"] if self.setting("compile") else []
        return " ".join(words)

    @property
    def measured(self) -> str:
        """On what, at which commit, when."""
        summary = self.summary
        return f"{summary['device']}, {summary['commit'] or 'no commit'}, {summary['date'][:10]}"

    def setting(self, name: str) -> Any:
        """A setting of the runs; the first results hold the file's name and ``cuda_graph`` alone."""
        settings = self.summary["config"]
        return (settings if isinstance(settings, dict) else self.summary).get(name)

    def value(self, kind: str, name: str) -> Any:
        """A number of one kind of layers, or ``None``."""
        return self.of.get(kind, {}).get(name)

    def p_value(self) -> float | None:
        """Welch's two-sided test that the means are equal, from means, deviations and number of seeds."""
        from scipy import stats

        given = [(self.value(kind, "test_accuracy"), self.value(kind, "test_accuracy_std")) for kind in KINDS]
        if any(value is None for pair in given for value in pair):
            return None
        (ours, ours_std), (theirs, theirs_std) = given
        count = len(self.summary["seeds"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of runs that do not differ
            found = stats.ttest_ind_from_stats(
                ours, ours_std, count, theirs, theirs_std, count, equal_var=False
            )
        return None if found.pvalue != found.pvalue else float(found.pvalue)


def load(folder: Path) -> list[Training]:
    """The newest of each configuration and mode that ``train_*.jsonl`` in a folder hold."""
    found: dict[tuple[str, str], Training] = {}
    for path in sorted(folder.glob("train_*.jsonl")):
        for each in sorted(_trainings(path), key=lambda training: training.summary["date"]):
            found[each.name, each.mode] = each
    return [
        found[key] for key in sorted(found, key=lambda key: (key[0], not key[1].startswith("eager"), key[1]))
    ]


def _trainings(path: Path) -> Iterator[Training]:
    lines = rows.read(path)
    name = path.stem.removeprefix("train_")
    for summary in lines:
        if summary.get("record", "summary") != "summary":
            continue
        by_seed: dict[tuple[str, int], float] = {}
        for line in lines:
            trained = line.get("record") == "run" and "error" not in line
            if trained and _identity(line, summary) == _identity(summary, summary):
                by_seed.setdefault((line["layers"], line["seed"]), line["test_accuracy"])
        scores = {kind: [score for (of, _), score in by_seed.items() if of == kind] for kind, _ in by_seed}
        yield Training(name, _overrides(name, summary["config"]), summary, scores)


def _identity(line: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the runs that are summarised share; those of earlier calls, where it went on with them, less."""
    settings = {**line["config"], "layers": None, "seed": None} if "record" in line else None
    call = (line["device"],) if summary.get("kept") else (line["date"], line["commit"])
    return (*call, settings)


def _overrides(name: str, settings: Any) -> tuple[str, ...]:
    path = _CONFIGS / f"{name}.yaml"
    if not isinstance(settings, dict) or not path.is_file():
        return ()
    of_file = dataclasses.asdict(config.load(path)[0])
    with_options = ("layers", "cuda_graph", "compile")
    return tuple(
        f"{key}={_text(settings[key])}"
        for key in of_file
        if key in settings and settings[key] != of_file[key] and key not in with_options
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def accuracies(trainings: Sequence[Training]) -> str:
    """Scores, their difference and the test of it: a row for each configuration and mode."""
    head = ("configuration", "steps", "score", "graphfuse", "PyG", "seeds", "difference", "p")
    lines = []
    for one in trainings:
        ours, theirs = (one.value(kind, "test_accuracy") for kind in KINDS)
        metric = one.summary.get("metric", "accuracy")
        digits = _digits(one)
        difference = None if ours is None or theirs is None else f"{ours - theirs:+.{digits}f}"
        p_value = one.p_value()
        lines.append(
            (
                one.name, one.mode, metric, *(score(one, kind) for kind in KINDS),
                str(len(one.summary["seeds"])), difference, None if p_value is None else f"{p_value:.3g}",
                one.measured, f"`{one.command}`",
            )
        )  # fmt: skip
    return table((*head, "measured", "command"), lines)


def score(one: Training, kind: str) -> str | None:
    """Mean and standard deviation of one kind of layers, or why there is none."""
    of_kind = one.of.get(kind, {})
    if "test_accuracy" not in of_kind:
        return of_kind.get("error")
    digits, spread = _digits(one), of_kind.get("test_accuracy_std")
    return f"{of_kind['test_accuracy']:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _digits(one: Training) -> int:
    return 4 if one.summary.get("metric") == "mae" else 2


def costs(trainings: Sequence[Training]) -> str:
    """Times and memory: a row for each configuration, mode and kind of layers."""
    head = ("configuration", "steps", "layers", "path", "epoch, ms", "evaluation, ms", "training, s")
    lines = []
    for one, kind, of_kind in _by_kind(trainings):
        if "error" in of_kind:
            found = [of_kind["error"]] + [None] * 5
        else:
            times = [figure(of_kind.get(name)) for name in ("epoch_ms", "eval_ms", "train_s")]
            found = [of_kind["path"], *times, _time_to_target(one, of_kind), figure(of_kind["peak_mib"])]
        lines.append((one.name, one.mode, KINDS[kind], *found, one.measured, f"`{one.command}`"))
    return table((*head, "to target, s", "peak, MiB", "measured", "command"), lines)


def _time_to_target(one: Training, of_kind: Mapping[str, Any]) -> str | None:
    seconds, target = of_kind.get("time_to_accuracy_s"), one.setting("target")
    if "reached" not in of_kind or not target:
        return None
    reached = f"{of_kind['reached']} of {len(one.summary['seeds'])} reached {target:g}"
    return reached if seconds is None else f"{figure(seconds)} ({reached})"


def start_ups(trainings: Sequence[Training]) -> str:
    """What comes before the first epoch: a row for each configuration, mode and kind of layers."""
    lines = []
    for one, kind, of_kind in _by_kind(trainings):
        if "setup_ms" in of_kind:
            parts = [figure(of_kind["setup_ms"].get(part)) for part in _SETUP]
            peaks = of_kind.get("setup_mib", {}).values()
            parts.append(figure(max(peaks)) if peaks else None)
            lines.append((one.name, one.mode, KINDS[kind], *parts, one.measured, f"`{one.command}`"))
    columns = (*_SETUP.values(), "peak, MiB", "measured", "command")
    return table(("configuration", "steps", "layers", *columns), lines)


def _by_kind(trainings: Sequence[Training]) -> Iterator[tuple[Training, str, Mapping[str, Any]]]:
    for one in trainings:
        for kind, of_kind in one.of.items():
            yield one, kind, of_kind
