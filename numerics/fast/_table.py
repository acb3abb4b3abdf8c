"""Any scalar format of at most 16 bits by table: float32 numbers are cut at its thresholds, to the bit.

A format with a policy is a function of a number's 32 bits that changes only at few places. The array text itself
says where: it rounds both ends of every cell of numbers with the same high bits, and where these differ the
places between are found by halving. So the tables know nothing of formats and cannot disagree with the text. A
rounding never goes back while a number grows, so that a cell with equal ends is all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ._lanes import choose, ints, load, store
from ._words import Array, compiled

_SHIFT = 16  # the bits under a cell's
_FEW = 20  # stretches that are compared with one by one


@dataclass(frozen=True, eq=False)
class Table:
    """``codes`` and ``values`` (float32 bits) of the stretches of numbers between thresholds, in the order of their
    bits; ``cuts``: the last number of each stretch. ``cells``, by a number's bits but the last ``shift``: the first
    stretch in it, and below that 32 bits, how far the last number of that stretch is from the largest. ``depth``:
    halvings that find the stretch in a cell where there are more than two. ``order``: the stretches in the order of
    the numbers, where there are so few of them that comparing with each is quickest; ``keys``: the `ordered` bits
    at which one ends."""

    codes: Array
    values: Array
    cuts: Array
    cells: Array
    shift: int
    depth: int
    bits: int
    keys: Array
    order: Array


def thresholds(encode: Callable[[Array], Array]) -> tuple[Array, Array]:
    """(last bits, code) of each stretch of equal codes, in the order of the bits of float32 as integers."""
    step = np.uint64(1 << _SHIFT)
    first = np.arange(1 << (32 - _SHIFT), dtype=np.uint64) * step

    def code(bits: Array) -> Array:
        return np.asarray(encode(bits.astype(np.uint32).view(np.float32))).astype(np.int64)

    at, last = first, first + step - np.uint64(1)
    here, end = code(at), code(last)
    found_bits, found_codes = [last], [end]
    while True:
        more = here != end
        at, last, here, end = at[more], last[more], here[more], end[more]
        if not at.size:
            break
        low, high = at, last  # code(low) == here != code(high)
        while (high - low > 1).any():
            middle = (low + high) >> np.uint64(1)
            same = code(middle) == here
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        found_bits.append(low)
        found_codes.append(here)
        at, here = high, code(high)
    bits, codes = np.concatenate(found_bits), np.concatenate(found_codes)
    order = np.argsort(bits)
    bits, codes = bits[order], codes[order]
    ends = np.append(codes[1:] != codes[:-1], True)
    return bits[ends].astype(np.uint32), codes[ends]


def table(encode: Callable[[Array], Array], decode: Callable[[Array], Array], bits: int) -> Table:
    """The table of a rounding: ``encode`` of float32 numbers to codes, ``decode`` of codes to float32."""
    cuts, codes = thresholds(encode)
    # as few cells as there may be, since they share the cache with the numbers
    shift, start, most = next(
        found for found in map(partial(_cells, cuts), range(23, 15, -1)) if found[2] <= 1 or found[0] == 16
    )
    cells = (start << np.uint64(32)) | (np.uint64(0xFFFFFFFF) - cuts[start.astype(np.int64)].astype(np.uint64))
    depth = 0 if most <= 1 else most.bit_length()
    narrow = codes.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    values = np.asarray(decode(narrow)).view(np.int32)
    padded = np.append(cuts, np.full(1 << depth, 0xFFFFFFFF, np.uint32)) if depth else cuts
    keys, order = _in_order(cuts)
    return Table(codes.astype(np.int32), values.copy(), padded, cells, shift, depth, bits, keys, order)


def _cells(cuts: Array, shift: int) -> tuple[int, Array, int]:
    """``shift``, the first stretch of each cell of numbers that differ in their last ``shift`` bits alone, and the most
    ends of stretches in a cell."""
    first = np.arange(1 << (32 - shift), dtype=np.uint64) << np.uint64(shift)
    last = first + np.uint64((1 << shift) - 1)
    start, stop = (np.searchsorted(cuts, bits.astype(np.uint32), side="left") for bits in (first, last))
    return shift, start.astype(np.uint64), int((stop - start).max())


def _in_order(cuts: Array) -> tuple[Array, Array]:
    """The stretches between cuts in the order of the numbers, not of their bits, and where each but the last ends."""
    if len(cuts) > _FEW:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    first = np.append(np.uint32(0), cuts[:-1] + np.uint32(1))
    # one stretch may go on from positive numbers to negative ones, which run the other way
    both = (first >> 31 != cuts >> 31).nonzero()[0]
    parts = [(int(a), int(b), i) for i, (a, b) in enumerate(zip(first, cuts)) if i not in both]
    parts += [part for i in both for part in ((int(first[i]), 2**31 - 1, i), (2**31, int(cuts[i]), i))]
    ends = sorted((b if b < 2**31 else (a ^ 0x7FFFFFFF) - 2**32, i) for a, b, i in parts)
    return np.array([end for end, _ in ends[:-1]], np.int32), np.array([i for _, i in ends])


@compiled
def look_up(x: Array, out: Array, cells: Array, shift: int, results: Array) -> None:
    """``out`` = the result of each number, where a cell has two stretches at most."""
    bits, cut = x.view(np.uint32), np.uint64(shift)
    for i in range(x.size):
        u = np.uint64(bits[i])
        # what is beyond the first stretch carries into the number of the next
        out[i] = results[np.uint64(np.uint64(cells[np.uint64(u >> cut)] + u) >> np.uint64(32))]


@compiled
def compare(x: Array, out: Array, keys: Array, results: Array) -> None:
    """`look_up` by comparing with every one of a few keys; ``results`` in the order of the numbers. The last
    elements, less than 64, are left out."""
    bits = x.view(np.int32)
    nothing, magnitude = ints(np.int32(0)), ints(np.int32(0x7FFFFFFF))
    for i in range(0, x.size - 63, 64):
        a, b = load(bits, i), load(bits, i + 16)
        c, d = load(bits, i + 32), load(bits, i + 48)
        a, b = a ^ choose(a < nothing, magnitude, nothing), b ^ choose(b < nothing, magnitude, nothing)
        c, d = c ^ choose(c < nothing, magnitude, nothing), d ^ choose(d < nothing, magnitude, nothing)
        first = ints(results[0])
        p, q, r, s = first, first, first, first
        for j in range(keys.size):
            key, result = ints(keys[j]), ints(results[j + 1])
            p, q = choose(a > key, result, p), choose(b > key, result, q)
            r, s = choose(c > key, result, r), choose(d > key, result, s)
        store(out, i, p)
        store(out, i + 16, q)
        store(out, i + 32, r)
        store(out, i + 48, s)


@compiled
def search(x: Array, out: Array, cells: Array, cuts: Array, depth: int, results: Array) -> None:
    """`look_up` where a cell has more."""
    bits = x.view(np.uint32)
    for i in range(x.size):
        u = bits[i]
        j = np.uint64(cells[np.uint64(u >> np.uint32(16))] >> np.uint64(32))
        step = np.uint64(1) << np.uint64(depth)
        for _ in range(depth):
            step = np.uint64(step >> np.uint64(1))
            # stretches are left behind while the last of them ends below u
            j = np.uint64(j + (step if cuts[np.uint64(j + step - np.uint64(1))] < u else np.uint64(0)))
        out[i] = results[j]


@compiled
def pick(codes: Array, out: Array, values: Array) -> None:
    """``out`` = the value of each code."""
    for i in range(codes.size):
        out[i] = values[np.uint64(codes[i])]
