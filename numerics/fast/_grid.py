"""How the blocks of a tensor lie in memory, and pieces of it that fit the cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .._backend import Array
from .._format import Block
from ._lanes import highs, load_row, lows, store_row
from ._words import compiled, part

_COLUMNS = 64  # rows across memory that are gathered together: some cache lines of each of their elements


class Piece(NamedTuple):
    """Some blocks of a tensor: ``length`` elements in rows of ``n``, ``at`` the linear index of the first, the last
    block of a row shorter where need be. ``elements`` and ``shared``: where they and what is one a block stand, in
    flat arrays, or in arrays [outer, along, inner] where blocks lie across the memory. ``tiles``: of tiles, each a
    row of its own, how many there are side by side."""

    at: int
    length: int
    n: int
    blocks: int
    elements: Any
    shared: Any
    tiles: int = 0


class Grid(NamedTuple):
    """A tensor as [outer, n, inner] with blocks of ``size`` along n, ``per`` of them in a row; or with tiles of
    these extents over n and inner, ``across`` of them side by side."""

    outer: int
    n: int
    inner: int
    size: int
    per: int
    tile: tuple[int, int] | None = None

    @property
    def plain(self) -> bool:
        """Whether the elements of a block follow each other in memory."""
        return self.inner == 1 and self.tile is None

    @property
    def across(self) -> int:
        """How many blocks lie side by side."""
        return self.inner if self.tile is None else -(-self.inner // self.tile[1])

    def pieces(self, most: int) -> tuple[Piece, ...]:
        """Pieces of about ``most`` elements, of at least a block each."""
        if self.tile is not None:
            return _tiles(self, most)
        return _along(self, most) if self.inner == 1 else _across(self, most)


def grid(fmt: Block, shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor of that shape, which is not empty."""
    if fmt.size == "tensor":
        n = int(np.prod(shape))
        return Grid(1, n, 1, n, 1)
    if isinstance(fmt.size, tuple):
        (n, inner), outer = shape[-2:], int(np.prod(shape[:-2]))
        r, c = min(fmt.size[0], n), min(fmt.size[1], inner)
        return Grid(outer, n, inner, r * c, -(-n // r), (r, c))
    axis = fmt.axis % len(shape)  # type: ignore[operator]  # one, where there are no tiles
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


@lru_cache(maxsize=256)
def _tiles(g: Grid, most: int) -> tuple[Piece, ...]:
    assert g.tile is not None
    r, c = g.tile
    full = g.inner // c  # tiles of full width; one that is narrower is a piece of its own
    step = max(1, most // g.size)
    cuts = [(i, min(i + step, full)) for i in range(0, full, step)] + ([(full, full + 1)] if g.inner % c else [])
    found = []
    for outer in range(g.outer):
        for at in range(0, g.n, r):
            stop = min(at + r, g.n)
            for first, last in cuts:
                columns = slice(first * c, min(last * c, g.inner))
                length = (stop - at) * (columns.stop - columns.start)
                k = last - first
                where = (outer, slice(at, stop), columns)
                shared = (outer, at // r, slice(first, last))
                found.append(Piece(0, length, length // k, k, where, shared, k))
    return tuple(found)


@part
def _fold(t: Any) -> Any:
    """16 vectors interleaved with those 8 further; four times over, that turns the square over."""
    first = lows(t[0], t[8]), highs(t[0], t[8]), lows(t[1], t[9]), highs(t[1], t[9])
    second = lows(t[2], t[10]), highs(t[2], t[10]), lows(t[3], t[11]), highs(t[3], t[11])
    third = lows(t[4], t[12]), highs(t[4], t[12]), lows(t[5], t[13]), highs(t[5], t[13])
    return first + second + third + (lows(t[6], t[14]), highs(t[6], t[14]), lows(t[7], t[15]), highs(t[7], t[15]))


@compiled
def _turned_words(x: Array, out: Array) -> None:
    rows, columns = x.shape[0] // 16 * 16, x.shape[1] // 16 * 16
    for i in range(0, rows, 16):
        for j in range(0, columns, 16):
            a = load_row(x, i + 0, j), load_row(x, i + 1, j), load_row(x, i + 2, j), load_row(x, i + 3, j)
            b = load_row(x, i + 4, j), load_row(x, i + 5, j), load_row(x, i + 6, j), load_row(x, i + 7, j)
            c = load_row(x, i + 8, j), load_row(x, i + 9, j), load_row(x, i + 10, j), load_row(x, i + 11, j)
            d = load_row(x, i + 12, j), load_row(x, i + 13, j), load_row(x, i + 14, j), load_row(x, i + 15, j)
            t = _fold(_fold(_fold(_fold(a + b + c + d))))
            for k in range(16):
                store_row(out, j + k, i, t[k])


@compiled
def _turned_rest(x: Array, out: Array, i0: int, j0: int) -> None:
    """All but the first ``i0`` rows and ``j0`` columns, which are done."""
    rows, columns = x.shape
    for i in range(0, rows, 16):
        for j in range(0, columns, 16):
            if i < i0 and j < j0:
                continue
            for b in range(j, min(j + 16, columns)):
                for a in range(i, min(i + 16, rows)):
                    out[b, a] = x[a, b]


def turned(x: Array, out: Array) -> None:
    """``out`` [k, n] = x [n, k] turned over, both with a last axis without gaps."""
    i0 = j0 = 0
    if x.itemsize == 4:
        x, out = x.view(np.int32), out.view(np.int32)
        i0, j0 = x.shape[0] // 16 * 16, x.shape[1] // 16 * 16
        _turned_words(x, out)
    if i0 < x.shape[0] or j0 < x.shape[1]:
        _turned_rest(x, out, i0, j0)
