"""Table formats, codebooks, posits and logarithmic numbers: one search among exact borders.

A rounding of such a format is a list of borders between neighbours. Each becomes the largest float of the
source's width that still goes to the lower neighbour, so that comparing floats decides exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ._backend import Array, Backend
from ._codebook import Codebook
from ._format import Table
from ._log import Log, Root, nearest_float
from ._parts import Parts, distance, divide, infinity, less, magnitude_bits, ordered, select, split
from ._policy import Policy
from ._posit import Posit, posit_value
from ._random import Draws

Real = Fraction | Root
FLOATS: dict[int, Any] = {32: np.float32, 64: np.float64}


class Ladder(NamedTuple):
    """The numbers of a format, ascending, with their codes."""

    codes: list[int]
    values: list[Real]


@lru_cache(maxsize=64)
def ladder(fmt: Table) -> Ladder:
    """The numbers of a table format; zero once."""
    if isinstance(fmt, Codebook):
        return Ladder(list(range(len(fmt.values))), [Fraction(v) for v in fmt.values])
    positive: list[Real]
    if isinstance(fmt, Posit):
        positive = [posit_value(code, fmt.bits, fmt.es) for code in range(1, fmt.max_code + 1)]
        below = [2**fmt.bits - code for code in range(fmt.max_code, 0, -1)]
    else:
        positive = [fmt.root(code) for code in range(1, fmt.max_code + 1)]
        below = [code + fmt.max_code + 1 for code in range(fmt.max_code, 0, -1)] if fmt.signed else []
    negative = [_negated(v) for v in reversed(positive)] if below else []
    return Ladder([*below, 0, *range(1, fmt.max_code + 1)], [*negative, Fraction(0), *positive])


def _negated(v: Real) -> Real:
    return v._replace(negative=not v.negative) if isinstance(v, Root) else -v


def _middles(fmt: Table) -> list[Real]:
    """The border of rounding to nearest between each two neighbours."""
    values: Any = ladder(fmt).values
    if isinstance(fmt, Codebook):
        return [(a + b) / 2 for a, b in pairwise(values)]
    positive: list[Real]
    if isinstance(fmt, Posit):
        # no number but zero goes to zero
        positive = [Fraction(0)]
        positive += [posit_value(2 * code + 1, fmt.bits + 1, fmt.es) for code in range(1, fmt.max_code)]
    else:
        positive = [fmt.root(code + Fraction(1, 2)) for code in range(fmt.max_code)]
    return [*map(_negated, reversed(positive)), *positive] if len(values) > len(positive) + 1 else positive


def _sign(v: Real) -> int:
    return (-1 if v.negative else 1) if isinstance(v, Root) else (v > 0) - (v < 0)


def _larger(low: Real, high: Real) -> int:
    """1 where ``high`` has the larger magnitude, -1 where ``low`` has, 0 where neither."""
    if _sign(low) >= 0:
        return 1
    if _sign(high) <= 0:
        return -1
    assert isinstance(low, Fraction)  # only codebooks have no zero in between
    assert isinstance(high, Fraction)
    return _sign(low + high)


def borders(fmt: Table, rounding: str) -> list[tuple[Real, bool]]:
    """For each two neighbours the border between them, and whether it belongs to the upper one itself.

    >>> borders(Codebook((0.0, 1.0, 4.0)), "nearest_even")
    [(Fraction(1, 2), False), (Fraction(5, 2), True)]
    """
    codes, values = ladder(fmt)
    out: list[tuple[Real, bool]] = []
    for i, middle in enumerate(_middles(fmt)):
        low, high, even = values[i], values[i + 1], codes[i] % 2 == 0
        above: tuple[Real, bool] = (low, False)  # all between the two goes to the upper one
        below: tuple[Real, bool] = (high, True)
        away = _larger(low, high)
        if isinstance(fmt, Posit) and not (low and high):
            out.append(above if low == 0 else below)
        elif rounding.startswith("nearest"):
            to_larger = {"nearest_even": 0, "nearest_away": away, "nearest_zero": -away}[rounding]
            out.append((middle, to_larger > 0 or (to_larger == 0 and not even)))
        else:
            up = {"up": True, "down": False, "to_odd": even}.get(rounding, away < 0 or (away == 0 and not even))
            out.append(above if up else below)
    return out


def float_below(v: Real, wide: int, strictly: bool) -> float:
    """The largest float of the width that is at most ``v``, or less than it; at most the largest finite one.

    >>> float_below(Fraction(1, 3), 32, False) < 1 / 3 < float_below(Fraction(1, 3), 32, False) + 2**-25
    True
    """
    real = FLOATS[wide]
    mantissa, emin, emax = (23, -126, 127) if wide == 32 else (52, -1022, 1023)
    exact = v.rational if isinstance(v, Root) else v
    if exact is not None and _is_float(exact, wide):  # quick, and the most frequent
        y = real(float(exact))
        return float(np.nextafter(y, real(-np.inf)) if strictly else y)
    if exact is not None:
        places = max(_exponent(exact), emin) - mantissa
        n = math.floor(exact / Fraction(2) ** places)
        equal = n * Fraction(2) ** places == exact
    else:
        assert isinstance(v, Root)
        places, equal = max(v.whole, emin) - mantissa, False
        n = -v.floor(places) - 1 if v.negative else v.floor(places)
    if places > emax - mantissa:  # beyond the largest float
        return float(np.finfo(real).max) if n > 0 else -math.inf
    if n < -((1 << (mantissa + 1)) - 1) and places == emax - mantissa:
        return -math.inf
    y = real(math.ldexp(n, places))
    return float(np.nextafter(y, real(-np.inf)) if strictly and equal else y)


def _exponent(x: Fraction) -> int:
    """floor(log2(|x|)); some small number for zero."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e - (Fraction(2) ** e > abs(x))


