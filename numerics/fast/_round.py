"""Compiled rounding of float32 numbers to one scalar format after the other: numbers or codes.

One text, compiled for each way to round, for two kinds of formats, and for numbers (float32 again) or codes:

- nearest, ties to even, by adding to ``|x|`` the power of two at which a float32's last bit is the format's, and
  taking it away again: the sum is rounded once, by the processor, and its last bits are the format's significand;
- the other modes, and random words, by adding to the significand before the dropped bits are cut off, in integers;
- "level" formats, whose exponent range is float32's (bfloat16), drop as many bits everywhere.

The formats and the policies are in the parameters (`_plan`). Nothing here knows a format by name.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ._words import (
    GROUP,
    HIDDEN,
    INFINITY,
    MAGNITUDE,
    NEAR,
    Array,
    ask_on,
    compiled,
    draw_words,
    left,
    part,
    real,
    right,
    word,
)

TILE = 1 << 11  # elements for which random words are drawn ahead: both fit the first-level cache


class Steps(NamedTuple):
    """The lattice of a format, as int32 words. Exponents are as in the bits of a float32: biased, moved up by 23.

    ``emin``: of the smallest normal number. ``limit``: bits of a number beyond the largest, which stands for all
    such. ``mantissa``: bits of it. ``lift``: 23 less these, moved up by 23. ``low``: bits of the quantum below
    ``2**emin``, where numbers are its multiples. ``low_drop``: how many bits are dropped there, counted from
    emin's place. ``flush``: how far a significand from there moves to be a code. ``first``: what code 0 stands
    above zero's.
    """

    emin: int
    limit: int
    mantissa: int
    lift: int
    low: int
    low_drop: int
    flush: int
    first: int


class Ends(NamedTuple):
    """What becomes of what is no ordinary number, for results of one kind: bits of float32 numbers, or codes.

    Pairs are for numbers without and with the sign bit. ``most``: the largest magnitude; what is above becomes
    ``over``. ``infinite``, ``nan``. ``least``: the smallest magnitude. ``sign``: bits that a negative result takes
    on; ``invert``, ``negate``: -1 for the codes of two's complement. ``mask``: a code's bits. ``zero``: -1, or 0
    where zero has no sign. ``shift``: added to a code before it is cut to its bits.
    """

    most: tuple[int, int]
    over: tuple[int, int]
    infinite: tuple[int, int]
    nan: tuple[int, int]
    least: int
    sign: int
    negate: int
    mask: int
    zero: int
    offset: int


class Mode(NamedTuple):
    """A way to round in integers: what is added to a significand of which ``last`` is the largest dropped part.

    ``((last + (odd & ties) + more) >> half) & up``, ``up`` for numbers without and with the sign bit, and only
    to significands that are even where ``odd_stays`` is 0.
    """

    ties: int = 0
    more: int = 0
    half: int = 0
    up: tuple[int, int] = (-1, -1)
    odd_stays: int = -1


MODES = {
    "nearest_even": Mode(ties=1, half=1),
    "nearest_away": Mode(more=1, half=1),
    "nearest_zero": Mode(half=1),
    "toward_zero": Mode(up=(0, 0)),
    "up": Mode(up=(-1, 0)),
    "down": Mode(up=(0, -1)),
    "to_odd": Mode(odd_stays=0),
}


class Draw(NamedTuple):
    """Random rounding with some bits of a word: the significand goes up where its dropped part, as a fraction of
    them, and the word together pass 1; a carry out of that sum is the rounding.

    ``mask``: the word's bits that count. Above ``2**emin``: ``shift``, that moves them to the dropped bits, less 1, and
    ``half``, that rounds a threshold (0 where it is cut). Below it, where a fraction has 24 bits: ``per``, the bits
    of one over the quantum, and ``low_half``. ``rest``: of a number all but the dropped bits, of a code what to take
    away for the smallest normal number to be itself.
    """

    mask: int
    shift: int
    half: int
    per: int
    low_half: int
    rest: int


def words_of(*parts: Any) -> Array:
    """The fields of some parameters one after the other, as int32."""
    flat: list[int] = []
    for fields in parts:
        for value in fields:
            flat += value if isinstance(value, tuple) else [value]
    return np.array([v - (1 << 32) if v >> 31 == 1 else v for v in flat], np.int64).astype(np.int32)


@part
def _span(
    bits: Array, out: Array, words: Array, p: Array, nearest: bool, random: bool, level: bool, codes: bool
) -> None:
    """Numbers (int32 words) to numbers or codes. The choices are constants where this is called, and nothing that
    is not chosen is left of it."""
    emin, limit, mantissa, lift, low, low_drop, flush, first = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]
    most, most_n, over, over_n, inf, inf_n, nan, nan_n = p[8], p[9], p[10], p[11], p[12], p[13], p[14], p[15]
    least, sign, negate, mask, zero, offset = p[16], p[17], p[18], p[19], p[20], p[21]
    m0, m1, m2, m3, m4, m5 = p[22], p[23], p[24], p[25], p[26], p[27]
    drop0 = np.int32(np.int32(23) - mantissa)
    for i in range(bits.size):
        u = bits[i]
        negative = u < 0
        magnitude = np.int32(u & MAGNITUDE)
        a = min(magnitude, limit)
        # k: the rounded magnitude's significand and exponent, as float32 bits or as a code
        if nearest:
            e = np.int32(a & INFINITY)
            below = e < emin
            c = np.int32(low + np.int32(23 << 23)) if below else np.int32(e + lift)
            total = real(a) + real(c)
            if codes:
                k = np.int32(word(total) - c)
                up = right(np.int32(e - emin), drop0)
                k = np.int32((left(k, flush) if below else np.int32(k + up)) - first)
            else:
                k = word(total - real(c))
        elif random:
            w = np.int32(words[i] & m0)
            k = np.int32(np.int32(a + right(right(w, np.int32(1)), m1)) + m2)
            k = np.int32(right(k, drop0) - m5) if codes else np.int32(k & m5)
            if not level:
                # below, a fixed point of 24 bits: more bits of a number do not move its threshold
                below = a < emin
                share = real(a) * real(m3)
                floor = np.int32(share)
                rest = np.int32((share - np.float32(floor)) * np.float32(1 << 24))
                rest = np.int32(np.int32(rest + right(w, np.int32(8))) + m4)
                kept = np.int32(floor + right(rest, np.int32(24)))
                k_low = left(kept, flush) if codes else word(np.float32(kept) * real(low))
                k = k_low if below else k
            if codes:
                k = np.int32(k - first)
        else:
            e = max(np.int32(a & INFINITY), HIDDEN)
            if level:
                below, drop, significand = False, drop0, a
            else:
                below = a < emin
                drop = np.int32(right(np.int32(emin - e), np.int32(23)) + low_drop) if below else drop0
                drop = min(drop, np.int32(25))
                significand = np.int32(np.int32(a - e) + HIDDEN)
            last = np.int32(left(np.int32(1), drop) - np.int32(1))
            odd = np.int32(right(significand, drop) & np.int32(1))
            more = right(np.int32(np.int32(last + np.int32(odd & m0)) + m1), m2)
            more = np.int32(more & (m4 if negative else m3))
            more = np.int32(more & np.int32(np.int32(odd - np.int32(1)) | m5))
            kept = right(np.int32(significand + more), drop)
            if codes:
                up = np.int32(0) if level else right(np.int32(e - emin), drop0)
                k = np.int32((left(kept, flush) if below else np.int32(kept + up)) - first)
            elif level:
                k = left(kept, drop)
            else:
                q = low if below else np.int32(np.int32(e + lift) - np.int32(23 << 23))
                k = word(np.float32(kept) * real(q))
        k = max(k, least)
        if codes:
            s = np.int32(-1) if negative else np.int32(0)
            r = np.int32(np.int32(np.int32(k ^ np.int32(s & negate)) - np.int32(s & negate)) ^ np.int32(s & sign))
            r = np.int32(np.int32(r + offset) & mask)
        else:
            r = np.int32(k | np.int32(u & sign))
        r = r if k != 0 else np.int32(r & zero)
        o = over_n if negative else over
        o = (inf_n if negative else inf) if magnitude == INFINITY else o
        r = o if k > (most_n if negative else most) else r
        r = (nan_n if negative else nan) if magnitude > INFINITY else r
        out[i] = r


@cache
def rounder(way: str, level: bool, codes: bool) -> Any:
    """The loop ``round(x, out, p)`` for a ``way``: "nearest", "mode" or "random" (which takes the linear index of
    x's first element and the two words of the seed too); ``p`` as `words_of` Steps, Ends and Mode or Draw.

    x and out are one-dimensional and contiguous and do not overlap.
    """
    # what a loop closes over is part of its name on disk: plain values, no other loop
    nearest, random = way == "nearest", way == "random"

    if random:

        @compiled
        def draw(x: Array, out: Array, p: Array, start: int, k0: int, k1: int) -> None:
            target = out if codes else out.view(np.int32)
            words = np.empty(TILE + 2 * GROUP, np.uint32)
            bits = x.view(np.int32)
            for i in range(0, x.size, TILE):
                n = min(TILE, x.size - i)
                for j in range(0, TILE, NEAR):
                    ask_on(bits, i + j)
                group, skip = divmod(start + i, GROUP)
                draw_words(words, group, (skip + n + GROUP - 1) // GROUP, k0, k1)
                _span(
                    bits[i : i + n],
                    target[i : i + n],
                    words[skip : skip + n].view(np.int32),
                    p,
                    nearest,
                    random,
                    level,
                    codes,
                )

        return draw

    @compiled
    def plain(x: Array, out: Array, p: Array) -> None:
        target = out if codes else out.view(np.int32)
        bits = x.view(np.int32)
        for i in range(0, x.size, NEAR):
            ask_on(bits, i)
            near = bits[i : i + NEAR]
            _span(near, target[i : i + NEAR], near, p, nearest, random, level, codes)

    return plain
