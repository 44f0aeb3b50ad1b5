"""The command ``graphfuse``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphfuse
from graphfuse import checkout
from graphfuse.formats.reorder import METHODS
from graphfuse.train import npz

if TYPE_CHECKING:
    from torch import Tensor

    from graphfuse import RowWindows
    from graphfuse.formats.inputs import Size


class Mistake(Exception):
    """What the user asked for cannot be had: printed without a traceback, exit status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 if a check failed, 2 if there was nothing to run, 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="graphfuse",
        description=graphfuse.__doc__,
        epilog="`graphfuse COMMAND --help` lists the options of a command and shows an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=graphfuse.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_env, _add_doctor, _add_prepare, _add_plot, _add_train, _add_benchmarks):
        add(commands)

    arguments = sys.argv[1:] if arguments is None else arguments
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    if named is not None and named not in commands.choices:
        parser.error(_unknown("command", named, commands.choices))
    given, rest = parser.parse_known_args(arguments)
    if hasattr(given, "passed_on"):  # argparse keeps options apart that stand before all else
        given.passed_on, rest = [*rest, *given.passed_on], []
    if rest and (given.rest_goes_to is None or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes all of a list from before the next option, or leaves it
        getattr(given, given.rest_goes_to).extend(rest)
    try:
        status: int = given.run(given)
    except Mistake as mistake:
        print(f"graphfuse {given.command}: error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ngraphfuse {given.command}: interrupted", file=sys.stderr)
        return 130  # as shells call it
    return status


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], says: str, example: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=says,
        description=f"{says[0].upper()}{says[1:]}.",
        epilog=f"example: {example}",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, rest_goes_to=None)  # or the name of a list
    return parser


