"""The oracle: every answer in rational arithmetic, by search over all codes. Slow and readable.

It shares no arithmetic with the fast path: values come from the definition of a format, an encoding from
comparing the exact number with them. Blocks are in `_oracle_blocks`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ._format import Codebook, Fixed, Float, Log, Posit, Scalar, Table
from ._posit import posit_value

Exact = Fraction | float  # a float only for -0.0, infinities and NaN
Index = tuple[int, ...]


def decode(fmt: Scalar, code: int) -> Exact:
    """The exact value of a code; -0.0, infinities and NaN as floats.

    >>> from ._names import format
    >>> decode(format("e4m3fn"), 0x7E), decode(format("e4m3fn"), 0x7F), decode(format("int4"), 0xF)
    (Fraction(448, 1), nan, Fraction(-1, 1))
    """
    if isinstance(fmt, Codebook):
        # a code beyond the table has no value
        return Fraction(fmt.values[code]) if code < len(fmt.values) else math.nan
    if isinstance(fmt, Fixed):
        return _decode_fixed(fmt, code)
    if isinstance(fmt, Posit):
        value = fmt.value(code)
        return math.nan if value is None else value
    if isinstance(fmt, Log):
        return log_float(fmt, code, 64)
    return _decode_float(fmt, code)


def _decode_fixed(fmt: Fixed, code: int) -> Exact:
    unit = Fraction(1) / Fraction(2) ** fmt.fraction
    half = 2 ** (fmt.bits - 1)
    if fmt.sign_magnitude and code >= half:
        return (half - code) * unit if code > half else -0.0
    return (code - (2**fmt.bits if fmt.signed and code >= half else fmt.offset)) * unit


def log_float(fmt: Log, code: int, wide: int) -> Exact:
    """The float32 or float64 nearest to a logarithmic number, found by comparing powers of integers."""
    negative, u = divmod(code, fmt.max_code + 1)
    if u == 0:
        return -0.0 if negative else Fraction(0)
    power, root = u - fmt.bias * 2**fmt.fraction, 2**fmt.fraction
    mantissa, emin = (23, -126) if wide == 32 else (52, -1022)
    unit = Fraction(2) ** (max(power // root, emin) - mantissa)
    low, high = 0, 2 ** (mantissa + 2)  # the largest multiple of the unit that is at most 2**(power / root)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compare_log(middle * unit, power, root) <= 0 else (low, middle)
    side = compare_log((low + Fraction(1, 2)) * unit, power, root)
    up = side < 0 or (side == 0 and low % 2 == 1)
    value = (low + up) * unit
    if wide == 32 and value >= 2**128:
        return -math.inf if negative else math.inf
    return -value if negative else value


def compare_log(x: Fraction, power: int, root: int) -> int:
    """-1, 0 or 1 as x, above zero, is below, at or above ``2**(power / root)``: x**root against 2**power."""
    a, b = x.numerator**root, x.denominator**root
    a, b = (a, b << power) if power >= 0 else (a << -power, b)
    return (a > b) - (a < b)


def _decode_float(fmt: Float, code: int) -> Exact:
    half = 2 ** (fmt.exponent + fmt.mantissa)
    negative, magnitude = divmod(code, half)
    if fmt.nan == "negative_zero" and code == half:
        return math.nan
    if fmt.nan == "ieee" and magnitude > (fmt.inf_code or 0):
        return math.nan
    if fmt.nan == "top" and magnitude == half - 1:
        return math.nan
    if fmt.inf and magnitude == fmt.inf_code:
        return -math.inf if negative else math.inf
    value = fmt.magnitude(magnitude)
    if value == 0:
        return -0.0 if negative and fmt.negative_zero else Fraction(0)
    return -value if negative else value


def _magnitude(fmt: Float | Fixed, code: int) -> Fraction:
    """Magnitudes ascend with their codes; one past a float's last code is the value that would come next."""
    return fmt.magnitude(code) if isinstance(fmt, Float) else Fraction(code) / Fraction(2) ** fmt.fraction


@lru_cache(maxsize=256)
def _values(fmt: Float | Fixed, last: int) -> list[Fraction]:
    return [_magnitude(fmt, code) for code in range(last + 1)]


@dataclass(frozen=True)
class Draw:
    """Stochastic rounding of one number: its random integer ``value`` below ``2**bits``."""

    value: int
    bits: int
    threshold: str = "floor"

    def up(self, share: Fraction) -> bool:
        """Whether a number that has covered this share of its step goes on."""
        half = Fraction(1, 2) if self.threshold == "nearest" else 0
        return self.value >= 2**self.bits - math.floor(share * 2**self.bits + half)


Rounding = str | Draw


