"""Orders of rows: permutations, the same everywhere, and never with more entries than the given one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows
from graphfuse.formats import reorder
from graphfuse.formats.reorder import METHODS, cluster, num_entries
from graphfuse.testing import GRAPHS


def planted(num_rows: int, num_cols: int, num_communities: int, noise: int, seed: int = 0) -> Tensor:
    """Rows over columns: a row has 12 columns of its community and ``noise`` of any."""
    generator = torch.Generator().manual_seed(seed)
    share = num_cols // num_communities
    row = torch.arange(num_rows).repeat_interleave(12 + noise)
    own = torch.randint(share, (num_rows, 12), generator=generator)
    own += (torch.arange(num_rows) * num_communities // num_rows * share)[:, None]
    other = torch.randint(num_cols, (num_rows, noise), generator=generator)
    return torch.unique(torch.stack([row, torch.cat([own, other], 1).view(-1)]), dim=1)


def shuffled(row: Tensor, num_rows: int, seed: int = 1) -> Tensor:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[row]


def define_num_entries(row: Tensor, col: Tensor, permutation: Tensor) -> int:
    """For each window, each of its columns as often as the row that repeats it most."""
    edges: dict[int, list[int]] = {}
    for r, c in zip(row.tolist(), col.tolist(), strict=True):
        edges.setdefault(r, []).append(c)
    entries = 0
    for window in permutation.split(16):
        columns = [edges.get(r, []) for r in window.tolist()]
        entries += sum(max(map(list.count, columns, [c] * len(columns))) for c in set().union(*columns))
    return entries


@pytest.fixture(autouse=True)
def small_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reorder, "_SMALLEST", 1)


def test_auto_leaves_small_graphs_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    row, col = planted(256, 512, 16, 1).to(device)
    row = shuffled(row.cpu(), 256).to(device)
    natural = torch.arange(256, device=device)
    assert not torch.equal(cluster(row, col, 256, 512), natural)
    monkeypatch.setattr(reorder, "_SMALLEST", row.numel() + 1)
    assert torch.equal(cluster(row, col, 256, 512), natural)
    assert not torch.equal(cluster(row, col, 256, 512, method="bisection"), natural)


@pytest.mark.parametrize("graph", GRAPHS)
def test_orders_are_permutations_that_repeat(graph: str, device: torch.device) -> None:
    (src, dst), (num_src, num_dst) = GRAPHS[graph](device)
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randperm(src.numel(), generator=generator).to(device)
    for row, col, size in ((dst, src, (num_dst, num_src)), (src, dst, (num_src, num_dst))):
        natural = num_entries(row, col, *size)
        for method in METHODS:
            found = cluster(row, col, *size, method=method)
            assert (found.dtype, found.device) == (torch.int64, row.device)
            assert found.sort().values.tolist() == list(range(size[0]))
            assert torch.equal(found, cluster(row.int(), col.int(), *size, method=method))
            assert torch.equal(found, cluster(row[mixed], col[mixed], *size, method=method))
            entries = num_entries(row, col, *size, found)
            assert entries == define_num_entries(row, col, found)
            if method == "auto":
                unchanged = torch.equal(found, torch.arange(size[0], device=device))
                assert entries == natural if unchanged else 50 * entries <= 49 * natural


def test_entries_are_those_of_the_record() -> None:
    edge_index, size = GRAPHS["repeated"]()
    windows = RowWindows.from_edge_index(edge_index, size)
    assert num_entries(edge_index[1], edge_index[0], 20, 20) == windows.num_entries
    order = cluster(edge_index[1], edge_index[0], 20, 20, method="degree")
    moved = torch.stack([edge_index[0], order.argsort()[edge_index[1]]])
    there = RowWindows.from_edge_index(moved, size).num_entries
    assert num_entries(edge_index[1], edge_index[0], 20, 20, order) == there != windows.num_entries


@pytest.mark.parametrize("num_rows", [512, 600, 1031])
def test_communities_are_found_again(num_rows: int, device: torch.device) -> None:
    row, col = planted(num_rows, 640, num_rows // 32, noise=1).to(device)
    wanted = num_entries(row, col, num_rows, 640)
    row = shuffled(row.cpu(), num_rows).to(device)
    before = num_entries(row, col, num_rows, 640)
    after = num_entries(row, col, num_rows, 640, cluster(row, col, num_rows, 640))
    assert before > 1.8 * wanted
    assert after <= 1.05 * wanted


def test_a_good_order_is_polished_or_left_alone(device: torch.device) -> None:
    row, col = planted(512, 512, 32, noise=0).to(device)
    natural = torch.arange(512, device=device)
    assert num_entries(row, col, 512, 512, cluster(row, col, 512, 512)) <= num_entries(row, col, 512, 512)
    blocks = torch.cartesian_prod(natural, torch.arange(16, device=device)).t()
    assert torch.equal(cluster(blocks[0], blocks[0] // 16 * 16 + blocks[1], 512, 512), natural)
    # windows that share all they can, and a column of two rows that are far apart, which no bound foresees
    col_ = torch.cat([blocks[0] // 16 * 16 + blocks[1], 512 + natural % 256])
    assert torch.equal(cluster(torch.cat([blocks[0], natural]), col_, 512, 768), natural)
    path = natural[:-1], natural[1:]
    assert torch.equal(cluster(*path, 512, 512), natural)
    # what is exchanged by twos and fours comes back
    swapped = natural.view(8, 2, 2, 16).transpose(2, 3).reshape(-1)
    row = swapped.argsort()[row]
    polished = cluster(row, col, 512, 512, method="polish")
    assert num_entries(row, col, 512, 512, polished) < 0.75 * num_entries(row, col, 512, 512)


def test_a_graph_that_no_order_helps_is_not_bisected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reorder, "_bisect", None)
    node = torch.arange(200)
    for row, col in ((node, node), (node, node * 0), (node[:16].repeat_interleave(16), node[:16].repeat(16))):
        assert torch.equal(cluster(row, col, 200, 200), node)


def test_an_order_that_saves_less_than_2_percent_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    row, col = planted(512, 512, 32, noise=1)
    good, natural = num_entries(row, col, 512, 512), torch.arange(512)
    bad = natural.view(16, 32).t().reshape(-1)
    assert num_entries(row, col, 512, 512, bad) > good
    monkeypatch.setattr(reorder, "_bisect", lambda *given: bad)
    assert torch.equal(cluster(row, col, 512, 512), natural)
    swap = natural.clone()
    swap[[15, 16]] = natural[[16, 15]]  # two rows of two windows exchanged, and back
    monkeypatch.setattr(reorder, "_bisect", lambda *given: swap)
    near = num_entries(swap[row], col, 512, 512)
    assert 0 < near - good < near // 50
    assert torch.equal(cluster(swap[row], col, 512, 512), natural)


def test_rows_of_equal_length_come_first_by_degree() -> None:
    row = torch.tensor([3, 1, 1, 0, 3, 3, 4])
    assert cluster(row, torch.arange(7), 5, 7, method="degree").tolist() == [3, 1, 0, 4, 2]


def test_steps_of_a_level_add_up() -> None:
    for level in range(0, 27, 3):
        marginal, cost = reorder._tables(level, torch.device("cpu"))
        assert (marginal[1:].diff() <= 0).all() and marginal.min() >= 0
        assert cost[0] == 0 and (cost.diff() >= 0).all()
        assert (cost <= torch.arange(cost.numel()) * reorder._UNIT).all()
    assert 2**31 * reorder._UNIT < 2**63  # so that no sum over the edges of a graph overflows


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match=r"one of auto, natural, degree, .* \(got 'rcm'\)"):
        cluster(torch.tensor([0]), torch.tensor([0]), 1, 1, method="rcm")


@pytest.mark.gpu
def test_gpu_finds_the_order_of_the_cpu() -> None:
    row, col = planted(20_011, 9_000, 300, noise=3)
    row = shuffled(row, 20_011)
    for method in METHODS:
        here = cluster(row, col, 20_011, 9_000, method=method)
        there = cluster(row.cuda(), col.cuda(), 20_011, 9_000, method=method)
        assert torch.equal(here, there.cpu())
