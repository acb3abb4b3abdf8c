"""Blocks: the scale of a block from its elements, and elements under their scale.

Here blocks lie along the last axis, ``[..., blocks, size]``; `_rows` brings tensors into that shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._backend import Array, Backend, Numpy
from ._codec import (
    SATURATE,
    Rounding,
    decode_scalar,
    encode_parts,
    join,
    narrow_codes,
    significand,
    whole,
)
from ._format import Block, Fixed, Table, min_positive_code
from ._parts import (
    FAR,
    Parts,
    add_magnitudes,
    divide,
    infinity,
    less,
    magnitude_bits,
    multiply,
    ordered,
    select,
    split,
    split_bits,
)
from ._policy import Policy
from ._scales import scale_rule, search_targets
from ._table import FLOATS, encode_table


@dataclass(frozen=True)
class Quantized:
    """A tensor in a block format: what `halfulp.numerics.encode` returns and `decode` reads.

    Invariant: element ``i`` of block ``j`` is ``(codes[i] - zero_point[j]) * scale[j] * tensor_scale``, where
    codes, scales and zero points stand for the numbers that they encode.

    ``codes`` has the tensor's shape; ``scale`` and ``zero_point`` have one entry a block along the format's
    axis (a single one for size "tensor"); ``tensor_scale`` is a float32 scalar or None.
    """

    codes: Array
    scale: Array
    zero_point: Array | None
    tensor_scale: Array | None
    format: Block


class Shared(NamedTuple):
    """What the elements of a block share, [..., blocks]: the code of the scale, what elements are divided by
    (the scale; with ``division="rounded"`` its product with the tensor scale) or, with "reciprocal", multiplied
    by, the zero point, and a mask of the blocks whose scale is zero."""

    code: Array
    scale: Parts
    zero_point: Array | None
    empty: Array | None = None

    def at(self, where: Any) -> Shared:
        """The same of some of the blocks."""
        scale = Parts(*(v[where] if hasattr(v, "shape") else v for v in tuple(self.scale)))
        rest = (None if v is None else v[where] for v in (self.zero_point, self.empty))
        return Shared(self.code[where], scale, *rest)


def targets(fmt: Block) -> tuple[float, ...]:
    """What the rule maps a block's largest magnitude to; several, ascending, where it searches."""
    rule, element = scale_rule(fmt.rule), fmt.element
    if rule.targets:
        return rule.targets
    if rule.search:
        return search_targets(element.max, fmt.scale.mantissa == 0)
    power = 2.0 ** getattr(element, "emax", 0)
    if rule.to_emax:
        return (power,)
    if rule.midway:
        return ((2 * power + element.max) / 2,)
    step = 2.0**-element.fraction if isinstance(element, Fixed) else 0.0
    return (element.max + rule.stretch * step,)


def _target(fmt: Block) -> float:
    """What a rule that does not search maps a block's largest magnitude to."""
    return targets(fmt)[0]


def _number(xp: Backend, value: float, wide: int, like: Array) -> Parts:
    return split(xp, xp.constant([value], xp.floats[wide], like))


def extent(xp: Backend, blocks: Array, fmt: Block) -> tuple[Array, ...]:
    """What of a block its scale follows from, as `ordered` bits: (amax), or (highest number, lowest number
    inverted) with zero between them. The extents of two parts of a block join by maximum."""
    wide = xp.width(blocks)
    if not fmt.zero_point:
        return (xp.max_last(magnitude_bits(xp, blocks)),)
    keys, most = ordered(xp.view(blocks, xp.ints[wide]), wide), 2 ** (wide - 1) - 1
    return xp.clip(xp.max_last(keys), 0, most), ~xp.clip(xp.min_last(keys), -most - 1, 0)


def tensor_scale(xp: Backend, bounds: tuple[Array, ...], fmt: Block) -> Array | None:
    """The second-level scale, a float32 scalar: amax / (largest scale * target of the rule, the smallest where
    it has several), rounded once and not to zero; 1 where amax is 0. Blocks with NaN or infinity, which have a
    NaN scale, do not count."""
    if fmt.tensor_scale is None:
        return None
    wide = xp.width(bounds[0])
    amax = bounds[0]
    if fmt.zero_point:
        amax = xp.maximum(amax, ordered(~bounds[1], wide) & (2 ** (wide - 1) - 1))
    amax = (amax & less(amax, infinity(wide), wide)).reshape(-1)
    amax = xp.max_last(amax).reshape(1) if amax.shape[0] else xp.constant([0], xp.ints[wide], amax)
    largest = fmt.scale.max * float(FLOATS[wide](targets(fmt)[0]))
    a = divide(xp, split_bits(xp, amax, wide), _number(xp, largest, wide, amax))
    code = encode_parts(xp, a, fmt.tensor_scale, SATURATE)
    code = xp.clip(code, min_positive_code(fmt.tensor_scale), fmt.tensor_scale.max_code)
    one = encode_parts(xp, _number(xp, 1.0, wide, amax), fmt.tensor_scale, SATURATE)
    code = select(less(0, amax, wide), code, one)
    return decode_scalar(xp, narrow_codes(xp, code, fmt.tensor_scale), fmt.tensor_scale, 32)[0]


