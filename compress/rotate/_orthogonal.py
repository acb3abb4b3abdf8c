"""Rotations of an axis as values: random Hadamard, block Hadamard or Haar, optionally keeping the mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from ._hadamard import has_hadamard, multiplied, random_orthogonal, random_signs


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q of ``size`` that multiplies an axis, x -> x Q; an axis of k * size k times.

    >>> rotation = Rotation(12, 12, "hadamard", (0,))
    >>> torch.allclose(rotation.matrix @ rotation.matrix.T, torch.eye(12, dtype=torch.float64))
    True

    kind "hadamard": Q = D H / sqrt(block) with random signs D, block by block along the diagonal (QuaRot, arXiv
    2404.00456, section 4; blocks: MR-GPTQ, 2509.23202). "random": of Haar measure.
    keeps_mean: Q fixes the vector of ones, so that it commutes with the subtraction of the mean in LayerNorm:
    Q = H^T D H / block with the first sign positive, or a random rotation of the complement.
    """

    size: int
    block: int
    kind: Literal["hadamard", "random"]
    seed: tuple[int, ...]
    keeps_mean: bool = False

    def __call__(self, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """x Q along an axis, x float64 of any shape with that axis a multiple of ``size``."""
        moved = x.movedim(axis, -1)
        turn = self._hadamard if self.kind == "hadamard" else self._random
        return turn(moved.reshape(-1, self.size)).reshape(moved.shape).movedim(-1, axis)

    @property
    def matrix(self) -> torch.Tensor:
        """Q, float64."""
        return self(torch.eye(self.size, dtype=torch.float64))

    def _hadamard(self, x: torch.Tensor) -> torch.Tensor:
        signs = random_signs(self.size, self.seed)
        if self.keeps_mean:
            signs[:: self.block] = 1.0
            x = multiplied(x.reshape(-1, self.block), self.block, transposed=True).reshape(-1, self.size)
        scale = self.block if self.keeps_mean else self.block**0.5
        return multiplied((x * signs).reshape(-1, self.block), self.block).reshape(-1, self.size) / scale

    def _random(self, x: torch.Tensor) -> torch.Tensor:
        if not self.keeps_mean:
            return x @ _haar(self.size, self.seed)
        if self.size == 1:
            return x
        # a Householder reflection takes the ones to the first axis, and the rest turns
        v = torch.full((self.size,), -(self.size**-0.5), dtype=x.dtype)
        v[0] += 1.0
        v /= v.norm()
        x = x - 2 * (x @ v)[:, None] * v
        x = torch.cat([x[:, :1], x[:, 1:] @ _haar(self.size - 1, self.seed)], 1)
        return x - 2 * (x @ v)[:, None] * v


_haar = lru_cache(maxsize=2)(random_orthogonal)


def rotation_of(name: str, size: int, seed: tuple[int, ...], *, keeps_mean: bool = False) -> Rotation:
    """A rotation by name: "hadamard", "random" or "block:N".

    >>> rotation_of("block:32", 576, (0,)).block
    32

    Raises ValueError for another name, a block that does not divide, or an order without a Hadamard matrix.
    """
    if name == "random":
        return Rotation(size, size, "random", seed, keeps_mean)
    if name == "hadamard":
        if not has_hadamard(size):
            blocks = [n for n in range(2, size) if size % n == 0 and has_hadamard(n)]
            choices = ["'random'", *(f"'block:{n}'" for n in blocks[-3:])]
            raise ValueError(f"no Hadamard matrix of order {size} is known here: choose {' or '.join(choices)}")
        return Rotation(size, size, "hadamard", seed, keeps_mean)
    block = name.removeprefix("block:")
    if name.startswith("block:") and block.isdecimal() and int(block) > 1:
        if size % int(block) or not has_hadamard(int(block)):
            raise ValueError(f"{name!r}: blocks of {block} do not divide {size}, or have no Hadamard matrix")
        return Rotation(size, int(block), "hadamard", seed, keeps_mean)
    raise ValueError(f"rotation {name!r}: choose 'hadamard', 'random' or 'block:N' (such as 'block:32')")
