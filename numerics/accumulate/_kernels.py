"""Compiled block multiply-add: groups of products aligned to one exponent, cut, added and rounded.

Operands are ``a[Ta, M, K]`` and ``b[Tb, K, N]`` with K padded to whole groups of a multiple of 4, ``out[T, M, N]`` as
in `_sums`. ``pa`` and ``pb`` are the operands' exponents as powers of two, so that a product's exponent is
a product too. An aligned term is ``product * 2**fraction / 2**E``, which is exact; cutting it to an integer is one
instruction. float32 serves operands of at most 12 bits between 2**-32 and 2**32, float64 all others.

Where infinities or NaN are among the operands, ``a`` and ``b`` hold 0 in their place, ``marks`` says in which rows
and columns they are, and ``raw`` has them.
"""

from __future__ import annotations

import numpy as np

from ._parts import (
    Array,
    compiled,
    cut_down,
    cut_nearest,
    cut_toward_zero,
    floor,
    inverse,
    power_of,
    rint,
    round_columns,
    trunc,
)

TILE = 512


@compiled
def _most(m: Array, pa: Array, pb: Array, ks: tuple[int, int, int], j0: int, n: int, start: float) -> None:
    """m = the largest exponent of a product: and ``start``; k from, to, step; as powers of two."""
    for j in range(n):
        m[j] = start
    k0, k1, step = ks
    for k in range(k0, k1, 4 * step):
        x0, x1, x2, x3 = pa[k], pa[k + step], pa[k + 2 * step], pa[k + 3 * step]
        y0, y1 = pb[k, j0 : j0 + n], pb[k + step, j0 : j0 + n]
        y2, y3 = pb[k + 2 * step, j0 : j0 + n], pb[k + 3 * step, j0 : j0 + n]
        for j in range(n):
            top = m[j]
            e = x0 * y0[j]
            top = e if e > top else top
            e = x1 * y1[j]
            top = e if e > top else top
            e = x2 * y2[j]
            top = e if e > top else top
            e = x3 * y3[j]
            m[j] = e if e > top else top


@compiled
def _cut(s: Array, a: Array, b: Array, per: Array, ks: tuple[int, int, int], j0: int, n: int, how: int) -> None:
    """s = the sum of the products times ``per``, each cut to an integer."""
    for j in range(n):
        s[j] = 0.0
    k0, k1, step = ks
    for k in range(k0, k1, 4 * step):
        x0, x1, x2, x3 = a[k], a[k + step], a[k + 2 * step], a[k + 3 * step]
        y0, y1 = b[k, j0 : j0 + n], b[k + step, j0 : j0 + n]
        y2, y3 = b[k + 2 * step, j0 : j0 + n], b[k + 3 * step, j0 : j0 + n]
        if how == 0:
            for j in range(n):
                q = per[j]
                s[j] += cut_toward_zero(x0 * y0[j] * q, x1 * y1[j] * q, x2 * y2[j] * q, x3 * y3[j] * q)
        elif how == 1:
            for j in range(n):
                q = per[j]
                s[j] += cut_down(x0 * y0[j] * q, x1 * y1[j] * q, x2 * y2[j] * q, x3 * y3[j] * q)
        else:
            for j in range(n):
                q = per[j]
                s[j] += cut_nearest(x0 * y0[j] * q, x1 * y1[j] * q, x2 * y2[j] * q, x3 * y3[j] * q)


@compiled
def _cut_whole(x: Array, n: int, how: int) -> None:
    if how == 0:
        for j in range(n):
            x[j] = trunc(x[j])
    elif how == 1:
        for j in range(n):
            x[j] = floor(x[j])
    else:
        for j in range(n):
            x[j] = rint(x[j])


@compiled
def _special(x: Array, y: Array, k0: int, k1: int, j: int) -> float:
    """The sum of the products that are infinite or NaN; 0 where there is none."""
    total = 0.0
    for k in range(k0, k1):
        p = np.float64(x[k]) * np.float64(y[k, j])
        if not abs(p) < np.inf:
            total += p
    return total


@compiled
def _set_special(
    total: Array, c: Array, x: Array, y: Array, ks: tuple[int, int], j0: int, n: int, marks: Array
) -> None:
    """The sums of a group in which infinities or NaN may be: x a row of a, c the accumulators before."""
    for j in range(n):
        if marks[j0 + j]:
            s = _special(x, y, ks[0], ks[1], j0 + j)
            if s != 0.0:  # true of NaN
                total[j] = s if abs(c[j]) < np.inf else s + c[j]


