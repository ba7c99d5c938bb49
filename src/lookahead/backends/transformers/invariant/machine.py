"""Numbers as the processor has them, for compiled loops: one rounding for each operation, on one element or sixteen.

LLVM may turn a loop into vector instructions only where no bit of the result changes, since nothing here allows it to
reorder sums or to fuse a product with a sum. So what an element of an array becomes does not depend on its place.
Fused products are asked for one by one, with `fma`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# By name, as neither has types.
ir: Any = import_module("llvmlite.ir")
types: Any = import_module("numba").types
_intrinsic: Any = import_module("numba.extending").intrinsic

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)


def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of float32 numbers, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 number whose bits are those of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


def _read(typing_context: Any, address: Any, kind: Any, index: Any) -> Any:
    """The number at `index` of a run of them in memory, as float32.

    Args:
        address: Where the run begins.
        kind: Any number of the type that says what they are: float32, int16 for bfloat16, uint16 for float16.
        index: Which one.
    """
    bits = {types.float32: _FLOAT, types.int16: ir.IntType(16), types.uint16: ir.IntType(16)}[kind]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        run = builder.inttoptr(arguments[0], bits.as_pointer())
        value = builder.load(builder.gep(run, [arguments[2]], inbounds=True))
        if kind == types.int16:
            return builder.bitcast(builder.shl(builder.zext(value, _INT), ir.Constant(_INT, 16)), _FLOAT)
        if kind == types.uint16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
        return value

    return types.float32(types.intp, kind, types.intp), generate


def _rounded(typing_context: Any, number: Any, kind: Any) -> Any:
    """A float32 number rounded to a type, to the nearest and of two to the even one; `kind` is as that of `read`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if kind == types.uint16:
            return builder.fpext(builder.fptrunc(value, ir.HalfType()), _FLOAT)
        if kind == types.int16:
            bits = builder.bitcast(value, _INT)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_INT, 16)), ir.Constant(_INT, 1))
            nearest = builder.add(builder.add(bits, odd), ir.Constant(_INT, 0x7FFF))
            return builder.bitcast(builder.and_(nearest, ir.Constant(_INT, -0x10000)), _FLOAT)
        return value

    return types.float32(types.float32, kind), generate


def _write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Make a float32 number the one at `index` of a run of them in memory that begins at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        run = builder.inttoptr(arguments[0], _FLOAT.as_pointer())
        builder.store(arguments[2], builder.gep(run, [arguments[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), generate


def _get(typing_context: Any, array: Any, index: Any) -> Any:
    """An element of a flat float32 array. The index is not looked at, as in C: it must be inside."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]], inbounds=True))

    return types.float32(array, types.intp), generate


def _put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Set an element of a flat float32 array; as `get`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


fma, as_float, rounded = map(_intrinsic, (_fma, _as_float, _rounded))
read, write, get, put = map(_intrinsic, (_read, _write, _get, _put))
