"""The public verbs: cast, encode, decode, pack, unpack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import fast
from ._backend import Array, Backend, Numpy, backend
from ._block import Quantized, decode_block
from ._codec import decode_scalar, encode_parts, narrow_codes
from ._format import Block, Format, Table
from ._names import format as read_format
from ._pack import Packed, pack_quantized, unpack_quantized
from ._parts import split
from ._policy import Policy
from ._random import Draws, Stochastic
from ._rows import by_drawn_pieces, by_pieces, decode_rows, encode_rows
from ._table import encode_table, table_source
from .compatibility._profiles import resolve


def encode(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str | Stochastic | None = None,
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str | None = None,
    profile: str | None = None,
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
    infinity has a NaN scale and decodes to NaN. profile: one of `PROFILES`, whose library's cast is reproduced;
    what is given besides goes before what the profile says.

    Raises ValueError for an unknown format, a policy that the format cannot express, an unknown profile, or a
    format that the profile has not.
    """
    chosen = resolve(fmt, profile, rounding, overflow, nan, zero)
    if chosen.emulate() is not None:
        raise ValueError(f"profile {profile!r} gives numbers that are not all codes of {chosen.format}: use cast")
    fmt, policy = chosen.format, chosen.policy
    xp, x = backend(x)
    x = chosen.prepare(xp, x)
    if isinstance(fmt, Block):
        _check_block(fmt, x, policy)
    if (quick := fast.encode(xp, x, fmt, policy, _encode_float32)) is not None:
        return quick
    if isinstance(fmt, Block):
        return encode_rows(xp, x, fmt, policy)
    return _by_elements(xp, x, policy, lambda piece, drawn: _encode_scalar(xp, piece, fmt, policy, drawn))


def _encode_float32(x: Array, fmt: Any, policy: Policy) -> Array:
    return _encode_scalar(Numpy, x, fmt, policy, None)


def _by_elements(xp: Backend, x: Array, policy: Policy, work: Callable[[Array, Draws | None], Array]) -> Array:
    rule = policy.rounding
    if isinstance(rule, Stochastic):
        return by_drawn_pieces(xp, x, rule, work)
    return by_pieces(xp, x, lambda piece: work(piece, None))


def _check_block(fmt: Block, x: Array, policy: Policy) -> None:
    if not x.ndim:
        raise ValueError(f"{fmt} needs an array with an axis to cut into blocks, got a scalar")
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    inside = all(-x.ndim <= axis < x.ndim for axis in axes) and len({axis % x.ndim for axis in axes}) == len(axes)
    if fmt.size != "tensor" and not inside:
        along = f"axis {fmt.axis}" if isinstance(fmt.axis, int) else f"axes {fmt.axis}, {len(axes)} different ones"
        raise ValueError(f"{fmt} has blocks along {along}, but the array has shape {tuple(x.shape)}")
    if policy.overflow not in (None, "saturate"):
        raise ValueError(f"overflow={policy.overflow!r}: the elements of a block saturate")
    if policy.nan is not None:
        raise ValueError(f"nan={policy.nan!r}: a block that holds NaN has a NaN scale and decodes to NaN")


