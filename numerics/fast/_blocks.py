"""Tensors in block formats through the compiled loops, a cacheful at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._backend import Array, Numpy
from .._codec import code_bits
from .._codec import decode_scalar as decode_text
from .._format import Block, Float
from ._arrays import Memory, new
from ._block import about_points, amaxes, points, products, quotients, ranges, scales, spans
from ._element import blocks, finite_amax, nearest
from ._grid import Grid, Piece, grid, turned
from ._lanes import LANES
from ._power import blocks as power_blocks
from ._rows import BlockPlan, tensor_scale_of
from ._scalar import DIRECT, PIECE, TYPES, Sink, Source, values_of_codes
from ._table import pick
from ._threads import share

_NONE = np.empty(0, np.float32)


class Shared(NamedTuple):
    """What blocks share: codes and scales, what elements are divided by and its reciprocal, zero points."""

    codes: Array
    scale: Array
    unit: Array
    inverse: Array
    point: Array


def _extents(plan: BlockPlan, x: Array, piece: Piece, size: int) -> tuple[Array, Array]:
    """What the scales of a piece's blocks follow from: (amax, nothing), or (highest, lowest) number."""
    if not plan.fmt.zero_point:
        most = np.empty(piece.blocks, np.float32)
        amaxes(x, piece.n, size, most)
        return most, np.empty(0)
    high, low = np.empty(piece.blocks), np.empty(piece.blocks)
    ranges(x, piece.n, size, high, low)
    return high, low


def _scale_values(plan: BlockPlan, tensor: Any) -> Array:
    return np.array(plan.values if tensor is None else plan.values._replace(tensor=float(tensor)))


def _settle(plan: BlockPlan, most: Array, low: Array, tensor: Array | None) -> Shared:
    """Scales and zero points from extents."""
    count = len(most)
    found = Shared(
        np.empty(count, TYPES[code_bits(plan.fmt.scale)]),
        np.empty(count, np.float32),
        np.empty(count),
        np.empty(count, np.float32),
        np.empty(len(low), np.float32),
    )
    if plan.fmt.zero_point:
        spans(most, low, most)
    values = _scale_values(plan, tensor)
    scales(most, plan.steps, values, found.codes, found.scale, found.unit, found.inverse, plan.short)
    if plan.fmt.zero_point:
        e: Any = plan.fmt.element
        points(low, found.unit, float(e.low), float(e.high), 2.0**e.fraction, found.point)
    return found


def _second(tensor: Any) -> Any:
    return np.float32(1) if tensor is None else np.float32(tensor)


class Job(NamedTuple):
    """A tensor to be rounded: its plan and grid, its second scale, of one with one scale what that is, and
    the largest magnitudes of the blocks where they are known."""

    plan: BlockPlan
    grid: Grid
    tensor: Any = None
    whole: Shared | None = None
    amax: Array = _NONE

    def size(self, piece: Piece) -> int:
        """Of the piece's blocks."""
        return piece.n if piece.tiles or self.plan.fmt.size == "tensor" else self.grid.size

    def run(self, piece: Piece, x: Array, out: Array, codes: bool, scale: Array = _NONE, point: Array = _NONE) -> None:
        """``out`` = the numbers (float32) or codes of a piece ``x``, whose memory is another; ``scale``, ``point`` =
        its scales' codes and its zero points, where these are not empty."""
        plan, fmt = self.plan, self.plan.fmt
        if plan.fused and self.whole is None:
            e: Any = fmt.element
            size, n, wide = self.size(piece), piece.n, x.dtype == np.float32
            if not scale.size:
                scale = np.empty(0, TYPES[code_bits(fmt.scale)])
            out = out if codes else out.view(np.int32)
            if plan.places is not None and size % LANES == 0 and n % size == 0:
                by_power = power_blocks(codes, plan.plain, wide)
                by_power(x, out, size, plan.places, plan.steps, self._values, plan.lattice, self._bounds, scale)
                return
            integers = np.array([e.low, e.high, 2.0**e.fraction] if fmt.zero_point else [0.0, 0.0, 1.0])
            loop = blocks(codes, plan.exact, fmt.zero_point, plan.plain, plan.short, wide)
            steps, values, amax = plan.steps, self._values, self.amax[piece.shared] if self.amax.size else _NONE
            amax = np.empty(0) if fmt.zero_point else amax  # spans are float64
            loop(x, out, n, size, steps, values, integers, plan.lattice, self._bounds, amax, scale, point)
            return
        shared = self.whole or _settle(plan, *_extents(plan, x, piece, self.size(piece)), self.tensor)
        if scale.size:
            scale[:] = shared.codes
            point[:] = shared.point
        self._elements(piece, x, out, shared, codes)

    @property
    def _values(self) -> Array:
        return _scale_values(self.plan, self.tensor)

    @property
    def _bounds(self) -> Array:
        if self.tensor is None:
            return self.plan.bounds
        bounds = self.plan.bounds.copy()
        bounds[5] = self.tensor
        return bounds

    def _elements(self, piece: Piece, x: Array, out: Array, shared: Shared, codes: bool) -> None:
        plan, fmt, n, size, point = self.plan, self.plan.fmt, piece.n, self.size(piece), shared.point
        if plan.fused:
            loop = nearest(codes, plan.exact, fmt.zero_point, plan.plain)
            out = out if codes else out.view(np.int32)
            loop(x, out, n, size, shared.scale, shared.unit, shared.inverse, point, plan.lattice, self._bounds)
            return
        rest = np.empty(x.size, np.float32)
        quotients(plan.rounded)(x, rest, n, size, shared.unit)
        if fmt.zero_point:
            e: Any = fmt.element
            quantum = 2.0**-e.fraction
            kept = out if not codes else np.empty(x.size, np.float32)
            plan.rounder.values(rest, kept, piece.at)
            low, high = np.float32(e.low * quantum), np.float32(e.high * quantum)
            about_points(kept, n, size, shared.scale, point, low, high)
            if codes:
                out[:] = (kept / np.float32(quantum)).astype(np.int32) & ((1 << e.bits) - 1)
                return
        elif codes:
            plan.rounder.codes(rest, out, piece.at)
            return
        else:
            plan.rounder.values(rest, out, piece.at)
        products(out, n, size, shared.scale, _second(self.tensor), point)


