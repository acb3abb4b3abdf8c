"""The oracle of blocks: scales, zero points and elements in rational arithmetic, block by block.

Tensors are dictionaries from an element's index to its number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from ._format import Block, Fixed, Float, Log, Scalar, Table, min_positive_code
from ._oracle import Exact, Index, decode, encode, exponent, log_float, nan_code, nearest, round_to_float
from ._scales import scale_rule, search_targets


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
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    sizes = fmt.size if isinstance(fmt.size, tuple) else (fmt.size,)
    along = {axis % len(shape): size for axis, size in zip(axes, sizes)}
    along = {axis: shape[axis] if size == "channel" else size for axis, size in along.items()}
    return tuple(i // along[d] if d in along else i for d, i in enumerate(index))  # type: ignore[operator]


def encode_blocks(
    fmt: Block,
    x: dict[Index, Exact],
    shape: Index,
    rounding: str = "nearest_even",
    wide: int = 32,
    zero: str = "signed",
) -> Blocks:
    """Scales, then zero points and elements under the scales as they are stored.

    >>> from ._names import format
    >>> b = encode_blocks(format("mxfp4:g2"), {(0,): Fraction(127), (1,): Fraction(1, 4)}, (2,))
    >>> b.scales, b.codes
    ({(0,): 131}, {(0,): 7, (1,): 0})

    An element's code is that of ``x / (scale * tensor_scale)``, by exact division, nothing beyond the
    format's range: elements saturate. With a zero point it is the integer ``round(x / scale) + zero_point``,
    clipped. Under a scale of zero elements are zeros. `Block` says what other divisions round on the way, each
    time to a float of ``wide`` bits, as wide as the source's, nearest even; so are the quotient that is looked
    for in a table and a table's largest value.
    In a block that holds NaN or infinity the scale is NaN and every element NaN, or zero where the element's
    format has none; the zero point is 0.
    """
    blocks: dict[Index, list[Index]] = {}
    for index in product(*map(range, shape)):
        blocks.setdefault(block_of(fmt, shape, index), []).append(index)
    numbers = {key: [x[index] for index in indices] for key, indices in blocks.items()}
    tensor = tensor_scale(fmt, list(numbers.values()), wide)
    out = Blocks({}, {}, {}, tensor)
    for key, indices in blocks.items():
        block = numbers[key]
        code = out.scales[key] = scale_code(fmt, block, tensor, wide)
        if isinstance(decode(fmt.scale, code), float):  # NaN
            out.codes.update({index: _nan_element(fmt.element, x[index]) for index in indices})
            point = 0
        else:
            point = zero_point(fmt, block, Under(fmt, code, tensor, wide))
            under = Under(fmt, code, tensor, wide, point)
            out.codes.update({index: under.code(x[index], rounding, zero) for index in indices})
        if fmt.zero_point:
            out.zero_points[key] = point % 2**fmt.element.bits
    return out


def _finite(block: list[Exact]) -> bool:
    return all(math.isfinite(v) for v in block)


def tensor_scale(fmt: Block, blocks: list[list[Exact]], wide: int) -> Exact | None:
    """amax / (largest scale * least target of the rule) over the blocks without NaN and infinity, rounded to
    nearest and never to zero; the format's 1 where amax is 0."""
    if fmt.tensor_scale is None:
        return None
    amax = max((abs(Fraction(v)) for block in blocks if _finite(block) for v in block), default=Fraction(0))
    if amax == 0:
        return decode(fmt.tensor_scale, encode(fmt.tensor_scale, Fraction(1), overflow="saturate"))
    largest = round_to_float(Fraction(fmt.scale.max) * min(targets(fmt, wide)), wide)
    code = encode(fmt.tensor_scale, amax / Fraction(largest), overflow="saturate")
    return decode(fmt.tensor_scale, max(code, min_positive_code(fmt.tensor_scale)))


