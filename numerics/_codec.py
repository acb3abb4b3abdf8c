"""Scalar formats: codes from numbers and back."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import _oracle
from ._backend import Array, Backend
from ._format import Fixed, Float, Log, Scalar, Table
from ._parts import FAR, Parts, infinity, less, select, split
from ._policy import Ends, Policy
from ._random import Draws
from ._rounding import ROUNDINGS
from ._table import log_values

NEAREST_EVEN = Policy()
SATURATE = Policy(overflow="saturate")

Rounding = str | Draws  # a mode by name, or stochastic rounding with the elements' random numbers drawn


def encode_parts(xp: Backend, a: Parts, fmt: Scalar, policy: Policy, rounding: Rounding | None = None) -> Array:
    """Codes, as integers of the parts' width, of numbers taken apart. ``rounding`` stands in for the policy's."""
    if isinstance(fmt, Table):
        raise TypeError(f"{fmt} is searched, not rounded: see encode_table")
    encode = _encode_fixed if isinstance(fmt, Fixed) else _encode_float
    return encode(xp, a, fmt, policy.ends(fmt), policy.rounding if rounding is None else rounding)  # type: ignore[arg-type]


def significand(xp: Backend, a: Parts, drop: Array | int, rounding: Rounding, even: Array | None = None) -> Array:
    """The significand without its last ``drop`` bits, rounded. 0 <= drop, and drop <= top + 2 unless drawn.
    Where it counts as even though its last bit is set, the mask ``even`` says so."""
    if isinstance(rounding, Draws):
        kept = a.significand >> (min(drop, a.wide - 1) if isinstance(drop, int) else xp.clip(drop, 0, a.wide - 1))
        return kept - rounding.up(xp, kept, a.significand, drop, a.wide)
    odd = a.significand >> drop
    odd &= 1
    if even is not None:
        odd &= ~even
    total = a.significand + ROUNDINGS[rounding]((1 << drop) - 1, odd, a.negative)
    total >>= drop
    return total


def _spare(rounding: Rounding) -> int:
    """So many bits under the significand's last one a rounding looks at: 2 tell half a unit from less."""
    return rounding.bits + 2 if isinstance(rounding, Draws) else 2


def whole(xp: Backend, a: Parts, quantum: int, rounding: Rounding) -> Array:
    """``|a|`` in units of ``2**quantum``, rounded to an integer; from ``2**top`` on not the right one."""
    return significand(xp, a, xp.clip(quantum + a.top - a.exponent, 0, a.top + _spare(rounding)), rounding)


