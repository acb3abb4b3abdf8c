"""The public verbs: cast, encode, decode, pack, unpack."""

from __future__ import annotations

from typing import Any

from ._backend import Array, Backend, Numpy, backend
from ._block import Quantized, decode_block, encode_block, tensor_scale
from ._codec import decode_scalar, encode_codebook, encode_parts, narrow_codes
from ._format import Block, Codebook, Format
from ._names import format as read_format
from ._pack import Packed, pack_quantized, unpack_quantized
from ._parts import split

# elements worked on at a time on a CPU: the intermediates stay in the cache
CHUNK = 1 << 17


def encode(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    nan: str = "zero",
) -> Any:
    """Codes of the numbers in x.

    >>> import numpy as np
    >>> encode(np.float32([1.0, 464.0, 465.0, -np.inf]), "e4m3fn", overflow="nan")
    array([ 56, 126, 127, 255], dtype=uint8)
    >>> encode(np.float32([[1, 2, 3, 4]]), "mxfp4").scale
    array([[127]], dtype=uint8)

    x: numpy, torch or jax, any shape, floats of any width or integers. A scalar format gives unsigned codes
    of x's shape (uint8, uint16 or uint32), a block format a `Quantized`. Every number is rounded once, from
    its exact value; an element of a block as if by exact division by its scale.

    rounding: one of `ROUNDINGS`. A value is rounded first and tested for overflow then.
    overflow: "saturate" (largest number; infinities too), "inf" or "nan"; default "inf" where the format has
    infinities, else "saturate". Below the range of an unsigned format counts as overflow: "saturate" gives its
    lowest number. Elements of a block saturate.
    nan: what NaN becomes in a format without one: "zero" or "max". Elsewhere NaN stays NaN and keeps its sign
    where the format has room. A block that holds NaN or infinity has a NaN scale and decodes to NaN.

    Raises ValueError for an unknown format or a policy that the format cannot express.
    """
    fmt = read_format(fmt)
    xp, x = backend(x)
    if isinstance(fmt, Block) and not x.ndim:
        raise ValueError(f"{fmt} needs an array with an axis to cut into blocks, got a scalar")
    if isinstance(fmt, Block) and fmt.size != "tensor" and not -x.ndim <= fmt.axis < x.ndim:
        raise ValueError(f"{fmt} has blocks along axis {fmt.axis}, but the array has shape {tuple(x.shape)}")
    if not isinstance(fmt, Block):
        return _encode_scalar(xp, x, fmt, rounding, overflow, nan)
    if overflow not in (None, "saturate"):
        raise ValueError(f"overflow={overflow!r}: the elements of a block saturate")
    tensor = tensor_scale(xp, xp.source(x), fmt)
    along_rows = fmt.size != "tensor" and fmt.axis % x.ndim == x.ndim - 1
    if xp.flushes_subnormals or not along_rows or _count(x.shape) <= CHUNK:
        return encode_block(xp, xp.source(x), fmt, rounding, tensor)
    rows = x.reshape(-1, x.shape[-1])
    step = max(1, CHUNK // rows.shape[1])
    parts = [
        encode_block(xp, xp.source(rows[i : i + step]), fmt, rounding, tensor)
        for i in range(0, rows.shape[0], step)
    ]

    def joined(pick: str) -> Array:
        pieces = [getattr(part, pick) for part in parts]
        if pieces[0] is None:
            return None
        whole = _concatenate(xp, pieces)
        return whole.reshape(*x.shape[:-1], whole.shape[-1])

    return Quantized(joined("codes"), joined("scale"), joined("zero_point"), tensor, fmt)


def _concatenate(xp: Backend, pieces: list[Array]) -> Array:
    if xp is Numpy:
        import numpy as np

        return np.concatenate(pieces)
    import torch

    return torch.cat(pieces)


def _count(shape: Any) -> int:
    count = 1
    for d in shape:
        count *= int(d)
    return count


def _encode_scalar(xp: Backend, x: Array, fmt: Any, rounding: str, overflow: str | None, nan: str) -> Array:
    shape = tuple(x.shape)

    def one(piece: Array) -> Array:
        source = xp.source(piece)
        if isinstance(fmt, Codebook):
            return narrow_codes(xp, encode_codebook(xp, source, fmt, nan), fmt)
        if getattr(fmt, "mantissa", 0) > 23 and xp.width(source) == 32:
            source = xp.astype(source, xp.floats[64])
        return narrow_codes(xp, encode_parts(xp, split(xp, source), fmt, rounding, overflow, nan), fmt)

    flat = x.reshape(-1)
    if xp.flushes_subnormals or flat.shape[0] <= CHUNK:
        return one(flat).reshape(shape)
    pieces = [one(flat[i : i + CHUNK]) for i in range(0, flat.shape[0], CHUNK)]
    return _concatenate(xp, pieces).reshape(shape)


def decode(codes: Any, fmt: Format | str | None = None, *, dtype: Any = None) -> Array:
    """Numbers from codes: float32, or float64 with ``dtype="float64"``.

    >>> import numpy as np
    >>> decode(np.uint8([0x38, 0x7E, 0xFF]), "e4m3fn")
    array([  1., 448.,  nan], dtype=float32)

    codes: what `encode` returned; a `Quantized` brings its format with it. Exact, but for products of an
    element and a scale that float32 cannot hold, which are rounded once (nearest even).
    Raises ValueError where a scalar format's codes come without a format.
    """
    if isinstance(codes, Quantized):
        xp, _ = backend(codes.codes)
        return decode_block(xp, codes, _width(dtype))
    if fmt is None:
        raise ValueError("decode needs the format of the codes, such as decode(codes, 'e4m3fn')")
    fmt = read_format(fmt)
    if isinstance(fmt, Block):
        raise ValueError(f"decode of {fmt} takes the Quantized that encode returned, not bare codes")
    xp, codes = backend(codes)
    return decode_scalar(xp, codes, fmt, _width(dtype))


def _width(dtype: Any) -> int:
    if dtype is None:
        return 32
    text = str(dtype).removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>")
    widths = {"float32": 32, "float64": 64}
    if text not in widths:
        raise ValueError(f"decode gives float32 or float64, not {dtype}; convert the result")
    return widths[text]


def cast(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    nan: str = "zero",
) -> Array:
    """x with every number replaced by its nearest in the format: ``decode(encode(x))``.

    >>> import numpy as np
    >>> cast(np.float32([0.3, 2.6, 100]), "e2m1")
    array([0.5, 3. , 6. ], dtype=float32)
    >>> cast(np.float32([[1.0, 2.6, 127.99999]]), "mxfp4")
    array([[ 0.,  0., 96.]], dtype=float32)

    The result has x's backend, shape and dtype (float32 for integers); a result that x's dtype cannot hold is
    rounded to it from float32. Policies as in `encode`.
    """
    fmt = read_format(fmt)
    xp, x = backend(x)
    codes = encode(x, fmt, rounding=rounding, overflow=overflow, nan=nan)
    wide = 64 if xp.is_float(x) and xp.width(x) == 64 else 32
    if isinstance(fmt, Block):
        y = decode_block(xp, codes, wide)
    else:
        y = decode_scalar(xp, codes, fmt, wide)
    return xp.astype(y, x.dtype) if xp.is_float(x) else y


def pack(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    nan: str = "zero",
) -> Packed:
    """Codes and scales of x, byte for byte as on disk.

    >>> import numpy as np
    >>> pack(np.float32([[1, 2, 3, 4]]), "mxfp4").codes.tobytes().hex()
    '4265'

    Policies as in `encode`, layout as in `Packed`.
    """
    return pack_quantized(encode(x, fmt, rounding=rounding, overflow=overflow, nan=nan), fmt)


def unpack(packed: Packed, *, dtype: Any = None) -> Array:
    """The numbers that `pack` stored, as `decode` gives them.

    >>> import numpy as np
    >>> unpack(pack(np.float32([[1, 2, 3, 4]]), "mxfp4"))
    array([[1., 2., 3., 4.]], dtype=float32)
    """
    return decode(unpack_quantized(packed), packed.format, dtype=dtype)