@lru_cache(maxsize=64)
def thresholds(fmt: Table, rounding: str, wide: int) -> np.ndarray:
    """For each two neighbours the largest float that goes to the lower one."""
    cuts = [float_below(border, wide, strictly) for border, strictly in borders(fmt, rounding)]
    return np.array(cuts, dtype=FLOATS[wide])


@lru_cache(maxsize=64)
def log_values(fmt: Log, wide: int) -> np.ndarray:
    """What the codes of a logarithmic format decode to."""
    positive = [0.0] + [nearest_float(fmt.root(code), wide) for code in range(1, fmt.max_code + 1)]
    half = np.array(positive, dtype=FLOATS[wide])
    return np.concatenate([half, -half]) if fmt.signed else half


def table_source(xp: Backend, x: Array, fmt: Table, drawn: Draws | None) -> Array:
    """x, as float64 where stochastic rounding cannot be exact from float32 and the backend has it."""
    if drawn is None or xp.width(x) == 64 or steps(fmt, 32) is not None or xp.flushes_subnormals:
        return x
    return xp.astype(x, xp.floats[64])


def encode_table(xp: Backend, x: Array, fmt: Table, policy: Policy, rounding: str | Draws | None = None) -> Array:
    """Codes of float32 or float64, as integers of their width; ``rounding`` stands in for the policy's."""
    ends, wide = policy.ends(fmt), xp.width(x)
    how: Any = policy.rounding if rounding is None else rounding
    bits, magnitude = xp.view(x, xp.ints[wide]), magnitude_bits(xp, x)
    negative = bits >> (wide - 1)
    index = _drawn(xp, x, fmt, how) if isinstance(how, Draws) else _search(xp, x, thresholds(fmt, how, wide))
    code = index
    if not isinstance(fmt, Codebook):
        code = xp.take(xp.constant(ladder(fmt).codes, xp.ints[wide], x), index)
    if isinstance(fmt, Log) and ends.negative_zero:
        code = code | (negative & (1 << (fmt.bits - 1)))
    if isinstance(fmt, Posit) and ends.infinite == fmt.nan_code:
        code = select(less(infinity(wide) - 1, magnitude, wide), ends.infinite, code)
    is_nan = less(infinity(wide), magnitude, wide)
    low, high = ends.nan
    return select(is_nan, low if low == high else select(negative, high, low + 0 * code), code)


def _search(xp: Backend, x: Array, cuts: np.ndarray) -> Array:
    """How many of the cuts lie below x, as integers of x's width."""
    wide = xp.width(x)
    table = xp.constant(cuts, xp.floats[wide], x)
    if xp.flushes_subnormals:  # searched as integers, which are in the same order
        table, x = (ordered(xp.view(v, xp.ints[wide]), wide) for v in (table, x))
    return xp.astype(xp.searchsorted(table, x), xp.ints[wide])


class Steps(NamedTuple):
    """The steps between neighbours: ``near`` is the value of the end nearer to zero, ``step`` the distance,
    ``start`` and ``end`` the indices of that end and the other; ``cells`` cuts floats into steps, and ``ends``
    are the format's lowest and highest number as `ordered` bits."""

    near: np.ndarray
    step: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cells: np.ndarray
    ends: tuple[int, int]


