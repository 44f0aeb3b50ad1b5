"""Whether the kernels can run somewhere, in a sentence if they cannot. Imports no triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

HALF = (torch.float16, torch.bfloat16)
HIP = torch.version.hip is not None


# Triton's CPU interpreter; read once, as Triton reads it once, when a kernel is defined.
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _gpu_problem(index: int) -> str | None:
    if HIP:
        return None  # every GPU that ROCm builds of torch support
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, the kernels need 8.0 or newer"
    return None


@torch.compiler.assume_constant_result  # neither torch.compile nor the machine has more to say of it
def kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel runs for tensors of ``dtype`` on ``device``; ``None`` if one does."""
    return _kernel_problem(device, dtype)


@functools.cache
def _kernel_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"the kernels run on CUDA devices (got {device.type})"
    if device.type == "cpu" and not INTERPRETING:
        return "the tensors are on the CPU; the kernels run on a GPU (or, for tests, with TRITON_INTERPRET=1)"
    if not has_triton():
        return "triton is not installed; it comes with torch's CUDA wheel (pip install triton)"
    if dtype == torch.float64:
        if device.type == "cpu":
            return None
        return "float64 runs on PyG's path; the kernels take float16, bfloat16 and float32"
    if dtype not in (*HALF, torch.float32):
        return f"the kernels take float16, bfloat16 and float32 (got {str(dtype).removeprefix('torch.')})"
    if device.type == "cuda":
        return _gpu_problem(device.index or 0)
    return None
