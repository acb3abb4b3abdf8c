"""Codes as bytes, and bytes as codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ._backend import Array, Backend, backend
from ._block import Quantized
from ._codec import code_bits, narrow_codes, wide_codes
from ._format import Block, Format, Scalar
from ._names import format as read_format


def _contributions(bits: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """The least whole number of codes that fills whole bytes, least significant bit first: (codes, bytes,
    [(byte, code, left shift of the code into the byte)])."""
    count = 8 // math.gcd(bits, 8)
    size = count * bits // 8
    pairs = ((byte, code, code * bits - 8 * byte) for byte in range(size) for code in range(count))
    return count, size, [(byte, code, shift) for byte, code, shift in pairs if -bits < shift < 8]


def _shifted(part: Array, left: int) -> Array:
    return part << left if left > 0 else part >> -left if left < 0 else part


def pack_codes(codes: Array, fmt: Scalar) -> Array:
    """Pack codes along the last axis into bytes, least significant bit first; each row starts a byte.

    >>> import numpy as np
    >>> from ._names import format
    >>> pack_codes(np.array([1, 2, 3, 4], np.uint8), format("e3m2")).tobytes().hex()
    '813010'

    ``[..., n]`` unsigned codes to ``[..., ceil(n * bits / 8)]`` uint8. The first fp4 code is the low nibble.
    """
    xp, codes = backend(codes)
    _check_codes(xp, codes, fmt)
    count, size, contributions = _contributions(fmt.bits)
    n = codes.shape[-1]
    groups = _grouped(xp, codes if fmt.bits <= 8 else wide_codes(xp, codes), count)
    out: list[Array] = [None] * size
    for byte, code, shift in contributions:
        part = _shifted(groups[..., code], shift)
        out[byte] = part if out[byte] is None else out[byte] | part
    if fmt.bits > 8:
        # the right shift of a code of 32 bits drags its sign along, which the mask removes
        out = [xp.astype(byte & 0xFF, xp.codes[8]) for byte in out]
    packed = xp.stack_last(out)
    return packed.reshape(*codes.shape[:-1], packed.shape[-2] * size)[..., : -(-n * fmt.bits // 8)]


def _check_codes(xp: Backend, codes: Array, fmt: Scalar) -> None:
    expected = xp.codes[code_bits(fmt)]
    if codes.dtype != expected:
        raise ValueError(f"codes of {fmt} are {np.dtype(f'u{code_bits(fmt) // 8}')}, got {codes.dtype}")
    if not codes.ndim:
        raise ValueError(f"codes of {fmt} are packed along their last axis, got a scalar")


def _grouped(xp: Backend, x: Array, size: int) -> Array:
    """[..., n] to [..., groups, size], filled up with zeros."""
    n = x.shape[-1]
    if n % size:
        x = xp.pad_last(x, -n % size)
    return x.reshape(*x.shape[:-1], -(-n // size), size)


def unpack_codes(packed: Array, fmt: Scalar, n: int) -> Array:
    """The n codes along the last axis of what `pack_codes` made.

    Raises ValueError where the last axis is not ``ceil(n * bits / 8)`` bytes.
    """
    xp, packed = backend(packed)
    bits = fmt.bits
    expected = -(-n * bits // 8)
    if packed.dtype != xp.codes[8]:
        raise ValueError(f"packed codes are bytes (uint8), got {packed.dtype}")
    if not packed.ndim or packed.shape[-1] != expected:
        got = packed.shape[-1] if packed.ndim else "a scalar"
        raise ValueError(f"{n} codes of {fmt} take {expected} bytes a row, got {got}")
    count, size, contributions = _contributions(bits)
    groups = _grouped(xp, packed if bits <= 8 else wide_codes(xp, packed), size)
    out: list[Array] = [None] * count
    for byte, code, shift in contributions:
        part = _shifted(groups[..., byte], -shift)
        out[code] = part if out[code] is None else out[code] | part
    codes = xp.stack_last(out)
    if bits not in (8, 32):
        codes = codes & ((1 << bits) - 1)
    codes = codes.reshape(*packed.shape[:-1], codes.shape[-2] * count)[..., :n]
    return codes if bits <= 8 else narrow_codes(xp, codes, fmt)


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
        return sum(math.prod(part.shape) for part in parts if part is not None) + shared


def blocks_along(fmt: Block, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor of the given shape."""
    if fmt.size == "tensor":
        return (1,) * len(shape)
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    sizes = fmt.size if isinstance(fmt.size, tuple) else (fmt.size,)
    along = {axis % len(shape): size for axis, size in zip(axes, sizes)}
    whole = {axis: shape[axis] if size == "channel" else int(size) for axis, size in along.items()}
    return tuple(-(-d // max(whole[i], 1)) if i in whole else d for i, d in enumerate(shape))


def pack_quantized(q: Quantized | Array, fmt: Format | str) -> Packed:
    """Bytes of codes that `encode` made."""
    fmt = read_format(fmt)
    if not isinstance(fmt, Block):
        if isinstance(q, Quantized):
            raise ValueError(f"codes of {fmt} are an array, got a Quantized of {q.format}")
        _, codes = backend(q)
        shape = tuple(codes.shape)
        return Packed(pack_codes(codes if shape else codes.reshape(1), fmt), None, None, None, fmt, shape)
    if not isinstance(q, Quantized) or q.format != fmt:
        got = f"one of {q.format}" if isinstance(q, Quantized) else f"a {type(q).__name__}"
        raise ValueError(f"packing {fmt} takes the Quantized that encode returned for it, got {got}")
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
