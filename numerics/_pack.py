"""Codes as bytes, and bytes as codes."""

from __future__ import annotations

from dataclasses import dataclass

from ._backend import Array, Backend, backend
from ._block import Quantized
from ._codec import code_bits, narrow_codes, wide_codes
from ._format import Block, Format, Scalar
from ._names import format as read_format


def _contributions(bits: int) -> list[tuple[int, int, int]]:
    """(byte, code, shift): eight codes of ``bits`` bits fill ``bits`` bytes, least significant bit first."""
    pairs = ((byte, code, code * bits - 8 * byte) for byte in range(bits) for code in range(8))
    return [(byte, code, shift) for byte, code, shift in pairs if -bits < shift < 8]


def pack_codes(codes: Array, fmt: Scalar) -> Array:
    """Pack codes along the last axis into bytes, least significant bit first; each row starts a byte.

    >>> import numpy as np
    >>> from ._names import format
    >>> pack_codes(np.array([1, 2, 3, 4], np.uint8), format("e3m2")).tobytes().hex()
    '813010'

    ``[..., n]`` unsigned codes to ``[..., ceil(n * bits / 8)]`` uint8. The first fp4 code is the low nibble.
    """
    xp, codes = backend(codes)
    bits = fmt.bits
    n = codes.shape[-1]
    if bits == 8:
        return xp.astype(codes, xp.codes[8])
    wide = wide_codes(xp, codes)
    if -n % 8:
        wide = xp.pad_last(wide, -n % 8)
    groups = wide.reshape(*wide.shape[:-1], (n + 7) // 8, 8)
    out = [0 * groups[..., 0]] * bits
    for byte, code, shift in _contributions(bits):
        part = groups[..., code]
        # a right shift of int32 drags the sign along: only codes of 32 bits have one, and the mask removes it
        out[byte] = out[byte] | ((part << shift if shift >= 0 else part >> -shift) & 0xFF)
    packed = xp.astype(xp.stack_last(out), xp.codes[8])
    return packed.reshape(*wide.shape[:-1], -1)[..., : -(-n * bits // 8)]


def unpack_codes(packed: Array, fmt: Scalar, n: int) -> Array:
    """The n codes along the last axis of what `pack_codes` made.

    Raises ValueError where the last axis is not ``ceil(n * bits / 8)`` bytes.
    """
    xp, packed = backend(packed)
    bits = fmt.bits
    expected = -(-n * bits // 8)
    if packed.shape[-1] != expected:
        raise ValueError(f"{n} codes of {fmt} take {expected} bytes a row, got {packed.shape[-1]}")
    if bits == 8:
        return packed
    groups_count = (n + 7) // 8
    wide = wide_codes(xp, packed)
    if groups_count * bits != expected:
        wide = xp.pad_last(wide, groups_count * bits - expected)
    groups = wide.reshape(*wide.shape[:-1], groups_count, bits)
    out = [0 * groups[..., 0]] * 8
    for byte, code, shift in _contributions(bits):
        part = groups[..., byte]
        out[code] = out[code] | (part >> shift if shift >= 0 else part << -shift)
    mask = (1 << bits) - 1 if bits < 32 else -1
    codes = xp.stack_last(out) & mask
    return narrow_codes(xp, codes.reshape(*wide.shape[:-1], -1)[..., :n], fmt)


@dataclass(frozen=True)
class Packed:
    """A tensor in bytes, as on disk.

    ``codes``: uint8, packed along the last axis (`pack_codes`). ``scale`` and ``zero_point``: likewise, along
    their own last axis. ``shape`` is the tensor's. What a scalar format does not have is None.
    """

    codes: Array
    scale: Array | None
    zero_point: Array | None
    tensor_scale: Array | None
    format: Format
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        parts = (self.codes, self.scale, self.zero_point)
        shared = 0 if self.tensor_scale is None else 4
        return sum(_size(part) for part in parts if part is not None) + shared


def _size(part: Array) -> int:
    size = 1
    for d in part.shape:
        size *= d
    return size


def blocks_along(fmt: Block, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor of the given shape."""
    if fmt.size == "tensor":
        return (1,) * len(shape)
    axis = fmt.axis % len(shape)
    size = shape[axis] if fmt.size == "channel" else fmt.size
    return tuple(-(-d // max(size, 1)) if i == axis else d for i, d in enumerate(shape))


def pack_quantized(q: Quantized | Array, fmt: Format | str) -> Packed:
    """Bytes of codes that `encode` made."""
    fmt = read_format(fmt)
    if not isinstance(fmt, Block):
        xp, codes = backend(q)
        shape = tuple(codes.shape)
        return Packed(
            pack_codes(codes.reshape(*shape[:-1], -1) if shape else codes.reshape(1), fmt),
            None,
            None,
            None,
            fmt,
            shape,
        )
    assert isinstance(q, Quantized)
    points = None if q.zero_point is None else pack_codes(q.zero_point, fmt.element)
    return Packed(
        pack_codes(q.codes, fmt.element),
        pack_codes(q.scale, fmt.scale),
        points,
        q.tensor_scale,
        fmt,
        tuple(q.codes.shape),
    )


def unpack_quantized(p: Packed) -> Quantized | Array:
    """The codes again: `Quantized` for a block format, an array of codes for a scalar one."""
    if not isinstance(p.format, Block):
        n = p.shape[-1] if p.shape else 1
        return unpack_codes(p.codes, p.format, n).reshape(p.shape)
    scales = blocks_along(p.format, p.shape)
    assert p.scale is not None
    return Quantized(
        unpack_codes(p.codes, p.format.element, p.shape[-1]),
        unpack_codes(p.scale, p.format.scale, scales[-1]),
        None if p.zero_point is None else unpack_codes(p.zero_point, p.format.element, scales[-1]),
        p.tensor_scale,
        p.format,
    )


__all__ = ["Packed", "code_bits", "pack_codes", "unpack_codes", "Backend"]