def targets(fmt: Block, wide: int) -> list[Fraction]:
    """What amax may be mapped to, descending."""
    rule, element = scale_rule(fmt.rule), fmt.element
    if rule.targets or rule.search:
        floats = rule.targets or search_targets(element.max, fmt.scale.mantissa == 0)
        return sorted((Fraction(round_to_float(Fraction(t), wide)) for t in floats), reverse=True)
    largest = Fraction(round_to_float(Fraction(element.max), wide))
    if isinstance(element, (Float, Fixed)) and rule.to_emax:
        return [Fraction(2) ** element.emax]
    if isinstance(element, (Float, Fixed)) and rule.midway:
        return [(Fraction(2) ** (element.emax + 1) + largest) / 2]
    step = Fraction(2) ** -element.fraction if isinstance(element, Fixed) else 0
    return [largest + Fraction(rule.stretch) * step]


def scale_code(fmt: Block, block: list[Exact], tensor: Exact | None, wide: int) -> int:
    """``amax / (target * tensor_scale)`` rounded as the rule says; with a zero point ``(highest - lowest) /
    (high - low)`` of a range that takes in zero, the difference rounded to the source's precision first. At
    least the smallest positive scale, unless the rule lets it be zero. Of several targets the one with the
    least loss counts, of equals that with the smallest scale."""
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
        return _rounded_scale(fmt, _to_precision(span, 23 if wide == 32 else 52), steps, tensor, wide)
    amax = max(map(abs, exact))
    codes = [_rounded_scale(fmt, amax, target, tensor, wide) for target in targets(fmt, wide)]
    return codes[0] if len(codes) == 1 else min(codes, key=lambda code: loss(fmt, block, amax, code, tensor, wide))


def _rounded_scale(fmt: Block, amax: Fraction, target: Fraction, tensor: Exact | None, wide: int) -> int:
    rule = scale_rule(fmt.rule)
    if fmt.division == "reciprocal":
        share = _float(amax / target, wide)
        share = share if tensor is None else _float(share / Fraction(tensor), wide)
    else:
        share = amax / target / (1 if tensor is None else Fraction(tensor))
    if rule.round_amax:
        share = _to_precision(share, fmt.element.mantissa)  # type: ignore[union-attr]
    code = encode(fmt.scale, share, rule.rounding, "saturate")
    return code if rule.zero else max(code, min_positive_code(fmt.scale))


def loss(fmt: Block, block: list[Exact], amax: Fraction, code: int, tensor: Exact | None, wide: int) -> int:
    """The sum of squares, in units, of what a scale loses of a block; the units are ``2**-14`` of amax's binade."""
    unit = Fraction(2) ** (exponent(amax) - 14) if amax else Fraction(1)
    under, total = Under(fmt, code, tensor, wide), 0
    for v in block:
        y = under.number(under.code(v, "nearest_even", "signed"))
        # int() cuts toward zero; what overflows when it is decoded loses the most
        lost = 2**15 if math.isinf(y) else abs(int(Fraction(v) / unit) - int(Fraction(y) / unit))
        total += min(lost, 2**15 - 1) ** 2
    return total


def _to_precision(x: Fraction, mantissa: int) -> Fraction:
    """Rounded to 1 + ``mantissa`` significant bits, nearest even; x is not negative."""
    unit = Fraction(2) ** (exponent(x) - mantissa)
    return round(x / unit) * unit


def _float(x: Exact, wide: int) -> Fraction:
    """Rounded to a float, the largest finite one at most."""
    y = round_to_float(x, wide)
    top = Fraction(2) ** 128 - Fraction(2) ** 104 if wide == 32 else Fraction(2) ** 1024 - Fraction(2) ** 971
    return max(-top, min(top, Fraction(y))) if math.isfinite(y) else top if y > 0 else -top


def zero_point(fmt: Block, block: list[Exact], under: Under) -> int:
    """The integer that stands for 0.0: the lowest number falls on the lowest integer, as nearly as may be."""
    if not fmt.zero_point:
        return 0
    element = fmt.element
    assert isinstance(element, Fixed)
    lowest = min(Fraction(0), *(Fraction(v) for v in block)) / under.divisor
    if fmt.division == "reciprocal":
        lowest = _float(lowest, under.wide)
    integer = element.low - round(lowest * Fraction(2) ** element.fraction)
    return max(element.low, min(element.high, integer))


