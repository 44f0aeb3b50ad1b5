"""A TransformerConv on a batch of small graphs, forward and backward, windows cut within the call or given.

``captured`` replays a CUDA graph of graphfuse's step on given windows. ``refilled`` cuts the windows of a
batch within the call, in memory with room for a sixteenth more, copies its features there and replays a CUDA
graph that serves all batches that fit. PyG's step is launched anew each time.

The graphs are stand-ins of the sizes of ogbg-molhiv, not molhiv: rings and chains joined at random, of about
25 nodes and 27 bonds, each bond in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import graphfuse.nn
from benchmarks import truth
from benchmarks.bench import Bench, Prepared, Problem, device
from graphfuse import RefillableWindows, RowWindows
from graphfuse.train import loop, models

_IN, _HEADS, _HEAD_DIM = 128, 4, 32
_RINGS = (2, 3, 4)  # of a molecule; the bonds are as many as its atoms, less one, and its rings
_RING_ATOMS = (5, 6, 6, 6)
_CHAIN_ATOMS = (3, 14)  # at least and at most, outside of rings
_CHAIN = 3  # atoms of a piece outside of rings, at most
_BONDS = 4  # of an atom, at most


def molecule(rng: np.random.Generator) -> tuple[int, list[tuple[int, int]]]:
    """Atoms and bonds of one: rings and chains in random order, each joined to an atom before it."""
    left = int(rng.integers(_CHAIN_ATOMS[0], _CHAIN_ATOMS[1] + 1))
    pieces = [(int(rng.choice(_RING_ATOMS)), True) for _ in range(rng.choice(_RINGS))]
    while left > 0:
        pieces.append((min(left, int(rng.integers(1, _CHAIN + 1))), False))
        left -= pieces[-1][0]
    atoms = 0
    bonds: list[tuple[int, int]] = []
    for place in rng.permutation(len(pieces)):
        size, ring = pieces[place]
        if atoms > 0:
            taken = np.bincount(np.array(bonds, dtype=np.int64).ravel(), minlength=atoms)
            bonds.append((int(rng.choice(np.flatnonzero(taken < _BONDS))), atoms))
        bonds += [(atom, atom + 1) for atom in range(atoms, atoms + size - 1)]
        if ring:
            bonds.append((atoms + size - 1, atoms))
        atoms += size
    return atoms, bonds


def batch(molecules: int, seed: int = 0) -> tuple[Tensor, int]:
    """``edge_index`` of that many molecules, the directions of a bond side by side, and how many nodes."""
    rng = np.random.default_rng(seed)
    num_nodes, edges = 0, []
    for _ in range(molecules):
        atoms, bonds = molecule(rng)
        for u, v in bonds:
            edges += [(num_nodes + u, num_nodes + v), (num_nodes + v, num_nodes + u)]
        num_nodes += atoms
    return torch.tensor(edges).t().contiguous(), num_nodes


@dataclass(frozen=True)
class Inputs:
    """What providers are given. ``edge_index`` itself goes to no layer: it is to have no record."""

    edge_index: Tensor
    x: Tensor
    grad: Tensor  # of the output
    windows: str  # of graphfuse: built, given, captured or refilled

    def layer(self, package: Any) -> torch.nn.Module:
        """The layer of ``package``, with the same start for all."""
        torch.manual_seed(0)
        layer: torch.nn.Module = package.TransformerConv(_IN, _HEAD_DIM, heads=_HEADS)
        return layer.to(self.x.device, self.x.dtype)

    def fresh_edges(self) -> Tensor:
        """As a loader hands them over: a tensor that was never seen before."""
        return self.edge_index.clone()


def _problem(molecules: int, windows: str, dtype: torch.dtype, mode: str) -> Problem:
    edge_index, num_nodes = batch(molecules)
    random = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(num_nodes, size, generator=random) for size in (_IN, _HEADS * _HEAD_DIM))
    x, grad = x.to(device(), dtype), grad.to(device(), dtype)
    inputs = Inputs(edge_index.to(device()), x, grad, windows)
    results = [
        _results(inputs, inputs.layer(pyg).to(precise), inputs.edge_index)
        for precise in (torch.float64, dtype)
    ]
    expected = [
        truth.Expected(exact, rounded, None, factor)
        for exact, rounded, factor in zip(*results, (2.0, 3.0, 3.0), strict=True)
    ]
    return Problem(
        facts={
            "graph": f"{molecules} molecules",
            "num_nodes": num_nodes,
            "num_edges": edge_index.size(1),
            "heads": _HEADS,
            "head_dim": _HEAD_DIM,
            "dtype": str(dtype).removeprefix("torch."),
            "mode": mode,
            "extra": {"kind": f"windows {windows}", "stand_in": True},
        },
        inputs=inputs,
        device=device(),
        check=lambda results: truth.worst(expected, results),
    )


def _results(i: Inputs, layer: torch.nn.Module, edges: Any) -> Sequence[Tensor]:
    """The output, and the gradients in x and, as one, in all parameters."""
    parameters = list(layer.parameters())
    x = i.x.to(parameters[0].dtype, copy=True).requires_grad_()
    out = layer(x, edges)
    in_x, *others = torch.autograd.grad(out, [x, *parameters], i.grad.to(out.dtype))
    return out.detach(), in_x, torch.cat([gradient.flatten() for gradient in others])


def _graphfuse(i: Inputs) -> Prepared:
    if i.windows == "built":  # while windows of equal edges live, none would be built
        return _provider(graphfuse.nn, i.fresh_edges, i)
    if i.windows == "refilled":
        return _refilled(i)
    windows = RowWindows.from_edge_index(i.fresh_edges(), (i.x.size(0), i.x.size(0)))
    return _provider(graphfuse.nn, lambda: windows, i, i.windows == "captured" and i.x.is_cuda)


def _refilled(i: Inputs) -> Prepared:
    num_nodes, num_edges = i.x.size(0), i.edge_index.size(1)
    entries = RowWindows.from_edge_index(i.edge_index, (num_nodes, num_nodes)).num_entries
    rooms = [size + size // 16 for size in (num_nodes, num_edges, entries)]
    windows = RefillableWindows(rooms[0], rooms[1], i.x.device, rooms[2])
    layer, x, grad = (i.layer(graphfuse.nn), *(one.new_zeros(rooms[0], one.size(1)) for one in (i.x, i.grad)))
    leaves = [x.requires_grad_(), *layer.parameters()]

    def step() -> Sequence[Tensor]:
        out = layer(x, windows)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    def fill() -> None:
        windows.refill(i.fresh_edges())
        with torch.no_grad():
            for place, given in ((x, i.x), (grad, i.grad)):
                place[:num_nodes].copy_(given)
                place[num_nodes:].zero_()

    fill()
    replay = loop.captured(step) if x.is_cuda else step

    def call() -> Sequence[Tensor]:
        fill()
        return replay()

    out, in_x, *others = call()
    results = out[:num_nodes].clone(), in_x[:num_nodes].clone(), torch.cat([one.flatten() for one in others])
    return Prepared(call, lambda: results, models.path(layer)[0])


def _pyg(i: Inputs) -> Prepared:
    return _provider(pyg, i.fresh_edges, i)


def _provider(package: Any, edges: Callable[[], Any], i: Inputs, captured: bool = False) -> Prepared:
    layer = i.layer(package)
    x = i.x.clone().requires_grad_()
    leaves = [x, *layer.parameters()]

    def call() -> Sequence[Tensor]:
        return torch.autograd.grad(layer(x, edges()), leaves, i.grad)

    def results() -> Sequence[Tensor]:
        return _results(i, layer, edges())

    replay = loop.captured(results) if captured else results  # what is timed is what is checked
    checked = [result.clone() for result in replay()]
    taken = models.path(layer)[0]
    return Prepared(
        loop.captured(call) if captured else call, lambda: checked, "-" if taken == "pyg" else taken
    )


Bench(
    name="molecules",
    sweep=[
        {
            "molecules": (1024,),
            "windows": ("built", "given", "captured", "refilled"),
            "dtype": (torch.float32, torch.bfloat16),
            "mode": ("fwd+bwd",),
        }
    ],
    problem=_problem,
    providers={"graphfuse": _graphfuse, "pyg": _pyg},
    take_turns=True,
)
