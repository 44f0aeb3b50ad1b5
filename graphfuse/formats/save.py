"""Row windows in a file, so that a graph is cut once: safetensors, which runs no code when it is read."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphfuse.formats import inputs
from graphfuse.formats import packed as packing
from graphfuse.formats.cache import remember
from graphfuse.formats.fingerprint import fingerprint
from graphfuse.formats.lasting import lasting
from graphfuse.formats.row_windows import RowWindows
from graphfuse.formats.validate import PARTS, check_parts, sections_of

_FORMAT = "graphfuse.row_windows"
_EDGES = "edge_index"
_NUMBERS = ("fingerprint", "transposed", "num_dst", "num_src", "num_edges", "crc32")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in inputs.INTEGERS}

PathLike = str | os.PathLike[str]


def save_windows(path: PathLike, windows: RowWindows, edge_list: bool = True) -> None:
    """Writes everything of ``windows`` that was built so far to a safetensors file, whole or not at all.

    Args:
        path: The file; one that is there is replaced.
        windows: The record, on any device.
        edge_list: Whether to add the edge list that the record was built from, 8 bytes an edge. Without it
            :func:`load_windows` has to be given the edge list.

    Raises:
        RuntimeError: the edge list was modified since the record was built from it.
        OSError: the folder does not exist or cannot be written to.
    """
    from safetensors.torch import save_file

    state = windows.__getstate__()
    parts = {name: state[name].detach().cpu() for name in PARTS if name in state}
    scalars = packing.scalars_of(state["windows"])
    fields = {
        "format": _FORMAT,
        "schema": packing.header_of(state["windows"])[0],
        "fingerprint": state["fingerprint"],
        "transposed": int(state["transposed"]),
        "num_dst": scalars.num_dst,
        "num_src": scalars.num_src,
        "num_edges": scalars.num_edges,
    }
    tensors = dict(parts)
    if edge_list:
        edges = windows.edge_index()  # raises if they were modified
        edges = edges.flip(0) if windows.transposed else edges
        tensors[_EDGES] = edges.detach().to("cpu", torch.int32).contiguous()  # all indices fit
        fields["edge_dtype"] = str(edges.dtype).removeprefix("torch.")
    metadata = {name: str(value) for name, value in fields.items()}
    metadata["crc32"] = str(_checksum(metadata, parts))
    with replacing(path) as partial:
        save_file(tensors, partial, metadata)


@lasting
def load_windows(path: PathLike, device: Any = None, edge_index: Tensor | None = None) -> RowWindows:
    """Reads what :func:`save_windows` wrote.

    While the record lives, layers find it for every equal edge list on its device, like one that was built
    there. With ``edge_index`` it lives as long as that tensor.

    Args:
        path: The file.
        device: Where the record is to lie. ``None``: where ``edge_index`` lies, else on the CPU.
        edge_index: The edge list that the windows were built from, in the same order. That of the file, if
            it holds one, is then not read.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: the file is damaged, inconsistent, of another schema or not from :func:`save_windows`; it
            holds no edge list and none is given; or it was built from other edges than ``edge_index``.

    Note:
        No code in the file is run, and all of it is compared with the edges before a kernel can see it
        (:meth:`graphfuse.RowWindows.validate`): some sorts on ``device``, about as many as a build takes.
    """
    from safetensors import SafetensorError, safe_open

    check_no_folder(path)
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            _check_schema(path, metadata)
            names = set(file.keys())
            wanted = names if edge_index is None else names - {_EDGES}
            # cloned: the tensors of a file are neither aligned as kernels like it nor safe from other writers
            tensors = {name: file.get_tensor(name).clone() for name in sorted(wanted)}
    except SafetensorError as error:
        _refuse(path, "a complete safetensors file", f"{error}")
    parts = {name: tensor for name, tensor in tensors.items() if name != _EDGES}
    numbers = _read_numbers(path, metadata, parts)
    if edge_index is None:
        source = _stored_edges(path, metadata, tensors.get(_EDGES))
    else:
        plain = inputs.plain(edge_index)
        inputs.check_edge_index(plain)
        source = plain.detach()
    if source.size(1) != numbers["num_edges"] or fingerprint(source) != numbers["fingerprint"]:
        if edge_index is None:
            _refuse(path, "the edges that the windows were built from", "others")
        raise ValueError(
            f"`edge_index` must be the edge list that the windows in {path} were built from, "
            f"{numbers['num_edges']} edges in the same order (got {source.size(1)} edges, other ones or "
            "another order); build the windows of this one"
        )
    parts = {
        name: _moved(packed, source.device if device is None else device) for name, packed in parts.items()
    }
    try:
        check_parts(parts, source.to(parts["windows"].device))
    except ValueError as error:
        _refuse(path, "a consistent record", f"{error}")
    # only now, as others find a record as soon as it is one
    record = RowWindows.__new__(RowWindows)
    state = {"transposed": False, "fingerprint": numbers["fingerprint"], "source": source, **parts}
    record.__setstate__(state)
    if edge_index is not None and edge_index.device == record.device:
        remember(edge_index, record)
    return record.transpose() if numbers["transposed"] else record


def check_no_folder(path: PathLike) -> None:
    """Raises if ``path`` is a folder, which safetensors neither calls by its name nor a folder."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; name a file in it")


