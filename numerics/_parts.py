"""Numbers taken apart in integers: sign, exponent, significand. One text for numpy, torch and jax.

No step here is a floating-point operation whose result could be rounded, flushed or fused away, so every
backend and compiler gives the same bits. Exponents are read from the bits.
"""

from __future__ import annotations

from typing import NamedTuple

from ._backend import Array, Backend

_SOURCE = {32: (23, 127), 64: (52, 1023)}  # stored significand bits and bias of float32 and float64

_BELOW_ALL = 1 << 20  # the exponent of zero: under every format's smallest


class Parts(NamedTuple):
    """``(-1)**negative * significand * 2**(exponent - top)``, element by element.

    ``significand`` has its leading one at bit ``top`` (0 for zeros); where the number was cut, its last
    bit is set (rounded to odd), so that one later rounding still is the right one.
    ``wide`` is the width of the integers, 32 or 64.
    """

    negative: Array
    exponent: Array
    significand: Array
    inf: Array
    nan: Array
    top: int
    wide: int


def split(xp: Backend, x: Array) -> Parts:
    """Take float32 or float64 apart, subnormals included."""
    wide = xp.width(x)
    stored, bias = _SOURCE[wide]
    bits = xp.view(x, xp.ints[wide])
    magnitude = bits & (2 ** (wide - 1) - 1)
    infinite = ((1 << (wide - 1 - stored)) - 1) << stored
    # a subnormal is an integer below 2**stored in units of the smallest one: as a float it is normal
    is_subnormal = magnitude < (1 << stored)
    normal = xp.where(is_subnormal, xp.view(xp.astype(magnitude, xp.floats[wide]), xp.ints[wide]), magnitude)
    exponent = (normal >> stored) - xp.where(is_subnormal, 2 * bias + stored - 1, bias)
    significand = (normal & ((1 << stored) - 1)) | (1 << stored)
    zero = magnitude == 0
    return Parts(
        bits < 0,
        xp.where(zero, 0 * magnitude - _BELOW_ALL, exponent),
        xp.where(zero, 0 * significand, significand),
        magnitude == infinite,
        magnitude > infinite,
        stored,
        wide,
    )


def shorten(xp: Backend, a: Parts) -> Parts:
    """The same numbers rounded to odd to the width of their source's significand."""
    drop = a.top - _SOURCE[a.wide][0]
    if drop <= 0:
        return a
    sticky = (a.significand & ((1 << drop) - 1)) != 0
    return a._replace(significand=(a.significand >> drop) | sticky, top=a.top - drop)


def divide(xp: Backend, a: Parts, b: Parts) -> Parts:
    """a / b rounded to odd, as if by exact division; 0 where b is 0. Broadcasts."""
    a, b = shorten(xp, a), shorten(xp, b)
    p, ints, floats = a.top, xp.ints[a.wide], xp.floats[a.wide]
    dead = (a.significand == 0) | (b.significand == 0)
    divisor = xp.where(b.significand == 0, 0 * b.significand + (1 << p), b.significand)
    ratio = xp.astype(a.significand, floats) / xp.astype(divisor, floats)
    quotient = xp.astype(ratio * float(1 << (p + 1)), ints)
    # exact although both terms wrap around: the remainder itself is small
    remainder = (a.significand << (p + 1)) - quotient * divisor
    for _ in range(2):  # the floating-point quotient may be off by an ulp or two either way
        low, high = remainder < 0, remainder >= divisor
        step = xp.astype(high, ints) - xp.astype(low, ints)
        quotient, remainder = quotient + step, remainder - step * divisor
    wide = quotient >= (1 << (p + 1))
    # one more bit: a format as precise as the source needs to know on which side of a half the rest lies
    more = 2 * remainder >= divisor
    quotient = (quotient << 1) | more
    remainder = 2 * remainder - xp.where(more, divisor, 0 * divisor)
    significand = xp.where(wide, quotient, quotient << 1) | (remainder != 0)
    return Parts(
        a.negative ^ b.negative,
        a.exponent - b.exponent - xp.where(wide, 0 * quotient, 0 * quotient + 1),
        xp.where(dead, 0 * significand, significand),
        a.inf,
        a.nan | b.nan,
        p + 2,
        a.wide,
    )


def multiply(xp: Backend, a: Parts, b: Parts) -> Parts:
    """a * b rounded to odd. Broadcasts."""
    a, b = shorten(xp, a), shorten(xp, b)
    p = a.top
    h = (p + 2) // 2
    mask = (1 << h) - 1
    a_high, a_low, b_high, b_low = (
        a.significand >> h,
        a.significand & mask,
        b.significand >> h,
        b.significand & mask,
    )
    low = a_low * b_low
    middle = a_high * b_low + a_low * b_high + (low >> h)
    drop = p - 1  # product / 2**drop has its leading one at bit p + 1 or p + 2
    sticky = ((low & mask) | (middle & ((1 << (drop - h)) - 1))) != 0
    product = ((a_high * b_high) << (2 * h - drop)) + (middle >> (drop - h))
    wide = product >= (1 << (p + 2))
    significand = xp.where(wide, product, product << 1) | sticky
    return Parts(
        a.negative ^ b.negative,
        a.exponent + b.exponent + xp.where(wide, 0 * product + 1, 0 * product),
        significand,
        a.inf | b.inf,
        a.nan | b.nan,
        p + 2,
        a.wide,
    )
