"""Targets: what numbers decide, which cases miss them, and which records count."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import targets
from benchmarks.bench import Record
from benchmarks.rows import Case
from benchmarks.targets import Found, Target
from tests.benchmarks.test_page import measured

COMMITTED = Path(targets.__file__).parent / "results/nvidia-h200"


def case(graph: str, ms: float, **given: Any) -> Case:
    record = Record("spmm", "graphfuse", graph=graph, p50_ms=ms, date="2026-11-27", **given)
    return Case(("spmm", graph, "64", "float16", "fwd"), {"graphfuse": record})


def found(pick: str, at_least: bool, *values: float) -> Found:
    target = Target("what", "spmm", targets.milliseconds, 2.0, {}, at_least=at_least, pick=pick)
    return Found(target, [(value, case(f"graph{at}", value)) for at, value in enumerate(values)])


@pytest.mark.parametrize(
    ("pick", "at_least", "values", "decides", "missed"),
    [
        ("each", False, (1.0, 2.0), 2.0, []),
        ("each", False, (1.0, 3.0, 4.0, 2.0), 4.0, ["graph2", "graph1"]),
        ("each", True, (2.0, 9.0), 2.0, []),
        ("each", True, (1.5, 9.0, 1.0), 1.0, ["graph2", "graph0"]),
        ("best", False, (1.0, 3.0), 1.0, []),
        ("best", False, (3.0, 2.5), 2.5, ["graph0", "graph1"]),
        ("best", True, (1.0, 3.0), 3.0, []),
        ("mean", True, (1.0, 4.0), 2.0, []),
        ("mean", True, (1.0, 3.9), 1.0 * 3.9**0.5, ["graph0"]),
    ],
)
def test_what_decides(
    pick: str, at_least: bool, values: tuple[float, ...], decides: float, missed: list[str]
) -> None:
    one = found(pick, at_least, *values)
    assert one.value == pytest.approx(decides)
    assert [case.what[1] for _, case in one.missed] == missed
    row = targets.as_table([one]).splitlines()[-1]
    assert ("missed" in row) == bool(missed)
    assert all((name in row) == (pick != "mean") for name in missed)


def test_cases_go_by_what_tells_them_apart() -> None:
    one = found("each", False, 3.0, 4.0)
    assert [one.name(case) for _, case in one.numbers] == ["graph0", "graph1"]
    assert "graph1 4.00, graph0 3.00" in targets.as_table([one])
    many = targets.as_table([found("each", False, *(3.0 + at for at in range(20)))])
    assert "graph19 22.0" in many and "graph7" not in many and "and 8 more" in many


def test_cases_that_miss_a_target_by_moves_alone() -> None:
    """They miss it all the same, and are listed once more."""

    def sums(graph: str, ms: float, moves: float | None) -> Case:
        return case(graph, ms, floor_ms=1.0, extra={} if moves is None else {"moves_ms": moves})

    def of(*cases: Case) -> Found:
        target = Target("what", "spmm", Case.over_floor, 2.0, {}, least=targets.moves_over_floor)
        return Found(target, [(one.over_floor() or 0, one) for one in cases])

    there, near, unknown, beyond = (
        sums("a", 2.0, 2.5),
        sums("b", 4, 2.0),
        sums("c", 3, None),
        sums("d", 5, 2.5),
    )
    one = of(there, near, unknown, beyond)
    assert one.missed == [(5, beyond), (4, near), (3, unknown)] and one.missed_by_moves == [(2.5, beyond)]
    row = targets.as_table([one]).splitlines()[-1]
    assert "| missed | d 5.00, b 4.00, c 3.00 | d 2.50 |" in row
    assert "| missed | d 5.00 | d 2.50 |" in targets.as_table([of(there, beyond)])
    assert of(there).missed_by_moves == []
    assert targets.moves_over_floor(case("e", 2.0, extra={"moves_ms": 3.0})) is None


def test_what_others_take() -> None:
    ours = case("cora", 2.0, extra={"peers": {"fused3s": 8.0, "anemoi": 6.0, "pyg": 5.0}})
    assert targets.over_peer("fused3s")(ours) == 4.0 and targets.over_peer("pyg")(ours) == 2.5
    assert targets.over_peer()(ours) == 3.0 and targets.over_peer("stk")(ours) is None
    assert targets.over("pyg")(ours) is None
    failed = Case(ours.what, {"graphfuse": dataclasses.replace(ours.of["graphfuse"], p50_ms=None)})
    assert targets.over_peer()(failed) is None and targets.milliseconds(failed) is None


def test_sums_beside_those_of_flashsparse() -> None:
    ours = case("reddit", 2.0, gpu="NVIDIA H200", head_dim=64)
    assert targets.over_flashsparse("fp16")(ours) == pytest.approx(2.3472 / 2.0)
    assert targets.over_flashsparse("tf32")(ours) == pytest.approx(3.7588 / 2.0)
    assert targets.over_flashsparse("fp16")(case("reddit", 2.0, gpu="another", head_dim=64)) is None
    assert targets.over_flashsparse("fp16")(case("products", 2.0, gpu="NVIDIA H200", head_dim=64)) is None


def test_memory_of_a_step() -> None:
    assert targets.memory_mib(case("g", 1.0, peak_mib=3.0)) == 3.0
    assert targets.memory_mib(case("g", 1.0, peak_mib=3.0, extra={"total_peak_mib": 5.0})) == 5.0


def test_only_rows_in_floors_may_be_from_elsewhere(tmp_path: Path) -> None:
    """A newer row of graphfuse alone has a floor, but nobody to be compared with."""

    def write(name: str, *given: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in given))

    common = {"op": "spmm", "graph": "cora", "head_dim": 64, "dtype": "float16", "mode": "fwd"}
    old, new, newest = ({"commit": f"c{day}", "date": f"2026-11-0{day}"} for day in (1, 2, 3))
    ours, theirs = measured(p50_ms=2.0, floor_ms=1.0, **old), measured("torch.sparse", 8.0, **old)
    write("spmm.jsonl", *({**row, **common} for row in (ours, theirs)))
    # the last of them has no floor: it is not what decides
    alone, another = measured(p50_ms=1.1, floor_ms=1.0, **new), measured("flashsparse", 9.0, **newest)
    write("floors.jsonl", *({**row, **common} for row in (alone, another)))
    values = {one.target.says: one.value for one in targets.of_folder(tmp_path) if one.numbers}
    assert values == {
        "spmm, half precision, floors": 1.1,
        "spmm of 64, half precision, cuSPARSE over it": 4.0,
    }


def test_every_target_has_committed_records(capsys: pytest.CaptureFixture[str]) -> None:
    """Or it names cases that no benchmark has."""
    everything = targets.of_folder(COMMITTED)
    assert not [one.target.says for one in everything if not one.numbers]
    large, small = everything[:2]
    assert {case.what[1] for _, case in small.numbers} == {"cora", "pubmed"}
    assert not {case.what[1] for _, case in large.numbers} & {"cora", "pubmed"}
    missed = [one for one in everything if one.value is not None and not one.reached(one.value)]
    assert targets.main([]) == int(bool(missed))
    assert f"{len(everything) - len(missed)} of {len(everything)} targets" in capsys.readouterr().out


def test_reordering_is_of_the_graphs_it_was_asked_of() -> None:
    reordered = next(one for one in targets.of_folder(COMMITTED) if one.target.bench == "reorder")
    graphs = {case.what[1] for _, case in reordered.numbers}
    assert graphs == {"ego-twitter", "computers", "cs", "blogcatalog3", "reddit"}  # dblp-2010 is beside them


def test_a_folder_without_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert targets.main(["no-such-gpu"]) == 2
    assert "no records" in capsys.readouterr().err
