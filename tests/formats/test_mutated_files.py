"""A thousand mutated files: each is refused with its name, or is what a build of its edges makes."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from graphfuse import RowWindows
from graphfuse.formats import build, fingerprint, load_windows, save_windows
from graphfuse.formats import packed as packing
from graphfuse.formats import save as saving
from graphfuse.formats.validate import PARTS
from graphfuse.testing import GRAPHS

Content = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata
REFUSED = "holds no row windows that this graphfuse reads: wanted .* \\(got (.|\n)*\\); write it again"
HOSTILE = (0, 1, -1, 2, 3, 8, 15, 16, 33, 255, 2**15, 2**16, 2**31 - 1, -(2**31), 2**31 - 32, -16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """With repeated edges, of two sets of nodes, with windows and rows that are cut, and two in an order."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_MIN_SLICE", 32)
        natural = [(graph, "natural") for graph in ("repeated", "bipartite", "hub", "one_edge")]
        for graph, method in (*natural, ("repeated", "bisection"), ("bipartite", "degree")):
            windows = RowWindows.from_edge_index(*GRAPHS[graph](), reorder=method)
            _ = windows.packed_rows, windows.packed_window_edges, windows.packed_row_edges
            path = tmp_path_factory.mktemp("files") / graph
            save_windows(path, windows)
            found.append(path.read_bytes())
    return found


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading launches nothing."""

    def launch(*arguments: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr("graphfuse.ops._check.runs_kernel", launch)


# Mutations of the bytes


def flip(raw: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]


def truncate(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def lengthen(raw: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw))
    return raw[:place] + rng.randbytes(rng.randrange(1, 64)) + raw[place:]


def copy_piece(raw: bytes, rng: random.Random) -> bytes:
    place, other = rng.randrange(len(raw)), rng.randrange(len(raw))
    piece = raw[other : other + 128][: len(raw) - place]
    return raw[:place] + piece + raw[place + len(piece) :]


# Mutations of what it holds, with a checksum that fits


def number(content: Content, rng: random.Random) -> None:
    """Of a tensor; its header is hit as often as the rest."""
    packed = content[0][rng.choice(sorted(content[0]))].view(-1)
    place = rng.randrange(min(40, packed.numel()) if rng.random() < 0.5 else packed.numel())
    near = int(packed[place]) + rng.choice((-1, 1, 16, -16))
    packed[place] = rng.choice((*HOSTILE, near, rng.randrange(-50, 150)))


def bit(content: Content, rng: random.Random) -> None:
    packed = content[0][rng.choice(sorted(PARTS))]
    place = rng.randrange(packing._HEADER, packed.numel())
    packed[place] ^= 1 << rng.randrange(31)


def swap_numbers(content: Content, rng: random.Random) -> None:
    """Two that stand side by side, as in an order of edges or the columns of a window."""
    packed = content[0][rng.choice(sorted(PARTS))]
    place = rng.randrange(packing._HEADER, packed.numel() - 1)
    packed[place : place + 2] = packed[place : place + 2].flip(0)


def swap_sections(content: Content, rng: random.Random) -> None:
    """What the header says of two sections, all of them or their begin."""
    name = rng.choice(sorted(PARTS))
    header = content[0][name][packing._SCALARS :]
    sections = len(packing.unpack(content[0][name]).sections)
    one, other = (2 * place for place in rng.sample(range(sections), 2))
    width = rng.choice((1, 2))
    kept = header[one : one + width].clone()
    header[one : one + width] = header[other : other + width]
    header[other : other + width] = kept


def swap_tensors(content: Content, rng: random.Random) -> None:
    one, other = rng.sample(sorted(content[0]), 2)
    content[0][one], content[0][other] = content[0][other], content[0][one]


def resize(content: Content, rng: random.Random) -> None:
    name = rng.choice(sorted(PARTS))
    packed = content[0][name]
    longer = torch.cat([packed, torch.randint(9, (rng.randrange(1, 40),), dtype=torch.int32)])
    content[0][name] = rng.choice((packed[: rng.randrange(packed.numel())].clone(), longer))


def drop(content: Content, rng: random.Random) -> None:
    del content[0][rng.choice(sorted(content[0]))]


def field(content: Content, rng: random.Random) -> None:
    """Of the metadata."""
    name = rng.choice(sorted(content[1]))
    if rng.random() < 0.2:
        del content[1][name]
    else:
        content[1][name] = rng.choice((*map(str, HOSTILE), "", "nan", "9" * 5000, "uint8", "2_0"))


def edge(content: Content, rng: random.Random) -> None:
    """Of the edge list, with a fingerprint that fits."""
    edges = content[0]["edge_index"]
    if edges.size(1) > 0:
        edges[rng.randrange(2), rng.randrange(edges.size(1))] = rng.choice((*HOSTILE, rng.randrange(20)))


def order(content: Content, rng: random.Random) -> None:
    """Of the edge list, with a fingerprint that fits; half of the time no order of the edges is left."""
    edges = content[0]["edge_index"]
    content[0]["edge_index"] = edges[:, torch.randperm(edges.size(1))].contiguous()
    if rng.random() < 0.5:
        del content[0]["window_edges"], content[0]["row_edges"]


RAW = (flip, truncate, lengthen, copy_piece)
HELD = (number, number, bit, swap_numbers, swap_sections, swap_tensors, resize, drop, field, edge, order)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def write(path: Path, content: Content) -> None:
    tensors, metadata = content
    if "edge_index" in tensors and metadata.get("fingerprint", "").strip("-").isdigit():
        edges = tensors["edge_index"]
        if edges.dim() == 2:
            metadata["fingerprint"] = str(fingerprint.fingerprint(edges))
    parts = {name: tensor for name, tensor in tensors.items() if name != "edge_index"}
    metadata["crc32"] = str(saving._checksum(metadata, parts))
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def views(record: RowWindows) -> list[Tensor]:
    """All that kernels read, both directions; where windows may be cut is not for a file to change."""
    record = record.transpose() if record.transposed else record
    found: list[Tensor] = []
    for view in (record, record.transpose()):
        for w in (view.walk(), view.row_walk()):
            found += [part for part in w if isinstance(part, Tensor)]
            found.append(torch.tensor([w.num_rows, w.num_cols, w.num_slots]))
        found += [part for part in (*view.window_edges(), *view.row_edges()) if part is not None]
    return found


def rebuilt(loaded: RowWindows, edges: Tensor, size: tuple[int, int]) -> RowWindows:
    """What a build makes of ``edges``, with the rows in the order of ``loaded``, which may be any."""
    forward = loaded.transpose() if loaded.transposed else loaded
    walks = forward.walk(), forward.transpose().walk()
    orders = [torch.arange(w.num_rows) if w.row_index is None else w.row_index[: w.num_rows] for w in walks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphfuse.formats.reorder.cluster", lambda *graph: orders.pop(0).long())
        return RowWindows.from_edge_index(edges, size, "degree")


def outcome(path: Path) -> str:
    """``refused`` or ``loaded``; anything else that happens fails the test."""
    try:
        loaded = load_windows(path)
    except ValueError as error:
        assert str(path) in str(error)
        return "refused"
    num_dst, num_src = (loaded.transpose() if loaded.transposed else loaded).shape
    edges = loaded.edge_index().flip(0) if loaded.transposed else loaded.edge_index()
    built = rebuilt(loaded, edges, (num_src, num_dst))
    for ours, theirs in zip(views(loaded), views(built), strict=True):
        assert torch.equal(ours, theirs)
    loaded.validate()
    return "loaded"


@pytest.mark.parametrize("part", range(4))
def test_mutated_files_are_refused_or_right(
    part: int, files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    rng, path = random.Random(part), tmp_path / "graph.safetensors"
    found: Counter[tuple[str, str]] = Counter()
    for count in range(250):
        raw = files[count % len(files)]
        kind: Callable[..., bytes | None] = rng.choice((*RAW, *HELD, *HELD))
        path.write_bytes(raw)
        if kind in RAW:
            path.write_bytes(kind(raw, rng))
        else:
            content = {name: tensor.clone() for name, tensor in load(raw).items()}, metadata_of(path)
            kind(content, rng)
            write(path, content)
        found[kind.__name__, outcome(path)] += 1
    # most are found, and what is right, as another order of the edges, is still read
    assert sum(n for (_, result), n in found.items() if result == "refused") > 150
    assert found["number", "refused"] > 10 and found["order", "loaded"] > 0


@pytest.mark.parametrize(("name", "file"), [*((name, 0) for name in PARTS), ("windows", 4)])
def test_every_number_that_a_kernel_reads_counts(
    name: str, file: int, files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each number of each section once: only what lies between sections may change unnoticed
    monkeypatch.setattr(build, "_MIN_SLICE", 32)
    path = tmp_path / "graph.safetensors"
    path.write_bytes(files[file])
    metadata, tensors = metadata_of(path), load(files[file])
    sections = packing.unpack(tensors[name]).sections
    used = {place for section in sections for place in range(section.numel()) if section.numel()}
    assert used
    for section in range(len(sections)):
        for place in range(0, sections[section].numel(), 5):
            content = {key: tensor.clone() for key, tensor in tensors.items()}, dict(metadata)
            found = packing.unpack(content[0][name]).sections[section]
            found[place] += 1 if place % 2 else -1
            write(path, content)
            with pytest.raises(ValueError, match="wanted a consistent record"):
                load_windows(path)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_foreign_files_run_nothing(tmp_path: Path) -> None:
    bomb, buffer = Bomb(tmp_path / "bang"), io.BytesIO()
    torch.save({"windows": bomb}, buffer)
    foreign = {
        "a pickle": pickle.dumps(bomb),
        "torch.save": buffer.getvalue(),
        "other tensors": save({"weight": torch.ones(3)}),
        "names only": save({name: torch.zeros(64, dtype=torch.int32) for name in PARTS}),
        "a scalar": save({"windows": torch.tensor(1)}, {"format": saving._FORMAT, "schema": "1"}),
        "a header of 2^62 bytes": (2**62).to_bytes(8, "little") + b"{}",
        "json": b'{"windows": [1, 2, 3]}',
        "a pickle in the metadata": save({}, {"format": pickle.dumps(bomb, 0).decode()}),
    }
    for name, raw in foreign.items():
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=REFUSED) as refused:
            load_windows(path)
        assert str(path) in str(refused.value)
    assert not bomb.path.exists()
    pickle.loads(foreign["a pickle"])
    assert bomb.path.exists()  # it would have gone off


@pytest.mark.parametrize("schema", ["0", "3", "1.0", "", "99999999999999999999"])
def test_other_schemas_are_named(schema: str, files: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    path.write_bytes(files[0])
    content = load(files[0]), metadata_of(path) | {"schema": schema}
    write(path, content)
    with pytest.raises(ValueError, match=rf"wanted schema 1 or 2 \(got {schema}\); write it again"):
        load_windows(path)


@pytest.mark.parametrize(("file", "schema"), [(0, "2"), (4, "1")])
def test_a_schema_says_whether_there_is_an_order(
    file: int, schema: str, files: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "graph.safetensors"
    path.write_bytes(files[file])
    write(path, (load(files[file]), metadata_of(path) | {"schema": schema}))
    other = 3 - int(schema)
    with pytest.raises(ValueError, match=rf"windows of the header \[{schema}, 1, .*\(got \[{other}, 1, "):
        load_windows(path)


def test_what_is_no_file_is_an_os_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError):
            load_windows(path)
