"""How many floating-point operations ``torch.utils.flop_counter.FlopCounterMode`` counts for an op.

As PyTorch counts its own: two for each multiply-add of the products, none for a softmax or an activation,
and those that backward computes again are counted again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from graphfuse.formats import packed as packing
from graphfuse.ops import _aggregate, additive, attention, gate, sddmm  # noqa: F401  # they register the ops


def _num_edges(graph: Tensor) -> int:
    return graph.size(1) if graph.dim() == 2 else packing.scalars_of(graph).num_edges


def _pairs(graph: Tensor, rows: int, cols: int, self_loops: bool) -> int:
    # products of a receiver's row with a source's
    return _num_edges(graph) + (min(rows, cols) if self_loops else 0)


_ops = torch.ops.graphfuse


@register_flop_formula(_ops.spmm, get_raw=True)
def _spmm(graph: Tensor, order: Any, transposed: bool, rows: int, cols: int, *rest: Any, **_: Any) -> int:
    x, _, loop_weight, weight, _ = rest[-5:]
    inner, outer = (x.size(1), 0) if weight is None else (min(weight.shape), weight.numel())
    return int(2 * (_pairs(graph, rows, cols, loop_weight is not None) * inner + rows * outer))


@register_flop_formula(_ops.sddmm, get_raw=True)
def _sddmm(graph: Tensor, *rest: Any, **_: Any) -> int:
    num_edges, a = rest[4:6]
    return 2 * int(num_edges) * int(a.size(1))


def _attention(products: int, skipped: int) -> Any:
    # `products` of a pair's rows, and as many of its edge features; q after `skipped` arguments of the op
    def count(graph: Tensor, order: Any, transposed: bool, rows: int, cols: int, *rest: Any, **_: Any) -> int:
        q, _, _, _, _, edge_attr = rest[skipped : skipped + 6]
        width = q.size(2) + (0 if edge_attr is None else edge_attr.size(1))
        return int(2 * products * _pairs(graph, rows, cols, rest[2]) * q.size(1) * width)

    return count


register_flop_formula(_ops.attention, get_raw=True)(_attention(2, 3))
register_flop_formula(_ops.attention_backward, get_raw=True)(_attention(5, 6))


def _additive(products: tuple[int, int], skipped: int) -> Any:
    # `products` of GAT and of GATv2
    def count(graph: Tensor, order: Any, transposed: bool, rows: int, cols: int, *rest: Any, **_: Any) -> int:
        x = rest[skipped + 2]
        return int(2 * products[rest[3]] * _pairs(graph, rows, cols, rest[2]) * x.size(1) * x.size(2))

    return count


# GAT: the sum; its gradient and the weights'. GATv2: also the score; again, and its three gradients.
register_flop_formula(_ops.additive_attention, get_raw=True)(_additive((1, 2), 5))
register_flop_formula(_ops.additive_attention_backward, get_raw=True)(_additive((2, 6), 7))


def _gate(products: int) -> Any:
    def count(out: Any, skip: Any, *_: Any, **__: Any) -> int:
        return 2 * products * int(skip[0] * skip[1])

    return count


# Two rows times the weight; in backward again, and the gradients of the gate and of the weight.
register_flop_formula(_ops.gated_skip)(_gate(2))
register_flop_formula(_ops.gated_skip_backward)(_gate(5))
