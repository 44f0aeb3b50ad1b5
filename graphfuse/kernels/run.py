"""Launching a kernel, quickly once it is compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphfuse.kernels.barriers import of_one_warp
from graphfuse.kernels.device import HIP, INTERPRETING

_MAX_GROUPS = 65535  # programs along the second dimension of a grid
_CALLS_C = triton.__version__.startswith("3.6.")  # whether the arguments of a launcher's C function are known

# What Triton compiled, by all that it compiles for: a mini-batch's record is new, its kernels are not.
_COMPILED: dict[Any, tuple[Any, ...]] = {}
_TREATMENTS: dict[Any, tuple[int, ...]] = {}  # of the numbers that a kernel's function takes


class Launch:
    """A kernel with everything bound that does not change from call to call.

    Triton's own call binds and specialises every argument anew, which for twenty arguments costs more host
    time than the rest of a launch. Whoever keeps a Launch vouches that dtypes, strides and the presence of
    optional operands stay the same; alignment is told on every call, and where it is not that of all tensors
    a kernel is kept for each case: a half of stacked projections starts anywhere.

    From compute capability 9.0 on the next kernel's programs are made ready while the last of this one end
    (programmatic dependent launch), for which every kernel waits before it does anything else, see
    :func:`.tiles.after_previous`.

    Args:
        kernel: A ``triton.jit`` function; its parameters are the arguments of the call and then these.
        programs: Programs of a group; all of a group start before those of the next.
        warps: Warps of a program.
        structure: Tensors of the graph, after the first group of the call's arguments.
        rest: Integers and ``constexpr`` parameters, last.
        registers: Most that a thread may use; ``None`` lets the compiler choose, as AMD's always does.
        packed: Programs of one warp that share a block, see :mod:`.packing`. The kernel has the number as a
            ``constexpr``, by which caches tell it from others, and leaves out programs beyond ``programs``.
        groups: Of heads or of features, at most 65,535. They are the second dimension of the grid, as a
            program that divides its number takes 200 cycles for it before it can load anything.
    """

    __slots__ = ("_addresses", "_compiled", "_grid", "_kernel", "_options", "_packed", "_rest", "_structure")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        warps: int,
        structure: tuple[Tensor | None, ...],
        rest: tuple[Any, ...],
        registers: int | None = None,
        groups: int = 1,
        packed: int = 1,
    ) -> None:
        if groups > _MAX_GROUPS:
            name = kernel.fn.__name__
            raise ValueError(
                f"{name} takes at most {_MAX_GROUPS} groups of heads or features (got {groups}); split them"
            )
        self._kernel, self._grid, self._packed = kernel, (programs, groups), packed
        # A product and its sum are rounded once, whatever Triton does untold: 3.6 does so, 3.10 will not.
        self._options = {"num_warps": warps, "enable_fp_fusion": True}
        if registers is not None and not HIP:
            self._options["maxnreg"] = registers
        self._structure, self._rest = structure, rest
        self._addresses = addresses(structure)
        self._compiled: dict[Any, tuple[Any, ...]] = {}  # by which tensors start on 16 bytes; None: all

    def resized(self, programs: int | None, *sizes: int) -> Launch:
        """This launch for other sizes, which it is not compiled for: what is once compiled serves both.

        Args:
            programs: Programs of a group; ``None`` leaves as many.
            sizes: In place of the first of ``rest``, of which the kernel's integers are not specialised.
        """
        other = copy.copy(self)
        other._rest = (*sizes, *self._rest[len(sizes) :])
        if programs is not None:
            other._grid = (programs, self._grid[1])
        return other

    def options(self, index: int, *tensors: Tensor | None) -> dict[str, Any]:
        """What it is compiled with for device ``index`` and such tensors."""
        options = {**self._options, "launch_pdl": True} if _overlaps(index) else self._options
        # loaded one by one, numbers leave a thread one product of a sum: see `sum_of_products` of tiles.py
        return {**options, "enable_fp_fusion": False} if _one_by_one(tensors) else options

    def compile(
        self, outputs: tuple[Tensor | None, ...], operands: tuple[Tensor | None, ...], index: int
    ) -> Any:
        """What is launched with such arguments, as Triton compiles it or has it in its cache."""
        arguments = (*outputs, *self._structure, *operands, *self._rest)
        with of_one_warp(self._packed):
            options = self.options(index, *outputs, *operands)
            return self._kernel.warmup(*arguments, grid=self._grid, **options)

    def __call__(
        self,
        outputs: tuple[Tensor | None, ...],
        operands: tuple[Tensor | None, ...],
        aligned: bool,
        index: int,
    ) -> None:
        """Launches on the current stream of device ``index``.

        Args:
            outputs: First arguments of the kernel.
            operands: Arguments after the structure.
            aligned: Whether all tensors start on 16 bytes.
            index: The device, which is the current one.
        """
        places = None if aligned else _places(*outputs, *operands)
        found = self._compiled.get(places)
        if found is not None:
            _, packed, launch, stream_of, compiled = found
            programs, groups = self._grid
            # written out, as a call of `addresses` takes as long as a list of four
            launch(
                -(-programs // packed), groups, 1, stream_of(index), *compiled,
                *[None if tensor is None else tensor.data_ptr() for tensor in outputs], *self._addresses,
                *[None if tensor is None else tensor.data_ptr() for tensor in operands], *self._rest,
            )  # fmt: skip
            return
        if INTERPRETING:
            arguments = (*outputs, *self._structure, *operands, *self._rest)
            self._kernel[self._grid](*arguments, **self._options)
            return
        key = None
        # a graph that starts elsewhere, as a loaded one may, is compiled for by itself
        if _all_aligned(*self._structure):
            tensors = (*outputs, *self._structure, *operands)
            known = specialization(self._kernel, tensors, self._rest)
            key = (index, places, *self.options(index, *outputs, *operands).values(), *known)
            found = _COMPILED.get(key)
        if found is not None:
            self._compiled[places] = found
            self(outputs, operands, aligned, index)
            return
        kernel = self.compile(outputs, operands, index)
        # The kernel itself is there to stay alive: with it Triton 3.8 unloads its function. How many programs
        # a block has it must tell, as what cannot be packed is not.
        packed = kernel.metadata.num_warps // self._options["num_warps"]
        found = (kernel, packed, *_launcher_of(kernel))
        self._compiled[places] = found
        if key is not None:
            _COMPILED[key] = found
        self(outputs, operands, aligned, index)


def _launcher_of(kernel: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    # What launches a compiled kernel, what tells the stream, and the arguments between that and the kernel's
    # own: they end with what launch hooks would be told and two of these.
    stream_of = triton.runtime.driver.active.get_current_stream
    run, hooks = kernel.run, (kernel.packed_metadata, None, None, None)
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if not _CALLS_C or HIP or scratch != [0, 0]:
        return run, stream_of, (kernel.function, *hooks)
    # all that `run` does in Python, a quarter of a launch, is to allocate memory: this kernel has none
    return (
        run.launch,
        stream_of,
        (kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks),
    )


@functools.cache
def _overlaps(index: int) -> bool:
    # whether the device has what `after_previous` waits with
    return not HIP and torch.cuda.get_device_capability(index) >= (9, 0)


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Where tensors begin: given tensors, Triton asks the driver, which for twenty takes longer than this."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _places(*tensors: Tensor | None) -> tuple[bool, ...]:
    # which start on 16 bytes, all that Triton tells apart in an address
    return tuple([tensor is None or tensor.data_ptr() & 15 == 0 for tensor in tensors])


def _one_by_one(tensors: Iterable[Tensor | None]) -> bool:
    # whether one of float32, whose products are not exact, starts where no access of 16 bytes does
    return any(t is not None and t.dtype == torch.float32 and t.data_ptr() & 15 > 0 for t in tensors)


def specialization(kernel: Any, tensors: Iterable[Tensor | None], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The function of ``kernel`` and all that Triton tells apart in its arguments.

    Args:
        kernel: A ``triton.jit`` function.
        tensors: Its first arguments, but for where they start.
        rest: Its other arguments.
    """
    function = kernel.fn  # the hash of a kernel is a function of Triton's
    treatments = _TREATMENTS.get(function)
    if treatments is None:
        treatments = _TREATMENTS[function] = tuple(map(_treatment, kernel.params))[-len(rest) :]
    return (
        function,
        *[None if tensor is None else tensor.dtype for tensor in tensors],
        *map(type, rest),  # 1, 1.0 and True are equal
        *[
            one if treatment == 2 and type(one) is not float else _kind(one, treatment)
            for one, treatment in zip(rest, treatments, strict=True)
        ],
    )


def _treatment(param: Any) -> int:
    # 2: a constexpr, 1: integers are not specialised, 0: they are
    return 2 if param.is_constexpr else int(param.do_not_specialize)


def _kind(argument: Any, treatment: int) -> Any:
    # of a float, or of what is no constexpr
    if type(argument) is not int:
        return repr(argument) if type(argument) is float else argument  # 0.0 and -0.0 are equal
    fits = -(2**31) <= argument < 2**31
    return fits if treatment == 1 else (fits, argument == 1, argument % 16 == 0)


def aligned(*tensors: Tensor | None) -> bool:
    """Whether those that are there start on 16 bytes."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses & 15 == 0


_all_aligned = aligned  # where an argument has that name


def current_device() -> int:
    """Index of the current GPU: ``torch.cuda.current_device()`` without its look whether CUDA is up."""
    return torch._C._cuda_getDevice()


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What sums over ``dtype`` are kept in: float32, or float64 for float64 (interpreter only)."""
    return tl.float64 if dtype == torch.float64 else tl.float32
