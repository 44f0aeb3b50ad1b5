"""GATConv, GATv2Conv and AGNNConv against PyG's on a GPU: graphs, widths, dtypes, and options by chance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import nn
from graphfuse.testing import GRAPHS
from tests.nn import test_agnn_conv as agnn
from tests.nn._gat import DTYPES, VALUES, Options, compare_with_pyg

# once in a process, if a thread of autograd is the first to call it
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")

SIZES = (  # heads, channels; the first three, which are narrow, meet all slopes in float32
    (1, 1), (1, 16), (3, 7), (1, 64), (1, 128), (1, 256), (2, 33), (2, 100), (4, 32), (5, 48), (8, 8),
    (8, 16),
)  # fmt: skip
WIDTHS = (1, 7, 16, 33, 64, 100, 128, 256)
SLOPES = VALUES[Options._fields.index("slope")]
LAYERS = {"GATConv": nn.GATConv, "GATv2Conv": nn.GATv2Conv}


def random_edges(num_src: int, num_dst: int, num_edges: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst)]
    return torch.stack(ends)


def with_hub(num_nodes: int) -> Tensor:
    """Random edges, some of them repeated, some self-loops, and a hub that all others are joined to."""
    edges, others = random_edges(num_nodes, num_nodes, 4 * num_nodes), torch.arange(1, num_nodes)
    hub = torch.stack([torch.zeros_like(others), others])
    loops = torch.arange(0, num_nodes, 7).expand(2, -1)
    return torch.cat([edges, edges[:, :num_nodes], hub, hub.flip(0), loops], 1)


# Many windows and rows, and some long enough to be cut into slices; the interpreter would take minutes.
LARGE: dict[str, Callable[..., Any]] = {
    "large_hub": lambda device: (with_hub(3000).to(device), (3000, 3000)),
    "large_bipartite": lambda device: (random_edges(4000, 700, 30_000).to(device), (4000, 700)),
}
NAMES = (*GRAPHS, *LARGE)


def drawn(layer: str, sizes: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, Options]]:
    """Every graph with options by chance, the same on every call.

    One slope for all graphs: it is a constant of the kernels, whose compilation is what takes the time. The
    derivative of LeakyReLU jumps at 0, and of millions of numbers in float32 a few are rounded to the other
    side, by one layer or the other: those get the slope that has no jump. (Half precision draws numbers that
    are exact.)
    """
    draw = random.Random(f"{layer} {sizes} {dtype}")
    slope = SLOPES[(SIZES.index(sizes) + DTYPES.index(dtype)) % len(SLOPES)]
    wide = layer == "GATv2Conv" and sizes[0] * sizes[1] > 40
    for graph in NAMES:
        rounds = dtype == torch.float32 and (wide or graph in LARGE)
        options = Options(*(draw.choice(values) for values in VALUES))
        yield graph, options._replace(slope=1.0 if rounds else slope)


def all_of(cases: Iterator[tuple[Any, ...]], compare: Callable[..., None]) -> None:
    """Compares each case; a kernel that does not launch is told with its case, too."""
    wrong = []
    for case in cases:
        try:
            compare(*case)
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in LARGE.items():
        monkeypatch.setitem(GRAPHS, name, make)


def test_every_two_options_meet() -> None:
    """For each layer and dtype, and each graph meets each value; so 500 cases stand for 300,000."""
    for layer, dtype in itertools.product(LAYERS, DTYPES):
        cases = [options for sizes in SIZES for _, options in drawn(layer, sizes, dtype)]
        assert len(cases) == len(SIZES) * len(NAMES)
        for (i, one), (j, other) in itertools.combinations(enumerate(VALUES), 2):
            met = {(options[i], options[j]) for options in cases}
            assert met >= set(itertools.product(one, other))
    for layer, graph in itertools.product(LAYERS, NAMES):
        every = itertools.product(SIZES, DTYPES)
        cases = [options for how in every for name, options in drawn(layer, *how) if name == graph]
        for i, values in enumerate(VALUES):
            assert {options[i] for options in cases} >= set(values)


@pytest.mark.gpu
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
@pytest.mark.parametrize("layer", LAYERS)
def test_full_matrix(layer: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    def compare(graph: str, options: Options) -> None:
        compare_with_pyg(LAYERS[layer], graph, sizes, dtype, options, torch.device("cuda"))

    all_of(drawn(layer, sizes, dtype), compare)


@pytest.mark.gpu
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_full_matrix_of_agnn(width: int, dtype: torch.dtype) -> None:
    """On every graph, with and without self-loops; the flow by turns."""
    flows = itertools.cycle(agnn.FLOWS)  # of odd length: either flow with and without loops

    def compare(graph: str, loops: bool) -> None:
        flow = next(flows)
        agnn.test_output_and_gradients_match_pygs(graph, dtype, width, loops, flow, torch.device("cuda"))

    all_of(itertools.product([*agnn.SQUARE, "large_hub"], (False, True)), compare)
