"""GPTQ, coordinate descent and SparseGPT for any block format: pure functions of a weight and its inputs' moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dtrtri

from ...numerics import Block, Quantized
from ._grid import Grid, element_codes, grid_of, scale_codes
from ._loops import best_scale, descend_rows, prune_rows, rescale_rows, round_rows
from ._orders import Order

_ROWS = 64  # that a loop takes at a time: a few vectors' worth, and what of them fits a cache
_NO_MASK = np.empty((0, 0), bool)


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight [out, n] in a format: ``index`` [out, n] into the grid's values, ``scale`` and ``shift`` [out, groups]
    with the tensor's scale in them, and ``damp``, the share of the mean diagonal that was added to the Hessian."""

    grid: Grid
    index: np.ndarray
    scale: np.ndarray
    shift: np.ndarray
    tensor_scale: float
    damp: float

    def values(self) -> np.ndarray:
        """The numbers, float64 [out, n]."""
        group = groups(self.index.shape[1], self.grid.fmt)
        return (self.grid.values[self.index] - self.shift[:, group]) * self.scale[:, group]

    def quantized(self) -> Quantized:
        """The codes and scales, as torch tensors."""
        fmt = self.grid.fmt
        return Quantized(
            torch.from_numpy(element_codes(self.grid, self.grid.values[self.index])),
            torch.from_numpy(scale_codes(self.grid, self.scale / self.tensor_scale)),
            torch.from_numpy(element_codes(self.grid, self.shift)) if fmt.zero_point else None,
            torch.tensor(self.tensor_scale) if fmt.tensor_scale is not None else None,
            fmt,
        )


def groups(n: int, fmt: Block) -> np.ndarray:
    """The group of each of n columns."""
    return np.arange(n) // (fmt.size if isinstance(fmt.size, int) else n)


def factor(hessian: np.ndarray, damp: float, most: float = 1.0) -> tuple[np.ndarray, float] | None:
    """The upper Cholesky factor of the inverse Hessian [n, n], and the damping that it took.

    Damping is a share of the mean diagonal, and grows by tens until the matrix is positive; None past ``most``, and
    for a Hessian of zeros or with NaN.
    """
    mean = float(np.diagonal(hessian).mean())
    if not math.isfinite(mean) or mean <= 0 or not np.isfinite(hessian).all():
        return None
    places = np.arange(len(hessian))
    while damp <= most:
        # backwards: where H is R R^T with an upper R, the factor of its inverse is R^-1
        a = np.array(hessian[::-1, ::-1], np.float64, order="F")
        a[places, places] += damp * mean
        a, failed = dpotrf(a, lower=True, clean=True, overwrite_a=True)
        if not failed:
            a, failed = dtrtri(a, lower=True, overwrite_c=True)
            if not failed and np.isfinite(a).all():
                return a[::-1, ::-1], damp
        damp = max(damp, 1e-4) * 10
    return None


def corrected(
    weight: np.ndarray, hessian: np.ndarray, cross: np.ndarray, upper: np.ndarray, strength: float
) -> np.ndarray:
    """Weights that do to the compressed model's inputs X' what the old ones did to the original's, X.

    V = W + strength W (X - X') X'^T (X' X'^T + damp)^-1, which for strength 1 minimises ||W X - V X'||^2, with
    ``hessian`` X' X'^T, ``cross`` X X'^T and ``upper`` the factor of the damped inverse (quantization error
    propagation, arXiv 2504.09629).
    """
    w, u = torch.as_tensor(weight, dtype=torch.float64), torch.from_numpy(np.ascontiguousarray(upper))
    shift = w @ (torch.as_tensor(cross, dtype=torch.float64) - torch.as_tensor(hessian, dtype=torch.float64))
    return (w + strength * (shift @ u.T @ u)).numpy()


def ordering(diagonal: np.ndarray, group: np.ndarray, order: Order) -> np.ndarray:
    """Columns in the order of rounding.

    "none": as they stand. "static": the most active first. "group": groups as wholes, those with the most active
    columns first and within each the most active first, so that a group's scale can still be found on its way.

    >>> ordering(np.array([1.0, 2, 5, 3]), np.array([0, 0, 1, 1]), "group").tolist()
    [2, 3, 1, 0]
    """
    places = np.arange(len(group))
    if order == "none":
        return places
    if order == "static":
        return np.argsort(-diagonal, kind="stable")
    means = np.bincount(group, weights=diagonal) / np.bincount(group)
    return np.lexsort((places, -diagonal, group, -means[group]))


def _each(work: Callable[[slice], None], rows: int) -> None:
    pieces = [slice(i, min(i + _ROWS, rows)) for i in range(0, rows, _ROWS)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(work, pieces))


def _ratios(fmt: Block) -> np.ndarray:
    """What of the scale that clips nothing is tried: powers of two on either side, else down to a half."""
    return np.array([0.36, 0.71, 1.41]) if fmt.scale.mantissa == 0 else np.linspace(1.0, 0.5, 26)


def _tables(grid: Grid, second: float) -> tuple[np.ndarray, ...]:
    scales = grid.scales * second
    middles = (grid.values[1:] + grid.values[:-1]) / 2
    return grid.values, middles, scales, (scales[1:] + scales[:-1]) / 2


