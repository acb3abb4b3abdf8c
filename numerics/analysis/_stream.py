"""What rounding to a format does to a tensor, a chunk of it in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._backend import Array, backend
from .._block import Quantized
from .._cast import cast, decode, encode
from .._format import Block, Format
from .._names import format as read_format
from .._random import Stochastic
from .._scales import scale_rule
from ._describe import EXHAUSTIVE, describe, values_of
from ._errors import ErrorReport, ErrorStats, block_extents, storage_bits

CHUNK = 1 << 18  # numbers worked on at a time


def error_stats(
    x: Array, fmt: Format | str, *, rounding: str | Stochastic = "nearest_even", overflow: str | None = None
) -> ErrorStats:
    """What rounding x to a format does to it.

    >>> import numpy as np
    >>> stats = error_stats(np.linspace(-1, 1, 4097, dtype=np.float32), "int8:channel")
    >>> round(stats.sqnr_db, 1), stats.clipped, stats.underflowed
    (48.1, 0, 16)

    x: numpy (a memory map too), torch or jax, any shape. It is read a chunk at a time, twice for formats whose
    scale depends on the whole tensor, so the memory taken does not grow with it; only blocks along the first
    axis of the size of the whole axis, and tensors with NaN or infinity under such formats, are worked on whole.
    Sums are in float64. Policies as in `cast`. Raises ValueError as `cast` does.
    """
    return error_report(x, [fmt], rounding=rounding, overflow=overflow).rows[0]


def error_report(
    x: Array,
    formats: Sequence[Format | str],
    *,
    rounding: str | Stochastic = "nearest_even",
    overflow: str | None = None,
) -> ErrorReport:
    """What rounding x to each of several formats does to it, in one pass over x.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    >>> print(error_report(x, ["mxfp4", "nvfp4", "int4:g128"]))
    format      bits  SQNR dB      MSE  max abs  max rel  clipped  to zero  subnormal    cosine
    mxfp4       4.25     18.8   0.0131    0.958        1    2.44%    9.11%     16.93%  0.993407
    nvfp4      4.502     20.4  0.00907    0.519        1    3.55%    7.03%     13.70%  0.995439
    int4:g128  4.125     18.7   0.0134    0.282        1    0.20%   16.30%          0  0.993350

    As `error_stats`. A share is of the finite numbers; "to zero" are those that were not zero before.
    """
    if isinstance(formats, (str, Block)) or not formats:
        raise ValueError(f"formats={formats!r}: give a list of formats, such as ['mxfp4', 'int4:g128']")
    _, x = backend(x)
    x = x if len(x.shape) else x.reshape(1)
    return ErrorReport(
        stats_over(lambda rows: x[rows], tuple(x.shape), [read_format(f) for f in formats], rounding, overflow)
    )


class _Piece(NamedTuple):
    """A chunk of the source as floats, once for all formats: itself, as float64 with zeros for what is not
    finite, the mask of what is (None: all), what is not zero, magnitudes (infinity for 0), figures of its own."""

    x: np.ndarray
    wide: np.ndarray
    finite: np.ndarray | None
    nonzero: np.ndarray
    divisor: np.ndarray
    nonfinite: int
    signal: float


def floats(x: Array) -> np.ndarray:
    """Any backend's numbers as numpy float32 or float64, exact but for integers of more than 53 bits."""
    xp, x = backend(x)
    if hasattr(x, "detach"):
        x = x.detach().cpu()
    return np.asarray(xp.source(x))


def _piece(x: np.ndarray) -> _Piece:
    wide = x.astype(np.float64)
    flat = wide.reshape(-1)
    signal = float(np.dot(flat, flat))
    finite = None
    if not math.isfinite(signal):
        finite = np.isfinite(wide)
        wide = np.where(finite, wide, 0.0)
        signal = float(np.dot(wide.reshape(-1), wide.reshape(-1)))
    nonzero = wide != 0
    divisor = np.where(nonzero, np.abs(wide), np.inf)
    return _Piece(x, wide, finite, nonzero, divisor, 0 if finite is None else int((~finite).sum()), signal)


