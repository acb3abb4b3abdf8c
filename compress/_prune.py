"""Magnitude pruning: masks as pure functions of a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


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
    """Which weights stay: True or False, of the weight's shape. Ties keep the earlier weight.

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
