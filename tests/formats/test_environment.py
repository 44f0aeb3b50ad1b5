"""What is asked of the environment on every call is what os.environ says."""

from __future__ import annotations

import pytest

from graphfuse.formats import environment

NAME = "GRAPHFUSE_OF_A_TEST"


@pytest.mark.parametrize("kept", [environment._KEPT, None], ids=["quick", "plain"])
def test_variables_that_come_and_go(kept: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_KEPT", kept)
    assert not environment.is_set(NAME) and not environment.is_on(NAME)
    for value, on in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.setenv(NAME, value)
        assert environment.is_set(NAME) and environment.is_on(NAME) is on
    monkeypatch.delenv(NAME)
    assert not environment.is_set(NAME) and not environment.is_on(NAME)
