"""Codebooks learned from data: k-means of one dimension on a histogram, by dynamic programming."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._backend import Array, Numpy, backend
from ._codebook import Codebook
from ._parts import ordered

KEY_BITS = 18  # of a float32 that tell the bins of the histogram apart: sign, exponent, 9 bits of mantissa
BINS = 1 << 11  # bins among which the dynamic programme draws its borders
CHUNK = 1 << 20
ROUNDS = 200  # at most, of Lloyd's algorithm after it


def learn_codebook(x: Array, bits: int, weights: Array | None = None, *, zero: bool = False) -> Codebook:
    """The codebook of ``2**bits`` values with the least squared error on data, as nearly as a histogram tells.

    >>> import numpy as np
    >>> learn_codebook(np.float32([-1, -1.125, 0.5, 0.5, 0.5, 4]), bits=1).values
    (-0.125, 4.0)
    >>> learn_codebook(np.float32([-1, -1.125, 0.1, 0.5, 0.5, 4]), bits=2, zero=True).values
    (-1.0625, 0.0, 0.5, 4.0)

    x: numbers of any shape, numpy, torch or jax; NaN and infinities do not count. ``weights``: how much each
    number counts, of x's shape, not negative. ``zero=True``: one of the values is 0, as pruned weights need.
    Values are float32, fewer than ``2**bits`` where x has fewer different numbers.

    Two steps, both deterministic, in memory that does not grow with x. Numbers are gathered in bins that share
    their leading 18 bits as float32 (9 of mantissa), each with its mean and weight. The best division into
    ``2**bits`` runs is found exactly by dynamic programming over at most 2048 runs of bins, which lie as densely
    as the values of a fine codebook would; then Lloyd's algorithm moves borders and means bin by bin until
    neither changes, or 200 times.
    To learn values for blocks give x over its blocks' largest magnitudes.

    Raises ValueError for bits outside 1 to 8, weights of another shape, negative or NaN, and data with less
    than two different numbers. Sources: Lloyd, "Least squares quantization in PCM" (1982); Max, "Quantizing for
    minimum distortion" (1960); Wang and Song, "Ckmeans.1d.dp" (2011).
    """
    if not (type(bits) is int and 1 <= bits <= 8):
        raise ValueError(f"a learned codebook has codes of 1 to 8 bits, got bits={bits!r}")
    if weights is not None and tuple(weights.shape) != tuple(x.shape):
        raise ValueError(f"weights have the shape of x, {tuple(x.shape)}, got {tuple(weights.shape)}")
    weight, mean = _histogram(x, weights)
    if len(mean) < 2:
        raise ValueError("a codebook is learned from two different numbers or more, NaN and infinities not counted")
    values = _distinct(_lloyd(weight, mean, _best_runs(weight, mean, 2**bits), zero))
    if len(values) < 2:
        raise ValueError("a codebook is learned from numbers that differ as float32")
    return Codebook(tuple(float(v) for v in values))


def _histogram(x: Array, weights: Array | None) -> tuple[np.ndarray, np.ndarray]:
    """Weight and mean of the bins that hold numbers, ascending."""
    flat, weight_flat = _flat(x), None if weights is None else _flat(weights)
    total, moment = np.zeros(1 << KEY_BITS), np.zeros(1 << KEY_BITS)
    for start in range(0, flat.shape[0], CHUNK):
        piece = _float64(flat[start : start + CHUNK])
        w = np.ones_like(piece) if weight_flat is None else _float64(weight_flat[start : start + CHUNK])
        if not (w >= 0).all() or np.isinf(w).any():
            raise ValueError("weights are finite and not negative")
        keep = np.abs(piece) <= np.finfo(np.float32).max
        piece, w = piece[keep], w[keep]
        keys = ordered(piece.astype(np.float32).view(np.int32), 32).astype(np.int64) + 2**31 >> (32 - KEY_BITS)
        total += np.bincount(keys, w, 1 << KEY_BITS)
        moment += np.bincount(keys, w * piece, 1 << KEY_BITS)
    kept = total > 0
    return total[kept], moment[kept] / total[kept]


def _flat(x: Array) -> Array:
    return x.reshape(-1) if hasattr(x, "reshape") else np.asarray(x).reshape(-1)


def _float64(x: Array) -> np.ndarray:
    xp, x = backend(x)
    if xp is not Numpy and hasattr(x, "detach"):
        x = x.detach().cpu()
    return np.asarray(x.double() if hasattr(x, "double") else x, dtype=np.float64)


def _best_runs(weight: np.ndarray, mean: np.ndarray, count: int) -> np.ndarray:
    """Means of the runs of bins, at most ``count``, that lose least."""
    edges = _edges(weight, mean)
    w, m, s = (np.add.reduceat(v, edges) for v in (weight, weight * mean, weight * mean**2))
    n = len(w)
    sums = [np.concatenate([[0.0], np.cumsum(v)]) for v in (w, m, s)]
    if n <= count:
        return m / w
    # best[j]: least loss of the first j runs of bins; from[k, j]: where the last of k runs starts
    best, starts = _loss(sums, np.zeros(n + 1, np.int64), np.arange(n + 1)), np.zeros((count, n + 1), np.int64)
    for k in range(1, count):
        best, starts[k] = _extended(sums, best, n)
    stop, means = n, []
    for k in range(count - 1, -1, -1):
        start = int(starts[k, stop])
        if start < stop:
            means.append((sums[1][stop] - sums[1][start]) / (sums[0][stop] - sums[0][start]))
        stop = start
    return np.array(means[::-1])


def _edges(weight: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Where runs of bins start, no more than `BINS`: as many in each place as the best fine codebook has values
    there, which is as the cube root of the density (Panter and Dite 1951)."""
    if len(weight) <= BINS:
        return np.arange(len(weight))
    width = np.gradient(mean)
    share = np.cbrt(weight * width**2)
    middle = np.cumsum(share) - share / 2
    run = np.minimum((middle / share.sum() * BINS).astype(np.int64), BINS - 1)
    return np.flatnonzero(np.diff(run, prepend=-1))


