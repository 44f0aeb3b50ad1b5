"""Triton's interpreter, less what it does over and over: three to six times as fast.

Every call of a device function looks through all of ``triton.language`` for what the launch has replaced
already, every tensor makes its shape and types anew, of operands that fit each other it is found out whether
they fit, every addition is done again in int64 to see whether it overflows, and what it knows no function of
NumPy for is reduced number by number. Results are the same to the bit, but for bfloat16: float32 is rounded
to it, as GPUs do, where the interpreter cuts bits off, and numbers are added and multiplied, not their bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def runs() -> bool:
    """Whether the interpreter runs with this NumPy: that of triton 3.6 counts with arrays of one number."""
    return triton.__version__[:3] != "3.6" or np.lib.NumpyVersion(np.__version__) < "2.4.0"


def prepare() -> None:
    """Changes Triton for the rest of the process; versions that nobody has tried are left as they are."""
    if not "3.6" <= triton.__version__[:3] <= "3.9":
        return
    _take_numbers_for_masks()
    _round_to_bfloat16()
    _compute_in_bfloat16()
    _replace_once_a_launch()
    _type_tuples_on_demand()
    _look_dtypes_up_once()
    _make_shapes_once()
    _let_operands_be_that_fit()
    _call_builtins_directly()
    _unwrap_what_is_wrapped()
    _make_constants_once()
    _trust_handles()
    _reduce_slices()
    interpreter.interpreter_builder.options = type(interpreter.interpreter_builder.options)(
        sanitize_overflow=False
    )


def _take_numbers_for_masks() -> None:
    # To the interpreter a condition has the type of what was compared, and one number made a block of becomes
    # a block of that type. Triton 3.9 refuses it as a mask.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def condition(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    def load_where(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, condition(mask), *rest)

    def store_where(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, condition(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = load_where, store_where


def _round_to_bfloat16() -> None:
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def rounded(self: Any, x: Any, kind: Any) -> Any:
        if x.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, x, kind)
        bits = np.ascontiguousarray(x.data).view(np.uint32)  # the upper half of them is a bfloat16
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # of two that are as near the even one
        nearest = np.where(np.isnan(x.data), bits >> 16 | 0x40, nearest)
        return interpreter.TensorHandle(nearest.astype(np.uint16), tl.bfloat16)

    builder.cast_impl = rounded


def _compute_in_bfloat16() -> None:
    # The interpreter would add and multiply the bit patterns.
    builder = interpreter.InterpreterBuilder
    compute = builder.binary_op

    def computed(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return compute(self, lhs, rhs, op)
        found = compute(self, *[self.cast_impl(x, tl.float32) for x in (lhs, rhs)], op)
        if found.data.dtype == bool:
            return interpreter.TensorHandle(found.data, tl.bfloat16)
        return self.cast_impl(found, tl.bfloat16)

    builder.binary_op = computed


def _replace_once_a_launch() -> None:
    replaced: set[int] = set()  # modules of the running launch, by their globals
    launch = interpreter.GridExecutor.__call__

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = call


def _type_tuples_on_demand() -> None:
    def make(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def read(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self.__dict__["_type"] = core._type_for_tuple_values(self.values)
        return self.__dict__["_type"]

    def write(self: Any, type: Any) -> None:
        self.__dict__["_type"] = type

    core.tuple.__init__ = make
    core.tuple.type = property(read, write)


def _look_dtypes_up_once() -> None:
    find, known = interpreter._get_np_dtype, {}

    def look_up(type: Any) -> Any:
        scalar = type.scalar
        if scalar.name not in known:
            known[scalar.name] = find(type)
        return known[scalar.name]

    interpreter._get_np_dtype = look_up


def _make_shapes_once() -> None:
    make, known = core.block_type.__init__, dict[Any, Any]()

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        parts = known.get((element_ty.name, sizes))
        if parts is None:
            make(self, element_ty, shape)
            known[element_ty.name, sizes] = (self.shape, self.numel, self.name)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = parts

    shapes: dict[Any, Any] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if isinstance(type, core.block_type) else ()
        if sizes not in shapes:
            shapes[sizes] = core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(n) for n in sizes])
        self.numel, self.shape = shapes[sizes]

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor


def _let_operands_be_that_fit() -> None:
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def fits(kind: Any, number: Any) -> bool:
        # whether the number of a program becomes one of this type, which is not widened for it
        if kind.is_floating():
            return type(number) in (int, float) and not kind.is_fp8()
        whole = type(number) is int and kind.is_int() and not kind.is_int1()
        return whole and kind.get_int_min_value() <= number <= kind.get_int_max_value()

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        kind = lhs.dtype if left else rhs.dtype if right else None
        if kind is not None and not div_or_mod and not kind.is_ptr():
            if left and right:
                if kind is rhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic_check and fits(kind, rhs if left else lhs):
                if left:
                    rhs = self.scalar_constant(rhs, kind)
                else:
                    lhs = self.scalar_constant(lhs, kind)
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    blocks: dict[Any, Any] = {}

    def block(like: Any, shape: Any) -> Any:
        kind = like.dtype
        if kind.is_ptr():  # there are more of them than names
            return core.block_type(kind, list(shape))
        if (kind.name, shape) not in blocks:
            blocks[kind.name, shape] = core.block_type(kind, list(shape))
        return blocks[kind.name, shape]

    def blown_up(x: Any, shape: Any) -> Any:
        data = x.handle.data
        return core.tensor(
            interpreter.TensorHandle(np.full(shape, data, dtype=data.dtype), x.dtype), block(x, shape)
        )

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            if left.shape.values == right.shape.values:
                return lhs, rhs
            sizes, others = lhs.handle.data.shape, rhs.handle.data.shape
            if len(sizes) == len(others):
                shape = np.broadcast_shapes(sizes, others)
                return [x if x.handle.data.shape == shape else blown_up(x, shape) for x in (lhs, rhs)]
        elif left.is_block():
            return lhs, blown_up(rhs, lhs.handle.data.shape)
        elif right.is_block():
            return blown_up(lhs, rhs.handle.data.shape), rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = checked
    TritonSemantic.broadcast_impl_value = broadcasted


def _call_builtins_directly() -> None:
    # With a dictionary less for each call, and not through what asks for the argument that is given here.
    meanings: dict[int, Any] = {}

    def patch(obj: Any, name: Any, member: Any, builder: Any, scope: Any) -> None:
        semantic = meanings.setdefault(id(builder), TritonSemantic(builder))
        function = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch


def _unwrap_what_is_wrapped() -> None:
    unwrap, plain = core._unwrap_if_constexpr, {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        if kind is core.constexpr:
            return x.value
        return x if kind in plain else unwrap(x)

    core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrapped


def _make_constants_once() -> None:
    make, known = TritonSemantic.scalar_constant, dict[Any, Any]()

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or dtype.is_ptr() or type(value) not in (bool, int, float):
            return make(self, value, dtype)
        key = type(value), repr(value), dtype.name  # there are two zeros, and NaN is not itself
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    TritonSemantic.scalar_constant = constant


def _trust_handles() -> None:
    # They have what their makers say, which would be looked at for each of them.
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _reduce_slices() -> None:
    # By a function that the interpreter does not know: of all results at a time what it does one by one.
    def reduce(self: Any, input: Any) -> Any:
        given, axis = self.unravel(input, self.axis)
        arrays = [x.handle.data for x in given]
        rest = arrays[0].shape[:axis] + arrays[0].shape[axis + 1 :]

        def tensors(parts: Any) -> Any:
            return [self.to_tensor(part, x.dtype) for part, x in zip(parts, given, strict=True)]

        found = tensors([array.take(0, axis) for array in arrays])
        for place in range(1, arrays[0].shape[axis]):
            combined = self.combine_fn.fn(*found, *tensors([array.take(place, axis) for array in arrays]))
            combined = combined if isinstance(combined, tuple) else (combined,)
            found = tensors([x.handle.data.reshape(rest) for x in combined])
        results = [x.handle.data.reshape(rest) for x in found]
        if self.keep_dims:
            ones = (1,) * arrays[0].ndim
            results = [x.reshape(ones) if self.axis is None else np.expand_dims(x, axis) for x in results]
        return tensors(results)

    interpreter.ReduceOps.generic_reduce = reduce
