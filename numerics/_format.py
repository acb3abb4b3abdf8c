"""What a number format is: frozen values from which everything else is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from ._scales import SCALE_RULES

NAN_ENCODINGS = ("ieee", "top", "negative_zero")


def _check(condition: bool, message: str) -> None:
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

    Raises ValueError where the fields contradict each other. Sources: IEEE 754-2019 section 3.4;
    OCP 8-bit floating point (OFP8) v1.0; OCP Microscaling (MX) v1.0.
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

    def __post_init__(self) -> None:
        e, m = self.exponent, self.mantissa
        _check(e >= 1 and m >= 0, f"Float needs exponent >= 1 and mantissa >= 0, got exponent={e}, mantissa={m}")
        _check(
            self.bits <= (32 if self.signed else 31),
            f"Float of {self.bits} bits: at most 32 signed, 31 unsigned",
        )
        nan = ("ieee" if self.inf else "top") if self.nan is True else self.nan
        _check(nan is False or nan in NAN_ENCODINGS, f"nan={nan!r}: choose True, False or one of {NAN_ENCODINGS}")
        _check(
            nan != "ieee" or (self.inf and m > 0),
            'nan="ieee" needs inf=True and mantissa >= 1; use nan="top"',
        )
        _check(
            nan != "negative_zero" or (self.signed and self.zero),
            'nan="negative_zero" needs a signed zero code',
        )
        _check(self.zero or not self.subnormal, "zero=False needs subnormal=False: exponent field 0 is a binade")
        free = self.signed and self.zero and nan != "negative_zero"
        negative_zero = free if self.negative_zero is None else self.negative_zero
        _check(free or not negative_zero, "negative_zero=True, but the format has no free code for it")
        object.__setattr__(self, "nan", nan)
        object.__setattr__(self, "bias", 2 ** (e - 1) - 1 if self.bias is None else self.bias)
        object.__setattr__(self, "negative_zero", negative_zero)
        _check(self.max_code >= 1, f"{self!r} has no finite number besides zero")
        _check(
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


@dataclass(frozen=True)
class Fixed:
    """Two's-complement (or unsigned) fixed point: an integer code times ``2**-fraction``.

    >>> Fixed(bits=8, fraction=6).max            # the element of MXINT8
    1.984375

    ``narrow=True`` leaves out the most negative code, so that the range is symmetric.
    Raises ValueError unless 1 <= bits <= 16 (2 where signed).
    """

    bits: int
    fraction: int = 0
    signed: bool = True
    narrow: bool = False

    def __post_init__(self) -> None:
        least = 1 + self.signed
        _check(least <= self.bits <= 16, f"integers have {least} to 16 bits here, got {self.bits}")
        _check(self.signed or not self.narrow, "narrow=True is for signed integers")
        _check(abs(self.fraction) <= 1000, f"fraction={self.fraction} is beyond float64: -1000 to 1000")

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def low(self) -> int:
        """Smallest integer."""
        return -(2 ** (self.bits - 1)) + self.narrow if self.signed else 0

    @property
    def high(self) -> int:
        """Largest integer."""
        return 2 ** (self.bits - self.signed) - 1

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


@dataclass(frozen=True)
class Int(Fixed):
    """An integer: ``Fixed`` with no fraction.

    >>> Int(4).low, Int(4).high, Int(8, signed=False).high
    (-8, 7, 255)
    """

    fraction: int = field(default=0, init=False)


@dataclass(frozen=True)
class Codebook:
    """Any table of values: code ``i`` means ``values[i]``.

    >>> Codebook((-1.0, 0.0, 1.0)).bits
    2

    Values are distinct finite numbers in ascending order. Raises ValueError otherwise.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        values = tuple(float(v) for v in self.values)
        ordered = all(a < b for a, b in pairwise(values))
        _check(
            2 <= len(values) <= 2**16 and ordered and all(map(math.isfinite, values)),
            "a codebook is 2 to 65536 finite values in ascending order",
        )
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Largest magnitude, which a block's scale maps its largest element to."""
        return max(abs(v) for v in self.values)


Scalar = Float | Fixed | Codebook
Size = int | Literal["channel", "tensor"]


