"""Named hostile graphs, sampled mini-batches, and the one comparison that ops and layers are held to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_data

from graphfuse.formats.inputs import as_edge_index

Graph = tuple[Tensor, tuple[int, int]]  # edge_index, (num_src, num_dst)
_FURTHER_DRAWS = 12  # after a miss


def _random(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    dst = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([src, dst])


def _simple(num_nodes: int, num_edges: int) -> Tensor:
    # random, without repeated edges and self-loops, in random order
    edges: Tensor = torch.unique(_random(num_nodes, num_nodes, num_edges), dim=1)
    edges = edges[:, edges[0] != edges[1]]
    return edges[:, torch.randperm(edges.size(1), generator=torch.Generator().manual_seed(1))]


def _both_ways(edge_index: Tensor) -> Tensor:
    return torch.cat([edge_index, edge_index.flip(0)], 1)


def _loops(nodes: Sequence[int]) -> Tensor:
    return torch.tensor([list(nodes), list(nodes)])


def _graph(make: Callable[[], Tensor], num_src: int, num_dst: int | None = None) -> Callable[..., Graph]:
    def build(device: Any = "cpu") -> Graph:
        return make().to(device), (num_src, num_src if num_dst is None else num_dst)

    return build


# Small, as the interpreter takes milliseconds per step of a kernel.
GRAPHS: dict[str, Callable[..., Graph]] = {
    "no_nodes": _graph(lambda: torch.empty(2, 0, dtype=torch.int64), 0),
    "no_edges": _graph(lambda: torch.empty(2, 0, dtype=torch.int64), 20),
    "one_node": _graph(lambda: torch.empty(2, 0, dtype=torch.int64), 1),
    "one_loop": _graph(lambda: _loops([0]), 1),
    "one_edge": _graph(lambda: torch.tensor([[2], [0]]), 3),
    "isolated": _graph(lambda: _random(5, 5, 12) * 9, 45),  # most nodes, and whole windows, have no edge
    "self_loops": _graph(lambda: torch.cat([_simple(37, 90), _loops(range(0, 37, 3))], 1), 37),
    "repeated": _graph(lambda: torch.cat([_simple(20, 40)] * 3 + [_loops([3, 3, 7])], 1), 20),
    "hub": _graph(lambda: _both_ways(torch.stack([torch.zeros(99).long(), torch.arange(1, 100)])), 100),
    "full": _graph(lambda: torch.cartesian_prod(torch.arange(17), torch.arange(17)).t().contiguous(), 17),
    "ragged": _graph(lambda: _simple(33, 120), 33),
    "symmetric": _graph(lambda: _both_ways(_simple(48, 100)), 48),
    "bipartite": _graph(lambda: _random(50, 21, 130), 50, 21),
    "bipartite_tall": _graph(lambda: _random(3, 70, 80), 3, 70),
}


def neighbor_batches(
    data: Data,
    num_neighbors: Sequence[int],
    batch_size: int,
    input_nodes: Tensor | None = None,
    seed: int = 0,
) -> Iterator[Data]:
    r"""Mini-batches as of PyG's ``NeighborLoader``, without the libraries that it needs.

    Hop :math:`l` takes up to ``num_neighbors[l]`` in-neighbours, each edge at most once, of every node that
    the hop before found first. Nodes are numbered as they are found, the seeds first, and edges are ordered
    by hop and receiver, so ``trim_to_layer`` applies. The same seed gives the same batches on every device.

    Args:
        data: The graph, with an ``edge_index`` from sources to receivers.
        num_neighbors: In-neighbours of a node to take in each hop; -1 takes all.
        batch_size: Seeds of a batch; the last batch may have fewer.
        input_nodes: ``int64[num_seeds]``, distinct nodes to take seeds from, in this order; ``None``: all.
        seed: Of the random choice.

    Yields:
        ``Data`` with what ``data`` holds for its nodes and edges (other attributes as they are, as in PyG),
        ``edge_index`` ``int64[2, num_edges]`` in the batch's numbers, ``n_id`` and ``e_id`` (the nodes and
        edges of ``data``), ``input_id`` (positions in ``input_nodes``), ``batch_size``, and the lists
        ``num_sampled_nodes`` (seeds first) and ``num_sampled_edges``, a number for each hop.

    Raises:
        ValueError: ``batch_size`` is not positive, or a number of neighbours is below -1.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive (got {batch_size})")
    if min(num_neighbors, default=0) < -1:
        raise ValueError(f"`num_neighbors` must be -1, for all, or more (got {list(num_neighbors)})")
    edge_index, num_nodes, _ = as_edge_index(data.edge_index, (int(data.num_nodes),) * 2)
    device, source = edge_index.device, edge_index[0].long()
    receiver, edges = edge_index[1].long().sort(stable=True)
    first = torch.searchsorted(receiver, torch.arange(num_nodes + 1, device=device))
    seeds = torch.arange(num_nodes, device=device) if input_nodes is None else input_nodes.to(device)
    generator = torch.Generator().manual_seed(seed)  # of the CPU, whatever the device
    number = torch.full((num_nodes,), -1, device=device)  # of each node in the batch, -1 outside
    for input_id in torch.arange(seeds.numel(), device=device).split(batch_size):
        n_id, begin, col = seeds[input_id], 0, receiver[:0]
        row, e_id, num_sampled_nodes, num_sampled_edges = col, col, [n_id.numel()], []
        number[n_id] = torch.arange(n_id.numel(), device=device)
        for count in num_neighbors:
            place, hop_col = _in_edges(first, n_id[begin:], count, generator)
            node = source[edges[place]]
            found = _in_order_of_appearance(node[number[node] < 0])
            number[found] = torch.arange(n_id.numel(), n_id.numel() + found.numel(), device=device)
            col, row = torch.cat([col, hop_col + begin]), torch.cat([row, number[node]])
            e_id, begin, n_id = torch.cat([e_id, edges[place]]), n_id.numel(), torch.cat([n_id, found])
            num_sampled_nodes.append(found.numel())
            num_sampled_edges.append(node.numel())
        number[n_id] = -1
        batch = filter_data(data, n_id, row, col, e_id)
        batch.n_id, batch.e_id, batch.input_id, batch.batch_size = n_id, e_id, input_id, input_id.numel()
        batch.num_sampled_nodes, batch.num_sampled_edges = num_sampled_nodes, num_sampled_edges
        yield batch


