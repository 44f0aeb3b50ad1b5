"""Row windows in a file: what is read is what was written, or is refused."""

from __future__ import annotations

import os
import pickle
import random
import stat
from pathlib import Path

import pytest
import safetensors
import torch
import torch_geometric.nn as pyg
from safetensors.torch import load_file, save_file

import graphfuse
from graphfuse import RowWindows, clear_cache
from graphfuse.formats import load_windows, save, save_windows
from graphfuse.formats.cache import row_windows
from graphfuse.testing import GRAPHS

NAMES = ("windows", "rows", "window_edges", "row_edges")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "graph.safetensors"


def build(graph: str = "repeated", lazy: bool = True) -> RowWindows:
    windows = RowWindows.from_edge_index(*GRAPHS[graph]())
    if lazy:
        _ = windows.packed_rows, windows.packed_window_edges, windows.packed_row_edges
    return windows


def metadata_of(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


def never(*arguments: object) -> RowWindows:
    raise AssertionError("windows were built")


@pytest.mark.parametrize("graph", ["no_nodes", "no_edges", "repeated", "symmetric", "bipartite"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_round_trip(graph: str, lazy: bool, transposed: bool, path: Path) -> None:
    windows = build(graph, lazy)
    windows = windows.transpose() if transposed else windows
    save_windows(path, windows)
    loaded = load_windows(str(path)).validate()
    assert (loaded.sizes, loaded.transposed, loaded.fingerprint, loaded.nbytes) == (
        *(windows.sizes, transposed, windows.fingerprint, windows.nbytes),
    )
    state, wanted = loaded.__getstate__(), windows.__getstate__()
    assert all(torch.equal(state[name], wanted[name]) for name in NAMES if name in wanted)
    assert sorted(state) == sorted(wanted)
    assert torch.equal(loaded.edge_index(), windows.edge_index())
    assert torch.equal(loaded.row_edges().perm, windows.row_edges().perm)  # built now, if not saved


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_edges_keep_their_dtype(dtype: torch.dtype, path: Path) -> None:
    edge_index, size = GRAPHS["repeated"]()
    save_windows(path, RowWindows.from_edge_index(edge_index.to(dtype), size))
    loaded = load_windows(path).edge_index()
    assert loaded.dtype == dtype and torch.equal(loaded, edge_index.to(dtype))


def test_layers_find_a_loaded_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, (num_nodes, _) = GRAPHS["self_loops"]()
    save_windows(path, build("self_loops"))
    clear_cache()
    monkeypatch.setattr("graphfuse.formats.row_windows.build_structure", never)
    loaded = load_windows(path)
    theirs, ours = pyg.GCNConv(3, 2), graphfuse.nn.GCNConv(3, 2)
    ours.load_state_dict(theirs.state_dict())
    x, weight = torch.randn(num_nodes, 3), torch.rand(edge_index.size(1))
    wanted = theirs(x, edge_index, weight)
    torch.testing.assert_close(ours(x, edge_index, weight), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, loaded, weight), wanted, rtol=1e-4, atol=1e-5)
    # the same edges in a tensor of their own: recognised by the fingerprint, as long as the record lives
    found = row_windows(edge_index.clone(), num_nodes, num_nodes)
    assert found.packed_windows is loaded.packed_windows


@pytest.mark.parametrize("edge_list", [False, True])
def test_a_given_edge_list_holds_the_record(
    edge_list: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index, size = GRAPHS["bipartite"]()
    save_windows(path, build("bipartite", lazy=False).transpose(), edge_list=edge_list)
    assert ("edge_index" in load_file(path)) is edge_list
    clear_cache()
    monkeypatch.setattr("graphfuse.formats.row_windows.build_structure", never)
    loaded = load_windows(path, edge_index=edge_index)
    assert loaded.transposed and loaded.edge_index().flip(0).equal(edge_index)
    assert loaded.transpose().edge_index().data_ptr() == edge_index.data_ptr()
    packed = loaded.packed_windows
    del loaded
    found = row_windows(edge_index, *size)
    assert found.packed_windows is packed and not found.transposed
    assert torch.equal(edge_index[:, found.window_edges().perm], found.to_edge_index())


def test_an_edge_list_is_needed_and_must_be_the_one(path: Path) -> None:
    edge_index, _ = GRAPHS["repeated"]()
    save_windows(path, build(lazy=False), edge_list=False)
    with pytest.raises(ValueError, match="holds no edge list; pass the `edge_index`"):
        load_windows(path)
    for other in (edge_index.flip(1), edge_index[:, 1:], (edge_index + 1) % 20):
        with pytest.raises(ValueError, match=r"`edge_index` must be the edge list .* \(got \d+ edges, other"):
            load_windows(path, edge_index=other)
    with pytest.raises(ValueError, match="to be of integer type"):
        load_windows(path, edge_index=edge_index.float())
    with pytest.raises(ValueError, match=r"must be an integer tensor .* \(got list\)"):
        load_windows(path, edge_index=edge_index.tolist())


def test_modified_edges_are_not_saved(path: Path) -> None:
    edge_index, size = GRAPHS["repeated"]()
    windows = RowWindows.from_edge_index(edge_index, size)
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 20
    with pytest.raises(RuntimeError, match="was modified since"):
        save_windows(path, windows)
    assert not list(path.parent.iterdir())


def test_a_file_is_whole_or_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_windows(path, build("ragged"))
    before = path.read_bytes()

    def full(tensors: object, partial: Path, metadata: object) -> None:
        partial.write_bytes(b"half")
        raise OSError("no space left on the device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_windows(path, build("hub"))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    with path.open("rb") as reader:  # who reads it meanwhile reads the old file to its end
        save_windows(path, build("hub"))
        assert reader.read() == before != path.read_bytes()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_windows(path / ".." / "nowhere" / "graph.safetensors", build("hub"))


def test_two_writers_of_a_file_are_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged, hub = build("ragged"), build("hub")

    def slow(tensors: dict[str, torch.Tensor], partial: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, partial, metadata)
        monkeypatch.undo()
        save_windows(path, hub)  # another thread, or a process of this number in another container
        assert load_windows(path).shape == hub.shape

    monkeypatch.setattr("safetensors.torch.save_file", slow)
    save_windows(path, ragged)
    assert load_windows(path).shape == ragged.shape and list(path.parent.iterdir()) == [path]


def test_a_file_is_as_readable_as_any_new_one(path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_windows(path, build("ragged"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_full_disk_is_an_os_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, partial: Path, metadata: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"cannot write .*No space left on device \(os error 28\)\)"):
        save_windows(path, build("ragged"))
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"wanted a complete safetensors file \(got .*header"),
        (b"x" * 5000, "wanted a complete safetensors file"),
        (pickle.dumps({"windows": [1, 2]}), "wanted a complete safetensors file"),
        ("other", r"wanted a file of the format graphfuse.row_windows \(got None\)"),
        ("future", r"wanted schema 1 or 2 \(got 3\); write it again with `graphfuse prepare`"),
        ("foreign tensor", "wanted the tensors windows and perhaps"),
        ("dtype", r"wanted rows int32\[64 or more\] \(got torch.int64"),
        ("edges", r"wanted the edges that the windows were built from \(got others\)"),
        ("sizes", r"wanted row_edges of the header \[1, 4, 21, 20, .*\(got \[1, 4, 20, 20, "),
        ("section", r"wanted windows of the header .*, sections within"),
    ],
)
def test_what_is_refused(content: bytes | str, message: str, path: Path) -> None:
    save_windows(path, build())
    tensors, metadata = load_file(path), metadata_of(path)
    if content == "other":
        metadata = {}
    elif content == "future":
        metadata["schema"] = "3"
    elif content == "foreign tensor":
        tensors["extra"] = torch.ones(3)
    elif content == "dtype":
        tensors["rows"] = tensors["rows"].long()
    elif content == "edges":
        tensors["edge_index"] = tensors["edge_index"].flip(1).contiguous()
    elif content == "sizes":
        metadata["num_dst"] = "21"
    elif content == "section":
        tensors["windows"][12] = 1 << 20  # the first section begins beyond the end
    if metadata and "extra" not in tensors:  # a checksum that fits: damage is not what is tested here
        metadata["crc32"] = str(save._checksum(metadata, {k: v for k, v in tensors.items() if k in NAMES}))
    if isinstance(content, str):
        save_file(tensors, path, metadata or None)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        load_windows(path)
    assert str(path) in str(refused.value)


def test_a_folder_is_no_file(path: Path) -> None:
    path.mkdir()  # safetensors says of it that there is no such device
    with pytest.raises(IsADirectoryError, match=r"graph.safetensors is a folder; name a file in it"):
        load_windows(path)


def test_damage_is_found(path: Path) -> None:
    windows = build("self_loops")
    save_windows(path, windows)
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        place, kind = rng.randrange(len(good)), rng.randrange(3)
        if kind == 0:  # one bit
            bad = good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :]
        elif kind == 1:  # the rest is missing
            bad = good[:place]
        else:  # a piece of another place
            other = rng.randrange(len(good))
            piece = good[other : other + 32]
            bad = (good[:place] + piece + good[place + len(piece) :])[: len(good)]
        path.write_bytes(bad)
        try:
            loaded = load_windows(path)
        except ValueError:
            continue
        # nothing that is read was hit, such as the blanks after the header
        assert loaded.sizes == windows.sizes and torch.equal(loaded.packed_rows, windows.packed_rows)
        assert torch.equal(loaded.packed_windows, windows.packed_windows)
        assert torch.equal(loaded.edge_index(), windows.edge_index())
    with pytest.raises(FileNotFoundError):
        load_windows(path.with_name("nothing"))


@pytest.mark.gpu
def test_from_and_to_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, (num_nodes, _) = GRAPHS["repeated"]()
    on_gpu = edge_index.cuda()
    windows = RowWindows.from_edge_index(on_gpu, (num_nodes, num_nodes))
    row_edges = windows.packed_row_edges
    save_windows(path, windows)
    del windows
    clear_cache()
    monkeypatch.setattr("graphfuse.formats.row_windows.build_structure", never)
    loaded = load_windows(path, "cuda")
    assert loaded.device == torch.device("cuda:0") and loaded.edge_index().is_cuda
    assert torch.equal(loaded.packed_row_edges, row_edges)
    found = row_windows(on_gpu.clone(), num_nodes, num_nodes)
    assert found.packed_windows is loaded.packed_windows
    held = load_windows(path, edge_index=on_gpu)
    assert held.device == on_gpu.device
    assert row_windows(on_gpu, num_nodes, num_nodes) is held
    assert load_windows(path, "cpu", edge_index=on_gpu).edge_index().device.type == "cpu"
