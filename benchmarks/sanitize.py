"""Runs NVIDIA's compute-sanitizer over a small suite that launches every kernel, forward and backward."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import itertools
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.bench import device, machine
from benchmarks.soak import append
from benchmarks.soak_cases import Case, make_graph, make_problem, suite
from graphfuse import RowWindows, ops
from graphfuse.formats import build, walk
from graphfuse.kernels import additive, additive_bwd, copies, float32_rows, launch, walk_rules
from graphfuse.nn import GraphTransformerLayer, TransformerConv, _projection
from graphfuse.ops import columns
from graphfuse.ops.logits import logits
from graphfuse.ops.unit_rows import unit_rows

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_COMPILERS = 16  # processes that compile the suite before a tool runs it
_NODES, _SLICE = 189, 64  # the hub's windows and rows are cut, though they are short
_WRONG = 9  # the sanitizer's exit status if it finds something
_MARK = "suite: "  # begins the line on which the suite says what it launched
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a tool found something or did not finish, 2 if there is no compute-sanitizer."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sanitize", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="default all, one by one")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default benchmarks/results/<gpu>/reliability/sanitize.jsonl"
    )
    parser.add_argument(
        "--suite", action="store_true", help="launch the suite, without a sanitizer, and stop"
    )
    parser.add_argument(
        "--share", nargs=2, type=int, default=(0, 1), metavar=("K", "N"),
        help="with --suite: every N-th part of it, from the K-th on (from 0)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.suite:
        return run_suite(share=(given.share[0], given.share[1]))
    program = shutil.which("compute-sanitizer")
    if program is None:
        print(
            "compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit, in its folder bin",
            file=sys.stderr,
        )
        return 2
    if device().type == "cuda":
        compile_suite(min(_COMPILERS, os.cpu_count() or 1))
    rows = []
    for tool in given.tool:
        row, output = sanitize(program, tool)
        append(given.out, "sanitize", row)
        rows.append(row)
        if row["status"] != "ok":
            print(output)
        print(f"{tool}: {row['status']}, {row['errors']} errors, {row['launches']} launches", flush=True)
    return int(any(row["status"] != "ok" for row in rows))


def compile_suite(processes: int) -> None:
    """Fills Triton's cache, which takes longer than all else: a share of the suite a process."""
    command = [sys.executable, "-m", "benchmarks.sanitize", "--suite", "--share"]
    running = [
        subprocess.Popen([*command, str(k), str(processes)], stdout=subprocess.DEVNULL)
        for k in range(processes)
    ]
    failed = [k for k, process in enumerate(running) if process.wait() != 0]
    if failed:
        raise RuntimeError(f"shares {failed} of the suite in {processes} fail without a sanitizer, too")


def sanitize(program: str, tool: str) -> tuple[dict[str, Any], str]:
    """Runs the suite under ``tool``: a row of results, and all that was printed."""
    environment = dict(os.environ)
    if tool in ("memcheck", "initcheck"):
        # Each tensor an allocation of its own. PyTorch's allocator cuts tensors out of large blocks, within
        # which a read past the end of one is a read of the next, and hands memory out again that an earlier
        # tensor has written, so that nothing in it counts as unwritten.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [program, "--tool", tool, "--error-exitcode", str(_WRONG), "--print-limit", "20"]
    command += ["--launch-timeout", "0"]  # importing torch may take longer than it waits by default
    command += ["--report-api-errors", "no"]  # calls by which torch and Triton ask what there is
    command += [sys.executable, "-m", "benchmarks.sanitize", "--suite"]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    errors, warnings = count_errors(done.stdout)
    said = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    suite: dict[str, Any] = json.loads(said[-1]) if said else {"kernels": {}, "missing": None}
    status, message = "ok", None
    if errors:
        status, message = "wrong", _first_error(done.stdout)
    elif errors is None or done.returncode != 0 or suite["missing"] != []:
        status, message = "error", _what_failed(done.returncode, errors, suite["missing"])
    row = {
        "tool": tool,
        "errors": errors,
        "warnings": warnings,
        "launches": sum(suite["kernels"].values()),
        "kernels": suite["kernels"],
        "status": status,
        "message": message,
        "seconds": round(seconds, 1),
        **machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return row, done.stdout


def count_errors(output: str) -> tuple[int | None, int]:
    """Errors and warnings that the sanitizer's last lines tell; no number of errors if they are missing."""
    hazards, errors = _HAZARDS.findall(output), _ERRORS.findall(output)
    if not hazards and not errors:
        return None, 0
    return sum(map(int, errors)) + sum(int(count) for count, _ in hazards), sum(
        int(count) for _, count in hazards
    )


def _first_error(output: str) -> str:
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if "=========" in line]
    return " ".join(line for line in lines[1:8] if line)[:300]


