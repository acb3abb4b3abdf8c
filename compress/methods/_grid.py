"""A format as tables for the loops of the rounding methods: its numbers, its scales, and where both round over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...numerics import Block, decode, encode
from ...numerics import format as read_format

_MOST_BITS = 8  # of an element: longer ones gain nothing from these methods
_SCALE_BITS = 16


@dataclass(frozen=True, eq=False)
class Grid:
    """What a block format's elements and scales can be.

    ``values``: the distinct finite numbers of the element, ascending, float64 [v]; ``codes``: a code of each.
    ``scales``: the positive numbers of the scale's format, ascending, float64 [s], empty where there are too many
    to list (float32: any number will do); ``scale_codes``: their codes.
    """

    fmt: Block
    values: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    scale_codes: np.ndarray

    def tensor_scale(self, amax: float) -> float:
        """The second scale of a tensor with this largest magnitude, a float32; 1 where the format has none."""
        if self.fmt.tensor_scale is None or amax == 0:
            return 1.0
        return max(float(np.float32(amax / (self.fmt.scale.max * self.values[-1]))), 2.0**-149)


def _table(fmt: Any) -> tuple[np.ndarray, np.ndarray]:
    codes = np.arange(1 << fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)
    numbers = decode(codes, fmt).astype(np.float64)
    finite = np.isfinite(numbers)
    # of the two zeros the one without a sign
    codes, numbers = codes[finite], numbers[finite]
    values, first = np.unique(numbers, return_index=True)
    return values, codes[first]


@cache
def grid_of(fmt: Block | str) -> Grid:
    """The tables of a block format.

    >>> grid = grid_of("int4:g64")
    >>> grid.values[[0, -1]].tolist(), bool(grid.scales[0] > 0)
    ([-8.0, 7.0], True)

    Raises ValueError for a format that is no block, or whose element has more than 8 bits.
    """
    fmt = read_format(fmt)  # type: ignore[assignment]
    if not isinstance(fmt, Block):
        raise ValueError(f"{fmt} has no scale: give a block format, such as int4:g64 or {fmt}:channel")
    if fmt.element.bits > _MOST_BITS:
        raise ValueError(f"{fmt}: elements of more than {_MOST_BITS} bits are rounded to nearest: use quantize")
    values, codes = _table(fmt.element)
    scales, scale_codes = np.empty(0), np.empty(0, np.uint16)
    if fmt.scale.bits <= _SCALE_BITS:
        scales, scale_codes = _table(fmt.scale)
        scales, scale_codes = scales[scales > 0], scale_codes[scales > 0]
    return Grid(fmt, values, codes, scales, scale_codes)


def scale_codes(grid: Grid, scale: np.ndarray) -> np.ndarray:
    """The codes of scales that are numbers of the format, of any shape."""
    if not len(grid.scales):
        return encode(scale.astype(np.float32), grid.fmt.scale)
    return grid.scale_codes[np.searchsorted(grid.scales, scale)]


def element_codes(grid: Grid, values: np.ndarray) -> np.ndarray:
    """The codes of numbers of the element, of any shape."""
    return grid.codes[np.searchsorted(grid.values, values)]
