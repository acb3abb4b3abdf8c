"""Compiled loops over blocks: what a block spans, its scale, its elements under the scale.

Arrays are flat: rows of ``n`` numbers, each cut into blocks of ``size``, the last of a row shorter where need be.
What belongs to a block stands in arrays with one entry a block.

Scales are found in float64, whose 53 bits hold what the array text keeps in integers: a quotient rounded to odd to 26
bits is float64's with its last bits gathered in one. That quotient is rounded itself, but lies no closer than
``2**-49`` to a number of 25 bits that it does not equal (it is a fraction of two 24-bit numbers).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ._lanes import (
    LANES,
    choose,
    floats,
    highest,
    ints,
    least,
    load,
    lowest,
    most,
    reals,
    store,
    words,
)
from ._words import MAGNITUDE, Array, compiled, long_real, long_word, part, real, right, word

_FIELD = np.int64(0x7FF0000000000000)


@compiled
def amaxes(x: Array, n: int, size: int, out: Array) -> None:
    """``out`` [blocks] float32 = the largest magnitude of each block; infinity and NaN count as the largest."""
    bits = x.view(np.int32)
    magnitude = ints(MAGNITUDE)
    start, end = 0, n
    for b in range(out.size):
        stop = min(start + size, end)
        middle = stop - (stop - start) % LANES
        m = np.int32(0)
        if middle > start:
            top = load(bits, start) & magnitude
            for i in range(start + LANES, middle, LANES):
                top = most(top, load(bits, i) & magnitude)
            m = highest(top)
        for i in range(middle, stop):
            m = max(m, np.int32(bits[i] & MAGNITUDE))
        out[b] = real(m)
        start = stop
        end += n if stop == end else 0


@part
def _ordered(u: Any) -> Any:
    """Bits of a float32 as an integer in the order of the numbers, and back."""
    return np.int32(u ^ right(np.int32(u >> np.int32(31)), np.int32(1)))


@compiled
def ranges(x: Array, n: int, size: int, highs: Array, lows: Array) -> None:
    """``highs`` and ``lows`` [blocks] float64 = the highest and lowest number of each block, with zero between
    them; NaN of a block that holds one."""
    bits = x.view(np.int32)
    nothing, magnitude = ints(np.int32(0)), ints(MAGNITUDE)
    start, end = 0, n
    for b in range(highs.size):
        stop = min(start + size, end)
        middle = stop - (stop - start) % LANES
        top, bottom = nothing, nothing
        for i in range(start, middle, LANES):
            u = load(bits, i)
            key = u ^ (choose(u < nothing, magnitude, nothing))
            top, bottom = most(top, key), least(bottom, key)
        high, low = highest(top), lowest(bottom)
        for i in range(middle, stop):
            one = _ordered(bits[i])
            high, low = max(high, one), min(low, one)
        highs[b] = real(high)
        lows[b] = real(_ordered(low))
        start = stop
        end += n if stop == end else 0


@compiled
def spans(highs: Array, lows: Array, out: Array) -> None:
    """``out`` = highest less lowest, rounded to 24 bits."""
    for b in range(out.size):
        span = highs[b] - lows[b]
        # exact in float64, or of numbers so uneven that the smaller does not show in 24 bits
        c = long_real(np.int64(long_word(span) & _FIELD) + np.int64(29 << 52))
        out[b] = (span + c) - c if span < np.inf else span


class ScaleSteps(NamedTuple):
    """The lattice of a scale format in float64, as int64 words; see `_round.Steps`.

    ``round_*``: rounding of amax to the element's precision. ``short_*``: what is cut before amax is divided.
    ``down``, ``up``: -1 where what was rounded up (down) to nearest goes back. ``code_*``: codes of the smallest
    and largest scale, ``nan``: NaN's.
    """

    emin: int
    mantissa: int
    low: int
    flush: int
    first: int
    down: int
    up: int
    code_least: int
    code_most: int
    nan: int
    round_half: int
    round_shift: int
    round_odd: int
    round_mask: int
    short_mask: int
    short_bit: int


class ScaleValues(NamedTuple):
    """float64: amax is divided by ``tensor``, multiplied by ``power`` and divided by ``target``. ``least`` and
    ``most``: the smallest and largest scale. ``rounded``: 1.0 where the divisor, scale times ``tensor``, is
    rounded to float32."""

    tensor: float
    power: float
    target: float
    least: float
    most: float
    rounded: float


@part
def _gather(bits: Any, mask: Any, bit: Any) -> Any:
    """The last bits of a float64 rounded to odd into one."""
    low = np.int64(bits & mask)
    return np.int64(np.int64(bits - low) | (bit if low != 0 else np.int64(0)))


_LAST28, _BIT27 = np.int64((1 << 28) - 1), np.int64(1 << 27)


@part
def _scales(a: Array, k: Array, v: Array, codes: Array, scale: Array, unit: Array, inverse: Array, short: bool) -> None:
    emin, mantissa, low, flush, first, down, up = k[0], k[1], k[2], k[3], k[4], k[5], k[6]
    code_least, code_most, nan = k[7], k[8], k[9]
    round_half, round_shift, round_odd, round_mask, short_mask, short_bit = k[10], k[11], k[12], k[13], k[14], k[15]
    tensor, power, target, least, most, rounded = v[0], v[1], v[2], v[3], v[4], v[5]
    drop = np.int64(52) - mantissa
    whole = tensor * (target / power)
    for i in range(a.size):
        finite = a[i] < np.inf
        amax = np.float64(a[i]) if finite else 0.0
        if short:
            share = amax / whole
        else:
            bits = _gather(long_word(amax / tensor), _LAST28, _BIT27)
            bits = np.int64((bits + round_half + ((bits >> round_shift) & round_odd)) & round_mask)
            share = long_real(_gather(bits, short_mask, short_bit)) * power
            share = long_real(_gather(long_word(share / target), _LAST28, _BIT27))
        e = np.int64(long_word(share) & _FIELD)
        below = e < emin
        c = low if below else np.int64(e + (drop << 52))
        total = share + long_real(c)
        near = total - long_real(c)
        kept = np.int64(long_word(total) - c)
        kept += down if near > share else np.int64(0)
        kept -= up if near < share else np.int64(0)
        value = np.float64(kept) * long_real(np.int64(c - (np.int64(52) << 52)))
        code = np.int64((kept << flush if below else kept + ((e - emin) >> drop)) - first)
        code = min(max(code, code_least), code_most)
        value = min(max(value, least), most)
        s = np.float32(value if finite else np.nan)
        codes[i] = code if finite else nan
        scale[i] = s
        product = np.float64(s) * tensor
        closed = np.float64(max(np.float32(product), np.float32(1e-45)))
        u = closed if rounded != 0 and finite else product
        unit[i] = u
        inverse[i] = np.float32(1.0 / u) if u > 2.0**-100 and u < 2.0**100 else np.float32(0)


@compiled
def scales(a: Array, k: Array, v: Array, codes: Array, scale: Array, unit: Array, inverse: Array, short: bool) -> None:
    """``codes`` and ``scale`` (float32) [blocks] from amax ``a`` (float32, or float64 where it is a span); ``unit``
    (float64), what elements are divided by, and ``inverse`` (float32), its reciprocal, 0 where only float64 has the
    range for it. ``k``, ``v``: `ScaleSteps` and `ScaleValues`.

    ``short``: scale, target and tensor scale have so few bits together that one division decides.
    """
    if short:
        _scales(a, k, v, codes, scale, unit, inverse, True)
    else:
        _scales(a, k, v, codes, scale, unit, inverse, False)


@compiled
def points(lows: Array, unit: Array, low: float, high: float, steps: float, out: Array) -> None:
    """Zero points (float32, whole numbers over ``steps``): the lowest number falls on ``low``, as nearly as may be."""
    magic = 1.5 * 2.0**52
    for b in range(out.size):
        v = min(max(lows[b] / unit[b] * steps, -(2.0**40)), 0.0)
        p = min(max(low - ((v + magic) - magic), low), high)
        out[b] = np.float32(p / steps if unit[b] == unit[b] else 0.0)


@cache
def quotients(rounded: bool) -> Any:
    """The loop ``quotients(x, out, n, size, unit)``: ``out`` (float32) = x over its block's divisor, rounded to odd,
    which leaves it open how to round on; or to nearest. x's sign stays, also that of NaN."""

    @compiled
    def run(x: Array, out: Array, n: int, size: int, unit: Array) -> None:
        bits, target = x.view(np.int32), out.view(np.int32)
        magnitude, sign = ints(MAGNITUDE), ints(np.int32(~MAGNITUDE))
        start, end = 0, n
        for b in range(unit.size):
            stop = min(start + size, end)
            middle = stop - (stop - start) % LANES if rounded else start
            d = unit[b]
            short = np.float32(d)
            divisor = floats(short)
            for i in range(start, middle, LANES):
                u = load(bits, i)
                store(target, i, (words(reals(u & magnitude) / divisor) & magnitude) | (u & sign))
            for i in range(middle, stop):
                v = real(np.int32(bits[i] & MAGNITUDE))
                if rounded:
                    q = word(v / short)
                else:
                    exact = np.float64(v) / d
                    near = np.float32(exact)
                    back = np.float64(near)
                    q = word(near)
                    above = np.int32(1) if back > exact else np.int32(0)
                    q = q if back == exact else np.int32(np.int32(q - above) | np.int32(1))
                target[i] = np.int32(np.int32(q & MAGNITUDE) | np.int32(bits[i] & np.int32(~MAGNITUDE)))
            start = stop
            end += n if stop == end else 0

    return run


