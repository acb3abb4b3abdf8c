"""Windows of tokens: which of them count, in which order they come, and how they are padded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids, [tokens], and which of them are to be predicted, [tokens] (True or False; None: all but the first).

    >>> Example(torch.tensor([5, 6, 7]), scored=torch.tensor([False, False, True])).count
    1

    A prompt's tokens are those that are not scored. Raises ValueError for other shapes and types, or if no token
    is to be predicted.
    """

    ids: Tensor
    scored: Tensor | None = None

    def __post_init__(self) -> None:
        ids, scored = self.ids, self.scored
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or ids.dtype != torch.long:
            what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(f"an example of {what}: expected token ids, int64 [tokens]")
        if scored is not None and (scored.shape != ids.shape or scored.dtype != torch.bool):
            raise ValueError(f"scored is {scored.dtype} {list(scored.shape)}: expected bool {list(ids.shape)}")
        if not self.count:
            raise ValueError(f"an example of {len(ids)} tokens has none to predict: the first has none before it")

    @property
    def count(self) -> int:
        """How many tokens are predicted."""
        return max(0, len(self.ids) - 1) if self.scored is None else int(self.scored[1:].sum())


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded ids and their mask, [windows, tokens]; the flat positions that predict, and what follows them."""

    ids: Tensor
    mask: Tensor
    rows: Tensor
    targets: Tensor

    @property
    def padded(self) -> bool:
        """Is there any padding?"""
        return not bool(self.mask.all())


def examples(data: Sequence[Tensor | Example]) -> list[Example]:
    """Windows as examples; ValueError names the one that is none.

    >>> len(examples([torch.arange(4)]))
    1
    """
    found = []
    for i, one in enumerate(data):
        try:
            found.append(one if isinstance(one, Example) else Example(one))
        except ValueError as error:
            raise ValueError(f"data[{i}]: {error}") from None
    if not found:
        raise ValueError("no data: give at least one window of token ids")
    return found


def collate(some: Sequence[Example], pad: int = 0, device: torch.device | None = None) -> Batch:
    """Examples side by side, shorter ones padded on the right.

    >>> batch = collate([Example(torch.tensor([1, 2, 3])), Example(torch.tensor([4, 5]))])
    >>> batch.ids.tolist(), batch.rows.tolist(), batch.targets.tolist()
    ([[1, 2, 3], [4, 5, 0]], [0, 1, 3], [2, 3, 5])
    """
    length = max(len(one.ids) for one in some)
    ids = torch.full((len(some), length), pad, dtype=torch.long)
    mask = torch.zeros((len(some), length), dtype=torch.bool)
    scored = torch.zeros((len(some), length), dtype=torch.bool)
    for i, one in enumerate(some):
        n = len(one.ids)
        ids[i, :n], mask[i, :n] = one.ids, True
        scored[i, :n] = True if one.scored is None else one.scored
    scored[:, 0] = False
    rows = scored.roll(-1, 1).flatten().nonzero().flatten()
    batch = (ids, mask, rows, ids.flatten()[rows + 1])
    return Batch(*(tensor.to(device) for tensor in batch))


def order(step: int, size: int, total: int, seed: int) -> list[int]:
    """Which of `total` windows step `step` takes: `size` of them, from one seeded permutation after another.

    >>> sorted(order(0, 2, 4, seed=1) + order(1, 2, 4, seed=1))
    [0, 1, 2, 3]
    """
    places = range(step * size, (step + 1) * size)
    return [_permutation(place // total, total, seed)[place % total] for place in places]


@lru_cache(maxsize=4)
def _permutation(epoch: int, total: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return tuple(torch.randperm(total, generator=generator).tolist())


def content(data: Sequence[Example]) -> str:
    """A hash of all windows, in their order."""
    digest = hashlib.sha256()
    for one in data:
        digest.update(len(one.ids).to_bytes(8, "little"))
        digest.update(one.ids.contiguous().numpy().tobytes())
        digest.update(b"all" if one.scored is None else one.scored.contiguous().numpy().tobytes())
    return digest.hexdigest()
