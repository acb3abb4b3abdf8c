"""Compiled sums over k: sequential, pairwise, exact, integer. Rows of a times columns of b, in tiles of columns.

Operands are ``a[Ta, M, K]`` and ``b[Tb, K, N]``, sums ``out[T, M, N]``, which begin as c; ``ia`` and ``ib`` say which
a and b a result belongs to.
"""

from __future__ import annotations

import numpy as np

from ..fast._words import compiled, long_word
from ._parts import Array, add_columns, fma, inverse, round_columns, trunc

TILE = 512


@compiled
def sequential_fp32(a: Array, b: Array, out: Array, ia: Array, ib: Array, fused: bool) -> None:
    """float32, nearest even, as the processor has it: multiply-add fused, or rounded twice."""
    n = out.shape[2]
    for t in range(out.shape[0]):
        x, y = a[ia[t]], b[ib[t]]
        for j0 in range(0, n, TILE):
            j1 = min(j0 + TILE, n)
            # a panel of b stays in the cache while it serves all rows
            for p0 in range(0, x.shape[1], 32):
                p1 = min(p0 + 32, x.shape[1])
                whole = p0 + (p1 - p0) // 4 * 4
                for i in range(out.shape[1]):
                    acc = out[t, i, j0:j1]
                    for k in range(p0, whole, 4):
                        x0, x1, x2, x3 = x[i, k], x[i, k + 1], x[i, k + 2], x[i, k + 3]
                        y0, y1, y2, y3 = y[k, j0:j1], y[k + 1, j0:j1], y[k + 2, j0:j1], y[k + 3, j0:j1]
                        if fused:
                            for j in range(j1 - j0):
                                acc[j] = fma(x3, y3[j], fma(x2, y2[j], fma(x1, y1[j], fma(x0, y0[j], acc[j]))))
                        else:
                            for j in range(j1 - j0):
                                acc[j] = acc[j] + x0 * y0[j] + x1 * y1[j] + x2 * y2[j] + x3 * y3[j]
                    for k in range(whole, p1):
                        x0, y0 = x[i, k], y[k, j0:j1]
                        for j in range(j1 - j0):
                            acc[j] = fma(x0, y0[j], acc[j]) if fused else acc[j] + x0 * y0[j]


@compiled
def _products(x: float, y: Array, j0: int, n: int, p: Array) -> None:
    row = y[j0 : j0 + n]
    wide = np.float64(x)
    for j in range(n):
        p[j] = wide * np.float64(row[j])


@compiled
def sequential(
    a: Array,
    b: Array,
    out: Array,
    ia: Array,
    ib: Array,
    target: tuple[float, ...],
    mode: int,
    rounded: bool,
    product: tuple[float, ...],
) -> None:
    """acc = round(acc + a * b); where ``rounded``, the product is rounded to ``product`` before."""
    acc, p, unit = np.empty(TILE), np.empty(TILE), np.empty(TILE)
    for t in range(out.shape[0]):
        x, y = a[ia[t]], b[ib[t]]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for i in range(out.shape[1]):
                total = out[t, i, j0 : j0 + n]
                for j in range(n):
                    acc[j] = total[j]
                round_columns(acc, unit, n, target, mode)
                for k in range(x.shape[1]):
                    _products(x[i, k], y[k], j0, n, p)
                    if rounded:
                        round_columns(p, unit, n, product, mode)
                    add_columns(acc, p, n)
                    round_columns(acc, unit, n, target, mode)
                for j in range(n):
                    total[j] = acc[j]


@compiled
def pairwise(
    a: Array,
    b: Array,
    out: Array,
    ia: Array,
    ib: Array,
    target: tuple[float, ...],
    mode: int,
    rounded: bool,
    product: tuple[float, ...],
) -> None:
    """The tree of sums, as a stack of finished subtrees: as many as k has one bits, like a binary counter."""
    stack, unit = np.empty((66, TILE)), np.empty(TILE)
    for t in range(out.shape[0]):
        x, y = a[ia[t]], b[ib[t]]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for i in range(out.shape[1]):
                total = out[t, i, j0 : j0 + n]
                for j in range(n):
                    stack[0, j] = total[j]
                round_columns(stack[0], unit, n, target, mode)
                top = 0
                for k in range(x.shape[1]):
                    top += 1
                    _products(x[i, k], y[k], j0, n, stack[top])
                    if rounded:
                        round_columns(stack[top], unit, n, product, mode)
                    full = k + 1
                    while full % 2 == 0:
                        add_columns(stack[top - 1], stack[top], n)
                        top -= 1
                        round_columns(stack[top], unit, n, target, mode)
                        full //= 2
                while top > 0:  # what is left joins from the right, and c last
                    add_columns(stack[top - 1], stack[top], n)
                    top -= 1
                    round_columns(stack[top], unit, n, target, mode)
                for j in range(n):
                    total[j] = stack[0, j]


