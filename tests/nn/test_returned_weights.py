"""What fused layers return for ``return_attention_weights``, and its gradients, against PyG's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphfuse import RowWindows
from graphfuse.nn._dispatch import path_taken
from graphfuse.testing import GRAPHS
from tests.nn._transformer import pair


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("options", [{}, {"heads": 3, "concat": False}, {"heads": 2, "beta": True}], ids=str)
def test_transformer_conv(options: dict[str, Any], flow: str, two: bool, device: torch.device) -> None:
    edge_index, (num_src, num_dst) = GRAPHS["bipartite" if two else "repeated"](device)
    size = (num_src, num_dst)
    if flow == "target_to_source":
        edge_index, size = edge_index.flip(0), size[::-1]
    ours, theirs = pair(4, 5, device, torch.float32, flow=flow, dropout=0.5, **options)
    ours.eval(), theirs.eval()
    x: Any = torch.randn(num_src, 4, device=device)
    x = (x, torch.randn(num_dst, 4, device=device)) if two else x
    windows = RowWindows.from_edge_index(edge_index, size)
    results = []
    for layer, graph in ((theirs, edge_index), (ours, edge_index), (ours, windows)):
        out, (returned, alpha) = layer(x, graph, return_attention_weights=False)  # False returns them too
        loss = out.sum() + alpha.square().sum()
        results.append([out, returned, alpha, *torch.autograd.grad(loss, layer.parameters())])
    assert path_taken(ours) == [] and ours._alpha is None and results[1][1] is edge_index
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-5)


def test_weights_are_those_before_dropout(device: torch.device) -> None:
    edge_index, _ = GRAPHS["ragged"](device)
    ours, theirs = pair(4, 4, device, torch.float32, dropout=0.5)
    x = torch.randn(33, 4, device=device)
    out, (_, alpha) = ours(x, edge_index, return_attention_weights=True)
    _, (_, wanted) = theirs(x, edge_index, return_attention_weights=True)
    torch.testing.assert_close(alpha, wanted)
    assert not torch.allclose(out, ours.eval()(x, edge_index))