def gptq(
    weight: np.ndarray,
    hessian: np.ndarray,
    fmt: Block,
    *,
    damp: float = 0.01,
    order: Order = "group",
    block: int = 128,
    keep: np.ndarray | None = None,
    tensor_scale: float | None = None,
) -> Rounded | None:
    """A weight [out, n] in a format, rounded by GPTQ (Frantar et al., arXiv 2210.17323); None where the Hessian is
    of no use even with all damping.

    >>> rng = np.random.default_rng(0)
    >>> weight, x = rng.normal(size=(4, 8)), rng.normal(size=(8, 64))
    >>> found = gptq(weight, x @ x.T, grid_of("int4:g8").fmt)
    >>> found.index.shape, found.scale.shape
    ((4, 8), (4, 1))

    hessian [n, n]: the sum of x x^T over the layer's inputs. Scales are searched for each group as it comes, weighted
    by what an error in each column costs; for order "static" beforehand. keep [out, n]: False for weights that are
    zero, as those become whose inputs never were anything else. tensor_scale: of formats that have one, where it is
    given from outside.
    """
    grid = grid_of(fmt)
    out, n = weight.shape
    group = groups(n, fmt)
    diagonal = np.ascontiguousarray(np.diagonal(hessian)).astype(np.float64)
    walk = ordering(diagonal, group, order)
    found = factor(hessian[np.ix_(walk, walk)], damp)
    if found is None:
        return None
    damp = found[1]
    # an input that was never there says nothing of its weight
    weight = np.where(diagonal == 0, 0, weight).astype(np.float32)
    second = grid.tensor_scale(float(np.abs(weight).max())) if tensor_scale is None else tensor_scale
    tables = _tables(grid, second)
    rest = (_ratios(fmt), fmt.zero_point)
    fit = order != "static"
    cost = 1 / np.diagonal(found[0]) ** 2 if fit else diagonal + damp * diagonal.mean()
    upper = np.ascontiguousarray(found[0], np.float32)
    del found
    index = np.empty((out, n), np.int32)
    scale, shift = np.zeros((2, out, group[-1] + 1))

    def work(rows: slice) -> None:
        w = weight[rows]
        own = np.zeros((2, group[-1] + 1, len(w)))
        if not fit:
            for b in range(group[-1] + 1):
                inside = group == b
                for r in range(len(w)):
                    own[:, b, r] = best_scale(w[r, inside], cost[inside], *tables, *rest)
        places = np.empty((n, len(w)), np.int32)
        mask = _NO_MASK if keep is None else np.ascontiguousarray(keep[rows][:, walk].T)
        w = np.ascontiguousarray(w[:, walk].T)
        round_rows(w, upper, group[walk], fit, cost, *tables, *rest, mask, block, own[0], own[1], places)
        index[rows] = places[np.argsort(walk)].T
        scale[rows], shift[rows] = own[0].T, own[1].T

    _each(work, out)
    return Rounded(grid, index, scale, shift, second, damp)


def refine(
    weight: np.ndarray, hessian: np.ndarray, rounded: Rounded, sweeps: int, keep: np.ndarray | None = None
) -> Rounded:
    """Coordinate descent from a rounding: scales and numbers in turn, each to its best with the others held.

    It lowers tr((W - Q) H (W - Q)^T) with every step (as CDQuant, arXiv 2406.17542, does greedily).
    """
    group = groups(weight.shape[1], rounded.grid.fmt)
    values, middles, scales, scale_middles = _tables(rounded.grid, rounded.tensor_scale)
    h = np.array(hessian, np.float32)
    places = np.arange(len(h))
    h[places, places] += np.float32(rounded.damp * np.diagonal(hessian).mean())
    index, scale = rounded.index.copy(), rounded.scale.copy()
    for _ in range(sweeps):
        left = weight - replace(rounded, index=index, scale=scale).values()
        slope = (torch.from_numpy(left.astype(np.float32)) @ torch.from_numpy(h)).numpy()

        def work(rows: slice, slope: np.ndarray = slope) -> None:
            part, g, s, z = index[rows], slope[rows], scale[rows], rounded.shift[rows]
            mask = _NO_MASK if keep is None else np.ascontiguousarray(keep[rows])
            rescale_rows(part, g, h, group, s, z, values, scales, scale_middles)
            descend_rows(part, g, h, group, s, values, middles, mask)

        _each(work, len(index))
    return replace(rounded, index=index, scale=scale)


def sparse(
    weight: np.ndarray, hessian: np.ndarray, count: int, span: int, *, damp: float = 0.01
) -> tuple[np.ndarray, np.ndarray] | None:
    """SparseGPT (Frantar and Alistarh, arXiv 2301.00774): weights [out, n] of which ``count`` in every ``span``
    columns are zero, the others made to fit, and the mask of those that stay; None as `gptq`.
    """
    found = factor(hessian, damp)
    if found is None:
        return None
    upper = np.ascontiguousarray(found[0], np.float32)
    result = np.array(weight, np.float32)
    keep = np.empty(weight.shape, bool)

    def work(rows: slice) -> None:
        w = np.ascontiguousarray(result[rows].T)
        mask = np.empty(w.shape, bool)
        prune_rows(w, upper, count, span, mask)
        result[rows], keep[rows] = w.T, mask.T

    _each(work, len(result))
    return result, keep


def output_loss(weight: np.ndarray, other: np.ndarray, hessian: np.ndarray) -> float:
    """||(W - V) X||^2 / ||W X||^2: how much of a layer's output is lost, from the second moments of its inputs."""
    h = torch.as_tensor(hessian, dtype=torch.float32)

    def norm(a: np.ndarray) -> float:
        t = torch.as_tensor(np.asarray(a), dtype=torch.float32)
        return float(((t @ h) * t).sum(dtype=torch.float64))

    whole = norm(weight)
    return max(norm(np.asarray(weight, np.float64) - other), 0.0) / whole if whole > 0 else 0.0
