"""A 64-bit hash of an edge list that depends on the order of its edges, equal on CPU and CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.formats import quick

_CHUNK = 1 << 24  # edges hashed at a time: bounds the temporaries to a few hundred MiB
# odd 64-bit constants (splitmix64 and xxhash64), as int64
SOURCE = -7046029254386353131
POSITION = -4658895280553007687
MIX_1 = -4417276706812531889
MIX_2 = -7723592293110705685


def fingerprint(edge_index: Tensor) -> int:
    """Hash of ``edge_index`` ``[2, num_edges]``; int32 and int64 indices of one graph agree.

    Integer arithmetic modulo 2^64, so the device does not matter. One synchronisation.
    """
    if quick.runs_on(edge_index.device) and edge_index.size(1) > 0:
        return quick.fingerprint(edge_index)
    total = torch.zeros((), dtype=torch.int64, device=edge_index.device)
    for start in range(0, edge_index.size(1), _CHUNK):
        chunk = edge_index[:, start : start + _CHUNK].to(torch.int64)
        h = torch.arange(start + 1, start + 1 + chunk.size(1), device=chunk.device).mul_(POSITION)
        h.add_(chunk[0] * SOURCE).add_(chunk[1]).mul_(MIX_1)
        h.bitwise_xor_(h >> 29).mul_(MIX_2)
        h.bitwise_xor_(h >> 32)
        total += h.sum()
    return int(total)
