"""The list of faults to plant does not rot: each still has its place, and the tests that are to see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import KINDS, Fault
from tests.fault_list import FAULTS
from tests.faults import main, plant

ROOT = Path(__file__).parents[1]


def test_names_and_kinds() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} == set(KINDS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted_and_seen(fault: Fault) -> None:
    path = ROOT / "graphfuse" / fault.file
    planted = plant(fault, path.read_text())
    compile(planted, str(path), "exec")
    assert (ROOT / fault.tests.file).is_file()
    with pytest.raises(ValueError, match=f"{fault.name}: wanted once"):
        plant(fault, "")


def test_it_is_listed_in_the_documentation() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    missing = [fault.name for fault in FAULTS if f"| `{fault.name}` |" not in page]
    assert not missing, "docs/reliability.md lacks these faults"


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)
