"""Argument checks shared by the ops: argument, wanted, got, remedy, before anything is launched."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from graphfuse.formats import RowWindows
from graphfuse.kernels.device import HALF, kernel_problem

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def windows(value: object) -> None:
    """Raises unless ``value`` is a record."""
    if not isinstance(value, RowWindows):
        hint = "; window the batch as a whole, not its graphs" if isinstance(value, Sequence) else ""
        raise ValueError(f"`windows` must be RowWindows (got {type(value).__name__}){hint}")


def vector(name: str, value: Tensor, length: int, device: torch.device, any_dtype: bool = False) -> None:
    """Raises unless ``value`` is a strided float tensor ``[length]`` on ``device``."""
    strided(name, value, device, any_dtype)
    if value.shape != (length,):
        raise ValueError(f"`{name}` must have shape [{length}] (got {list(value.shape)})")


def matrix(
    name: str,
    value: Tensor,
    rows: int | None,
    device: torch.device | None,
    dim: int | None = None,
    any_rows: str = "num_rows",
) -> None:
    """Raises unless ``value`` is a strided float tensor ``[rows, dim]`` on ``device``; None: any.

    ``any_rows`` is what the message calls their number if any will do.
    """
    strided(name, value, device)
    shape = value.shape
    fits = len(shape) == 2 and (rows is None or shape[0] == rows)
    if not fits or (dim is not None and shape[1] != dim):
        wanted = f"[{any_rows if rows is None else rows}, {'dim' if dim is None else dim}]"
        raise ValueError(f"`{name}` must have shape {wanted} (got {list(value.shape)})")


def heads(
    name: str,
    value: Tensor,
    rows: int,
    device: torch.device,
    like: Tensor | None = None,
    like_name: str = "q",
) -> None:
    """Raises unless ``value`` is a strided float tensor ``[rows, heads, head_dim]`` on ``device``.

    With ``like``, heads, width and dtype must be those of ``like``, the argument called ``like_name``.
    """
    strided(name, value, device)
    shape = value.shape
    fits = len(shape) == 3 and shape[0] == rows and shape[1] > 0 and shape[2] > 0
    if not fits or (like is not None and shape[1:] != like.shape[1:]):
        wanted = "heads, head_dim" if like is None else f"{like.size(1)}, {like.size(2)}"
        raise ValueError(f"`{name}` must have shape [{rows}, {wanted}] (got {list(value.shape)})")
    if like is not None:
        same_dtype(name, value, like_name, like.dtype)


def present(name: str, value: object) -> None:
    """Raises if ``value`` is None, as Python does of an argument that is missing."""
    if value is None:
        raise TypeError(f"`{name}` must be a tensor (got None)")


def strided(name: str, value: Tensor, device: torch.device | None, any_dtype: bool = False) -> None:
    """Raises unless ``value`` is a strided float tensor on ``device``; None: on any."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        present(name, value)
        got = type(value).__name__ if not isinstance(value, Tensor) else str(value.layout)
        raise ValueError(f"`{name}` must be a strided tensor (got {got})")
    if device is not None and value.device != device:
        raise ValueError(
            f"`{name}` must be on {device} (got {value.device}); move it with .to({str(device)!r})"
        )
    if not any_dtype and value.dtype not in FLOATS:
        raise ValueError(f"`{name}` must be a float tensor (got {value.dtype})")


def terms_dtype(name: str, value: Tensor, other: str, dtype: torch.dtype) -> None:
    """:func:`same_dtype`, but that float32 may stand beside half precision."""
    if value.dtype == torch.float32 and dtype in HALF:
        return
    same_dtype(name, value, other, dtype)


def same_dtype(name: str, value: Tensor, other: str, dtype: torch.dtype) -> None:
    """Raises unless ``value`` has ``dtype``, that of the argument called ``other``."""
    if value.dtype != dtype:
        raise ValueError(
            f"`{name}` must have the dtype of `{other}`, {dtype} (got {value.dtype}); "
            f"convert it with .to({dtype})"
        )


def result_dtype(value: torch.dtype | None) -> None:
    """Raises unless the argument ``out_dtype`` is None or a dtype that sums may be rounded to."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise TypeError(f"`out_dtype` must be a torch.dtype or None (got {value!r})")
    if value not in FLOATS:
        raise ValueError(
            f"`out_dtype` must be float16, bfloat16, float32 or float64 (got {value}); convert the result "
            "instead"
        )


def dropout_seed(dropout: float, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """The seed of dropout, drawn if there is none; None without dropout. Raises if either does not fit."""
    if not isinstance(dropout, (float, int, numbers.Real)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"`dropout` must be in [0, 1) (got {dropout!r})")
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(1 << 62, (1,), device=device)
    if not isinstance(seed, Tensor):
        raise ValueError(f"`seed` must be int64[1] on {device} (got {type(seed).__name__})")
    fits = seed.shape == (1,) and seed.dtype == torch.int64 and seed.layout is torch.strided
    if not fits or seed.device != device:
        layout = "" if seed.layout is torch.strided else f"{seed.layout} "
        got = f"{layout}{seed.dtype}{list(seed.shape)} on {seed.device}"
        raise ValueError(f"`seed` must be int64[1] on {device} (got {got})")
    return seed


def activation(value: str | None) -> bool:
    """Whether ``value`` is ReLU; raises unless it is that or None."""
    if value not in (None, "relu"):
        raise ValueError(f"`activation` must be None or 'relu' (got {value!r})")
    return value == "relu"


def runs_kernel(x: Tensor, name: str = "x") -> bool:
    """Whether the op launches a kernel for ``x``, its argument ``name`` (else, on a CPU, the reference).

    Raises:
        ValueError: ``x`` is on a GPU and the kernels do not take it.
    """
    problem = kernel_problem(x.device, x.dtype)
    if problem is None:
        return True
    if x.device.type == "cpu":
        return False
    raise ValueError(f"`{name}` does not fit the kernels: {problem}; graphfuse.reference runs everywhere")
