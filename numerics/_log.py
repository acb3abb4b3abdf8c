"""Logarithmic numbers: a sign, and the logarithm of the magnitude in fixed point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ._float import check


@dataclass(frozen=True)
class Log:
    """A logarithmic number: ``2**(u / 2**fraction - bias)`` for the code ``u`` of ``integer + fraction`` bits.

    >>> fmt = Log(integer=4, fraction=3)
    >>> fmt.bits, str(fmt), round(fmt.max, 3), fmt.min_positive
    (8, 'log4.3', 469.506, 0.008519591661447326)
    >>> import numpy as np
    >>> from ._cast import cast
    >>> cast(np.float32([1.0, 3.0, -3.0, 0.0]), fmt)
    array([ 1.       ,  3.0844216, -3.0844216,  0.       ], dtype=float32)

    The code is ``sign | integer | fraction``; ``u = 0`` is zero, with either sign. Magnitudes are irrational
    but for whole logarithms: a code decodes to the float32 or float64 nearest to it. ``bias`` is
    ``2**(integer - 1) - 1`` unless given (0 without integer bits), so that 1 is a number of the format.

    Nearest is nearest in the logarithm, as hardware has it: ``u = round(log2|x| * 2**fraction + bias *
    2**fraction)``, held between 0 and the largest code, so the relative error is even over the range, and what
    is less than half a step below the smallest number becomes it. The border between two codes is the
    geometric mean of their magnitudes, irrational: there are no ties. Directed roundings compare with the
    magnitudes themselves; `to_odd` goes by the code. There is no NaN and no infinity. Stochastic rounding is
    refused: the share of an irrational step has no exact value.

    Raises ValueError for fields out of range: at most 16 bits, 10 of them after the point, and numbers of float64.
    Sources: Swartzlander and Alexopoulos, "The sign/logarithm number system" (1975); Miyashita et al.,
    "Convolutional neural networks using logarithmic data representation" (2016).
    """

    integer: int
    fraction: int = 0
    bias: int = None  # type: ignore[assignment]  # None becomes the middle of the integer field below
    signed: bool = True

    def __post_init__(self) -> None:
        i, f = self.integer, self.fraction
        check(i >= 0 and 0 <= f <= 10, f"Log needs integer >= 0 and 0 <= fraction <= 10, got {i} and {f}")
        check(i + f >= 1 and self.bits <= 16, f"logarithmic numbers have 1 to 16 bits here, got {self.bits}")
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (i - 1) - 1 if i else 0)
        check(i <= 11 and self.top < 1024 and -self.bias >= -1022, f"{self!r} has numbers that float64 has not")

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.integer + self.fraction + self.signed

    @property
    def max_code(self) -> int:
        """The largest number's code, without sign."""
        return 2 ** (self.integer + self.fraction) - 1

    @property
    def top(self) -> Fraction:
        """The largest logarithm."""
        return Fraction(self.max_code, 2**self.fraction) - self.bias

    @property
    def max(self) -> float:
        """Largest number, as the nearest float64."""
        return nearest_float(self.root(self.max_code), 64)

    @property
    def min_positive(self) -> float:
        """Smallest number above zero, as the nearest float64."""
        return nearest_float(self.root(1), 64)

    def root(self, code: int | Fraction) -> Root:
        """The magnitude of a code above zero, or of a place between codes (a whole number of halves)."""
        twice = int(2 * code) - (self.bias << (self.fraction + 1))
        return Root(twice, self.fraction + 1)


class Root(NamedTuple):
    """The number ``2**(power / 2**degree)``, or its negative."""

    power: int
    degree: int
    negative: bool = False

    @property
    def whole(self) -> int:
        """floor of the logarithm."""
        return self.power >> self.degree

    @property
    def rational(self) -> Fraction | None:
        """The value where it is rational, which is where the logarithm is whole."""
        if self.power & ((1 << self.degree) - 1):
            return None
        return (-1 if self.negative else 1) * Fraction(2) ** self.whole

    def floor(self, places: int) -> int:
        """floor of the magnitude over ``2**places``.

        >>> Root(1, 1).floor(-20), math.isqrt(2 << 40)          # the square root of 2
        (1482910, 1482910)
        """
        return _floor(self.power & ((1 << self.degree) - 1), self.whole - places, self.degree)


@lru_cache(maxsize=1 << 14)
def _floor(residue: int, shift: int, degree: int) -> int:
    """floor(2**(residue / 2**degree + shift)): that of a nested root is the nested floor of roots."""
    if shift < 0:
        return 0
    n = 1 << (residue + (shift << degree))
    for _ in range(degree):
        n = math.isqrt(n)
    return n


def nearest_float(x: Root, wide: int) -> float:
    """The float32 or float64 nearest to the magnitude, ties (where it is rational) to even."""
    mantissa, emin = (23, -126) if wide == 32 else (52, -1022)
    places = max(x.whole, emin) - mantissa
    exact = x.rational
    # what is irrational never lies halfway between two floats
    n = (x.floor(places - 1) + 1) >> 1 if exact is None else round(abs(exact) / Fraction(2) ** places)
    value = math.ldexp(n, places)
    return value if wide == 64 or value < 2.0**128 else math.inf
