"""Scalar formats: codes from numbers and back."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from . import _oracle
from ._backend import Array, Backend
from ._format import Codebook, Fixed, Float, Scalar
from ._parts import FAR, Parts, infinity, less, magnitude_bits, ordered, select, split
from ._rounding import rounding as rounding_rule

OVERFLOWS = ("saturate", "inf", "nan")
NANS = ("zero", "max")


def overflow_policy(fmt: Scalar, overflow: str | None) -> str:
    """The policy in force: by default "inf" where the format has infinities, else "saturate"."""
    has = {
        "saturate": True,
        "inf": isinstance(fmt, Float) and fmt.inf_code is not None,
        "nan": isinstance(fmt, Float) and fmt.nan_code is not None,
    }
    if overflow is None:
        return "inf" if has["inf"] else "saturate"
    if not has.get(overflow, False):
        choices = ", ".join(repr(key) for key in OVERFLOWS if has[key])
        raise ValueError(f"overflow={overflow!r} is not possible for {fmt}: choose {choices}")
    return overflow


def encode_parts(xp: Backend, a: Parts, fmt: Scalar, rounding: str, overflow: str | None, nan: str = "zero") -> Array:
    """Codes, as integers of the parts' width, of numbers taken apart."""
    if nan not in NANS:
        raise ValueError(f"nan={nan!r}: choose one of {', '.join(NANS)} (for formats that have no NaN)")
    policy = overflow_policy(fmt, overflow)
    if isinstance(fmt, Codebook):
        raise TypeError("a codebook is searched, not rounded: see encode_codebook")
    encode = _encode_fixed if isinstance(fmt, Fixed) else _encode_float
    return encode(xp, a, fmt, rounding, policy, nan)  # type: ignore[arg-type]


def significand(xp: Backend, a: Parts, drop: Array | int, rounding: str) -> Array:
    """The significand without its last ``drop`` bits, rounded. 0 <= drop <= top + 2."""
    odd = a.significand >> drop
    odd &= 1
    total = a.significand + rounding_rule(rounding)((1 << drop) - 1, odd, a.negative)
    total >>= drop
    return total


def whole(xp: Backend, a: Parts, quantum: int, rounding: str) -> Array:
    """``|a|`` in units of ``2**quantum``, rounded to an integer; from ``2**top`` on not the right one."""
    # beyond top + 2 dropped bits nothing changes: the whole significand is below half a unit
    return significand(xp, a, xp.clip(quantum + a.top - a.exponent, 0, a.top + 2), rounding)


def _encode_float(xp: Backend, a: Parts, fmt: Float, rounding: str, overflow: str, nan: str) -> Array:
    m, wide = fmt.mantissa, a.wide
    base = xp.clip(a.exponent, fmt.emin, fmt.emax + 1)
    drop = xp.clip(base - a.exponent, 0, m + 2)
    drop += a.top - m
    # a carry out of the significand runs into the exponent field, which is what it should do
    code = significand(xp, a, drop, rounding)
    base -= fmt.emin
    base <<= m
    code += base
    if not fmt.subnormal:
        below = less(a.exponent, fmt.emin, wide)
        tiny = whole(xp, a, fmt.emin, rounding) << m if fmt.zero else 0
        code = select(below, tiny, code if fmt.zero else code - (1 << m))
    if fmt.exponent + m > 30 and wide == 32:  # what lies above the largest code wraps around
        code = select(code >> 31, 2**31 - 1, code)
    limit = {"saturate": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}[overflow]
    if limit in (fmt.max_code, fmt.max_code + 1):
        code = xp.clip(code, 0, limit)
    else:
        code = select(less(fmt.max_code, code, wide), limit, code)
    if not fmt.signed:
        lowest = fmt.nan_code if overflow == "nan" else 0
        under = a.negative & less(0, code if fmt.zero else a.significand, wide)
        code = select(under, lowest, code)
    special = fmt.nan_code if fmt.nan_code is not None else {"zero": 0, "max": fmt.max_code}[nan]
    code = select(a.nan, special, code)
    if not fmt.signed:
        return code
    sign = 1 << (fmt.bits - 1)
    sign = sign - (1 << 32) if fmt.bits == wide == 32 else sign  # the same bit in a signed integer
    negative = a.negative
    if not fmt.negative_zero:
        negative = negative & less(0, code, wide)
    if fmt.nan not in ("ieee", "top"):
        negative = negative & ~a.nan
    code |= negative & sign
    return code


def _encode_fixed(xp: Backend, a: Parts, fmt: Fixed, rounding: str, overflow: str, nan: str) -> Array:
    magnitude = whole(xp, a, -fmt.fraction, rounding)
    value = xp.clip((magnitude ^ a.negative) - a.negative, fmt.low, fmt.high)
    return select(a.nan, {"zero": 0, "max": fmt.high}[nan], value) & ((1 << fmt.bits) - 1)


@cache
def _thresholds(fmt: Codebook, wide: int) -> np.ndarray:
    """For each neighbouring pair the largest float at which the lower value still is chosen."""
    real: Any = {32: np.float32, 64: np.float64}[wide]
    cuts = []
    for i, (low, high) in enumerate(pairwise(fmt.values)):
        middle = (Fraction(low) + Fraction(high)) / 2
        cut = real(float(middle))
        while Fraction(float(cut)) > middle:
            cut = np.nextafter(cut, real(-np.inf))
        # a tie goes to the even code
        cuts.append(np.nextafter(cut, real(-np.inf)) if Fraction(float(cut)) == middle and i % 2 else cut)
    return np.array(cuts, dtype=real)


def encode_codebook(xp: Backend, x: Array, fmt: Codebook, nan: str = "zero") -> Array:
    """Codes of the nearest values; a tie goes to the even code, NaN to that nearest zero or the largest."""
    wide = xp.width(x)
    is_nan = less(infinity(wide), magnitude_bits(xp, x), wide)
    table = xp.constant(_thresholds(fmt, wide), xp.floats[wide], x)
    absent = min(range(len(fmt.values)), key=lambda i: abs(fmt.values[i])) if nan == "zero" else len(fmt.values) - 1
    if xp.flushes_subnormals:  # searched as integers, which are in the same order
        table, x = (ordered(xp.view(v, xp.ints[wide]), wide) for v in (table, x))
    codes = xp.astype(xp.searchsorted(table, x), xp.ints[wide])
    return select(is_nan, absent, codes)


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
    values = np.array([float(_oracle.decode(fmt, code)) for code in range(2**fmt.bits)])
    with np.errstate(over="ignore"):
        return values.astype({32: np.float32, 64: np.float64}[wide])


def decode_scalar(xp: Backend, code: Array, fmt: Scalar, wide: int) -> Array:
    """Codes to float32 or float64 (``wide``); exact, or rounded once where float32 is too narrow."""
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


def join(xp: Backend, a: Parts, wide: int) -> Array:
    """Parts to float32 or float64, rounded once (nearest even)."""
    if wide == 32:
        code = _encode_float(xp, a, _FLOAT32, "nearest_even", "inf", "zero")
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
