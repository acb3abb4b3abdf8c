"""What a layer lost to quantization, given back as a low-rank product beside it or as a shift of its bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import eigh, lstsq, qr

from ...numerics import Format, cast

_DAMP = 1e-6  # of the mean diagonal: decides only where the calibration says nothing


def low_rank(
    weight: np.ndarray,
    quantized: np.ndarray,
    rank: int,
    second: np.ndarray | None = None,
    *,
    damp: float = _DAMP,
    fmt: Format | str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The best correction a b of this rank for a layer y = Q x that stands for W x: y = Q x + a (b x).

    >>> weight = np.array([[1.0, 2.0], [0.5, 4.0]])
    >>> a, b = low_rank(weight, np.round(weight / 4) * 4, rank=1)
    >>> a.shape, b.shape
    ((2, 1), (1, 2))
    >>> a, b = low_rank(weight, np.zeros((2, 2)), rank=2, second=np.array([[9.0, 1.0], [1.0, 1.0]]))
    >>> bool(np.allclose(a @ b, weight))
    True

    weight, quantized [out, n]: W and Q. second: the sum of x x^T over the layer's inputs, [n, n], or its diagonal
    [n]; by a common factor it may differ. Returns a [out, rank] and b [rank, n], float64, which minimise
    ||(W - Q - a b) X||_F; without ``second`` ||W - Q - a b||_F. The two are balanced: column i of a is as long as row
    i of b.

    damp: what is added to the diagonal of ``second``, as a share of its mean. It is no matter of numerics, nothing is
    inverted here: inputs that the calibration never saw are corrected too where rank is left over for them.
    fmt: a format that both are rounded to; b is fitted again to the rounded a before it is rounded itself.

    Let E = W - Q and S S^T = ``second``. The truncated singular value decomposition of E S is U U^T E S, U being the
    leading eigenvectors of E S S^T E^T, so that a = U and b = U^T E is the closed form, with no root or inverse of S;
    for more outputs than inputs E is first cut down to its triangular factor.

    Raises ValueError for shapes that do not belong together, NaN or infinity, a ``second`` that is not positive
    semidefinite on its diagonal, and a rank outside of 1 to min(out, n).
    Sources: LQER (Zhang et al., arXiv 2402.02446), equations 5 to 9, for no or a diagonal ``second``; QERA (Zhang et
    al., arXiv 2410.06040), theorem 1, for a full one.
    """
    error = _error(weight, quantized)
    out, n = error.shape
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 1 <= rank <= min(out, n):
        raise ValueError(f"rank={rank!r}: give a whole number from 1 to {min(out, n)} for a weight of {out} x {n}")
    if not (np.isfinite(damp) and damp >= 0):
        raise ValueError(f"damp={damp!r}: give a number from 0")
    q, core = qr(error, mode="economic") if out > n else (None, error)
    gram = _gram(core, second, damp)
    _, found = eigh(gram, subset_by_index=(len(gram) - int(rank), len(gram) - 1))
    a = found[:, ::-1] if q is None else q @ found[:, ::-1]
    # an eigenvector is known up to its sign: the largest entry is positive
    a = a * np.where(a[np.abs(a).argmax(0), np.arange(rank)] < 0, -1.0, 1.0)
    b = a.T @ error
    length = np.linalg.norm(b, axis=1)
    root = np.sqrt(np.where(length > 0, length, 1.0))
    a, b = a * root, b / root[:, None]
    if fmt is None:
        return a, b
    # whatever the metric, a's best partner solves a^T a b = a^T E
    a = _rounded(a, fmt)
    return a, _rounded(lstsq(a, error)[0], fmt)


def bias_shift(weight: np.ndarray, quantized: np.ndarray, mean_input: np.ndarray) -> np.ndarray:
    """What to add to a layer's bias, so that its outputs have the mean that they had: (W - Q) E[x].

    >>> bias_shift(np.array([[1.0, 0.4]]), np.array([[1.0, 0.5]]), np.array([3.0, 10.0])).round(12).tolist()
    [-1.0]

    weight, quantized [out, n]: W and Q. mean_input [n]: the mean of the inputs of the quantized layer. Returns
    float64 [out]. Raises ValueError for shapes that do not belong together, and NaN or infinity.
    Source: Nagel et al., "Data-free quantization through weight equalization and bias correction" (arXiv 1906.04721),
    section 4.2.
    """
    error = _error(weight, quantized)
    return error @ _numbers("mean_input", mean_input, ((error.shape[1],),))


def _error(weight: np.ndarray, quantized: np.ndarray) -> np.ndarray:
    shape = np.shape(weight)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"weight has shape {list(shape)}: give a matrix [out, n]")
    return _numbers("weight", weight, (shape,)) - _numbers("quantized", quantized, (shape,))


def _numbers(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """As float64, if it is finite and of one of the shapes."""
    numbers = np.asarray(x, np.float64)
    if numbers.shape not in shapes:
        raise ValueError(
            f"{name} has shape {list(numbers.shape)}: expected {' or '.join(str(list(s)) for s in shapes)}"
        )
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} holds NaN or infinity, of which no correction can be made")
    return numbers


def _gram(error: np.ndarray, second: np.ndarray | None, damp: float) -> np.ndarray:
    """E (second + damp) E^T."""
    if second is None:
        return error @ error.T
    n = error.shape[1]
    moments = _numbers("second", second, ((n, n), (n,)))
    diagonal = np.diagonal(moments) if moments.ndim == 2 else moments
    if (diagonal < 0).any():
        raise ValueError(f"second has {diagonal.min():g} on its diagonal: sums of squares are not negative")
    # inputs that were all zero say nothing: every direction counts alike
    mean = float(diagonal.mean())
    lift = damp * mean if mean > 0 else 1.0
    product = error @ moments if moments.ndim == 2 else error * moments
    gram = (product + lift * error) @ error.T
    return (gram + gram.T) / 2


def _rounded(x: np.ndarray, fmt: Format | str) -> np.ndarray:
    return np.asarray(cast(x, fmt), np.float64)
