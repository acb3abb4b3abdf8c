"""Blocks: the scale of a block from its elements, and elements under their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._backend import Array, Backend
from ._codec import (
    decode_scalar,
    encode_codebook,
    encode_parts,
    join,
    narrow_codes,
    significand,
)
from ._format import Block, min_positive_code
from ._parts import Parts, divide, multiply, split
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


def _blocks(xp: Backend, x: Array, fmt: Block) -> Array:
    """Axis to the end, then [..., blocks, size]; a ragged end is filled up with zeros."""
    if fmt.size == "tensor":
        return x.reshape(1, -1)
    x = xp.moveaxis(x, fmt.axis, -1)
    n = x.shape[-1]
    size = max(n, 1) if fmt.size == "channel" else fmt.size
    blocks = -(-n // size)
    if blocks * size != n:
        x = xp.pad_last(x, blocks * size - n)
    return x.reshape(*x.shape[:-1], blocks, size)


def _unblock(xp: Backend, blocks: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    if fmt.size == "tensor":
        return blocks.reshape(shape)
    axis = fmt.axis % len(shape)
    lead = [d for i, d in enumerate(shape) if i != axis]
    x = blocks.reshape(*lead, blocks.shape[-1] * blocks.shape[-2])[..., : shape[axis]]
    return xp.moveaxis(x, -1, axis)


def _per_block(xp: Backend, values: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    """[..., blocks] with the blocks where the axis was."""
    return values.reshape((1,) * len(shape)) if fmt.size == "tensor" else xp.moveaxis(values, -1, fmt.axis)


def _like_blocks(xp: Backend, values: Array, fmt: Block) -> Array:
    """The inverse of `_per_block`, with a last axis of 1 to broadcast over the elements."""
    return values.reshape(1, 1) if fmt.size == "tensor" else xp.moveaxis(values, fmt.axis, -1)[..., None]


def _over(xp: Backend, a: Parts, b: Parts, power_of_two: bool) -> Parts:
    """a / b; exponents alone where b is a power of two."""
    if power_of_two:
        return a._replace(exponent=a.exponent - b.exponent, nan=a.nan | b.nan)
    return divide(xp, a, b)


def _number(xp: Backend, value: float, like: Array) -> Parts:
    return split(xp, xp.constant([value], like.dtype, like))


def tensor_scale(xp: Backend, x: Array, fmt: Block) -> Array | None:
    """The second-level scale: amax of the tensor / (largest scale * largest element), rounded once.

    NaN and infinities are left to their own block; a tensor of zeros has scale 1.
    """
    if fmt.tensor_scale is None:
        return None
    magnitude = abs(x)
    finite = xp.where(magnitude < float("inf"), magnitude, 0 * magnitude)
    flat = xp.where(finite == finite, finite, 0 * magnitude[:0].sum()).reshape(-1)
    amax = xp.max_last(flat) if flat.shape[0] else flat.sum()
    target = fmt.scale.max * (fmt.element.max + SCALE_RULES[fmt.rule].stretch)
    a = divide(xp, split(xp, amax.reshape(1)), _number(xp, target, x))
    code = encode_parts(xp, a, fmt.tensor_scale, "nearest_even", "saturate")
    code = xp.where(
        amax == 0,
        xp.astype(encode_parts(xp, _number(xp, 1.0, x), fmt.tensor_scale, "nearest_even", None), code.dtype),
        code,
    )
    return decode_scalar(xp, narrow_codes(xp, code, fmt.tensor_scale), fmt.tensor_scale, 32)[0]


def _scale_codes(xp: Backend, amax: Array, fmt: Block, tensor: Parts | None) -> Array:
    """Scale codes from amax. A block that holds NaN or infinity gets a NaN scale, a block of zeros the
    smallest scale; no scale is rounded to zero."""
    rule = SCALE_RULES[fmt.rule]
    a = split(xp, amax)
    a = a._replace(nan=a.nan | a.inf)
    if tensor is not None:
        a = divide(xp, a, tensor)
    if rule.round_amax:
        m = fmt.element.mantissa  # type: ignore[union-attr]  # Block refuses codebooks here
        carry = significand(xp, a, a.exponent - m, "nearest_even") >> (m + 1)
        a = a._replace(exponent=a.exponent + carry, significand=a.significand & -(1 << (a.top - m)))
    if rule.to_emax:
        a = a._replace(exponent=a.exponent - fmt.element.emax)  # type: ignore[union-attr]
    else:
        a = divide(xp, a, _number(xp, fmt.element.max + rule.stretch, amax))
    code = encode_parts(xp, a, fmt.scale, rule.rounding, "saturate")
    least = 0 * code + min_positive_code(fmt.scale)
    return narrow_codes(xp, xp.where(a.nan, code, xp.maximum(code, least)), fmt.scale)


def encode_block(xp: Backend, x: Array, fmt: Block, rounding: str, tensor: Array | None) -> Quantized:
    """x (float32 or float64) in a block format under a given tensor scale."""
    wide = xp.width(x)
    blocks = _blocks(xp, x, fmt)
    tensor_parts = None if tensor is None else split(xp, xp.astype(tensor, xp.floats[wide]).reshape(1))
    if fmt.zero_point:
        zero = 0 * blocks[..., 0]
        low = xp.minimum(xp.min_last(blocks), zero)
        high = xp.maximum(xp.max_last(blocks), zero)
        # element.max is what absmax divides by, but a range covers high - low steps
        spread = (high - low) * (fmt.element.high / (fmt.element.high - fmt.element.low))  # type: ignore[union-attr]
        codes = _scale_codes(xp, spread, fmt, tensor_parts)
    else:
        low = None
        codes = _scale_codes(xp, xp.max_last(abs(blocks)), fmt, tensor_parts)
    # a zero point needs the scale as a number anyway; so does a codebook, which is searched
    scale = split(xp, decode_scalar(xp, codes, fmt.scale, wide)[..., None])
    power_of_two = fmt.scale.mantissa == 0
    a = split(xp, blocks)
    if tensor_parts is not None:
        a = divide(xp, a, tensor_parts)
    a = _over(xp, a, scale, power_of_two)
    if fmt.division == "rounded":
        a = split(xp, join(xp, a, wide))
    points = None
    if fmt.zero_point:
        elements, points = _about_zero_point(
            xp, a, _over(xp, split(xp, low[..., None]), scale, power_of_two), fmt, rounding
        )  # type: ignore[index]
    elif hasattr(fmt.element, "values"):
        elements = encode_codebook(xp, join(xp, a, wide), fmt.element)  # type: ignore[arg-type]
    else:
        elements = encode_parts(xp, a, fmt.element, rounding, "saturate")
    shape = tuple(x.shape)
    return Quantized(
        _unblock(xp, narrow_codes(xp, elements, fmt.element), shape, fmt),
        _per_block(xp, codes, shape, fmt),
        None if points is None else _per_block(xp, points, shape, fmt),
        tensor,
        fmt,
    )


def _integer(xp: Backend, a: Parts, fmt: Any, rounding: str) -> Array:
    """a in units of the integer format, rounded; far values are held within the integers' range."""
    magnitude = significand(xp, a, 0 * a.exponent - fmt.fraction, rounding)
    magnitude = xp.where(a.exponent + fmt.fraction > a.top, 0 * magnitude + (1 << 20), magnitude)
    return xp.where(a.negative, -magnitude, magnitude)


