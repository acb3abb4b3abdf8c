"""The numbers of a format in a terminal: strokes along an axis, and tables by binade."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..numerics import Codebook, Facts, describe, encode, numbers_of
from ..numerics.analysis._describe import EXHAUSTIVE

KEY = 13  # width of the first column
FEW = 64  # numbers above zero up to which all of them are printed
# nothing, one number, a few, many, only subnormal ones
_UNICODE, _ASCII = tuple(" │┃█╷"), tuple(" |H#.")


def number(value: float) -> str:
    """`number(0.0625) == "0.0625"`: six digits."""
    return f"{value:.6g}"


def exact(value: float) -> str:
    """`exact(28.0) == "1.75 * 2^4"`, `exact(0.25) == "2^-2"`."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if abs(fraction) == 0.5 else f"{2 * fraction:.8g} * 2^{exponent - 1}"


def number_lines(facts: Facts, width: int, unicode: bool) -> list[str]:
    """The numbers as strokes along a linear axis and along one with factors of two of equal width."""
    if facts.bits > EXHAUSTIVE:
        return []
    numbers, room = numbers_of(facts.format), min(width, 100) - KEY
    lines = []
    if facts.distinct <= 256 and facts.binades <= 24 and (facts.step is None or facts.distinct <= room / 2):
        mirrored = facts.symmetric and (numbers >= 0).sum() > 1
        side = numbers[numbers >= 0] if mirrored else numbers
        low, high = float(side[0]), float(side[-1])
        at = (side - low) / (high - low) * (room - 1)
        name = "numbers >= 0" if mirrored else "numbers"
        lines += _drawn(name, at, side, facts, room, unicode)
        lines += [" " * KEY + _axis([(i / 4, number(low + (high - low) * i / 4)) for i in range(5)], room), ""]
    positive = numbers[numbers > 0]
    if facts.step is None and len(positive) > 2:
        low, high = math.floor(math.log2(positive[0])), math.ceil(math.log2(positive[-1]) + 1e-9)
        at = (np.log2(positive) - low) / (high - low) * (room - 1)
        lines += [*_drawn("log axis", at, positive, facts, room, unicode), _log_axis(low, high, room), ""]
    return lines


def _log_axis(low: int, high: int, room: int) -> str:
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (high - low) / n <= room / 8)
    ticks = [((k - low) / (high - low), f"2^{k}") for k in range(low, high + 1) if k % every == 0]
    return " " * KEY + _axis(ticks, room)


def _drawn(key: str, at: np.ndarray, numbers: np.ndarray, facts: Facts, room: int, unicode: bool) -> list[str]:
    """One row of strokes, thicker where several numbers fall into a column, short for subnormals."""
    blank, one, two, many, small = _UNICODE if unicode else _ASCII
    count = np.bincount(np.rint(at).astype(int), minlength=room)
    normal = facts.min_normal or 0.0
    full = np.bincount(np.rint(at[(np.abs(numbers) >= normal) | (numbers == 0)]).astype(int), minlength=room)
    dense = 2 if np.median(count[count > 0]) >= 3 else 4  # where columns are full, how full says nothing

    def stroke(n: int, f: int) -> str:
        return blank if n == 0 else small if f == 0 else one if n == 1 else two if n < dense else many

    return [key.ljust(KEY) + "".join(map(stroke, count, full)).rstrip()]