@compiled
def products(x: Array, n: int, size: int, scale: Array, tensor: float, point: Array) -> None:
    """Elements (less their block's zero point) times its scale, and that times ``tensor``, in place."""
    second = floats(tensor)
    start, end = 0, n
    for b in range(scale.size):
        stop = min(start + size, end)
        middle = stop - (stop - start) % LANES
        s = scale[b]
        z = point[b] if point.size else np.float32(0)
        factor, zero = floats(s), floats(z)
        if point.size:
            for i in range(start, middle, LANES):
                store(x, i, (load(x, i) - zero) * factor * second)
        else:
            for i in range(start, middle, LANES):
                store(x, i, load(x, i) * factor * second)
        for i in range(middle, stop):
            v = x[i] - z if point.size else x[i]
            x[i] = v * s * tensor
        start = stop
        end += n if stop == end else 0


@compiled
def about_points(x: Array, n: int, size: int, scale: Array, point: Array, low: float, high: float) -> None:
    """Numbers moved up by their block's zero point and held between ``low`` and ``high``, in place; 0 in a block
    whose scale is NaN."""
    start, end = 0, n
    for b in range(scale.size):
        stop = min(start + size, end)
        z, good = point[b], scale[b] == scale[b]
        for i in range(start, stop):
            v = min(max(x[i] + z, low), high)
            x[i] = v if good else np.float32(0)
        start = stop
        end += n if stop == end else 0
