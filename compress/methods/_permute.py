"""An order of the input channels of a layer under which N:M sparsity keeps more of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_TOGETHER = 256  # channels among which a sweep looks at every swap
_LEAST = 1e-6  # of a group's mean score: what a swap has to gain, well above the rounding of float32


def permutation(score: Any, keep: int, group: int, *, sweeps: int = 12, seed: int = 0) -> np.ndarray:
    """The order of channels under which the highest ``keep`` of every ``group`` neighbours of each row retain most.

    >>> score = np.array([[9.0, 8.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    >>> order = permutation(score, 2, 4)
    >>> retained(score, 2, 4), retained(score[:, order], 2, 4)
    (19.0, 25.0)

    score [out, n]: how much each weight matters, its magnitude for instance, from 0. Returns int64 [n]: channel i of
    the new order is channel order[i] of the old one. Never retains less than the order that is there.

    A swap of two channels changes two groups and no other, so what swaps between disjoint pairs of groups gain adds
    up. A sweep deals the groups into pieces of 256 channels by ``seed`` and computes what every swap within a piece
    gains; groups each of which is the other's best partner swap. Sweeps go on until one finds nothing, ``sweeps`` at
    most; each takes time in proportion to 256 * out * n.

    Where x takes the place of channel i, a row retains what the highest keep - 1 of the others of i's group do, and
    the larger of x and the next one, q_i; over all rows max(x, q_i) sums to (|x|_1 + |q_i|_1 + |x - q_i|_1) / 2.

    Raises ValueError for scores that are no matrix, negative, NaN or infinite, for 0 < keep < group violated or a
    group that does not divide n, and for sweeps and seeds below 0.
    Source: Pool and Yu, "Channel permutations for N:M sparsity" (NeurIPS 2021), of which this is the search by swaps.
    """
    rows = _scores(score, keep, group)
    rows = rows / rows.max().clamp_min(torch.finfo(torch.float32).tiny)
    for name, given in (("sweeps", sweeps), ("seed", seed)):
        if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < 0:
            raise ValueError(f"{name}={given!r}: give a whole number from 0")
    places = torch.arange(rows.shape[1]).reshape(-1, group)
    best = _kept(rows, keep, group)
    generator = np.random.default_rng(seed)
    for _ in range(sweeps):
        trial = places.clone()
        for piece in torch.from_numpy(generator.permutation(len(places))).split(max(2, _TOGETHER // group)):
            trial[piece] = _swapped(rows, places[piece], keep)
        value = _kept(rows[:, trial.reshape(-1)], keep, group)
        if not value > best:
            break
        places, best = trial, value
    return np.asarray(places.reshape(-1).numpy())


def retained(score: Any, keep: int, group: int) -> float:
    """The sum of the highest ``keep`` of every ``group`` neighbours of each row of a score [out, n].

    >>> retained(np.array([[1.0, 2.0, 3.0, 4.0]]), 2, 4)
    7.0

    Raises ValueError as `permutation` does.
    """
    return _kept(_scores(score, keep, group), keep, group)


def _scores(score: Any, keep: int, group: int) -> torch.Tensor:
    rows = torch.as_tensor(score).float()
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"the score has shape {list(rows.shape)}: give a matrix [out, n]")
    if not 0 < keep < group or rows.shape[1] % group:
        raise ValueError(
            f"keep={keep!r} of group={group!r} for {rows.shape[1]} channels: give 0 < keep < group, and a group that "
            "divides the channels"
        )
    if not torch.isfinite(rows).all() or float(rows.min()) < 0:
        raise ValueError("the score holds negative numbers, NaN or infinity: give magnitudes")
    return rows


def _kept(rows: torch.Tensor, keep: int, group: int) -> float:
    return float(rows.unflatten(1, (-1, group)).topk(keep, dim=-1).values.double().sum())


def _swapped(rows: torch.Tensor, places: torch.Tensor, keep: int) -> torch.Tensor:
    """The groups [count, group] of some channels after the best swaps between disjoint pairs of them."""
    count, group = places.shape
    own = rows[:, places.reshape(-1)]
    value = own.unflatten(1, (count, group))
    ordered, index = value.sort(dim=-1, descending=True, stable=True)
    rank = index.argsort(-1)
    highest = ordered[..., :keep].sum(-1, keepdim=True)
    # of the others of i's group: what the highest keep - 1 retain, and the next one, q_i
    without = highest - torch.where(rank < keep, value, ordered[..., keep - 1 : keep])
    q = torch.where(rank < keep, ordered[..., keep : keep + 1], ordered[..., keep - 1 : keep]).flatten(1)
    larger = (q.sum(0)[:, None] + own.sum(0) + torch.cdist(q.T.contiguous(), own.T.contiguous(), p=1.0)) / 2
    total = highest.sum(0)
    gain = larger + (without.sum(0) - total).reshape(-1, 1)
    gain = (gain + gain.T).reshape(count, group, count, group).transpose(1, 2).reshape(count, count, -1)
    itself = torch.arange(count)
    gain[itself, itself] = 0
    best, which = gain.max(-1)
    places, least = places.clone(), _LEAST * float(total.mean())
    while True:
        most, partner = best.max(1)
        a = ((partner[partner] == itself) & (partner > itself) & (most > least)).nonzero().reshape(-1)
        if not len(a):
            return places
        b = partner[a]
        i, j = which[a, b] // group, which[a, b] % group
        places[a, i], places[b, j] = places[b, j], places[a, i]
        best[torch.cat([a, b])] = 0
        best[:, torch.cat([a, b])] = 0