def _in_edges(first: Tensor, node: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    # places, among edges sorted by receiver, of up to `count` edges into each node; positions in `node`
    degree = first[node + 1] - first[node]
    col = torch.repeat_interleave(degree)
    rank = torch.arange(col.numel(), device=col.device) - (degree.cumsum(0) - degree)[col]
    place = first[node][col] + rank
    if count < 0:
        return place, col
    shuffled = torch.rand(col.numel(), generator=generator).to(col.device).argsort(stable=True)
    shuffled = shuffled[col[shuffled].argsort(stable=True)]  # by node again, in random order within one
    kept = shuffled[rank < count].sort().values
    return place[kept], col[kept]


def _in_order_of_appearance(node: Tensor) -> Tensor:
    # distinct nodes
    ordered, place = node.sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return node[place[new].sort().values]


def compare(
    op: Callable[..., Tensor], definition: Callable[..., Tensor], inputs: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Runs ``op`` in the dtype of its inputs, ``definition`` in that dtype and in float64, and backward.

    Args:
        op: What is tested, called with ``inputs`` as keywords.
        definition: What it should compute, called likewise.
        inputs: Float tensors; gradients of those that require one are compared. The cotangent is drawn from
            PyTorch's generator, so that another call rounds other numbers.

    Yields:
        ``(name, actual, rounded, exact)`` for the output and every gradient.
    """
    cotangent: Tensor | None = None
    results: list[list[Tensor]] = []
    names = [name for name, tensor in inputs.items() if tensor.requires_grad]
    for fn, double in ((op, False), (definition, False), (definition, True)):
        copies = {
            name: (tensor.detach().double() if double else tensor.detach()).requires_grad_(
                tensor.requires_grad
            )
            for name, tensor in inputs.items()
        }
        out = fn(**copies)
        if cotangent is None:
            cotangent = torch.randn(out.shape, dtype=torch.float64, device=out.device).to(out.dtype)
        grads: Sequence[Tensor] = ()
        if names:
            wanted = [copies[name] for name in names]
            grads = torch.autograd.grad(out, wanted, cotangent.to(out.dtype), materialize_grads=True)
        results.append([out.detach(), *grads])
    for name, *values in zip(["out", *("d" + name for name in names)], *results, strict=True):
        yield name, values[0], values[1], values[2]


def assert_close(
    name: str, actual: Tensor, rounded: Tensor, exact: Tensor, factor: float | None = None
) -> None:
    """Error against float64 at most ``factor`` times that of the definition (or PyG) in the same dtype.

    The factor is 2, and 3 for gradients (names that start with ``d``). The rounding floor, the dtype's
    epsilon times the largest value, covers graphs on which the definition is exact. NaN never passes.
    """
    factor = (3.0 if name.startswith("d") else 2.0) if factor is None else factor
    assert actual.shape == exact.shape, f"{name}: shape {list(actual.shape)}, wanted {list(exact.shape)}"
    assert actual.dtype == rounded.dtype, f"{name}: dtype {actual.dtype}, wanted {rounded.dtype}"
    if actual.numel() == 0:
        return
    error = (actual.double() - exact).abs().max().item()
    rounding = (rounded.double() - exact).abs().max().item()
    floor = torch.finfo(actual.dtype).eps * max(1.0, exact.abs().max().item())
    limit = factor * rounding + floor
    assert error <= limit, f"{name}: error {error:.2e} > {limit:.2e} (rounding alone {rounding:.2e})"


def agree(draw: Callable[[], Iterable[tuple[str, Tensor, Tensor, Tensor]]], draws: int = 1) -> None:
    """:func:`assert_close` on what ``draw`` yields for inputs that it draws anew in each call.

    The results of ``draws`` calls are one comparison: how far the definition rounds a few numbers is luck, of
    the draw and of the machine. So a miss is looked at once more, over twelve further calls and the first
    ones; what rounds more than it may does so there as well.

    Args:
        draw: Yields ``(name, actual, rounded, exact)`` as :func:`compare` does; results of one name, which
            may come several times from a call, are one.
        draws: Calls that are one comparison; more than 1 where a result may be a single number.
    """
    found: dict[str, list[tuple[Tensor, ...]]] = {}

    def add(calls: int) -> None:
        for _ in range(calls):
            for name, *values in draw():
                shapes = [list(value.shape) for value in values]
                assert shapes[0] == shapes[2], f"{name}: shape {shapes[0]}, wanted {shapes[2]}"
                found.setdefault(name, []).append(tuple(value.flatten() for value in values))

    def judge() -> None:
        for name, parts in found.items():
            actual, rounded, exact = map(torch.cat, zip(*parts, strict=True))
            assert_close(name, actual, rounded, exact)

    add(draws)
    try:
        judge()
    except AssertionError:
        add(_FURTHER_DRAWS)
        judge()


def check(op: Callable[..., Tensor], definition: Callable[..., Tensor], *draws: dict[str, Tensor]) -> None:
    """:func:`compare` and :func:`agree` in one. All ``draws`` of the inputs are one comparison.

    Further draws, if it comes to that, are the given ones with each number changed by up to a sixteenth.
    """
    given = itertools.chain(draws, map(_nearby, itertools.cycle(draws)))
    agree(lambda: compare(op, definition, next(given)), len(draws))


def _nearby(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    near = {name: value.detach() * (1 + torch.rand_like(value) / 16) for name, value in inputs.items()}
    return {name: value.requires_grad_(inputs[name].requires_grad) for name, value in near.items()}
