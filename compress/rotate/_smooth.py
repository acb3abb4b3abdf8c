"""Scales per channel that make activations and weights easier to quantize: SmoothQuant and AWQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...numerics import Format, cast
from ._pairs import Pair


def smooth_scales(
    activations: Any, weights: Sequence[Any], alpha: float = 0.5, *, pair: Pair | None = None
) -> torch.Tensor:
    """SmoothQuant's scales, s_j = max|X_j|**alpha / max|W_j|**(1 - alpha).

    >>> import numpy as np
    >>> smooth_scales(np.float64([16, 0]), [np.float64([[1, 2], [-4, 0]])]).tolist()
    [2.0, 1.0]

    activations: max|X_j| of each input channel, [inputs]. weights: of all layers that read them, [outputs, inputs]
    (or [experts, outputs, inputs]); or their max|W_j| alone, [inputs]. alpha: from 0 (all difficulty stays in the
    activations) to 1 (all goes into the weights). pair: whose groups of heads share scales; the largest of a group
    counts, and there are pair.width scales instead of one for each input.

    A channel that is zero in all activations, or in all weights, has s = 1. Out: float64.
    Source: SmoothQuant (arXiv 2211.10438, equation 4). Raises ValueError for NaN, infinity and negative maxima,
    shapes that do not agree, and alpha outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: choose a number from 0 to 1")
    x = _nonnegative("activations", activations)
    w = weight_maxima(weights, len(x))
    if pair is not None:
        x, w = pair.reduce(x, "max"), pair.reduce(w, "max")
    known = (x > 0) & (w > 0)
    # quotients of tiny numbers stay in range when the logarithms are subtracted
    exponents = alpha * torch.where(known, x, 1.0).log() - (1 - alpha) * torch.where(known, w, 1.0).log()
    return torch.where(known, exponents.exp(), 1.0)


@dataclass(frozen=True)
class Search:
    """What `awq_scales` found: scales, their alpha, the error with them and the one without any."""

    scales: torch.Tensor
    alpha: float
    error: float
    plain_error: float


def awq_scales(
    activations: Any,
    weights: Sequence[Any],
    hessian: Any,
    fmt: Format | str,
    *,
    pair: Pair | None = None,
    grid: int = 20,
) -> Search:
    """AWQ's scales: s = mean|X|**alpha, with the alpha of 0, 1/grid, ..., 1 that makes the output error least.

    >>> import numpy as np
    >>> w, x = np.float64([[0.1, 1.0, 0.7, 0.3]]), np.float64([[9.0, 0.1, 0.1, 0.2]])
    >>> found = awq_scales(abs(x).mean(0), [w], x.T @ x, "int2:g4")
    >>> found.error < found.plain_error
    True

    activations: mean|X_j|, [inputs]. weights: of the layers that read them, [outputs, inputs]. hessian: X^T X over
    the calibration tokens, [inputs, inputs]: with E = W - Q(W s) / s, the error ||E X^T||^2 summed over tokens and
    layers is tr(E H E^T), so that no X is kept; a list of them where the layers saw different tokens (experts).
    fmt: the format of the weights, any of `halfulp.numerics`. pair: whose groups of heads share scales, made from the
    mean over a group.

    s is divided by sqrt(max s * min s), which AWQ does and which matters where a format's range is finite. alpha = 0
    is s = 1, so the error is never above the plain one. A channel without activation has s = 1.
    Source: AWQ (arXiv 2306.00978, equations 4 and 5). Memory: three copies of the largest weight in float64.
    Raises ValueError for NaN or infinity, shapes that do not agree, a hessian with a negative diagonal and grid < 1.
    """
    if type(grid) is not int or grid < 1:
        raise ValueError(f"grid={grid!r}: give the number of steps from alpha 0 to 1, such as 20")
    x = _nonnegative("activations", activations)
    matrices = [_weight(weight, len(x)) for weight in weights]
    if not matrices:
        raise ValueError("awq_scales needs the weight of a layer at least")
    given = list(hessian) if isinstance(hessian, (list, tuple)) else [hessian] * len(matrices)
    hessians = [_hessian(each, len(x)) for each in given]
    if len(hessians) != len(matrices):
        raise ValueError(f"{len(hessians)} hessians of {len(matrices)} weights: give one for all, or one for each")
    mean = x if pair is None else pair.reduce(x, "mean")
    found: list[tuple[float, float, torch.Tensor]] = []
    for step in range(grid + 1):
        scales = _normalized(mean, step / grid)
        error = output_error(matrices, hessians, fmt, scales if pair is None else pair.expand(scales))
        found.append((error, step / grid, scales))
    finite = [each for each in found if each[0] == each[0]]
    if not finite:
        raise ValueError(f"no alpha gives numbers in {fmt}: the weights leave its range")
    error, alpha, scales = min(finite, key=lambda each: each[:2])
    return Search(scales, alpha, error, found[0][0])


def output_error(
    weights: Sequence[torch.Tensor], hessians: Sequence[torch.Tensor], fmt: Format | str, scales: torch.Tensor
) -> float:
    """The sum over layers of tr(E H E^T), E = W - Q(W s) / s; float64 tensors."""
    total = 0.0
    for weight, hessian in zip(weights, hessians):
        error = weight - torch.as_tensor(cast(weight * scales, fmt)) / scales
        total += float(((error @ hessian) * error).sum())
    return total


def _normalized(mean: torch.Tensor, alpha: float) -> torch.Tensor:
    known = mean > 0
    if not bool(known.any()):
        return torch.ones_like(mean)
    logs = alpha * torch.where(known, mean, 1.0).log()
    logs -= (logs[known].max() + logs[known].min()) / 2
    return torch.where(known, logs.exp(), 1.0)


def weight_maxima(weights: Sequence[Any], inputs: int) -> torch.Tensor:
    """max|W_j| over all weights, or over vectors of such maxima: [inputs]."""
    maxima = [_weight(weight, inputs).abs().reshape(-1, inputs).amax(0) for weight in weights]
    if not maxima:
        raise ValueError("scales need the weight of a layer at least")
    return torch.stack(maxima).amax(0)


def _weight(weight: Any, inputs: int) -> torch.Tensor:
    matrix = torch.as_tensor(weight).double()
    if matrix.ndim == 0 or matrix.shape[-1] != inputs or matrix.numel() == 0:
        raise ValueError(f"a weight has shape {list(matrix.shape)}: expected [outputs, {inputs}]")
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("a weight holds NaN or infinity")
    return matrix


def _hessian(hessian: Any, inputs: int) -> torch.Tensor:
    h = torch.as_tensor(hessian).double()
    if tuple(h.shape) != (inputs, inputs) or not bool(torch.isfinite(h).all()) or bool((h.diagonal() < 0).any()):
        raise ValueError(f"a hessian of shape {list(h.shape)}: expected a finite X^T X of the {inputs} inputs")
    return h


def _nonnegative(what: str, values: Any) -> torch.Tensor:
    vector = torch.as_tensor(values).double()
    if vector.ndim != 1 or len(vector) == 0:
        raise ValueError(f"{what} have shape {list(vector.shape)}: expected one number for each input channel")
    if not bool((torch.isfinite(vector) & (vector >= 0)).all()):
        raise ValueError(f"{what} are magnitudes: they must be finite and not negative")
    return vector
