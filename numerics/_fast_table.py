"""Any scalar format of at most 16 bits by table: float32 numbers are cut at its thresholds, to the bit.

A format with a policy is a function of a number's 32 bits that changes only at few places. The array text itself
says where: it rounds both ends of every cell of numbers with the same high bits, and where these differ the
places between are found by halving. So the tables know nothing of formats and cannot disagree with the text. A
rounding never goes back while a number grows, so that a cell with equal ends is all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ._fast_words import Array, compiled

_SHIFT = 16  # the bits under a cell's


@dataclass(frozen=True, eq=False)
class Table:
    """``codes`` and ``values`` (float32 bits) of the stretches of numbers between thresholds, in the order of their
    bits; ``cuts``: the last number of each stretch. ``cells``, by a number's high bits: the first stretch in it,
    and below that 32 bits, the last number of that stretch. ``depth``: halvings that find the stretch in a cell
    where there are more than two."""

    codes: Array
    values: Array
    cuts: Array
    cells: Array
    depth: int
    bits: int


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
    first = np.arange(1 << (32 - _SHIFT), dtype=np.uint64) << np.uint64(_SHIFT)
    last = first + np.uint64((1 << _SHIFT) - 1)
    start = np.searchsorted(cuts, first.astype(np.uint32), side="left").astype(np.uint64)
    stop = np.searchsorted(cuts, last.astype(np.uint32), side="left").astype(np.uint64)
    cut = cuts[start.astype(np.int64)].astype(np.uint64)
    cells = (start << np.uint64(32)) | cut
    most = int((stop - start).max())
    depth = 0 if most <= 1 else most.bit_length()
    narrow = codes.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    values = np.asarray(decode(narrow)).view(np.int32)
    padded = np.append(cuts, np.full(1 << depth, 0xFFFFFFFF, np.uint32)) if depth else cuts
    return Table(codes.astype(np.int32), values.copy(), padded, cells, depth, bits)


@compiled
def look_up(x: Array, out: Array, cells: Array, results: Array) -> None:
    """``out`` = the result of each number, where a cell has two stretches at most."""
    bits = x.view(np.uint32)
    for i in range(x.size):
        u = bits[i]
        cell = cells[np.uint64(u >> np.uint32(16))]
        out[i] = results[np.uint64(np.uint64(cell >> np.uint64(32)) + np.uint64(u > np.uint32(cell)))]


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
