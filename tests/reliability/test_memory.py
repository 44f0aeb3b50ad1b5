"""Memory: nothing of the size of the edges, the documented model, no leak, and what is after a lack of it."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graphfuse import RowWindows, ops
from graphfuse.formats import cache
from graphfuse.formats.memory import ADVICE
from tests.reliability import LAYERS, PLAIN, WIDTH, fused, random_edges, step

ROOT = Path(__file__).parents[2]
HALF = torch.float16
MIB = 2**20


def documented_model() -> Callable[..., int]:
    """The function ``peak_bytes`` of docs/memory.md."""
    found: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(def peak_bytes.*?)\n```", (ROOT / "docs/memory.md").read_text(), re.S)
    exec(code, found)
    return found["peak_bytes"]


def at_rest() -> int:
    """Bytes in tensors on the GPU, once nothing is to be freed that was dropped before.

    Garbage, and what autograd's thread holds of its last function: it lets go of it after it has woken the
    caller. What is freed during the next call would be missing from that call's peak.
    """
    torch.cuda.synchronize()
    gc.collect()
    now, before = torch.cuda.memory_allocated(), -1
    while now != before:
        time.sleep(0.05)
        now, before = torch.cuda.memory_allocated(), now
    return now


def cases(
    num_nodes: int, heads: int, dim: int, dtype: torch.dtype, device: Any, windows: RowWindows
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each op that the model knows."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    x, y, z = (draw(num_nodes, heads, dim) for _ in range(3))
    a, b, att = draw(num_nodes, heads), draw(num_nodes, heads), draw(heads, dim)
    cotangent, wide = draw(num_nodes, heads, dim).detach(), draw(num_nodes, heads * dim)

    def both(op: Callable[..., Tensor], *given: Tensor, flat: bool = False) -> Callable[[], Any]:
        grad = cotangent.view(num_nodes, -1) if flat else cotangent
        return lambda: torch.autograd.grad(op(*given), given, grad)

    return {
        "spmm": both(lambda x: ops.spmm(windows, x), wide, flat=True),
        "sparse_attention": both(lambda *given: ops.sparse_attention(*given, windows), x, y, z),
        "gat_attention": both(lambda *given: ops.gat_attention(*given, windows), a, b, x),
        "gatv2_attention": both(lambda *given: ops.gatv2_attention(*given, windows), x, y, att),
    }


def allocations(call: Callable[[], object]) -> tuple[int, list[int]]:
    """Bytes that the CPU's allocator has given out at most during ``call``, and those of each tensor."""
    call()  # what is prepared once
    gc.collect()
    gc.disable()  # tensors of other tests, kept by cycles, must not be freed while these are counted
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(torch.tensor([0, *sizes]).cumsum(0).max()), [size for size in sizes if size > 0]


@pytest.mark.parametrize("name", PLAIN)
def test_no_tensor_is_as_large_as_the_edges(name: str) -> None:
    """In the interpreter: the largest tensor of a training step, among 8 nodes with 260 edges."""
    if torch.cuda.is_available():
        return  # the next test's
    edge_index = torch.randint(8, (2, 260))
    layer, x = LAYERS[name].make(), torch.randn(8, WIDTH)
    fused(step, layer, x, edge_index)
    _, sizes = allocations(lambda: step(layer, x, edge_index))
    assert sizes and max(sizes) < 260 * x.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_all_tensors_together_are_smaller_than_the_edges(name: str, dtype: torch.dtype) -> None:
    """Among 20,000 nodes with 40 million edges a step needs less than one number for each edge."""
    device = torch.device("cuda")
    edge_index = (torch.rand(20_000, 20_000, device=device) < 0.1).nonzero().t().contiguous()
    layer, x = LAYERS[name].make().to(device, dtype), torch.randn(20_000, WIDTH, device=device).to(dtype)
    fused(step, layer, x, edge_index)
    before = at_rest()
    torch.cuda.reset_peak_memory_stats()
    found = step(layer, x, edge_index)
    peak = torch.cuda.max_memory_allocated() - before
    assert bool(found["out"].isfinite().all())
    assert peak < edge_index.size(1) * dtype.itemsize, f"{peak / MIB:.0f} MiB"


def test_the_model_is_what_was_measured() -> None:
    """The records of the H200 are within 15 % of the documented model, all but GATv2's of a small graph."""
    model, lines = documented_model(), []
    for name in ("spmm", "attention", "additive"):
        path = ROOT / "benchmarks/results/nvidia-h200" / f"{name}.jsonl"
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    slots = {"reddit": 2070, "products": 0}  # of the two records, as the peaks of spmm in float32 tell
    names = {"spmm": "spmm", "attention": "sparse_attention", "gat": "gat_attention"}
    ratios = []
    for record in lines:
        op = names.get(record["extra"].get("kind", record["op"]))
        ran = record["provider"] == "graphfuse" and record["status"] == "ok" and record["mode"] == "fwd+bwd"
        if op is None or not ran or record["graph"] not in slots:
            continue
        itemsize = getattr(torch, record["dtype"]).itemsize
        windows = itemsize == 2 or op == "spmm"
        if op == "gat_attention" and record["head_dim"] == 8:
            windows = False  # which walks rows
        shape = (record["num_nodes"], record["heads"], record["head_dim"], itemsize)
        bytes_ = model(op, *shape, slots=slots[record["graph"]] if windows else 0)
        ratios.append(record["peak_mib"] * MIB / bytes_)
    assert len(ratios) > 15
    assert min(ratios) > 0.85 and max(ratios) < 1.15, ratios