def _encode_float(xp: Backend, a: Parts, fmt: Float, ends: Ends, rounding: Rounding) -> Array:
    m, wide = fmt.mantissa, a.wide
    base = xp.clip(a.exponent, fmt.emin, fmt.emax + 1)
    drop = xp.clip(base - a.exponent, 0, m + _spare(rounding))
    drop += a.top - m
    # a carry out of the significand runs into the exponent field, which is what it should do
    # the code goes up with the exponent by one, and is even or odd with it, where there is no mantissa
    even = -((base - fmt.emin + fmt.zero + 1) & 1) if fmt.even == "code" and m == 0 else None
    code = significand(xp, a, drop, rounding, even)
    base -= fmt.emin
    base <<= m
    code += base
    if not fmt.subnormal:
        below = less(a.exponent, fmt.emin, wide)
        tiny = whole(xp, a, fmt.emin, rounding) << m if fmt.zero else 0
        code = select(below, tiny, code if fmt.zero else code - (1 << m))
    if fmt.exponent + m > 30 and wide == 32:  # what lies above the largest code wraps around
        code = select(code >> 31, 2**31 - 1, code)
    over, over_negative = ends.over
    if over != over_negative:
        signed_over = select(a.negative, over_negative, over + 0 * code)
        code = select(less(fmt.max_code, code, wide), signed_over, code)
    elif over in (fmt.max_code, fmt.max_code + 1):
        code = xp.clip(code, 0, over)
    else:
        code = select(less(fmt.max_code, code, wide), over, code)
    if ends.over != (ends.infinite, ends.infinite):
        code = select(less(FAR // 2, a.exponent, wide), ends.infinite, code)
    if not fmt.signed:
        under = a.negative & less(0, code if fmt.zero else a.significand, wide)
        code = select(under, ends.under, code)
    else:
        negative = a.negative if ends.negative_zero else a.negative & less(0, code, wide)
        code |= negative & _signed_bit(fmt, wide)
    return _set_nan(a, code, ends, fmt)


def _signed_bit(fmt: Scalar, wide: int) -> int:
    """The code's sign bit as a signed integer."""
    sign = 1 << (fmt.bits - 1)
    return sign - (1 << 32) if fmt.bits == wide == 32 else sign


def _set_nan(a: Parts, code: Array, ends: Ends, fmt: Scalar) -> Array:
    low, high = (n - (1 << 32) if n >> 31 and a.wide == 32 else n for n in ends.nan)
    return select(a.nan, low if low == high else select(a.negative, high, low + 0 * code), code)


def _encode_fixed(xp: Backend, a: Parts, fmt: Fixed, ends: Ends, rounding: Rounding) -> Array:
    magnitude = whole(xp, a, -fmt.fraction, rounding)
    if ends.wrap:
        # beyond 2**top the integer is the significand moved up, of which the low bits are kept
        up = xp.clip(a.exponent - a.top + fmt.fraction, 0, 31)
        far = less(FAR // 2, a.exponent, a.wide)
        magnitude = select(less(0, up, a.wide), (a.significand << up) & ~far, magnitude)
    if fmt.sign_magnitude:
        magnitude = xp.clip(magnitude, 0, fmt.high)
        negative = a.negative if ends.negative_zero else a.negative & less(0, magnitude, a.wide)
        return _set_nan(a, magnitude | negative & (1 << (fmt.bits - 1)), ends, fmt)
    value = (magnitude ^ a.negative) - a.negative
    if not ends.wrap:
        value = xp.clip(value, fmt.low, fmt.high)
    return _set_nan(a, (value + fmt.offset) & ((1 << fmt.bits) - 1), ends, fmt)


def code_bits(fmt: Scalar) -> int:
    """Width of the unsigned integer that holds a code: 8, 16 or 32."""
    return 8 if fmt.bits <= 8 else 16 if fmt.bits <= 16 else 32


def narrow_codes(xp: Backend, code: Array, fmt: Scalar) -> Array:
    """Codes as the smallest unsigned integer type."""
    width = code_bits(fmt)
    if width == 32:
        low = xp.astype(code & 0xFFFFFFFF if xp.width(code) == 64 else code, xp.ints[32])
        return xp.view(low, xp.codes[32])
    return xp.astype(code, xp.codes[width])


def wide_codes(xp: Backend, code: Array) -> Array:
    """Codes as int32 again."""
    if xp.width(code) == 32:
        return xp.view(code, xp.ints[32])
    return xp.astype(code, xp.ints[32])


@lru_cache(maxsize=64)
def decode_table(fmt: Scalar, wide: int) -> np.ndarray:
    """The value of every code of a format of at most 16 bits as float32 or float64, from the oracle."""
    if isinstance(fmt, Log):
        return log_values(fmt, wide)
    values = np.array([float(_oracle.decode(fmt, code)) for code in range(2**fmt.bits)])
    with np.errstate(over="ignore"):
        return values.astype({32: np.float32, 64: np.float64}[wide])


def decode_scalar(xp: Backend, code: Array, fmt: Scalar, wide: int) -> Array:
    """Codes to float32 or float64 (``wide``); exact, or rounded once where float32 is too narrow."""
    if xp.traces and wide == 32:
        from .fast import decoded  # which reads this file in its turn

        if (values := decoded(xp, wide_codes(xp, code), fmt)) is not None:
            return values
    if fmt.bits <= 16:
        return xp.take(xp.constant(decode_table(fmt, wide), xp.floats[wide], code), code)
    return _decode_wide_float(xp, wide_codes(xp, code), fmt, wide)  # type: ignore[arg-type]  # only Float is wider


def _decode_wide_float(xp: Backend, code: Array, fmt: Float, wide: int) -> Array:
    """Formats of 17 to 32 bits: rebuild the float's own bits."""
    m, half = fmt.mantissa, fmt.exponent + fmt.mantissa
    magnitude = code & ((1 << half) - 1)
    field = magnitude >> m
    normal = less(0, field, 32) if fmt.zero else code | -1
    integer = magnitude & ((1 << m) - 1) | normal & (1 << m)
    a = split(xp, xp.astype(integer if fmt.subnormal else integer & normal, xp.floats[32 if m < 24 else 64]))
    negative = -((code >> half) & 1) if fmt.signed else code & 0
    exponent = field + (1 + normal) - fmt.bias - m
    nan = code & 0
    if fmt.nan == "negative_zero":
        nan = negative & ~less(0, magnitude, 32)
    elif fmt.nan_code is not None:
        nan = less((fmt.inf_code if fmt.nan == "ieee" else fmt.nan_code - 1), magnitude, 32)
    if fmt.inf_code is not None:
        exponent = exponent + (less(fmt.inf_code - 1, magnitude, 32) & FAR)
    exponent, negative, nan = (xp.astype(v, xp.ints[a.wide]) for v in (exponent, negative, nan))
    return join(xp, a._replace(exponent=a.exponent + exponent, negative=negative, nan=nan), wide)


_FLOAT32 = Float(8, 23)
_FLOAT32_ENDS = NEAREST_EVEN.ends(_FLOAT32)


def join(xp: Backend, a: Parts, wide: int) -> Array:
    """Parts to float32 or float64, rounded once (nearest even)."""
    if wide == 32:
        code = _encode_float(xp, a, _FLOAT32, _FLOAT32_ENDS, "nearest_even")
        return xp.view(xp.astype(code, xp.ints[32]), xp.floats[32])
    # the significand of a format of 32 bits, or of a float32 product, fits a float64 with room to spare
    value = xp.astype(a.significand, xp.floats[64])
    half = (a.exponent - a.top) >> 1
    with np.errstate(over="ignore"):
        for power in (half, a.exponent - a.top - half):  # in two steps: one alone could overflow
            value = value * _power_of_two(xp, xp.astype(xp.clip(power, -1022, 1023), xp.ints[64]))
    negative, nan = xp.astype(a.negative, xp.ints[64]), xp.astype(a.nan, xp.ints[64])
    bits = xp.view(value, xp.ints[64]) | negative & -(1 << 63)
    return xp.view(select(nan, infinity(64) | 1 << 51, bits), xp.floats[64])


def _power_of_two(xp: Backend, exponent: Array) -> Array:
    return xp.view((exponent + 1023) << 52, xp.floats[64])
