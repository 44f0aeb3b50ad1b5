"""What was compiled for one graph is launched for the next, and never for one that it does not fit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import graphfuse.nn
from graphfuse.kernels import run


def kernel(a_ptr, b_ptr, size, stride, OPTION: tl.constexpr, ACC: tl.constexpr):
    pass


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="of Triton's inside")
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
        assert found.setdefault(run.specialization(jitted, arguments), theirs) == theirs
    sizes = [run.specialization(jitted, (*tensors[:2], size, 3, True, tl.float32)) for size in numbers[:7]]
    assert len(set(sizes)) == 1  # a number of nodes or edges makes no difference


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "TransformerConv"])
def test_the_next_batch_compiles_nothing(name: str) -> None:
    conv, known = getattr(graphfuse.nn, name)(16, 32).cuda(), []
    for num_nodes in (500, 512):  # the first compiles
        edge_index = torch.randint(num_nodes, (2, 3000), device="cuda").unique(dim=1)
        conv(torch.randn(num_nodes, 16, device="cuda"), edge_index).sum().backward()
        known.append(len(run._COMPILED))
    assert known[0] == known[-1] > 0