def encode(
    fmt: Scalar,
    x: Exact,
    rounding: Rounding = "nearest_even",
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str = "signed",
) -> int:
    """The code of an exact number under the same policies as `halfulp.numerics.encode`.

    >>> from ._names import format
    >>> e4m3fn = format("e4m3fn")
    >>> hex(encode(e4m3fn, Fraction(464))), hex(encode(e4m3fn, Fraction(465), overflow="nan"))
    ('0x7e', '0x7f')
    """
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if isinstance(x, float) and math.isnan(x) and isinstance(nan, (int, tuple)):
        return nan if isinstance(nan, int) else nan[negative]
    if isinstance(x, float) and math.isnan(x):
        return nan_code(fmt, negative, nan)
    if isinstance(fmt, Posit) and isinstance(x, float) and math.isinf(x) and overflow in (None, "saturate_finite"):
        return fmt.nan_code
    if isinstance(fmt, Log):
        return _encode_log(fmt, x, negative, str(rounding), zero)
    if isinstance(fmt, Table):
        return _encode_table(fmt, x, rounding)
    if isinstance(fmt, Fixed):
        return _encode_fixed(fmt, x, negative, rounding, overflow == "wrap", zero)
    if overflow is None:
        overflow = "ieee" if fmt.inf else "saturate"
    limits = {"saturate": fmt.max_code, "saturate_finite": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}
    limits["ieee"] = fmt.max_code if _stays_finite(rounding, negative) else fmt.inf_code
    limit = limits[overflow]
    assert limit is not None
    if isinstance(x, float) and math.isinf(x):
        code = fmt.inf_code if overflow in ("ieee", "saturate_finite") else limit
        assert code is not None
    else:
        code = nearest(fmt, abs(Fraction(x)), negative, rounding, fmt.max_code + 1)
        code = limit if code > fmt.max_code else code
    if negative and not fmt.signed:
        lost = code != 0 if fmt.zero else x != 0
        return limit if lost and overflow == "nan" else 0
    if overflow == "nan" and code == limit and fmt.nan == "negative_zero":
        return code
    if negative and (code or (fmt.negative_zero and zero == "signed")):
        code |= 2 ** (fmt.bits - 1)
    return code


def _stays_finite(rounding: Rounding, negative: bool) -> bool:
    """Whether a number too large becomes the largest: by rounding toward zero, or away from its own infinity (IEEE
    754-2019 section 7.4); by rounding to odd too."""
    return rounding in ("toward_zero", "to_odd", "up" if negative else "down")


def nearest(fmt: Float | Fixed, x: Fraction, negative: bool, rounding: Rounding, last: int) -> int:
    """The chosen magnitude's code, up to ``last``, which stands for everything from there on."""

    value = _values(fmt, last).__getitem__ if last < 2**16 else lambda code: _magnitude(fmt, code)
    low = bisect_right(range(last + 1), x, key=value) - 1
    if low < 0:
        return 0  # below the smallest number of a format that has no zero
    if value(low) == 0:
        high = next(code for code in range(low, last + 1) if value(code))
        low = 0  # what would be subnormal is a second zero in a format without subnormals
    else:
        high = low + 1
    if low == last or value(low) == x:
        return low
    below, above = x - value(low), value(high) - x
    if isinstance(rounding, Draw):
        return high if rounding.up(below / (below + above)) else low
    # a significand of one bit is always odd, but for zero's: ties go up (IEEE 754-2019, 4.3.1)
    one_bit = isinstance(fmt, Float) and fmt.mantissa == 0 and fmt.even == "significand"
    low_is_odd = value(low) != 0 if one_bit else low % 2 == 1
    up = {
        "nearest_even": below > above or (below == above and low_is_odd),
        "nearest_away": below >= above,
        "nearest_zero": below > above,
        "toward_zero": False,
        "up": not negative,
        "down": negative,
        "to_odd": not low_is_odd,
    }[rounding]
    return high if up else low


def _encode_fixed(fmt: Fixed, x: Exact, negative: bool, rounding: Rounding, wrap: bool, zero: str) -> int:
    if isinstance(x, float) and math.isinf(x):
        value = 0 if wrap else fmt.low if negative else fmt.high
    else:
        units = abs(Fraction(x)) * Fraction(2) ** fmt.fraction
        over = 0
        if wrap:  # whole turns do not matter, but that of an even number of units is even
            over = int(units) >> fmt.bits << fmt.bits
        rest = (units - over) / Fraction(2) ** fmt.fraction
        magnitude = nearest(fmt, rest, negative, rounding, 2 ** (fmt.bits + 1))
        value = -magnitude if negative else magnitude
        if not wrap:
            value = max(fmt.low, min(fmt.high, value))
    if fmt.sign_magnitude:
        sign = negative and (value != 0 or zero == "signed")
        return abs(value) + sign * 2 ** (fmt.bits - 1)
    return (value + fmt.offset) % 2**fmt.bits


