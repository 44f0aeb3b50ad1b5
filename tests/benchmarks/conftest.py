from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import bench, graphs


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registered = dict(bench.REGISTRY)
    graphs.load.cache_clear()
    yield
    bench.REGISTRY.clear()
    bench.REGISTRY.update(registered)