class Rows:
    """Reads and writes pieces of tensors: memory as it is, or gathered and scattered where blocks lie across it."""

    def __init__(self, g: Grid, x: Memory, apart: bool) -> None:
        self.grid, self.plain = g, g.plain
        self.half = False  # whether bfloat16 may be read as it is
        array = np.ascontiguousarray(x.array)
        self.source = Source(Memory(array.reshape(-1), x.kind), apart and g.plain)
        self.x = self.placed(array)

    @property
    def most(self) -> int:
        """Elements of a piece, about."""
        return DIRECT if self.plain and self.source.direct else PIECE if not self.plain else 4 * PIECE

    def read(self, piece: Piece, scratch: Array) -> Array:
        """float32 [length], rows one after the other, or the bits of bfloat16."""
        x = self.taken(self.x, piece)
        return x if self.half else self.source.read(x, scratch)

    def taken(self, array: Array, piece: Piece, shared: bool = False) -> Array:
        """A piece of an array that is `placed`, flat, rows one after the other."""
        part = array[piece.shared if shared else piece.elements]
        if self.plain or (shared and piece.tiles):
            return part
        if piece.tiles:
            return np.ascontiguousarray(_side_by_side(part, piece)).reshape(-1)
        rows = np.empty((part.shape[1], part.shape[0]), part.dtype)
        turned(part, rows)
        return rows.reshape(-1)

    def write(self, out: Array, piece: Piece, values: Array, shared: bool = False) -> None:
        """Values of a piece's elements, or of its blocks, to their places in an output as `placed` has it."""
        place = out[piece.shared if shared else piece.elements]
        if self.plain or (shared and piece.tiles):
            place[...] = values
        elif piece.tiles:
            tiles = _side_by_side(place, piece)
            tiles[...] = values.reshape(tiles.shape)
        else:
            turned(values.reshape(place.shape[1], place.shape[0]), place)

    def placed(self, out: Array, shared: bool = False) -> Array:
        """An output, of elements or of what is one a block, as pieces index it."""
        return out.reshape(-1) if self.plain else out.reshape(self.grid.outer, -1, self._width(shared))

    def _width(self, shared: bool) -> int:
        return self.grid.across if shared else self.grid.inner


def _side_by_side(part: Array, piece: Piece) -> Array:
    """[tiles, rows, columns] of tiles that lie side by side."""
    return part.reshape(part.shape[0], piece.tiles, -1).swapaxes(0, 1)


def _most(pieces: Any) -> int:
    return max(piece.length for piece in pieces)


def _scratch(rows: Rows, pieces: Any) -> Array:
    return np.empty(0 if rows.source.direct else _most(pieces), np.float32)


