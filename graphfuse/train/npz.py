"""Graphs in ``.npz`` files, as the commands read them."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from graphfuse.formats.inputs import Size

WANTED = "an .npz file with edge_index, or with indptr and indices (CSR as scipy saves it, a row per source)"


def read(path: str) -> tuple[Tensor, Size]:
    """The edge list and ``(num_src, num_dst)`` of a file.

    Raises:
        ValueError: there is no such file, or it holds no graph.
    """
    import numpy as np
    import torch

    try:
        with open(path, "rb") as raw:
            if not zipfile.is_zipfile(raw):
                raise ValueError("it is no archive")
            with np.load(raw) as file:  # runs no code: it refuses pickles
                found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"cannot read {path} ({error}); wanted {WANTED}") from error
    integers = {name: array for name, array in found.items() if array.dtype.kind in "iu"}
    for name, count, what in (("num_nodes", 1, "an integer"), ("shape", 2, "two integers, rows and columns")):
        if name in found and (name not in integers or integers[name].size != count):
            got = f"{found[name].dtype}{list(found[name].shape)}"
            raise ValueError(f"`{name}` in {path} must be {what} (got {got}); save the file without it")
    arrays = {name: torch.from_numpy(array.astype(np.int64)) for name, array in integers.items()}
    num_nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else None
    if "edge_index" in arrays:
        sources, receivers = arrays["shape"].view(-1).tolist() if "shape" in arrays else [num_nodes] * 2
        return arrays["edge_index"], (sources, receivers)
    layouts = found.get("format", np.array("csr")).reshape(-1).tolist()
    if not {"indptr", "indices"} <= arrays.keys() or layouts not in (["csr"], [b"csr"]):
        raise ValueError(f"{path} must be {WANTED} (got {', '.join(found) or 'nothing'})")
    return _edges(path, arrays["indptr"], arrays["indices"], arrays.get("shape"), num_nodes)


def _edges(
    path: str, indptr: Tensor, target: Tensor, shape: Tensor | None, num_nodes: int | None
) -> tuple[Tensor, Size]:
    import torch

    for name, array in (("indptr", indptr), ("indices", target)):
        if array.dim() != 1:
            raise ValueError(f"`{name}` in {path} must have one dimension (got {array.dim()})")
    length = torch.diff(indptr)
    if len(indptr) == 0 or indptr[[0, -1]].tolist() != [0, len(target)] or bool((length < 0).any()):
        raise ValueError(f"`indptr` in {path} must rise from 0 to the {len(target)} entries of `indices`")
    rows, columns = (len(length), num_nodes) if shape is None else shape.view(-1).tolist()
    if rows != len(length):
        raise ValueError(f"`shape` in {path} must have the {len(length)} rows of `indptr` (got {rows})")
    source = torch.repeat_interleave(length)
    return torch.stack([source, target]), (rows, rows if columns is None else columns)