def _about_zero_point(xp: Backend, a: Parts, low: Parts, fmt: Block, rounding: str) -> tuple[Array, Array]:
    """Codes and zero points: the integer grid is shifted so that ``low`` falls on its lowest code."""
    element: Any = fmt.element

    def clip(value: Array) -> Array:
        return xp.minimum(xp.maximum(value, 0 * value + element.low), 0 * value + element.high)

    def code(value: Array) -> Array:
        return value & ((1 << element.bits) - 1)

    point = clip(element.low - _integer(xp, low, element, "nearest_even"))
    codes = code(clip(_integer(xp, a, element, rounding) + point))
    return codes, narrow_codes(xp, code(point)[..., 0], element)


def decode_block(xp: Backend, q: Quantized, wide: int) -> Array:
    """Numbers of a block format: one rounding to float32 for the block's product, one for the tensor scale."""
    fmt = q.format
    shape = tuple(q.codes.shape)
    values = decode_scalar(xp, _blocks(xp, q.codes, fmt), fmt.element, wide)
    if q.zero_point is not None:
        values = values - decode_scalar(xp, _like_blocks(xp, q.zero_point, fmt), fmt.element, wide)
    scale = decode_scalar(xp, _like_blocks(xp, q.scale, fmt), fmt.scale, wide)
    values = _times(xp, values, scale, wide)
    if q.tensor_scale is not None:
        values = _times(xp, values, xp.astype(q.tensor_scale, xp.floats[wide]).reshape(1), wide)
    return _unblock(xp, values, shape, fmt)


def _times(xp: Backend, a: Array, b: Array, wide: int) -> Array:
    """a * b rounded once, also where the backend would flush subnormals."""
    if xp.flushes_subnormals and wide == 32:
        return join(xp, multiply(xp, split(xp, a), split(xp, b)), wide)
    return a * b
