"""Tensors as rows of blocks, a cacheful at a time: bounded memory, and quick on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

from ._backend import Array, Backend, concatenate
from ._block import (
    Quantized,
    decode_block,
    encode_elements,
    extent,
    share,
    tensor_scale,
    zero_point_codes,
)
from ._codec import Rounding
from ._format import Block, block_elements
from ._policy import Policy
from ._random import Draws, Stochastic, draw, places
from ._scale_search import searched
from ._scales import scale_rule
from ._tiles import from_tiles, shared_from_tiles, shared_to_tiles, to_tiles

# elements worked on at a time: fewer cost more calls, more fall out of the cache
CHUNK = 1 << 17


def by_drawn_pieces(xp: Backend, x: Array, rule: Stochastic, work: Callable[[Array, Draws], Array]) -> Array:
    """`by_pieces` of a function that takes each element's random number too."""
    shape = tuple(x.shape)
    flat = rule.shape is None or not shape
    rows = x.reshape(1, -1) if flat else x.reshape(math.prod(shape[:-1]), shape[-1])
    base, stride = places(rule, shape, None if flat else -1)
    slices = _slices(xp, rows, flat)
    pieces = [work(rows[where], draw_piece(xp, rule, base, stride, rows[where], where)) for where in slices]
    return concatenate(xp, pieces, int(flat)).reshape(shape)


def by_pieces(xp: Backend, x: Array, work: Callable[[Array], Array]) -> Array:
    """An elementwise function of any array."""
    if xp.traces and x.ndim:
        return work(x)  # XLA finds its way in an array of this shape, not in a flattened one
    shape, flat = tuple(x.shape), x.reshape(-1)
    if xp.traces or flat.shape[0] <= CHUNK:
        return work(flat).reshape(shape)
    pieces = [work(flat[i : i + CHUNK]) for i in range(0, flat.shape[0], CHUNK)]
    return concatenate(xp, pieces).reshape(shape)


