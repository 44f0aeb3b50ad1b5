from __future__ import annotations

import torch

from benchmarks import bench, reorder


def test_record_has_entries_before_and_after() -> None:
    made = bench.REGISTRY["reorder"]
    (row,) = made.rows({"graph": "tiny", "ids": "shuffled"}, quick=True)
    assert (row.status, row.max_error, row.mode) == ("ok", 0.0, "build")
    found = row.extra
    assert 0 < found["entries_after"] <= found["entries_before"] <= row.num_edges
    published = made.problem(graph="tiny", ids="published").facts["extra"]
    assert published["entries_before"] == published["entries_published"] == found["entries_published"]


def test_wrong_orders_are_found() -> None:
    problem = bench.REGISTRY["reorder"].problem(graph="tiny", ids="shuffled")
    before = problem.facts["extra"]["entries_before"]
    order = torch.arange(96, device=bench.device())
    assert not problem.check((order, torch.tensor(before))).wrong
    assert problem.check((order, torch.tensor(before + 1))).wrong
    assert problem.check((order.clamp(min=1), torch.tensor(before))).wrong
    assert problem.check((order[1:], torch.tensor(before))).wrong


def test_cases_are_shuffled_and_published_ids() -> None:
    cases = bench.REGISTRY["reorder"].cases()
    assert {case["ids"] for case in cases} == {"shuffled", "published"}
    assert set(reorder._LOADERS) < {case["graph"] for case in cases}
