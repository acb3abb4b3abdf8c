"""The oracle: every answer in rational arithmetic, by search over all codes. Slow and readable.

It shares no arithmetic with the fast path: values come from the definition of a format, an encoding from
comparing the exact number with them. Blocks are dictionaries from an element's index to its number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from ._format import Block, Codebook, Fixed, Float, Scalar, min_positive_code
from ._scales import SCALE_RULES

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


@dataclass(frozen=True)
class Draw:
    """Stochastic rounding of one number: its random integer ``value`` below ``2**bits``."""

    value: int
    bits: int
    threshold: str = "floor"


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
    if isinstance(fmt, Codebook):
        return _encode_codebook(fmt, x, nan)
    if isinstance(x, float) and math.isnan(x):
        return _nan_code(fmt, negative, nan)
    if isinstance(fmt, Fixed):
        return _encode_fixed(fmt, x, negative, rounding, overflow == "wrap")
    if overflow is None:
        overflow = "inf" if fmt.inf else "saturate"
    limits = {"saturate": fmt.max_code, "saturate_finite": fmt.max_code, "inf": fmt.inf_code, "nan": fmt.nan_code}
    limit = limits[overflow]
    assert limit is not None
    if isinstance(x, float) and math.isinf(x):
        code = fmt.inf_code if overflow == "saturate_finite" else limit
        assert code is not None
    else:
        code = _nearest(fmt, abs(Fraction(x)), negative, rounding, fmt.max_code + 1)
        code = limit if code > fmt.max_code else code
    if negative and not fmt.signed:
        lost = code != 0 if fmt.zero else x != 0
        return limit if lost and overflow == "nan" else 0
    if overflow == "nan" and code == limit and fmt.nan == "negative_zero":
        return code
    if negative and (code or (fmt.negative_zero and zero == "signed")):
        code |= 2 ** (fmt.bits - 1)
    return code


def _nearest(fmt: Float | Fixed, x: Fraction, negative: bool, rounding: Rounding, last: int) -> int:
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
        share = below / (below + above) * 2**rounding.bits
        threshold = math.floor(share + (Fraction(1, 2) if rounding.threshold == "nearest" else 0))
        return high if rounding.value >= 2**rounding.bits - threshold else low
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


def _encode_fixed(fmt: Fixed, x: Exact, negative: bool, rounding: Rounding, wrap: bool) -> int:
    if isinstance(x, float) and math.isinf(x):
        value = 0 if wrap else fmt.low if negative else fmt.high
    else:
        units = abs(Fraction(x)) * Fraction(2) ** fmt.fraction
        over = 0
        if wrap:  # whole turns do not matter, but that of an even number of units is even
            over = int(units) >> fmt.bits << fmt.bits
        rest = (units - over) / Fraction(2) ** fmt.fraction
        magnitude = _nearest(fmt, rest, negative, rounding, 2 ** (fmt.bits + 1))
        value = -magnitude if negative else magnitude
        if not wrap:
            value = max(fmt.low, min(fmt.high, value))
    return value % 2**fmt.bits


def _encode_codebook(fmt: Codebook, x: Exact, nan: Any) -> int:
    if isinstance(x, float) and math.isnan(x):
        by_size = sorted(range(len(fmt.values)), key=lambda i: abs(fmt.values[i]))
        return len(fmt.values) - 1 if nan == "max" else by_size[0]
    if isinstance(x, float) and math.isinf(x):
        return 0 if x < 0 else len(fmt.values) - 1
    distances = [abs(Fraction(v) - Fraction(x)) for v in fmt.values]
    best = min(distances)
    nearest = [i for i, d in enumerate(distances) if d == best]
    return next((i for i in nearest if i % 2 == 0), nearest[0])


def _nan_code(fmt: Float | Fixed, negative: bool, nan: Any) -> int:
    if isinstance(fmt, Fixed):
        return fmt.high if nan == "max" else 0
    if fmt.nan_code is None:
        return fmt.max_code if nan == "max" else 0
    if negative and fmt.signed and fmt.nan in ("ieee", "top"):
        return fmt.nan_code | 2 ** (fmt.bits - 1)
    return fmt.nan_code


@dataclass(frozen=True)
class Blocks:
    """What a block format stores: element codes by index; codes of scales and zero points by block."""

    codes: dict[Index, int]
    scales: dict[Index, int]
    zero_points: dict[Index, int]
    tensor_scale: Exact | None


def block_of(fmt: Block, shape: Index, index: Index) -> Index:
    """The block in which an element lies: blocks are cut from each row's start, the last may be shorter."""
    if fmt.size == "tensor":
        return (0,) * len(shape)
    axis = fmt.axis % len(shape)
    size = shape[axis] if fmt.size == "channel" else fmt.size
    return tuple(i // size if d == axis else i for d, i in enumerate(index))


def encode_blocks(
    fmt: Block, x: dict[Index, Exact], shape: Index, rounding: str = "nearest_even", wide: int = 32
) -> Blocks:
    """Scales, then zero points and elements under the scales as they are stored.

    >>> from ._names import format
    >>> b = encode_blocks(format("mxfp4:g2"), {(0,): Fraction(127), (1,): Fraction(1, 4)}, (2,))
    >>> b.scales, b.codes
    ({(0,): 131}, {(0,): 7, (1,): 0})

    An element's code is that of ``x / (scale * tensor_scale)``, by exact division, nothing beyond the
    format's range: elements saturate. With a zero point it is the integer ``round(x / scale) + zero_point``,
    clipped. With ``division="rounded"`` both ``scale * tensor_scale`` (not to zero) and that quotient are
    rounded to floats of ``wide`` bits, as wide as the source's, nearest even; so are the quotient that is
    looked for in a codebook and a codebook's largest value.
    In a block that holds NaN or infinity the scale is NaN and every element NaN, or 0 where the element's
    format has none; so is the zero point.
    """
    blocks: dict[Index, list[Index]] = {}
    for index in product(*map(range, shape)):
        blocks.setdefault(block_of(fmt, shape, index), []).append(index)
    numbers = {key: [x[index] for index in indices] for key, indices in blocks.items()}
    tensor = tensor_scale(fmt, list(numbers.values()), wide)
    scales = {key: scale_code(fmt, block, tensor, wide) for key, block in numbers.items()}
    codes: dict[Index, int] = {}
    points: dict[Index, int] = {}
    for key, indices in blocks.items():
        scale = decode(fmt.scale, scales[key])
        if isinstance(scale, float):  # NaN
            codes |= {index: _nan_element(fmt.element, x[index]) for index in indices}
            points[key] = 0
            continue
        unit = scale if tensor is None else scale * Fraction(tensor)
        if tensor is not None and fmt.division == "rounded":
            unit = Fraction(round_to_float(unit, wide)) or Fraction(2) ** (-149 if wide == 32 else -1074)
        point = zero_point(fmt, numbers[key], unit)
        points[key] = point % 2**fmt.element.bits
        codes |= {index: element_code(fmt, x[index], unit, point, rounding, wide) for index in indices}
    return Blocks(codes, scales, points if fmt.zero_point else {}, tensor)


def _finite(block: list[Exact]) -> bool:
    return all(math.isfinite(v) for v in block)


def tensor_scale(fmt: Block, blocks: list[list[Exact]], wide: int) -> Exact | None:
    """amax / (largest scale * target of the rule) over the blocks without NaN and infinity, rounded to
    nearest and never to zero; the format's 1 where amax is 0."""
    if fmt.tensor_scale is None:
        return None
    amax = max((abs(Fraction(v)) for block in blocks if _finite(block) for v in block), default=Fraction(0))
    if amax == 0:
        return decode(fmt.tensor_scale, encode(fmt.tensor_scale, Fraction(1), overflow="saturate"))
    share = amax / (Fraction(fmt.scale.max) * _target(fmt, wide))
    code = encode(fmt.tensor_scale, share, overflow="saturate")
    return decode(fmt.tensor_scale, max(code, min_positive_code(fmt.tensor_scale)))


def _target(fmt: Block, wide: int) -> Fraction:
    rule, element = SCALE_RULES[fmt.rule], fmt.element
    if rule.to_emax:
        return Fraction(2) ** element.emax  # type: ignore[union-attr]
    step = Fraction(2) ** -element.fraction if isinstance(element, Fixed) else 0
    return Fraction(round_to_float(Fraction(element.max), wide)) + Fraction(rule.stretch) * step


def scale_code(fmt: Block, block: list[Exact], tensor: Exact | None, wide: int) -> int:
    """``amax / (target * tensor_scale)`` rounded as the rule says; with a zero point ``(highest - lowest) /
    (high - low)`` of a range that takes in zero, the difference rounded to the source's precision first.
    Never zero: the smallest positive scale at least."""
    rule = SCALE_RULES[fmt.rule]
    if not _finite(block):
        code = fmt.scale.nan_code
        assert code is not None
        return code
    exact = [Fraction(v) for v in block]
    if fmt.zero_point:
        element = fmt.element
        assert isinstance(element, Fixed)
        steps = (element.high - element.low) / Fraction(2) ** element.fraction
        span = max(Fraction(0), *exact) - min(Fraction(0), *exact)
        share = _to_precision(span, 23 if wide == 32 else 52) / steps
    else:
        share = max(map(abs, exact)) / _target(fmt, wide)
    share /= 1 if tensor is None else Fraction(tensor)
    if rule.round_amax:
        share = _to_precision(share, fmt.element.mantissa)  # type: ignore[union-attr]
    return max(encode(fmt.scale, share, rule.rounding, "saturate"), min_positive_code(fmt.scale))


def _to_precision(x: Fraction, mantissa: int) -> Fraction:
    """Rounded to 1 + ``mantissa`` significant bits, nearest even; x is not negative."""
    unit = Fraction(2) ** (_exponent(x) - mantissa)
    return round(x / unit) * unit


def zero_point(fmt: Block, block: list[Exact], unit: Fraction) -> int:
    """The integer that stands for 0.0: the lowest number falls on the lowest integer, as nearly as may be."""
    if not fmt.zero_point:
        return 0
    element = fmt.element
    assert isinstance(element, Fixed)
    lowest = min(Fraction(0), *(Fraction(v) for v in block)) / unit * Fraction(2) ** element.fraction
    return max(element.low, min(element.high, element.low - round(lowest)))


def element_code(fmt: Block, x: Exact, unit: Fraction, point: int, rounding: str, wide: int) -> int:
    """The code of a finite element under ``unit``, the block's scale times the tensor's."""
    element = fmt.element
    quotient: Exact = x if isinstance(x, float) else x / unit  # -0.0 stays
    if isinstance(element, Codebook) or fmt.division == "rounded":
        quotient = round_to_float(quotient, wide)
    if isinstance(element, Codebook):
        return _encode_codebook(element, quotient, None)
    if not fmt.zero_point:
        return encode(element, quotient, rounding, "saturate")
    assert isinstance(element, Fixed)
    steps = _nearest(element, abs(Fraction(quotient)), quotient < 0, rounding, 2**17)
    value = (-steps if quotient < 0 else steps) + point
    return max(element.low, min(element.high, value)) % 2**element.bits


def _nan_element(fmt: Scalar, x: Exact) -> int:
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    return _encode_codebook(fmt, math.nan, None) if isinstance(fmt, Codebook) else _nan_code(fmt, negative, None)


def decode_blocks(fmt: Block, b: Blocks, shape: Index, wide: int) -> dict[Index, Exact]:
    """``(code - zero_point) * scale`` rounded to a float of ``wide`` bits; with a tensor scale, its product
    with that rounded again."""
    out: dict[Index, Exact] = {}
    for index, code in b.codes.items():
        key = block_of(fmt, shape, index)
        factors: list[Exact] = [decode(fmt.scale, b.scales[key])]
        factors += [] if b.tensor_scale is None else [b.tensor_scale]
        value = decode(fmt.element, code)
        if fmt.zero_point:
            value = Fraction(value) - Fraction(decode(fmt.element, b.zero_points[key]))
        for factor in factors:
            value = round_to_float(_product(value, factor), wide)
        out[index] = value
    return out


def _product(a: Exact, b: Exact) -> Exact:
    """Of a number and a factor above zero, or NaN."""
    if isinstance(b, float):
        return math.nan
    return a if isinstance(a, float) else a * b


def round_to_float(x: Exact, wide: int) -> Exact:
    """To the nearest float32 or float64, ties to even; what underflows keeps its sign."""
    if isinstance(x, float):
        return x
    mantissa, emin, emax = (23, -126, 127) if wide == 32 else (52, -1022, 1023)
    unit = Fraction(2) ** (max(_exponent(x), emin) - mantissa)
    y = round(x / unit) * unit
    if y == 0 and x < 0:
        return -0.0
    return y if abs(y) < Fraction(2) ** (emax + 1) else math.copysign(math.inf, y)


def _exponent(x: Fraction) -> int:
    """floor(log2(|x|)); some small number for zero."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e - (Fraction(2) ** e > abs(x))
