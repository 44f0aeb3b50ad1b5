"""Writes the page of results, its plots and README's figures: ``python -m benchmarks.page``.

What is written is the same for the same files. No number is typed by hand: what has no row is not there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import page_kernels, page_plots, page_readme, page_scaling, page_training, targets
from benchmarks.page_training import Training
from benchmarks.rows import Case

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_README_GPU = "nvidia-h200"
_KERNEL_PLOTS = (
    ("floor", Case.over_floor, "Time of graphfuse over the gather floor"),
    ("speedup", Case.speedup, "Time of PyG over graphfuse"),
)
_PROJECTS = "Time of attention, one head of 64, forward, over graphfuse's; float16, DF-GNN float32"
_NEEDS = "Memory of attention, one head of 64, with backward"
_SCALING = "Time over edges and features, with backward, float16"
_MARKS = ("<!-- written by benchmarks/page.py -->", "<!-- until here -->")

_HEAD = """\
# Results

Written by `python -m benchmarks.page` from `benchmarks/results/<gpu>/*.jsonl` in the repository; a test
compares the two. A row names the commit that it was measured at: check that out, and run its command. Of
each case the newest rows are shown; older ones stay in the files. [Reproduce](reproduce.md) says what is
needed to repeat them.

**Training.** Test scores are taken at the epoch of the best validation score, in percent (`mae`: an error);
mean and standard deviation over seeds. graphfuse and PyG train in turn, everything else equal. `difference`
is graphfuse minus PyG, and `p` that of Welch's two-sided test that the means are equal. Start-up is what
comes before the first epoch of the first run of a process, in none of the times, nor in the peak of memory
where start-up has one of its own; on a CPU, peak memory is that of the process, of both kinds of layers
together. [Training](training.md#what-is-measured) defines the other columns. A command adds its rows to the
file that `--results` names.

**Kernels and steps.** Times are medians of one call. The floor is a kernel that only reads the rows and
writes the result, measured in the same run. `PyG /` and `fastest other /` are times over that of graphfuse.
Others are measured in the same run, or `recorded` once where a project must be built from source. Three
numbers are the least, the median and the greatest over the cases. `reddit` and `products` are generated
stand-ins of those sizes. `benchmarks/README.md` in the repository says what a call is, how it is checked and
how it is timed.
"""

_TARGETS = """\
#### Targets

What was to be reached on this GPU, and what the newest rows say, those below or in `floors.jsonl`, which has
graphfuse alone. For cases in the last but one column kernels that read and write what `spmm` does, in as many
launches, and compute nothing miss it too; the number is theirs. What stands in the way of others:
`benchmarks/results/nvidia-h200/limits.md` in the repository.
`python -m benchmarks.targets`
"""


def write(results: Path, docs: Path, readme: Path) -> None:
    """Writes ``results.md`` and ``results/*.svg`` in ``docs``, and the marked part of ``readme``."""
    plots = docs / "results"
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.svg"):
        old.unlink()
    folders = sorted((path for path in results.iterdir() if path.is_dir()), key=_gpus_first)
    parts = [_HEAD, *(part for folder in folders for part in _of_gpu(folder, plots))]
    (docs / "results.md").write_text("\n".join(parts))
    before, rest = readme.read_text().split(_MARKS[0])
    _, after = rest.split(_MARKS[1])
    files = ((says, f"{_README_GPU}-{file}.svg") for file, _, says in _KERNEL_PLOTS)
    shown = [f"![{says}](docs/results/{file})\n" for says, file in files if (plots / file).exists()]
    inside = page_readme.text(results / _README_GPU, shown)
    readme.write_text(f"{before}{_MARKS[0]}\n\n{inside}\n{_MARKS[1]}{after}")


def _gpus_first(folder: Path) -> tuple[bool, str]:
    return folder.name == "cpu", folder.name


def _of_gpu(folder: Path, plots: Path) -> Iterator[str]:
    trainings, benches = page_training.load(folder), page_kernels.load(folder)
    if trainings or benches:
        yield f"## {_device(folder, trainings, benches)}\n"
    if trainings:
        yield f"### Training on {_device(folder, trainings, benches)}\n"
        yield from _sections(
            ("#### Accuracy\n", page_training.accuracies(trainings)),
            ("#### Time and memory\n", page_training.costs(trainings)),
            ("#### Start-up, ms\n", page_training.start_ups(trainings)),
        )
        yield from _training_plots(folder.name, trainings, plots)
    if benches:
        yield f"### Kernels and steps on {_device(folder, trainings, benches)}\n"
        yield page_kernels.summary(benches) + "\n"
        yield from _kernel_plots(folder.name, benches, plots)
        if folder.name == _README_GPU:
            yield from _sections((_TARGETS, targets.as_table(targets.of_folder(folder))))
        for name, cases in benches.items():
            yield f"#### {name}\n\n{page_kernels.SAYS[name]} `python -m benchmarks.run {name}`\n"
            if name in page_kernels.ABLATIONS:
                yield page_kernels.decisions(cases) + "\n"
            yield _folded(f"{len(cases)} cases", page_kernels.cases(cases))
        yield from _sections(("#### No result\n", page_kernels.failures(benches)))


def _device(folder: Path, trainings: Sequence[Training], benches: Mapping[str, Sequence[Case]]) -> str:
    names = [training.summary["device"] for training in trainings]
    names += [record.gpu for cases in benches.values() for case in cases for record in case.of.values()]
    return next((name for name in names if name), folder.name)


def _sections(*sections: tuple[str, str]) -> Iterator[str]:
    for head, body in sections:
        if body:
            yield f"{head}\n{body}\n"


def _folded(title: str, body: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>\n"


def _training_plots(gpu: str, trainings: Sequence[Training], plots: Path) -> Iterator[str]:
    scores = page_plots.scores(trainings)
    if scores:
        drawn = page_plots.draw_scores(scores, "Test score of each seed")
        yield _plot(plots / f"{gpu}-accuracy.svg", drawn, scores, "Test scores of all seeds")
    on_gpu = [training for training in trainings if training.summary["device"] != "cpu"]
    reached = "s, median of the seeds that reached it"
    for name, shown, file, title, unit in (
        ("epoch_ms", trainings, "epoch-time", "Time of an epoch", "ms, median"),
        ("peak_mib", on_gpu, "memory", "Peak memory", "MiB"),
        ("time_to_accuracy_s", trainings, "time-to-accuracy", "Time to the target accuracy", reached),
    ):
        data = page_plots.values(shown, name)
        if data:
            yield _plot(plots / f"{gpu}-{file}.svg", page_plots.draw_bars(data, title, unit), data, title)


def _kernel_plots(gpu: str, benches: Mapping[str, Sequence[Case]], plots: Path) -> Iterator[str]:
    for file, of, title in _KERNEL_PLOTS:
        left_out = page_kernels.OTHER_FLOORS if file == "floor" else ()
        data = page_plots.ratios({name: benches[name] for name in benches if name not in left_out}, of)
        if data:
            drawn = page_plots.draw_ratios(data, title, "ratio")
            yield _plot(plots / f"{gpu}-{file}.svg", drawn, data, title)
    in_mib = functools.partial(page_plots.draw_bars, unit="MiB beyond the inputs")
    for file, data, draw, title in (
        ("projects", page_scaling.speedups(benches), page_scaling.draw_speedups, _PROJECTS),
        ("needs", page_scaling.memory(benches), in_mib, _NEEDS),
        ("scaling", page_scaling.scaling(benches), page_scaling.draw_scaling, _SCALING),
    ):
        if data:
            yield _plot(plots / f"{gpu}-{file}.svg", draw(data, title), data, title)


def _plot(path: Path, drawn: page_plots.Figure, data: page_plots.Data, says: str) -> str:
    page_plots.write(drawn, data, path)
    return f"![{says}](results/{path.name})\n"


if __name__ == "__main__":
    argparse.ArgumentParser("python -m benchmarks.page", description=__doc__, allow_abbrev=False).parse_args()
    write(_RESULTS, _ROOT / "docs", _ROOT / "README.md")