@dataclass(frozen=True)
class Under:
    """Elements under a scale that is not NaN."""

    format: Block
    scale_code: int
    tensor: Exact | None
    wide: int
    point: int = 0

    @property
    def scale(self) -> Fraction:
        return Fraction(decode(self.format.scale, self.scale_code))

    @property
    def divisor(self) -> Fraction:
        """The scale times the tensor scale, rounded to a float, and not to zero, unless division is exact."""
        if self.tensor is None:
            return self.scale
        unit = self.scale * Fraction(self.tensor)
        if self.format.division == "exact" or unit == 0:
            return unit
        return Fraction(round_to_float(unit, self.wide)) or Fraction(2) ** (-149 if self.wide == 32 else -1074)

    @property
    def multiplier(self) -> Fraction:
        """What elements are multiplied by instead."""
        first = Fraction(1) if self.tensor is None else _float(1 / Fraction(self.tensor), self.wide)
        return _float(first / self.scale, self.wide)

    def quotient(self, x: Exact) -> Exact:
        """x over the scale; -0.0 stays."""
        if isinstance(x, float) or self.scale == 0:
            return math.copysign(0.0, x)
        reciprocal = self.format.division == "reciprocal"
        quotient: Exact = x * self.multiplier if reciprocal else x / self.divisor
        if quotient == 0 and x < 0:
            return -0.0
        table = isinstance(self.format.element, Table)
        return round_to_float(quotient, self.wide) if table or self.format.division != "exact" else quotient

    def code(self, x: Exact, rounding: str, zero: str) -> int:
        """The code of a finite element."""
        element, quotient = self.format.element, self.quotient(x)
        if not self.format.zero_point:
            return encode(element, quotient, rounding, "saturate", zero=zero)
        assert isinstance(element, Fixed)
        if isinstance(quotient, float) and math.isinf(quotient):
            return (element.high if quotient > 0 else element.low) % 2**element.bits
        steps = nearest(element, abs(Fraction(quotient)), quotient < 0, rounding, 2**17)
        value = (-steps if quotient < 0 else steps) + self.point
        return max(element.low, min(element.high, value)) % 2**element.bits

    def number(self, code: int) -> Exact:
        """``(code - zero_point) * scale`` rounded to a float; with a tensor scale, its product with that
        rounded again."""
        value = table_value(self.format.element, code, self.wide)
        if self.format.zero_point:
            value = Fraction(value) - self.point / Fraction(2) ** self.format.element.fraction  # type: ignore[union-attr]
        for factor in (self.scale, *(() if self.tensor is None else (self.tensor,))):
            value = round_to_float(_product(value, factor), self.wide)
        return value


def table_value(fmt: Scalar, code: int, wide: int) -> Exact:
    """The float that a code decodes to."""
    return log_float(fmt, code, wide) if isinstance(fmt, Log) else round_to_float(decode(fmt, code), wide)


def _nan_element(fmt: Scalar, x: Exact) -> int:
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    return nan_code(fmt, negative, None)


def decode_blocks(fmt: Block, b: Blocks, shape: Index, wide: int) -> dict[Index, Exact]:
    """The numbers of blocks as floats of ``wide`` bits; NaN under a NaN scale."""
    out: dict[Index, Exact] = {}
    for index, code in b.codes.items():
        key = block_of(fmt, shape, index)
        if isinstance(decode(fmt.scale, b.scales[key]), float):
            out[index] = math.nan
            continue
        point = 0
        if isinstance(fmt.element, Fixed) and fmt.zero_point:
            point = int(decode(fmt.element, b.zero_points[key]) * Fraction(2) ** fmt.element.fraction)
        out[index] = Under(fmt, b.scales[key], b.tensor_scale, wide, point).number(code)
    return out


def _product(a: Exact, b: Exact) -> Exact:
    """Of a number and a factor that is not negative."""
    return a if isinstance(a, float) else a * b
