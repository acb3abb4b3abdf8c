"""Tiles, blocks of several axes, laid out as rows of plain blocks, and back."""

from __future__ import annotations

import math

from ._backend import Array, Backend
from ._format import Block


def tile_axes(fmt: Block, ndim: int) -> tuple[int, ...]:
    """The axes of the tiles, counted from the first."""
    axes = fmt.axis if isinstance(fmt.axis, tuple) else (fmt.axis,)
    return tuple(axis % ndim for axis in axes)


def to_tiles(xp: Backend, x: Array, fmt: Block) -> Array:
    """[rows, n], whose plain blocks of ``prod(size)`` elements are the tiles; ragged ones filled up with zeros."""
    sizes, axes = fmt.size, tile_axes(fmt, x.ndim)
    assert isinstance(sizes, tuple)
    for axis, size in zip(axes, sizes):
        if short := -x.shape[axis] % size:
            x = xp.moveaxis(xp.pad_last(xp.moveaxis(x, axis, -1), short), -1, axis)
    lead = x.ndim - len(axes)
    for at in _moves(axes):
        x = xp.moveaxis(x, at, -1)
    # x has the tiles' axes last; each of them becomes (tiles, size), then the sizes go to the end
    counts = [n // size for n, size in zip(x.shape[lead:], sizes)]
    x = x.reshape(*x.shape[:lead], *(part for pair in zip(counts, sizes) for part in pair))
    for i in range(len(sizes)):
        x = xp.moveaxis(x, lead + i + 1, -1)
    rows = math.prod(x.shape[:lead]) * math.prod(counts[:-1])
    return x.reshape(rows, counts[-1] * math.prod(sizes))


def from_tiles(xp: Backend, rows: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    """The inverse of `to_tiles` for a tensor of that shape."""
    sizes, axes = fmt.size, tile_axes(fmt, len(shape))
    assert isinstance(sizes, tuple)
    rest = [n for axis, n in enumerate(shape) if axis not in axes]
    lengths = [shape[axis] for axis in axes]
    counts = [-(-n // size) for n, size in zip(lengths, sizes)]
    x = rows.reshape(*rest, *counts, *sizes)
    for i in reversed(range(len(sizes))):
        x = xp.moveaxis(x, -1, len(rest) + i + 1)
    x = x.reshape(*rest, *(count * size for count, size in zip(counts, sizes)))
    return _axes_back(xp, x[(..., *(slice(n) for n in lengths))], axes)


def shared_from_tiles(xp: Backend, rows: Array, shape: tuple[int, ...], fmt: Block) -> Array:
    """What there is one of a tile, [rows, tiles], as an array with the tensor's axes."""
    assert isinstance(fmt.size, tuple)
    axes = tile_axes(fmt, len(shape))
    rest = [n for axis, n in enumerate(shape) if axis not in axes]
    counts = [-(-shape[axis] // size) for axis, size in zip(axes, fmt.size)]
    return _axes_back(xp, rows.reshape(*rest, *counts), axes)


def shared_to_tiles(xp: Backend, x: Array, fmt: Block) -> Array:
    """The inverse of `shared_from_tiles`."""
    for at in _moves(tile_axes(fmt, x.ndim)):
        x = xp.moveaxis(x, at, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _moves(axes: tuple[int, ...]) -> list[int]:
    """Where each axis is when its turn comes to move to the end."""
    return [axis - sum(before < axis for before in axes[:i]) for i, axis in enumerate(axes)]


def _axes_back(xp: Backend, x: Array, axes: tuple[int, ...]) -> Array:
    for at in reversed(_moves(axes)):
        x = xp.moveaxis(x, -1, at)
    return x
