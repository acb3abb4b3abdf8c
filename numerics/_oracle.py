"""The oracle: every answer in rational arithmetic, by search over all codes. Slow and readable.

It shares no arithmetic with the fast path: values come from the definition of a format, an encoding from
comparing the exact number with them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache

from ._format import Codebook, Fixed, Float, Scalar

Exact = Fraction | float  # a float only for infinities and NaN


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
        value = code - 2**fmt.bits if fmt.signed and code >> (fmt.bits - 1) else code
        return Fraction(value) / Fraction(2) ** fmt.fraction
    return _decode_float(fmt, code)


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


def encode(
    fmt: Scalar, x: Exact, rounding: str = "nearest_even", overflow: str | None = None, nan: str = "zero"
) -> int:
    """The code of an exact number under the same policies as `halfulp.numerics.encode`.

    >>> from ._names import format
    >>> hex(encode(format("e4m3fn"), Fraction(464))), hex(encode(format("e4m3fn"), Fraction(465), overflow="nan"))
    ('0x7e', '0x7f')
    """
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if isinstance(fmt, Codebook):
        return _encode_codebook(fmt, x, nan)
    if isinstance(x, float) and math.isnan(x):
        return _nan_code(fmt, negative, nan)
    if isinstance(fmt, Fixed):
        return _encode_fixed(fmt, x, negative, rounding)
    if overflow is None:
        overflow = "inf" if fmt.inf else "saturate"
    limits = {"saturate": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}
    limit = limits[overflow]
    assert limit is not None
    if isinstance(x, float) and math.isinf(x):
        code = limit
    else:
        code = _nearest(fmt, abs(Fraction(x)), negative, rounding, fmt.max_code + 1)
        code = limit if code > fmt.max_code else code
    if negative and not fmt.signed:
        lost = code != 0 if fmt.zero else x != 0
        return limit if lost and overflow == "nan" else 0
    if overflow == "nan" and code == limit and fmt.nan == "negative_zero":
        return code
    if negative and (code or fmt.negative_zero):
        code |= 2 ** (fmt.bits - 1)
    return code


def _nearest(fmt: Float | Fixed, x: Fraction, negative: bool, rounding: str, last: int) -> int:
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
    # a significand of one bit is always odd, but for zero's: ties go up (IEEE 754-2019, 4.3.1)
    one_bit = isinstance(fmt, Float) and fmt.mantissa == 0
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


def _encode_fixed(fmt: Fixed, x: Exact, negative: bool, rounding: str) -> int:
    if isinstance(x, float) and math.isinf(x):
        value = fmt.low if negative else fmt.high
    else:
        magnitude = _nearest(fmt, abs(Fraction(x)), negative, rounding, 2**fmt.bits)
        value = max(fmt.low, min(fmt.high, -magnitude if negative else magnitude))
    return value % 2**fmt.bits


def _encode_codebook(fmt: Codebook, x: Exact, nan: str) -> int:
    if isinstance(x, float) and math.isnan(x):
        by_size = sorted(range(len(fmt.values)), key=lambda i: abs(fmt.values[i]))
        return by_size[0] if nan == "zero" else len(fmt.values) - 1
    if isinstance(x, float) and math.isinf(x):
        return 0 if x < 0 else len(fmt.values) - 1
    distances = [abs(Fraction(v) - Fraction(x)) for v in fmt.values]
    best = min(distances)
    nearest = [i for i, d in enumerate(distances) if d == best]
    return next((i for i in nearest if i % 2 == 0), nearest[0])


def _nan_code(fmt: Float | Fixed, negative: bool, nan: str) -> int:
    if isinstance(fmt, Fixed):
        return 0 if nan == "zero" else fmt.high
    if fmt.nan_code is None:
        return 0 if nan == "zero" else fmt.max_code
    if negative and fmt.signed and fmt.nan in ("ieee", "top"):
        return fmt.nan_code | 2 ** (fmt.bits - 1)
    return fmt.nan_code
