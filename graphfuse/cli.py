"""The command ``graphfuse``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import graphfuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="graphfuse", description=graphfuse.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=graphfuse.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    env = commands.add_parser("env", help="versions, GPUs, and which layers can fuse here and why not")
    env.add_argument("--json", action="store_true", help="print one JSON object")
    env.set_defaults(run=_env)

    doctor = commands.add_parser("doctor", help="a short numerical self-check; exit status 1 on failure")
    doctor.set_defaults(run=_doctor)

    train = commands.add_parser(
        "train",
        help="train a model from a configuration file",
        description="Example: graphfuse train configs/cora_gcn.yaml lr=0.005 --seeds 20 --compare",
    )
    train.add_argument("config", nargs="?", help="a YAML file, see configs/")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    train.add_argument("--seeds", type=int, default=1, help="how often to train, with seeds counted up")
    train.add_argument("--layers", choices=["graphfuse", "pyg"], help="whose layers; same as layers=...")
    train.add_argument("--compare", action="store_true", help="train with both, and print the ratio")
    train.add_argument("--cuda-graph", action="store_true", help="capture the training step; cuda_graph=true")
    train.add_argument("--data-root", help="folder of data sets; else GRAPHFUSE_DATA, else a cache folder")
    train.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    train.add_argument("--list", action="store_true", help="list the data sets and stop")
    train.add_argument("--json", action="store_true", help="end with one line of JSON")
    train.set_defaults(run=_train)

    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


def _env(given: argparse.Namespace) -> int:
    from graphfuse.env import describe

    found = describe()
    if given.json:
        print(json.dumps(found))
        return 0
    for section in ("versions", "optional"):
        print(f"{section}:")
        for name, version in found[section].items():
            print(f"  {name:<16} {version or '-'}")
    print("GPUs:")
    for gpu in found["gpus"]:
        print(f"  {gpu['name']}, compute capability {gpu['capability']}")
    if not found["gpus"]:
        print("  none")
    cache = found["kernel_cache"]
    print(f"kernel cache: {cache['path']} ({'writable' if cache['writable'] else 'NOT writable'})")
    print("layers:")
    for name, reasons in found["layers"].items():
        print(f"  {name:<16} {'; '.join(reasons) or 'fused'}")
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from graphfuse.env import self_check

    start = time.perf_counter()
    failed = 0
    for what, problem in self_check():
        print(f"{'ok  ' if problem is None else 'FAIL'} {what}" + ("" if problem is None else f": {problem}"))
        failed += problem is not None
    verdict = f"{failed} failed" if failed else "all well"
    print(f"{verdict} in {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0


def _train(given: argparse.Namespace) -> int:
    from graphfuse.train import config, datasets, report

    if given.list:
        print("\n".join(datasets.NAMES))
        return 0
    if given.config is None:
        return _refuse("name a configuration file, for example configs/quickstart.yaml")
    if given.seeds < 1:
        return _refuse(f"--seeds must be at least 1 (got {given.seeds})")
    overrides = list(given.overrides)
    overrides += [f"layers={given.layers}"] if given.layers else []
    overrides += ["cuda_graph=true"] if given.cuda_graph else []
    settings, text = config.load(given.config, overrides)
    if given.print_config:
        print(text.rstrip())
        return 0
    try:
        found = report.run(settings, given.seeds, given.compare, given.data_root, progress=True)
    except (datasets.DatasetError, ValueError) as error:
        return _refuse(str(error))
    print(report.table(found))
    if given.json:
        print(json.dumps(found))
    return 0


def _refuse(message: str) -> int:
    print(f"graphfuse train: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
