"""Sparse attention over edges that carry numbers, against its definition: both results, every gradient."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.testing import GRAPHS, check
from tests.pairs import in_turns

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 8, 3), (3, 7, 1), (2, 16, 7), (4, 1, 16)]  # heads, head_dim, edge_dim


def draw(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, dim: int, edge_dim: int
) -> tuple[RowWindows, Tensor, dict[str, Tensor]]:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = {
        "q": (num_dst, heads, dim),
        "k": (num_src, heads, dim),
        "v": (num_src, heads, dim),
        "edge_query": (num_dst, heads, edge_dim),
        "edge_attr": (edge_index.size(1), edge_dim),
    }
    given = {
        name: torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    return RowWindows.from_edge_index(edge_index, (num_src, num_dst)), edge_index, given


def joined(function: Any, *graph: Any, **given: Any) -> Tensor:
    """Both results in one, for one cotangent."""
    out, edge_sum = function(*graph, **given)
    return torch.cat([out.flatten(), edge_sum.flatten()])


def check_attention(
    graph: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], **options: Any
) -> None:
    windows, edge_index, given = draw(graph, device, dtype, *shape)
    op = functools.partial(joined, ops.sparse_attention, windows=windows, **options)
    check(op, functools.partial(joined, reference.sparse_attention, edge_index, **options), given)


@pytest.mark.parametrize(("graph", "dtype"), in_turns(GRAPHS, DTYPES), ids=str)
def test_results_and_gradients_match_definition(graph: str, dtype: torch.dtype, device: torch.device) -> None:
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype)
    check_attention(graph, device, dtype, SHAPES[turn % 4], scale=0.4)


@pytest.mark.parametrize("shape", [(8, 33, 5), (1, 256, 33), (16, 4, 100), (3, 100, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_widths(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    check_attention("bipartite", device, dtype, shape, scale=0.1)


@pytest.mark.parametrize(("graph", "dtype"), in_turns(["repeated", "self_loops", "hub"], DTYPES), ids=str)
def test_dropout(graph: str, dtype: torch.dtype, cut: bool, device: torch.device) -> None:
    seed = torch.tensor([(3 << 40) + 5], device=device)
    check_attention(graph, device, dtype, (3, 8, 5), dropout=0.3, seed=seed)


@pytest.mark.parametrize("shape", [(4, 1, 16), (2, 8, 64), (2, 16, 7), (3, 7, 1)], ids=str)
def test_an_edge_alone_weighs_one(shape: tuple[int, int, int], device: torch.device) -> None:
    """To the bit, as in the definition, however large its score."""
    heads, dim, edge_dim = shape
    num_rows = 40
    row = torch.arange(num_rows, device=device)
    edge_index = torch.stack([row.flip(0), row])
    draw = functools.partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    q, k, v = (draw(num_rows, heads, dim) for _ in range(3))
    query, attr = 3 * draw(num_rows, heads, edge_dim), draw(num_rows, edge_dim)
    windows = RowWindows.from_edge_index(edge_index, (num_rows, num_rows))
    out, edge_sum = ops.sparse_attention(q, k, v, windows, edge_query=query, edge_attr=attr)
    assert torch.equal(out, v.flip(0))
    assert torch.equal(edge_sum, attr[:, None, :].expand(-1, heads, -1))


def test_slices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    windows, _, _ = draw("hub", device, torch.float32, 1, 1, 1)
    assert windows.walks(True, False).forward.num_slots > 0
    for dtype in DTYPES:
        check_attention("hub", device, dtype, (2, 12, 3))


def test_transposed_record_and_strided_rows(device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite"](device)
    windows = RowWindows.from_edge_index(edge_index, (num_src, num_dst)).transpose()
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(num_src, 2, 8, device=device, generator=generator)
    k, v = (torch.randn(num_dst, 2, 8, device=device, generator=generator) for _ in range(2))
    edge_query = torch.randn(2, num_src, 3, device=device, generator=generator).transpose(0, 1)
    edge_attr = torch.randn(130, 7, device=device, generator=generator)[:, 2:5]
    of_edges = {"edge_query": edge_query, "edge_attr": edge_attr}
    found = ops.sparse_attention(q, k, v, windows, **of_edges)
    wanted = reference.sparse_attention(edge_index.flip(0), q, k, v, **of_edges)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    turned = of_edges | {"edge_attr": edge_attr.t().contiguous().t()}  # columns apart
    torch.testing.assert_close(ops.sparse_attention(q, k, v, windows, **turned), found)


def test_only_what_is_wanted_gets_a_gradient(device: torch.device) -> None:
    windows, edge_index, given = draw("ragged", device, torch.float32, 2, 4, 3)
    given = {
        name: tensor.detach().requires_grad_(name in ("k", "edge_query")) for name, tensor in given.items()
    }
    op = functools.partial(joined, ops.sparse_attention, windows=windows)
    check(op, functools.partial(joined, reference.sparse_attention, edge_index), given)
    for place in (0, 1):  # of the results, one alone is used
        used = [
            function(*graph, **given, **options)[place].square().sum()
            for function, graph, options in (
                (ops.sparse_attention, (), {"windows": windows}),
                (reference.sparse_attention, (edge_index,), {}),
            )
        ]
        wanted = [given["k"], given["edge_query"]]
        found, expected = (torch.autograd.grad(one, wanted) for one in used)
        assert all(grad.any() for grad in expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float64 runs in the interpreter alone")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(dropout: float) -> None:
    windows, _, given = draw("one_edge", torch.device("cpu"), torch.float64, 2, 2, 2)
    names = list(given)

    def op(*tensors: Tensor) -> Any:
        named = dict(zip(names, tensors, strict=True))
        return ops.sparse_attention(**named, windows=windows, dropout=dropout, seed=torch.tensor([1]))

    assert torch.autograd.gradcheck(op, tuple(given.values()), fast_mode=True)


def test_mistakes_are_named(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4, 3)
    given = {name: tensor.detach() for name, tensor in given.items()}
    attend = functools.partial(ops.sparse_attention, windows=windows)
    with pytest.raises(ValueError, match=r"`edge_query` must be given with `edge_attr` \(got None\)"):
        attend(**given | {"edge_query": None})
    with pytest.raises(ValueError, match=r"`edge_attr` must be given with `edge_query` \(got None\)"):
        attend(**given | {"edge_attr": None})
    with pytest.raises(ValueError, match=r"`edge_attr` must have shape"):
        attend(**given | {"edge_attr": given["edge_attr"][1:]})
    with pytest.raises(ValueError, match=r"`edge_query` must have shape \[33, 2, 3\] \(got \[33, 2, 2\]\)"):
        attend(**given | {"edge_query": given["edge_query"][:, :, 1:]})
    with pytest.raises(ValueError, match=r"`edge_attr` must have the dtype of `q`"):
        attend(**given | {"edge_attr": given["edge_attr"].half()})
    wide = given["edge_attr"].new_zeros(windows.num_edges, 2049)
    query = given["edge_query"].new_zeros(33, 2, 2049)
    with pytest.raises(ValueError, match=r"be at most 4096 \(got 2049 columns and 2 heads of 4\)"):
        attend(**given | {"edge_attr": wide, "edge_query": query})


def test_opcheck(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4, 3)
    packed = (windows.packed_rows, windows.packed_row_edges, False, *windows.shape)
    q, k, v, edge_query, edge_attr = given.values()
    arguments = (*packed, 0.5, 0.0, False, q, k, v, None, edge_query, edge_attr, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.graphfuse.attention.default, arguments, test_utils=checks)


def test_compile_has_no_graph_break(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4, 3)

    def loss(**given: Tensor) -> Tensor:
        return joined(ops.sparse_attention, windows=windows, **given).square().sum()

    wanted = torch.autograd.grad(loss(**given), list(given.values()))
    found = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(**given), list(given.values())
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


_WITHOUT_KERNELS = """
import torch
from graphfuse import RowWindows, ops
windows = RowWindows.from_edge_index(torch.randint(20, (2, 60)), (20, 20))
shapes = dict(q=(20, 2, 4), k=(20, 2, 4), v=(20, 2, 4), edge_query=(20, 2, 3), edge_attr=(60, 3))
given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
plain = dict(list(given.items())[:3])
for values in (given, plain):
    def loss(values):
        found = ops.sparse_attention(**values, windows=windows)
        return sum(one.square().sum() for one in (found if isinstance(found, tuple) else (found,)))
    wanted = torch.autograd.grad(loss(values), list(values.values()))
    found = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(values), list(values.values())
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
"""


def test_definition_runs_eager_and_compiled_where_no_kernel_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", _WITHOUT_KERNELS], check=True, env=environment, timeout=300)


@pytest.mark.parametrize("edge_dim", [0, 5])
def test_the_one_edge_of_a_row_weighs_one_in_backward(edge_dim: int, device: torch.device) -> None:
    """Forward and the two passes of backward add up a score in orders of their own: it must not show."""
    permutation = torch.randperm(60, generator=torch.Generator().manual_seed(0)).to(device)
    edge_index = torch.stack([permutation, torch.arange(60, device=device)])
    windows = RowWindows.from_edge_index(edge_index, (60, 60))
    generator = torch.Generator(device).manual_seed(1)
    shapes = [(60, 4, 32)] * 4 + [(60, 4, edge_dim), (60, edge_dim)]
    q, k, v, grad, query, attr = (torch.randn(s, device=device, generator=generator) * 4 for s in shapes)
    v.requires_grad_()
    edges = {"edge_query": query, "edge_attr": attr} if edge_dim > 0 else {}
    found = ops.sparse_attention(q, k, v, windows, **edges)
    (dv,) = torch.autograd.grad(found[0] if edge_dim > 0 else found, v, grad)
    assert torch.equal(dv[permutation], grad)
