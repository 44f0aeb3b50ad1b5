"""Cases as the command line names them."""

from __future__ import annotations

import pytest

from benchmarks import run, tune
from benchmarks.cases import fits

ATTENTION = ["attention", "--graphs", "tiny", "--only"]


def listed(capsys: pytest.CaptureFixture[str], *only: str) -> list[str]:
    assert run.main([*ATTENTION, "dtype=float16", "mode=fwd", *only, "--list"]) == 0
    return [line.split("shape=")[1].split(" dtype")[0] for line in capsys.readouterr().out.splitlines()]


def test_several_values_of_an_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, "shape=4x32,8x16", "dropout=none") == ["(4, 32)", "(8, 16)"]
    assert listed(capsys, "shape=8x16", "dropout=none,0.3") == ["(8, 16)"] * 2
    assert fits({"shape": (4, 32)}, {"shape": "4x32", "dropout": "none"})
    assert not fits({"shape": (4, 32), "dropout": 0.3}, {"shape": "4x32", "dropout": "none"})


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["shape=8x16", "shape=4x32"], "write a name once, several values as NAME=A,B (got shape=8x16"),
        (["shape"], "write NAME=VALUE (got shape)"),
    ],
)
def test_what_names_no_cases(only: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for call, arguments in (
        (run.main, [*ATTENTION, *only]),
        (tune.main, ["attention", "attention_row", "--vary", "step=1", "--only", *only]),
    ):
        with pytest.raises(SystemExit, match="2"):
            call(arguments)
        assert message in capsys.readouterr().err


def test_what_no_case_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main([*ATTENTION, "dropout=0.0", "mode=fwd"])
    wanted = "no case of attention is dropout=0.0 mode=fwd; of "
    error = capsys.readouterr().err
    assert wanted in error and "dropout is none, 0.3; mode is fwd, fwd+bwd" in error
    assert tune.main(["attention", "attention_row", "--vary", "step=1", "--only", "mode=sideways"]) == 2
    assert "mode is fwd, fwd+bwd" in capsys.readouterr().err
