"""Compiled loops over blocks under scales that are powers of two: the scale is a sum of exponents.

The exponent of such a scale is that of the block's largest magnitude, plus a constant, plus one for each of at most
two places in the magnitude's mantissa that it lies beyond: whatever the rule, since rules are scaled by powers of
two as amax is. The places are found by asking `_block.scales`, which also does the blocks at the ends of the
range: zeros, subnormals, infinities and NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ._block import scales
from ._element import careful, constants, in_lanes
from ._lanes import LANES, floats, highest, ints, load, most, shift_left, store
from ._words import MAGNITUDE, Array, compiled, left, real, right

_OCTAVES = (-20, 0, 20)


@cache
def blocks(codes: bool, plain: bool, wide: bool) -> Any:
    """The loop ``blocks(x, out, size, t, k, v, p, f, scale)``: as `_element.blocks`, of whole blocks of a
    multiple of 16 numbers, without zero points; ``t``: the places, as `places` finds them."""

    @compiled
    def run(x: Array, out: Array, size: int, t: Array, k: Array, v: Array, p: Array, f: Array, scale: Array) -> None:
        base, first, second, least, largest, offset = t[0], t[1], t[2], t[3], t[4], t[5]
        c = constants(p, f)
        magnitude, nothing = ints(MAGNITUDE), floats(np.float32(0))
        top, code, factor = np.empty(1, np.float32), np.empty(1, scale.dtype), np.empty(1, np.float32)
        unit, inverse, zero = np.empty(1), np.empty(1, np.float32), np.empty(1, np.float32)
        room = np.empty(0 if wide else size, np.int32)
        bits = x.view(np.int32) if wide else x
        start = 0
        for b in range(x.size // size):
            u = load(bits, start) if wide else shift_left(load(bits, start), np.int32(16))
            high = u & magnitude
            for i in range(start + LANES, start + size, LANES):
                u = load(bits, i) if wide else shift_left(load(bits, i), np.int32(16))
                high = most(high, u & magnitude)
            amax = highest(high)
            field, mantissa = right(amax, np.int32(23)), np.int32(amax & np.int32((1 << 23) - 1))
            s = np.int32(field + base)
            s = np.int32(s + (np.int32(1) if mantissa > first else np.int32(0)))
            s = np.int32(s + (np.int32(1) if mantissa > second else np.int32(0)))
            if field > 0 and field < 255 and s >= least and s <= largest:
                r = floats(real(left(np.int32(np.int32(254) - s), np.int32(23))))
                unit_of = floats(real(left(s, np.int32(23))))
                for i in range(start, start + size, LANES):
                    u = load(bits, i) if wide else shift_left(load(bits, i), np.int32(16))
                    o, _ = in_lanes(u, r, unit_of, nothing, c, codes, True, False, plain)
                    store(out, i, o)
                if scale.size:
                    scale[b] = np.int32(s - offset)
            else:
                top[0] = real(amax)
                scales(top, k, v, code, factor, unit, inverse, False)
                if wide:
                    block = bits[start : start + size]
                else:
                    for i in range(size):
                        room[i] = left(np.int32(x[start + i]), np.int32(16))
                    block = room
                part_of = out[start : start + size]
                careful(block, part_of, size, size, factor, unit, inverse, zero, p, f, codes, True, False, plain)
                if scale.size:
                    scale[b] = code[0]
            start += size

    return run


def places(k: Array, v: Array, dtype: Any) -> Array | None:
    """What `blocks` needs to know of scales with these `ScaleSteps` and `ScaleValues`, whose codes have the dtype: the
    constant, the two places, the exponents (biased, as in float32) between which it holds, and by how much they are
    more than the codes. None if the scales do not go by octaves."""
    found = {tuple(_octave(k, v, dtype, octave)) for octave in _OCTAVES}
    if len(found) != 1:
        return None
    base, first, second, offset = found.pop()
    fields = [int(np.float32(value).view(np.int32)) >> 23 for value in (v[3], v[4])]
    # the reciprocal has to be a normal number too
    return np.array([base, first, second, max(fields[0], 1), min(fields[1], 253), offset], np.int32)


def _octave(k: Array, v: Array, dtype: Any, octave: int) -> tuple[int, int, int, int]:
    def scale(mantissa: int) -> tuple[int, int]:
        a = np.array([np.ldexp(1 + mantissa * 2.0**-23, octave)], np.float32)
        codes, factor, unit, inverse = np.empty(1, dtype), np.empty(1, np.float32), np.empty(1), np.empty(1, np.float32)
        scales(a, k, v, codes, factor, unit, inverse, False)
        return int(factor.view(np.int32)[0]) >> 23, int(codes[0])

    least, code = scale(0)
    found = []
    for step in (1, 2):
        low, high = -1, 1 << 23  # the last mantissa below the place, and one from it on
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if scale(middle)[0] >= least + step else (middle, high)
        found.append(low)
    return least - 127 - octave, found[0], found[1], least - code
