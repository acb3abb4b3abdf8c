"""Posits: numbers whose exponent and fraction share the bits that the regime leaves."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ._float import check


@dataclass(frozen=True)
class Posit:
    """A posit of 2 to 16 bits with ``es`` exponent bits.

    >>> Posit(8).max, Posit(8).min_positive, str(Posit(16)), str(Posit(8, es=0))
    (16777216.0, 5.960464477539063e-08, 'posit16', 'posit8es0')
    >>> Posit(8).value(0b01001010), Posit(8).value(0x80)          # the second is NaR, not a real
    (Fraction(5, 2), None)

    Codes are two's complement and ascend with their values; the sign of a code apart, its bits are the regime,
    a run of ``r`` equal bits ended by another (``k = r - 1`` for ones, ``-r`` for zeros), then at most ``es``
    bits of exponent ``e`` (bits cut off are zero) and the fraction ``f``: ``2**(k * 2**es + e) * (1 + f)``.
    There is one zero and one NaR, where NaN and, unless they saturate, infinities go.

    Rounding works on bit strings, as the standard has it: the border between neighbours is the posit of one
    more bit between them, a tie goes to the even code, and no number but zero becomes zero or NaR: what is too
    large or too small takes the last or first code, whatever the rounding. Directed roundings, `to_odd` and
    `Stochastic` (whose odds are linear in the value) choose between the same neighbours.

    Raises ValueError for other widths, and where the range is beyond float64. Source: Posit Working Group,
    Standard for Posit Arithmetic (2022), sections 3.2 to 4.1, where es is 2; es = 0 and 1 are earlier drafts'.
    """

    bits: int
    es: int = 2

    def __post_init__(self) -> None:
        check(2 <= self.bits <= 16, f"posits have 2 to 16 bits here, got {self.bits}")
        check(self.es >= 0, f"a posit has es >= 0 exponent bits, got {self.es}")
        check((self.bits - 2) << self.es <= 1022, f"Posit(bits={self.bits}, es={self.es}) goes beyond float64")

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def nan_code(self) -> int:
        """NaR."""
        return 2 ** (self.bits - 1)

    @property
    def max_code(self) -> int:
        """The largest number's code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def max(self) -> float:
        """Largest number."""
        return 2.0 ** ((self.bits - 2) << self.es)

    @property
    def min_positive(self) -> float:
        """Smallest number above zero."""
        return 1 / self.max

    def value(self, code: int) -> Fraction | None:
        """The exact value of a code; None for NaR."""
        if code == self.nan_code:
            return None
        if code > self.nan_code:
            return -posit_value(2**self.bits - code, self.bits, self.es)
        return posit_value(code, self.bits, self.es)


def posit_value(code: int, bits: int, es: int) -> Fraction:
    """The value of a code below ``2**(bits - 1)``.

    >>> posit_value(0b0110, 4, 2), posit_value(0b01101, 5, 2)          # the latter lies between 16 and 256
    (Fraction(16, 1), Fraction(64, 1))
    """
    if code == 0:
        return Fraction(0)
    rest = bits - 1
    first = code >> (rest - 1)
    # the run ends at the first bit that differs: the leading one of the code, or of its complement
    differs = (code ^ (2**rest - 1) if first else code).bit_length()
    run = rest - differs
    rest = max(differs - 1, 0)
    tail = code & (2**rest - 1)
    exponent_bits = min(es, rest)
    rest -= exponent_bits
    exponent = (tail >> rest) << (es - exponent_bits)
    fraction = tail & (2**rest - 1)
    power = ((run - 1 if first else -run) << es) + exponent - rest
    return (2**rest + fraction) * (Fraction(2**power) if power >= 0 else Fraction(1, 2**-power))
