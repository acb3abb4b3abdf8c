"""The public verbs: cast, encode, decode, pack, unpack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._backend import Array, Backend, backend
from ._block import Quantized, decode_block
from ._codec import decode_scalar, encode_codebook, encode_parts, narrow_codes
from ._format import Block, Codebook, Format
from ._names import format as read_format
from ._pack import Packed, pack_quantized, unpack_quantized
from ._parts import split
from ._policy import Policy
from ._random import Draws, Stochastic
from ._rows import by_drawn_pieces, by_pieces, decode_rows, encode_rows


def encode(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str | Stochastic = "nearest_even",
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str = "signed",
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

    rounding, overflow, nan, zero: see `Policy`. Elements of a block saturate; a block that holds NaN or
    infinity has a NaN scale and decodes to NaN.

    Raises ValueError for an unknown format or a policy that the format cannot express.
    """
    fmt, policy = read_format(fmt), Policy(rounding, overflow, nan, zero)
    xp, x = backend(x)
    if isinstance(fmt, Block):
        _check_block(fmt, x, policy)
        return encode_rows(xp, x, fmt, policy)
    return _by_elements(xp, x, policy, lambda piece, drawn: _encode_scalar(xp, piece, fmt, policy, drawn))


def _by_elements(xp: Backend, x: Array, policy: Policy, work: Callable[[Array, Draws | None], Array]) -> Array:
    rule = policy.rounding
    if isinstance(rule, Stochastic):
        return by_drawn_pieces(xp, x, rule, work)
    return by_pieces(xp, x, lambda piece: work(piece, None))


def _check_block(fmt: Block, x: Array, policy: Policy) -> None:
    if not x.ndim:
        raise ValueError(f"{fmt} needs an array with an axis to cut into blocks, got a scalar")
    if fmt.size != "tensor" and not -x.ndim <= fmt.axis < x.ndim:
        raise ValueError(f"{fmt} has blocks along axis {fmt.axis}, but the array has shape {tuple(x.shape)}")
    if policy.overflow not in (None, "saturate"):
        raise ValueError(f"overflow={policy.overflow!r}: the elements of a block saturate")
    if policy.nan is not None:
        raise ValueError(f"nan={policy.nan!r}: a block that holds NaN has a NaN scale and decodes to NaN")


def _encode_scalar(xp: Backend, x: Array, fmt: Any, policy: Policy, drawn: Draws | None) -> Array:
    source = xp.source(x)
    if isinstance(fmt, Codebook):
        return narrow_codes(xp, encode_codebook(xp, source, fmt, policy), fmt)
    if getattr(fmt, "mantissa", 0) > 23 and xp.width(source) == 32:
        source = xp.astype(source, xp.floats[64])
    return narrow_codes(xp, encode_parts(xp, split(xp, source), fmt, policy, drawn), fmt)


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
        return decode_rows(xp, codes, _width(dtype))
    if fmt is None:
        raise ValueError("decode needs the format of the codes, such as decode(codes, 'e4m3fn')")
    fmt = read_format(fmt)
    if isinstance(fmt, Block):
        raise ValueError(f"decode of {fmt} takes the Quantized that encode returned, not bare codes")
    xp, codes = backend(codes)
    wide = _width(dtype)
    return by_pieces(xp, codes, lambda piece: decode_scalar(xp, piece, fmt, wide))


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
    rounding: str | Stochastic = "nearest_even",
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str = "signed",
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
    fmt, policy = read_format(fmt), Policy(rounding, overflow, nan, zero)
    xp, x = backend(x)
    wide = 64 if xp.is_float(x) and xp.width(x) == 64 else 32

    def own(y: Array) -> Array:
        return xp.astype(y, x.dtype) if xp.is_float(x) else y

    if isinstance(fmt, Block):
        _check_block(fmt, x, policy)

        def numbers(codes: Array, scale: Array, points: Array | None, tensor: Array | None) -> Array:
            return own(decode_block(xp, codes, scale, points, fmt, tensor, wide))

        return encode_rows(xp, x, fmt, policy, numbers).codes

    def number(piece: Array, drawn: Draws | None) -> Array:
        return own(decode_scalar(xp, _encode_scalar(xp, piece, fmt, policy, drawn), fmt, wide))

    return _by_elements(xp, x, policy, number)


def pack(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str | Stochastic = "nearest_even",
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str = "signed",
) -> Packed:
    """Codes and scales of x, byte for byte as on disk.

    >>> import numpy as np
    >>> pack(np.float32([[1, 2, 3, 4]]), "mxfp4").codes.tobytes().hex()
    '4265'

    Policies as in `encode`, layout as in `Packed`.
    """
    return pack_quantized(encode(x, fmt, rounding=rounding, overflow=overflow, nan=nan, zero=zero), fmt)


def unpack(packed: Packed, *, dtype: Any = None) -> Array:
    """The numbers that `pack` stored, as `decode` gives them.

    >>> import numpy as np
    >>> unpack(pack(np.float32([[1, 2, 3, 4]]), "mxfp4"))
    array([[1., 2., 3., 4.]], dtype=float32)
    """
    return decode(unpack_quantized(packed), packed.format, dtype=dtype)
