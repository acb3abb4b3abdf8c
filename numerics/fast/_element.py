"""Compiled loops over the elements of blocks, under the scales that `_block` found.

Elements are rounded to nearest from ``|x| * r`` in float32, ``r`` the reciprocal of the divisor: off by at most
``2**-23`` of it. Where that might matter, as the product is that near to the middle between two numbers of the
element, the whole block is done again by division in float64. That is exact: a divisor has at most 45 bits and a
middle at most 7 less than float64's 53 together with it, so that a quotient which is no middle is told from it.
A power of two has an exact reciprocal and needs none of this.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ._block import amaxes, ranges, scales, spans
from ._block import points as zero_points
from ._lanes import LANES, any_of, choose, flags, floats, ints, load, most, reals, shift_right, store, whole, words
from ._words import INFINITY, MAGNITUDE, Array, apart, compiled, left, long_real, long_word, part, real, word


class Lattice(NamedTuple):
    """An element's numbers, as int32 words, as in `_round.Steps` and `Ends`."""

    emin: int
    lift: int
    low: int
    mantissa: int
    most_code: tuple[int, int]
    over_code: tuple[int, int]
    nan_code: tuple[int, int]
    code_sign: int
    negate: int
    mask: int
    zero: int
    offset: int


class Range(NamedTuple):
    """Of an element, float32. ``low``, ``high``: the lowest and highest number, held to where ``clip`` is 1.0;
    ``limit``: a number beyond both. ``zero``: 0.0 where zero has no sign, else -0.0. ``tie``: what is added to a
    number to round it, times this, is the least distance at which the product with a reciprocal is not trusted."""

    low: float
    high: float
    limit: float
    zero: float
    tie: float
    tensor: float
    steps: float


@part
def in_lanes(u: Any, r: Any, s: Any, z: Any, c: Any, codes: bool, exact: bool, points: bool, plain: bool) -> Any:
    """Results of 16 numbers, and which of them are not to be trusted."""
    emin, lift, drop, largest, largest_n, over, over_n, code_sign, negate, mask, zero, offset = c[0]
    lowest, highest, limit, no_zero, tie, tensor, steps = c[1]
    magnitude, sign, field, nothing = c[2]
    q = reals(u & magnitude) * r
    q = choose(q > limit, limit, q)
    e = most(words(q) & field, emin)
    added = e + lift
    total = q + reals(added)
    v = total - reals(added)
    near = nothing < nothing if exact else reals(words(q - v) & magnitude) >= reals(added) * tie
    if codes and not points:
        k = words(total) - added + shift_right(e - emin, drop)
        negative = u < nothing
        m = choose(negative, negate, nothing)
        o = ((k ^ m) - m) ^ choose(negative, code_sign, nothing)
        o = (o + offset) & mask
        o = choose(k == nothing, o & zero, o)
        if plain:
            return o, near
        return choose(k > choose(negative, largest_n, largest), choose(negative, over_n, over), o), near
    w = reals(words(v) | (u & sign))
    if plain:
        return words(w * s * tensor), near
    if points:
        w = w + z
    w = choose(w < lowest, lowest, w)
    w = choose(w > highest, highest, w)
    if codes:
        return (whole(w * steps) + offset) & mask, near
    if points:
        w = w - z
    return words((w + no_zero) * s * tensor), near


@part
def constants(p: Array, f: Array) -> Any:
    """The parameters in all lanes."""
    drop = np.int32(np.int32(23) - p[3])
    codes_ = (ints(p[4]), ints(p[5]), ints(p[6]), ints(p[7]), ints(p[10]), ints(p[11]), ints(p[12]), ints(p[13]))
    lattice = (ints(p[0]), ints(p[1]), drop, *codes_, ints(p[14]))
    bounds = (floats(f[0]), floats(f[1]), floats(f[2]), floats(f[3]), floats(f[4]), floats(f[5]), floats(f[6]))
    return lattice, bounds, (ints(MAGNITUDE), ints(np.int32(~MAGNITUDE)), ints(INFINITY), ints(np.int32(0)))


