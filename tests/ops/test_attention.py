"""Sparse attention against its definition: outputs and every gradient, on every hostile graph."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops, reference
from graphfuse.kernels import launch, merge_shapes
from graphfuse.testing import GRAPHS, check
from tests.pairs import in_turns, with_dtypes

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def draw(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, dim: int, seed: int = 0
) -> tuple[RowWindows, Tensor, dict[str, Tensor]]:
    edge_index, (num_src, num_dst) = GRAPHS[graph](device)
    generator = torch.Generator(device).manual_seed(seed)
    given = {
        name: torch.randn(rows, heads, dim, device=device, generator=generator).to(dtype).requires_grad_()
        for name, rows in (("q", num_dst), ("k", num_src), ("v", num_src))
    }
    return RowWindows.from_edge_index(edge_index, (num_src, num_dst)), edge_index, given


def check_attention(
    graph: str, device: torch.device, dtype: torch.dtype, heads: int, dim: int, **options: Any
) -> None:
    windows, edge_index, given = draw(graph, device, dtype, heads, dim)
    op = functools.partial(ops.sparse_attention, windows=windows, **options)
    more = range(1, 4) if device.type == "cuda" else ()  # the interpreter is slow
    draws = (given, *(draw(graph, device, dtype, heads, dim, seed)[2] for seed in more))
    check(op, functools.partial(reference.sparse_attention, edge_index, **options), *draws)


def narrow(walked: str) -> torch.dtype:
    """A dtype that the kernel takes, float32 if it can."""
    return torch.float32 if walked == "rows" else torch.float16


@pytest.mark.parametrize(("graph", "dtype"), with_dtypes(GRAPHS, DTYPES), ids=str)
def test_output_and_gradients_match_definition(
    graph: str, dtype: torch.dtype, walked: str, device: torch.device
) -> None:
    turn = list(GRAPHS).index(graph) + DTYPES.index(dtype)
    if walked == "windows" and dtype is torch.float32:
        dtype = torch.float16  # windows take half precision alone: another turn of it
    heads, dim = [(1, 8), (3, 7), (2, 16), (4, 1)][turn % 4]
    check_attention(graph, device, dtype, heads, dim)


@pytest.mark.parametrize("heads_dim", [(3, 8), (5, 7), (2, 16)], ids=str)
def test_groups_of_heads(heads_dim: tuple[int, int], device: torch.device) -> None:
    assert launch.attention_group(*heads_dim) > 1
    for dropout in (0.0, 0.3):
        seed = torch.tensor([9], device=device)
        check_attention("ragged", device, torch.float16, *heads_dim, dropout=dropout, seed=seed)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales(scale: float, walked: str, device: torch.device) -> None:
    check_attention("ragged", device, narrow(walked), 2, 8, scale=scale)


@pytest.mark.parametrize("heads_dim", [(1, 33), (1, 100), (8, 8), (5, 24), (1, 256), (3, 200)], ids=str)
def test_widths(heads_dim: tuple[int, int], walked: str, device: torch.device) -> None:
    check_attention("bipartite", device, narrow(walked), *heads_dim, scale=0.1)


def wide(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    edge_index = torch.randint(3, (2, 150), generator=torch.Generator().manual_seed(0))
    edge_index[0] = torch.arange(150) % 70
    return edge_index.to(device), (70, 3)


def crowd(device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """Rows of more slices than a merge loads at a time, in both directions, of 32 edges each."""
    return torch.randint(3, (2, 1800), generator=torch.Generator().manual_seed(0)).to(device), (3, 3)


@pytest.mark.parametrize("graph", ["hub", "wide", "crowd"])
def test_slices(graph: str, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    monkeypatch.setitem(GRAPHS, "wide", wide)
    monkeypatch.setitem(GRAPHS, "crowd", crowd)
    windows, _, _ = draw(graph, device, torch.float32, 1, 1)
    least = 3 * merge_shapes.of_softmax(1, 16).slots if (graph, walked) == ("crowd", "rows") else 0
    assert windows.walks(walked == "rows", False).forward.num_slots > least
    check_attention(graph, device, narrow(walked), 2, 12)
    check_attention(graph, device, narrow(walked), 2, 12, dropout=0.4, seed=torch.tensor([7], device=device))


@pytest.mark.parametrize(
    ("graph", "dtype"), with_dtypes(["repeated", "self_loops", "bipartite"], DTYPES), ids=str
)
def test_dropout(graph: str, dtype: torch.dtype, walked: str, device: torch.device) -> None:
    seed = torch.tensor([(3 << 40) + 5], device=device)
    check_attention(graph, device, dtype, 3, 8, dropout=0.3, seed=seed)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropped_weights_are_independent(rate: float) -> None:
    """Rows, columns, heads, copies, squares, both directions, seeds: what a product of hashes could tie."""
    side = torch.arange(400)
    pairs = torch.cartesian_prod(side, side).t()

    def drawn(seed: int) -> Tensor:  # copy, source, receiver, head
        keep = reference.attention.kept(torch.cat([pairs, pairs], 1), 2, rate, torch.tensor([seed]))
        return ((keep.double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5).view(2, 400, 400, 2)

    z, next_seed, far_seed = drawn(1 << 40 | 9), drawn(1 << 40 | 10), drawn(2 << 40 | 9)
    size = z.numel()
    one = z[0, :, :, 0]
    found = {
        "mean": z.mean() * size**0.5,
        "heads": (z[..., 0] * z[..., 1]).mean() * (size / 2) ** 0.5,
        "copies": (z[0] * z[1]).mean() * (size / 2) ** 0.5,
        "squares": (one[::2, ::2] * one[1::2, ::2] * one[::2, 1::2] * one[1::2, 1::2]).mean() * 200,
        "sources": (one[1:] * one[:-1]).mean() * (399 * 400) ** 0.5,
        "receivers": (one[:, 1:] * one[:, :-1]).mean() * (399 * 400) ** 0.5,
        "directions": (one * one.t()).triu(1).sum() / (399 * 200) ** 0.5,
        "seeds": (z * next_seed).mean() * size**0.5,
        "upper bits of seeds": (z * far_seed).mean() * size**0.5,
    }
    assert {name for name, value in found.items() if value.abs() > 4} == set()
    # the largest singular value of independent draws is 2 sqrt(n); a mask made of rows and columns has others
    assert torch.linalg.matrix_norm(one, 2) < 2.1 * 400**0.5


def test_dropout_rate_and_expectation(device: torch.device) -> None:
    windows, edge_index, given = draw("self_loops", device, torch.float32, 4, 4)
    seeds = [torch.tensor([seed], device=device) for seed in range(24)]
    keep = torch.stack([reference.attention.kept(edge_index, 4, 0.25, seed) for seed in seeds]).double()
    deviation = (0.25 * 0.75 / keep.numel()) ** 0.5
    assert abs(keep.mean().item() - 0.75) < 4 * deviation
    assert keep.mean(0).min() > 0.2  # no edge or head is always dropped
    plain = ops.sparse_attention(**given, windows=windows)
    drawn = [ops.sparse_attention(**given, windows=windows, dropout=0.25, seed=seed) for seed in seeds]
    errors = torch.stack(drawn) - plain
    assert errors.mean().abs() < 5 * errors.mean((1, 2, 3)).std() / len(seeds) ** 0.5 + 1e-6
    again = ops.sparse_attention(**given, windows=windows, dropout=0.25, seed=seeds[0])
    assert torch.equal(again, drawn[0]) and not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(0)
    one = ops.sparse_attention(**given, windows=windows, dropout=0.25)
    assert not torch.equal(one, ops.sparse_attention(**given, windows=windows, dropout=0.25))
    assert torch.equal(plain, ops.sparse_attention(**given, windows=windows, dropout=0.0, seed=seeds[0]))


@pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
def test_the_maximum_is_a_true_one(level: float, walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw("self_loops", device, narrow(walked), 2, 8)
    with torch.no_grad():
        given["q"].fill_(level / 8)
        given["k"].fill_(1.0)
    op = functools.partial(ops.sparse_attention, windows=windows, scale=1.0)
    check(op, functools.partial(reference.sparse_attention, edge_index, scale=1.0), given)


def test_rows_without_edges_are_zero_with_finite_gradients(walked: str, device: torch.device) -> None:
    windows, edge_index, given = draw("isolated", device, narrow(walked), 2, 8)
    out = ops.sparse_attention(**given, windows=windows)
    empty = torch.bincount(edge_index[1], minlength=45) == 0
    assert empty.any() and not out[empty].any()
    grads = torch.autograd.grad(out.square().sum(), list(given.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][empty].any()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_reach_their_neighbours_alone(
    value: float, dropout: float, walked: str, device: torch.device
) -> None:
    windows, edge_index, given = draw("self_loops", device, narrow(walked), 3, 8)
    options = {"dropout": dropout, "seed": torch.tensor([5], device=device)}
    for name in "qkv":
        with torch.no_grad():
            spoiled = {other: tensor.clone() for other, tensor in given.items()}
            spoiled[name][11, 1, 2] = value
            out = ops.sparse_attention(**spoiled, windows=windows, **options)
            wanted = reference.sparse_attention(edge_index, **spoiled, **options)
        reached = int((~wanted.isfinite()).sum())
        assert (value == value or reached > 0) and reached < wanted.numel() // 2
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_strided_rows_and_gradients(device: torch.device) -> None:
    windows, edge_index, _ = draw("ragged", device, torch.float32, 1, 1)
    qkv = torch.randn(33, 3 * 16, device=device, requires_grad=True)

    def attend(function: Any, *graph: Any, **options: Any) -> Tensor:
        q, k, v = (part.unflatten(1, (2, 8)) for part in qkv.split(16, 1))
        out = function(*graph, q, k, v, **options)
        return torch.autograd.grad(out.sum(), qkv)[0]  # an expanded gradient

    ours = attend(ops.sparse_attention, windows=windows)
    torch.testing.assert_close(ours, attend(reference.sparse_attention, edge_index), rtol=1e-4, atol=1e-5)
    heads_first = torch.randn(2, 33, 8, device=device).transpose(0, 1)
    out = ops.sparse_attention(heads_first, heads_first, heads_first, windows)
    wanted = reference.sparse_attention(edge_index, heads_first, heads_first, heads_first)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float64 runs in the interpreter alone")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(dropout: float) -> None:
    seed = torch.tensor([1])
    for graph in ("one_edge", "bipartite_tall"):
        windows, _, given = draw(graph, torch.device("cpu"), torch.float64, 1, 2)
        op = functools.partial(ops.sparse_attention, windows=windows, dropout=dropout, seed=seed)
        assert torch.autograd.gradcheck(op, tuple(given.values()), fast_mode=True)


def test_mistakes_are_named(device: torch.device) -> None:
    windows, _, given = draw("bipartite", device, torch.float32, 2, 4)
    q, k, v = (given[name].detach() for name in "qkv")
    attend = functools.partial(ops.sparse_attention, windows=windows)
    with pytest.raises(ValueError, match=r"`k` must have shape \[50, 2, 4\] \(got \[21, 2, 4\]\)"):
        attend(q, q, v)
    with pytest.raises(ValueError, match=r"`q` must have shape \[21, heads, head_dim\] \(got \[21, 8\]\)"):
        attend(q.flatten(1), k, v)
    with pytest.raises(ValueError, match=r"`v` must have the dtype of `q`"):
        attend(q, k, v.half())
    with pytest.raises(ValueError, match=r"`dropout` must be in \[0, 1\) \(got 1.0\)"):
        attend(q, k, v, dropout=1.0)
    with pytest.raises(ValueError, match=r"`seed` must be int64\[1\]"):
        attend(q, k, v, dropout=0.5, seed=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"head_dim of at most 256 \(got 300\)"):
        attend(q.new_ones(21, 1, 300), k.new_ones(50, 1, 300), k.new_ones(50, 1, 300))


@pytest.mark.gpu
def test_float64_on_a_gpu_points_elsewhere() -> None:
    windows, _, given = draw("bipartite", torch.device("cuda"), torch.float64, 2, 4)
    with pytest.raises(ValueError, match="`q` does not fit the kernels: float64 runs on PyG's path"):
        ops.sparse_attention(**given, windows=windows)


def test_opcheck(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4)
    packed = (windows.packed_rows, None, False, *windows.shape)
    arguments = (*packed, 0.5, 0.0, False, *given.values(), None, None, None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.graphfuse.attention.default, arguments, test_utils=checks)


def test_compile_has_no_graph_break(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.sparse_attention(q * 2, k, v, windows).square().sum()

    wanted = torch.autograd.grad(loss(**given), list(given.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(**given), list(given.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def check_scaled_keys(
    graph: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    reorder: str = "natural",
    **options: Any,
) -> None:
    """Keys that are values times a factor, of which the op reads values and factor alone."""
    windows, edge_index, given = draw(graph, device, dtype, heads, dim)
    windows = RowWindows.from_edge_index(edge_index, windows.shape[::-1], reorder)
    generator = torch.Generator(device).manual_seed(2)
    scale = torch.rand(windows.shape[1], heads, device=device, generator=generator) + 0.5
    x = {"q": given["q"], "x": given["v"], "key_scale": scale.requires_grad_()}
    options["seed"] = torch.tensor([3], device=device)

    def op(q: Tensor, x: Tensor, key_scale: Tensor) -> Tensor:
        k = (x * key_scale[:, :, None]).to(x.dtype)
        return ops.sparse_attention(q, k, x, windows, key_scale=key_scale.detach(), **options)

    def definition(q: Tensor, x: Tensor, key_scale: Tensor) -> Tensor:
        k = (x * key_scale[:, :, None]).to(x.dtype)
        return reference.sparse_attention(edge_index, q, k, x, **options)

    check(op, definition, x)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (1, 128), (4, 16)])
def test_scaled_keys_of_rows_that_a_warp_copies_together(heads: int, dim: int, device: torch.device) -> None:
    """Where columns of a step may be dealt out, each keeps its own factor."""
    check_scaled_keys("hub", device, torch.float16, heads, dim)


@pytest.mark.parametrize(("graph", "loops"), in_turns(["ragged", "repeated", "hub"], [True, False]))
def test_scaled_keys_that_are_the_values(
    graph: str, loops: bool, walked: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    check_scaled_keys(graph, device, narrow(walked), 3, 8, self_loops=loops)
    check_scaled_keys(graph, device, torch.float16, 1, 24, self_loops=loops, dropout=0.3)


def test_scaled_keys_are_not_read(walked: str, device: torch.device) -> None:
    windows, _, given = draw("ragged", device, narrow(walked), 2, 4)
    scale = torch.full((33, 2), 0.5, device=device)  # exact in half precision
    q, _, v = given.values()
    wanted = ops.sparse_attention(q, 0.5 * v, v, windows, key_scale=scale)
    found = ops.sparse_attention(q, torch.full_like(v, torch.nan), v, windows, key_scale=scale)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(wanted, ops.sparse_attention(q, 0.5 * v, v, windows), rtol=1e-2, atol=1e-3)


def test_compile_keeps_scaled_keys(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4)
    scale = torch.linspace(0.5, 1.5, 66, device=device).view(33, 2).requires_grad_()
    x = {"q": given["q"], "v": given["v"], "scale": scale}

    def loss(q: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        k = scale[:, :, None] * v
        return ops.sparse_attention(q, k, v, windows, key_scale=scale.detach()).square().sum()

    wanted = torch.autograd.grad(loss(**x), list(x.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(**x), list(x.values()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_scaled_keys_want_constants(device: torch.device) -> None:
    windows, _, given = draw("ragged", device, torch.float32, 2, 4)
    scale = torch.ones(33, 2, device=device)
    call = functools.partial(ops.sparse_attention, **given, windows=windows)
    with pytest.raises(ValueError, match=r"`key_scale` must have shape \[33, 2\] \(got \[2, 33\]\)"):
        call(key_scale=scale.t())
    with pytest.raises(ValueError, match=r"`key_scale` must be torch.float32 \(got torch.float16\)"):
        call(key_scale=scale.half())
    with pytest.raises(ValueError, match="`key_scale` must not require a gradient, which goes to `k`"):
        call(key_scale=scale.clone().requires_grad_())
    numbers = {
        "edge_query": torch.ones(windows.shape[0], 2, 3, device=device),
        "edge_attr": torch.ones(windows.num_edges, 3, device=device),
    }
    with pytest.raises(ValueError, match=r"`key_scale` wants edges without numbers \(got `edge_attr`\)"):
        call(key_scale=scale, **numbers)
