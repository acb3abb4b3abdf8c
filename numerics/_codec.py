"""Scalar formats: codes from numbers and back."""

from __future__ import annotations

from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

from . import _oracle
from ._backend import Array, Backend
from ._format import Codebook, Fixed, Float, Scalar
from ._parts import Parts, split
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


def encode_parts(
    xp: Backend, a: Parts, fmt: Scalar, rounding: str, overflow: str | None, nan: str = "zero"
) -> Array:
    """Codes, as integers of the parts' width, of numbers taken apart."""
    if nan not in NANS:
        raise ValueError(f"nan={nan!r}: choose one of {', '.join(NANS)} (for formats that have no NaN)")
    policy = overflow_policy(fmt, overflow)
    if isinstance(fmt, Codebook):
        raise TypeError("a codebook is searched, not rounded: see encode_codebook")
    encode = _encode_fixed if isinstance(fmt, Fixed) else _encode_float
    return encode(xp, a, fmt, rounding, policy, nan)  # type: ignore[arg-type]


def significand(xp: Backend, a: Parts, quantum: Array, rounding: str) -> Array:
    """``|a|`` in units of ``2**quantum``, rounded to an integer."""
    # beyond top + 2 dropped bits nothing changes: the whole significand is below half a unit
    drop = xp.minimum(xp.maximum(quantum - a.exponent + a.top, 0 * quantum), 0 * quantum + a.top + 2)
    kept = a.significand >> drop
    unit = (0 * drop + 1) << drop
    up = rounding_rule(rounding)(kept, a.significand & (unit - 1), unit, a.negative)
    return kept + xp.astype(up, xp.ints[a.wide])


def _encode_float(xp: Backend, a: Parts, fmt: Float, rounding: str, overflow: str, nan: str) -> Array:
    m = fmt.mantissa
    base = xp.maximum(a.exponent, 0 * a.exponent + fmt.emin)
    below = a.exponent < fmt.emin
    if fmt.subnormal:
        # a carry out of the significand runs into the exponent field, which is what it should do
        code = significand(xp, a, base - m, rounding) + ((base - fmt.emin) << m)
    elif fmt.zero:
        whole = significand(xp, a, base - m, rounding) + ((base - fmt.emin) << m)
        tiny = significand(xp, a, 0 * base + fmt.emin, rounding) << m
        code = xp.where(below, tiny, whole)
    else:
        whole = significand(xp, a, base - m, rounding) + ((base - fmt.emin) << m) - (1 << m)
        code = xp.where(below | (a.significand == 0), 0 * whole, whole)
    limit = {"saturate": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}[overflow]
    negative = a.negative
    if not fmt.signed:
        under = negative & ((code > 0) if fmt.zero else (a.significand > 0))
        lowest = fmt.nan_code if overflow == "nan" else 0
        code = xp.where(negative, xp.where(under, 0 * code + lowest, 0 * code), code)
        negative = negative & ~negative
    code = xp.where(
        ((code > fmt.max_code) | a.inf) & ~(a.negative & (not fmt.signed)), 0 * code + limit, code
    )
    if fmt.signed:
        sign = 1 << (fmt.bits - 1)
        sign = sign - (1 << 32) if fmt.bits == a.wide == 32 else sign  # the same bit in a signed integer
        keep = negative if fmt.negative_zero else negative & (code != 0)
        code = xp.where(keep & (code != sign), code | sign, code)
    special = fmt.nan_code if fmt.nan_code is not None else {"zero": 0, "max": fmt.max_code}[nan]
    signed_nan = fmt.signed and fmt.nan in ("ieee", "top")
    nan_code = (
        xp.where(a.negative, 0 * code + (special | sign), 0 * code + special)
        if signed_nan
        else 0 * code + special
    )
    return xp.where(a.nan, nan_code, code)


def _encode_fixed(xp: Backend, a: Parts, fmt: Fixed, rounding: str, overflow: str, nan: str) -> Array:
    magnitude = significand(xp, a, 0 * a.exponent - fmt.fraction, rounding)
    value = xp.where(a.negative, -magnitude, magnitude)
    value = xp.minimum(xp.maximum(value, 0 * value + fmt.low), 0 * value + fmt.high)
    bound = xp.where(a.negative, 0 * value + fmt.low, 0 * value + fmt.high)
    # where no bit is dropped the number is a larger integer than the format holds
    value = xp.where(a.inf | (a.exponent + fmt.fraction > a.top), bound, value)
    value = xp.where(a.nan, 0 * value + {"zero": 0, "max": fmt.high}[nan], value)
    return value & ((1 << fmt.bits) - 1)


