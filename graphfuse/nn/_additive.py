"""What GATConv and GATv2Conv share: their ends, edge features of self-loops, and reasons not to fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import is_torch_sparse_tensor
from torch_geometric.utils.sparse import set_sparse_value

from graphfuse import ops
from graphfuse.formats import RowWindows
from graphfuse.nn._attention import is_of_edges
from graphfuse.nn._projection import is_plain
from graphfuse.ops.columns import add_bias


def with_attention(out: Tensor, edge_index: Any, alpha: Tensor) -> Any:
    """What PyG's path returns with ``return_attention_weights``."""
    if isinstance(edge_index, SparseTensor):
        return out, edge_index.set_value(alpha, layout="coo")
    if is_torch_sparse_tensor(edge_index):
        edge_index = set_sparse_value(edge_index, alpha)
    return out, (edge_index, alpha)


def attend_and_weigh(
    layer: Any, attend: Any, weigh: Any, given: dict[str, Any], edge_index: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The result of an op ``attend``, and of ``weigh`` the weights that it used, as PyG returns them."""
    if given["dropout"] > 0:  # both have to drop the same
        given["seed"] = torch.randint(1 << 62, (1,), device=given["windows"].device)
    out = attend(**given)
    edges, alpha = weigh(**{name: value for name, value in given.items() if name != "x"})
    if not layer.add_self_loops:
        edges = edge_index.edge_index() if isinstance(edge_index, RowWindows) else edge_index
    elif layer.flow == "target_to_source":
        edges = edges.flip(0)
    if layer.add_self_loops and isinstance(edge_index, EdgeIndex):
        size, both_ways = edge_index.sparse_size(), edge_index.is_undirected
        edges = EdgeIndex(edges, sparse_size=size, is_undirected=both_ways)
    return out, (edges, alpha)


def sparse_with_loops(adj_t: SparseTensor, edge_dim: int | None) -> SparseTensor:
    """``adj_t`` with a full diagonal, or PyG's refusal."""
    if edge_dim is not None:
        raise NotImplementedError(
            "The usage of 'edge_attr' and 'add_self_loops' simultaneously is currently not yet supported "
            "for 'edge_index' in a 'SparseTensor' form"
        )
    return torch_sparse.set_diag(adj_t)


def finished(layer: Any, out: Tensor, res: Tensor | None) -> Tensor:
    """The heads of ``out`` joined, and residual and bias of ``layer`` added."""
    out, bias = _joined(layer, out, res), layer.bias
    return out if bias is None else out + bias


def unshared(layer: Any, out: Tensor, res: Tensor | None) -> Tensor:
    """:func:`finished`, of what an op has returned; a copy where that would be the op's own tensor."""
    bias = layer.bias
    if bias is None:
        if res is None and layer.concat and out.requires_grad:
            out = out.clone()  # the op keeps its result for backward, where a change in place is an error
        return finished(layer, out, res)
    return add_bias(_joined(layer, out, res), bias)


def _joined(layer: Any, out: Tensor, res: Tensor | None) -> Tensor:
    out = out.view(-1, layer.heads * layer.out_channels) if layer.concat else out.mean(dim=1)
    return out if res is None else out + res


def dtype_reasons(att: Tensor, like: Tensor) -> list[str]:
    """Why attention vectors ``att`` do not fit features ``like``; empty if they do."""
    if att.dtype is like.dtype or torch.is_autocast_enabled(like.device.type):
        return []
    return [f"the attention vectors are {att.dtype} and the features are {like.dtype}"]


def edge_attr_reasons(layer: Any, edge_attr: Any, like: Tensor, edge_index: Any) -> list[str]:
    """Why ``edge_attr`` does not fuse in a layer with ``lin_edge`` for features ``like``, a sentence each."""
    autocast = torch.is_autocast_enabled(like.device.type)
    lin, fill_value = layer.lin_edge, layer.fill_value
    fits = is_of_edges(edge_attr, edge_index, like) and edge_attr.dim() <= 2
    fits = fits and (edge_attr.dtype is like.dtype or (autocast and edge_attr.is_floating_point()))
    if not is_plain(lin) or lin.bias is not None or not (autocast or lin.weight.dtype is like.dtype):
        return ["lin_edge is not a plain linear map in the dtype of x"]
    if not fits or not 0 < lin.weight.size(1) == as_columns(edge_attr).size(1):
        return ["edge_attr is not a matrix of edge_dim columns, a row for each edge, in the dtype of x"]
    constant = fill_value is None or isinstance(fill_value, (int, float, Tensor))
    if layer.add_self_loops and not (constant or fill_value in ("add", "sum", "mean")):
        return [f"fill_value is {fill_value!r}; fused self-loops take a sum, a mean or a constant"]
    return []


def result_dtype(x: Tensor, att: Tensor) -> torch.dtype:
    """The dtype that PyG's scores of ``x``, and with them its messages, have."""
    dtype = torch.promote_types(x.dtype, att.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def as_columns(edge_attr: Tensor) -> Tensor:
    """Edge features as a matrix; one number for each edge is a column."""
    return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr


def loop_features(graph: RowWindows, edge_attr: Tensor, fill_value: Any) -> Tensor:
    """The features ``[num_loops, edge_dim]`` of self-loops, as PyG's ``add_self_loops`` fills them in.

    Args:
        graph: Windows whose receivers are ``edge_index[1]``, whatever the layer's flow.
        edge_attr: ``[num_edges, edge_dim]`` or ``[num_edges]``.
        fill_value: A number or tensor, ``None`` for 1, or a name that :func:`summed_at_receivers` takes.
    """
    if isinstance(fill_value, str):
        return summed_at_receivers(graph, as_columns(edge_attr), fill_value)
    size = (min(graph.shape), *edge_attr.shape[1:])
    if not isinstance(fill_value, Tensor):
        return as_columns(edge_attr.new_full(size, 1.0 if fill_value is None else fill_value))
    filled = fill_value.to(edge_attr)
    filled = filled if filled.dim() == edge_attr.dim() else filled.unsqueeze(0)
    return as_columns(filled.expand(size).contiguous())


def summed_at_receivers(graph: RowWindows, values: Tensor, reduce: str) -> Tensor:
    """Sums, or with ``"mean"`` means, of the values of each receiver's edges, self-loops left out.

    Args:
        graph: The windows.
        values: ``[num_edges, columns]``, in the order of the caller's edge list.
        reduce: ``"add"``, ``"sum"`` or ``"mean"``.

    Returns:
        ``[min(num_dst, num_src), columns]``; receivers without edges get 0.
    """
    num_dst, num_src = graph.shape
    dtype = torch.promote_types(values.dtype, torch.float32)
    ones = torch.ones(num_src, 1, dtype=dtype, device=values.device)
    nothing = ones.new_zeros(num_dst)  # in the place of the diagonal
    columns = [ops.spmm(graph, ones, column, loop_weight=nothing) for column in values.unbind(1)]
    sums = torch.cat(columns, 1)[: min(num_dst, num_src)]
    if reduce == "mean":
        count = graph.memo(
            "others_per_row", lambda: (graph.edges_per_row() - graph.loops_per_row()).clamp(min=1)
        )
        sums = sums / count[: len(sums), None]
    return sums.to(values.dtype)
