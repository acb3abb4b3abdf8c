"""How the blocks of a tensor lie in memory, and pieces of it that fit the cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ._backend import Array
from ._fast_words import compiled
from ._format import Block

_COLUMNS = 64  # rows across memory that are gathered together: some cache lines of each of their elements


class Piece(NamedTuple):
    """Some blocks of a tensor: ``length`` elements in rows of ``n``, ``at`` the linear index of the first, the last
    block of a row shorter where need be. ``elements`` and ``shared``: where they and what is one a block stand, in
    flat arrays, or in arrays [outer, along, inner] where blocks lie across the memory."""

    at: int
    length: int
    n: int
    blocks: int
    elements: Any
    shared: Any


class Grid(NamedTuple):
    """A tensor as [outer, n, inner] with blocks of ``size`` along n, ``per`` of them in a row."""

    outer: int
    n: int
    inner: int
    size: int
    per: int

    def pieces(self, most: int) -> tuple[Piece, ...]:
        """Pieces of about ``most`` elements, of at least a block each."""
        return _along(self, most) if self.inner == 1 else _across(self, most)


def grid(fmt: Block, shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor of that shape, which is not empty."""
    if fmt.size == "tensor":
        n = int(np.prod(shape))
        return Grid(1, n, 1, n, 1)
    axis = fmt.axis % len(shape)  # type: ignore[operator]  # tiles, which have several, are not cut here
    n = shape[axis]
    size: Any = n if fmt.size == "channel" else min(fmt.size, n)
    outer, inner = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    return Grid(outer, n, inner, size, -(-n // size))


@lru_cache(maxsize=256)
def _along(g: Grid, most: int) -> tuple[Piece, ...]:
    outer, n, per = g.outer, g.n, g.per
    if n % g.size == 0:
        outer, n, per = 1, outer * n, outer * per  # rows follow each other without a seam
    found = []
    if n <= most:
        rows = most // n
        for row in range(0, outer, rows):
            k = min(rows, outer - row)
            found.append((row * n, k * n, n, row * per, k * per))
    else:
        step = max(1, most // g.size) * g.size
        for row in range(outer):
            for at in range(0, n, step):
                length = min(step, n - at)
                found.append((row * n + at, length, length, row * per + at // g.size, -(-length // g.size)))
    return tuple(
        Piece(at, length, n, blocks, slice(at, at + length), slice(first, first + blocks))
        for at, length, n, first, blocks in found
    )


@lru_cache(maxsize=256)
def _across(g: Grid, most: int) -> tuple[Piece, ...]:
    columns = min(g.inner, _COLUMNS)
    step = max(1, most // columns // g.size) * g.size
    found = []
    for outer in range(g.outer):
        for at in range(0, g.n, step):
            stop = min(at + step, g.n)
            first, last = at // g.size, -(-stop // g.size)
            for column in range(0, g.inner, columns):
                end = min(column + columns, g.inner)
                k = end - column
                found.append(
                    Piece(
                        0,
                        k * (stop - at),
                        stop - at,
                        k * (last - first),
                        (outer, slice(at, stop), slice(column, end)),
                        (outer, slice(first, last), slice(column, end)),
                    )
                )
    return tuple(found)


@compiled
def turned(x: Array, out: Array) -> None:
    """``out`` [k, n] = x [n, k] turned over, both of any strides, in squares of a few cache lines."""
    rows, columns = x.shape
    for i in range(0, rows, 16):
        for j in range(0, columns, 16):
            for b in range(j, min(j + 16, columns)):
                for a in range(i, min(i + 16, rows)):
                    out[b, a] = x[a, b]