@cache
def _thresholds(fmt: Codebook, wide: int) -> np.ndarray:
    """For each neighbouring pair the largest float at which the lower value still is chosen."""
    real = {32: np.float32, 64: np.float64}[wide]
    cuts = []
    for i, (low, high) in enumerate(zip(fmt.values, fmt.values[1:])):
        middle = (Fraction(low) + Fraction(high)) / 2
        cut = real(float(middle))
        while Fraction(float(cut)) > middle:
            cut = np.nextafter(cut, real(-np.inf))
        # a tie goes to the even code
        cuts.append(np.nextafter(cut, real(-np.inf)) if Fraction(float(cut)) == middle and i % 2 else cut)
    return np.array(cuts, dtype=real)


def encode_codebook(xp: Backend, x: Array, fmt: Codebook, nan: str = "zero") -> Array:
    """Codes of the nearest values; a tie goes to the even code, NaN to the value nearest zero or the largest."""
    wide = xp.width(x)
    table = xp.constant(_thresholds(fmt, wide), xp.floats[wide], x)
    absent = (
        min(range(len(fmt.values)), key=lambda i: abs(fmt.values[i]))
        if nan == "zero"
        else len(fmt.values) - 1
    )
    clean = xp.where(x == x, x, 0 * table[0])
    codes = xp.astype(xp.searchsorted(table, clean), xp.ints[wide])
    return xp.where(x == x, codes, 0 * codes + absent)


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
def decode_table(fmt: Scalar) -> np.ndarray:
    """The float64 value of every code of a format of at most 16 bits, from the oracle."""
    return np.array([float(_oracle.decode(fmt, code)) for code in range(2**fmt.bits)])


def decode_scalar(xp: Backend, code: Array, fmt: Scalar, wide: int) -> Array:
    """Codes to float32 or float64 (``wide``); exact, or rounded once where float32 is too narrow."""
    code = wide_codes(xp, code)
    if fmt.bits <= 16:
        with np.errstate(over="ignore"):
            table = decode_table(fmt).astype({32: np.float32, 64: np.float64}[wide])
        return xp.constant(table, xp.floats[wide], code)[code]
    return _decode_wide_float(xp, code, fmt, wide)  # type: ignore[arg-type]  # only Float is wider


def _decode_wide_float(xp: Backend, code: Array, fmt: Float, wide: int) -> Array:
    """Formats of 17 to 32 bits: rebuild the float's own bits."""
    m, half = fmt.mantissa, fmt.exponent + fmt.mantissa
    magnitude = code & ((1 << half) - 1)
    negative = ((code >> half) & 1) == 1 if fmt.signed else magnitude < 0
    fraction = magnitude & ((1 << m) - 1)
    exponent_field = magnitude >> m
    normal = (exponent_field > 0) if fmt.zero else (exponent_field >= 0)
    integer = xp.where(normal, fraction | (1 << m), fraction if fmt.subnormal else 0 * fraction)
    a = split(xp, xp.astype(integer, xp.floats[32 if m < 24 else 64]))
    shift = xp.maximum(exponent_field, 0 * exponent_field + int(fmt.zero)) - fmt.bias - m
    a = a._replace(negative=negative, exponent=a.exponent + xp.astype(shift, xp.ints[a.wide]))
    ieee = fmt.nan == "ieee"
    inf = magnitude == fmt.inf_code if fmt.inf_code is not None else magnitude < 0
    if ieee:
        nan = magnitude > fmt.inf_code
    elif fmt.nan == "negative_zero":
        nan = (magnitude == 0) & negative
    else:
        nan = magnitude == fmt.nan_code if fmt.nan else magnitude < 0
    return join(xp, a._replace(inf=inf, nan=nan), wide)


_FLOAT32 = Float(8, 23)


def join(xp: Backend, a: Parts, wide: int) -> Array:
    """Parts to float32 or float64, rounded once (nearest even)."""
    if wide == 32:
        code = _encode_float(xp, a, _FLOAT32, "nearest_even", "inf", "zero")
        return xp.view(xp.astype(code, xp.ints[32]), xp.floats[32])
    # a significand of 32-bit parts fits a float64 with room to spare; the power of two is exact in it
    value = xp.astype(a.significand, xp.floats[64])
    power = xp.astype(a.exponent - a.top, xp.ints[64])
    for part in (power >> 1, power - (power >> 1)):  # in two steps: one alone could overflow
        value = value * _power_of_two(xp, part)
    value = xp.where(a.inf, value * 0 + float("inf"), value)
    value = xp.where(a.negative, -value, value)
    return xp.where(a.nan, value * 0 + float("nan"), value)


def _power_of_two(xp: Backend, exponent: Array) -> Array:
    held = xp.minimum(xp.maximum(exponent, 0 * exponent - 1022), 0 * exponent + 1023)
    return xp.view((held + 1023) << 52, xp.floats[64])
