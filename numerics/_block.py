"""Blocks: the scale of a block from its elements, and elements under their scale.

Here blocks lie along the last axis, ``[..., blocks, size]``; `_rows` brings tensors into that shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._backend import Array, Backend, Numpy
from ._codec import (
    SATURATE,
    Rounding,
    decode_scalar,
    encode_codebook,
    encode_parts,
    join,
    narrow_codes,
    significand,
    whole,
)
from ._format import Block, Fixed, Float, min_positive_code
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
from ._scales import SCALE_RULES


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
    (the scale, with ``division="rounded"`` the product with the tensor scale), and the zero point."""

    code: Array
    scale: Parts
    zero_point: Array | None

    def at(self, where: Any) -> Shared:
        """The same of some of the blocks."""
        scale = Parts(*(v[where] if hasattr(v, "shape") else v for v in tuple(self.scale)))
        return Shared(self.code[where], scale, None if self.zero_point is None else self.zero_point[where])


def _target(fmt: Block) -> float:
    """What the rule maps a block's largest magnitude to."""
    rule, element = SCALE_RULES[fmt.rule], fmt.element
    if rule.to_emax:
        return 2.0**element.emax  # type: ignore[union-attr]  # Block refuses codebooks here
    step = 2.0**-element.fraction if isinstance(element, Fixed) else 0.0
    return element.max + rule.stretch * step


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
    """The second-level scale, a float32 scalar: amax / (largest scale * largest element), rounded once and
    not to zero; 1 where amax is 0. Blocks with NaN or infinity, which have a NaN scale, do not count."""
    if fmt.tensor_scale is None:
        return None
    wide = xp.width(bounds[0])
    amax = bounds[0]
    if fmt.zero_point:
        amax = xp.maximum(amax, ordered(~bounds[1], wide) & (2 ** (wide - 1) - 1))
    amax = (amax & less(amax, infinity(wide), wide)).reshape(-1)
    amax = xp.max_last(amax).reshape(1) if amax.shape[0] else xp.constant([0], xp.ints[wide], amax)
    a = divide(xp, split_bits(xp, amax, wide), _number(xp, fmt.scale.max * _target(fmt), wide, amax))
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


def _scale_codes(xp: Backend, a: Parts, fmt: Block, tensor: Parts | None, target: float) -> Array:
    """Scale codes from amax. A block that holds NaN or infinity gets a NaN scale, a block of zeros the
    smallest scale; no scale is rounded to zero."""
    rule = SCALE_RULES[fmt.rule]
    a = a._replace(nan=a.nan | ~less(a.exponent, FAR // 2, a.wide), negative=0 * a.negative)
    if tensor is not None:
        a = divide(xp, a, tensor)
    if rule.round_amax:
        a = _to_precision(xp, a, fmt.element.mantissa)  # type: ignore[union-attr]  # Block refuses codebooks
    if rule.to_emax:
        a = a._replace(exponent=a.exponent - fmt.element.emax)  # type: ignore[union-attr]
    else:
        a = divide(xp, a, _number(xp, target, a.wide, a.exponent))
    code = encode_parts(xp, a, fmt.scale, SATURATE, rule.rounding)
    least = xp.clip(code, min_positive_code(fmt.scale), fmt.scale.max_code)
    return narrow_codes(xp, select(a.nan, code, least), fmt.scale)


def _over(xp: Backend, a: Parts, b: Parts, power_of_two: bool) -> Parts:
    """a / b; exponents alone where b is a power of two."""
    if power_of_two:
        return a._replace(exponent=a.exponent - b.exponent, nan=a.nan | b.nan)
    return divide(xp, a, b)


def _tensor_parts(xp: Backend, tensor: Array | None, wide: int) -> Parts | None:
    return None if tensor is None else split(xp, xp.astype(tensor, xp.floats[wide]).reshape(1))


def share(xp: Backend, bounds: tuple[Array, ...], fmt: Block, tensor: Array | None) -> Shared:
    """Scales and zero points of blocks with these extents."""
    wide = xp.width(bounds[0])
    tensor_parts = _tensor_parts(xp, tensor, wide)
    if fmt.zero_point:
        element: Any = fmt.element
        high, low = (split_bits(xp, ordered(key, wide), wide) for key in (bounds[0], ~bounds[1]))
        steps = (element.high - element.low) * 2.0**-element.fraction
        # a difference of floats that is a float again, as others have it
        span = _to_precision(xp, add_magnitudes(xp, high, low), high.top)
        code = _scale_codes(xp, span, fmt, tensor_parts, steps)
    else:
        code = _scale_codes(xp, split_bits(xp, bounds[0], wide), fmt, tensor_parts, _target(fmt))
    scale = split(xp, decode_scalar(xp, code, fmt.scale, wide))
    if tensor_parts is not None and fmt.division == "rounded":
        product = xp.view(join(xp, multiply(xp, scale, tensor_parts), wide), xp.ints[wide])
        scale, tensor_parts = split_bits(xp, xp.clip(product, 1, 2 ** (wide - 1) - 1), wide), None
    if not fmt.zero_point:
        return Shared(code, scale, None)
    low = _scaled(xp, low, fmt, scale, tensor_parts)
    point = xp.clip(element.low - _integer(xp, low, element, "nearest_even"), element.low, element.high)
    return Shared(code, scale, point)


def _scaled(xp: Backend, a: Parts, fmt: Block, scale: Parts, tensor: Parts | None) -> Parts:
    power_of_two = fmt.scale.mantissa == 0 and (fmt.tensor_scale is None or fmt.division == "exact")
    return _over(xp, a if tensor is None else divide(xp, a, tensor), scale, power_of_two)


def encode_elements(
    xp: Backend, blocks: Array, shared: Shared, fmt: Block, policy: Policy, rounding: Rounding, tensor: Array | None
) -> Array:
    """Codes of blocks of float32 or float64 under what they share."""
    wide, shared = xp.width(blocks), shared.at((..., None))
    tensor_parts = None if fmt.division == "rounded" else _tensor_parts(xp, tensor, wide)
    # NaN and infinity show in the scale
    a = _scaled(xp, split(xp, blocks, finite=True), fmt, shared.scale, tensor_parts)
    if fmt.division == "rounded":
        a = split(xp, join(xp, a, wide))
    if shared.zero_point is not None:
        value = _integer(xp, a, fmt.element, rounding) + shared.zero_point  # type: ignore[arg-type]
        code = _integer_code(xp, value, shared, fmt)
    elif isinstance(fmt.element, (Float, Fixed)):
        code = encode_parts(xp, a, fmt.element, policy, rounding)
    else:
        code = encode_codebook(xp, join(xp, a, wide), fmt.element)
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
