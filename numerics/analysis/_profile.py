"""How wrong rounding to nearest is, across magnitudes: the curves that pictures of formats draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._cast import cast, decode, encode
from .._format import Block, Format
from .._names import format as read_format
from ._describe import EXHAUSTIVE, borders, describe, numbers_of

TEETH = 160  # gaps between numbers up to which each one is drawn; of more, the highest in each step
STEPS = 8  # of a curve in a binade, where not every gap is drawn
OCTAVE = 64  # largest magnitudes of blocks tried in an octave
RATIOS = 24  # and ratios to them in each octave


@dataclass(frozen=True)
class Profile:
    """Relative error against magnitude, as points of a line.

    ``numbers``: where every gap is drawn, the numbers between which the error rises and falls; else empty, and
    the line is the highest error in each step. Of a block, magnitudes are relative to its largest, ``error`` is
    the worst over where in an octave that lies, and ``typical`` the root of the mean square.
    """

    magnitude: np.ndarray
    error: np.ndarray
    numbers: np.ndarray
    typical: np.ndarray | None = None


def error_profile(fmt: Format | str) -> Profile:
    """The relative error of rounding to nearest, from below the smallest number to above the largest.

    >>> profile = error_profile("e2m1")
    >>> dict(zip(profile.magnitude.round(3).tolist(), profile.error.round(3).tolist()))[2.5]
    0.2

    Where positive and negative numbers differ, as those of integers and codebooks, the worse side counts. Too
    large numbers saturate. Raises ValueError for a format with no number above zero.
    """
    fmt = read_format(fmt)
    if isinstance(fmt, Block):
        return _block_profile(fmt)
    facts = describe(fmt)
    if not facts.max > 0:
        raise ValueError(f"{fmt} has no number above zero, so there is no error to draw across magnitudes")
    sides = [_side(fmt)] if fmt.bits <= EXHAUSTIVE else []
    if sides and not facts.symmetric and facts.lowest < 0:
        sides.append(_side(fmt, -1.0))
    below = facts.min_positive * np.exp2(-np.arange(12, 0, -1) / 4.0)
    above = facts.max * np.exp2(np.arange(1, 9) / 4.0 if facts.max < 2.0**1020 else np.zeros(0))
    if sides and max(map(len, sides)) <= TEETH:
        knots = [below, above]
        for side in sides:
            at = borders(fmt, side[:-1], side[1:])
            knots += [side, at, np.nextafter(at, 0), _foot(fmt, side[0])]
        x = np.unique(np.concatenate(knots))
        return Profile(x, _worst(x, fmt, facts), np.unique(np.concatenate(sides)))
    x, y = _envelope(fmt, facts, sides[0] if sides else None)
    foot = _foot(fmt, facts.min_positive)
    below = np.unique(np.concatenate([below, foot]))
    return Profile(
        np.concatenate([below, x, above]),
        np.concatenate([_worst(below, fmt, facts), y, _worst(above, fmt, facts)]),
        np.zeros(0),
    )


def _side(fmt: Any, sign: float = 1.0) -> np.ndarray:
    """Magnitudes of the numbers of one sign, ascending."""
    numbers = numbers_of(fmt) * sign
    return np.sort(numbers[numbers > 0])


def _foot(fmt: Any, least: float) -> np.ndarray:
    """The largest magnitude that becomes zero and the next one, where anything does."""
    if float(cast(np.array([least * 2.0**-8]), fmt)[0]) != 0:
        return np.zeros(0)
    at = borders(fmt, np.zeros(1), np.array([least]))
    return np.array([np.nextafter(at[0], 0), np.nextafter(at[0], least)])


def _worst(x: np.ndarray, fmt: Any, facts: Any) -> np.ndarray:
    """The relative error at these magnitudes, the worse of both signs."""
    sides = [x] if facts.lowest >= 0 or facts.symmetric else [x, -x]
    return np.max([np.abs(np.asarray(cast(s, fmt, overflow="saturate")) - s) / x for s in sides], axis=0)


def _envelope(fmt: Any, facts: Any, numbers: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The highest error in each of `STEPS` steps of a binade, which is at the border between two numbers."""
    low, high = math.frexp(facts.min_positive)[1] - 1, math.frexp(facts.max)[1]
    steps = STEPS if high - low < 64 else 1
    edges = np.ldexp(1 + np.arange(steps) / steps, np.arange(low, high)[:, None]).reshape(-1)
    edges = edges[(edges >= facts.min_positive) & (edges < facts.max)]
    if numbers is not None:
        at = np.clip(np.searchsorted(numbers, edges, side="right") - 1, 0, len(numbers) - 2)
        below, above = numbers[at], numbers[at + 1]
    else:
        codes = np.asarray(encode(edges, fmt, rounding="toward_zero"))
        below = np.asarray(decode(codes, fmt, dtype="float64"))
        above = np.asarray(decode((codes + 1).astype(codes.dtype), fmt, dtype="float64"))
    good = np.isfinite(above) & (above > below) & (below > 0)
    edges, below, above = edges[good], below[good], above[good]
    at = borders(fmt, below, above)
    worst = np.maximum(1 - below / at, above / at - 1)
    return np.append(np.repeat(edges, 2)[1:], facts.max), np.repeat(worst, 2)


def _block_profile(fmt: Block) -> Profile:
    """Blocks that hold their largest magnitude and others at every ratio to it, for every place in an octave."""
    octaves = 4 + math.ceil(describe(fmt.element).binades)
    octaves = min(octaves, 24)
    ratio = np.exp2(-np.arange(octaves * RATIOS, -1, -1) / RATIOS)
    largest = np.exp2(np.arange(OCTAVE) / OCTAVE)
    size = fmt.size if isinstance(fmt.size, int) else len(ratio) + 1
    if size < 2:
        return Profile(np.array([ratio[0], 1.0]), np.zeros(2), np.zeros(0), np.zeros(2))
    rows = -(-len(ratio) // (size - 1))
    spread = np.zeros(rows * (size - 1))
    spread[: len(ratio)] = ratio
    blocks = np.empty((OCTAVE, rows, size))
    blocks[:, :, 0] = largest[:, None]
    blocks[:, :, 1:] = spread.reshape(rows, size - 1) * largest[:, None, None]
    flat = blocks.reshape(OCTAVE, -1).astype(np.float32)
    along = replace(fmt, axis=-1)
    if fmt.size == "tensor":
        made = np.stack([np.asarray(cast(row[None], along)) for row in flat])
    else:
        made = np.asarray(cast(flat, along))
    before = flat.reshape(blocks.shape)[:, :, 1:].reshape(OCTAVE, -1)[:, : len(ratio)].astype(np.float64)
    after = made.reshape(blocks.shape)[:, :, 1:].reshape(OCTAVE, -1)[:, : len(ratio)].astype(np.float64)
    relative = np.abs(after - before) / before
    return Profile(ratio, relative.max(axis=0), np.zeros(0), np.sqrt((relative**2).mean(axis=0)))