@lru_cache(maxsize=64)
def steps(fmt: Table, wide: int) -> Steps | None:
    """For stochastic rounding; None where the shares of a step cannot all be had exactly from such floats."""
    if isinstance(fmt, Log):
        return None
    values: Any = ladder(fmt).values
    real = FLOATS[wide]
    upward = [_larger(a, b) >= 0 for a, b in pairwise(values)]
    start = np.array([i + (not up) for i, up in enumerate(upward)])
    end = 2 * np.arange(len(upward)) + 1 - start
    pairs = [(values[i], values[j]) for i, j in zip(start, end)]
    if not all(_exact_share(near, far, wide) for near, far in pairs):
        return None
    near = np.array([float(a) for a, _ in pairs], real)
    step = np.array([float(abs(b - a)) for a, b in pairs], real)
    cells = np.array([float_below(v, wide, True) for v in values[1:]], real)
    bits = np.array([float(values[0]), float(values[-1])], real).view(f"i{wide // 8}")
    low, high = (int(v) for v in ordered(bits, wide))
    return Steps(near, step, start, end, cells, (low, high))


def _exact_share(near: Fraction, far: Fraction, wide: int) -> bool:
    """Whether ``(x - near) / (far - near)`` follows exactly from a float x between the two: that is so where
    the difference is a float itself, or where the step is a power of two and the difference is but cut."""
    step, p = abs(far - near), 24 if wide == 32 else 53
    if not all(_is_float(v, wide) for v in (near, step)):
        return False
    if near == 0:
        return True
    if (near < 0) != (far < 0) and far != 0:
        return step == Fraction(2) ** _exponent(step)
    last = _exponent(Fraction(near.numerator & -near.numerator, near.denominator))
    coarse = last >= _exponent(far) - (p - 1)
    close = step <= Fraction(2) ** (p + min(last, _exponent(near) - (p - 1)))
    return coarse or close


def _is_float(v: Fraction, wide: int) -> bool:
    """Whether v is a normal float of the width, not too near the largest, or zero."""
    lowest, top = (2.0**-126, 2.0**127) if wide == 32 else (2.0**-1022, 2.0**1023)
    y = float(v)
    if not (y == 0 or lowest <= abs(y) < top):
        return False
    return (float(np.float32(y)) if wide == 32 else y).as_integer_ratio() == (v.numerator, v.denominator)


def refused(fmt: Table) -> str:
    """Why stochastic rounding to the format is not possible."""
    if isinstance(fmt, Log):
        return f"stochastic rounding to {fmt}: the share of an irrational step has no exact value"
    return (
        f"stochastic rounding to {fmt} is not exact: its values or the steps between them are no floats of the "
        "source's width, or two on either side of zero are no power of two apart; round the values, or give a "
        "float64 array"
    )


def _drawn(xp: Backend, x: Array, fmt: Table, draws: Draws) -> Array:
    """Indices chosen with odds linear in the value, the share of the step that x has covered from the end nearer
    to zero; between neighbours on either side of zero, from the lower one or the one of smaller magnitude."""
    wide = xp.width(x)
    plan = steps(fmt, wide)
    if plan is None:
        raise ValueError(refused(fmt))
    keys = ordered(xp.view(x, xp.ints[wide]), wide)
    inside = xp.view(ordered(xp.clip(keys, *plan.ends), wide), xp.floats[wide])
    cell = xp.clip(_search(xp, inside, plan.cells), 0, len(plan.start) - 1)
    near, step = (split(xp, xp.take(xp.constant(v, xp.floats[wide], x), cell)) for v in (plan.near, plan.step))
    start, end = (xp.take(xp.constant(v, xp.ints[wide], x), cell) for v in (plan.start, plan.end))
    covered = distance(xp, split(xp, inside), near)
    share = divide(xp, covered, step)
    # a step that is a power of two only moves the exponent: no bit is cut
    power = less(step.significand, (1 << step.top) + 1, wide)
    moved = covered._replace(exponent=covered.exponent - step.exponent)
    threshold = select(power, _threshold(xp, moved, draws), _threshold(xp, share, draws))
    if isinstance(fmt, Posit):  # what is not zero never becomes zero
        from_zero = less(near.significand, 1, wide) & less(0, covered.significand, wide)
        threshold = select(from_zero, (1 << draws.bits) + 0 * threshold, threshold)
    up = less((1 << draws.bits) - 1 - threshold, xp.astype(draws.value, xp.ints[wide]), wide)
    return select(up, end, start)


def _threshold(xp: Backend, share: Parts, draws: Draws) -> Array:
    """So many of the ``2**bits`` draws go up."""
    extra = draws.bits + (draws.threshold == "nearest")
    cut = share.significand >> xp.clip(share.top - extra - share.exponent, 0, share.wide - 1)
    return (cut + 1) >> 1 if draws.threshold == "nearest" else cut