def _add_data_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-root", metavar="FOLDER", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder"
    )


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    """One sentence: the name, all that there are, and the one that was probably meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}; there are {', '.join(known)}{meant}"


# env


def _add_env(commands: Any) -> None:
    says = "versions, GPUs, settings, and which layers can fuse here and why not"
    parser = _add(commands, "env", _env, says, "graphfuse env --json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _env(given: argparse.Namespace) -> int:
    from graphfuse.env import describe

    found = describe()
    if given.json:
        print(json.dumps(found))
        return 0
    for section in ("versions", "optional", "environment"):
        print(f"{section}:")
        for name, value in found[section].items():
            print(f"  {name:<21} {'-' if value is None else value}")
    print("GPUs:")
    for gpu in found["gpus"]:
        print(f"  {gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB")
    if not found["gpus"]:
        print("  none")
    cache = found["kernel_cache"]
    print(f"kernel cache:\n  {cache['path']} ({'writable' if cache['writable'] else 'NOT writable'})")
    print("layers:")
    for name, reasons in found["layers"].items():
        print(f"  {name:<21} {'; '.join(reasons) or 'fused'}")
    return 0


# doctor


def _add_doctor(commands: Any) -> None:
    says = "a short numerical self-check of every layer, forward and backward; exit status 1 on failure"
    _add(commands, "doctor", _doctor, says, "graphfuse doctor")


def _doctor(given: argparse.Namespace) -> int:
    from graphfuse.env import hints, self_check

    start = time.perf_counter()
    failed = 0
    for what, problem in self_check():
        print(f"{'ok  ' if problem is None else 'FAIL'} {what}" + ("" if problem is None else f": {problem}"))
        failed += problem is not None
    for hint in hints():
        print(f"hint {hint}")
    verdict = f"{failed} failed" if failed else "all well"
    print(f"{verdict} in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


# prepare


def _add_prepare(commands: Any) -> None:
    says = "build the row windows of graphs and save them, for graphfuse.formats.load_windows"
    parser = _add(commands, "prepare", _prepare, says, "graphfuse prepare cora pubmed --out windows")
    parser.set_defaults(rest_goes_to="graphs")
    parser.add_argument("graphs", nargs="+", metavar="GRAPH", help=f"a data set, or {npz.WANTED}")
    parser.add_argument(
        "--out", metavar="FOLDER", help="where to write GRAPH.safetensors; else row_windows in --data-root"
    )
    parser.add_argument(
        "--edge-order", action="store_true", help="also build and save what layers with edge weights need"
    )
    says = "which rows share a window (default: %(default)s)"
    parser.add_argument("--reorder", choices=METHODS, default="natural", help=says)
    _add_data_root(parser)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each graph")


def _prepare(given: argparse.Namespace) -> int:
    from graphfuse.formats import save_windows
    from graphfuse.train import datasets

    try:
        folder = Path(given.out) if given.out else datasets.data_root(given.data_root) / "row_windows"
    except datasets.DatasetError as error:
        raise Mistake(str(error)) from error
    graphs = dict.fromkeys(given.graphs)
    names = [_name(graph) for graph in graphs]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise Mistake(f"two graphs would be written to {folder / twice}.safetensors; rename or leave out one")
    for graph in graphs:
        name, edge_index, size = _read_graph(graph, given.data_root)
        start = time.perf_counter()
        windows = _build(graph, edge_index, size, given.reorder)
        if given.edge_order:
            _ = windows.packed_rows, windows.packed_window_edges, windows.packed_row_edges
        statistics, seconds = windows.statistics(), time.perf_counter() - start
        path = folder / f"{name}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_windows(path, windows)
        except OSError as error:
            said = error.__cause__ or error  # safetensors' own words of a full disk
            raise Mistake(f"cannot write {path} ({said}); name another folder with --out") from error
        found = {
            "graph": name,
            "num_dst": windows.shape[0],
            "num_src": windows.shape[1],
            "num_edges": windows.num_edges,
            "windows": int(statistics["windows"]),
            "blocks_per_window": round(statistics["blocks_per_window"], 2),
            "nbytes": windows.nbytes,
            "seconds": round(seconds, 3),
            "file": str(path),
        }
        print(json.dumps(found) if given.json else _line(found))
    return 0


def _line(found: dict[str, Any]) -> str:
    square = (
        "{num_dst:,} nodes" if found["num_dst"] == found["num_src"] else "{num_dst:,} x {num_src:,} nodes"
    )
    rest = "{windows:,} windows, {blocks_per_window} blocks per window, {nbytes:,} bytes, {seconds} s: {file}"
    return f"{{graph}}: {square}, {{num_edges:,}} edges, {rest}".format(**found)


def _build(graph: str, edge_index: Tensor, size: Size, reorder: str = "natural") -> RowWindows:
    import torch

    from graphfuse.formats import RowWindows

    try:
        # the same integers on a GPU and a CPU
        edge_index = edge_index.to("cuda" if torch.cuda.is_available() else "cpu")
        return RowWindows.from_edge_index(edge_index, size, reorder)
    except (ValueError, IndexError) as error:
        raise Mistake(f"{graph} holds no graph: {error}") from error


def _name(graph: str) -> str:
    return Path(graph).stem if graph.endswith(".npz") else graph


def _read_graph(given: str, root: str | None) -> tuple[str, Tensor, Size]:
    """Name, edge list and ``(num_src, num_dst)`` of a data set or an ``.npz`` file."""
    from graphfuse.train import datasets

    if given.endswith(".npz"):
        try:
            return _name(given), *npz.read(given)
        except ValueError as error:
            raise Mistake(str(error)) from error
    if given not in datasets.NAMES:
        raise Mistake(f"{_unknown('data set', given, datasets.NAMES)} (or name a file, see --help)")
    try:
        dataset = datasets.load(given, root)
    except datasets.DatasetError as error:
        raise Mistake(str(error)) from error
    if dataset.task == "graph":
        raise Mistake(f"{given} is many graphs: a batch of them is cut when it is made; name one graph")
    data = dataset.data
    return given, data.edge_index, (int(data.num_nodes), int(data.num_nodes))


# plot


def _add_plot(commands: Any) -> None:
    says = "draw TCBs and edges of a graph's row windows, and a spy plot of its edges"
    parser = _add(commands, "plot", _plot, says, "graphfuse plot cora --out cora.svg")
    parser.add_argument("graph", metavar="GRAPH", help=f"a data set, a file of `prepare`, or {npz.WANTED}")
    parser.add_argument("--out", metavar="FILE", help="a .png or .svg; else GRAPH.png in this folder")
    says = "draw the windows that METHOD makes below those of rows as numbered"
    parser.add_argument("--reorder", choices=METHODS, metavar="METHOD", help=says)
    _add_data_root(parser)


def _plot(given: argparse.Namespace) -> int:
    from graphfuse import plot
    from graphfuse.formats import load_windows

    path = Path(given.out or f"{Path(given.graph).stem}.png")
    try:
        plot.check_suffix(path)
        if given.graph.endswith(".safetensors"):
            name, windows = Path(given.graph).stem, load_windows(given.graph)
        else:
            name, edge_index, size = _read_graph(given.graph, given.data_root)
            windows = _build(given.graph, edge_index, size)
        drawn = [windows]
        if given.reorder is not None:  # a file may hold other windows than those of rows as numbered
            edge_index, size = windows.edge_index(), windows.shape[::-1]
            drawn = [_build(given.graph, edge_index, size, order) for order in ("natural", given.reorder)]
        plot.write(plot.draw(drawn[0], name, *drawn[1:]), path)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise Mistake(str(error)) from error
    print(path)
    return 0


# train


def _add_train(commands: Any) -> None:
    says = "train a model from a configuration file"
    example = "graphfuse train configs/cora_gcn.yaml lr=0.005 --seeds 20 --compare"
    parser = _add(commands, "train", _train, says, example)
    parser.set_defaults(rest_goes_to="overrides")
    parser.add_argument("config", nargs="?", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--seeds", type=int, default=1, help="how often to train, with seeds counted up")
    parser.add_argument("--layers", choices=["graphfuse", "pyg"], help="whose layers; same as layers=...")
    parser.add_argument(
        "--compare", action="store_true", help="train with both; print the ratio and a test of the accuracies"
    )
    parser.add_argument(
        "--cuda-graph", action="store_true", help="capture steps and evaluations; cuda_graph=true"
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile; compile=true")
    parser.add_argument("--checkpoint", metavar="FILE", help="save the run to this file when it ends")
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="N", default=0, help="and after every N epochs"
    )
    parser.add_argument("--resume", metavar="FILE", help="go on from a file of --checkpoint, same settings")
    parser.add_argument(
        "--results", metavar="FILE", help="add JSON lines; else, with --compare, to runs/CONFIG.jsonl"
    )
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="train only what that file has no run of"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw learning curves and memory, .png or .svg")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write losses and scores for TensorBoard")
    parser.add_argument("--wandb", action="store_true", help="print each evaluation and send it to W&B")
    _add_data_root(parser)
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    parser.add_argument("--list", action="store_true", help="list the data sets and stop")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _train(given: argparse.Namespace) -> int:
    from graphfuse.nn._dispatch import NotFused
    from graphfuse.train import command, config, datasets, report

    if given.list:
        print("\n".join(datasets.NAMES))
        return 0
    if given.config is None:
        raise Mistake("name a configuration file, for example configs/quickstart.yaml")
    overrides = list(given.overrides)
    overrides += [f"layers={given.layers}"] if given.layers else []
    overrides += ["cuda_graph=true"] if given.cuda_graph else []
    overrides += ["compile=true"] if given.compile else []
    known = [field.name for field in dataclasses.fields(config.TrainConfig)]
    for key in (*_keys(given.config), *(text.split("=")[0] for text in overrides if "=" in text)):
        if key not in known:
            raise Mistake(_unknown("setting", key, known))
    settings, text = config.load(given.config, overrides)
    if settings.dataset not in datasets.NAMES:
        raise Mistake(_unknown("data set", settings.dataset, datasets.NAMES))
    if given.print_config:
        print(text.rstrip())
        return 0
    options = {field.name for field in dataclasses.fields(command.Options)} - {"name"}
    chosen = {name: value for name, value in vars(given).items() if name in options}
    try:
        found, text = command.run(settings, command.Options(Path(given.config).stem, **chosen))
    except (datasets.DatasetError, NotFused, ModuleNotFoundError, OSError, ValueError) as error:
        raise Mistake(str(error)) from error
    print(text)
    if given.json:
        print(report.to_json(found))
    return 0


def _keys(path: str) -> list[str]:
    """Settings that a configuration file names; what else is wrong with it, reading it will say."""
    import yaml

    try:
        read = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return [str(key) for key in read] if isinstance(read, dict) else []


if __name__ == "__main__":
    sys.exit(main())


# bench, tune


def _add_benchmarks(commands: Any) -> None:
    for name, program, says, example in (
        ("bench", "run", "run benchmarks", "spmm --graphs cora --quick"),
        ("tune", "tune", "time other launches", "spmm spmm_window --graphs cora --vary stages=3,5"),
    ):
        says += f", of a checkout: python -m benchmarks.{program}"
        parser = _add(commands, name, _run_of_checkout, says, f"graphfuse {name} {example}")
        parser.set_defaults(program=program)
        parser.add_argument("passed_on", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _run_of_checkout(given: argparse.Namespace) -> int:
    try:
        return checkout.run(given.program, given.passed_on)
    except checkout.NotThere as error:
        raise Mistake(str(error)) from error