def _what_failed(status: int, errors: int | None, missing: list[str] | None) -> str:
    if errors is None:
        return f"the sanitizer printed no summary; exit status {status}"
    if missing is None:
        return f"the suite did not finish; exit status {status}"
    return f"not launched: {', '.join(missing)}" if missing else f"exit status {status}"


def run_suite(num_nodes: int = _NODES, share: tuple[int, int] = (0, 1)) -> int:
    """Launches everything, and prints how often which kernel ran; returns 1 if one did not.

    Args:
        num_nodes: Of the graphs of the soak.
        share: ``(k, n)``: only every n-th part, from the k-th on; then no kernel is missed.
    """
    with count_launches() as launched:
        for part in _parts(num_nodes, device())[share[0] :: share[1]]:
            part()
            if device().type == "cuda":
                torch.cuda.synchronize()  # a fault is one of this part
    missing = sorted(all_kernels() - set(launched)) if share[1] == 1 else []
    print(_MARK + json.dumps({"kernels": dict(sorted(launched.items())), "missing": missing}), flush=True)
    return int(bool(missing))


def _parts(num_nodes: int, on: torch.device) -> list[Callable[[], None]]:
    parts = [functools.partial(launch_case, case, num_nodes, on) for case in suite()]
    parts += [functools.partial(launch_records, on, *shape) for shape in ((4, 16), (4, 32), (1, 64))]
    others = (build_structures, launch_of_nodes, launch_as_on_large_graphs, launch_several_rows_a_program)
    parts += [functools.partial(part, on) for part in (*others, launch_rows_that_share_a_block)]
    return [*parts, functools.partial(launch_long_windows, on, 300 if on.type == "cuda" else 140)]


