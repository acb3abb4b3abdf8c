"""Compiled rounding of float32 numbers to posits, nearest, ties to the even code.

The bits of a float32 less those of 1 are its logarithm, piecewise: exponent and fraction as one fixed-point number.
A posit's code is that number too, cut after as many bits as the regime leaves, so that rounding is an addition
and a cut, as for other formats, with another number of bits for every regime.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .._format import Posit
from .._policy import Policy
from ._plan import numbers_of
from ._words import INFINITY, MAGNITUDE, Array, compiled, left, part, right

_ONE = np.int32(127 << 23)


class PositSteps(NamedTuple):
    """int32 words: ``bits`` and ``es`` of the posit; the bits of the smallest and largest number; what becomes of
    infinity and NaN, without and with the sign bit, as numbers and as codes."""

    bits: int
    es: int
    least: int
    most: int
    specials: tuple[int, int, int, int]
    special_codes: tuple[int, int, int, int]


@part
def _span(bits: Array, out: Array, p: Array, codes: bool) -> None:
    n, es, least, most = p[0], p[1], p[2], p[3]
    first = 8 if codes else 4
    inf, inf_n, nan, nan_n = p[first], p[first + 1], p[first + 2], p[first + 3]
    tail = np.int32(es + np.int32(23))  # bits of exponent below the regime, and fraction
    cut = np.int32(np.int32(tail + np.int32(1)) - n)
    for i in range(bits.size):
        u = bits[i]
        negative = u < 0
        magnitude = np.int32(u & MAGNITUDE)
        a = np.int32(min(max(magnitude, least), most) - _ONE)
        k = np.int32(a >> tail)
        run = np.int32(np.int32(k ^ np.int32(k >> np.int32(31))) + np.int32(2))
        drop = min(np.int32(run + cut), tail)
        half = left(np.int32(1), np.int32(drop - np.int32(1)))
        unit = np.int32(half + half)
        # the last bit kept is the regime's where nothing is left for others: its end, 0 after ones, 1 after zeros
        last = a if drop < tail else np.int32(a >> np.int32(31))
        odd = np.int32(1) if np.int32(last & unit) != 0 else np.int32(0)
        r = np.int32(np.int32(np.int32(np.int32(a + half) - np.int32(1)) + odd) & np.int32(-unit))
        value = min(np.int32(r + _ONE), most)
        if codes:
            r = np.int32(value - _ONE)
            k = np.int32(r >> tail)
            ones = k >= 0
            run = np.int32(np.int32(k ^ np.int32(k >> np.int32(31))) + np.int32(2))
            rest = max(np.int32(np.int32(n - np.int32(1)) - run), np.int32(0))
            regime = np.int32(left(np.int32(1), min(run, np.int32(30))) - np.int32(2)) if ones else np.int32(1)
            low = np.int32(r & np.int32(left(np.int32(1), tail) - np.int32(1)))
            code = np.int32(left(regime, rest) | right(low, np.int32(tail - rest)))
            code = np.int32(left(np.int32(1), np.int32(n - np.int32(1))) - np.int32(1)) if value == most else code
            code = np.int32(0) if magnitude == 0 else code
            o = np.int32(-code) if negative else code
        else:
            value = np.int32(0) if magnitude == 0 else value
            o = np.int32(value | np.int32(u & np.int32(~MAGNITUDE))) if value != 0 else np.int32(0)
        o = (inf_n if negative else inf) if magnitude == INFINITY else o
        o = (nan_n if negative else nan) if magnitude > INFINITY else o
        out[i] = np.int32(o & np.int32(left(np.int32(2), np.int32(n - np.int32(1))) - np.int32(1))) if codes else o


@cache
def posits(codes: bool) -> Any:
    """The loop ``posits(x, out, p)`` to numbers, or codes, with the parameters `PositSteps`."""

    @compiled
    def run(x: Array, out: Array, p: Array) -> None:
        _span(x.view(np.int32), out if codes else out.view(np.int32), p, codes)

    return run


def steps(fmt: Any, policy: Policy) -> Array | None:
    """The parameters of the loop, or None where it does not serve the format."""
    if type(fmt) is not Posit or policy.rounding != "nearest_even" or not fmt.bits >= 3 or fmt.es > 4:
        return None
    if fmt.max >= 2.0**120:
        return None
    ends = policy.ends(fmt)
    sign = 1 << fmt.bits
    infinite = (ends.infinite, ends.infinite if ends.infinite == fmt.nan_code else sign - ends.infinite)
    codes = (*infinite, *ends.nan)
    numbers = numbers_of(fmt, list(codes))
    least, most = (int(np.float32(v).view(np.int32)) for v in (fmt.min_positive, fmt.max))
    flat = [fmt.bits, fmt.es, least, most, *numbers, *codes]
    return np.array([v - (1 << 32) if v >> 31 else v for v in flat], np.int32)