@apart
def _again(
    bits: Array,
    out: Array,
    start: int,
    stop: int,
    d: float,
    s: float,
    z: float,
    p: Array,
    f: Array,
    codes: bool,
    points: bool,
) -> None:
    """`in_lanes` one by one, by division in float64; also of a block whose scale is NaN."""
    low, mantissa = p[2], p[3]
    largest, largest_n, over, over_n, nan, nan_n = p[4], p[5], p[6], p[7], p[8], p[9]
    code_sign, negate, mask, zero, offset = p[10], p[11], p[12], p[13], p[14]
    lowest, highest, limit, no_zero, t, steps = f[0], f[1], f[2], f[3], f[5], f[6]
    quantum = np.float64(real(low))
    m = np.int64(mantissa)
    for i in range(start, stop):
        u = bits[i]
        negative = u < 0
        q = np.float64(real(np.int32(u & MAGNITUDE))) / d if d != 0 else 0.0
        q = np.float64(limit) if q > limit else q
        e = np.int64(long_word(q) & np.int64(0x7FF0000000000000))
        per = np.int64(e - (m << np.int64(52)))
        per = max(long_word(quantum), per)
        c = np.int64(per + np.int64(52 << 52))
        total = q + long_real(c)
        v = total - long_real(c)
        if codes and not points:
            k = np.int32(np.int64(long_word(total) - c) + ((per - long_word(quantum)) >> (np.int64(52) - m)))
            o = np.int32(k | code_sign) if negative else k
            if negate != 0 and negative:
                o = np.int32(-k)
            o = np.int32(np.int32(o + offset) & mask)
            if k == 0:
                o = np.int32(o & zero)
            if k > (largest_n if negative else largest):
                o = over_n if negative else over
            if d != d:
                o = nan_n if negative else nan
            out[i] = o
        else:
            w = np.float32(v)
            w = real(np.int32(word(w) | np.int32(u & np.int32(~MAGNITUDE))))
            if points:
                w = w + z
            w = lowest if w < lowest else w
            w = highest if w > highest else w
            if codes:
                out[i] = np.int32(np.int32(np.int32(w * steps) + offset) & mask) if d == d else np.int32(0)
            else:
                if points:
                    w = w - z
                out[i] = word((w + no_zero) * s * t) if d == d else np.int32(0x7FC00000)


@apart
def careful(
    bits: Array,
    out: Array,
    n: int,
    size: int,
    scale: Array,
    unit: Array,
    inverse: Array,
    point: Array,
    p: Array,
    f: Array,
    codes: bool,
    exact: bool,
    points: bool,
    plain: bool,
) -> None:
    """All blocks, with a second look at lanes that are not to be trusted."""
    c = constants(p, f)
    start, end = 0, n
    for b in range(scale.size):
        stop = min(start + size, end)
        s, r = scale[b], inverse[b]
        z = point[b] if points else np.float32(0)
        i = start
        while r > 0 and i + LANES <= stop:
            o, near = in_lanes(load(bits, i), floats(r), floats(s), floats(z), c, codes, exact, points, plain)
            if any_of(near):
                _again(bits, out, i, i + LANES, unit[b], s, z, p, f, codes, points)
            else:
                store(out, i, o)
            i += LANES
        _again(bits, out, i, stop, unit[b], s, z, p, f, codes, points)
        start = stop
        end += n if stop == end else 0


