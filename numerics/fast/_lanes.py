"""Sixteen numbers at a time: vectors as values in compiled loops.

Loops over short blocks are too short for the compiler to turn into vector instructions by itself. ``Ints``,
``Floats`` and ``Mask`` are vectors of 16 int32, float32 and booleans; the compiler cuts them to what the processor
has. Operators work lane by lane: ``+ - * / & | ^``, ``>``, ``<`` and ``==``, which give masks.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic as _intrinsic
from numba.extending import lower_builtin, models, register_model
from numba.np.arrayobj import make_array

LANES = 16
_KINDS = {"Ints": ir.IntType(32), "Floats": ir.FloatType(), "Mask": ir.IntType(1)}

intrinsic: Any = _intrinsic  # numba does not say what a decorated function is called with


class _Lanes(types.Type):
    """The type of a vector."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"halfulp.{name}")
        self.kind = name


class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(_KINDS[kind.kind], LANES))


register_model(_Lanes)(_Model)
Ints, Floats, Mask = _Lanes("Ints"), _Lanes("Floats"), _Lanes("Mask")
_INTS, _FLOATS = (ir.VectorType(_KINDS[name], LANES) for name in ("Ints", "Floats"))


def _operator(function: Any, cases: dict[Any, tuple[Any, str, tuple[str, ...]]]) -> None:
    """Gives an operator its meaning for vectors: result and instruction by the operands' type."""

    class Template(ConcreteTemplate):
        key = function
        cases: Any = ()

    Template.cases = [signature(result, of, of) for of, (result, _, _) in cases.items()]
    infer_global(function)(Template)
    for of, (_, name, more) in cases.items():

        def lower(context: Any, builder: Any, sig: Any, args: Any, name: str = name, more: Any = more) -> Any:
            return getattr(builder, name)(*more, *args)

        lower_builtin(function, of, of)(lower)


_operator(operator.add, {Ints: (Ints, "add", ()), Floats: (Floats, "fadd", ())})
_operator(operator.sub, {Ints: (Ints, "sub", ()), Floats: (Floats, "fsub", ())})
_operator(operator.mul, {Floats: (Floats, "fmul", ())})
_operator(operator.truediv, {Floats: (Floats, "fdiv", ())})
_operator(operator.and_, {Ints: (Ints, "and_", ()), Mask: (Mask, "and_", ())})
_operator(operator.or_, {Ints: (Ints, "or_", ()), Mask: (Mask, "or_", ())})
_operator(operator.xor, {Ints: (Ints, "xor", ())})
_operator(operator.gt, {Ints: (Mask, "icmp_signed", (">",)), Floats: (Mask, "fcmp_ordered", (">",))})
_operator(operator.lt, {Ints: (Mask, "icmp_signed", ("<",)), Floats: (Mask, "fcmp_ordered", ("<",))})
_operator(operator.ge, {Floats: (Mask, "fcmp_ordered", (">=",))})
_operator(operator.eq, {Ints: (Mask, "icmp_signed", ("==",))})


