"""Numbers taken apart in integers: sign, exponent, significand. One text for numpy, torch and jax.

No step here is a floating-point operation whose result could be rounded, flushed or fused away, so every
backend and compiler gives the same bits. Exponents are read from the bits.

Choices are made by masks, integers that are 0 or -1, and arithmetic on them: on a CPU comparing and
`where` take four to eight times as long as an integer operation, more where the outcome is random. What a
function made itself it changes in place (``a += b``), which halves the time; jax reads that as ``a = a + b``.
"""

from __future__ import annotations

from typing import NamedTuple

from ._backend import Array, Backend

_SOURCE = {32: (23, 127), 64: (52, 1023)}  # stored significand bits and bias of float32 and float64

# zero's exponent is this far under every other number's, infinity's and NaN's this far above
FAR = 1 << 20


class Parts(NamedTuple):
    """``(-1)**negative * significand * 2**(exponent - top)``, element by element.

    ``significand`` has its leading one at bit ``top`` (0 for zeros); where the number was cut, its last
    bit is set (rounded to odd), so that one later rounding still is the right one. ``negative`` and ``nan``
    are masks. An infinity is a number far above all others. ``wide`` is the width of the integers, 32 or 64.
    """

    negative: Array
    exponent: Array
    significand: Array
    nan: Array
    top: int
    wide: int


def less(a: Array | int, b: Array | int, wide: int) -> Array:
    """Mask of a < b, for integers whose difference does not overflow."""
    difference = a - b
    difference >>= wide - 1
    return difference


def select(mask: Array, a: Array | int, b: Array | int) -> Array:
    """a where the mask is set, else b; one of these has the result's shape."""
    if isinstance(a, int) and a == 0:
        return b & ~mask
    difference = a ^ b
    difference &= mask
    difference ^= b
    return difference


def infinity(wide: int) -> int:
    """The bits of infinity; those of a NaN are above, as magnitudes."""
    stored = _SOURCE[wide][0]
    return ((1 << (wide - 1 - stored)) - 1) << stored


def magnitude_bits(xp: Backend, x: Array) -> Array:
    """The bits of |x| as integers, which are in the order of the numbers."""
    wide = xp.width(x)
    return xp.view(x, xp.ints[wide]) & (2 ** (wide - 1) - 1)


def ordered(bits: Array, wide: int) -> Array:
    """Bits of floats as integers in the order of the numbers, and (its own inverse) back again."""
    return bits ^ ((bits >> (wide - 1)) & (2 ** (wide - 1) - 1))


def split(xp: Backend, x: Array, finite: bool = False) -> Parts:
    """Take float32 or float64 apart, subnormals included. ``finite``: the others do not matter."""
    wide = xp.width(x)
    return split_bits(xp, xp.view(x, xp.ints[wide]), wide, finite)


def split_bits(xp: Backend, bits: Array, wide: int, finite: bool = False) -> Parts:
    """`split` of the floats with these bits."""
    stored, bias = _SOURCE[wide]
    magnitude = bits & (2 ** (wide - 1) - 1)
    # a subnormal is an integer below 2**stored in units of the smallest one: as a float it is normal
    subnormal = less(magnitude, 1 << stored, wide)
    normal = select(subnormal, xp.view(xp.astype(magnitude, xp.floats[wide]), xp.ints[wide]), magnitude)
    zero = less(magnitude, 1, wide)
    subnormal &= bias + stored - 1
    exponent = normal >> stored
    exponent -= subnormal
    exponent -= bias
    exponent -= zero & FAR
    if not finite:
        exponent += ~less(magnitude, infinity(wide), wide) & FAR
    normal &= (1 << stored) - 1
    normal |= 1 << stored
    normal &= ~zero
    nan = less(infinity(wide), magnitude, wide) if not finite else zero & 0
    return Parts(bits >> (wide - 1), exponent, normal, nan, stored, wide)


def shorten(xp: Backend, a: Parts) -> Parts:
    """The same numbers rounded to odd to the width of their source's significand."""
    drop = a.top - _SOURCE[a.wide][0]
    if drop <= 0:
        return a
    rest = (1 << drop) - 1
    sticky = ((a.significand & rest) + rest) >> drop
    return a._replace(significand=(a.significand >> drop) | sticky, top=a.top - drop)