@compiled
def aligned(
    a: Array,
    pa: Array,
    b: Array,
    pb: Array,
    raw_a: Array,
    raw_b: Array,
    row_marks: Array,
    column_marks: Array,
    scale_a: Array,
    scale_b: Array,
    out: Array,
    ia: Array,
    ib: Array,
    group: int,
    up: float,
    zero: float,
    least: float,
    floor_: float,
    how: int,
    target: tuple[float, ...],
    mode: int,
) -> None:
    """`Aligned` without terms. ``up`` is 2**fraction, ``zero`` a zero accumulator's exponent, ``least`` the format's
    smallest, ``floor_`` the least E. Scales ``[Ta, M, groups]`` and ``[Tb, groups, N]``, or of size 0, are powers of 2.
    """
    m, per = np.empty(TILE, a.dtype), np.empty(TILE, a.dtype)
    top, s, c, v, unit = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    scale = np.ones(TILE)
    scaled = scale_a.size > 0
    everywhere = np.ones(out.shape[2], np.bool_)
    most = 2.0**100 if a.itemsize == 4 else 2.0**900  # of the dtype; only met where all products are zero
    for t in range(out.shape[0]):
        ta, tb = ia[t], ib[t]
        some = False
        for j in range(out.shape[2]):
            some |= column_marks[tb, j]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for g in range(a.shape[2] // group):
                k0 = g * group
                for i in range(out.shape[1]):
                    total = out[t, i, j0 : j0 + n]
                    x, ks = a[ta, i], (k0, k0 + group, 1)
                    _most(m, pa[ta, i], pb[tb], ks, j0, n, 0.0)
                    if scaled:
                        own = scale_a[ta, i, g]
                        for j in range(n):
                            scale[j] = own * scale_b[tb, g, j0 + j]
                    for j in range(n):
                        c[j] = total[j]
                        v[j] = c[j]
                    for j in range(n):
                        e = power_of(c[j])
                        e = e if e > least else least
                        e = e if c[j] != 0.0 else zero
                        e = e if e < 2.0**300 else 2.0**300  # an infinite accumulator
                        p = np.float64(m[j]) * scale[j]
                        e = e if e > p else p
                        top[j] = e if e > floor_ else floor_
                    for j in range(n):
                        q = scale[j] * (up * inverse(top[j]))
                        q = q if q < most else most
                        per[j] = q
                    _cut(s, x, b[tb], per, ks, j0, n, how)
                    for j in range(n):
                        v[j] *= up * inverse(top[j])
                    _cut_whole(v, n, how)
                    down = 1.0 / up
                    for j in range(n):
                        v[j] = (v[j] + s[j]) * (top[j] * down)
                    round_columns(v, unit, n, target, mode)
                    for j in range(n):
                        y = v[j]
                        total[j] = y if abs(c[j]) < np.inf else c[j]
                    if row_marks[ta, i] or some:
                        marks = everywhere if row_marks[ta, i] else column_marks[tb]
                        _set_special(total, c, raw_a[ta, i], raw_b[tb], (k0, k0 + group), j0, n, marks)


@compiled
def aligned_terms(
    a: Array,
    b: Array,
    scale_a: Array,
    scale_b: Array,
    pa: Array,
    pb: Array,
    out: Array,
    ia: Array,
    ib: Array,
    group: int,
    terms: int,
    up: float,
    zero: float,
    least: float,
    floor_: float,
    how: int,
    target: tuple[float, ...],
    mode: int,
) -> None:
    """`Aligned` with terms: finite products summed exactly, ``terms`` at a time, then scaled.

    Scales ``[Ta, M, K / terms]`` and ``[Tb, K / terms, N]`` come with their exponents as powers of two, ``pa``, ``pb``.
    """
    count = group // terms
    sums, powers = np.empty((count, TILE)), np.empty((count, TILE))
    top, c, v, unit = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    for t in range(out.shape[0]):
        ta, tb = ia[t], ib[t]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for g in range(a.shape[2] // group):
                for i in range(out.shape[1]):
                    total = out[t, i, j0 : j0 + n]
                    for j in range(n):
                        c[j] = total[j]
                        e = power_of(c[j])
                        e = e if e > least else least
                        e = e if c[j] != 0.0 else zero
                        e = e if e < 2.0**300 else 2.0**300
                        top[j] = e if e > floor_ else floor_
                    for h in range(count):
                        part, power = sums[h], powers[h]
                        block = g * count + h
                        for j in range(n):
                            part[j] = 0.0
                        for k in range(block * terms, (block + 1) * terms):
                            x, y = a[ta, i, k], b[tb, k, j0 : j0 + n]
                            for j in range(n):
                                part[j] += x * y[j]
                        sx, px = scale_a[ta, i, block], pa[ta, i, block]
                        sy, py = scale_b[tb, block, j0 : j0 + n], pb[tb, block, j0 : j0 + n]
                        for j in range(n):
                            part[j] *= sx * sy[j]
                            power[j] = px * py[j]
                        for j in range(n):
                            top[j] = power[j] if power[j] > top[j] else top[j]
                    for j in range(n):
                        v[j] = c[j] * (up * inverse(top[j]))
                    _cut_whole(v, n, how)
                    for h in range(count):
                        part = sums[h]
                        for j in range(n):
                            part[j] *= up * inverse(top[j])
                        _cut_whole(part, n, how)
                        for j in range(n):
                            v[j] += part[j]
                    down = 1.0 / up
                    for j in range(n):
                        v[j] *= top[j] * down
                    round_columns(v, unit, n, target, mode)
                    for j in range(n):
                        total[j] = v[j] if abs(c[j]) < np.inf else c[j]


@compiled
def _overflowing(x: Array, y: Array, ks: tuple[int, int], j: int) -> float:
    """+-infinity where finite products of 2**128 or more have one sign, NaN where both, else 0."""
    total = 0.0
    for k in range(ks[0], ks[1]):
        p = np.float64(x[k]) * np.float64(y[k, j])
        if abs(p) >= 2.0**128 and abs(p) < np.inf:
            total += np.inf if p > 0.0 else -np.inf
    return total


@compiled
def aligned_late(
    a: Array,
    pa: Array,
    b: Array,
    pb: Array,
    raw_a: Array,
    raw_b: Array,
    row_marks: Array,
    column_marks: Array,
    out: Array,
    ia: Array,
    ib: Array,
    group: int,
    halves: int,
    fraction: int,
    sum_fraction: int,
    zero: float,
    least: float,
    target: tuple[float, ...],
    mode: int,
) -> None:
    """`AlignedLate`, in float64; ``halves`` is 2 where even and odd places are added apart."""
    m, per = np.empty((2, TILE)), np.empty(TILE)
    s, c, v, unit, top = np.empty((2, TILE)), np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    everywhere = np.ones(out.shape[2], np.bool_)
    up, finer = 2.0**fraction, 2.0 ** (sum_fraction - fraction)
    far = 0.5 / up if halves == 2 else 0.0
    for t in range(out.shape[0]):
        ta, tb = ia[t], ib[t]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for g in range(a.shape[2] // group):
                k0 = g * group
                for i in range(out.shape[1]):
                    total = out[t, i, j0 : j0 + n]
                    for h in range(halves):
                        ks = (k0 + h, k0 + group, halves)
                        _most(m[h], pa[ta, i], pb[tb], ks, j0, n, 2.0**-600)
                        for j in range(n):
                            per[j] = up * inverse(m[h, j])
                        _cut(s[h], a[ta, i], b[tb], per, ks, j0, n, 0)
                    if halves == 2:
                        for j in range(n):
                            top[j] = m[0, j] if m[0, j] > m[1, j] else m[1, j]
                        for j in range(n):
                            q = inverse(top[j])
                            s[0, j] = floor(s[0, j] * (m[0, j] * q)) + floor(s[1, j] * (m[1, j] * q))
                    else:
                        top[:n] = m[0, :n]
                    for j in range(n):
                        c[j] = total[j]
                        e = power_of(c[j])
                        e = e if e > least else least
                        e = e if c[j] != 0.0 else zero
                        e = e if e < 2.0**300 else 2.0**300
                        unit[j] = e
                    for j in range(n):
                        e = unit[j]
                        larger = e if e > top[j] else top[j]
                        q = inverse(larger)
                        late = floor(c[j] * (up * q)) * finer
                        late = late if e * q >= far else 0.0
                        v[j] = floor(s[0, j] * (finer * (top[j] * q))) + late
                        top[j] = larger
                    down = 1.0 / (up * finer)
                    for j in range(n):
                        v[j] *= top[j] * down
                    round_columns(v, unit, n, target, mode)
                    for j in range(n):
                        y = v[j]
                        total[j] = y if abs(c[j]) < np.inf else c[j]
                    ks_ = (k0, k0 + group)
                    for j in range(n):
                        if (m[0, j] >= 2.0**126 or (halves == 2 and m[1, j] >= 2.0**126)) and abs(c[j]) < np.inf:
                            over = _overflowing(raw_a[ta, i], raw_b[tb], ks_, j0 + j)
                            total[j] = over if over != 0.0 else total[j]
                    marks = everywhere if row_marks[ta, i] else column_marks[tb]
                    _set_special(total, c, raw_a[ta, i], raw_b[tb], ks_, j0, n, marks)