@compiled
def add_scaled(
    acc: Array, x: Array, scale: Array, target: tuple[float, ...], mode: int, rounded: bool, product: tuple[float, ...]
) -> None:
    """acc = round(acc + x * scale) over flat float32 arrays: one step of a sum of partial sums.

    ``scale`` has one entry for all or one for each.
    """
    total, p, unit = np.empty(TILE), np.empty(TILE), np.empty(TILE)
    for j0 in range(0, acc.size, TILE):
        n = min(TILE, acc.size - j0)
        for j in range(n):
            total[j] = acc[j0 + j]
            p[j] = x[j0 + j]
        if scale.size > 1:
            for j in range(n):
                p[j] *= np.float64(scale[j0 + j])
        elif scale[0] != 1.0:
            for j in range(n):
                p[j] *= np.float64(scale[0])
        if rounded:
            round_columns(p, unit, n, product, mode)
        add_columns(total, p, n)
        round_columns(total, unit, n, target, mode)
        for j in range(n):
            acc[j0 + j] = total[j]


@compiled
def round_flat(x: Array, out: Array, target: tuple[float, ...], mode: int) -> None:
    """out = x rounded, of flat arrays, from float64 to float32."""
    v, unit = np.empty(TILE), np.empty(TILE)
    for j0 in range(0, x.size, TILE):
        n = min(TILE, x.size - j0)
        v[:n] = x[j0 : j0 + n]
        round_columns(v, unit, n, target, mode)
        for j in range(n):
            out[j0 + j] = v[j]


@compiled
def exact(
    a: Array,
    b: Array,
    out: Array,
    ia: Array,
    ib: Array,
    target: tuple[float, ...],
    mode: int,
    units: Array,
) -> None:
    """The exact sum of finite products and c, rounded once.

    ``units[0]`` divides every product and c; ``units[i + 1] = units[i] * 2**w``. Products are cut into multiples of
    the units, and the multiples of each unit add up without error as integers below 2**53.
    """
    count = units.size
    bins, p, scale = np.empty((count, TILE)), np.empty(TILE), np.empty(TILE)
    digits = np.empty(count, np.int64)
    for t in range(out.shape[0]):
        x, y = a[ia[t]], b[ib[t]]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for i in range(out.shape[1]):
                total = out[t, i, j0 : j0 + n]
                bins[:, :] = 0.0
                for k in range(-1, x.shape[1]):
                    if k < 0:
                        for j in range(n):
                            p[j] = total[j]
                    else:
                        _products(x[i, k], y[k], j0, n, p)
                    for u in range(count - 1, 0, -1):
                        row, unit, per = bins[u], units[u], inverse(units[u])
                        for j in range(n):
                            whole = trunc(p[j] * per)
                            row[j] += whole
                            p[j] -= whole * unit
                    row, per = bins[0], inverse(units[0])
                    for j in range(n):
                        row[j] += p[j] * per
                for j in range(n):
                    p[j] = _join(bins[:, j], digits, units)
                round_columns(p, scale, n, target, mode)
                for j in range(n):
                    total[j] = p[j]


@compiled
def _join(bins: Array, digits: Array, units: Array) -> float:
    """The sum of ``bins[i] * units[i]``, rounded to odd in 53 bits."""
    count = units.size
    width = 0
    if count > 1:
        width = int((long_word(units[1]) - long_word(units[0])) >> 52)
    carry = 0
    for u in range(count):
        value = int(bins[u]) + carry
        if u < count - 1:
            digits[u] = value & ((1 << width) - 1)
            carry = value >> width
        else:
            digits[u] = value
    negative = digits[count - 1] < 0
    if negative:  # two's complement: the digits of the magnitude
        borrow = 0
        for u in range(count - 1):
            value = -digits[u] - borrow
            borrow = 1 if value < 0 else 0
            digits[u] = value + (borrow << width)
        digits[count - 1] = -digits[count - 1] - borrow
    head, sticky, last = 0, False, count - 1
    for u in range(count - 1, -1, -1):
        if head < 1 << 31:
            head, last = (head << width) | digits[u], u
        else:
            sticky |= digits[u] != 0
    power = units[last]
    while head >= 1 << 53:
        sticky |= (head & 1) != 0
        head >>= 1
        power *= 2.0
    if sticky and head & 1 == 0:
        head |= 1
    value = float(head) * power
    return -value if negative else value


@compiled
def integer(
    a: Array,
    b: Array,
    out: Array,
    ia: Array,
    ib: Array,
    group: int,
    low: float,
    high: float,
) -> None:
    """Sums of ``group`` products each, clipped after every group. float64 operands that are integers."""
    acc, part = np.empty(TILE), np.empty(TILE)
    for t in range(out.shape[0]):
        x, y = a[ia[t]], b[ib[t]]
        for j0 in range(0, out.shape[2], TILE):
            n = min(TILE, out.shape[2] - j0)
            for i in range(out.shape[1]):
                total = out[t, i, j0 : j0 + n]
                for j in range(n):
                    acc[j] = min(max(total[j], low), high)
                for g in range(0, x.shape[1], group):
                    for j in range(n):
                        part[j] = 0.0
                    for k in range(g, min(g + group, x.shape[1])):
                        left, row = x[i, k], y[k, j0 : j0 + n]
                        for j in range(n):
                            part[j] += left * row[j]
                    for j in range(n):
                        s = acc[j] + part[j]
                        s = s if s < high else high
                        acc[j] = s if s > low else low
                for j in range(n):
                    total[j] = acc[j]
