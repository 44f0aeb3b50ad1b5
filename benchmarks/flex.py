"""Sparse attention as FlexAttention can express it: blocks of 128 x 128, and a mask that looks edges up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.graphs import Graph

MOST_NODES = 20_000  # the mask is a byte for each pair of nodes
BLOCK = 128  # eight row windows, and as many columns


def unsupported(graph: Graph, dropout: float) -> str | None:
    """Why FlexAttention cannot do this, a sentence; ``None`` if it can."""
    if dropout > 0:
        return "FlexAttention has no dropout of the attention weights"
    if graph.num_nodes > MOST_NODES:
        return (
            f"the mask is a byte for each pair of nodes, and the graph has {graph.num_nodes:,} nodes, "
            f"more than {MOST_NODES:,}"
        )
    source, target = graph.edge_index
    if torch.unique(target * graph.num_nodes + source).numel() < graph.num_edges:
        return "a mask cannot hold a repeated edge, and the graph has some"
    return None


def block_mask(graph: Graph) -> BlockMask:
    """The blocks that hold an edge, and the mask within them. Receivers are queries."""
    source, target = graph.edge_index
    size = (graph.num_nodes, graph.num_nodes)
    linked = torch.zeros(size, dtype=torch.bool, device=source.device)
    linked[target, source] = True
    blocks = -(-graph.num_nodes // BLOCK)
    used = torch.zeros(blocks, blocks, dtype=torch.int32, device=source.device)
    used[target // BLOCK, source // BLOCK] = 1
    order = torch.sort(used, dim=1, descending=True, stable=True).indices  # of each row those in use first

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return linked[query, key]

    return BlockMask.from_kv_blocks(
        used.sum(1, dtype=torch.int32)[None, None],
        order.to(torch.int32)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=size,
    )


def attention(mask: BlockMask, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of ``[num_nodes, heads, head_dim]`` under a mask; not ``compiled``, it makes all scores."""
    run: Callable[..., Tensor] = flex.flex_attention
    if compiled:
        torch.compiler.reset()  # or the graphs before this one would make the compiler give up
        run = torch.compile(run)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = (x.transpose(0, 1)[None] for x in (q, k, v))
        return run(*by_head, block_mask=mask)[0].transpose(0, 1)

    return attend