@lru_cache(maxsize=64)
def _ascending(fmt: Codebook | Posit) -> list[int]:
    """Codes in the order of their values."""
    if isinstance(fmt, Codebook):
        return list(range(len(fmt.values)))
    return [*range(fmt.nan_code + 1, 2**fmt.bits), *range(fmt.nan_code)]  # from -maxpos on


def _encode_table(fmt: Codebook | Posit, x: Exact, rounding: Rounding) -> int:
    """Between the two values on either side of x, or the one at the end beyond which x lies."""
    codes = _ascending(fmt)
    if isinstance(x, float) and math.isinf(x):
        return codes[-1] if x > 0 else codes[0]
    x = Fraction(x)
    i = bisect_right(codes, x, key=lambda code: Fraction(decode(fmt, code))) - 1
    if i < 0 or i == len(codes) - 1:
        return codes[max(i, 0)]
    low, high = (Fraction(decode(fmt, code)) for code in codes[i : i + 2])
    return codes[i + (x != low and _upper(fmt, x, low, high, codes[i], rounding))]


def _upper(fmt: Codebook | Posit, x: Fraction, low: Fraction, high: Fraction, code: int, rounding: Rounding) -> bool:
    """Whether x between two values goes to the upper one; ``code`` is the lower one's."""
    if isinstance(fmt, Posit) and (low == 0 or high == 0):
        return low == 0  # never to zero
    even, larger = code % 2 == 0, abs(high) - abs(low)
    if isinstance(rounding, Draw):
        share = (x - low) / (high - low)
        return rounding.up(share) if larger >= 0 else not rounding.up(1 - share)
    middle = (low + high) / 2
    if isinstance(fmt, Posit):
        negative = code >= fmt.nan_code
        near = 2**fmt.bits - code - 1 if negative else code  # of the magnitudes on either side, the lower one's code
        middle = posit_value(2 * near + 1, fmt.bits + 1, fmt.es) * (-1 if negative else 1)
    if rounding.startswith("nearest") and x != middle:
        return x > middle
    if rounding in ("up", "down"):
        return rounding == "up"
    if rounding in ("to_odd", "nearest_even") or larger == 0:
        return even if rounding == "to_odd" else not even
    return larger > 0 if rounding == "nearest_away" else larger < 0


def _encode_log(fmt: Log, x: Exact, negative: bool, rounding: str, zero: str) -> int:
    if isinstance(x, float) and math.isinf(x):
        u = fmt.max_code
    else:
        u = _log_magnitude(fmt, abs(Fraction(x)), negative, rounding)
    if negative and not fmt.signed:
        return 0
    return u + (negative and (u > 0 or zero == "signed")) * (fmt.max_code + 1)


def _log_magnitude(fmt: Log, x: Fraction, negative: bool, rounding: str) -> int:
    if x == 0:
        return 0
    root, bias = 2**fmt.fraction, fmt.bias * 2**fmt.fraction
    # the last code whose magnitude is at most x; u = 0 takes the place of the magnitude that it would have
    low = bisect_right(range(1, fmt.max_code + 1), 0, key=lambda u: -compare_log(x, u - bias, root))
    if low == fmt.max_code or (low > 0 and compare_log(x, low - bias, root) == 0):
        return low
    up = {
        "toward_zero": False,
        "up": not negative,
        "down": negative,
        "to_odd": low % 2 == 0,
    }
    if rounding in up:
        return low + up[rounding]
    return low + (compare_log(x, 2 * (low - bias) + 1, 2 * root) > 0)


def nan_code(fmt: Scalar, negative: bool, nan: Any) -> int:
    """What NaN becomes unless its code is given."""
    if isinstance(fmt, Codebook):
        by_size = sorted(range(len(fmt.values)), key=lambda i: abs(fmt.values[i]))
        return len(fmt.values) - 1 if nan == "max" else by_size[0]
    if isinstance(fmt, Fixed):
        return fmt.code(fmt.high if nan == "max" else 0)
    own = None if isinstance(fmt, Log) else fmt.nan_code
    if own is None:
        return fmt.max_code if nan == "max" else 0
    if isinstance(fmt, Float) and negative and fmt.signed and fmt.nan in ("ieee", "top"):
        return own | 2 ** (fmt.bits - 1)
    return own


def round_to_float(x: Exact, wide: int) -> Exact:
    """To the nearest float32 or float64, ties to even; what underflows keeps its sign."""
    if isinstance(x, float):
        return x
    mantissa, emin, emax = (23, -126, 127) if wide == 32 else (52, -1022, 1023)
    unit = Fraction(2) ** (max(exponent(x), emin) - mantissa)
    y = round(x / unit) * unit
    if y == 0 and x < 0:
        return -0.0
    return y if abs(y) < Fraction(2) ** (emax + 1) else math.copysign(math.inf, y)


def exponent(x: Fraction) -> int:
    """floor(log2(|x|)); some small number for zero."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e - (Fraction(2) ** e > abs(x))
