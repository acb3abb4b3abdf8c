"""Columns of sums: the steps that accumulators are made of, as compiled loops over float64 columns.

Every value here is exact in float64: sums of products of float32s lie between 2**-298 and 2**300, far inside its
range, so that a power of two multiplies without error and no flag of the processor matters. The loops have
no branch and no call, so that they compile to vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ..fast._words import compiled, intrinsic, long_real, long_word

Array = Any

MODES = ("nearest_even", "nearest_away", "nearest_zero", "toward_zero", "up", "down", "to_odd")
"""Roundings by number, as the loops know them."""

_EXPONENT = 0x7FF0000000000000
_TWO_BIASES = 2046 << 52


def _instruction(name: str) -> Any:
    """A function of a float that is one instruction."""

    @intrinsic
    def one(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.call(builder.module.declare_intrinsic(name, [args[0].type]), args)

        return x(x), generate

    return one


trunc, floor, ceil, rint = (_instruction(f"llvm.{name}") for name in ("trunc", "floor", "ceil", "rint"))


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once (by a library where the processor has no such instruction)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return x(x, y, z), generate


def _cut_four(name: str) -> Any:
    """Four numbers cut to integers and added, as a float64; float32s below 2**29 are added as int32."""

    @intrinsic
    def cut(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            whole = builder.module.declare_intrinsic(name, [args[0].type])
            parts = [builder.call(whole, [x]) for x in args]
            narrow = args[0].type == ir.FloatType()
            if narrow:
                parts = [builder.fptosi(x, ir.IntType(32)) for x in parts]
            add = builder.add if narrow else builder.fadd
            total = add(add(parts[0], parts[1]), add(parts[2], parts[3]))
            return builder.sitofp(total, ir.DoubleType()) if narrow else total

        return types.float64(a, a, a, a), generate

    return cut


cut_toward_zero, cut_down, cut_nearest = (_cut_four(f"llvm.{name}") for name in ("trunc", "floor", "rint"))


@compiled
def power_of(x: float) -> float:
    """``2**floor(log2|x|)``; 0 for 0, infinity for infinity and NaN."""
    return long_real(long_word(x) & _EXPONENT)


@compiled
def inverse(power: float) -> float:
    """1 / power, of a power of two."""
    return long_real(_TWO_BIASES - long_word(power))


@compiled
def round_whole(x: Array, n: int, mode: int) -> None:
    """Round to integers in place, in the mode of that number; zeros keep the sign."""
    if mode == 0:
        for j in range(n):
            x[j] = rint(x[j])
    elif mode == 1:
        for j in range(n):
            t = trunc(x[j])
            d = x[j] - t
            x[j] = t + 1.0 if d >= 0.5 else (t - 1.0 if d <= -0.5 else t)
    elif mode == 2:
        for j in range(n):
            t = trunc(x[j])
            d = x[j] - t
            x[j] = t + 1.0 if d > 0.5 else (t - 1.0 if d < -0.5 else t)
    elif mode == 3:
        for j in range(n):
            x[j] = trunc(x[j])
    elif mode == 4:
        for j in range(n):
            x[j] = ceil(x[j])
    elif mode == 5:
        for j in range(n):
            x[j] = floor(x[j])
    else:
        for j in range(n):
            t = trunc(x[j])
            even = t * 0.5 == trunc(t * 0.5)
            away = t + 1.0 if x[j] > t else (t - 1.0 if x[j] < t else t)
            x[j] = away if even else t


@compiled
def round_columns(x: Array, unit: Array, n: int, target: tuple[float, ...], mode: int) -> None:
    """Round float64s in place to a format: ``target`` is what `target_of` makes of it. ``unit`` is a scratch.

    A number that was rounded to odd in 53 bits is rounded as the exact one would be.
    """
    last, least, limit, over, flush, plus = target
    for j in range(n):
        e = power_of(x[j])
        e = e if e > least else least
        e = e if e < 2.0**1000 else 2.0**1000  # infinity and NaN stay what they are
        unit[j] = e * last
    for j in range(n):
        x[j] = x[j] * inverse(unit[j])
    round_whole(x, n, mode)
    for j in range(n):
        y = x[j] * unit[j]
        size = abs(y)
        signed = over if y > 0.0 else -over
        y = signed if size > limit else y
        y = y * 0.0 if size < flush else y
        x[j] = y + plus


@compiled
def add_columns(acc: Array, x: Array, n: int) -> None:
    """acc += x in place, rounded to odd in 53 bits; infinities and NaN as in IEEE 754.

    The rounding error of a sum is a float64 itself (Knuth's two-sum): where it is not zero and the sum's last
    bit is 0, the number on the other side of the exact sum is the odd one.
    """
    for j in range(n):
        a = acc[j]
        b = x[j]
        s = a + b
        v = s - a
        error = (a - (s - v)) + (b - v)
        bits = long_word(s)
        step = 1 - 2 * (((bits ^ long_word(error)) >> 63) & 1)
        inexact = (error > 0.0) | (error < 0.0)  # false for NaN, the error of an infinite sum
        acc[j] = long_real(bits + (step if inexact & ((bits & 1) == 0) else 0))


def target_of(fmt: Any, overflow: str | None = None, flush: bool = False, positive: bool = False) -> tuple[float, ...]:
    """A format as `round_columns` takes it; ``positive``: no result is -0."""
    policy = overflow or ("inf" if fmt.inf else "saturate")
    over = {"inf": np.inf, "saturate": fmt.max, "nan": np.nan}[policy]
    least = 2.0**fmt.emin
    return 2.0**-fmt.mantissa, least, fmt.max, over, least if flush else 0.0, 0.0 if positive else -0.0