def to_rows(xp: Backend, x: Array, fmt: Block) -> Array:
    """[rows, n] with the blocks along n; the whole tensor is one row for size "tensor"."""
    if fmt.size == "tensor":
        return x.reshape(1, -1)
    if isinstance(fmt.size, tuple):
        return to_tiles(xp, x, fmt)
    x = xp.moveaxis(x, fmt.axis, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def shared_rows(xp: Backend, x: Array, fmt: Block) -> Array:
    """[rows, blocks] of what there is one of a block."""
    return shared_to_tiles(xp, x, fmt) if isinstance(fmt.size, tuple) else to_rows(xp, x, fmt)


def from_shared(xp: Backend, rows: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    """The inverse of `shared_rows`, for a tensor of that shape."""
    return (shared_from_tiles if isinstance(fmt.size, tuple) else from_rows)(xp, rows, shape, fmt)


def from_rows(xp: Backend, rows: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    """The inverse of `to_rows`, for a tensor of that shape or for what it has one of a block."""
    if fmt.size == "tensor":
        return rows.reshape(shape if rows.shape[-1] == math.prod(shape) else (1,) * len(shape))
    if isinstance(fmt.size, tuple):
        return from_tiles(xp, rows, shape, fmt)
    axis = fmt.axis % len(shape)  # type: ignore[operator]  # one axis
    lead = shape[:axis] + shape[axis + 1 :]
    return xp.moveaxis(rows.reshape(*lead, rows.shape[-1]), -1, axis)


def _slices(xp: Backend, rows: Array, one_row: bool) -> list[tuple[slice, slice]]:
    """Pieces of [rows, n]: whole rows, or parts of the only one."""
    count, n = rows.shape
    if xp.traces or count * n <= CHUNK:
        return [(slice(None), slice(None))]
    if one_row:
        return [(slice(None), slice(i, i + CHUNK)) for i in range(0, n, CHUNK)]
    step = max(1, CHUNK // n)
    return [(slice(i, i + step), slice(None)) for i in range(0, count, step)]


def draw_piece(
    xp: Backend, rule: Stochastic, base: Array, stride: int, piece: Array, where: tuple[slice, slice]
) -> Draws:
    """Random numbers for a piece of rows that start at these places."""
    return draw(xp, rule, piece, base[where[0]] + (where[1].start or 0) * stride, stride)


def _to_blocks(xp: Backend, x: Array, fmt: Block) -> Array:
    """[rows, n] to [rows, blocks, size]; a ragged end, or an empty tensor, is filled up with zeros."""
    n = x.shape[-1]
    size = block_elements(fmt) or max(n, 1)
    blocks = max(-(-n // size), int(fmt.size == "tensor"))
    if blocks * size != n:
        x = xp.pad_last(x, blocks * size - n)
    return x.reshape(x.shape[0], blocks, size)


def _from_blocks(blocks: Array, n: int) -> Array:
    rows, count, size = blocks.shape
    return blocks.reshape(rows, count * size)[:, :n]


def encode_rows(
    xp: Backend, x: Array, fmt: Block, policy: Policy, finish: Callable[..., Array] | None = None
) -> Quantized:
    """The tensor in the block format. Where there is ``finish``, what it makes of the codes, scales, zero
    points and tensor scale of a piece takes the codes' place."""
    rows = to_rows(xp, x, fmt)
    slices = _slices(xp, rows, fmt.size == "tensor")
    extents = [extent(xp, _to_blocks(xp, xp.source(rows[where]), fmt), fmt) for where in slices]
    if fmt.size == "tensor":
        bounds = reduce(lambda a, b: tuple(map(xp.maximum, a, b)), extents)
    else:
        bounds = tuple(concatenate(xp, list(pieces)) for pieces in zip(*extents))
    tensor = tensor_scale(xp, bounds, fmt)

    def blocks_of(where: tuple[slice, slice]) -> Array:
        return _to_blocks(xp, xp.source(rows[where]), fmt)

    found = None
    if scale_rule(fmt.rule).search:
        pieces = [partial(blocks_of, where) for where in slices]
        parts = [_shared_slice(where, fmt) for where in slices]
        found = searched(xp, bounds, fmt, tensor, pieces, parts, fmt.size == "tensor")
    shared = share(xp, bounds, fmt, tensor, found)
    points = zero_point_codes(xp, shared, fmt)
    policy = replace(policy, overflow="saturate")
    draws = _block_draws(xp, x, rows, fmt, policy.rounding)

    def piece(where: tuple[slice, slice]) -> Array:
        part = _shared_slice(where, fmt)
        rounding: Rounding = policy.rounding if draws is None else draws(where)
        codes = encode_elements(xp, blocks_of(where), shared.at(part), fmt, policy, rounding, tensor)
        if finish is not None:
            codes = finish(codes, shared.code[part], None if points is None else points[part], tensor)
        return _from_blocks(codes, rows[where].shape[-1])

    elements = concatenate(xp, [piece(where) for where in slices], _along(fmt))
    shape = tuple(x.shape)
    return Quantized(
        from_rows(xp, elements, shape, fmt),
        from_shared(xp, shared.code, shape, fmt),
        None if points is None else from_shared(xp, points, shape, fmt),
        tensor,
        fmt,
    )


def _block_draws(
    xp: Backend, x: Array, rows: Array, fmt: Block, rule: str | Stochastic
) -> Callable[[tuple[slice, slice]], Draws] | None:
    """What makes the random numbers of the blocks of a piece; None for other roundings."""
    if not isinstance(rule, Stochastic):
        return None
    if isinstance(fmt.size, tuple):  # the elements of a tile lie apart in the tensor: drawn before it is cut
        words = to_tiles(xp, by_drawn_pieces(xp, x, rule, lambda piece, drawn: drawn.value), fmt)
        return lambda where: Draws(_to_blocks(xp, words[where], fmt), rule.bits, rule.threshold)
    base, stride = places(rule, tuple(x.shape), None if fmt.size == "tensor" else fmt.axis)  # type: ignore[arg-type]

    def drawn(where: tuple[slice, slice]) -> Draws:
        draws = draw_piece(xp, rule, base, stride, rows[where], where)
        return draws._replace(value=_to_blocks(xp, draws.value, fmt))

    return drawn


def _along(fmt: Block) -> int:
    """The axis of [rows, n] that `_slices` cuts."""
    return 1 if fmt.size == "tensor" else 0


def _shared_slice(where: tuple[slice, slice], fmt: Block) -> slice:
    """What a piece needs of [rows, blocks]: its own rows' part, or the one scale of size "tensor"."""
    return slice(None) if fmt.size == "tensor" else where[0]


def decode_rows(xp: Backend, q: Quantized, wide: int) -> Array:
    """The numbers of what `encode_rows` returned."""
    fmt = q.format
    codes, scale = to_rows(xp, q.codes, fmt), shared_rows(xp, q.scale, fmt)
    points = None if q.zero_point is None else shared_rows(xp, q.zero_point, fmt)

    def piece(where: tuple[slice, slice]) -> Array:
        part = _shared_slice(where, fmt)
        own = None if points is None else points[part]
        blocks = _to_blocks(xp, codes[where], fmt)
        values = decode_block(xp, blocks, scale[part], own, fmt, q.tensor_scale, wide)
        return _from_blocks(values, codes[where].shape[-1])

    pieces = [piece(where) for where in _slices(xp, codes, fmt.size == "tensor")]
    return from_rows(xp, concatenate(xp, pieces, _along(fmt)), tuple(q.codes.shape), fmt)