def _loss(sums: list[np.ndarray], i: Any, j: Any) -> np.ndarray:
    """The squared error of bins i to j - 1 about their mean."""
    w, m, s = (v[j] - v[i] for v in sums)
    return np.maximum(s - np.divide(m * m, w, out=np.zeros_like(m), where=w > 0), 0)


def _extended(sums: list[np.ndarray], best: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """One run more: for every j the start i of the last run with the least ``best[i] + loss(i, j)``. The starts
    ascend with j, so those of every second j, found first, bound the others'."""
    least, start = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
    step = 1 << n.bit_length()
    known = np.array([], np.int64)
    while step >= 1:
        j = np.setdiff1d(np.arange(0, n + 1, step), known)
        at = np.searchsorted(known, j)
        low = np.where(at > 0, start[known[np.maximum(at - 1, 0)]] if len(known) else 0, 0)
        high = np.where(at < len(known), start[known[np.minimum(at, len(known) - 1)]] if len(known) else 0, j)
        high = np.maximum(np.minimum(high, j), low)
        lengths = high - low + 1
        first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        i = np.arange(lengths.sum()) - np.repeat(first - low, lengths)
        losses = best[i] + _loss(sums, i, np.repeat(j, lengths))
        least[j] = np.minimum.reduceat(losses, first)
        hits = np.flatnonzero(losses == np.repeat(least[j], lengths))
        start[j] = i[hits[np.searchsorted(hits, first)]]  # of equals the first
        known = np.union1d(known, j)
        step //= 2
    return least, start


def _lloyd(weight: np.ndarray, mean: np.ndarray, values: np.ndarray, zero: bool) -> np.ndarray:
    """Means of the bins nearest to each value, until nothing moves."""
    if zero:
        values = values.copy()
        values[np.argmin(np.abs(values))] = 0.0
    for _ in range(ROUNDS):
        nearest = np.searchsorted((values[:-1] + values[1:]) / 2, mean, side="left")
        total = np.bincount(nearest, weight, len(values))
        moved = np.divide(np.bincount(nearest, weight * mean, len(values)), total, out=values.copy(), where=total > 0)
        if zero:
            moved[np.argmin(np.abs(values))] = 0.0
        moved.sort()
        if (moved == values).all():
            break
        values = moved
    return values


def _distinct(values: np.ndarray) -> np.ndarray:
    return np.unique(values.astype(np.float32) + np.float32(0))
