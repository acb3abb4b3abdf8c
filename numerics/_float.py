"""Binary floating point: any exponent, mantissa, bias and special codes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

NAN_ENCODINGS = ("ieee", "top", "negative_zero")


def check(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Float:
    """A binary floating-point format of at most 32 bits.

    >>> e2m1 = Float(exponent=2, mantissa=1, inf=False, nan=False)
    >>> e2m1.max, e2m1.bits, str(e2m1)
    (6.0, 4, 'e2m1')

    The code of a number is ``sign | exponent field | mantissa field``; a normal number is
    ``2**(field - bias) * (1 + mantissa / 2**m)``. Special codes take the top of the range:

    - ``nan="ieee"``: the whole top exponent is special: infinity at mantissa 0, NaN above it (IEEE 754);
    - ``nan="top"``: only the all-ones magnitude is NaN (the OCP "fn" kind, E4M3FN);
    - ``nan="negative_zero"``: the code of negative zero is NaN (the "fnuz" kind);
    - ``nan=False``: no NaN. ``nan=True`` means "ieee" with infinities and "top" without.

    With ``inf=True`` and another NaN than "ieee", infinity is the highest code left.
    ``subnormal=False``: codes with exponent field 0 are zero. ``zero=False``: exponent field 0 is an
    ordinary binade and the format has no zero (E8M0).
    ``even``: which of two neighbours a tie goes to, and `to_odd` leaves, in a format without mantissa, where
    every significand is odd: "significand", the larger magnitude (IEEE 754), or "code", the one whose code is
    even (P3109). With a mantissa the two are one.

    Raises ValueError where the fields contradict each other. Sources: IEEE 754-2019 sections 3.4 and 4.3.1;
    OCP 8-bit floating point (OFP8) v1.0; OCP Microscaling (MX) v1.0; IEEE P3109 interim report v4.0.
    """

    exponent: int
    mantissa: int
    bias: int = None  # type: ignore[assignment]  # None becomes the IEEE bias below
    signed: bool = True
    subnormal: bool = True
    inf: bool = True
    nan: str | bool = True
    negative_zero: bool = None  # type: ignore[assignment]  # None: wherever the code is free
    zero: bool = True
    even: Literal["significand", "code"] = "significand"

    def __post_init__(self) -> None:
        e, m = self.exponent, self.mantissa
        check(e >= 1 and m >= 0, f"Float needs exponent >= 1 and mantissa >= 0, got exponent={e}, mantissa={m}")
        check(
            self.bits <= (32 if self.signed else 31),
            f"Float of {self.bits} bits: at most 32 signed, 31 unsigned",
        )
        nan = ("ieee" if self.inf else "top") if self.nan is True else self.nan
        check(nan is False or nan in NAN_ENCODINGS, f"nan={nan!r}: choose True, False or one of {NAN_ENCODINGS}")
        check(
            nan != "ieee" or (self.inf and m > 0),
            'nan="ieee" needs inf=True and mantissa >= 1; use nan="top"',
        )
        check(
            nan != "negative_zero" or (self.signed and self.zero),
            'nan="negative_zero" needs a signed zero code',
        )
        check(self.zero or not self.subnormal, "zero=False needs subnormal=False: exponent field 0 is a binade")
        check(self.even in ("significand", "code"), f"even={self.even!r}: choose 'significand' or 'code'")
        if m > 0:
            object.__setattr__(self, "even", "significand")
        free = self.signed and self.zero and nan != "negative_zero"
        negative_zero = free if self.negative_zero is None else self.negative_zero
        check(free or not negative_zero, "negative_zero=True, but the format has no free code for it")
        object.__setattr__(self, "nan", nan)
        object.__setattr__(self, "bias", 2 ** (e - 1) - 1 if self.bias is None else self.bias)
        object.__setattr__(self, "negative_zero", negative_zero)
        check(self.max_code >= 1, f"{self!r} has no finite number besides zero")
        check(
            e <= 11 and self.emax <= 1023 and self.emin - m >= -1074,
            f"Float(exponent={e}, mantissa={m}, bias={self.bias}) has numbers that float64 has not",
        )

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.exponent + self.mantissa + self.signed

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return int(self.zero) - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return (self.max_code >> self.mantissa) - self.bias

    @property
    def nan_code(self) -> int | None:
        """Canonical (quiet) NaN, without sign; None where there is none."""
        top = 2 ** (self.exponent + self.mantissa) - 1
        quiet = top - 2 ** (self.mantissa - 1) + 1 if self.mantissa else top
        return {"ieee": quiet, "top": top, "negative_zero": top + 1, False: None}[self.nan]

    @property
    def inf_code(self) -> int | None:
        """Positive infinity; None where there is none."""
        top = 2 ** (self.exponent + self.mantissa) - 1
        if not self.inf:
            return None
        return {"ieee": top - 2**self.mantissa + 1, "top": top - 1}.get(str(self.nan), top)

    @property
    def max_code(self) -> int:
        """The largest finite number's code, without sign."""
        top = 2 ** (self.exponent + self.mantissa) - 1
        if self.inf_code is not None:
            return self.inf_code - 1
        return top - (self.nan == "top")

    def magnitude(self, code: int) -> Fraction:
        """The exact value of a finite code without its sign; one past the last code is the next value up."""
        field_, mantissa = code >> self.mantissa, code & (2**self.mantissa - 1)
        if field_ == 0 and self.zero:
            return Fraction(mantissa * self.subnormal) * Fraction(2) ** (self.emin - self.mantissa)
        return (2**self.mantissa + mantissa) * Fraction(2) ** (field_ - self.bias - self.mantissa)

    @property
    def max(self) -> float:
        """Largest finite number."""
        return float(self.magnitude(self.max_code))

    @property
    def min_positive(self) -> float:
        """Smallest number above zero."""
        return float(self.magnitude(min_positive_code(self)))


def min_positive_code(fmt: Float) -> int:
    """Code of the smallest number above zero."""
    return 0 if not fmt.zero else 1 if fmt.subnormal and fmt.mantissa else 2**fmt.mantissa


def p3109(k: int, p: int, signed: bool = True, extended: bool = True) -> Float:
    """The P3109 format of ``k`` bits and a precision of ``p`` bits, the leading one counted.

    >>> p3109(8, 3).max, p3109(8, 3).nan_code, p3109(8, 3, extended=False).max
    (49152.0, 128, 57344.0)
    >>> str(p3109(8, 4)), str(p3109(6, 2, signed=False, extended=False))
    ('binary8p4se', 'binary6p2uf')

    One NaN, where others have -0 (unsigned: the highest code); no -0; infinities below the NaN or at the top
    of the magnitudes in the extended domain; bias ``2**(k - p - 1)`` signed and ``2**(k - p)`` unsigned.
    Overflow and NaN are policies, see `Policy`: SatFinite is "saturate", SatPropagate "saturate_finite".
    Raises ValueError unless k >= 3 and 1 <= p < k (<= k unsigned), and for numbers beyond float64.
    Source: IEEE SA P3109 interim report v4.0 (2026), sections 3.1 and 4.7; a draft.
    """
    check(k >= 3, f"a P3109 format has at least 3 bits, got k={k}")
    check(1 <= p < k + (not signed), f"P3109 of {k} bits: a precision from 1 to {k - signed}, got p={p}")
    exponent = k - p + (not signed)
    nan = "negative_zero" if signed else "top"
    return Float(exponent, p - 1, 2 ** (exponent - 1), signed, inf=extended, nan=nan, even="code")
