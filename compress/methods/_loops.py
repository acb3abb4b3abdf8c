"""Compiled loops over the weights of a layer under the second moments of its inputs.

Rows of a weight are independent. Each loop takes some of them, so that threads can share a layer; none changes the
order of its sums with the number of rows or the size of a block, so neither changes a bit.

Shapes: r rows, n columns, b groups; ``values`` and ``scales`` are a `Grid`'s, a ``middles`` what lies between
neighbours of such a table. A weight is scale * (value - shift), shift being 0 but for formats with zero points.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_compiled: Any = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def nearest(middles: np.ndarray, x: float) -> int:
    """Index of the value nearest to x; a tie takes the lower."""
    low, high = 0, len(middles)
    while low < high:
        mid = (low + high) // 2
        if x > middles[mid]:
            low = mid + 1
        else:
            high = mid
    return low


@_compiled
def _to_scale(scales: np.ndarray, middles: np.ndarray, s: float) -> float:
    return scales[nearest(middles, s)] if len(scales) else float(np.float32(s))


@_compiled
def best_scale(
    w: np.ndarray,
    d: np.ndarray,
    values: np.ndarray,
    middles: np.ndarray,
    scales: np.ndarray,
    scale_middles: np.ndarray,
    ratios: np.ndarray,
    shifted: bool,
) -> tuple[float, float]:
    """The scale and shift of one group w [k] with the least sum of d (w - rounded w)^2, of equals the first.

    Tried are the scales next to ``ratios`` times the least one that clips nothing. A group of zeros has the smallest
    scale.
    """
    low, high = 0.0, 0.0
    for i in range(len(w)):
        low, high = min(low, w[i]), max(high, w[i])
    span = values[-1] - values[0]
    base = (high - low) / span if shifted else max(high / values[-1], low / values[0] if values[0] < 0 else 0.0)
    best, best_shift, least, last = _to_scale(scales, scale_middles, base), 0.0, np.inf, -1.0
    if base == 0 or best == 0:
        smallest = scales[0] if len(scales) else 1.0
        return smallest, 0.0
    for r in range(len(ratios)):
        s = _to_scale(scales, scale_middles, base * ratios[r])
        if s == last or s == 0:
            continue
        last = s
        shift = 0.0
        if shifted:
            shift = values[nearest(middles, values[0] - low * ratios[r] / s)]
        error, inverse = 0.0, 1 / s
        for i in range(len(w)):
            e = w[i] - s * (values[nearest(middles, w[i] * inverse + shift)] - shift)
            error += d[i] * e * e
            if error >= least:
                break
        if error < least:
            best, best_shift, least = s, shift, error
    return best, best_shift


@_compiled
def round_rows(
    w: np.ndarray,
    u: np.ndarray,
    group: np.ndarray,
    fit: bool,
    d: np.ndarray,
    values: np.ndarray,
    middles: np.ndarray,
    scales: np.ndarray,
    scale_middles: np.ndarray,
    ratios: np.ndarray,
    shifted: bool,
    keep: np.ndarray,
    block: int,
    scale: np.ndarray,
    shift: np.ndarray,
    index: np.ndarray,
) -> None:
    """GPTQ (arXiv 2210.17323, algorithm 1): columns rounded in turn, each error made good by those still to come.

    w [n, r] float32: the weights transposed, columns in the order of rounding; changed. u [n, n] float32: the upper
    Cholesky factor of the inverse Hessian. group [n]: of each column. fit: scales are found as the first column of
    their group comes, from the weights as they are then, weighted by d [n]; else scale and shift [b, r] are given.
    keep [n, r]: False for weights that become zero, or [0, 0]. block: how many columns are rounded before the rest
    is brought up to date; a schedule, no more. index [n, r]: what comes out, places in values.
    """
    n, rows = w.shape
    masked = len(keep) > 0
    error = np.empty((block, rows), np.float32)
    for first in range(0, n, block):
        end = min(first + block, n)
        for j in range(first, end):
            b = group[j]
            if fit and (j == 0 or b != group[j - 1]):
                stop = j + 1
                while stop < n and group[stop] == b:
                    stop += 1
                now = w[j:stop].copy()
                # columns of the group past the block have not seen this block's errors yet
                for k in range(end, stop):
                    for i in range(first, j):
                        for r in range(rows):
                            now[k - j, r] -= error[i - first, r] * u[i, k]
                for r in range(rows):
                    scale[b, r], shift[b, r] = best_scale(
                        now[:, r].copy(), d[j:stop], values, middles, scales, scale_middles, ratios, shifted
                    )
            for r in range(rows):
                s, z = scale[b, r], shift[b, r]
                x = w[j, r] / s + z
                if masked and not keep[j, r]:
                    x = z
                place = nearest(middles, x)
                index[j, r] = place
                error[j - first, r] = (w[j, r] - s * (values[place] - z)) / u[j, j]
            for k in range(j + 1, end):
                c = u[j, k]
                for r in range(rows):
                    w[k, r] -= error[j - first, r] * c
        for k in range(end, n):
            for j in range(first, end):
                c = u[j, k]
                for r in range(rows):
                    w[k, r] -= error[j - first, r] * c


@_compiled
def prune_rows(w: np.ndarray, u: np.ndarray, count: int, span: int, keep: np.ndarray) -> None:
    """SparseGPT (arXiv 2301.00774, algorithm 1): in each ``span`` of columns the ``count`` weights of a row that
    cost least, w^2 / u_jj^2 as they are when the span comes, become zero, made good by the columns after them.

    w [n, r] float32, transposed, and changed into the result; u as in `round_rows`; keep [n, r]: what comes out.
    """
    n, rows = w.shape
    for first in range(0, n, span):
        end = min(first + span, n)
        goes = count if end - first == span else int(np.floor((end - first) * count / span + 0.5))
        for r in range(rows):
            cost = np.empty(end - first, np.float64)
            for j in range(first, end):
                cost[j - first] = (w[j, r] / u[j, j]) ** 2
            # of equal costs the later ones go
            order = np.argsort(-cost, kind="mergesort")
            for i in range(end - first):
                keep[first + order[i], r] = i < end - first - goes
        for j in range(first, end):
            for k in range(j + 1, n):
                c = u[j, k] / u[j, j]
                for r in range(rows):
                    if not keep[j, r]:
                        w[k, r] -= w[j, r] * c
            for r in range(rows):
                if not keep[j, r]:
                    w[j, r] = 0


@_compiled
def descend_rows(
    index: np.ndarray,
    g: np.ndarray,
    h: np.ndarray,
    group: np.ndarray,
    scale: np.ndarray,
    values: np.ndarray,
    middles: np.ndarray,
    keep: np.ndarray,
) -> int:
    """One sweep of coordinate descent on tr((W - Q) H (W - Q)^T): each weight to its best number, the others held.

    index [r, n]: places in values, changed. g [r, n] float32: (W - Q) H, kept up to date. h [n, n] float32. scale
    [r, b]. keep [r, n], or [0, 0]. Returns how many weights changed.
    """
    rows, n = index.shape
    changed = 0
    for r in range(rows):
        for j in range(n):
            if len(keep) and not keep[r, j]:
                continue
            s, old = scale[r, group[j]], index[r, j]
            new = nearest(middles, values[old] + g[r, j] / (h[j, j] * s))
            if new != old:
                delta = np.float32(s * (values[new] - values[old]))
                # a change that does not pay, by rounding, would go back and forth
                if delta * (2 * g[r, j] - delta * h[j, j]) > 0:
                    index[r, j] = new
                    changed += 1
                    for k in range(n):
                        g[r, k] -= delta * h[j, k]
    return changed


@_compiled
def rescale_rows(
    index: np.ndarray,
    g: np.ndarray,
    h: np.ndarray,
    group: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    values: np.ndarray,
    scales: np.ndarray,
    scale_middles: np.ndarray,
) -> int:
    """Each group's best scale for the numbers that it has, the other groups held; returns how many changed.

    Shapes and names as in `descend_rows`; the columns of a group stand together.
    """
    rows, n = index.shape
    changed = 0
    hv = np.empty(n, np.float32)
    for r in range(rows):
        first = 0
        while first < n:
            b, end = group[first], first
            hv[:] = 0
            slope = 0.0
            while end < n and group[end] == b:
                v = np.float32(values[index[r, end]] - shift[r, b])
                if v != 0:
                    slope += v * g[r, end]
                    for k in range(n):
                        hv[k] += v * h[end, k]
                end += 1
            curve = 0.0
            for j in range(first, end):
                curve += (values[index[r, j]] - shift[r, b]) * hv[j]
            first = end
            if curve <= 0:
                continue
            old = scale[r, b]
            new = _to_scale(scales, scale_middles, max(old + slope / curve, 0.0))
            delta = new - old
            if new > 0 and delta * (2 * slope - delta * curve) > 0:
                scale[r, b] = new
                changed += 1
                for k in range(n):
                    g[r, k] -= np.float32(delta) * hv[k]
    return changed