def divide(xp: Backend, a: Parts, b: Parts) -> Parts:
    """a / b rounded to odd, as if by exact division. b is not zero and broadcasts to a."""
    a, b = shorten(xp, a), shorten(xp, b)
    p, wide, ints, floats = a.top, a.wide, xp.ints[a.wide], xp.floats[a.wide]
    divisor = b.significand
    step = xp.astype(divisor, floats) * 2.0 ** -(p + 1)
    short = less(a.significand, divisor, wide)
    numerator = a.significand << -short
    ratio = xp.astype(numerator, floats)
    ratio /= step
    quotient = xp.astype(ratio, ints)
    # exact although both terms wrap around: the remainder itself is small
    remainder = numerator << (p + 1)
    remainder -= quotient * divisor
    for _ in range(xp.division_error):
        off = remainder >> (wide - 1)  # -1 where the quotient is too large
        off += 1
        off += less(remainder, divisor, wide)
        quotient += off
        off *= divisor
        remainder -= off
    exponent = a.exponent - b.exponent
    exponent += short
    quotient <<= 1
    quotient -= less(0, remainder, wide)
    return Parts(a.negative ^ b.negative, exponent, quotient, a.nan | b.nan, p + 2, wide)


def multiply(xp: Backend, a: Parts, b: Parts) -> Parts:
    """a * b rounded to odd. Broadcasts."""
    a, b = shorten(xp, a), shorten(xp, b)
    p, wide = a.top, a.wide
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
    rest = (low & mask) | (middle & ((1 << (drop - h)) - 1))
    product = ((a_high * b_high) << (2 * h - drop)) + (middle >> (drop - h))
    short = less(product, 1 << (p + 2), wide)
    exponent = a.exponent + b.exponent + 1 + short
    infinity_times_zero = ~less(0, product, wide) & less(-FAR // 2, exponent, wide)
    return Parts(
        a.negative ^ b.negative,
        exponent,
        (product << -short) | (less(0, rest, wide) & 1),
        a.nan | b.nan | infinity_times_zero,
        p + 2,
        wide,
    )


def add_magnitudes(xp: Backend, a: Parts, b: Parts) -> Parts:
    """|a| + |b| rounded to odd."""
    a, b = shorten(xp, a), shorten(xp, b)
    p, wide = a.top, a.wide
    swap = less(a.exponent, b.exponent, wide)
    exponent = select(swap, b.exponent, a.exponent)
    large = select(swap, b.significand, a.significand) << 2
    small = select(swap, a.significand, b.significand) << 2
    shift = xp.clip(exponent - select(swap, a.exponent, b.exponent), 0, p + 3)
    rest = small & ((1 << shift) - 1)
    total = large + (small >> shift)
    short = less(total, 1 << (p + 3), wide)
    return Parts(
        0 * exponent,
        exponent + 1 + short,
        (total << -short) | (less(0, rest, wide) & 1),
        a.nan | b.nan,
        p + 3,
        wide,
    )


def distance(xp: Backend, a: Parts, b: Parts) -> Parts:
    """|a - b| rounded to odd; one bit more than `add_magnitudes` keeps."""
    a, b = shorten(xp, a), shorten(xp, b)
    p, wide = a.top, a.wide
    swap = less(a.exponent, b.exponent, wide)
    exponent = select(swap, b.exponent, a.exponent)
    large = select(swap, b.significand, a.significand) << 3
    small = select(swap, a.significand, b.significand) << 3
    shift = xp.clip(exponent - select(swap, a.exponent, b.exponent), 0, p + 4)
    sticky = less(0, small & ((1 << shift) - 1), wide)
    small >>= shift
    subtracted = large - small + sticky  # floor of the difference; the sticky bit below rounds it to odd
    total = select(a.negative ^ b.negative, large + small, abs(subtracted)) | (sticky & 1)
    # the leading one is found as a float; without the bit below it, rounding that float carries nowhere
    lead = xp.view(xp.astype(total & ~(total >> 1), xp.floats[wide]), xp.ints[wide])
    stored, bias = _SOURCE[wide]
    zero = less(total, 1, wide)
    up = p + 4 - ((lead >> stored) - bias)
    up &= ~zero
    return Parts(0 * exponent, exponent + 1 - up - (zero & FAR), total << up, a.nan | b.nan, p + 4, wide)
