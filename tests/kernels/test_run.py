"""What was compiled for one graph is launched for the next, and never for one that it does not fit.

And a launch finds its operands wherever their rows are.
"""

from __future__ import annotations

import ast
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import graphfuse.nn
from benchmarks.sanitize import all_kernels
from graphfuse import RowWindows, ops
from graphfuse.kernels import run


def kernel(a_ptr, b_ptr, size, stride, OPTION: tl.constexpr, ACC: tl.constexpr):
    pass


# of two directions the second runs beside the first, and waits for it at its end
BESIDE = {"attention_bwd_row_kernel", "attention_bwd_window_kernel", "gatv2_bwd_row_kernel"}


def test_every_kernel_waits_before_anything_else() -> None:
    found = []
    for path in sorted(Path(run.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                first, last = ast.unparse(node.body[0]), ast.unparse(node.body[-1])
                if node.name in BESIDE:
                    assert first == "beside_previous() if TRANSPOSED else after_previous()", node.name
                    assert last == "if TRANSPOSED:\n    after_previous()", node.name
                    first = "after_previous()"
                assert first == "after_previous()", node.name
                found.append(node.name.removeprefix("_"))
    built = {"lay", "list", "degrees", "edges", "keys", "sort", "sums", "count", "apart", "only"}
    names = {name.removeprefix("_") for name in all_kernels()}
    assert names - {f"{name}_kernel" for name in built} == set(found)


def test_too_many_groups() -> None:
    jitted = JITFunction(kernel)
    run.Launch(jitted, 1, 1, (), (), groups=65535)
    with pytest.raises(ValueError, match=r"^kernel takes at most 65535 groups .* \(got 65536\); split them$"):
        run.Launch(jitted, 1, 1, (), (), groups=65536)


def test_arguments_are_told_apart_as_triton_tells_them_apart() -> None:
    jitted = JITFunction(kernel, do_not_specialize=["size"])
    bind = create_function_from_signature(
        jitted.signature, jitted.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    tensors = [torch.zeros(16, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.int64)]
    numbers = [0, 1, 2, 7, 16, 48, 2**31 - 1, 2**31, 2**31 + 16, 2**33 + 1]
    options = [0, 1, True, False, 0.0, -0.0, 1.0, 0.5, None]
    found: dict[Any, str] = {}
    for _ in range(3000):
        arguments: tuple[Any, ...] = (
            random.choice(tensors),
            random.choice([None, *tensors]),
            random.choice(numbers),
            random.choice(numbers),
            random.choice(options),
            random.choice([tl.float32, tl.float64]),
        )
        theirs = str(bind(*arguments)[1])  # what their cache takes for the key
        ours = run.specialization(jitted, arguments[:2], arguments[2:])
        assert found.setdefault(ours, theirs) == theirs
    sizes = [run.specialization(jitted, tensors[:2], (size, 3, True, tl.float32)) for size in numbers[:7]]
    assert len(set(sizes)) == 1  # a number of nodes or edges makes no difference


class Compiler:
    """A jitted kernel that counts what it compiles, and whose launches cost nothing."""

    def __init__(self) -> None:
        self.fn, self.params = kernel, JITFunction(kernel).params
        self.compiled = self.launched = 0
        self.run, self.function, self.packed_metadata = self.launch, None, None
        self.metadata = SimpleNamespace(num_warps=1)

    def launch(self, *_: Any) -> None:
        self.launched += 1

    def warmup(self, *_: Any, **__: Any) -> Any:
        self.compiled += 1
        return self


def test_each_alignment_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 0))
    monkeypatch.setattr(run, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(run, "INTERPRETING", False)
    monkeypatch.setattr(run, "_COMPILED", {})
    monkeypatch.setattr(run, "_overlaps", lambda index: True)
    jitted, memory = Compiler(), torch.zeros(64)
    assert memory.data_ptr() % 16 == 0
    cases = [(memory, memory), (memory[1:], memory), (memory, memory[1:]), (memory[1:], memory[2:])]
    for turn in range(3):  # the second launch is that of the next graph
        launch = run.Launch(jitted, 1, 1, (), (3, 4, 1, tl.float32))
        for a, b in cases:
            launch((a,), (b,), run.aligned(a, b), 0)
        launch((memory[3:],), (memory[3:],), False, 0)  # as the last case
        assert jitted.compiled == len(cases)
        assert jitted.launched == (turn + 1) * (len(cases) + 1)


def test_products_are_not_fused_where_float32_starts_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_overlaps", lambda index: True)
    launch, memory = run.Launch(Compiler(), 1, 1, (), ()), torch.zeros(64)
    for tensors, fused in (
        ((memory, None), True),
        ((memory, memory[1:]), False),
        ((memory[2:],), False),
        ((memory[4:], memory.half()[1:]), True),  # whose products are exact
    ):
        options = launch.options(0, *tensors)
        assert options == {"num_warps": 1, "enable_fp_fusion": fused, "launch_pdl": True}


@pytest.mark.parametrize(
    ("known", "scratch", "direct"),
    [(True, 0, True), (True, 16, False), (True, None, False), (False, 0, False)],
)
def test_what_launches_a_kernel(
    known: bool, scratch: int | None, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C function of Triton's launcher, where its arguments are known and it has no memory to allocate."""
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=None))
    monkeypatch.setattr(run, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(run, "_CALLS_C", known)
    monkeypatch.setattr(run, "HIP", False)
    launcher = SimpleNamespace(launch="C", launch_cooperative_grid=False, launch_pdl=True)
    if scratch is not None:
        launcher.global_scratch_size, launcher.profile_scratch_size = 0, scratch
    kernel = SimpleNamespace(run=launcher, function=7, packed_metadata=(4, 1, 0))
    call, _, arguments = run._launcher_of(kernel)
    assert call is (launcher.launch if direct else launcher)
    hooks = ((4, 1, 0), None, None, None)
    assert arguments == (7, *((False, True, None, None) if direct else ()), *hooks)


NUM_NODES, NUM_EDGES = 17, 34


def far(numbers: Tensor, place: int) -> Tensor:
    """The same numbers, the last row 2^31 elements and more behind the first, strides by ``place``.

    Pages that nobody touches cost nothing. As much lies before the first row: an offset of 32 bits, which
    wraps around, reads zeros there.
    """
    flat, front = numbers.detach().flatten(1), 1 << 31
    stride = front // (flat.size(0) - 1) + 64 * (place + 1)
    count = front + stride * flat.size(0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = torch.frombuffer(
        mmap.mmap(-1, count * flat.element_size(), flags=flags), dtype=flat.dtype, count=count
    )
    rows = memory.as_strided(flat.shape, (stride, 1), front)
    return rows.copy_(flat).unflatten(1, numbers.shape[1:]).requires_grad_(numbers.requires_grad)


def flattened(op: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return op(*(tensor.flatten(1) for tensor in given))


FAR: dict[str, Callable[..., Tensor]] = {
    "spmm": lambda w, q, k, v, e: flattened(lambda x: ops.spmm(w, x), q),
    "spmm_gemm": lambda w, q, k, v, e: flattened(lambda x: ops.spmm_gemm(w, x, torch.eye(16)[:9].to(x)), q),
    "sddmm": lambda w, q, k, v, e: flattened(lambda a, b: ops.sddmm(w, a, b), q, k),
    "sparse_attention": lambda w, q, k, v, e: ops.sparse_attention(q, k, v, w),
    "sparse_attention of edges": lambda w, q, k, v, e: torch.cat(
        ops.sparse_attention(q, k, v, w, edge_query=q[:, :, :4].contiguous(), edge_attr=e), -1
    ),
    "gat_attention": lambda w, q, k, v, e: ops.gat_attention(q[:, :, 0], k[:, :, 0], v, w),
    "gatv2_attention": lambda w, q, k, v, e: ops.gatv2_attention(q, k, v[0], w),
    "gated_skip": lambda w, q, k, v, e: flattened(
        lambda out, skip: ops.gated_skip(out, skip, v.flatten()[None, :48].contiguous()), q, k
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter: a GPU's memory is real")
@pytest.mark.parametrize("name", FAR)
def test_rows_may_be_2_31_elements_apart(name: str, walked: str) -> None:
    nodes = torch.arange(NUM_NODES)
    edge_index = torch.cat([torch.stack([nodes, nodes.flip(0)]), torch.stack([nodes, nodes.roll(1)])], 1)
    windows = RowWindows.from_edge_index(edge_index, (NUM_NODES, NUM_NODES))
    dtype = torch.float32 if walked == "rows" else torch.float16
    shapes = [(NUM_NODES, 2, 8)] * 3 + [(NUM_EDGES, 4)]
    near = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    grad, found = None, []
    for given in (near, [far(tensor, place) for place, tensor in enumerate(near)]):
        out = FAR[name](windows, *given)
        grad = torch.randn_like(out) if grad is None else grad
        cotangent = grad if given is near or grad.dim() == 1 else far(grad, 7)
        grads = torch.autograd.grad(out, given, cotangent, materialize_grads=True)
        found.append([out, *grads])
    assert all(map(torch.equal, *found))  # to the bit: strides are no part of the sums


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "TransformerConv"])
def test_the_next_batch_compiles_nothing(name: str) -> None:
    conv, known = getattr(graphfuse.nn, name)(16, 32).cuda(), []
    for num_nodes in (500, 512):  # the first compiles
        edge_index = torch.randint(num_nodes, (2, 3000), device="cuda").unique(dim=1)
        conv(torch.randn(num_nodes, 16, device="cuda"), edge_index).sum().backward()
        known.append(len(run._COMPILED))
    assert known[0] == known[-1] > 0