def _encode_scalar(xp: Backend, x: Array, fmt: Any, policy: Policy, drawn: Draws | None) -> Array:
    source = xp.source(x)
    if isinstance(fmt, Table):
        source = table_source(xp, source, fmt, drawn)
        return narrow_codes(xp, encode_table(xp, source, fmt, policy, drawn), fmt)
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
        wide = _width(dtype)
        quick = fast.decode_quantized(xp, codes) if wide == 32 else None
        return decode_rows(xp, codes, wide) if quick is None else quick
    if fmt is None:
        raise ValueError("decode needs the format of the codes, such as decode(codes, 'e4m3fn')")
    fmt = read_format(fmt)
    if isinstance(fmt, Block):
        raise ValueError(f"decode of {fmt} takes the Quantized that encode returned, not bare codes")
    xp, codes = backend(codes)
    wide = _width(dtype)
    if wide == 32 and (quick := fast.decode(xp, codes, fmt)) is not None:
        return quick
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
    rounding: str | Stochastic | None = None,
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str | None = None,
    out: Array | None = None,
    profile: str | None = None,
) -> Array:
    """x with every number replaced by its nearest in the format: ``decode(encode(x))``.

    >>> import numpy as np
    >>> cast(np.float32([0.3, 2.6, 100]), "e2m1")
    array([0.5, 3. , 6. ], dtype=float32)
    >>> cast(np.float32([[1.0, 2.6, 127.99999]]), "mxfp4")
    array([[ 0.,  0., 96.]], dtype=float32)

    The result has x's backend, shape and dtype (float32 for integers); a result that x's dtype cannot hold is
    rounded to it from float32. Policies as in `encode`.

    out: where the result goes, and what is returned: contiguous, of the result's backend, shape and dtype; x itself
    for a cast in place. Memory that is there already saves more time than rounding takes. jax arrays cannot be
    written to: ``jax.jit(functools.partial(cast, fmt=fmt), donate_argnums=0)`` reuses x's memory. Raises ValueError
    for an ``out`` that cannot take the result, or overlaps x in part.
    """
    if fast.compiling(x):
        from .fast._compiled import cast as compiled_cast

        return compiled_cast(x, out, fmt, rounding, overflow, nan, zero, profile)
    chosen = resolve(fmt, profile, rounding, overflow, nan, zero)
    xp, x = backend(x)
    dtype = x.dtype if xp.is_float(x) else None
    if out is not None:
        fast.check_out(xp, out, x, xp.floats[32] if dtype is None else dtype)
    if (emulation := chosen.emulate()) is not None:
        return _placed(xp, emulation(x), out)
    fmt, policy = chosen.format, chosen.policy
    wide = 64 if dtype is not None and xp.width(x) == 64 else 32
    x = chosen.prepare(xp, x)

    def own(y: Array) -> Array:
        return y if dtype is None else xp.astype(y, dtype)

    if isinstance(fmt, Block):
        _check_block(fmt, x, policy)
    if dtype is None or x.dtype == dtype:
        quick = fast.cast(xp, x, fmt, policy, out, _encode_float32)
        if quick is not None:
            return quick
    if isinstance(fmt, Block):

        def numbers(codes: Array, scale: Array, points: Array | None, tensor: Array | None) -> Array:
            return own(decode_block(xp, codes, scale, points, fmt, tensor, wide))

        return _placed(xp, encode_rows(xp, x, fmt, policy, numbers).codes, out)

    def number(piece: Array, drawn: Draws | None) -> Array:
        if xp.traces and wide == 32 and (near := fast.nearest_even(xp, xp.source(piece), fmt, policy)) is not None:
            return own(near)
        return own(decode_scalar(xp, _encode_scalar(xp, piece, fmt, policy, drawn), fmt, wide))

    return _placed(xp, _by_elements(xp, x, policy, number), out)


def _placed(xp: Backend, y: Array, out: Array | None) -> Array:
    """y, or ``out`` with y in it."""
    if out is None:
        return y
    if xp is Numpy:
        out[...] = y
    else:
        out.copy_(y)
    return out


def pack(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str | Stochastic | None = None,
    overflow: str | None = None,
    nan: str | int | tuple[int, int] | None = None,
    zero: str | None = None,
    profile: str | None = None,
) -> Packed:
    """Codes and scales of x, byte for byte as on disk.

    >>> import numpy as np
    >>> pack(np.float32([[1, 2, 3, 4]]), "mxfp4").codes.tobytes().hex()
    '4265'

    Policies as in `encode`, layout as in `Packed`.
    """
    codes = encode(x, fmt, rounding=rounding, overflow=overflow, nan=nan, zero=zero, profile=profile)
    return pack_quantized(codes, codes.format if isinstance(codes, Quantized) else fmt)


def unpack(packed: Packed, *, dtype: Any = None) -> Array:
    """The numbers that `pack` stored, as `decode` gives them.

    >>> import numpy as np
    >>> unpack(pack(np.float32([[1, 2, 3, 4]]), "mxfp4"))
    array([[1., 2., 3., 4.]], dtype=float32)
    """
    return decode(unpack_quantized(packed), packed.format, dtype=dtype)