@part
def _nearest(
    x: Array,
    out: Array,
    n: int,
    size: int,
    scale: Array,
    unit: Array,
    inverse: Array,
    point: Array,
    p: Array,
    f: Array,
    codes: bool,
    exact: bool,
    points: bool,
    plain: bool,
) -> None:
    """`nearest`, whose choices are constants, so that nothing that is not chosen is left of it."""
    bits = x.view(np.int32)
    if size % LANES != 0 or n % size != 0:
        careful(bits, out, n, size, scale, unit, inverse, point, p, f, codes, exact, points, plain)
        return
    c = constants(p, f)
    doubts = np.empty(x.size // LANES, np.uint16)
    start, doubtful = 0, False
    for b in range(scale.size):
        r = inverse[b]
        doubtful |= not r > 0
        reciprocal, factor = floats(r), floats(scale[b])
        zero = floats(point[b] if points else np.float32(0))
        for i in range(start, start + size, LANES):
            o, near = in_lanes(load(bits, i), reciprocal, factor, zero, c, codes, exact, points, plain)
            store(out, i, o)
            if not exact:
                doubts[i // LANES] = flags(near)
                doubtful |= any_of(near)
        start += size
    if doubtful:
        start = 0
        for b in range(scale.size):
            bad = not inverse[b] > 0
            z = point[b] if points else np.float32(0)
            for i in range(start, start + size, LANES):
                if bad or (not exact and doubts[i // LANES] != 0):
                    _again(bits, out, i, i + LANES, unit[b], scale[b], z, p, f, codes, points)
            start += size


@cache
def nearest(codes: bool, exact: bool, points: bool, plain: bool) -> Any:
    """The loop ``nearest(x, out, n, size, scale, unit, inverse, point, p, f)``: ``out`` = the elements, nearest
    even, times their scales (the bits, int32) or their codes. ``exact``: reciprocals are powers of two. ``points``:
    about zero points ``point`` [blocks]; else that array is not read. ``plain``: the range is the same on both
    sides of a zero with sign, and ``limit`` its end."""

    @compiled
    def run(
        x: Array,
        out: Array,
        n: int,
        size: int,
        scale: Array,
        unit: Array,
        inverse: Array,
        point: Array,
        p: Array,
        f: Array,
    ) -> None:
        _nearest(x, out, n, size, scale, unit, inverse, point, p, f, codes, exact, points, plain)

    return run


_STEP = 1 << 11  # elements whose blocks are done together: they and their scales stay in the first-level cache


@part
def _widened(x: Array, out: Array) -> None:
    """The bits of bfloat16 numbers to those of float32."""
    for i in range(x.size):
        out[i] = left(np.int32(x[i]), np.int32(16))


@cache
def blocks(codes: bool, exact: bool, points: bool, plain: bool, short: bool, wide: bool) -> Any:
    """The loop ``blocks(x, out, n, size, k, v, e, p, f, amax, scale, point)``: from numbers to `nearest` with the
    scales on the way, whose codes go to ``scale`` [blocks], and zero points to ``point``, where these are not empty.

    x: float32, or where not ``wide`` the bits of bfloat16. ``plain``, ``short``: as in `nearest`, `scales`.
    ``k``, ``v``: `ScaleSteps` and `ScaleValues`; ``e``: an integer element's lowest and highest, and integers to
    one; ``amax`` (float32): of each block, where not empty.
    """

    @compiled
    def run(
        x: Array,
        out: Array,
        n: int,
        size: int,
        k: Array,
        v: Array,
        e: Array,
        p: Array,
        f: Array,
        amax: Array,
        scale: Array,
        point: Array,
    ) -> None:
        per = (n + size - 1) // size
        step = max(1, min(_STEP // size, per))
        top, low = np.empty(step, np.float64 if points else np.float32), np.empty(step if points else 0)
        code, factor = np.empty(step, scale.dtype), np.empty(step, np.float32)
        unit, inverse, zero = np.empty(step), np.empty(step, np.float32), np.empty(step, np.float32)
        room = np.empty(0 if wide else step * size, np.float32)
        b = 0
        for start in range(0, x.size, n):
            for j in range(0, per, step):
                at, stop = start + j * size, min(start + (j + step) * size, start + n)
                m = min(step, per - j)
                if wide:
                    piece = x[at:stop]
                else:
                    piece = room[: stop - at]
                    _widened(x[at:stop], piece.view(np.int32))
                if points:
                    ranges(piece, piece.size, size, top[:m], low[:m])
                    spans(top[:m], low[:m], top[:m])
                elif not amax.size:
                    amaxes(piece, piece.size, size, top[:m])
                most = amax[b : b + m] if amax.size else top[:m]
                scales(most, k, v, code[:m], factor[:m], unit[:m], inverse[:m], short)
                if points:
                    zero_points(low[:m], unit[:m], e[0], e[1], e[2], zero[:m])
                shared = factor[:m], unit[:m], inverse[:m], zero[:m], p, f
                _nearest(piece, out[at:stop], piece.size, size, *shared, codes, exact, points, plain)
                if scale.size:
                    scale[b : b + m] = code[:m]
                    if points:
                        point[b : b + m] = zero[:m]
                b += m

    return run


@cache
def finite_amax(wide: bool) -> Any:
    """The loop ``finite_amax(x, n, size, amax)``: the largest magnitude of the blocks without NaN and infinity;
    ``amax`` [blocks] float32 = that of each, where it is not empty."""

    @compiled
    def run(x: Array, n: int, size: int, amax: Array) -> float:
        per = (n + size - 1) // size
        step = max(1, min(_STEP // size, per))
        tops = np.empty(step, np.float32)
        room = np.empty(0 if wide else step * size, np.float32)
        top = np.int32(0)
        b = 0
        for start in range(0, x.size, n):
            for j in range(0, per, step):
                at, stop = start + j * size, min(start + (j + step) * size, start + n)
                m = min(step, per - j)
                if wide:
                    piece = x[at:stop]
                else:
                    piece = room[: stop - at]
                    _widened(x[at:stop], piece.view(np.int32))
                most = amax[b : b + m] if amax.size else tops[:m]
                amaxes(piece, stop - at, size, most)
                bits = most.view(np.int32)
                for i in range(m):
                    top = max(top, bits[i] if bits[i] < INFINITY else np.int32(0))
                b += m
        return real(top)

    return run
