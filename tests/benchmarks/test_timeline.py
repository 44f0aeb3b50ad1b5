"""How kernels that a profiler saw are told apart by call, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import timeline
from benchmarks.timeline import Span


def seen(begin: float, *kernels: str) -> list[Span]:
    """What a profiler sees of a call: the flush, the spin and kernels of 3 us, which overlap by 1 us."""
    spans = [Span("fill", begin, begin + 5), Span("void at::cuda::spin_kernel(long)", begin + 5, begin + 100)]
    return spans + [Span(name, begin + 100 + 2 * i, begin + 103 + 2 * i) for i, name in enumerate(kernels)]


def test_kernels_of_each_call() -> None:
    spans = [*seen(1000, "rows", "merge"), *seen(0, "rows", "merge"), Span("before", -9, -8)]
    first, second = timeline.calls(spans)
    assert first == seen(0, "rows", "merge")[2:]
    assert second == seen(1000, "rows", "merge")[2:]
    assert timeline.medians([first, second]) == [Span("rows", 0, 3), Span("merge", 2, 5)]


def test_calls_that_launch_more_than_most_are_left_out() -> None:
    spans = [*seen(0, "copy", "rows"), *seen(1000, "rows"), *seen(2000, "rows")]
    assert timeline.medians(list(timeline.calls(spans))) == [Span("rows", 0, 3)]
    assert timeline.medians([]) == timeline.medians([[], []]) == []


def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["spmm", "--graphs", "cora", "--out", str(tmp_path / "rows.jsonl")]
    assert timeline.main([*arguments, "--only", "mode=sideways"]) == 2
    assert "no case of spmm is mode=sideways" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timeline.main(arguments) == 2
    assert "there is none" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_kernels_of_a_call(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["spmm", "--graphs", "uniform-1m-12m", "--only", "dtype=float16", "mode=fwd", "head_dim=64"]
    assert timeline.main([*arguments, "--out", str(out)]) == 0
    assert "_spmm_window_kernel" in out.read_text()