def _check_schema(path: PathLike, metadata: dict[str, str]) -> None:
    if metadata.get("format") != _FORMAT:
        _refuse(path, f"a file of the format {_FORMAT}", str(metadata.get("format")))
    known = list(map(str, packing.SCHEMAS))
    if metadata.get("schema") not in known:
        _refuse(path, f"schema {' or '.join(known)}", str(metadata.get("schema")))


def _read_numbers(path: PathLike, metadata: dict[str, str], parts: dict[str, Tensor]) -> dict[str, int]:
    if "windows" not in parts or not parts.keys() <= PARTS.keys():
        _refuse(path, f"the tensors windows and perhaps {', '.join(PARTS)}", ", ".join(parts) or "none")
    for name, packed in parts.items():
        if packed.dtype != torch.int32 or packed.dim() != 1 or packed.numel() < packing._HEADER:
            _refuse(path, f"{name} int32[{packing._HEADER} or more]", f"{packed.dtype} {list(packed.shape)}")
    found = str(_checksum(metadata, parts))
    if metadata.get("crc32") != found:
        _refuse(path, f"the checksum {metadata.get('crc32')}", f"{found}: it is damaged")
    try:
        numbers = {name: int(metadata[name]) for name in _NUMBERS}
    except (KeyError, ValueError):
        _refuse(path, f"the numbers {', '.join(_NUMBERS)}", ", ".join(metadata))
    for name, packed in parts.items():
        schema = int(metadata["schema"]) if name == "windows" else packing.SCHEMA
        sizes = [numbers[size] for size in ("num_dst", "num_src", "num_edges")]
        _check_header(path, name, packed, [schema, PARTS[name][0], *sizes])
    return numbers


def _check_header(path: PathLike, name: str, packed: Tensor, wanted: list[int]) -> None:
    # before anything believes it: a section beyond the end would be read from foreign memory
    sections = sections_of(name, wanted[0])
    header = packed[: packing._HEADER].tolist()
    places = header[packing._SCALARS : packing._SCALARS + 2 * sections]
    inside = all(
        start * packing._ALIGN >= packing._HEADER
        and length >= 0
        and start * packing._ALIGN + length <= packed.numel()
        for start, length in zip(places[::2], places[1::2], strict=True)
    )
    if header[:5] != wanted or not inside or any(header[packing._SCALARS + 2 * sections :]):
        _refuse(path, f"{name} of the header {wanted}, sections within", f"{header[:5]}, {places}")


def _moved(packed: Tensor, device: Any) -> Tensor:
    moved = packed.to(device)
    packing.adopt(moved, packing.header_of(packed))
    return moved


def _stored_edges(path: PathLike, metadata: dict[str, str], edges: Tensor | None) -> Tensor:
    if edges is None:
        raise ValueError(
            f"{path} holds no edge list; pass the `edge_index` that the windows were built from, or save "
            "them with edge_list=True"
        )
    dtype = _DTYPES.get(metadata.get("edge_dtype", ""))
    if dtype is None or edges.dtype != torch.int32 or edges.dim() != 2 or edges.size(0) != 2:
        got = f"{edges.dtype} {list(edges.shape)} for {metadata.get('edge_dtype')}"
        _refuse(path, f"an {_EDGES} int32[2, num_edges] for one of {', '.join(_DTYPES)}", got)
    return edges.to(dtype)


def _checksum(metadata: dict[str, str], parts: dict[str, Tensor]) -> int:
    fields = sorted((name, value) for name, value in metadata.items() if name != "crc32")
    crc = zlib.crc32(json.dumps(fields).encode())
    for name in sorted(parts):
        crc = zlib.crc32(parts[name].numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def _refuse(path: PathLike, wanted: str, got: str) -> NoReturn:
    raise ValueError(
        f"{path} holds no row windows that this graphfuse reads: wanted {wanted} (got {got}); write it again "
        "with `graphfuse prepare` or save_windows"
    )


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """A name beside ``path`` to write to; it becomes ``path`` at the end, or goes if there was an error.

    The file gets the permissions of any new one: safetensors gives its files to their owner alone.
    """
    from safetensors import SafetensorError

    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    # by chance: threads share the number of their process, and containers may have processes of one number
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        if partial.stat().st_mode != mode:
            partial.chmod(stat.S_IMODE(mode))
        partial.replace(path)
    except SafetensorError as error:  # of a full disk, say
        raise OSError(f"cannot write {path} ({error}); make room or name another folder") from error
    finally:
        partial.unlink(missing_ok=True)
