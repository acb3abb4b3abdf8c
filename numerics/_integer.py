"""Integers and fixed point: two's complement, sign and magnitude, unsigned, offset."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ._float import check


@dataclass(frozen=True)
class Fixed:
    """Fixed point: an integer times ``2**-fraction``. The integer's code is two's complement.

    >>> Fixed(bits=8, fraction=6).max            # the element of MXINT8
    1.984375
    >>> Fixed(bits=4, fraction=2, sign_magnitude=True)          # the element of MSFP-12
    Fixed(bits=4, fraction=2, signed=True, narrow=False, sign_magnitude=True, offset=0)

    ``signed=False``: unsigned; with ``offset``, the code ``c`` stands for the integer ``c - offset``.
    ``sign_magnitude``: a sign bit above an unsigned magnitude, with both zeros, as floats have them.
    ``narrow=True`` leaves out the most negative code of two's complement, so that the range is symmetric.
    Raises ValueError unless 1 <= bits <= 16, and for fields that contradict each other.
    """

    bits: int
    fraction: int = 0
    signed: bool = True
    narrow: bool = False
    sign_magnitude: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        least = 1 + (self.narrow or self.sign_magnitude)
        check(least <= self.bits <= 16, f"integers have {least} to 16 bits here, got {self.bits}")
        check(self.signed or not self.narrow, "narrow=True is for signed integers")
        check(self.signed or not self.sign_magnitude, "sign_magnitude=True is for signed integers")
        check(not (self.narrow and self.sign_magnitude), "sign and magnitude are symmetric without narrow=True")
        check(
            self.offset == 0 or (not self.signed and 0 < self.offset < 2**self.bits),
            f"offset={self.offset}: a code of an unsigned integer, from 0 to {2**self.bits - 1}",
        )
        check(abs(self.fraction) <= 1000, f"fraction={self.fraction} is beyond float64: -1000 to 1000")

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def low(self) -> int:
        """Smallest integer."""
        if self.signed:
            return -(2 ** (self.bits - 1)) + (self.narrow or self.sign_magnitude)
        return -self.offset

    @property
    def high(self) -> int:
        """Largest integer."""
        return 2 ** (self.bits - self.signed) - 1 - self.offset

    @property
    def max(self) -> float:
        """Largest number."""
        return math.ldexp(self.high, -self.fraction)

    @property
    def emax(self) -> int:
        """Exponent of the largest number."""
        return self.high.bit_length() - 1 - self.fraction

    @property
    def mantissa(self) -> int:
        """Bits after the leading one in the largest binade."""
        return max(self.high.bit_length() - 1, 0)

    def code(self, integer: int) -> int:
        """The code of an integer of the range.

        >>> Int(4).code(-1), Int(4, sign_magnitude=True).code(-1), Int(8, signed=False, offset=128).code(-1)
        (15, 9, 127)
        """
        if self.sign_magnitude and integer < 0:
            return 2 ** (self.bits - 1) - integer
        return (integer + self.offset) % 2**self.bits


@dataclass(frozen=True)
class Int(Fixed):
    """An integer: ``Fixed`` with no fraction.

    >>> Int(4).low, Int(4).high, Int(8, signed=False).high, Int(1).low, Int(1).high
    (-8, 7, 255, -1, 0)
    >>> Int(8, signed=False, offset=128).low, Int(8, signed=False, offset=128).high      # symmetric uint8
    (-128, 127)
    """

    fraction: int = field(default=0, init=False)
