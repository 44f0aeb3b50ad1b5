from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch

# of several GPUs that are named, each of pytest-xdist's workers takes one
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
if len(GPUS) > 1 and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(GPUS)]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels then run on the CPU
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import prepare

        prepare()

_KEPT = 1 << 30  # bytes that a worker may keep between two tests
LOCAL_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail instead of skipping: the GPU job's switch"
    )


def _data_source() -> Path | None:
    named = os.environ.get("GRAPHFUSE_DATA")
    if named:
        return Path(named)
    return LOCAL_DATA if LOCAL_DATA.is_dir() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("data") and _data_source() is None:
            item.add_marker(pytest.mark.skip(reason="needs real graphs"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    report = yield
    if report.skipped and item.config.getoption("--require-gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # the very last line, so that a green run cannot hide that no real graph was seen
    if _data_source() is None and not hasattr(config, "workerinput"):
        print("real-graph tests did NOT run: set GRAPHFUSE_DATA to a folder with the data sets")


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_poison() -> object:
    # fills what torch.empty returns with NaN (integers: their maximum), so that nothing unwritten passes
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAPHFUSE_STRICT", "GRAPHFUSE_DISABLE", "GRAPHFUSE_CHECK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _file_of_gpu(tmp_path_factory: pytest.TempPathFactory, name: str) -> IO[str]:
    """To be locked; pytest-xdist's workers that share a GPU open the same."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    return (tmp_path_factory.getbasetemp().parent / f"graphfuse-{name}-{gpu}").open("w")


@pytest.fixture(autouse=True)
def share_of_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of pytest-xdist's workers that share a GPU, one with a test marked ``alone`` has it for itself.

    Each gives back the memory that it keeps for its next test, which is another's until then.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_available():
        yield
        return
    import fcntl  # not everywhere, nor are GPUs

    alone = request.node.get_closest_marker("alone") is not None
    with _file_of_gpu(tmp_path_factory, "door") as door, _file_of_gpu(tmp_path_factory, "room") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # who waits for the room keeps others from entering it
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        # a test may have said that there is no GPU
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _KEPT:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture
def tens_of_gib(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that need tens of GiB take turns, as two of pytest-xdist's workers would not fit into one GPU."""
    import fcntl  # not everywhere, nor are GPUs

    with _file_of_gpu(tmp_path_factory, "large") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writable copy of the real graphs: PyG writes beside the raw files."""
    source = _data_source()
    assert source is not None
    if os.environ.get("GRAPHFUSE_DATA"):
        return source
    root = tmp_path_factory.getbasetemp().parent / "graphfuse-data"  # shared by pytest-xdist's workers
    root.mkdir(exist_ok=True)
    for family in ("planetoid", "csr", "musae-github"):
        target = root / family
        if not target.exists():
            partial = Path(str(target) + f".{os.getpid()}")
            shutil.copytree(source / family, partial, copy_function=shutil.copyfile)
            for path in [partial, *partial.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            try:
                partial.rename(target)
            except OSError:  # another worker was first
                shutil.rmtree(partial)
    return root


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With ``True``, windows and rows of more than 32 entries are cut into slices."""
    if request.param:
        monkeypatch.setattr("graphfuse.formats.build._MIN_SLICE", 32)
    return request.param


@pytest.fixture(params=["windows", "rows"])
def walked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces the window or the row kernel, of spmm and, in half precision, of attention and GAT's."""
    rows = request.param == "rows"
    half = (torch.float16, torch.bfloat16)
    monkeypatch.setattr("graphfuse.kernels.launch.prefers_rows", lambda *sizes: rows)
    for prefers in ("attention_prefers_rows", "gat_prefers_rows"):
        monkeypatch.setattr(
            f"graphfuse.kernels.launch.{prefers}", lambda *sizes: rows or sizes[-1] not in half
        )
    return request.param