def launch_case(case: Case, num_nodes: int, on: torch.device) -> None:
    """A configuration of the soak, with cut windows and rows."""
    with case.forced(_SLICE if num_nodes > 2 * _SLICE else num_nodes // 2):
        make_problem(case, make_graph(num_nodes, on)).launch()


def build_structures(on: torch.device) -> None:
    """All that a record builds: of a symmetric graph and of one between two sets of nodes; no row is cut."""
    generator = torch.Generator().manual_seed(0)
    for num_src, num_dst, symmetric in ((150, 150, True), (150, 150, False), (61, 170, False)):
        place = torch.randperm(num_src * num_dst, generator=generator)[:700]
        long_row = 5 * num_src + torch.arange(min(80, num_src))
        place = torch.cat([place, long_row]).unique()  # no edge twice
        edges = torch.stack([place % num_src, place // num_src])
        edges = torch.unique(torch.cat([edges, edges.flip(0)], 1), dim=1) if symmetric else edges
        windows = RowWindows.from_edge_index(edges.to(on), (num_src, num_dst))
        for rows in (False, True):
            windows.walks(rows, True)
        for view in (windows, windows.transpose()):
            view.edges_per_row(), view.loops_per_row(), view.last_loop()
        if not windows.matches(edges.to(on)):
            raise RuntimeError("the fingerprint of the same edges differs")


def launch_of_nodes(on: torch.device) -> None:
    """AGNN's and GAT's kernels of nodes and those of a bias and a norm, which no op of the soak launches."""
    x, factor = (
        torch.randn(150, 33, device=on, requires_grad=True),
        torch.ones(1, device=on, requires_grad=True),
    )
    scaled, unit, _ = unit_rows(x, factor)
    torch.autograd.grad((scaled, unit), (x, factor), (torch.ones_like(scaled), torch.ones_like(x)))
    left, right = torch.randn(2, 3, 11, device=on, requires_grad=True).unbind()
    terms = logits(x.view(150, 3, 11), left, right)
    torch.autograd.grad(terms, (x, left, right), [torch.ones_like(term) for term in terms])
    bias = torch.randn(33, device=on, requires_grad=True)
    with mock.patch.object(columns, "LARGE", 0):
        y = columns.add_bias(x, bias)
        torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    edges = torch.randint(150, (2, 40), generator=torch.Generator().manual_seed(0)).to(on)
    layer = GraphTransformerLayer(33, 3).to(on).eval()
    with torch.no_grad(), mock.patch.object(_projection, "_PAYS", 0):  # residuals and norms of inference
        layer(x, edges)
        hub = torch.stack([torch.arange(150, device=on), torch.full((150,), 5, device=on)])
        edges = torch.cat([edges, hub], 1)
        with mock.patch.object(build, "_MIN_SLICE", 32):  # the hub's window is cut
            GraphTransformerLayer(24, 1).to(on).half().eval()(x[:, :24].half(), edges)
    for dtype in (torch.float32, torch.float16):  # gradients side by side, which start anywhere
        conv = TransformerConv(33, 7, heads=2).to(on, dtype)
        conv(x.to(dtype), edges).sum().backward()


def launch_as_on_large_graphs(on: torch.device) -> None:
    """What small graphs do without: rows copied before they are gathered, masks without self-loops."""
    edges = torch.randint(40, (2, 200), generator=torch.Generator().manual_seed(0)).to(on)
    x = torch.randn(40, 2, 7, device=on).half().requires_grad_()
    terms, scale = torch.randn(40, 2, device=on).half().requires_grad_(), torch.rand(40, device=on)
    with (
        mock.patch.object(copies, "copy_pays", lambda *sizes: True),
        mock.patch.object(launch, "prefers_rows", lambda *sizes: False),
        mock.patch.object(launch, "gat_prefers_rows", lambda *sizes: False),
        mock.patch.object(walk, "_CLEARED", 0),
    ):
        windows = RowWindows.from_edge_index(edges, (40, 40))
        results = (
            ops.spmm(
                windows, x.flatten(1), row_scale=scale, col_scale=scale, loop_weight=torch.ones_like(scale)
            ),
            ops.sparse_attention(x, x, x, windows, self_loops=True),
            ops.gat_attention(terms, terms, x, windows, self_loops=True),
        )
        for result in results:
            torch.autograd.grad(result, x, torch.ones_like(result), retain_graph=True)
    with mock.patch.object(walk_rules, "gat_lists_edges", lambda *sizes: True):
        for dim, dropout in ((8, 0.0), (8, 0.5), (16, 0.0)):
            terms, x = (torch.randn(40, 8, *width, device=on).half() for width in ((), (dim,)))
            ops.gat_attention(terms, terms, x, windows, dropout=dropout, self_loops=True)
            terms.requires_grad_()
            result = ops.gat_attention(terms, terms, x, windows, dropout=dropout, self_loops=dim == 8)
            torch.autograd.grad(result, terms, torch.ones_like(result))


def launch_records(on: torch.device, heads: int, dim: int) -> None:
    """GAT's backward by records of so many heads as a program has on large graphs: four, two or one."""
    edges = torch.randint(200, (2, 2000), generator=torch.Generator().manual_seed(0))
    edges[1, :900] = 0
    with (
        mock.patch.object(build, "_MIN_SLICE", 32),
        mock.patch.object(additive, "window_load", lambda walk: launch.Load.NORMAL),
        mock.patch.object(additive_bwd, "window_load", lambda walk: launch.Load.NORMAL),
        mock.patch.object(launch, "gat_prefers_rows", lambda *sizes: False),
    ):
        windows = RowWindows.from_edge_index(edges.to(on), (200, 200))
        x = torch.randn(200, heads, dim, device=on).half().requires_grad_()
        for dtype, dropout in itertools.product((torch.float16, torch.float32), (0.0, 0.5)):
            terms = torch.randn(200, heads, device=on, dtype=dtype, requires_grad=True)
            result = ops.gat_attention(terms, terms, x, windows, dropout=dropout, self_loops=True)
            torch.autograd.grad(result, (terms, x), torch.ones_like(result))


def launch_rows_that_share_a_block(on: torch.device) -> None:
    """As those of GATv2 do in half precision where rows are many; the last block is not full."""
    edges = torch.randint(41, (2, 200), generator=torch.Generator().manual_seed(0)).to(on)
    windows, table = RowWindows.from_edge_index(edges, (41, 41)), launch.gatv2_row
    with mock.patch.object(launch, "gatv2_row", lambda *call: table(*call)._replace(packed=4)):
        for heads, dim in ((8, 8), (4, 32)):
            x, y = torch.randn(2, 41, heads, dim, device=on).half().requires_grad_().unbind()
            result = ops.gatv2_attention(x, y, torch.ones_like(x[0]), windows, self_loops=True)
            torch.autograd.grad(result, (x, y), torch.ones_like(result))


def launch_several_rows_a_program(on: torch.device) -> None:
    """What small graphs do without, too: programs of several rows, one long and another's; three kernels."""
    edges = torch.randint(41, (2, 200), generator=torch.Generator().manual_seed(0))
    hub = torch.stack([torch.arange(100) % 41, torch.full((100,), 20)])
    windows = RowWindows.from_edge_index(torch.cat([edges, hub], 1).to(on), (41, 41))
    x, weight = torch.randn(41, 2, 8, device=on), torch.rand(300, device=on)
    many = launch.spmm_row(16, None, 10**6, 10**6, 0)
    with (
        mock.patch.object(float32_rows, "rows_of_gat", lambda *counts: 2),
        mock.patch.object(launch, "spmm_row", lambda *counts: many),
    ):
        ops.gat_attention(x[..., 0], x[..., 1], x, windows)
        ops.spmm(windows, x.flatten(1), weight)
    x.requires_grad_()
    with mock.patch.object(float32_rows, "one_backward", lambda *counts: False):  # backward in three kernels
        for result in (
            ops.sparse_attention(x, x, x, windows, dropout=0.5),
            ops.gatv2_attention(x, x, x[0].detach(), windows, dropout=0.5),
        ):
            torch.autograd.grad(result, x, torch.ones_like(result))


def launch_long_windows(on: torch.device, num_src: int) -> None:
    """Windows so long that they make do with the maximum of their first entries, and one that may not."""
    edges = torch.rand(33, num_src, generator=torch.Generator().manual_seed(0)) < 0.3
    windows = RowWindows.from_edge_index(edges.nonzero().t().flip(0).to(on), (num_src, 33))
    for heads, dim in ((2, 8), (1, 16), (3, 16)):
        x = torch.randn(num_src, heads, dim, device=on).half().requires_grad_()
        own = torch.randn(33, heads, dim, device=on).half().requires_grad_()
        source, receiver = x.detach()[..., 0].requires_grad_(), own.detach()[..., 0].requires_grad_()
        later = receiver.detach().clone()
        later[17] = -300  # its weights would all be 0
        results = [
            ops.sparse_attention(own, x, x, windows),
            ops.sparse_attention(own, x, x, windows, key_scale=x.new_ones(num_src, heads).float()),
            ops.gat_attention(source, receiver, x, windows),
            ops.gat_attention(source, later, x, windows),
        ]
        with torch.no_grad():  # without the sums that the gradient of receivers takes
            ops.gat_attention(source, receiver, x, windows)
        for result in results:
            torch.autograd.grad(result, x, torch.ones_like(result))


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """While it lasts, launches are counted by the name of their kernel."""
    from graphfuse.formats import quick_kernels
    from graphfuse.kernels.run import Launch

    launched: Counter[str] = Counter()
    call, build = Launch.__call__, quick_kernels.launch

    def counted_call(self: Launch, *arguments: Any) -> None:
        # the first call of a Launch may call itself, on what was compiled for another
        with mock.patch.object(Launch, "__call__", call):
            call(self, *arguments)
        launched[_name(self._kernel)] += 1

    def counted_launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched[_name(kernel)] += 1
        build(kernel, *arguments, **options)

    with (
        mock.patch.object(Launch, "__call__", counted_call),
        mock.patch.object(quick_kernels, "launch", counted_launch),
    ):
        yield launched


def all_kernels() -> set[str]:
    """Names of the ``triton.jit`` functions that are launched; the others are called by them."""
    import graphfuse.kernels
    from graphfuse.formats import lay_kernels, listed_kernels, quick_kernels

    modules = [
        importlib.import_module(f"graphfuse.kernels.{module.name}")
        for module in pkgutil.iter_modules(graphfuse.kernels.__path__)
    ]
    return {
        _name(value)
        for module in (*modules, quick_kernels, lay_kernels, listed_kernels)
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


if __name__ == "__main__":
    sys.exit(main())
