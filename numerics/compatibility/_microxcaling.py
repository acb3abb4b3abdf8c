"""microxcaling's Python path, bit for bit, to reproduce results that were published with it.

Its numbers are not those of the MX standard: see `microxcaling`. Nothing else here is computed this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._backend import Array, Numpy, backend
from .._format import Block, Fixed, Float, Format
from .._names import format as read_format
from .._random import Stochastic
from .._rows import by_drawn_pieces


class _Element(NamedTuple):
    """``exponent``: exponent bits, 0 for integers; ``shift``: bits after the leading one; ``emax`` and ``top``:
    exponent that a block's maximum is set to, and where magnitudes are cut."""

    exponent: int
    shift: int
    emax: int
    top: float


_MODES = ("nearest_away", "nearest_even", "toward_zero")
_FLT_MIN = np.float32(2.0**-126)


def microxcaling(
    x: Array,
    fmt: Format | str,
    *,
    rounding: str | Stochastic = "nearest_away",
    overflow: str = "inf",
    noise: Array | None = None,
) -> Array:
    """x in an MX format, or in one of its elements, with the bits of microxcaling's own Python path.

    >>> import numpy as np
    >>> microxcaling(np.float32([[127.99999, 1, -0.0]]), "mxfp4")     # the standard has 96
    array([[128.,   0.,   0.]], dtype=float32)

    What differs from the standard, and stays so here:

    - the exponent is ``floor(log2(x))`` in x's own precision, one too high just below a power of two, and in
      bfloat16 far below it; at the top of float32 that gives infinity (NaN in MXINT8) for a finite block;
    - rounding is ``floor(|x| + 1/2)`` with a sum that is itself rounded, so what lies just below half the
      smallest number becomes it; ties go away from zero ("nearest", its default);
    - -0 becomes 0, though a negative number that rounds to zero becomes -0;
    - "dither" adds uniform noise before the floor, and the sum's rounding can move numbers that were exact.

    x: float32, float16 or bfloat16, numpy, torch or jax. ``fmt``: an MX block of any size along one axis, or
    one of MX's elements, or fp16 or bf16. ``rounding``: "nearest_away", "nearest_even" or "toward_zero" (its
    "nearest", "even" and "floor"), or `Stochastic` for "dither" with halfulp's random numbers, or ``noise``:
    uniform numbers in [0, 1) of x's shape in their place. ``overflow`` of an element by itself: "inf" or
    "saturate".

    Raises ValueError for anything else. Source: the behaviour of microxcaling at commit 7bc4195 (August 2024).
    """
    fmt = read_format(fmt)
    element = _element(fmt.element if isinstance(fmt, Block) else fmt)
    if element is None or (isinstance(fmt, Block) and not _is_mx(fmt)):
        raise ValueError(f"microxcaling has MX blocks (rule 'floor', scale e8m0), their elements, fp16, bf16: no {fmt}")
    if overflow not in ("inf", "saturate"):
        raise ValueError(f"overflow={overflow!r}: microxcaling has 'inf' and 'saturate'")
    if not isinstance(rounding, Stochastic) and rounding not in _MODES:
        raise ValueError(f"rounding={rounding!r}: microxcaling has {', '.join(_MODES)} and Stochastic (its dither)")
    numbers, narrow, restore = _in_float32(x)
    if isinstance(rounding, Stochastic):
        noise = _noise(numbers, rounding)
    elif noise is not None:
        noise = np.asarray(_in_float32(noise)[0])
    mode = rounding if isinstance(rounding, str) else "nearest_away"
    with np.errstate(all="ignore"):
        if isinstance(fmt, Block):
            return restore(_blocks(numbers, narrow, fmt, element, mode, noise))
        return restore(_elementwise(numbers, narrow, element, mode, noise, overflow == "saturate"))


def _is_mx(fmt: Block) -> bool:
    one_axis = isinstance(fmt.axis, int) and isinstance(fmt.size, int)
    plain = fmt.tensor_scale is None and not fmt.zero_point
    return one_axis and plain and fmt.rule == "floor" and fmt.scale == read_format("e8m0")


def _element(fmt: Format) -> _Element | None:
    if isinstance(fmt, Fixed) and fmt.signed and fmt.bits in (2, 4, 8) and fmt.fraction == fmt.bits - 2:
        return _Element(0, fmt.bits - 2, 0, fmt.high * 2.0**-fmt.fraction)
    known = map(read_format, ("e5m2", "e4m3fn", "e3m2", "e2m3", "e2m1", "fp16", "bf16"))
    if isinstance(fmt, Float) and fmt in known:
        return _Element(fmt.exponent, fmt.mantissa, fmt.emax, fmt.max)
    return None


Narrow = Callable[[np.ndarray], np.ndarray]


