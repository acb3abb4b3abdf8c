"""Clipping that makes the least squared error: the best scale of every block, all blocks at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._backend import Array, Numpy
from .._block import Quantized
from .._cast import cast, decode, encode
from .._format import Block, Fixed, Float, Format, min_positive_code
from .._names import format as read_format
from .._rows import _to_blocks as rows_to_blocks
from .._rows import from_rows, from_shared, shared_rows, to_rows
from ._describe import describe
from ._stream import CHUNK, floats

OCTAVES = 6  # how far below the rule's own scale is searched, in factors of two
SHORT = 8  # scales in an octave up to which all are tried
HALVINGS = 5  # of the distance between them, around the best


@dataclass(frozen=True)
class Clip:
    """The scales that `optimal_clip` found, one a block, in the shape of `Quantized.scale`.

    ``shape``: the tensor's. ``scale``: what elements are multiplied by, the tensor scale included, float64.
    ``code``, ``zero_point``, ``tensor_scale``: as in `Quantized`. ``fraction``: the largest magnitude that a
    block can hold at that scale over its largest magnitude (with a zero point the lengths of the ranges); below
    1 its ends are clipped. ``mse``: mean squared error of each block; ``rule_mse``: the same at the scale of the
    format's own rule.
    """

    format: Block
    shape: tuple[int, ...]
    scale: np.ndarray
    code: np.ndarray
    zero_point: np.ndarray | None
    tensor_scale: np.ndarray | None
    fraction: np.ndarray
    mse: np.ndarray
    rule_mse: np.ndarray

    def encode(self, x: Array) -> Quantized:
        """The tensor at these scales, for `decode` and `pack_quantized`; elements are rounded to nearest even.

        >>> x = np.float32([[1, 1, 1, 1, 1, 1, 1, 2.5]])
        >>> decode(optimal_clip(x, "int2n:g8").encode(x))
        array([[1.1875, 1.1875, 1.1875, 1.1875, 1.1875, 1.1875, 1.1875, 1.1875]],
              dtype=float32)
        >>> decode(encode(x, "int2n:g8"))
        array([[0. , 0. , 0. , 0. , 0. , 0. , 0. , 2.5]], dtype=float32)
        """
        values = floats(x)
        if values.shape != self.shape:
            raise ValueError(f"these are scales for a tensor of the shape {self.shape}, and x has {values.shape}")
        blocks, scale = _to_blocks(values, self.format), _flat(self.scale, self.format)
        points = None if self.zero_point is None else _points(blocks, scale, self.format)
        codes = np.empty(blocks.shape, np.uint16 if self.format.element.bits > 8 else np.uint8)
        for rows, columns in _tiles(blocks):
            part = None if points is None else points[rows]
            codes[rows, columns] = _codes(blocks[rows, columns], scale[rows], part, self.format)
        return Quantized(
            _from_blocks(codes, values.shape, self.format), self.code, self.zero_point, self.tensor_scale, self.format
        )


def optimal_clip(x: Array, fmt: Format | str, *, octaves: int = OCTAVES, per_octave: int | None = None) -> Clip:
    """The scale of every block that makes its squared error least.

    >>> x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    >>> clip = optimal_clip(x, "int4:channel")
    >>> clip.fraction.round(2).ravel().tolist(), bool((clip.mse <= clip.rule_mse).all())
    ([0.77, 0.72, 0.83, 0.78], True)

    x: numpy, torch or jax, finite. fmt: a block format, whose blocks are the groups (``:tensor``, ``:channel``,
    ``:g128``), or a scalar format, which stands for one float32 scale for the tensor. Scales are numbers of the
    format's scale, from ``octaves`` below the rule's own to two above it. Of scales with at most `SHORT` in an
    octave (e8m0, e4m3) all are tried; of others first one an octave, then ``per_octave`` in the two octaves
    about the best, then `HALVINGS` times the two at half the distance. A tensor scale stays as the rule has it;
    with a zero point both ends are clipped by one fraction.

    ``per_octave`` is by default 16 for elements of at most 4 bits, where the sum of all blocks' errors was less
    than 1 % above the least of any scale (NF4: 5 %), and 64 for wider ones, whose error has narrow valleys: less
    than 2 % for rows in e4m3fn, less than 8 % for int8 of 32 (measured in tests/numerics/test_clip.py). With
    128, every scale in bf16 within an octave of the best is tried.

    Raises ValueError where x holds NaN or infinity.
    """
    fmt = read_format(fmt)
    if not isinstance(fmt, Block):
        fmt = Block(fmt, "tensor", "fp32", "absmax")  # type: ignore[arg-type]  # a name is read there
    values = floats(x)
    if not np.isfinite(values).all():
        raise ValueError("optimal_clip needs finite numbers, and these hold NaN or infinity")
    if per_octave is None:
        per_octave = 16 if fmt.element.bits <= 4 else 64
    start: Quantized = encode(values, fmt)
    tensor = 1.0 if start.tensor_scale is None else float(start.tensor_scale)
    blocks, code = _to_blocks(values, fmt), _flat(np.asarray(start.scale), fmt).astype(np.int64)
    code = np.maximum(code, min_positive_code(fmt.scale))
    count = _to_blocks(np.ones(values.shape, np.bool_), fmt).sum(axis=1)
    error, rule_error = np.empty(len(code)), np.empty(len(code))
    for rows in _row_tiles(blocks):

        def of(candidate: np.ndarray, real: Any = values.dtype.type, rows: slice = rows) -> np.ndarray:
            return _squared_error(blocks[rows], count[rows], _scale(candidate, fmt, tensor), fmt, real)

        first = code[rows].copy()
        code[rows] = _search(of, first, fmt.scale, octaves, per_octave)
        # the search may take a tie the other way, the figures may not
        rule_error[rows], error[rows] = of(first, np.float64), of(code[rows], np.float64)
    scale = _scale(code, fmt, tensor)
    points, lead = _points(blocks, scale, fmt), to_rows(Numpy, values, fmt).shape[0]
    extent, reach = _extent(blocks, fmt), _reach(fmt) * scale
    fraction = np.where(extent > 0, reach / np.where(extent > 0, extent, 1.0), 1.0)

    def shaped(v: np.ndarray) -> np.ndarray:
        return np.asarray(from_shared(Numpy, v.reshape(lead, -1), values.shape, fmt))

    return Clip(
        fmt,
        values.shape,
        shaped(scale),
        shaped(code.astype(np.asarray(start.scale).dtype)),
        None if points is None else shaped((points.astype(np.int64) & _mask(fmt)).astype(start.zero_point.dtype)),  # type: ignore[union-attr]
        start.tensor_scale,
        shaped(fraction),
        shaped(error / np.maximum(count, 1)),
        shaped(rule_error / np.maximum(count, 1)),
    )


def _search(
    error: Callable[[np.ndarray], np.ndarray], origin: np.ndarray, scale: Float, octaves: int, per_octave: int
) -> np.ndarray:
    """The code of least error of each block."""
    octave = 2**scale.mantissa  # codes; a scale's codes ascend with its numbers
    stride = max(1, octave // per_octave)
    best, least = origin.copy(), error(origin)

    def attempt(offsets: Iterator[int] | range, center: np.ndarray) -> None:
        for offset in offsets:
            candidate = np.clip(center + offset, min_positive_code(scale), scale.max_code)
            new = error(candidate)
            better = new < least
            best[better], least[better] = candidate[better], new[better]

    if octave <= SHORT:
        attempt((k for k in range(-octaves * octave, 2 * octave + 1) if k), origin)
        return best
    attempt((k * octave for k in range(-octaves, 3) if k), origin)
    attempt((k for k in range(-octave + stride, octave, stride) if k), best.copy())
    for _ in range(HALVINGS):
        if stride == 1:
            break
        stride //= 2
        attempt(iter((-stride, stride)), best.copy())
    return best


def _scale(code: np.ndarray, fmt: Block, tensor: float) -> np.ndarray:
    narrow = np.uint8 if fmt.scale.bits <= 8 else np.uint16 if fmt.scale.bits <= 16 else np.uint32
    return np.asarray(decode(code.astype(narrow), fmt.scale, dtype="float64")) * tensor


def _squared_error(blocks: np.ndarray, count: np.ndarray, scale: np.ndarray, fmt: Block, real: Any) -> np.ndarray:
    """The sum of squared errors of each block at these scales; ``real``: what quotients are rounded to first."""
    points = _points(blocks, scale, fmt)
    total = np.zeros(len(blocks))
    for _, columns in _tiles(blocks):
        x = blocks[:, columns].astype(np.float64)
        y = _levels(x, scale, points, fmt, real) * scale[:, None]
        y -= x
        if not describe(fmt.element).zeros:  # the filling of a ragged end is no part of the block
            y[np.arange(columns.start, columns.start + x.shape[1]) >= count[:, None]] = 0.0
        total += np.einsum("ij,ij->i", y, y)
    return total


def _levels(x: np.ndarray, scale: np.ndarray, points: np.ndarray | None, fmt: Block, real: Any) -> np.ndarray:
    """Elements before the scale is applied. A quotient in float64 rounds as the exact one would: those of
    float32 numbers are no nearer than 2**-50 of themselves to a midpoint that they are not equal to."""
    if isinstance(fmt.element, Fixed):
        level = _integers(x, scale, points, fmt)
        return (level if points is None else level - points[:, None]) * _step(fmt)
    return np.asarray(cast((x / scale[:, None]).astype(real), fmt.element, overflow="saturate"), np.float64)


def _codes(x: np.ndarray, scale: np.ndarray, points: np.ndarray | None, fmt: Block) -> np.ndarray:
    wide = x.astype(np.float64)
    if points is not None:
        return _integers(wide, scale, points, fmt).astype(np.int64) & _mask(fmt)
    return np.asarray(encode(wide / scale[:, None], fmt.element, overflow="saturate"))


def _integers(x: np.ndarray, scale: np.ndarray, points: np.ndarray | None, fmt: Block) -> np.ndarray:
    element: Any = fmt.element
    steps = x / (scale * _step(fmt))[:, None]
    np.rint(steps, out=steps)
    if points is not None:
        steps += points[:, None]
    return np.clip(steps, element.low, element.high, out=steps)


def _points(blocks: np.ndarray, scale: np.ndarray, fmt: Block) -> np.ndarray | None:
    """Zero points: where the lowest number goes when the whole range shrinks to what the scale can hold. A step
    less than the range is no clipping but the rounding of the scale, and the point is the one that `encode` has."""
    if not fmt.zero_point:
        return None
    element: Any = fmt.element
    low, extent = np.minimum(blocks.min(axis=1), 0).astype(np.float64), _extent(blocks, fmt)
    held = _reach(fmt) * scale
    kept = np.where(held > extent - _step(fmt) * scale, 1.0, held / np.where(extent > 0, extent, 1.0))
    return np.clip(element.low - np.rint(low * kept / (scale * _step(fmt))), element.low, element.high)


def _extent(blocks: np.ndarray, fmt: Block) -> np.ndarray:
    """Largest magnitude of each block, or the length of its range, zero included, under a zero point."""
    if not fmt.zero_point:
        return np.maximum(blocks.max(axis=1), -blocks.min(axis=1)).astype(np.float64)
    high, low = (
        f(0, end(axis=1).astype(np.float64)) for f, end in ((np.maximum, blocks.max), (np.minimum, blocks.min))
    )
    return high - low


def _reach(fmt: Block) -> float:
    """The same of what the element can hold."""
    element: Any = fmt.element
    return (element.high - element.low) * _step(fmt) if fmt.zero_point else max(element.max, 0.0)


def _step(fmt: Block) -> float:
    return math.ldexp(1.0, -fmt.element.fraction)  # type: ignore[union-attr]  # zero points are for integers


def _mask(fmt: Block) -> int:
    return 2**fmt.element.bits - 1


def _to_blocks(x: np.ndarray, fmt: Block) -> np.ndarray:
    """[blocks, size], ragged ends filled up with zeros."""
    blocks = rows_to_blocks(Numpy, to_rows(Numpy, x, fmt), fmt)
    return np.asarray(blocks.reshape(-1, blocks.shape[-1]))


def _from_blocks(blocks: np.ndarray, shape: tuple[int, ...], fmt: Block) -> np.ndarray:
    layout = to_rows(Numpy, np.empty(shape, np.bool_), fmt).shape
    rows = blocks.reshape(layout[0], -1)[:, : layout[1]]
    return np.ascontiguousarray(from_rows(Numpy, rows, shape, fmt))


def _flat(shared: np.ndarray, fmt: Block) -> np.ndarray:
    """What there is one of a block, in the order of `_to_blocks`."""
    return np.asarray(shared_rows(Numpy, shared, fmt).reshape(-1))


def _row_tiles(blocks: np.ndarray) -> Iterator[slice]:
    step = max(1, CHUNK // blocks.shape[1])
    return (slice(i, min(i + step, len(blocks))) for i in range(0, len(blocks), step))


def _tiles(blocks: np.ndarray) -> Iterator[tuple[slice, slice]]:
    count, size = blocks.shape
    rows = max(1, CHUNK // size)
    for i in range(0, count, rows):
        for j in range(0, size, CHUNK):
            yield slice(i, min(i + rows, count)), slice(j, min(j + CHUNK, size))