@dataclass(frozen=True)
class Block:
    """Elements that share a scale along one axis.

    >>> mxfp4 = Block(Float(2, 1, inf=False, nan=False), size=32, scale="e8m0", rule="floor")
    >>> str(mxfp4), mxfp4.bits_per_element
    ('mxfp4', 4.25)

    ``size``: elements in a block, or "channel" (the whole axis: a row of a weight, a token of an
    activation), or "tensor". A last block may be ragged: it has its own scale and no padding shows.
    ``scale``: format of the shared scale, ``rule``: how it follows from the block (one of `SCALE_RULES`).
    ``zero_point=True``: integers about a zero point per block, ``(code - zero_point) * scale``.
    ``tensor_scale``: format of a second scale, one for the tensor (NVFP4).
    ``division="rounded"``: an element over its scale (times the tensor scale, as a float) is first rounded to
    the source's precision, as runtimes do that divide in float32; "exact" (the default) rounds once.

    Raises ValueError for a size below 1, an unknown rule, a zero point on anything but integers, a scale
    without NaN, numbers beyond float32.
    """

    element: Scalar
    size: Size = 32
    scale: Float = "e8m0"  # type: ignore[assignment]  # a name is read here
    rule: str = None  # type: ignore[assignment]  # None: "floor" for powers of two, else "absmax"
    axis: int = -1
    zero_point: bool = False
    tensor_scale: Float | None = None
    division: Literal["exact", "rounded"] = "exact"

    def __post_init__(self) -> None:
        for key in ("element", "scale", "tensor_scale"):
            if isinstance(getattr(self, key), str):
                from ._names import format

                object.__setattr__(self, key, format(getattr(self, key)))
        if isinstance(self.element, Block):
            raise ValueError(f"a block's element is a scalar format, not the block {self.element}")
        for key in ("scale", "tensor_scale"):
            part = getattr(self, key)
            if not isinstance(part, Float) and (key, part) != ("tensor_scale", None):
                raise ValueError(f"a block's {key} is a Float, got {part}")
        if self.rule is None:
            object.__setattr__(self, "rule", "absmax" if self.scale.mantissa else "floor")
        _check(
            self.size in ("channel", "tensor") or (isinstance(self.size, int) and self.size >= 1),
            f"block size {self.size!r}: a whole number from 1, 'channel' or 'tensor'",
        )
        _check(isinstance(self.axis, int), f"block axis {self.axis!r}: a whole number, negative from the end")
        _check(self.rule in SCALE_RULES, f"scale rule {self.rule!r}: choose one of {', '.join(SCALE_RULES)}")
        _check(self.division in ("exact", "rounded"), f"division {self.division!r}: choose 'exact' or 'rounded'")
        _check(
            not self.zero_point or (isinstance(self.element, Fixed) and self.rule == "absmax"),
            "a zero point needs an integer element and the rule 'absmax'",
        )
        rule = SCALE_RULES[self.rule]
        _check(
            not (isinstance(self.element, Codebook) and rule.to_emax),
            f"the rule {self.rule!r} needs the element's exponent range, which a codebook has not",
        )
        _check_parts(self)

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits_per_element(self) -> float:
        """Bits for an element with its share of a full block's scale and zero point."""
        shared = self.scale.bits + self.zero_point * self.element.bits
        return self.element.bits + (shared / self.size if isinstance(self.size, int) else 0)


def _check_parts(fmt: Block) -> None:
    """Blocks are computed and decoded in float32: what is beyond it, or cannot be exact in it, is refused."""
    if SCALE_RULES[fmt.rule].stretch and not isinstance(fmt.element, Fixed):
        raise ValueError(f"the rule {fmt.rule!r} counts in integer steps, which {fmt.element} has not")
    if fmt.scale.nan_code is None:
        raise ValueError(f"the scale {fmt.scale} has no NaN, the mark of a block that holds NaN or infinity")
    for part in (fmt.element, fmt.scale, fmt.tensor_scale):
        if part is not None and not _fits_float32(part):
            raise ValueError(f"{part} cannot be part of a block: it has numbers beyond float32")
    element = 0 if isinstance(fmt.element, Codebook) else fmt.element.mantissa
    if fmt.tensor_scale is not None and fmt.scale.mantissa + element > 20:
        raise ValueError(f"a scale under a tensor scale is a short one, such as 'e4m3fn', not {fmt.scale}")


def _fits_float32(fmt: Scalar) -> bool:
    """Whether every number of the format is a float32 (of codebooks: nearly one)."""
    if isinstance(fmt, Float):
        return fmt.mantissa <= 23 and fmt.emax <= 127 and fmt.emin - fmt.mantissa >= -149
    if isinstance(fmt, Fixed):
        return fmt.emax <= 127 and fmt.fraction <= 126
    return 2.0**-126 <= fmt.max < 2.0**128


Format = Float | Fixed | Codebook | Block