def _pieces(g: Grid, fmt: Block, most: int) -> tuple[Piece, ...]:
    if fmt.size != "tensor":
        return g.pieces(most)
    # parts of the one block, each of which is looked at as a block of its own
    parts = Grid(1, g.n, 1, min(most, g.n), -(-g.n // most)).pieces(most)
    return tuple(p._replace(n=p.length, blocks=1, shared=slice(0, 1)) for p in parts)


def _measured(plan: BlockPlan, rows: Rows, pieces: tuple[Piece, ...]) -> Job:
    """The job with what depends on the whole tensor: its second scale, its one scale."""
    g, fmt = rows.grid, plan.fmt
    one = fmt.size == "tensor"
    job = Job(plan, g)
    rows.half = plan.fused and not one and rows.source.kind == "bfloat16"
    if not one and fmt.tensor_scale is None:
        return job
    finite, most, low = [0.0], [], [0.0]
    keep = rows.plain and not one and not fmt.zero_point
    amax = np.empty(sum(piece.blocks for piece in pieces) if keep else 0, np.float32)

    def measure(mine: Any) -> None:
        scratch = _scratch(rows, mine)
        for piece in mine:
            x = rows.read(piece, scratch)
            if fmt.tensor_scale is not None:
                of = amax[piece.shared] if keep else amax
                finite.append(finite_amax(x.dtype == np.float32)(x, piece.n, job.size(piece), of))
            if one:
                highest, lowest = _extents(plan, x, piece, piece.length)
                most.append(highest[0])
                low.extend(lowest)

    share(pieces, g.outer * g.n * g.inner, measure)
    tensor = None
    if one:
        top, bottom = np.max(most, keepdims=True), np.min(low, keepdims=True)
    if fmt.tensor_scale is not None:
        # of one block, NaN or infinity anywhere is everywhere
        tensor = tensor_scale_of(fmt, max(finite) if not one or top[0] - bottom[0] < np.inf else 0.0)
    if not one:
        return job._replace(tensor=tensor, amax=amax)
    return job._replace(tensor=tensor, whole=_settle(plan, top, bottom if fmt.zero_point else bottom[:0], tensor))


def cast_blocks(x: Memory, out: Array, kind: str, plan: BlockPlan) -> None:
    """``out`` = x rounded to the format; ``out`` may be x's own memory."""
    rows = Rows(grid(plan.fmt, x.array.shape), x, np.may_share_memory(x.array, out))
    target, sink = rows.placed(out), Sink(out, kind)
    straight = rows.plain and kind == "float32"
    pieces = _pieces(rows.grid, plan.fmt, rows.most)
    job = _measured(plan, rows, pieces)

    def work(mine: Any) -> None:
        scratch, results = _scratch(rows, mine), np.empty(0 if straight else _most(mine), np.float32)
        for piece in mine:
            values = target[piece.elements] if straight else results[: piece.length]
            job.run(piece, rows.read(piece, scratch), values, False)
            if not straight:
                rows.write(target, piece, sink.converted(values))

    share(pieces, x.array.size, work)


def encode_blocks(x: Memory, plan: BlockPlan, shapes: tuple[int, ...]) -> tuple[Array, Array, Array | None, Any]:
    """Codes of x, scales and zero points (or None) of the shape ``shapes``, and the second scale or None."""
    fmt: Any = plan.fmt
    rows = Rows(grid(fmt, x.array.shape), x, False)
    codes, scale = new(x.array.shape, TYPES[code_bits(fmt.element)]), new(shapes, TYPES[code_bits(fmt.scale)])
    point = new(shapes, TYPES[code_bits(fmt.element)]) if fmt.zero_point else None
    places: Any = rows.placed(codes), rows.placed(scale, True), None if point is None else rows.placed(point, True)
    pieces = _pieces(rows.grid, fmt, rows.most)
    job = _measured(plan, rows, pieces)

    def work(mine: Any) -> None:
        scratch = _scratch(rows, mine)
        for piece in mine:
            elements = places[0][piece.elements] if rows.plain else np.empty(piece.length, codes.dtype)
            factors = places[1][piece.shared] if rows.plain else np.empty(piece.blocks, scale.dtype)
            zeros = np.empty(piece.blocks if fmt.zero_point else 0, np.float32)
            job.run(piece, rows.read(piece, scratch), elements, True, factors, zeros)
            if not rows.plain:
                rows.write(places[0], piece, elements)
                rows.write(places[1], piece, factors, True)
            if point is not None:
                steps = np.float32(2.0**fmt.element.fraction)
                whole = (zeros * steps).astype(np.int32) & ((1 << fmt.element.bits) - 1)
                rows.write(places[2], piece, whole.astype(point.dtype), True)

    share(pieces, x.array.size, work)
    return codes, scale, point, job.tensor


def _numbers_of_scales(codes: Array, scale: Float) -> Array:
    """The float32 numbers of scales' codes."""
    if scale.bits <= 16:
        return values_of_codes(scale)[codes]
    return codes.view(np.float32) if scale == Float(8, 23) else decode_text(Numpy, codes, scale, 32)


def decode_blocks(codes: Array, scale: Array, point: Array | None, tensor: Any, fmt: Block) -> Array:
    """float32 numbers of elements' codes, scales' and zero points' codes, and the second scale or None."""
    g = grid(fmt, codes.shape)
    rows = Rows(g, Memory(codes, ""), False)
    out = new(codes.shape, np.float32)
    target = rows.placed(out)
    scales_of, points_of = (None if v is None else rows.placed(np.ascontiguousarray(v), True) for v in (scale, point))
    elements = values_of_codes(fmt.element)

    def run(mine: Any) -> None:
        for piece in mine:
            size = piece.n if piece.tiles or fmt.size == "tensor" else g.size
            values = target[piece.elements] if rows.plain else np.empty(piece.length, np.float32)
            pick(rows.taken(rows.x, piece), values, elements)
            shared = _numbers_of_scales(rows.taken(scales_of, piece, True), fmt.scale)
            less = _NONE if points_of is None else elements[rows.taken(points_of, piece, True)]
            products(values, piece.n, size, shared, _second(tensor), less)
            if not rows.plain:
                rows.write(target, piece, values)

    share(_pieces(g, fmt, PIECE), codes.size, run)
    return out