@pytest.mark.parametrize("op", ["spmm", "sparse_attention", "gat_attention"])
def test_the_model_counts_what_is_allocated(op: str) -> None:
    """In the interpreter, to the byte."""
    if torch.cuda.is_available():
        return  # the next test's
    windows = RowWindows.from_edge_index(random_edges(20, 20), (20, 20))
    peak, _ = allocations(cases(20, 2, 4, HALF, "cpu", windows)[op])
    assert peak == documented_model()(op, 20, 2, 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["spmm", "sparse_attention", "gat_attention", "gatv2_attention"])
def test_the_model_is_within_15_percent(op: str, dtype: torch.dtype) -> None:
    num_nodes, heads, dim = 1_000_000, 8, 8
    windows = RowWindows.from_edge_index(random_edges(num_nodes, 4_000_000, "cuda"), (num_nodes, num_nodes))
    call = cases(num_nodes, heads, dim, dtype, "cuda", windows)[op]
    call()
    before = at_rest()
    torch.cuda.reset_peak_memory_stats()
    call()
    peak = torch.cuda.max_memory_allocated() - before
    rows = op == "gatv2_attention" or (dtype is torch.float32 and op != "spmm")
    slots = 0 if rows else max(windows._structure.scalars[-2:])
    expected = documented_model()(op, num_nodes, heads, dim, dtype.itemsize, slots=slots)
    assert 0.85 < peak / expected < 1.15, f"{peak / MIB:.1f} MiB, wanted {expected / MIB:.1f}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_ten_thousand_steps_leak_nothing(name: str) -> None:
    device = torch.device("cuda")
    edge_index = random_edges(64, 200, device)
    layer, x = LAYERS[name].make().to(device), torch.randn(64, WIDTH, device=device)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    after: list[tuple[int, int]] = []
    for count in (200, 1_800, 8_000):
        for _ in range(count):
            step(layer, x, edge_index)
        after.append((at_rest(), resident()))
    assert after[1][0] == after[2][0]
    assert after[2][1] - after[1][1] < 16 * MIB  # less than 2 KiB of the host's a step


def test_graphs_that_come_and_go_leave_nothing(device: torch.device) -> None:
    """As mini-batches do: no record, no plan and no tensor of a dead graph stays."""

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    layer, x = LAYERS["GCNConv"].make().to(device), torch.randn(10, WIDTH, device=device)
    counts, known = [], len(list(cache._KNOWN.values()))
    for count in (3, 12):
        for seed in range(count):
            step(layer, x, random_edges(10, 8, device, seed))
        counts.append(tensors())
    assert counts[1] <= counts[0]
    assert len(list(cache._KNOWN.values())) <= known


@pytest.mark.parametrize("when", ["build", "forward", "backward"])
@pytest.mark.parametrize("name", PLAIN)
def test_the_error_says_what_to_change(
    name: str, when: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 27.38 GiB.")

    layer = LAYERS[name].make().to(device)
    x, edges = torch.randn(12, WIDTH, device=device), random_edges(12, 30, device)
    out = None if when == "build" else layer(x, edges)
    if when == "build":
        monkeypatch.setattr("graphfuse.formats.inputs.check_sizes", full)
    else:
        monkeypatch.setattr("graphfuse.kernels.run.Launch.__call__", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        if out is None:
            RowWindows.from_edge_index(edges)
        elif when == "forward":
            layer(x, edges)
        else:
            out.sum().backward()
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 27.38 GiB. graphfuse: half precision,")
    assert text.count("graphfuse") == 1


def fill(device: torch.device) -> list[Tensor]:
    """Tensors that take all memory that the process may still have, but for pieces below 1 MiB."""
    taken, size = [], torch.cuda.get_device_properties(device).total_memory
    while size >= MIB:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


@pytest.mark.gpu
def test_after_a_lack_of_memory_all_is_as_before() -> None:
    """In forward, in backward and while a record is built: the next call has its memory, and its bits."""
    device = torch.device("cuda")
    layer = LAYERS["TransformerConv"].make(64, 64).to(device)
    small, edges = torch.randn(100, 64, device=device), random_edges(100, 400, device)
    wanted = fused(step, layer, small, edges)
    x = torch.randn(400_000, 64, device=device, requires_grad=True)
    edge_index = random_edges(400_000, 2_000_000, device)
    out = layer(x, edge_index)
    cotangent = torch.ones_like(out)
    torch.autograd.grad(out, list(layer.parameters()), cotangent, retain_graph=True)  # builds the transpose
    many = torch.randint(400_000, (2, 20_000_000), device=device)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total, before = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated()
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        filling = fill(device)  # the rest of blocks in which tensors of earlier tests live on
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
        for call, advice in (
            (lambda: layer(x, edge_index), None),  # a projection of PyTorch's is the first that finds no room
            (lambda: RowWindows.from_edge_index(many, (400_000, 400_000)), re.escape(ADVICE)),
            (lambda: torch.autograd.grad(out, list(layer.parameters()), cotangent), None),
        ):
            with pytest.raises(torch.OutOfMemoryError, match=advice):
                call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del filling
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    found = fused(step, layer, small, edges)
    assert all(torch.equal(found[what], wanted[what]) for what in wanted)
    assert bool(layer(x, edge_index).isfinite().all())
    assert RowWindows.from_edge_index(many, (400_000, 400_000)).num_edges == 20_000_000
