"""Rounding to nearest and decoding as arithmetic without tables, for jax, which compiles what it
traces.

A gather keeps XLA from vector instructions; these are sums, shifts and choices, the same as the loops of
`_round` with the same parameters. Multiplications are by powers of two and exact, or of numbers so small that
they become zero in any case, so that flushing subnormals changes nothing.
"""

from __future__ import annotations

from typing import Any

from .._backend import Array, Backend
from .._format import Fixed, Float
from .._policy import Policy
from ._plan import known, plan

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_SIGN = -(1 << 31)


def nearest_even(xp: Backend, x: Array, fmt: Any, policy: Policy) -> Array | None:
    """float32 numbers as numbers of a scalar format, or None where this text cannot."""
    found = plan(fmt, policy) if policy.rounding == "nearest_even" else None
    if found is None or found.mantissa < 1 or xp.width(x) != 32:
        return None
    p = [int(v) for v in found.values]
    emin, limit, drop, low = p[0], p[1], 23 - p[2], p[4]
    most, over, infinite, nan, least, sign, zero = p[8:10], p[10:12], p[12:14], p[14:16], p[16], p[17], p[20]
    if not found.level and low < 2 << 23:
        return None
    bits = xp.view(x, xp.ints[32])
    magnitude = bits & 0x7FFFFFFF
    negative = bits < 0
    a = xp.minimum(magnitude, xp.constant(limit, xp.ints[32], x))
    k = (a + (((1 << drop) >> 1) - (drop > 0) + ((a >> drop) & (drop > 0)))) & -(1 << drop)
    if not found.level:
        spread = 23 - p[5]
        steps, quantum = 2.0 ** (spread + 127 - (emin >> 23)), 2.0 ** ((emin >> 23) - 127 - spread)
        whole = xp.lax.round(xp.view(a, xp.floats[32]) * steps, xp.lax.RoundingMethod.TO_NEAREST_EVEN)
        small = xp.view(whole * quantum, xp.ints[32])
        k = xp.where(a < emin, small, k)
    k = xp.maximum(k, xp.constant(least, xp.ints[32], x))

    def either(pair: list[int]) -> Any:
        return pair[0] if pair[0] == pair[1] else xp.where(negative, pair[1], pair[0])

    out = k | (bits & sign)
    if not zero:
        out = xp.where(k == 0, 0, out)
    out = xp.where(k > either(most), either(over), out)
    if infinite != over:
        out = xp.where(magnitude == _INFINITY, either(infinite), out)
    out = xp.where(magnitude > _INFINITY, either(nan), out)
    return xp.view(out, xp.floats[32])


def decoded(xp: Backend, code: Array, fmt: Any) -> Array | None:
    """float32 numbers of codes (int32) of a scalar format, or None where this text cannot."""
    kind = known(fmt)
    if kind is Fixed and fmt.fraction <= 126:
        return _integers(xp, code, fmt)
    if kind is Float and fmt.emin - fmt.mantissa >= -126 and fmt.emax <= 127 and fmt.mantissa <= 23:
        return _floats(xp, code, fmt)
    return None


def _integers(xp: Backend, code: Array, fmt: Fixed) -> Array:
    half = 1 << (fmt.bits - 1)
    step = 2.0**-fmt.fraction
    if fmt.sign_magnitude:
        value = xp.view(xp.astype(code & (half - 1), xp.floats[32]) * step, xp.ints[32])
        return xp.view(value | ((code >> (fmt.bits - 1)) << 31), xp.floats[32])
    integer = (code ^ half) - half if fmt.signed else code - fmt.offset
    return xp.astype(integer, xp.floats[32]) * step


def _floats(xp: Backend, code: Array, fmt: Float) -> Array:
    m, half = fmt.mantissa, fmt.exponent + fmt.mantissa
    magnitude = code & ((1 << half) - 1)
    value = (magnitude << (23 - m)) + ((127 - fmt.bias) << 23)
    if fmt.zero:
        small = xp.view(xp.astype(magnitude, xp.floats[32]) * 2.0 ** (fmt.emin - m), xp.ints[32])
        value = xp.where(magnitude < (1 << m), small if fmt.subnormal else 0, value)
    if fmt.inf_code is not None:
        value = xp.where(magnitude == fmt.inf_code, _INFINITY, value)
    if fmt.signed:
        sign = (code << (31 - half)) & _SIGN
        value = value | (sign if fmt.negative_zero else xp.where(magnitude == 0, 0, sign))
    if fmt.nan == "negative_zero":
        value = xp.where(code == fmt.nan_code, _NAN, value)
    elif fmt.nan_code is not None:
        first = fmt.inf_code if fmt.nan == "ieee" else fmt.nan_code - 1
        value = xp.where(magnitude > first, _NAN, value)
    return xp.view(value, xp.floats[32])