def _axis(ticks: Sequence[tuple[float, str]], room: int) -> str:
    """Labels centred at their places, left out where they would touch."""
    row = [" "] * (room + KEY)
    free = 0
    for share, text in ticks:
        start = max(0, min(round(share * (room - 1)) - len(text) // 2, room - len(text)))
        if start >= free:
            row[start : start + len(text)] = text
            free = start + len(text) + 1
    return "".join(row).rstrip()


# --- the numbers -------------------------------------------------------------------------------------------


def binade_table(facts: Facts, width: int) -> list[str]:
    """Numbers above zero by binade: all of them where they are few, else how many from where to where."""
    fmt: Any = facts.format
    if facts.bits > EXHAUSTIVE:
        return _wide_table(facts)
    numbers = numbers_of(fmt)
    positive = numbers[numbers > 0]
    if not len(positive) or (facts.step is not None and len(numbers) > 16):
        return []
    if isinstance(fmt, Codebook) and len(numbers) <= FEW:
        return textwrap.wrap(
            "  ".join(map(number, numbers)), width, initial_indent="values".ljust(KEY), subsequent_indent=" " * KEY
        )
    groups = _groups(positive, facts)
    lines = ["numbers above zero" + ("; the negative ones mirror them" if facts.symmetric else "")]
    if len(positive) <= FEW and len(groups) <= 12:
        widest = max(len(number(v)) for v in positive)
        texts = ["  ".join(number(v).rjust(widest) for v in group) for *_, group in groups]
        if max(map(len, texts)) + 2 * KEY > width:
            texts = [" ".join(map(number, group)) for *_, group in groups]
        lines.append(f"{'binade':{KEY}}{'step':{KEY}}".rstrip())
        for (name, step, _), text in zip(groups, texts):
            lines += textwrap.wrap(
                text, width, initial_indent=f"{name:{KEY}}{step:{KEY}}", subsequent_indent=" " * 2 * KEY
            )
        return lines
    lines.append(f"{'binade':{KEY}}{'numbers':>8}  {'step':{KEY}}{'first':{KEY}}last")
    body = [
        f"{name:{KEY}}{len(group):8,}  {step:{KEY}}{number(group[0]):{KEY}}{number(group[-1])}"
        for name, step, group in groups
    ]
    if len(body) > 18:
        body = [*body[:6], f"{'...':{KEY}}{len(body) - 12:8,} more binades", *body[-6:]]
    return lines + body


def _groups(positive: np.ndarray, facts: Facts) -> list[tuple[str, str, np.ndarray]]:
    """Binade, step where it is one, and its numbers; the subnormal ones together."""
    normal = facts.min_normal or 0.0
    small, rest = positive[positive < normal], positive[positive >= normal]
    exponents = np.frexp(rest)[1] - 1
    groups = [("subnormal", small)] if len(small) else []
    groups += [(f"2^{k}", rest[exponents == k]) for k in np.unique(exponents)]
    every = np.append(positive, np.inf)
    found = []
    for name, group in groups:
        after = every[np.searchsorted(every, group[-1]) + 1]
        gaps = np.diff(np.append(group, after) if math.isfinite(after) else group)
        even = len(gaps) and np.allclose(gaps, gaps[0], rtol=1e-12)
        found.append((name, number(float(gaps[0])) if even else "", group))
    return found


def _wide_table(facts: Facts) -> list[str]:
    """The first and last binades of a format too wide to list, from the codes of powers of two."""
    fmt: Any = facts.format
    low, high = math.frexp(facts.min_normal or facts.min_positive)[1] - 1, math.frexp(facts.max)[1] - 1
    lines = [f"{'binade':{KEY}}{'numbers':>14}  step"]
    for k in [*range(low, min(low + 2, high)), None, *range(max(high - 1, low + 2), high + 1)]:
        if k is None:
            lines.append("...")
            continue
        ends = np.asarray(encode(np.ldexp([1.0, 1.5], k), fmt)).astype(np.int64)
        count = int(2 * (ends[1] - ends[0]))
        lines.append(f"{f'2^{k}':{KEY}}{count:14,}  {exact(math.ldexp(1.0, k) / count)}")
    return lines


def shared_lines(formats: Sequence[Any], width: int, unicode: bool) -> list[str]:
    """The numbers above zero of several formats on one log axis."""
    room = min(width, 100) - KEY
    sides = [numbers[numbers > 0] for numbers in map(numbers_of, formats)]
    low = math.floor(math.log2(min(side[0] for side in sides)))
    high = math.ceil(math.log2(max(side[-1] for side in sides)) + 1e-9)
    lines = []
    for fmt, side in zip(formats, sides):
        at = (np.log2(side) - low) / (high - low) * (room - 1)
        lines += _drawn(str(fmt)[: KEY - 1], at, side, describe(fmt), room, unicode)
    return [*lines, _log_axis(low, high, room)]