def _fill(builder: Any, kind: Any, x: Any) -> Any:
    vector = ir.VectorType(kind, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


@intrinsic
def ints(typing: Any, x: Any) -> Any:
    """An int32 in all lanes."""
    return Ints(types.int32), lambda context, builder, sig, args: _fill(builder, _KINDS["Ints"], args[0])


@intrinsic
def floats(typing: Any, x: Any) -> Any:
    """A float32 in all lanes."""
    return Floats(types.float32), lambda context, builder, sig, args: _fill(builder, _KINDS["Floats"], args[0])


def _bits(to: Any, of: Any, kind: Any) -> Any:
    @intrinsic
    def bits(typing: Any, x: Any) -> Any:
        return to(of), lambda context, builder, sig, args: builder.bitcast(args[0], kind)

    return bits


words, reals = _bits(Ints, Floats, _INTS), _bits(Floats, Ints, _FLOATS)


@intrinsic
def choose(typing: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is set, else b."""
    return a(Mask, a, a), lambda context, builder, sig, args: builder.select(*args)


def _shift(name: str) -> Any:
    @intrinsic
    def shift(typing: Any, x: Any, by: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, name)(args[0], _fill(builder, _KINDS["Ints"], args[1]))

        return Ints(Ints, types.int32), generate

    return shift


# every lane by the same number, 0 to 31
shift_left, shift_right = _shift("shl"), _shift("lshr")


@intrinsic
def whole(typing: Any, x: Any) -> Any:
    """Floats that are whole numbers as ints."""
    return Ints(Floats), lambda context, builder, sig, args: builder.fptosi(args[0], _INTS)


def _call(name: str, result: Any, of: Any, returns: Any, operands: int) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(returns, [a.type for a in args])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    if operands == 1:

        @intrinsic
        def one(typing: Any, x: Any) -> Any:
            return result(of), generate

        return one

    @intrinsic
    def two(typing: Any, x: Any, y: Any) -> Any:
        return result(of, of), generate

    return two


most = _call("llvm.smax.v16i32", Ints, Ints, _INTS, 2)
least = _call("llvm.smin.v16i32", Ints, Ints, _INTS, 2)
highest = _call("llvm.vector.reduce.smax.v16i32", types.int32, Ints, ir.IntType(32), 1)
lowest = _call("llvm.vector.reduce.smin.v16i32", types.int32, Ints, ir.IntType(32), 1)


@intrinsic
def any_of(typing: Any, mask: Any) -> Any:
    """Whether a lane of the mask is set."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], ir.IntType(16)), ir.Constant(ir.IntType(16), 0))

    return types.boolean(Mask), generate


@intrinsic
def flags(typing: Any, mask: Any) -> Any:
    """The mask as 16 bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(16))

    return types.uint16(Mask), generate


def _pointer(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    data = make_array(array)(context, builder, value).data
    return builder.gep(data, [index])


@intrinsic
def load(typing: Any, array: Any, i: Any) -> Any:
    """Elements i to i + 15 of an int32 or float32 array, or of an array of shorter unsigned integers as ints."""
    kind, vector = (Floats, _FLOATS) if array.dtype == types.float32 else (Ints, _INTS)
    bits = array.dtype.bitwidth
    stored = vector if bits == 32 else ir.VectorType(ir.IntType(bits), LANES)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.bitcast(_pointer(context, builder, array, args[0], args[1]), stored.as_pointer())
        value = builder.load(at, align=bits // 8)
        return value if bits == 32 else builder.zext(value, vector)

    return kind(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, i: Any, x: Any) -> Any:
    """Elements i to i + 15 of an array of 4, 2 or 1 bytes = the lanes, cut to that."""
    bits = array.dtype.bitwidth

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[2]
        if bits < 32:
            value = builder.trunc(value, ir.VectorType(ir.IntType(bits), LANES))
        at = builder.bitcast(_pointer(context, builder, array, args[0], args[1]), value.type.as_pointer())
        builder.store(value, at, align=bits // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, x), generate


def _interleave(first: int) -> Any:
    """A function of two vectors: their lanes by turns, eight of each from lane ``first`` on."""
    turns = [lane for i in range(first, first + LANES // 2) for lane in (i, LANES + i)]

    @intrinsic
    def interleave(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), LANES), turns))

        return a(a, a), generate

    return interleave


lows, highs = _interleave(0), _interleave(LANES // 2)


@intrinsic
def load_row(typing: Any, array: Any, i: Any, j: Any) -> Any:
    """Elements [i, j] to [i, j + 15] of an int32 array whose last axis is without gaps."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _row(context, builder, array, *args)
        return builder.load(builder.bitcast(at, _INTS.as_pointer()), align=4)

    return Ints(array, types.intp, types.intp), generate


@intrinsic
def store_row(typing: Any, array: Any, i: Any, j: Any, x: Any) -> Any:
    """Elements [i, j] to [i, j + 15] of an int32 array whose last axis is without gaps = the lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _row(context, builder, array, *args[:3])
        builder.store(args[3], builder.bitcast(at, _INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, x), generate


def _row(context: Any, builder: Any, array: Any, value: Any, i: Any, j: Any) -> Any:
    found = make_array(array)(context, builder, value)
    start = builder.mul(i, builder.extract_value(found.strides, 0))
    base = builder.bitcast(found.data, ir.IntType(8).as_pointer())
    row = builder.bitcast(builder.gep(base, [start]), found.data.type)
    return builder.gep(row, [j])