def _to_precision(xp: Backend, a: Parts, mantissa: int) -> Parts:
    """Rounded to a significand of 1 + ``mantissa`` bits, nearest even."""
    kept = significand(xp, a, a.top - mantissa, "nearest_even")
    carry = kept >> (mantissa + 1)
    return a._replace(exponent=a.exponent + carry, significand=(kept >> carry) << (a.top - mantissa))


def scale_codes(
    xp: Backend, a: Parts, fmt: Block, tensor: Parts | None, target: float, power_of_two: bool = False
) -> Array:
    """Scale codes from amax. A block that holds NaN or infinity gets a NaN scale, a block of zeros the
    smallest scale; no scale is rounded to zero, unless the rule says so."""
    rule = scale_rule(fmt.rule)
    a = a._replace(nan=a.nan | ~less(a.exponent, FAR // 2, a.wide), negative=0 * a.negative)
    if fmt.division == "reciprocal":
        a = _rounded(xp, divide(xp, a, _number(xp, target, a.wide, a.exponent)))
        if tensor is not None:
            a = _rounded(xp, divide(xp, a, tensor))
        a = _to_precision(xp, a, fmt.element.mantissa) if rule.round_amax else a  # type: ignore[union-attr]
    else:
        if tensor is not None:
            a = divide(xp, a, tensor)
        if rule.round_amax:
            a = _to_precision(xp, a, fmt.element.mantissa)  # type: ignore[union-attr]  # Block refuses tables
        if power_of_two:
            a = a._replace(exponent=a.exponent - (math.frexp(target)[1] - 1))
        else:
            a = divide(xp, a, _number(xp, target, a.wide, a.exponent))
    code = encode_parts(xp, a, fmt.scale, SATURATE, rule.rounding)
    least = xp.clip(code, 0 if rule.zero else min_positive_code(fmt.scale), fmt.scale.max_code)
    return narrow_codes(xp, select(a.nan, code, least), fmt.scale)


def _rounded(xp: Backend, a: Parts) -> Parts:
    """Rounded to a float of the parts' width, the largest finite one at most."""
    bits = xp.view(join(xp, a, a.wide), xp.ints[a.wide])
    sign = bits & ~(2 ** (a.wide - 1) - 1)
    magnitude = bits ^ sign
    infinite = ~less(magnitude, infinity(a.wide), a.wide) & ~less(infinity(a.wide), magnitude, a.wide)
    return split_bits(xp, (magnitude + infinite) | sign, a.wide)


def _over(xp: Backend, a: Parts, b: Parts, power_of_two: bool) -> Parts:
    """a / b; exponents alone where b is a power of two."""
    if power_of_two:
        return a._replace(exponent=a.exponent - b.exponent, nan=a.nan | b.nan)
    return divide(xp, a, b)


def _tensor_parts(xp: Backend, tensor: Array | None, wide: int) -> Parts | None:
    return None if tensor is None else split(xp, xp.astype(tensor, xp.floats[wide]).reshape(1))


def codes_for(xp: Backend, bounds: tuple[Array, ...], fmt: Block, tensor: Array | None, target: float) -> Array:
    """Scale codes of blocks without zero points, with these extents, amax mapped to the target."""
    wide = xp.width(bounds[0])
    powers = scale_rule(fmt.rule).to_emax
    return scale_codes(
        xp, split_bits(xp, bounds[0], wide), fmt, _tensor_parts(xp, tensor, wide), target, power_of_two=powers
    )


def share(
    xp: Backend, bounds: tuple[Array, ...], fmt: Block, tensor: Array | None, code: Array | None = None
) -> Shared:
    """Scales and zero points of blocks with these extents; ``code``: the scales that a search has found."""
    wide = xp.width(bounds[0])
    tensor_parts = _tensor_parts(xp, tensor, wide)
    if fmt.zero_point:
        element: Any = fmt.element
        high, low = (split_bits(xp, ordered(key, wide), wide) for key in (bounds[0], ~bounds[1]))
        steps = (element.high - element.low) * 2.0**-element.fraction
        # a difference of floats that is a float again, as others have it
        span = _to_precision(xp, add_magnitudes(xp, high, low), high.top)
        code = scale_codes(xp, span, fmt, tensor_parts, steps)
    elif code is None:
        code = codes_for(xp, bounds, fmt, tensor, targets(fmt)[0])
    bits = magnitude_bits(xp, decode_scalar(xp, code, fmt.scale, wide))
    empty = None
    if scale_rule(fmt.rule).zero:
        empty = less(bits, 1, wide)
        bits = select(empty, (infinity(wide) >> 1) & infinity(wide), bits)  # any number that is not zero
    scale = split_bits(xp, bits, wide)
    divisor, rest = scale, tensor_parts
    if tensor_parts is not None and fmt.division != "exact":
        product = xp.view(join(xp, multiply(xp, scale, tensor_parts), wide), xp.ints[wide])
        divisor, rest = split_bits(xp, xp.clip(product, 1, 2 ** (wide - 1) - 1), wide), None
    point = None
    if fmt.zero_point:
        low = _scaled(xp, low, fmt, divisor, rest)
        if fmt.division == "reciprocal":
            low = _rounded(xp, low)
        point = xp.clip(element.low - _integer(xp, low, element, "nearest_even"), element.low, element.high)
    if fmt.division == "reciprocal":
        divisor = _number(xp, 1.0, wide, code)
        if tensor_parts is not None:
            divisor = _rounded(xp, divide(xp, divisor, tensor_parts))
        ones = Parts(*(v + 0 * scale.exponent if hasattr(v, "shape") else v for v in tuple(divisor)))
        divisor = _rounded(xp, divide(xp, ones, scale))
    return Shared(code, divisor, point, empty)


def _scaled(xp: Backend, a: Parts, fmt: Block, scale: Parts, tensor: Parts | None) -> Parts:
    power_of_two = fmt.scale.mantissa == 0 and (fmt.tensor_scale is None or fmt.division == "exact")
    return _over(xp, a if tensor is None else divide(xp, a, tensor), scale, power_of_two)


def encode_elements(
    xp: Backend, blocks: Array, shared: Shared, fmt: Block, policy: Policy, rounding: Rounding, tensor: Array | None
) -> Array:
    """Codes of blocks of float32 or float64 under what they share."""
    wide, shared = xp.width(blocks), shared.at((..., None))
    tensor_parts = _tensor_parts(xp, tensor, wide) if fmt.division == "exact" else None
    # NaN and infinity show in the scale
    a = split(xp, blocks, finite=True)
    if fmt.division == "reciprocal":
        a = multiply(xp, a, shared.scale)
    else:
        a = _scaled(xp, a, fmt, shared.scale, tensor_parts)
    if fmt.division != "exact":
        a = split(xp, join(xp, a, wide))
    if shared.empty is not None:
        a = a._replace(
            significand=a.significand & ~shared.empty,
            exponent=select(shared.empty, -FAR + 0 * a.exponent, a.exponent),
        )
    if shared.zero_point is not None:
        value = _integer(xp, a, fmt.element, rounding) + shared.zero_point  # type: ignore[arg-type]
        code = _integer_code(xp, value, shared, fmt)
    elif isinstance(fmt.element, Table):
        code = encode_table(xp, join(xp, a, wide), fmt.element, policy, rounding)
    else:
        code = encode_parts(xp, a, fmt.element, policy, rounding)
    return narrow_codes(xp, code, fmt.element)


def zero_point_codes(xp: Backend, shared: Shared, fmt: Block) -> Array | None:
    """The zero points as codes of the element."""
    if shared.zero_point is None:
        return None
    return narrow_codes(xp, _integer_code(xp, shared.zero_point, shared, fmt), fmt.element)


def _integer(xp: Backend, a: Parts, fmt: Fixed, rounding: Rounding) -> Array:
    """a in units of the integer format, rounded; far values stay far beyond the format's range."""
    return (whole(xp, a, -fmt.fraction, rounding) ^ a.negative) - a.negative


def _integer_code(xp: Backend, value: Array, shared: Shared, fmt: Block) -> Array:
    """The code nearest to an integer; 0 in a block whose scale is NaN."""
    element: Any = fmt.element
    return xp.clip(value, element.low, element.high) & ((1 << element.bits) - 1) & ~shared.scale.nan


def decode_block(
    xp: Backend, codes: Array, scale: Array, points: Array | None, fmt: Block, tensor: Array | None, wide: int
) -> Array:
    """Numbers of blocks of codes: one rounding for the product with the scale, one for the tensor scale."""
    values = decode_scalar(xp, codes, fmt.element, wide)
    if points is not None:
        values = values - decode_scalar(xp, points, fmt.element, wide)[..., None]
    values = _times(xp, values, decode_scalar(xp, scale, fmt.scale, wide)[..., None], wide)
    if tensor is not None:
        values = _times(xp, values, xp.astype(tensor, xp.floats[wide]).reshape(1), wide)
    return values


def _times(xp: Backend, a: Array, b: Array, wide: int) -> Array:
    """a * b rounded once, also where the backend would flush subnormals."""
    if xp.flushes_subnormals and wide == 32:
        return join(xp, multiply(xp, split(xp, a), split(xp, b)), wide)
    if xp is Numpy:
        with np.errstate(over="ignore", invalid="ignore"):
            return a * b
    return a * b