def _in_float32(x: Array) -> tuple[np.ndarray, Narrow, Callable[[np.ndarray], Array]]:
    """x as float32; what rounds a float32 to x's own type, as each of its operations does; the way back."""
    xp, x = backend(x)
    kind = str(x.dtype).removeprefix("torch.")
    if kind not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"microxcaling is reproduced for float32, float16 and bfloat16, not {kind}")
    if xp is Numpy or not hasattr(x, "detach"):
        values = np.asarray(x)
        own = values.dtype

        def narrow(y: np.ndarray) -> np.ndarray:
            return y if own == np.float32 else y.astype(own).astype(np.float32)

        def restore(y: np.ndarray) -> Array:
            y = y.astype(own)
            return y if xp is Numpy else xp.jnp.asarray(y)

        return values.astype(np.float32), narrow, restore
    torch, device, dtype = xp.torch, x.device, x.dtype

    def narrow_torch(y: np.ndarray) -> np.ndarray:
        return y if dtype == torch.float32 else torch.from_numpy(y).to(dtype).float().numpy()

    def restore_torch(y: np.ndarray) -> Array:
        return torch.from_numpy(y).to(dtype).to(device)

    return x.detach().float().cpu().numpy(), narrow_torch, restore_torch


def _noise(x: np.ndarray, rule: Stochastic) -> np.ndarray:
    unit = np.float32(2.0**-rule.bits)
    return by_drawn_pieces(Numpy, x, rule, lambda piece, drawn: drawn.value.astype(np.float32) * unit)


def _floor_log2(x: np.ndarray, narrow: Narrow) -> np.ndarray:
    """Of the logarithm rounded to float32, then to x's own type."""
    return np.floor(narrow(np.log2(x.astype(np.float64)).astype(np.float32)))


def _power_of_two(exponent: np.ndarray, narrow: Narrow) -> np.ndarray:
    return narrow(np.exp2(exponent.astype(np.float64)).astype(np.float32))


def _blocks(
    x: np.ndarray, narrow: Narrow, fmt: Block, element: _Element, mode: str, noise: np.ndarray | None
) -> np.ndarray:
    axis: Any = fmt.axis
    size: Any = fmt.size
    rows = np.moveaxis(x, axis, -1)
    n = rows.shape[-1]

    def cut(values: np.ndarray) -> np.ndarray:
        padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -n % size)])
        return padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)

    blocks = cut(rows)
    amax = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    amax = narrow(amax + narrow((amax == 0).astype(np.float32) * _FLT_MIN))
    shared = narrow(_floor_log2(amax, narrow) - np.float32(element.emax))
    shared = np.where(shared > 127, np.float32(np.nan), np.maximum(shared, np.float32(-127)))
    scale = _power_of_two(shared, narrow)
    noise = None if noise is None else cut(np.moveaxis(noise, axis, -1))
    y = _elementwise(narrow(blocks / scale), narrow, element, mode, noise, True)
    y = narrow(y * scale)
    y = y.reshape(*y.shape[:-2], y.shape[-2] * size)[..., :n]
    return np.ascontiguousarray(np.moveaxis(y, -1, axis))


def _elementwise(
    x: np.ndarray, narrow: Narrow, element: _Element, mode: str, noise: np.ndarray | None, saturate: bool
) -> np.ndarray:
    shift = np.float32(2.0**element.shift)
    if element.exponent:
        exponent = _floor_log2(narrow(np.abs(x) + (x == 0).astype(np.float32)), narrow)
        exponent = np.maximum(exponent, np.float32(2 - 2 ** (element.exponent - 1)))
        unit = _power_of_two(exponent, narrow)
        y = _round(narrow(narrow(x / unit) * shift), narrow, mode, noise)
        y = narrow(narrow(y / shift) * unit)
    else:
        y = narrow(_round(narrow(x * shift), narrow, mode, noise) / shift)
    top = narrow(np.array(element.top, np.float32))  # numbers are compared in x's own type, where it may be inf
    if saturate or not element.exponent:
        y = np.clip(y, -top, top)
    else:
        y = np.where(np.abs(y) > top, np.sign(y) * np.float32(np.inf), y)
    return np.where(np.isinf(x), x, y)


def _round(x: np.ndarray, narrow: Narrow, mode: str, noise: np.ndarray | None) -> np.ndarray:
    size, half = np.abs(x), np.float32(0.5)
    if noise is not None:
        size = np.floor(narrow(size + noise))
    elif mode == "toward_zero":
        size = np.floor(size)
    else:
        tie = np.mod(narrow(size - half), np.float32(2)) == 0
        size = np.floor(narrow(size + half))
        if mode == "nearest_even":
            size = narrow(size - tie.astype(np.float32))
    return np.where(np.isnan(x), x, np.sign(x) * size).astype(np.float32)