def stats_over(
    read: Callable[[slice], Array],
    shape: tuple[int, ...],
    formats: Sequence[Format],
    rounding: str | Stochastic = "nearest_even",
    overflow: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[ErrorStats, ...]:
    """Statistics of a tensor of that shape of which ``read`` gives rows, a chunk in memory at a time.

    ``progress`` is called with the share of all work done since the last call, in numbers of the source.
    """
    totals = [ErrorStats(fmt, bits=storage_bits(fmt, shape)) for fmt in formats]
    if not math.prod(shape):
        for fmt in formats:
            cast(np.zeros(shape, np.float32), fmt, rounding=rounding, overflow=overflow)  # for its errors
        return tuple(totals)
    width = math.prod(shape[1:])
    alike = [_streamed(fmt, shape, rounding) for fmt in formats]
    ends: np.ndarray | None = None
    if any(isinstance(fmt, Block) and _tensor_wide(fmt) for fmt in formats):
        ends = extremes(read, shape)
    whole = [not ok or (ends is None and _tensor_wide(fmt)) for ok, fmt in zip(alike, formats)]
    groups = [(slice(0, shape[0]), [i for i, alone in enumerate(whole) if alone])] if any(whole) else []
    streamed = [i for i, alone in enumerate(whole) if not alone]
    if streamed:
        quantum = math.lcm(*(_quantum(formats[i], shape) for i in streamed))
        step = max(quantum, CHUNK // width // quantum * quantum)
        groups += [(slice(i, min(i + step, shape[0])), streamed) for i in range(0, shape[0], step)]
    for rows, which in groups:
        piece = _piece(floats(read(rows)))
        for i in which:
            offset = rows.start * width
            at = replace(rounding, start=rounding.start + offset) if isinstance(rounding, Stochastic) else rounding
            lead = ends if ends is not None and _tensor_wide(formats[i]) and not whole[i] else None
            with np.errstate(over="ignore", invalid="ignore"):
                totals[i] += _measure(piece, formats[i], at, overflow, lead)
        if progress is not None:
            progress(piece.x.size * len(which) // len(formats))
    return tuple(totals)


def _tensor_wide(fmt: Format) -> bool:
    """Whether a scale depends on the whole tensor."""
    return isinstance(fmt, Block) and (fmt.size == "tensor" or fmt.tensor_scale is not None)


def _streamed(fmt: Format, shape: tuple[int, ...], rounding: Any) -> bool:
    """Whether rows can be rounded apart."""
    if not isinstance(fmt, Block):
        return not isinstance(rounding, Stochastic) or rounding.shape is None
    if isinstance(rounding, Stochastic) and (rounding.shape is not None or _tensor_wide(fmt)):
        return False
    if fmt.size == "tensor":
        return not scale_rule(fmt.rule).search
    return block_extents(fmt, len(shape)).get(0, 1) > 0


def _quantum(fmt: Format, shape: tuple[int, ...]) -> int:
    """Rows that blocks share: chunks are of a multiple of them."""
    if isinstance(fmt, Block) and fmt.size != "tensor":
        return block_extents(fmt, len(shape)).get(0, 1)
    return 1


def extremes(read: Callable[[slice], Array], shape: tuple[int, ...]) -> np.ndarray | None:
    """The largest and the smallest number of a tensor; None where one is not finite."""
    step = max(1, CHUNK // max(math.prod(shape[1:]), 1))
    high, low = -math.inf, math.inf
    for start in range(0, shape[0], step):
        x = floats(read(slice(start, min(start + step, shape[0]))))
        high, low = max(high, float(x.max())), min(low, float(x.min()))
        if not (math.isfinite(high) and math.isfinite(low)):
            return None
    return np.array([high, low])


def _led(x: np.ndarray, ends: np.ndarray, fmt: Any) -> tuple[np.ndarray, int]:
    """The chunk after rows that hold the tensor's extremes, so that its scale comes out as the tensor's."""
    per_row = math.prod(x.shape[1:])
    quantum = _quantum(fmt, x.shape)
    rows = quantum * -(-2 // (quantum * per_row))
    lead = np.zeros((rows, *x.shape[1:]), x.dtype)
    lead.reshape(-1)[:2] = ends
    return np.concatenate([lead, x]), rows


def _measure(piece: _Piece, fmt: Any, rounding: Any, overflow: str | None, ends: np.ndarray | None) -> ErrorStats:
    x, skip = (piece.x, 0) if ends is None else _led(piece.x, ends, fmt)
    if isinstance(fmt, Block):
        q: Quantized = encode(x, fmt, rounding=rounding, overflow=overflow)
        y = decode(q, dtype=x.dtype)[skip:]
        clipped, subnormal = _block_marks(piece, y, q.codes[skip:], fmt)
    else:
        y = cast(x, fmt, rounding=rounding, overflow=overflow)
        clipped, subnormal = _scalar_marks(piece, y, fmt)
    wide = y.astype(np.float64)
    lost = 0
    if not math.isfinite(float(wide.sum())):
        bad = ~np.isfinite(wide)
        lost = int((bad if piece.finite is None else bad & piece.finite).sum())
        wide = np.where(bad, piece.wide, wide)
    if piece.finite is not None:
        wide = np.where(piece.finite, wide, 0.0)
    error = (wide - piece.wide).reshape(-1)
    size, flat = np.abs(error), wide.reshape(-1)
    return ErrorStats(
        format=fmt,
        count=piece.x.size,
        nonfinite=piece.nonfinite,
        lost=lost,
        clipped=clipped,
        underflowed=int(np.count_nonzero(piece.nonzero & (wide == 0))),
        subnormal=subnormal,
        signal=piece.signal,
        noise=float(np.dot(error, error)),
        decoded=float(np.dot(flat, flat)),
        product=float(np.dot(flat, piece.wide.reshape(-1))),
        bias=float(error.sum()),
        max_abs_error=math.inf if lost else float(size.max()),
        max_relative_error=math.inf if lost else float((size / piece.divisor.reshape(-1)).max()),
    )


def _count(mask: np.ndarray, piece: _Piece) -> int:
    return int(np.count_nonzero(mask if piece.finite is None else mask & piece.finite))


def _scalar_marks(piece: _Piece, y: np.ndarray, fmt: Any) -> tuple[int, int]:
    """Numbers beyond the range, and results that are subnormal."""
    facts = describe(fmt)
    beyond = (piece.wide > facts.max) | (piece.wide < min(facts.lowest, 0.0))
    if not facts.min_normal:
        return _count(beyond, piece), 0
    size = np.abs(y)
    return _count(beyond, piece), _count((size > 0) & (size < facts.min_normal), piece)


_TOP, _BOTTOM, _SUBNORMAL = 1, 2, 4


@lru_cache(maxsize=64)
def _marks(fmt: Any) -> np.ndarray:
    return _marks_of(values_of(fmt), fmt)


def _marks_of(values: np.ndarray, fmt: Any) -> np.ndarray:
    """Of elements before scaling: whether they are the largest, the lowest, or a subnormal number."""
    facts = describe(fmt)
    size = np.abs(values)
    subnormal = (size > 0) & (size < (facts.min_normal or 0.0))
    marks = _TOP * (values == facts.max) + _BOTTOM * (values == facts.lowest) + _SUBNORMAL * subnormal
    return marks.astype(np.uint8)


def _block_marks(piece: _Piece, y: np.ndarray, codes: np.ndarray, fmt: Block) -> tuple[int, int]:
    """Elements that are the largest number at their scale for want of a larger one, and subnormal ones."""
    element = fmt.element
    if element.bits <= EXHAUSTIVE:
        marks = _marks(element).take(codes)
    else:
        marks = _marks_of(np.asarray(decode(codes, element, dtype="float64")), element)
    x = piece.x
    above = (marks & _TOP).astype(bool) & (x > y)
    below = (marks & _BOTTOM).astype(bool) & (x < y)
    return _count(above | below, piece), _count((marks & _SUBNORMAL).astype(bool), piece)
