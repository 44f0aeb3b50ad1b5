"""Converted models on a graph that is large enough for windows, and has rows that are cut into slices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphfuse
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import assert_close
from tests._models import EDGE_DIM, MODELS, TYPES, WIDTH, Case, Inputs, run, tensors
from tests.nn.test_additive_matrix import random_edges, with_hub

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")
# Pooling chooses nodes, and rounding may choose others; VGAE keeps a graph in one dtype.
LEFT_OUT = ("GraphUNet", "SAGPooling", "ASAPooling", "VGAE")
NAMES = [name for name, case in MODELS.items() if case.swapped > 0 and name not in LEFT_OUT]


def of_size(num_nodes: int, device: Any, dtype: torch.dtype) -> Inputs:
    """What the models are called with, with ``num_nodes`` nodes; the same numbers in every dtype."""
    generator, edge_index = torch.Generator().manual_seed(0), with_hub(num_nodes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs, num_edges, num_items = Inputs(device), edge_index.size(1), num_nodes // 3
    inputs.x, inputs.edge_index = draw(num_nodes, WIDTH).requires_grad_(), edge_index.to(device)
    inputs.edge_attr, inputs.edge_weight = draw(num_edges, EDGE_DIM), draw(num_edges).abs()
    inputs.x_dict = {"user": inputs.x, "item": draw(num_items, WIDTH).requires_grad_()}
    likes = random_edges(num_nodes, num_items, 3 * num_nodes).to(device)
    inputs.edge_index_dict = {TYPES[0]: likes, TYPES[1]: likes.flip(0)}
    return inputs


def joined(model: torch.nn.Module, case: Case, inputs: Inputs) -> list[Tensor]:
    """The results as one, and all gradients: how far PyG rounds one number is luck."""
    with torch.no_grad():
        count = len(tensors(copy.deepcopy(model)(*case.arguments(inputs))))
    found = run(model, case, inputs)
    return [torch.cat([one.flatten() for one in part]) for part in (found[:count], found[count:])]


def compare(name: str, num_nodes: int, device: Any) -> None:
    case = MODELS[name]
    inputs, precise = (of_size(num_nodes, device, dtype) for dtype in (torch.float32, torch.float64))
    model = case.make().to(device)
    with torch.no_grad():
        model.eval()(*case.arguments(inputs))  # draws lazy parameters
    model.train()
    # an LSTM of cuDNN rounds to TF32 and wants its weights in one piece
    with torch.backends.cudnn.flags(False), sdpa_kernel(SDPBackend.MATH):
        exact = joined(copy.deepcopy(model).double(), case, precise)
        rounded = joined(model, case, inputs)
        report = graphfuse.convert(model).report
        actual = joined(model, case, inputs)
    assert len(report.swapped) == case.swapped
    for swapped in report.swapped:
        assert path_taken(model.get_submodule(swapped)) == []
    for what, *values in zip(("out", "dall"), actual, rounded, exact, strict=True):
        assert values[2].any()
        assert_close(what, *values)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_computes_the_same(name: str) -> None:
    compare(name, 3000, torch.device("cuda"))
