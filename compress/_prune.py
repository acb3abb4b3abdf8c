"""Pruning: patterns, masks as pure functions of scores, and what the scores are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from .calibrate._seen import Need, Seen


@dataclass(frozen=True)
class NM:
    """N weights of every M along the input axis stay (Mishra et al. 2021)."""

    n: int
    m: int

    rowwise = True

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def check(self, name: str, size: int) -> None:
        """Raise ValueError where M does not divide the axis."""
        if size % self.m:
            raise ValueError(f"{name}: {self} sparsity needs {size} inputs to divide by {self.m}; ignore the module")


@dataclass(frozen=True)
class Unstructured:
    """A fraction of each tensor goes, wherever it lies."""

    fraction: float

    rowwise = False

    def __str__(self) -> str:
        return f"{self.fraction:.0%} sparse"

    def check(self, name: str, size: int) -> None:
        """Any shape will do."""


Sparsity = NM | Unstructured


def sparsity(pattern: str | float) -> Sparsity:
    """Read "2:4" or a fraction.

    >>> sparsity("2:4")
    NM(n=2, m=4)

    Raises ValueError for anything else.
    """
    text = str(pattern)
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = int(match[1]), int(match[2])
        if 0 < n < m:
            return NM(n, m)
    elif re.fullmatch(r"[\d.]+(e-?\d+)?", text):
        try:
            fraction = float(text)
        except ValueError:
            fraction = -1.0
        if 0 < fraction < 1:
            return Unstructured(fraction)
    raise ValueError(f"sparsity {text!r}: give N:M with 0 < N < M, such as 2:4, or a fraction between 0 and 1")


def mask(weight: torch.Tensor, pattern: Sparsity, axis: int = -1) -> torch.Tensor:
    """Which weights stay, by magnitude: True or False, of the weight's shape. Ties keep the earlier weight.

    >>> mask(torch.tensor([[1.0, -3.0, 2.0, -2.0]]), NM(2, 4)).tolist()
    [[False, True, True, False]]
    """
    magnitude = weight.abs()
    if isinstance(pattern, NM):
        groups = magnitude.movedim(axis, -1).unflatten(-1, (-1, pattern.m))
        order = groups.argsort(dim=-1, descending=True, stable=True)
        keep = torch.zeros_like(groups, dtype=torch.bool)
        keep.scatter_(-1, order[..., : pattern.n], True)
        return keep.flatten(-2).movedim(-1, axis)
    count = round(magnitude.numel() * pattern.fraction)
    if count == 0:
        return torch.ones_like(weight, dtype=torch.bool)
    flat = magnitude.flatten()
    # kthvalue of half types is slow; the float copy of one tensor is the price
    threshold = (flat if flat.dtype == torch.float64 else flat.float()).kthvalue(count).values
    keep = flat > threshold
    ties = flat == threshold
    spare = magnitude.numel() - count - int(keep.sum())
    keep |= ties & (ties.cumsum(0) <= spare)
    return keep.reshape(weight.shape)


Pruned = tuple[torch.Tensor, dict[str, Any]]
_UNSEEN = {"fallback": "pruned by magnitude: the calibration never reached the layer"}


@dataclass(frozen=True)
class Magnitude:
    """The smallest go (Han et al., arXiv 1506.02626)."""

    needs: frozenset[Need] = frozenset()

    def prune(self, weight: torch.Tensor, pattern: Sparsity, axis: int, seen: Seen | None) -> Pruned:
        """The weight with zeros, and what is to be told of it."""
        return weight.where(mask(weight, pattern, axis), torch.zeros_like(weight)), {}


@dataclass(frozen=True)
class Wanda:
    """Those go whose magnitude times the norm of their input is smallest (Sun et al., arXiv 2306.11695)."""

    def __str__(self) -> str:
        return "wanda"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"square"})

    def prune(self, weight: torch.Tensor, pattern: Sparsity, axis: int, seen: Seen | None) -> Pruned:
        """As `Magnitude.prune`."""
        if seen is None or seen.square is None or not seen.tokens:
            return Magnitude().prune(weight, pattern, axis, seen)[0], dict(_UNSEEN)
        norm = seen.square.sqrt().to(torch.float64)
        cost = weight.double() * (norm if axis == -1 else norm[:, None])
        keep = mask(cost, pattern, axis) if isinstance(pattern, NM) else _within_outputs(cost, pattern, axis)
        return weight.where(keep, torch.zeros_like(weight)), {"tokens": seen.tokens}


@dataclass(frozen=True)
class SparseGPT:
    """Those go that cost least once the others have made it good (Frantar and Alistarh, arXiv 2301.00774)."""

    damp: float = 0.01
    span: int = 128

    def __str__(self) -> str:
        return "sparsegpt"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"second"})

    def prune(self, weight: torch.Tensor, pattern: Sparsity, axis: int, seen: Seen | None) -> Pruned:
        """As `Magnitude.prune`; the weights that stay change too."""
        from .methods._gptq import output_loss, sparse

        if seen is None or seen.second is None or not seen.tokens:
            return Magnitude().prune(weight, pattern, axis, seen)[0], dict(_UNSEEN)
        span = pattern.m if isinstance(pattern, NM) else self.span
        count = pattern.m - pattern.n if isinstance(pattern, NM) else round(span * pattern.fraction)
        rows = (weight if axis == -1 else weight.T).float().numpy()
        hessian = seen.second.numpy()
        found = sparse(rows, hessian, count, span, damp=self.damp)
        if found is None:
            why = "pruned by magnitude: its Hessian is not positive even when damped by its mean"
            return Magnitude().prune(weight, pattern, axis, seen)[0], {"fallback": why}
        result = torch.from_numpy(found[0]).to(weight.dtype)
        told: dict[str, Any] = {
            "tokens": seen.tokens,
            "output_loss": float(f"{output_loss(rows, found[0], hessian):.6g}"),
        }
        return (result if axis == -1 else result.T.contiguous()), told


Score = Magnitude | Wanda | SparseGPT
SCORES: dict[str, Score | None] = {"magnitude": None, "wanda": Wanda(), "sparsegpt": SparseGPT()}


def score(name: str) -> Score | None:
    """What decides which weights go, None for their magnitude. Raises ValueError for an unknown name."""
    if name not in SCORES:
        raise ValueError(f"by={name!r}: choose {', '.join(map(repr, SCORES))}")
    return SCORES[name]


def _within_outputs(cost: torch.Tensor, pattern: Unstructured, axis: int) -> torch.Tensor:
    """The same share of every output's weights."""
    magnitude = cost.abs().movedim(axis, -1)
    goes = round(magnitude.shape[-1] * pattern.fraction)
    order = magnitude.argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(magnitude, dtype=torch.bool)
    keep.scatter_(-1, order[..., : magnitude.shape[-1] - goes], True)
    return keep.movedim(-1, axis)
