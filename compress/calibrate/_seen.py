"""What a layer saw while the model was calibrated: sums over tokens that merge by addition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

Need = Literal["second", "cross", "square", "amax", "total"]


@dataclass(frozen=True)
class Seen:
    """Statistics of the inputs x of a layer, one vector of n numbers a token.

    >>> a, b = Seen.of(torch.tensor([[1.0, -2.0]]), {"second", "amax"}), Seen.of(torch.ones(3, 2), {"second", "amax"})
    >>> (a + b).tokens, (a + b).amax.tolist(), (a + b).second.tolist()
    (4, [1.0, 2.0], [[4.0, 1.0], [1.0, 7.0]])

    ``tokens``: how many. ``second`` [n, n]: the sum of x x^T, GPTQ's Hessian up to a factor. ``cross`` [n, n]: the
    sum of y x^T, y what the same token was in the original model. ``square`` [n]: of x^2, ``amax`` [n]: the largest
    |x|, ``total`` [n]: the sum of |x|. Products of 512 tokens at most are summed in float32, all else in float64.
    What was not asked for is None.
    """

    tokens: int = 0
    second: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    square: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    total: torch.Tensor | None = None

    @staticmethod
    def of(x: torch.Tensor, needs: Iterable[Need], reference: torch.Tensor | None = None) -> Seen:
        """The statistics of some tokens, x and reference [..., n]. Raises ValueError for NaN or infinity."""
        needs = set(needs)
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if not torch.isfinite(x).all():
            raise ValueError("activations with NaN or infinity")
        seen = Seen(len(x))
        if "second" in needs:
            seen = replace(seen, second=_products(x, x))
        if "cross" in needs and reference is not None:
            y = reference.detach().reshape(-1, x.shape[-1]).float()
            seen = replace(seen, cross=_products(y, x))
        if "square" in needs:
            seen = replace(seen, square=x.double().square().sum(0))
        if "amax" in needs:
            seen = replace(seen, amax=x.abs().amax(0) if len(x) else x.new_zeros(x.shape[1]))
        if "total" in needs:
            seen = replace(seen, total=x.double().abs().sum(0))
        return seen

    def __add__(self, other: Seen) -> Seen:
        def plus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
            return a if b is None else b if a is None else a + b

        amax = other.amax if self.amax is None else self.amax
        if self.amax is not None and other.amax is not None:
            amax = torch.maximum(self.amax, other.amax)
        return Seen(
            self.tokens + other.tokens,
            plus(self.second, other.second),
            plus(self.cross, other.cross),
            plus(self.square, other.square),
            amax,
            plus(self.total, other.total),
        )


def _products(a: torch.Tensor, b: torch.Tensor, tokens: int = 512) -> torch.Tensor:
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for p, q in zip(a.split(tokens), b.split(tokens), strict=True):
        total += p.T @ q
    return total
